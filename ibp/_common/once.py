"""Warnings that a process gives once."""

from __future__ import annotations

import warnings

said: set[str] = set()  # the texts, or what stands for them


def warn_once(message: str, *, key: str | None = None, stacklevel: int = 2) -> None:
    """Warns, unless the process has warned of the same key before.

    Args:
        message: of the RuntimeWarning.
        key: what messages that differ have in common; None: the message.
        stacklevel: as of `warnings.warn`, seen from the caller.
    """
    key = message if key is None else key
    if key not in said:
        said.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)
