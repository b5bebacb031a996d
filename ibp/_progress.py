"""Progress bars."""

from __future__ import annotations

import os
import threading

import tqdm as _tqdm


class tqdm(_tqdm.tqdm):
    """tqdm's bar, with a lock of this process alone. Its own one is shared with processes that are forked, and is taken
    for bars that are not shown too: a process that is killed while it has it would stop all others for good."""

    _lock = threading.RLock()


os.register_at_fork(after_in_child=lambda: tqdm.set_lock(threading.RLock()))
