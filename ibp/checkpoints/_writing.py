"""`CheckpointWriter`, which writes a file of tables and tensors one by one, and `is_coded`, which recognises files of
ibp."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .._common.process import Closing
from .._common.sequences import ahead
from .._files import (
    FORMAT,
    MAX_HEADER_BYTES,
    SUFFIX,
    FileWriter,
    PathLike,
    check_names_safetensors,
    entry_of,
    header_room,
    open_regular,
    path_text,
    write_plain,
    write_table,
    written_to,
)
from .._tables.compressed_tensor import CompressedTensor

_AHEAD = 1  # number of tensors that wait in memory while another tensor is written
# Bytes that are reserved in the header for each dimension; `header_room` alone suffices for at most 8 dimensions.
_DIMENSION_BYTES = 32
# Matches names that the format reserves, and the form of names that the format gives to parts of a table or of a
# tensor.
_UNUSUAL_NAME = re.compile(r"ibp\.|__metadata__|.*[:\[]", re.DOTALL)


class CheckpointWriter(Closing):
    """A file of tables and tensors that is written tensor by tensor, for programs that produce tensors one after the
    other. For tensors that are in memory already, `ibp.save` is simpler. `ibp.open` reads the file.

    It is a context manager. When the `with` block ends normally, the file appears under its name, complete and on disk.
    When the block ends with an exception, an earlier file of that name stays unchanged.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> with ibp.checkpoints.CheckpointWriter("weights.safetensors", {"a": x.shape, "b": [4]}) as writer:
        ...     a_bytes = writer.write("a", ibp.compress(x))
        ...     b_bytes = writer.write("b", torch.ones(4))
        >>> a_bytes < x.nbytes, torch.equal(ibp.open("weights.safetensors")["b"], torch.ones(4))
        (True, True)

    Args:
        output: path of the file; or a directory, in which the file is "model.safetensors"; or a URL that fsspec
            supports.
        shapes: the shapes, by name, of all tables and tensors that will be written, so that enough space is reserved
            for the header.
        metadata: a dict of strings, which is stored in the file. No key may begin with "ibp.".

    Raises:
        TypeError, ValueError: metadata is invalid, or output has the suffix of another format.
        OSError: (on entering, writing and leaving) the file cannot be written.
    """

    def __init__(
        self,
        output: PathLike,
        shapes: Mapping[str, Sequence[int]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        check_names_safetensors(output)
        room = header_room(shapes, metadata, len(shapes)) + _DIMENSION_BYTES * sum(map(len, shapes.values()))
        self._output, self._metadata, self._header_bytes = output, metadata, room
        self._file: FileWriter | None = None
        self._open = contextlib.ExitStack()

    @staticmethod
    def takes(name: str, tensor: torch.Tensor) -> bool:
        """Returns whether a file can hold a tensor under a name.

        The tensor must be a dense torch.Tensor or torch.nn.Parameter, not of another subclass, and have a dtype of
        safetensors. The name must be printable. It must not be reserved, and must not have the form of the name of a
        part of a table, such as "weight:slots".

        Example:
            >>> [ibp.checkpoints.CheckpointWriter.takes(name, torch.ones(3)) for name in ("weight", "weight:slots")]
            [True, False]
        """
        if not name.isprintable() or _UNUSUAL_NAME.match(name):
            return False
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        return is_plain and entry_of(tensor.dtype, tuple(tensor.shape)) is not None and not tensor.is_meta

    def write(self, name: str, value: CompressedTensor | torch.Tensor) -> int:
        """Writes a table or tensor, block by block. The value may be on any device. Returns the number of bytes that
        the value takes in the file.

        Raises:
            ValueError: the file is not open, already has a value of this name, or cannot have such a name; or
                safetensors does not have the tensor's dtype.
        """
        file = self._file
        if file is None:
            raise ValueError("the file is not open; wanted `with ibp.checkpoints.CheckpointWriter(...) as writer:`")
        start = file.data_bytes
        if isinstance(value, CompressedTensor):
            write_table(file, name, value)
        else:
            write_plain(file, name, value)
        return file.data_bytes - start

    def write_all(self, values: Iterable[tuple[str, CompressedTensor | torch.Tensor]]) -> dict[str, int]:
        """Writes tables and tensors. A separate thread writes a value while the calling thread gets the next one from
        `values`. Returns the sizes of the values in the file in bytes, by name. values: pairs (name, value)."""
        with ThreadPoolExecutor(1, "ibp-writer") as thread:
            written = ahead(thread, lambda pair: (pair[0], self.write(*pair)), values, _AHEAD)
            with contextlib.closing(written):
                return dict(written)

    def __enter__(self) -> CheckpointWriter:
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(written_to(self._output))
            file = FileWriter(target, metadata=self._metadata, header_bytes=self._header_bytes)
            self._file = stack.enter_context(file)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._file = None
        self._open.__exit__(*error)  # type: ignore[arg-type]

    def close(self) -> None:
        """Finishes the file, as leaving the `with` block without an exception does. A second call does nothing."""
        self.__exit__(None, None, None)


def is_coded(path: PathLike) -> bool:
    """Returns whether a file is a file of ibp. Only the header is read. Returns False for a file of another format.

    Example:
        >>> ibp.save("coded.safetensors", {"a": ibp.compress(torch.ones(1000, 1024))})
        >>> ibp.checkpoints.is_coded("coded.safetensors"), ibp.checkpoints.is_coded("pytorch_model.bin")
        (True, False)

    Raises:
        OSError: a file whose name ends in ".safetensors" cannot be read.
    """
    text = path_text(path)
    if not text.endswith(SUFFIX):
        return False
    with os.fdopen(open_regular(text), "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        return header_bytes <= MAX_HEADER_BYTES and f'"{FORMAT}":'.encode() in file.read(header_bytes)
