"""The frame: finds the command, runs it, and turns what goes wrong into one line and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import output, parsing
from .commands import COMMANDS

WRONG, USAGE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 1, 2, 130, 141, 143  # exit statuses, but 0: done

_DESCRIPTION = """\
Lossless compression of tensors.

Checkpoints and arrays become smaller files, which are safetensors, and every
bit comes back: weights are checked, read row by row, or decoded as a whole."""
_EPILOG = """\
exit status:
  0    done
  1    data is wrong: a checksum differs, a file is damaged, or diff --exit-code
       found a difference
  2    wrong usage, or an input that cannot be read
  130  interrupted

ibp COMMAND --help says more about a command."""


def make_parser() -> parsing.Parser:
    """The parser of the whole command line."""
    parser = parsing.Parser(prog="ibp", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"ibp {version()}", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for name in COMMANDS:
        module = _module(name)
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION, epilog=module.EPILOG)
        module.add(command)
        parsing.add_common(command)
    return parser


def version() -> str:
    """Of this library, from its installed header."""
    header = Path(__file__).parent.parent / "include" / "ibp.h"
    found = re.search(r'#define IBP_VERSION "([^"]+)"', header.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, that of the process if none is given; its exit status."""
    try:
        arguments = _parsed(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = _run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as ended:  # by argparse, which has said why
        return ended.code if isinstance(ended.code, int) else USAGE
    except KeyboardInterrupt:
        return _complain("ibp: interrupted", INTERRUPTED)
    except BrokenPipeError:  # what is still buffered goes nowhere, also when the process ends
        with contextlib.suppress(OSError, ValueError):  # stdout is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def program() -> NoReturn:
    """`main` as a process: SIGTERM cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    sys.exit(main())


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; what a command does not know is its own error."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        prog = f"ibp {arguments.command}"
        line = f"{prog}: unrecognized arguments: {output.one_line(' '.join(unknown))}; see {prog} --help"
        raise SystemExit(_complain(line, USAGE))
    return arguments


def _module(name: str) -> Any:
    return importlib.import_module(f".commands.{name}", __package__)


def _run(arguments: argparse.Namespace) -> int:
    prefix = f"ibp {arguments.command}"
    try:
        status: int = _module(arguments.command).run(arguments)
        return status
    except output.Failure as failure:
        return _complain(f"{prefix}: {failure}", failure.status)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError, ImportError) as error:
        return _complain(f"{prefix}: {output.sentence(error)}", WRONG if _is_damage(error) else USAGE)


def _is_damage(error: BaseException) -> bool:
    """Whether data is wrong, and not what was asked for. ibp is imported by then, where it can be."""
    ibp = sys.modules.get("ibp")
    return ibp is not None and isinstance(
        error, (ibp.ChecksumError, ibp.CorruptTableError, ibp.deltas.DeltaMismatchError)
    )


def _complain(line: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(line, file=sys.stderr)
    return status


def _show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    _complain(f"ibp: warning: {output.one_line(str(message))}", 0)
