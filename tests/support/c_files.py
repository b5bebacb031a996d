"""Reads files with the C reader (ibp_file.h) through ctypes, and returns what it finds as Python values."""

import ctypes
import functools
import mmap
import re
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

import ibp

MAX_DIMS = 64
OK, BAD_FILE, NEWER_FILE, NOT_IN_FILE, UNSUPPORTED_TABLE, WRONG_CHECKSUM = 0, 7, 8, 9, 10, 11
HASH = ctypes.CFUNCTYPE(c_uint64, c_void_p, c_size_t)


class Text(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("num_bytes", c_size_t)]


class Refusal(ctypes.Structure):
    _fields_ = [("found", Text), ("wanted", c_char_p), ("key", c_char_p)]


class FileView(ctypes.Structure):
    _fields_ = [
        ("bytes", c_void_p),
        ("num_bytes", c_size_t),
        ("header", Text),
        ("metadata", Text),
        ("data", c_void_p),
        ("data_bytes", c_size_t),
        ("version", c_uint32),
        ("release", Text),
        ("num_tensors", c_size_t),
        ("num_tables", c_size_t),
        ("refusal", Refusal),
    ]


class TensorView(ctypes.Structure):
    _fields_ = [
        ("name", Text),
        ("dtype", Text),
        ("num_dims", c_uint32),
        ("shape", c_int64 * MAX_DIMS),
        ("data", c_void_p),
        ("num_bytes", c_size_t),
        ("start", c_size_t),
    ]


class FoundTable(ctypes.Structure):
    _fields_ = [
        ("dtype", Text),
        ("num_dims", c_uint32),
        ("shape", c_int64 * MAX_DIMS),
        ("num_items", c_int64),
        ("item_bytes", c_int64),
        ("scheme", c_int),
        ("row_bytes", c_uint32),
        ("slot_bytes", c_uint32),
        ("rows_per_base", c_uint32),
        ("codebook", c_uint32),
        ("has_content", c_bool),
        ("is_delta", c_bool),
        ("content", c_uint64),
        ("base", c_uint64),
        ("result", c_uint64),
        ("codec", Text),
        ("workspace_bytes", c_size_t),
        ("name", c_char_p),
        ("files", c_void_p),
        ("num_files", c_size_t),
        ("file", c_size_t),
        ("refusal", Refusal),
    ]


@functools.cache
def core():
    """Returns the library of the ibp that is imported."""
    major, minor = re.match(r"(\d+)[.](\d+)", ibp._core.version()).groups()
    suffix = f"{major}.{minor}" if major == "0" else major
    library = ctypes.CDLL(str(Path(ibp.get_library_dir()) / f"libibp.so.{suffix}"))
    library.ibp_scratch_bytes.restype = c_size_t
    library.ibp_copy_text.restype = c_size_t
    library.ibp_copy_text.argtypes = [Text, c_char_p, c_size_t]
    library.ibp_is_part.restype = c_bool
    library.ibp_decode_bytes.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_size_t, c_void_p]
    library.ibp_open_table.argtypes = [c_void_p, c_void_p, c_size_t, c_void_p]
    library.ibp_find_table.argtypes = [c_void_p, c_size_t, c_char_p, c_void_p]
    library.ibp_open_file.argtypes = [c_void_p, c_size_t, c_void_p]
    library.ibp_check_file.argtypes = [POINTER(FileView), HASH, POINTER(c_uint64)]
    return library


def text_of(text):
    size = core().ibp_copy_text(text, None, 0)
    room = ctypes.create_string_buffer(size + 1)
    core().ibp_copy_text(text, room, size + 1)
    return room.raw[:size].decode()


class Failed(Exception):
    """A status of the C library other than OK."""

    def __init__(self, status):
        super().__init__(status)
        self.status = status


def require(status):
    if status != OK:
        raise Failed(status)


def pages(num_bytes):
    """Returns memory that is aligned to a page, and its address."""
    memory = mmap.mmap(-1, max(num_bytes, 1))
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


class OpenFile:
    """A file or a set of files in memory. Raises Failed if the C library refuses it."""

    def __init__(self, *contents):
        self.memory, self.views = [], (FileView * len(contents))()
        for content, view in zip(contents, self.views, strict=True):
            memory, address = pages(len(content))
            memory[: len(content)] = content
            self.memory.append(memory)
            require(core().ibp_open_file(address, len(content), byref(view)))

    def tables(self):
        """Returns the names of the tables."""
        names, text = [], Text()
        for view in self.views:
            at = c_size_t(0)
            while core().ibp_next_table(byref(view), byref(at), byref(text)) == OK:
                names.append(text_of(text))
        return names

    def plain(self):
        """Returns {name: (dtype, shape, bytes)} of the tensors that are not parts of tables."""
        found, tensor = {}, TensorView()
        for view in self.views:
            at = c_size_t(0)
            while core().ibp_next_tensor(byref(view), byref(at), byref(tensor)) == OK:
                if core().ibp_is_part(byref(view), byref(tensor)):
                    continue
                data = ctypes.string_at(tensor.data, tensor.num_bytes)
                found[text_of(tensor.name)] = (text_of(tensor.dtype), tensor.shape[: tensor.num_dims], data)
        return found

    def table(self, name):
        """Returns (dtype, shape, decoded bytes) of a table."""
        found, table, fault = FoundTable(), ctypes.create_string_buffer(1024), (c_int64 * 4)()
        kept = name.encode()  # These bytes have to live as long as `found`.
        require(core().ibp_find_table(self.views, len(self.views), kept, byref(found)))
        workspace, address = pages(found.workspace_bytes)
        require(core().ibp_open_table(byref(found), address, found.workspace_bytes, table))
        num_bytes = found.num_items * found.item_bytes
        out = ctypes.create_string_buffer(max(num_bytes, 1))
        scratch_bytes = core().ibp_scratch_bytes(found.row_bytes)
        scratch = ctypes.create_string_buffer(scratch_bytes)
        require(core().ibp_decode_bytes(table, 0, num_bytes, out, scratch, scratch_bytes, fault))
        del workspace, kept
        return text_of(found.dtype), found.shape[: found.num_dims], out.raw[:num_bytes]

    def check(self, hash_of):
        """Returns the status of the checksums of the first file, and the number of the wrong block. hash_of: the hash
        of bytes."""
        block = c_uint64(0)
        called = HASH(lambda address, size: hash_of(ctypes.string_at(address, size)))
        return core().ibp_check_file(byref(self.views[0]), called, byref(block)), block.value
