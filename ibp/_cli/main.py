"""The entry point of the command line: finds the command, runs it, and turns errors into one line and an exit
status."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from . import output
from .output import INTERRUPTED, USAGE, WRONG
from .parsing import make_parser

# The module of each command. Its function of the command's name does the work and returns the exit status.
_MODULES = {
    "compress": "writing",
    "decompress": "writing",
    "verify": "comparing",
    "inspect": "describing",
    "estimate": "describing",
    "diff": "comparing",
    "apply": "writing",
    "doctor": "doctor",
}
_BROKEN_PIPE, _TERMINATED = 141, 143  # Further exit statuses (see `output`).
_OLD_WORDS = {"bench": "doctor"}  # Maps a command's name in earlier versions to its present name.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns its exit status. argv: the words after the program's name. None: sys.argv[1:]."""
    try:
        arguments = _parsed(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = _run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as ended:  # argparse raises this after it has printed the reason.
        return ended.code if isinstance(ended.code, int) else USAGE
    except KeyboardInterrupt:
        return _complain("ibp: interrupted", INTERRUPTED)
    except BrokenPipeError:  # Discard the buffered output, including what is flushed when the process ends.
        with contextlib.suppress(OSError, ValueError):  # These are raised if stdout is not a file.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def program() -> NoReturn:
    """Runs `main`, and ends the process with its exit status. SIGTERM raises SystemExit, so that the command cleans up
    as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    sys.exit(main())


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. If a command does not know an argument, the error names that command, not only `ibp`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _OLD_WORDS:
        old, words[0] = words[0], _OLD_WORDS[words[0]]
        if not {"-q", "--quiet"} & set(words):
            _complain(f"ibp: `ibp {old}` is now `ibp {words[0]}`, which runs", 0)
    arguments, unknown = make_parser().parse_known_args(words)
    if unknown:
        prog = f"ibp {arguments.command}"
        line = f"{prog}: unrecognized arguments: {output.one_line(' '.join(unknown))}; see {prog} --help"
        raise SystemExit(_complain(line, USAGE))
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    prefix = f"ibp {arguments.command}"
    try:
        module = importlib.import_module(f".{_MODULES[arguments.command]}", __package__)
        status: int = getattr(module, arguments.command)(arguments)
        return status
    except output.Failure as failure:
        return _complain(f"{prefix}: {failure}", failure.status)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError, ImportError) as error:
        ibp = sys.modules.get("ibp")  # None if ibp could not be imported.
        of_damage = () if ibp is None else (ibp.ChecksumError, ibp.CorruptTableError, ibp.deltas.DeltaMismatchError)
        return _complain(f"{prefix}: {output.sentence(error)}", WRONG if isinstance(error, of_damage) else USAGE)


def _complain(line: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(line, file=sys.stderr)
    return status


def _show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    _complain(f"ibp: warning: {output.one_line(str(message))}", 0)
