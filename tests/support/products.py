"""The kernels that multiply by compressed matrices, written in torch. They let tests of the code around them use tables
on the CPU."""

import contextlib

import torch
import torch.nn.functional as F

from ibp._fetch import linear


def lists(table):
    """Lists a table's escapes as on a GPU, so that kernels can multiply by it."""
    table._escapes = linear._state(table), linear.list_escapes(table)


def matrix_of(slots, slot_bytes, below, starts, entries, columns):
    """Returns a table's matrix: digits and residuals give the elements, and escapes replace some of them."""
    rows = len(starts) - 1
    bytes_of_rows = slots.view(rows, slot_bytes).int()
    residuals, digits = bytes_of_rows[:, :columns], bytes_of_rows[:, columns : columns // 2 * 3]
    digits = torch.stack((digits & 15, digits >> 4), dim=2).view(rows, columns)
    bits = (residuals & 1) << 15 | digits + len(below) - 2 << 7 | residuals >> 1
    escaped = torch.repeat_interleave(torch.arange(rows), starts.diff()), entries[:, 0].long()
    # The lower half of a listed escape is the element; the upper half is what digit 15 gives.
    assert torch.equal(bits[escaped], entries[:, 1] >> 16 & 0xFFFF)
    bits[escaped] = entries[:, 1] & 0xFFFF
    return bits.to(torch.int16).view(torch.bfloat16)


def multiply(x, parts, slot_bytes, biases):
    """Computes what ibp_cuda_linear does."""
    results = []
    for number, size in enumerate(slot_bytes):
        slots, *rest = parts[4 * number : 4 * number + 4]
        bias = biases[number] if biases and len(biases[number]) else None
        results.append(F.linear(x, matrix_of(slots, size, *rest, x.shape[-1]), bias))
    return results[0] if len(results) == 1 else torch.cat([result.reshape(-1) for result in results])


def multiply_groups(slots, slot_bytes, below, starts, entries, x, groups, order, sharing, num_rows, out):
    """Computes what ibp_cuda_linear_groups does."""
    matrices = matrix_of(slots, slot_bytes, below, starts, entries, x.shape[1])
    matrices = matrices.view(-1, num_rows, x.shape[1])
    assert groups.dtype == torch.int32 and groups.shape[1] == 3 and x.is_contiguous()
    places = torch.arange(len(out)) if order is None else order
    assert len(places) == len(out) == len(x) * sharing
    for matrix, first, count in groups.tolist():
        if count == 0:
            break
        assert count <= 8
        if 0 <= matrix < len(matrices) and 0 <= first <= first + count <= len(out):
            own = places[first : first + count]
            out[own] = F.linear(x[own // sharing], matrices[matrix])


def decode(slots, slot_bytes, below, starts, entries, out):
    """Computes what ibp_cuda_decode_matrix does."""
    out.copy_(matrix_of(slots, slot_bytes, below, starts, entries, out.shape[1]))


@contextlib.contextmanager
def kernels_on_the_cpu(monkeypatch):
    """Lets `ibp.linear` multiply up to 64 vectors by tables on the CPU whose escapes are listed, with the kernels
    above. Yields a list, to which each call appends its number of vectors."""
    calls, library = [], torch.library.Library("ibp", "IMPL")

    def run(x, parts, slot_bytes, biases):
        assert 1 <= len(slot_bytes) <= 4
        calls.append(x.numel() // x.shape[-1])
        return multiply(x, parts, slot_bytes, biases)

    def run_out(x, parts, slot_bytes, biases, *, out):
        out.copy_(run(x, parts, slot_bytes, biases).view(out.shape))

    def run_groups(*arguments):
        calls.append(len(arguments[-1]))
        multiply_groups(*arguments)

    def are_near(x, table, bias=None):
        is_coded = x.dtype == table.dtype == torch.bfloat16
        return is_coded and x.numel() > 0 and not linear.is_transformed()

    library.impl("linear", run, "CPU")
    library.impl("linear.out", run_out, "CPU")
    library.impl("linear_groups", run_groups, "CPU")
    library.impl("decode_matrix", decode, "CPU")
    monkeypatch.setattr(linear, "_are_near", are_near)
    monkeypatch.setattr(linear, "most_vectors", lambda device, num_rows: 64)
    try:
        yield calls
    finally:
        library._destroy()
