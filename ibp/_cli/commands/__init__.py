"""The commands, each in a module of its own. A module has

HELP: str, a line for the list of commands.
DESCRIPTION, EPILOG: str, the beginning and the end of the command's own help. The first line of a description is a
whole sentence.
add(parser): adds the command's arguments to a parser. run(arguments) -> int: does the work and returns the exit status.
It imports ibp and torch when it needs them, not before.

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
