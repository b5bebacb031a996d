"""`ibp.compress`: makes tables of rows, and codes tensors as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, overload, runtime_checkable

import numpy as np
import torch

from .._common.arguments import near
from .._machine import memory as _memory
from .._rows import geometry as _rows
from .._rows.codebook import AnyCodebook
from .._rows.learning import SCHEMES, Options, Request
from .._tables.coding import compressed, compressed_in_place, warn_of_gradient
from .._tables.compressed_tensor import CompressedTensor
from ._whole import CODECS, WholeTensor, compress_whole, is_general

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SCHEMES_OF_ROWS = ["auto", *SCHEMES]
_OF_ROWS = ("tau", "codebook", "sample", "clusters", "level", "row_bytes", "layout", "slot_bytes")
_NONE_GIVEN = Options()


@runtime_checkable
class Chosen(Protocol):
    """The interface of an `ibp.codecs.Choice`, by which `compress` recognizes one."""

    def compress(self, x: torch.Tensor, **options: Any) -> CompressedTensor | WholeTensor: ...


class CompressOptions(TypedDict, total=False):
    """The arguments of `compress` except x and scheme."""

    chunk_bytes: int | None
    tau: float | None
    codebook: AnyCodebook | None
    sample: float | None
    clusters: int | str | None
    level: str
    layout: str
    slot_bytes: int | None
    row_bytes: int | None
    device: torch.device | str | int | None
    memory: str | None
    numa: _memory.Numa
    inplace: bool
    progress: bool


@overload
def compress(
    x: torch.Tensor | np.ndarray,
    *,
    scheme: Literal["auto", "ibp", "planes", "raw"] = "auto",
    **options: Unpack[CompressOptions],
) -> CompressedTensor: ...
@overload
def compress(
    x: torch.Tensor | np.ndarray, *, scheme: str | Chosen, **options: Unpack[CompressOptions]
) -> CompressedTensor | WholeTensor: ...
def compress(
    x: torch.Tensor | np.ndarray,
    *,
    scheme: str | Chosen = "auto",
    chunk_bytes: int | None = None,
    tau: float | None = None,
    codebook: AnyCodebook | None = None,
    sample: float | None = None,
    clusters: int | str | None = None,
    level: str = "default",
    layout: str = "slots",
    slot_bytes: int | None = None,
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    memory: str | None = None,
    numa: _memory.Numa = None,
    inplace: bool = False,
    progress: bool = False,
) -> CompressedTensor | WholeTensor:
    """Compresses a tensor, bit for bit, into a table whose rows decode alone (the paper's sections 4.1 and 4.2).

    Unless `memory` says otherwise, the table is where x is: on x's GPU, or in host memory, which is pinned if there is
    a CUDA device. If rows would not become smaller, all rows are left raw, and `table.scheme` is "raw". `table.savings`
    is the share of the rows' bytes that is saved, `table.nbytes` the size of the table in memory, and
    `table.link_bytes` the number of bytes that go over the link if every row is fetched once. `estimate` gives these
    numbers beforehand.

    With inplace=True x is compressed within its own memory (the paper's section 5), so that a tensor that fills memory
    can be compressed. Every row keeps its address and then uses only the first bytes there: fetches read less, but no
    memory is freed. Afterwards the memory of x belongs to the table, and the values of x can be read only through the
    table. In addition to x the call needs 2.25 bytes per row and about 128 MiB. With inplace=True, "auto" chooses the
    scheme with the fewest bytes. All analysis is done before the first write. If the call is interrupted after the
    first write, or if the memory cannot be pinned, the exception has an attribute `table`, a table that decompresses to
    x. If the exception has no such attribute, x is unchanged.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> table = ibp.compress(x)
        >>> table.scheme, f"{table.savings:.0%}", torch.equal(table.decompress(), x)
        ('planes', '34%', True)

    Args:
        x: tensor [N, ...] with elements of 1, 2, 4 or 8 bytes, contiguous or not. x itself is not changed. If it
            requires grad, `x.detach()` is compressed: no gradient flows through a table, and a RuntimeWarning says so,
            once per process. A numpy array is treated as the tensor with the same bytes; it may also have ml_dtypes'
            bfloat16 and float8 dtypes.
        scheme: how x is coded. "auto" takes the best scheme for the layout, judged by a sample of rows. In layout
            "slots" it is the scheme whose rows need the fewest bytes to be fetched, among the schemes whose rows a GPU
            fetches and decodes faster than raw rows; in layout "packed" it is the scheme with the fewest bytes. "ibp"
            leaves out invariant bits (the paper's scheme), "planes" codes ranked symbols, and "raw" stores rows
            uncompressed, so that the same kernels can gather them. General codecs are for tensors that are only used as
            a whole; each needs its optional package. On the CPU there are "zstd" and "lz4", also with a level
            ("zstd:9"). On a GPU there are nvCOMP's "nvcomp:ans", "nvcomp:bitcomp", "nvcomp:cascaded", "nvcomp:deflate",
            "nvcomp:gdeflate", "nvcomp:lz4", "nvcomp:snappy" and "nvcomp:zstd". "nvcomp:ans" codes floats as floats or
            as bytes, whichever takes fewer bytes for a sample; "nvcomp:ans:floats" and "nvcomp:ans:bytes" select one of
            the two. "nvcomp:cascaded" has two run-length encodings, one delta encoding and packed bits;
            "nvcomp:cascaded:r1d0b1" asks for one run-length encoding, no delta encoding and packed bits. With a general
            codec the result is an `ibp.codecs.WholeTensor`, and the arguments for rows are refused. An
            `ibp.codecs.Choice` (see `ibp.codecs.choose`) stands for its scheme and codebook. Its tables are packed, or
            have slots if `choose` was called with rows=True.
        chunk_bytes, tau: as in `analyze`. They imply scheme "ibp", and are ignored if a codebook is given. A general
            codec codes each block of chunk_bytes alone: by default 64 KiB with nvCOMP, else 2 MiB.
        codebook: a codebook from `analyze`, `Codebook.from_masks` or another table; rows then have codebook.row_bytes.
        sample: fraction of the rows from which the codebook is learned. None: as many rows as hold 2^19 elements or,
            for scheme "ibp", 64 MiB (16 MiB without a GPU).
        clusters: number of codebooks, 1 to 256. Rows are divided among them by k-means over their bits and then by
            coded size (the paper's section 6.5). "auto": the number is doubled for as long as the net saving grows.
            None: one.
        level: "default" takes the fewest bytes, or slightly more if the rows then decode faster. "fast" implies scheme
            "planes". It codes an exponent as one digit of 4 bits, which counts up from the smallest frequent exponent;
            a GPU codes and decodes such digits at the rate of its memory. It saves 25 % of BF16 weights (33 % at level
            "default") and 12 % of FP32 weights. If such digits save less than 4 % of a row, as with data that are half
            zeros, or if elements have 1 or 8 bytes, the codebook is that of "default".
        layout: "slots", rows at multiples of slot_bytes, for gathers; "packed", rows back to back, for streaming and
            files.
        slot_bytes: size in bytes of a slot: a multiple of 32 below row_bytes, or row_bytes itself (the paper's in-place
            layout). None: chosen from the row lengths.
        row_bytes: size in bytes of a row, the unit of coding, 1 to 65,536. None: the size of an item x[i] if it is at
            most 64 KiB and x is not 1-D, else 4,096 bytes of the flat tensor.
        device: the device of analysis and compression. None: x's GPU, else the current GPU if there is one, else the
            CPU. The CPU also codes host tensors of at most 1 MiB. A pinned tensor of at most a quarter of the GPU's
            free memory is copied to the GPU as a whole for the call; other tensors are copied block by block.
        memory: the memory that holds the table: "device", on the device that codes; "pinned", in host memory that GPUs
            read; "host", in pageable memory. None: where x is; if that is the host and there is a CUDA device, in
            pinned memory. If the system then refuses to pin, the table is pageable, and a RuntimeWarning says so, once
            per process.
        numa: the NUMA node whose memory is preferred for a pinned table, or a device, which stands for the node nearest
            to it. None: the calling thread's node.
        inplace: whether to compress x within its own memory. x must be contiguous, own all of its storage and not
            require grad; scheme must be one of rows, and layout, slot_bytes and numa must not be given.
        progress: whether to show progress bars.

    Returns:
        An `ibp.CompressedTensor`; for general codecs an `ibp.codecs.WholeTensor`.

    Raises:
        TypeError: x is not a dense tensor of a supported dtype (quantized tensors, and dtypes of less than a byte, are
            not supported), codebook is not a codebook, or an argument has a wrong type.
        ValueError: an argument is out of range, two arguments exclude each other, or x cannot be compressed in place.
        ImportError: the package of a general codec is not installed.
        RuntimeError: memory is "pinned", but the system refuses to pin; or the codec needs a GPU, and there is no GPU.
    """
    if inplace and not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; inplace=True wants a torch.Tensor, whose memory it takes")
    x = _rows.given_tensor(x) if isinstance(x, np.ndarray) else x
    _rows.check_tensor(x)
    if x.requires_grad and not inplace:
        warn_of_gradient(x)
    of_codebook: tuple[Any, ...] = (chunk_bytes, tau, sample, clusters, level, codebook)
    of_table: tuple[Any, ...] = (layout, slot_bytes, row_bytes, device, memory, numa, progress)
    options = Options(scheme, *of_codebook, *of_table)  # type: ignore[arg-type]
    if not isinstance(scheme, str) or scheme not in _SCHEMES_OF_ROWS:
        return _coded_otherwise(x, scheme, options, inplace)
    if not inplace:
        return compressed(CompressedTensor, Request.of(x, options))
    _refuse("inplace=True keeps every row where it is", options, "layout", "slot_bytes", "numa")
    return compressed_in_place(CompressedTensor, x, options)


def _coded_otherwise(
    x: torch.Tensor, scheme: str | Chosen, options: Options, inplace: bool
) -> CompressedTensor | WholeTensor:
    """Codes a tensor with a choice or a general codec. Raises ValueError for options that choices or general codecs do
    not support, and for an unknown scheme."""
    place: dict[str, Any] = {name: getattr(options, name) for name in ("device", "memory", "numa", "progress")}
    if not isinstance(scheme, str) and isinstance(scheme, Chosen):
        _refuse("a choice says how x is coded", options, "chunk_bytes", *_OF_ROWS, inplace=inplace)
        return scheme.compress(x, **place)
    if is_general(scheme):
        _refuse(f"{scheme!r} codes whole tensors", options, *_OF_ROWS, inplace=inplace)
        return compress_whole(x, scheme, chunk_bytes=options.chunk_bytes, **place)
    if isinstance(scheme, str):
        hint = near(scheme, [*_SCHEMES_OF_ROWS, *CODECS])
        raise ValueError(
            f"scheme is {scheme!r}{hint}; wanted one of {_SCHEMES_OF_ROWS}, or a general codec of {sorted(CODECS)}"
        )
    # Always raises ValueError here, because the scheme is unknown.
    return compressed(CompressedTensor, Request.of(x, options))


def _refuse(why: str, options: Options, *names: str, inplace: bool = False) -> None:
    """Raises ValueError if `inplace` is set, or if one of the options `names` is given. why: the reason, for the
    message."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not (isinstance(value, str) and value == getattr(_NONE_GIVEN, name)):
            raise ValueError(f"{name} is given, but {why}")
    if inplace:
        raise ValueError(f"inplace is given, but {why}")
