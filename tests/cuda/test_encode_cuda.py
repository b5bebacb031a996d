"""Measuring, indexing and coding on the GPU against the C oracle, where the data, the slots and the overflow are as
awkward as they may be.
"""

import concurrent.futures
import functools
import itertools

import numpy as np
import pytest
import torch

import ibp
from golden.make_planes import KINDS, adversarial_rows
from handles import BY_VALUES as OPS
from handles import handle_of
from helpers import (
    LAYOUTS,
    assert_same_bits,
    assert_same_table,
    bytes_of,
    compress_in_place,
    embedding,
    layout_arguments,
    one_hot_rows,
    planes_codebook,
    spiky_rows,
)
from ibp._machine import memory as _memory
from ibp._machine import staging
from ibp._rows.geometry import Survey
from interrupts import Interrupted, InterruptedOperations, assert_kept, interrupt_at
from test_cuda import matching_rows, random_codebook
from test_cuda_planes import any_codebook, ranked_rows

CPU = torch.device("cpu")
ROW_BYTES = [
    1,
    2,
    3,
    4,
    8,
    15,
    16,
    17,
    32,
    33,
    64,
    127,
    128,
    129,
    240,
    256,
    1000,
    1024,
    1028,
    2048,
    4096,
    4100,
    14812,
    16384,
    65535,
    65536,
]
POISON = 0x5A


def shifted(data, device, shift):
    """The bytes on the device at an address that is `shift` more than a multiple of 16."""
    memory = torch.full((data.numel() + 32,), POISON, dtype=torch.uint8, device=device)
    return memory[shift : shift + data.numel()].copy_(data)


def check(cuda, codebook, data, slot_bytes, shift):
    """GPU and CPU measure, index and code the bytes alike; zeros between the rows' bytes, nothing written around the
    arrays.
    """
    row_bytes, near = codebook.row_bytes, shifted(data, cuda, shift)
    words = {device: codebook.words(device) for device in (CPU, cuda)}
    lengths = OPS.measure_rows(data, words[CPU], codebook.codec)
    on_gpu = OPS.measure_rows(near, words[cuda], codebook.codec)
    assert_same_bits(on_gpu.cpu(), lengths)
    index = OPS.index_rows(lengths, data.numel(), row_bytes, slot_bytes)
    assert_same_bits(OPS.index_rows(on_gpu, data.numel(), row_bytes, slot_bytes).cpu(), index)
    assert_same_bits(
        OPS.survey_rows(on_gpu, data.numel(), row_bytes).cpu(), OPS.survey_rows(lengths, data.numel(), row_bytes)
    )
    slots_bytes = data.numel() if slot_bytes == row_bytes else len(lengths) * slot_bytes
    slots, overflow = (torch.zeros(size, dtype=torch.uint8) for size in (slots_bytes, int(index[-1])))
    fault, fault_on_gpu = (torch.zeros(4, dtype=torch.int64, device=device) for device in (CPU, cuda))
    OPS.encode_rows(
        slots, overflow, lengths, index[:-1], words[CPU], codebook.codec, slot_bytes, 0, 1, data.numel(), data, fault
    )
    around = [torch.full((array.numel() + 64,), POISON, dtype=torch.uint8, device=cuda) for array in (slots, overflow)]
    inside = [whole[32:-32] for whole in around]
    OPS.encode_rows(
        *inside,
        on_gpu,
        index[:-1].to(cuda),
        words[cuda],
        codebook.codec,
        slot_bytes,
        0,
        1,
        data.numel(),
        near,
        fault_on_gpu,
    )
    assert_filled(around, (slots, overflow))
    if slot_bytes and data.numel():  # again, in one pass and what it leaves
        for whole in around:
            whole.fill_(POISON)
        sizes = (words[cuda], codebook.codec, slot_bytes, 0, 1, data.numel())
        again, bases = torch.zeros_like(on_gpu), torch.empty(len(lengths), dtype=torch.int64, device=cuda)
        spare, used = torch.full_like(inside[1], POISON), torch.zeros(1, dtype=torch.int64, device=cuda)
        place = handle_of(inside[0], spare, again, bases, *sizes, None, used)
        torch.ops.ibp.encode_into(place, near, None, None, 0, 0, None, None, True)
        assert_same_bits(again, on_gpu)
        torch.ops.ibp.move_parts(place, index[:-1].to(cuda), inside[1])
        assert_filled(around, (slots, overflow))
    assert fault.tolist() == fault_on_gpu.tolist() == [0, 0, 0, 0]


def assert_filled(around, wanted):
    """Arrays, 32 bytes from both ends of their memory, hold the wanted bytes; the bytes around them did not change."""
    for whole, by_c in zip(around, wanted):
        assert_same_bits(whole[32:-32].cpu(), by_c)
        assert (torch.cat([whole[:32], whole[-32:]]) == POISON).all()


