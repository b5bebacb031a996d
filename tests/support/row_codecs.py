"""Encodes single rows with the C core (ibp_rows.h) through ctypes: `RowCodec` of scheme ibp, `PlanesCodec` of scheme
planes."""

import ctypes
import functools
from ctypes import byref, c_bool, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p

import numpy as np

import c_files
import ibp

OK = 0
MAX_PLANES = 4
NO_CODED_FORM = 2**32 - 1


class Planes(ctypes.Structure):
    _fields_ = [
        ("entries", c_void_p),
        ("default_value", c_uint64),
        ("closed_value", c_uint64),
        ("element_bytes", c_uint32),
        ("residual_bits", c_uint32),
        ("rotate", c_uint32),
        ("num_planes", c_uint32),
        ("num_entries", c_uint32),
        ("symbol_bytes", c_uint32),
        ("digit_bits", c_uint8 * MAX_PLANES),
        ("per_column", c_bool),
        ("listed", c_bool),
        ("consecutive", c_bool),
        ("signed_default", c_bool),
        ("invariant_bits", c_uint32),
        ("invariant_value", c_uint64),
        ("first_symbol", c_uint64),
        ("num_constant", c_uint32),
        ("live_columns", c_void_p),
        ("row_template", c_void_p),
    ]


class Codebook(ctypes.Structure):
    _fields_ = [
        ("scheme", c_int),
        ("row_bytes", c_uint32),
        ("mask", c_void_p),
        ("bitval", c_void_p),
        ("flags", c_void_p),
        ("chunk_bytes", c_uint32),
        ("num_flags", c_uint32),
        ("planes", Planes),
        ("num_clusters", c_uint32),
        ("cluster_stride", c_uint32),
        ("cluster_flags", c_void_p),
    ]


@functools.cache
def core():
    library = c_files.core()
    for name in ("ibp_coded_row_bytes", "ibp_codebook_words"):
        getattr(library, name).restype = c_size_t
    return library


def check(status):
    if status != OK:
        raise ValueError(ibp._core.status_string(status))


class Codec:
    """A codebook, made by a function of the core that fills in `book`. `_kept` holds the memory that it points to."""

    def __init__(self, *kept):
        self.book, self._kept = Codebook(), kept

    @property
    def row_bytes(self):
        return self.book.row_bytes

    @property
    def num_flags(self):
        return self.book.num_flags

    def _scratch(self):
        size = core().ibp_scratch_bytes(c_uint32(self.row_bytes))
        return ctypes.create_string_buffer(size), c_size_t(size)

    def _row(self, row):
        row = bytes(row)
        if len(row) != self.row_bytes:
            raise ValueError(f"the row has {len(row)} bytes; wanted {self.row_bytes}")
        return row

    def coded_bytes(self, row):
        """Returns the size of a row as coded, or None if the row has no coded form."""
        size = core().ibp_coded_row_bytes(byref(self.book), self._row(row), *self._scratch())
        return None if size == NO_CODED_FORM else size

    def encode(self, row):
        size = self.coded_bytes(row)
        if size is None:
            raise ValueError("the row has no coded form")
        coded, written = ctypes.create_string_buffer(size), c_size_t()
        check(
            core().ibp_encode_row(
                byref(self.book), self._row(row), coded, c_size_t(size), byref(written), *self._scratch()
            )
        )
        return coded.raw[: written.value]

    def decode(self, coded):
        coded, row = bytes(coded), ctypes.create_string_buffer(self.row_bytes)
        check(core().ibp_decode_row(byref(self.book), coded, c_size_t(len(coded)), row, *self._scratch()))
        return row.raw


class RowCodec(Codec):
    def __init__(self, mask, bitval, chunk_bytes, flag_all=False):
        mask, bitval = bytes(mask), bytes(bitval)
        assert len(mask) == len(bitval)
        words = np.empty(3 * core().ibp_codebook_words(c_uint32(len(mask))), np.uint32)
        super().__init__(words)
        sizes = c_uint32(len(mask)), c_uint32(chunk_bytes), c_bool(flag_all)
        check(core().ibp_build_codebook(mask, bitval, *sizes, c_void_p(words.ctypes.data), byref(self.book)))


class PlanesCodec(Codec):
    def __init__(
        self,
        row_bytes,
        element_bytes,
        rotate,
        residual_bits,
        digit_bits,
        per_column,
        listed,
        default,
        closed,
        entries,
        *,
        first_symbol=None,
        live_columns=(),
        row_template=b"",
        **others,
    ):
        if len(digit_bits) > MAX_PLANES or max(digit_bits, default=0) > 255:
            raise ValueError(f"digits of {digit_bits} bits do not fit an ibp_planes")
        entries, template = (np.frombuffer(bytes(given) + bytes(8), np.uint8) for given in (entries, row_template))
        live = np.array(live_columns, np.uint16)
        super().__init__(entries, template, live)
        planes = Planes(
            entries=entries.ctypes.data,
            default_value=default,
            closed_value=closed,
            element_bytes=element_bytes,
            residual_bits=residual_bits,
            rotate=rotate,
            num_planes=len(digit_bits),
            digit_bits=tuple(digit_bits),
            per_column=per_column,
            listed=listed,
            consecutive=first_symbol is not None,
            first_symbol=first_symbol or 0,
            **others,
        )
        if len(row_template):
            if len(row_template) != row_bytes or len(live) * element_bytes > row_bytes:
                raise ValueError("the template is not a row, or there are more live columns than columns")
            planes.num_constant = row_bytes // element_bytes - len(live)
            planes.live_columns, planes.row_template = live.ctypes.data, template.ctypes.data
        size = c_size_t(len(entries) - 8)
        check(core().ibp_build_planes_codebook(byref(planes), c_uint32(row_bytes), size, byref(self.book)))
        check(core().ibp_check_codebook(byref(self.book)))
        if self.book.num_clusters > 1:
            raise ValueError("entries holds more than one set of entries")
