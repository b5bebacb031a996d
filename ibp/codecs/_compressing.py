"""`ibp.compress`, which makes tables of rows and codes tensors as a whole, and `ibp.codecs.choose`.

`choose` tries the schemes of tables, and general codecs, on a sample of a tensor. It chooses the coding that moves the
tensor over a link in the least time. The result, a `Choice`, can be given to `compress` as the scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

import numpy as np
import torch

from .._common.arguments import near, number
from .._common.manners import share_saved
from .._fetch.streaming import decompress
from .._machine import calibration, staging
from .._machine import memory as _memory
from .._machine.calibration import timed_once
from .._rows.codebook import AnyCodebook
from .._rows.geometry import bytes_of, check_tensor, given_tensor
from .._rows.learning import SCHEMES, Options, Request, analyze
from .._tables.coding import compressed, compressed_in_place, warn_of_gradient
from .._tables.compressed_tensor import CompressedTensor
from ._codec import CODECS, codec_of, forget_coders, is_general
from ._whole import WholeTensor, compress_whole

if TYPE_CHECKING:
    from typing_extensions import Unpack

# ---- compressing ----

_SCHEMES_OF_ROWS = ["auto", *SCHEMES]
_OF_ROWS = ("tau", "codebook", "sample", "clusters", "level", "row_bytes", "layout", "slot_bytes")
_NONE_GIVEN = Options()


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
    x: torch.Tensor | np.ndarray, *, scheme: str | Choice, **options: Unpack[CompressOptions]
) -> CompressedTensor | WholeTensor: ...
def compress(
    x: torch.Tensor | np.ndarray,
    *,
    scheme: str | Choice = "auto",
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
            the two. "nvcomp:cascaded" packs bits, and chooses by itself for each of its internal chunks whether it
            codes run lengths and differences first. With a general codec the result is an `ibp.codecs.WholeTensor`, and
            the arguments for rows are refused. An `ibp.codecs.Choice` (see `ibp.codecs.choose`) stands for its scheme
            and codebook. Its tables are packed, or have slots if `choose` was called with rows=True.
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
    x = given_tensor(x) if isinstance(x, np.ndarray) else x
    check_tensor(x)
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
    x: torch.Tensor, scheme: str | Choice, options: Options, inplace: bool
) -> CompressedTensor | WholeTensor:
    """Codes a tensor with a choice or a general codec. Raises ValueError for options that choices or general codecs do
    not support, and for an unknown scheme."""
    place: dict[str, Any] = {name: getattr(options, name) for name in ("device", "memory", "numa", "progress")}
    if isinstance(scheme, Choice):
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


# ---- choosing ----

# Size in bytes of the sample on a GPU: several times the GPU's cache, with enough chunks to occupy the whole GPU.
_GPU_SAMPLE_BYTES = 256 << 20
_CPU_SAMPLE_BYTES = 16 << 20  # size in bytes of the sample on the CPU, for each thread; threads code blocks of 2 MiB
# Size in bytes of a piece of the sample; general codecs look for repetitions within this distance.
_PIECE_BYTES = 4 << 20
_BUDGET_S, _MOST_REPEATS = 4e-3, 12  # for one measurement: time in seconds, and largest number of repeated calls
# Number of rounds. Each round measures all candidates, so that other work on the machine slows all of them alike.
_ROUNDS = 3
_LONG_S = 1.0  # A call that takes longer than this, in seconds, is timed only once.
# A candidate that takes longer than this, in seconds, is measured in the first round only, because other work on the
# machine changes its time little.
_STEADY_S = 20e-3
_POISON = 0xA5  # Fills the output before decoding, so that any byte that the decoder fails to write differs from x.
_LEVELS = {"planes": ("default", "fast"), "ibp": ("default",)}  # the levels that are tried for schemes with codebooks
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class CodingCost:
    """The bytes and the time that a coding takes to code a tensor, to move it over a link and to decode it, one after
    the other.

    Attributes:
        scheme: the scheme, as an argument of `ibp.compress`. "raw": the tensor is moved uncompressed.
        level: the level of scheme planes.
        codebook: the codebook of a scheme of rows, learned from a sample of the tensor. None for other schemes.
        stored_bytes: number of bytes that are moved over the link.
        encode_s, transfer_s, decode_s: times in seconds. Learning a codebook is not counted.
        total_s: the sum of these times. encode_s is left out if the choice was made with encode=False.
    """

    scheme: str
    level: str
    codebook: AnyCodebook | None
    stored_bytes: int
    encode_s: float
    transfer_s: float
    decode_s: float
    total_s: float

    @property
    def name(self) -> str:
        """The scheme and the level."""
        return self.scheme if self.level == "default" else f"{self.scheme}, {self.level}"


@dataclass(frozen=True, repr=False)
class Choice:
    """The result of `ibp.codecs.choose`. Its repr is a table.

    Attributes:
        num_bytes: size in bytes of the tensor.
        link_gbps: rate of the link in 10^9 bytes per second.
        encode: whether the total times include the time for coding.
        rows: whether rows must be decodable alone.
        table: the `ibp.codecs.CodingCost` of every candidate, the fastest first. The first candidate is chosen.
    """

    num_bytes: int
    link_gbps: float
    encode: bool
    rows: bool
    table: tuple[CodingCost, ...]

    @property
    def best(self) -> CodingCost:
        """The chosen candidate."""
        return self.table[0]

    @property
    def scheme(self) -> str:
        """The chosen scheme, as an argument of `ibp.compress`."""
        return self.best.scheme

    @property
    def level(self) -> str:
        """The chosen level: "default", or "fast" for scheme planes."""
        return self.best.level

    @property
    def codebook(self) -> AnyCodebook | None:
        """The chosen codebook, for other tensors of the same kind. None unless the scheme is one of rows."""
        return self.best.codebook

    @property
    def stored_bytes(self) -> int:
        """Number of bytes that are moved over the link if the chosen scheme is used."""
        return self.best.stored_bytes

    @property
    def savings(self) -> float:
        """The share of bytes that is saved: 1 - stored_bytes / num_bytes; 0 for an empty tensor."""
        return share_saved(self.num_bytes, self.stored_bytes)

    @property
    def total_s(self) -> float:
        """Expected total time of the chosen candidate in seconds."""
        return self.best.total_s

    def at(self, link_gbps: float, encode: bool | None = None) -> Choice:
        """Returns the choice for another link, from the same measurements.

        Args:
            link_gbps: rate of that link in 10^9 bytes per second.
            encode: whether to include the time for coding in the total time. None: as in this choice.
        """
        counts = self.encode if encode is None else encode
        return replace(self, link_gbps=link_gbps, encode=counts, table=ranked(self.table, link_gbps, counts))

    def compress(self, x: torch.Tensor, **options: Any) -> CompressedTensor | WholeTensor:
        """Returns `ibp.compress(x, scheme=self)`. options: device, memory, numa and progress of `ibp.compress`."""
        return compress(x, **arguments_of(self.scheme, self.codebook, self.rows), **options)

    def __repr__(self) -> str:
        counted = "encode + transfer + decode" if self.encode else "transfer + decode"
        head = f"ibp.codecs.Choice of {self.num_bytes:,} bytes at {self.link_gbps:g} GB/s, {counted}, in ms"
        cells: list[tuple[str, ...]] = [("", "bytes", "encode", "transfer", "decode", "total")]
        for cost in self.table:
            times = (f"{1e3 * time:,.3f}" for time in (cost.encode_s, cost.transfer_s, cost.decode_s, cost.total_s))
            cells.append((cost.name, f"{cost.stored_bytes:,}", *times))
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = (
            "  ".join(text.rjust(width) if column else text.ljust(width) for column, (text, width) in fields)
            for fields in (list(enumerate(zip(line, widths))) for line in cells)
        )
        return "\n".join([head, *(f"  {line}".rstrip() for line in lines)])


def choose(
    x: torch.Tensor,
    link_gbps: float | None = None,
    *,
    device: torch.device | str | int | None = None,
    encode: bool = True,
    rows: bool = False,
    schemes: Iterable[str] | None = None,
) -> Choice:
    """Chooses the coding that moves a tensor over a link in the least time. The time is the sum of the times to code,
    to move and to decode the tensor.

    Every candidate codes and decodes a sample of the tensor on the device, and is timed; the sample is the whole tensor
    if it is small. General codecs are candidates if their packages are installed. A candidate that does not give
    the sample back bit for bit is discarded. The call takes from a tenth of a second to some seconds. Nothing else
    should run on the device meanwhile.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> choice = ibp.codecs.choose(x, link_gbps=0.0001, encode=False, schemes=["planes"])
        >>> choice.scheme, choice.level, torch.equal(choice.compress(x).decompress(), x)
        ('planes', 'default', True)
        >>> choice.table[-1]
        CodingCost(scheme='raw', ..., stored_bytes=2048000, ...)

    Args:
        x: tensor [N, ...] with elements of 1, 2, 4 or 8 bytes.
        link_gbps: rate of the link in 10^9 bytes per second. None: the rate of the link from the host to the GPU, as in
            the calibration in force (see `ibp.calibration.calibrate`).
        device: the device that codes and decodes tensors like x. None: the device of x.
        encode: whether to include the time for coding in the total time. False: for tensors that are coded once and
            fetched often.
        rows: whether rows must be decodable alone. If so, general codecs are left out, tables have slots, and
            stored_bytes is the number of bytes that are moved if every row is fetched once.
        schemes: the candidates in addition to "raw": any of "planes", "ibp" and the general codecs, such as "zstd:9".
            None: all available schemes, with general codecs at their default levels. nvCOMP's ANS is tried on floats
            in two variants, "nvcomp:ans:floats" and "nvcomp:ans:bytes" (see `ibp.compress`).

    Returns:
        `ibp.codecs.Choice`: the scheme, level and codebook, with times and bytes of every candidate. To code a tensor
        with it, call `choice.compress(x)` or `ibp.compress(x, scheme=choice)`.

    Raises:
        TypeError: x is not a dense tensor of a supported dtype, or link_gbps is not a number.
        ValueError: link_gbps is not positive, or a scheme does not exist, works on another device, or has no rows.
        ImportError: the package of a named scheme is not installed.
    """
    check_tensor(x)
    where = _memory.canonical(x.device if device is None else device)
    if link_gbps is None:
        link_gbps = calibration.in_force(where).copy_in_gbps
    link_gbps = number("link_gbps", link_gbps)
    if not 0 < link_gbps < float("inf"):
        raise ValueError(f"link_gbps is {link_gbps}; wanted a positive number")
    candidates = _candidates(schemes, x.dtype, where, rows)
    num_bytes = x.numel() * x.dtype.itemsize
    raw = CodingCost("raw", "default", None, num_bytes, 0.0, 0.0, 0.0, 0.0)
    found = _tried(candidates, _sample(x.detach(), where), num_bytes, rows) if num_bytes else []
    return Choice(num_bytes, link_gbps, encode, rows, ranked([raw, *found], link_gbps, encode))


def _candidates(
    schemes: Iterable[str] | None, dtype: torch.dtype, device: torch.device, rows: bool
) -> list[tuple[str, str]]:
    """Returns (scheme, level) of each candidate. Raises ImportError if the package of a scheme that the caller names is
    missing, and ValueError if such a scheme cannot be used. schemes: None for all that are available."""
    if schemes is None:
        of_device = [] if rows else [name for name, codec in CODECS.items() if codec.device_type == device.type]
        schemes = ["planes", "ibp", *filter(_is_there, of_device)]
    found: list[tuple[str, str]] = []
    for scheme in schemes:
        if is_general(scheme):
            codec = codec_of(scheme)
            if rows or codec.device_type != device.type:
                why = "has no rows that decode alone" if rows else f"codes on a {codec.device_type.upper()} device"
                raise ValueError(f"schemes has {scheme!r}, which {why}")
            codec.require()
            found += [(f"{scheme}:{text}" if text else scheme, "default") for text in codec.tried_variants(dtype)]
        elif scheme not in SCHEMES:
            known = [*SCHEMES, *CODECS]
            raise ValueError(f"schemes has {scheme!r}{near(scheme, known)}; wanted some of {known}")
        elif scheme != "raw":
            found += [(scheme, level) for level in _LEVELS[scheme]]
    return found


def _is_there(name: str) -> bool:
    """Returns whether the package of a codec is installed."""
    try:
        CODECS[name].require()
    except ImportError:
        return False
    return True


def _sample(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a sample of a tensor, on a device. If the tensor is small, the sample is the whole tensor. Otherwise it
    consists of evenly spaced pieces, which are concatenated."""
    limit = _GPU_SAMPLE_BYTES if device.type == "cuda" else _CPU_SAMPLE_BYTES * torch.get_num_threads()
    pieces = [x]
    if x.nbytes > limit:
        if x.dim() == 0 or len(x) * limit < 2 * x.nbytes:  # the items are few and long
            x = x.reshape(-1)
        item_bytes = x.nbytes // len(x)
        count = max(1, limit // max(_PIECE_BYTES, item_bytes))
        length = max(1, limit // count // item_bytes)
        starts = [piece * (len(x) - length) // max(1, count - 1) for piece in range(count)]
        pieces = [x[start : start + length] for start in starts]
    pieces = [piece.contiguous() for piece in pieces]
    if x.device != device:
        pieces = [staging.to_device(piece, device) for piece in pieces]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _tried(candidates: list[tuple[str, str]], sample: torch.Tensor, num_bytes: int, rows: bool) -> list[CodingCost]:
    """Measures candidates on a sample. Returns the cost, for the whole tensor, of each candidate that saves bytes. The
    bytes and times in a cost are those of the sample, multiplied by (size of the tensor / size of the sample). A
    candidate whose scheme codes rows is left out if no codebook can be learned for it, or if its codebook equals that
    of an earlier candidate.

    Args:
        candidates: (scheme, level) of each candidate.
        num_bytes: size in bytes of the whole tensor.
    """
    costs: list[CodingCost] = []
    for scheme, level in candidates:
        codebook = None
        if not is_general(scheme):
            codebook = analyze(sample, scheme=scheme, level=level, sample=None, device=sample.device)
            if codebook is None or any(codebook == known.codebook for known in costs):
                continue
        costs.append(CodingCost(scheme, level, codebook, 0, math.inf, 0.0, math.inf, 0.0))
    for turn in range(_ROUNDS):
        for place, cost in enumerate(costs):
            if not turn or cost.encode_s + cost.decode_s < _STEADY_S:
                costs[place] = measured(cost, sample, rows)
    forget_coders()
    scale = num_bytes / sample.nbytes
    return [
        replace(
            cost,
            stored_bytes=round(cost.stored_bytes * scale),
            encode_s=cost.encode_s * scale,
            decode_s=cost.decode_s * scale,
        )
        for cost in costs
        if cost.stored_bytes < sample.nbytes
    ]


def measured(cost: CodingCost, x: torch.Tensor, rows: bool) -> CodingCost:
    """Compresses and decompresses x with a candidate. Returns its cost, with the smaller of the earlier and the new
    time of each direction. If the result differs from x, stored_bytes is x.nbytes, so that the candidate is not
    chosen."""
    arguments = arguments_of(cost.scheme, cost.codebook, rows)
    table, encode_s = _timed(lambda: compress(x, **arguments, device=x.device, memory="device"), x.device)
    out = torch.empty_like(x)
    bytes_of(out).fill_(_POISON)
    _, decode_s = _timed(lambda: decompress(table, out=out), x.device)
    # The bytes that go over a link to move x, including those that only decoding needs.
    if isinstance(table, WholeTensor):
        moved_bytes = table.nbytes
    else:
        moved_bytes = (table.link_bytes if rows else table.stored_bytes) + table.index_bytes
    return replace(
        cost,
        stored_bytes=moved_bytes if torch.equal(bytes_of(out), bytes_of(x)) else x.nbytes,
        encode_s=min(cost.encode_s, encode_s),
        decode_s=min(cost.decode_s, decode_s),
    )


def _timed(call: Callable[[], _Result], device: torch.device) -> tuple[_Result, float]:
    """Calls a function repeatedly for about _BUDGET_S. Returns (the function's result, the shortest time in seconds
    until the function's work was done). The shortest is taken because other work can only add to the time. The first
    call also prepares what later calls reuse, so its time is ignored. The exception is a first call that takes longer
    than _LONG_S: then it is the only call, and its time is returned."""
    result, first = timed_once(call, device)
    if first > _LONG_S:
        return result, first
    del result  # frees its memory for the next result
    result, least = timed_once(call, device)
    for _ in range(min(_MOST_REPEATS, int(_BUDGET_S / least))):
        del result
        result, again = timed_once(call, device)
        least = min(least, again)
    return result, least


def arguments_of(scheme: str, codebook: AnyCodebook | None, rows: bool) -> dict[str, Any]:
    """Returns the arguments of `ibp.compress` for a candidate."""
    if is_general(scheme):
        return {"scheme": scheme}
    coding: dict[str, Any] = {"scheme": scheme} if codebook is None else {"codebook": codebook}
    return {**coding, "layout": "slots" if rows else "packed"}


def ranked(table: Iterable[CodingCost], link_gbps: float, encode: bool) -> tuple[CodingCost, ...]:
    """Computes the transfer and total times of candidates for a link. Returns the candidates, the fastest first; ties
    keep their order."""
    costs = []
    for cost in table:
        transfer_s = cost.stored_bytes / link_gbps * 1e-9
        total_s = (cost.encode_s if encode else 0.0) + transfer_s + cost.decode_s
        costs.append(replace(cost, transfer_s=transfer_s, total_s=total_s))
    return tuple(sorted(costs, key=lambda cost: cost.total_s))