def slots_of(row_bytes):
    return [0, row_bytes, *([32] if row_bytes > 32 else []), *([row_bytes // 64 * 32] if row_bytes >= 128 else [])]


@pytest.mark.parametrize("slot_bytes", [None, 0, 640])
def test_slots_coded_ahead_are_those_of_all_rows(cuda, monkeypatch, slot_bytes):
    """Also where the rows that were learned from ask for slots of another size than all rows do."""
    x = (torch.randn(1 << 15, 512, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    layout = "slots" if slot_bytes is None or slot_bytes else "packed"
    table = ibp.compress(x.to(cuda), layout=layout, slot_bytes=slot_bytes or None)
    assert_same_table(
        table.cpu(), ibp.compress(x, layout=layout, slot_bytes=slot_bytes or None, codebook=table.codebook)
    )
    right, asked = Survey.table_slot_bytes.func, []

    def table_slot_bytes(survey):
        asked.append(survey.num_rows)
        return right(survey) - (64 if survey.num_rows < len(x) else 0)

    monkeypatch.setattr(Survey, "table_slot_bytes", property(table_slot_bytes))
    assert_same_table(ibp.compress(x.to(cuda), layout=layout, slot_bytes=slot_bytes or None), table)
    assert slot_bytes is not None or {len(x)} < {*asked}


@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_masks(cuda, row_bytes, chunk_bytes):
    codebook, num_rows = random_codebook(row_bytes, chunk_bytes, chunk_bytes == 2), 70 if row_bytes < 5000 else 5
    data = matching_rows(num_rows, codebook).reshape(-1)[: num_rows * row_bytes - row_bytes // 3]
    for number, slot_bytes in enumerate(slots_of(row_bytes)):
        for shift in {0, (number + 1) % 4, 4 * number, 8}:
            check(cuda, codebook, data, slot_bytes, shift)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("row_bytes", [size for size in ROW_BYTES if size % 8 == 0])
def test_planes(cuda, row_bytes, element_bytes, kind):
    rng, width = np.random.default_rng([row_bytes, element_bytes, KINDS.index(kind)]), 8 * element_bytes
    residuals = [
        width - 8,
        max(0, width - 12),
        max(0, width - 13),
        0,
        width,
    ]  # symbols that are looked up, and compared
    for number, digit_bits in enumerate([(2, 2, 2, 2), (4, 4), (3, 3, 4), (), (1, 2, 4, 3)]):
        codebook = any_codebook(
            rng, element_bytes, row_bytes // element_bytes, number % 2, residuals[number], digit_bits, kind, number
        )
        few = row_bytes > 5000
        rows = np.concatenate(
            [ranked_rows(rng, 3 if few else 40, codebook), adversarial_rows(rng, 2 if few else 7, codebook)]
        )
        data = torch.from_numpy(rows.reshape(-1)[: rows.size - int(rng.integers(row_bytes))])
        slots = slots_of(row_bytes)
        check(cuda, planes_codebook(codebook), data, slots[number % len(slots)], [0, 1, 4, 8, 14][number])


@pytest.mark.parametrize("num_clusters", [2, 40])
@pytest.mark.parametrize("row_bytes", [64, 240, 2048, 8192])
def test_clusters(cuda, row_bytes, num_clusters):
    """Tables of codes for few clusters, compared entries for many of them."""
    rng = np.random.default_rng([row_bytes, num_clusters])
    masks = [random_codebook(row_bytes, 4, seed=seed) for seed in range(num_clusters)]
    rows = torch.cat([matching_rows(40 // num_clusters + 1, codebook, seed) for seed, codebook in enumerate(masks)])
    check(cuda, ibp.codecs.ClusteredCodebook(masks), rows.reshape(-1)[: rows.numel() - row_bytes // 2], 32, 1)
    for listed in (False, True):
        entries = [torch.from_numpy(rng.integers(0, 256, (1, 9))) for _ in range(num_clusters)]
        planes = [
            ibp.codecs.PlanesCodebook(row_bytes, 2, 1, 8, (2, 2, 2), False, listed, 0, 1, entry) for entry in entries
        ]
        named = torch.cat(
            [entry[0][torch.from_numpy(rng.integers(0, 9, (3, row_bytes // 2)))] for entry in entries]
        )  # 3 rows of each cluster
        rotated = named << 8 | torch.from_numpy(rng.integers(0, 256, named.shape))
        elements = ((rotated >> 1 | rotated << 15) & 0xFFFF).numpy().astype(np.uint16)
        if listed:
            elements[rng.random(elements.shape) < 0.9] = 0
        data = torch.from_numpy(elements.reshape(-1).view(np.uint8))
        check(cuda, ibp.codecs.ClusteredCodebook(planes), data[: data.numel() - row_bytes // 2], 0, 2)


@pytest.mark.parametrize("num_rows", [1, 32, 33, 1024 * 32, 1024 * 32 + 1, 300_000])
def test_the_index_of_many_rows(cuda, num_rows):
    lengths = torch.from_numpy(np.random.default_rng(num_rows).integers(0, 200, num_rows).astype(np.uint16))
    lengths[0] = 65535  # damaged: longer than a row
    num_bytes = num_rows * 200 - 7
    for slot_bytes in (0, 32, 160, 200):
        assert_same_bits(
            OPS.index_rows(lengths.to(cuda), num_bytes, 200, slot_bytes).cpu(),
            OPS.index_rows(lengths, num_bytes, 200, slot_bytes),
        )
        assert_same_bits(
            OPS.index_rows(lengths[:0].to(cuda), num_bytes, 200, slot_bytes).cpu(),
            OPS.index_rows(lengths[:0], num_bytes, 200, slot_bytes),
        )
    assert_same_bits(OPS.survey_rows(lengths.to(cuda), num_bytes, 200).cpu(), OPS.survey_rows(lengths, num_bytes, 200))


@pytest.mark.parametrize("row_bytes", [size for size in ROW_BYTES if size < 5000])
def test_counts_at_any_address(cuda, row_bytes):
    data = bytes_of(one_hot_rows(max(300, 2000 // row_bytes), row_bytes).to(torch.uint8))
    for shift in (0, 1, 2, 3, 4):
        near = shifted(data, cuda, shift)
        assert_same_bits(OPS.count_bits(near, row_bytes).cpu(), OPS.count_bits(data, row_bytes))
        for chunk_bytes in (1, 2, 4, 8):
            codebook = random_codebook(row_bytes, chunk_bytes)
            assert_same_bits(
                OPS.count_hits(near, codebook.words(cuda), codebook.codec).cpu(),
                OPS.count_hits(data, codebook.words(CPU), codebook.codec),
            )


@pytest.mark.parametrize("pinned, most_of_free", [(True, 0.25), (True, 0.0), (False, 0.25)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", ["ibp", "planes"])
def test_blocks_through_the_copy_engines(cuda, monkeypatch, scheme, layout, pinned, most_of_free):
    """Host data in many blocks, more than there are staging buffers: each is used again before the table is whole. Or
    as a whole, where pinned memory has room on the GPU."""
    monkeypatch.setattr("ibp._machine.staging.STAGED_BYTES", 1 << 16)
    monkeypatch.setattr("ibp._machine.staging._MOST_OF_FREE", most_of_free)
    for x in (spiky_rows(5000, 60), embedding(3001, 128, torch.bfloat16)):
        row_bytes = x.shape[1] * x.element_size()
        codebook = ibp.codecs.analyze(x, scheme=scheme, device="cpu")
        arguments = {
            "codebook": codebook,
            "memory": "pinned" if pinned else "host",
            **layout_arguments(layout, row_bytes),
        }
        on_cpu = ibp.compress(x, device="cpu", **arguments)
        for where in (x.pin_memory() if pinned else x, x.to(cuda)):
            where_arguments = arguments if where.device == CPU else {**arguments, "memory": None}
            for _ in range(3):  # a race shows itself sooner or later
                assert_same_table(ibp.compress(where, device=cuda, **where_arguments), on_cpu)
        assert_same_table(
            ibp.compress(
                x.clone().pin_memory() if pinned else x.clone(),
                codebook=codebook,
                device=cuda,
                memory="host",
                inplace=True,
            ),
            ibp.compress(x.clone(), codebook=codebook, device="cpu", memory="host", inplace=True),
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("num_elements", [0, 1, 4096, 33_333])
def test_pageable_tensors_in_blocks(cuda, monkeypatch, num_elements, dtype):
    monkeypatch.setattr("ibp._machine.staging.STAGED_BYTES", 1 << 12)
    x = torch.arange(num_elements).to(dtype).view(-1, 1)
    assert_same_bits(staging.to_device(x, cuda).cpu(), x)


def in_place(x, where, cuda):
    """A copy of x to compress in place: in pageable memory, in pinned memory or on the GPU."""
    return {"pageable": x.clone, "pinned": x.pin_memory, "gpu": lambda: x.to(cuda)}[where]()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", ["pageable", "pinned", "gpu"])
def test_compress_in_place_interrupted_twice(cuda, monkeypatch, where):
    """At lines and then on the way out, while copies and kernels are under way: x is as it was, or the table is x."""
    monkeypatch.setattr("ibp._machine.staging.STAGED_BYTES", 240 * 32)
    monkeypatch.setattr("ibp._rows.geometry._BLOCK_BYTES", 240 * 32)
    before = one_hot_rows(150, 60)
    codebook, seen = ibp.codecs.analyze(before, scheme="planes", device="cpu"), set()

    def interrupted(line, point):
        x = in_place(before, where, cuda)
        call = functools.partial(
            compress_in_place, x, codebook=codebook, device=cuda, memory=None if where == "gpu" else "host"
        )
        table, raised = interrupt_at(line, point, call)
        seen.add(assert_kept(table, x, before))
        return raised

    for line in itertools.count(3, 7):
        points = (interrupted(line, point) for point in range(0, 1 << 20, 2))
        if not list(itertools.takewhile(lambda raised: raised == 2, points)) and not interrupted(line, None):
            break
    assert {None, 64, 150} <= seen


@pytest.mark.parametrize("where", ["pageable", "pinned", "gpu"])
def test_compress_in_place_interrupted_at_every_operation(cuda, monkeypatch, where):
    monkeypatch.setattr("ibp._machine.staging.STAGED_BYTES", 240 * 32)
    monkeypatch.setattr("ibp._rows.geometry._BLOCK_BYTES", 240 * 32)
    before = one_hot_rows(150, 60)
    codebook, seen = ibp.codecs.analyze(before, scheme="planes", device="cpu"), set()
    for first, others in ((first, others) for first in itertools.count() for others in ([], [1])):
        x, table = in_place(before, where, cuda), None
        mode = InterruptedOperations([first, *(first + other for other in others)], before=False)
        try:
            with mode:
                table = ibp.compress(
                    x, codebook=codebook, device=cuda, memory=None if where == "gpu" else "host", inplace=True
                )
        except Interrupted as interruption:
            table = getattr(interruption, "table", None)
        seen.add(assert_kept(table, x, before))
        if mode.number < first:
            break
    assert {None, 64, 150} <= seen


def test_staging_whichever_device_is_current(gpus, monkeypatch):
    """Host data coded by one GPU while the other one is current, and tables of one GPU coded by the other."""
    monkeypatch.setattr("ibp._machine.staging.STAGED_BYTES", 1 << 14)
    x = spiky_rows(3000, 60)
    codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
    on_cpu = ibp.compress(x, codebook=codebook, device="cpu", memory="host")
    in_host = ibp.compress(x.clone(), codebook=codebook, device="cpu", memory="host", inplace=True)
    for current, worker in itertools.product(gpus, gpus):
        with torch.cuda.device(current):
            for pinned in (False, True):
                assert_same_table(
                    ibp.compress(x, codebook=codebook, device=worker, memory="pinned" if pinned else "host"), on_cpu
                )
                assert_same_table(
                    ibp.compress(
                        x.pin_memory(), codebook=codebook, device=worker, memory="pinned" if pinned else "host"
                    ),
                    on_cpu,
                )
            assert_same_table(
                ibp.compress(x.clone(), codebook=codebook, device=worker, memory="host", inplace=True), in_host
            )
            for home in gpus:
                assert_same_table(ibp.compress(x.to(home), codebook=codebook, device=worker), on_cpu)
                assert_same_table(ibp.compress(x.to(home), codebook=codebook, device=worker, inplace=True), in_host)
            assert_same_bits(staging.to_device(x, worker).cpu(), x)
            assert torch.cuda.current_device() == current.index


@pytest.mark.parametrize("num_bytes", [1, 4095, 4097, (2 << 20) + 1, (96 << 20) + 17])
def test_pinned_memory(cuda, num_bytes):
    """As many bytes as asked for, all of them writable by the CPU and both ways copied; again and again, also from
    several threads at once.
    """

    def use(value):
        memory = _memory.empty(num_bytes, CPU, pin=True)
        assert memory.numel() == num_bytes and memory.is_pinned()
        memory.fill_(value)
        near = torch.empty(num_bytes, dtype=torch.uint8, device=cuda)
        near.copy_(memory, non_blocking=True)
        assert near.eq(value).all()
        memory.copy_(near + 1, non_blocking=True)
        torch.cuda.synchronize()
        return memory.eq(value + 1).all()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(12)))


def test_pinned_memory_that_there_is_not(cuda):
    with pytest.raises(RuntimeError, match="out of memory"):
        _memory.empty(1 << 60, CPU, pin=True)
    assert _memory.empty(1 << 20, CPU, pin=True).is_pinned()


@pytest.mark.parametrize("scheme", ["ibp", "planes", "raw"])
def test_a_table_that_is_dropped_while_it_is_read(cuda, scheme):
    x = embedding(200_000, 128, torch.bfloat16)
    ids = torch.randint(len(x), (400_000,), device=cuda)
    expected = x.to(cuda)[ids]
    for _ in range(3):
        table = ibp.compress(x, scheme=scheme)
        out = table.index_select(ids)
        del table
        assert_same_bits(out, expected)
