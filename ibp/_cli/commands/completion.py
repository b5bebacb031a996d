"""`ibp completion`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..output import Failure

HELP = "print what completes this command line in a shell"
DESCRIPTION = """\
Print what completes commands, options and files in a shell.

In bash, put this line into ~/.bashrc:

  eval "$(ibp completion bash)"

In zsh, write it to a directory of $fpath, and start a new shell:

  ibp completion zsh > ~/.zsh/completions/_ibp"""
EPILOG = ""
SCRIPTS = {"bash": "ibp", "zsh": "_ibp"}
FOLDER = Path(__file__).parent.parent / "completion"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SCRIPTS), metavar="SHELL", help="bash or zsh")


def run(arguments: argparse.Namespace) -> int:
    script = FOLDER / SCRIPTS[arguments.shell]
    if not script.is_file():
        raise Failure(f"{script} is missing: ibp is not installed whole")
    sys.stdout.write(script.read_text(encoding="utf-8"))
    return 0
