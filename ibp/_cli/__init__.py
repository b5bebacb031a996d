"""The command line.

`main.py` has the options and the help of all commands, and finds and runs a command. `output.py` prints results and has
the exit statuses. `work.py` has what several commands need for their work: devices, threads, inputs and outputs.

Three modules have a function for each command, which does the work and returns the exit status: `files.py` for the
commands that write and compare files of tensors, `describing.py` for those that describe files, as tables, as a plot
and as an HTML page, and `doctor.py` for the one that describes the installation and tests it. `report.py` makes the
reports on tensors and files that `ibp inspect` shows, and finds out what their bytes and bits are used for.

The module of a command is imported only when the command runs, because importing ibp and torch takes seconds.
ibp_command.py, a file beside the package `ibp`, loads this folder under another name without importing ibp, so that
help is shown at once. For this reason, the modules of this folder import each other by relative names, and `ibp` by its
absolute name.
"""
