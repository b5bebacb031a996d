"""The frame of the command line: finds the command, runs it, and turns errors into one line and an exit status."""

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

# exit statuses other than 0, which means success
WRONG, USAGE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 1, 2, 130, 141, 143

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
    """Returns the parser of the whole command line."""
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
    """Returns the version of this library, from its installed header."""
    header = Path(__file__).parent.parent / "include" / "ibp.h"
    found = re.search(r'#define IBP_VERSION "([^"]+)"', header.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, or that of the process if none is given. Returns its exit status."""
    try:
        arguments = _parsed(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = _run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as ended:  # raised by argparse, which has printed the reason
        return ended.code if isinstance(ended.code, int) else USAGE
    except KeyboardInterrupt:
        return _complain("ibp: interrupted", INTERRUPTED)
    except BrokenPipeError:  # discard what is still buffered, also when the process ends
        with contextlib.suppress(OSError, ValueError):  # stdout is not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def program() -> NoReturn:
    """Runs `main` as a process. SIGTERM cleans up like Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    sys.exit(main())


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments. An argument that a command does not know is an error of that command."""
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
    """Returns whether an error is about wrong data, and not about what the user asked for. ibp is imported by then,
    if possible."""
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
