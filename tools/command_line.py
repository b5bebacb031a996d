"""Writes the man page of the command line, and the outputs of the examples in docs/cli.md.

    python tools/command_line.py            write them
    python tools/command_line.py --check    exit with 1 if a page is not current

If a block of docs/cli.md begins with "$ ibp", its commands run one after the other, on the CPU, in a directory with
this repository's data/, and the block gets what they print.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ibp._cli import main  # noqa: E402
from tools.run_notebook import inside  # noqa: E402

MAN_PAGE = ROOT / "docs" / "ibp.1"
PAGE = ROOT / "docs" / "cli.md"


def commands(parser):
    """Returns name -> parser of the commands, in the order of the help."""
    action = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return action.choices


# ---- the man page ----


def man_page():
    parser = main.make_parser()
    lines = [
        '.TH IBP 1 "" "ibp" "User Commands"',
        ".SH NAME",
        r"ibp \- lossless compression of tensors",
        ".SH SYNOPSIS",
        ".B ibp",
        r"[\-\-version] [\-\-help]",
        r".I COMMAND",
        "[arguments]",
        ".SH DESCRIPTION",
        *verbatim(parser.description),
        ".SH COMMANDS",
    ]
    for command in commands(parser).values():
        lines += [f".SS {roff(command.prog)}", roff(usage(command)), ".PP"]
        lines += [*verbatim(command.description), *options(command)]
        lines += verbatim(command.epilog) if command.epilog else []
    status = parser.epilog.partition("exit status:\n")[2].partition("\n\n")[0]
    lines += [".SH EXIT STATUS", *verbatim(status), ".SH ENVIRONMENT", ".TP", ".B NO_COLOR", "No colours, if set."]
    lines += [".SH SEE ALSO", "The pages of the documentation: docs/cli.md, csrc/FORMAT.md."]
    return "\n".join(lines) + "\n"


def usage(command):
    return " ".join(command.format_usage().removeprefix("usage: ").split())


def options(command):
    lines = []
    for action in command._actions:
        if action.help == argparse.SUPPRESS:  # a former spelling
            continue
        value = command._get_formatter()._format_args(action, action.metavar or action.dest.upper())
        names = ", ".join(action.option_strings) or value
        takes_value = action.option_strings and action.nargs != 0
        lines += [
            ".TP",
            f".B {roff(names)}" + (f" {roff(value)}" if takes_value else ""),
            roff(helped(command, action)),
        ]
    return lines


def helped(command, action):
    return command._get_formatter()._expand_help(action)


def verbatim(text):
    """Returns the lines of a text as roff that keeps their layout."""
    return [".nf", *(roff(line) or ".sp" for line in text.splitlines()), ".fi"]


def roff(text):
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped)


# ---- docs/cli.md ----


def examples(text):
    """Returns a page in which examples have the output of their commands. Also runs the examples in Python."""

    def done(block):
        kind, content = block[1], block[2]
        if kind == "python":
            exec(content, {})
        return block[0] if kind == "python" else f"```text\n{session(content)}```"

    with tempfile.TemporaryDirectory() as folder, inside(folder):
        os.symlink(ROOT / "data", "data")
        return re.sub(r"```(python|text)\n((?:(?<=python\n)|\$ ibp ).*?)```", done, text, flags=re.DOTALL)


def session(block):
    """Runs the commands of a block and returns each of them with its output."""
    lines = []
    for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main.main(shlex.split(command)[1:])
        lines += [f"$ {command}", *(line.rstrip() for line in printed.getvalue().splitlines())]
    return "\n".join(lines) + "\n"


def run():
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    arguments.add_argument("--check", action="store_true")
    check, stale = arguments.parse_args().check, []
    for path, text in ((MAN_PAGE, man_page()), (PAGE, examples(PAGE.read_text()))):
        if path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    print(f"{'not current' if check else 'written'}: {', '.join(stale)}" if stale else "all is current")
    return check and bool(stale)


if __name__ == "__main__":
    sys.exit(run())
