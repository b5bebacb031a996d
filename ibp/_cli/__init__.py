"""The command line.

`main.py` has the options and the help of all commands, and finds and runs a command. `output.py` prints results and has
the exit statuses. `work.py` has what several commands need for their work: devices, threads, inputs and outputs.

Four modules have a function for each command, which does the work and returns the exit status: `writing.py` for the
commands that write files of tensors, `comparing.py` for those that compare, `describing.py` for those that describe
files, and `doctor.py` for the one that tests the installation. `ibp inspect` stands on three more: `splitting.py` finds
out what the bytes and bits of a table are used for, `report.py` makes the reports on tensors and files, and
`drawing.py` draws them as a plot and as an HTML page. `config.py` has `ibp.show_config`, which `doctor` prints, too.

The module of a command is imported only when the command runs, because importing ibp and torch takes seconds.
ibp_command.py, a file beside the package `ibp`, loads this folder under another name without importing ibp, so that
help is shown at once. For this reason, the modules of this folder import each other by relative names, and `ibp` by its
absolute name.
"""
