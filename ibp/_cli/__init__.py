"""The command line. Its modules import each other by relative names, and ibp and torch only where a command runs:
ibp_command.py, beside the package, loads this folder without importing ibp, so that help comes at once."""
