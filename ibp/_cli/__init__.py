"""The command line, a module for each command, with a function run(arguments) that does the work and returns the exit
status. The modules import each other by relative names, and those of commands are imported when they run, because ibp
and torch take seconds. ibp_command.py, beside the package, loads this folder without importing ibp, so that help is
shown at once."""
