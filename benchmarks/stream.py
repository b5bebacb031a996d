"""How fast do whole tensors come from pinned host memory to the GPU, by dtype and size?

    python -m benchmarks.stream [--out DIR] [--device cpu] [--quick]

BF16 tensors have 8 to 256 MiB, and others 256 MiB. There are several of one size, up to 256 MiB in all, which are taken
in turn or as a list. Arms: torch's copy_ of the raw tensor; ibp's stream through the copy engine, packed and from
slots, with its own choice of SMs, at most 8 and at most 4; the kernel that fetches the rows itself; `decompress` of all
tensors of a size; and nvCOMP's ANS, whose pieces are decoded while the next ones are copied (pieces and staging buffers
for all of them are prepared before). The stream is measured at every size, even if
ibp.decompress would choose the kernel. The ideal is the copy engine's rate over the share of bytes that is stored.
"""

import sys

import torch

import ibp
from ibp._fetch import streaming
from ibp._machine import memory
from ibp.codecs._codec import CODECS

from . import harness, ideal, inputs
from .ratio import nvcomp

# The sizes are for BF16, for other dtypes, and for quick runs.
SIZES_MIB, OTHER_SIZES_MIB, QUICK_SIZES_MIB = (8, 64, 256), (256,), (1, 4)
LIST_BYTES, MAX_TENSORS = 256 * inputs.MIB, 16  # All tensors of one size together have at most this many bytes.
FEW_SMS, FEWEST_SMS = 8, 4
NVCOMP_CHUNK_BYTES, NUM_PIECES, LEAST_PIECE_BYTES = 1 << 16, 16, 4 * inputs.MIB


