"""The command line. Each command has a module, whose function run(arguments) does the work and returns the exit status.

The module of a command is imported only when the command runs, because importing ibp and torch takes seconds.
ibp_command.py, a file beside the package `ibp`, loads this folder without importing ibp, so that help is shown at once.
For this reason, the modules of this folder import each other by relative names."""
