"""The command line. Its modules import each other by relative names, and import ibp and torch only when a command
runs. ibp_command.py, beside the package, loads this folder without importing ibp, so that help is shown at once."""
