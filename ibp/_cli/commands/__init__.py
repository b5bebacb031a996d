"""The commands, a module each. A module has

HELP: str, a line for the list of commands.
DESCRIPTION, EPILOG: str, what its own help begins and ends with. The first line of a description is a whole sentence.
add(parser): gives a parser its arguments.
run(arguments) -> int: does the work; the exit status. Imports ibp and torch where it needs them, not before.

After a change of arguments, `python tools/command_line.py` writes the man page and the examples of docs/cli.md again.
"""

COMMANDS = (  # in the order of the help
    "compress",
    "decompress",
    "verify",
    "inspect",
    "estimate",
    "diff",
    "apply",
    "bench",
)
