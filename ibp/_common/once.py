"""Issues each warning once per process."""

from __future__ import annotations

import warnings

said: set[str] = set()  # The keys of the warnings that this process has given.


def warn_once(message: str, *, key: str | None = None, stacklevel: int = 2) -> None:
    """Gives a RuntimeWarning, unless the process has already given one with the same key.

    Args:
        message: the message of the warning.
        key: a string. Of all warnings with the same key, only the first is given. None: the message is the key.
        stacklevel: as in `warnings.warn`. 1: the warning names the line that calls `warn_once`.
    """
    key = message if key is None else key
    if key not in said:
        said.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)