class Cell:
    """Tensors of one kind and size on the device, their raw copies in host memory, and the run that records results."""

    def __init__(self, run, case, make, num_bytes):
        self.run, self.case = run, case
        count = max(1, min(MAX_TENSORS, LIST_BYTES // num_bytes))
        self.xs = [make(num_bytes) for _ in range(count)]
        self.num_bytes = self.xs[0].numel() * self.xs[0].dtype.itemsize
        self.outs = [torch.empty_like(x) for x in self.xs]

    def measure(self, arm, calls, *, moved_bytes, savings, sms, tensors_a_call=1, buffer_bytes=0, table=None):
        """Checks an arm on poisoned output, and times it.

        Args:
            calls: one for each tensor, or one for all.
            buffer_bytes: device memory that was allocated for the arm before.
            table: one of the tables that are decompressed, or None.
        """
        for out in self.outs:
            harness.poison(out)

        def call_all():
            for call in calls:
                call()

        _, peak_bytes = self.run.peak_bytes(call_all, out=self.outs)
        x = self.xs[0]
        row_bytes = x.shape[1] * x.dtype.itemsize
        for each, out in zip(self.xs, self.outs):
            harness.check_bits(out, each, f"{self.case}, {arm}")
        self.run.add_memory(
            case=self.case,
            arm=arm,
            row_bytes=row_bytes,
            dtype=x.dtype,
            peak_bytes=None if peak_bytes is None else peak_bytes + buffer_bytes,
            output_bytes=self.num_bytes,
            original_bytes=self.num_bytes,
            table=table,
        )
        gbps = tensors_a_call * self.num_bytes * 1e-9 / self.run.seconds(calls)
        self.run.add(
            case=self.case,
            arm=arm,
            rows=len(x),
            row_bytes=row_bytes,
            dtype=x.dtype,
            savings=savings,
            gbps=gbps,
            ideal_gbps=ideal.LINK_COPY_GBPS * self.num_bytes / moved_bytes,
            sms=sms,
        )


def in_host_memory(table, pin):
    """Returns a copy of a table in host memory. If it is pinned, its pinned memory has exactly its size."""
    slots, overflow = (
        memory.empty(held.numel(), torch.device("cpu"), pin).copy_(held) for held in (table.slots, table.overflow)
    )
    return ibp.CompressedTensor(
        shape=table.shape,
        dtype=table.dtype,
        scheme=table.scheme,
        row_bytes=table.row_bytes,
        slot_bytes=table.slot_bytes,
        slots=slots,
        overflow=overflow,
        lengths=table.lengths.cpu(),
        bases=table.bases.cpu(),
        codebook=table.codebook,
    )


def measure_raw(cell):
    hosts = [
        memory.empty(cell.num_bytes, torch.device("cpu"), cell.run.on_gpu).view(x.dtype).view(x.shape).copy_(x)
        for x in cell.xs
    ]
    calls = [lambda out=out, host=host: out.copy_(host, non_blocking=True) for out, host in zip(cell.outs, hosts)]
    cell.measure("raw copy_", calls, moved_bytes=cell.num_bytes, savings=0.0, sms=0)


def measure_tables(cell, codebook, layout):
    tables = [in_host_memory(ibp.compress(x, codebook=codebook, layout=layout), cell.run.on_gpu) for x in cell.xs]
    name = f"{codebook.scheme} {layout}"
    moved_bytes = sum(table.slots.numel() + table.overflow.numel() for table in tables) / len(tables)
    same = {"moved_bytes": moved_bytes, "savings": tables[0].savings, "table": tables[0]}
    chosen = (
        streaming.streamed_sms(tables[0], cell.run.device, cell.num_bytes, int(moved_bytes))
        if cell.run.on_gpu
        else None
    )
    path = "copy" if cell.run.on_gpu else None
    for sms in {FEW_SMS: FEW_SMS, FEWEST_SMS: FEWEST_SMS, chosen: None}.values() if cell.run.on_gpu else (None,):
        each = [
            lambda table=table, out=out, sms=sms: ibp.decompress(table, out=out, max_sms=sms, path=path)
            for table, out in zip(tables, cell.outs)
        ]
        label = sms or chosen
        cell.measure(name, each, sms=label, **same)
        if len(tables) > 1:
            every = [lambda sms=sms: ibp.decompress(tables, out=cell.outs, max_sms=sms, path=path)]
            cell.measure(f"{name}, list", every, sms=label, tensors_a_call=len(tables), **same)
    for sms in (None, FEW_SMS) if cell.run.on_gpu else ():
        each = [
            lambda table=table, out=out, sms=sms: ibp.decompress(table, out=out, max_sms=sms, path="gpu")
            for table, out in zip(tables, cell.outs)
        ]
        cell.measure(f"{name}, by kernel", each, sms=sms, **same)


class CodedPieces:
    """The bytes of a tensor that a codec has coded in pieces, which are in host memory, pinned if the tensor is on a
    GPU. Each piece has a place on the tensor's device, to which it is copied and from which it is decoded while the
    next ones are copied. Places and pieces are allocated when the object is made.

    Args:
        coder: encodes and decodes on the stream that is current now, as `ibp.codecs._codec.Coder` does.
        data: uint8 [bytes]; out: the memory of as many bytes to which `decode` writes them.
    """

    def __init__(self, coder, data, out):
        self.coder, self.on_gpu, self.pieces = coder, data.is_cuda, []
        self.copies = torch.cuda.Stream() if self.on_gpu else None
        size = max(LEAST_PIECE_BYTES, -(-data.numel() // (NUM_PIECES * NVCOMP_CHUNK_BYTES)) * NVCOMP_CHUNK_BYTES)
        for part, target in zip(data.split(size), out.split(size)):
            staging = coder.encode(part, coder.room(part)).clone()
            host = memory.empty(staging.numel(), torch.device("cpu"), pin=self.on_gpu).copy_(staging)
            self.pieces.append((host, staging, target, torch.cuda.Event() if self.on_gpu else None))
        self.stored_bytes = sum(host.numel() for host, *_ in self.pieces)

    def decode(self):
        """Copies and decodes all pieces. On a GPU the copies are on a stream of their own."""
        if not self.on_gpu:
            for host, staging, target, _ in self.pieces:
                self.coder.decode(staging.copy_(host), target)
            return
        current = torch.cuda.current_stream()
        self.copies.wait_stream(current)
        for host, staging, target, copied in self.pieces:
            with torch.cuda.stream(self.copies):
                staging.copy_(host, non_blocking=True)
                copied.record()
            current.wait_event(copied)
            self.coder.decode(staging, target)


def measure_nvcomp(cell, what):
    codec, x = CODECS["nvcomp:ans"], cell.xs[0]
    options = codec.fields(x.dtype, NVCOMP_CHUNK_BYTES)
    try:
        coder = codec.coder(x.device, options)
        coded = [CodedPieces(coder, *(t.view(torch.uint8).view(-1) for t in pair)) for pair in zip(cell.xs, cell.outs)]
    except Exception as error:  # Versions of nvCOMP differ in their dtypes and arguments.
        print(f"{what}: nvCOMP left out: {error}")
        return
    moved_bytes = sum(pieces.stored_bytes for pieces in coded) / len(coded)
    cell.measure(
        "nvcomp ANS",
        [pieces.decode for pieces in coded],
        moved_bytes=moved_bytes,
        savings=1 - moved_bytes / cell.num_bytes,
        sms=None,
        buffer_bytes=max(pieces.stored_bytes for pieces in coded),
    )


def measure_size(run, case, make, codebooks, num_bytes):
    what = f"{case}, {num_bytes >> 20} MiB"
    with run.cell(what):
        cell = Cell(run, what, make, num_bytes)
        with run.cell(f"{what}, raw"):
            measure_raw(cell)
        for codebook in codebooks:
            for layout in ("packed", "slots"):
                with run.cell(f"{what}, {codebook.scheme} {layout}"):
                    measure_tables(cell, codebook, layout)
        if nvcomp and run.on_gpu and cell.xs[0].dtype.is_floating_point:
            with run.cell(f"{what}, nvcomp"):
                measure_nvcomp(cell, what)


def cases(run):
    """Yields (name, function(bytes) -> new tensor, codebooks, sizes in MiB)."""
    sizes, other_sizes = (QUICK_SIZES_MIB,) * 2 if run.quick else (SIZES_MIB, OTHER_SIZES_MIB)
    for name, dtype, deviation in inputs.NORMAL:

        def make(num_bytes, dtype=dtype, deviation=deviation):
            return inputs.normal_rows(num_bytes, dtype, deviation, run.device)

        learned = make(inputs.MIB if run.quick else 64 * inputs.MIB)
        is_main = dtype == torch.bfloat16
        codebooks = [
            ibp.codecs.analyze(learned, scheme=scheme, sample=None)
            for scheme in (("planes", "ibp") if is_main else ("planes",))
        ]
        yield name, make, codebooks, sizes if is_main else other_sizes
    mask, bitval = inputs.synthetic_mask(2048, 0.5)
    codebook = ibp.codecs.Codebook.from_masks(mask, bitval, chunk_bytes=inputs.CHUNK_BYTES)
    yield (
        "synthetic 50%",
        lambda num_bytes: inputs.agreeing_rows(num_bytes // 2048, mask, bitval, run.device),
        [codebook],
        other_sizes,
    )


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    run = harness.Run("stream", args)
    torch.manual_seed(0)
    if not run.on_gpu:
        print("nvCOMP: needs --device cuda, left out")
    elif not nvcomp:
        print("nvCOMP: the package nvidia-nvcomp-cu13 is not installed, left out")
    for name, make, codebooks, sizes in cases(run):
        for size in sizes:
            measure_size(run, name, make, codebooks, size * inputs.MIB)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
