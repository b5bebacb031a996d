"""Checksums of a file: XXH3 of blocks of its data (FORMAT.md section 9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

BLOCK_BYTES = 1 << 20
HASH = "xxh3_64"


def hash_of(data: Any) -> int:
    """Returns the hash of a contiguous buffer's bytes."""
    return xxhash.xxh3_64_intdigest(data)


def num_bytes(data_bytes: int) -> int:
    """Returns the bytes of the checksums for data_bytes bytes of data: one for each block, one for the header, and
    one for the checksums themselves."""
    return 8 * (-(-data_bytes // BLOCK_BYTES) + 2)


class BlockHasher:
    """Computes the hashes of consecutive blocks of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._hashes: list[int] = []
        self._open, self._missing = xxhash.xxh3_64(), BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        start = 0
        while start < len(data):
            piece = data[start : start + self._missing]
            start += len(piece)
            if len(piece) == BLOCK_BYTES:
                self._hashes.append(hash_of(piece))
                continue
            self._open.update(piece)
            self._missing -= len(piece)
            if self._missing == 0:
                self._close()

    def _close(self) -> None:
        self._hashes.append(self._open.intdigest())
        self._open, self._missing = xxhash.xxh3_64(), BLOCK_BYTES

    def entries(self, header: bytes) -> bytes:
        """Returns the tensor `ibp.checks`: hashes of the blocks, of the header, and of the entries before it."""
        if self._missing < BLOCK_BYTES:
            self._close()
        hashed = np.array([*self._hashes, hash_of(header)], "<u8").tobytes()
        return hashed + np.array([hash_of(hashed)], "<u8").tobytes()
