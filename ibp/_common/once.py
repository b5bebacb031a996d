"""Issues each warning once per process."""

from __future__ import annotations

import warnings

said: set[str] = set()  # the texts or keys of warnings that were given


def warn_once(message: str, *, key: str | None = None, stacklevel: int = 2) -> None:
    """Warns, unless the process has warned of the same key before.

    Args:
        message: the message of the RuntimeWarning.
        key: a text that is the same for messages that count as one. None: the message.
        stacklevel: as in `warnings.warn`, seen from the caller.
    """
    key = message if key is None else key
    if key not in said:
        said.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)
