"""Tables with slots of a target size (ibp.spill.place), and the profiles that targets come from, against plain
tensors."""

import contextlib
import io
import math
import pickle
import types
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ibp
from helpers import assert_same_bits
from ibp import spill
from ibp._machine import memory
from ibp._rows.geometry import Survey, stored_sizes
from ibp._rows.learning import Options
from ibp._tables import coding

CPU = torch.device("cpu")
COLUMNS = 96  # of bfloat16: rows of 192 bytes
TARGETS = [1, 4 / 3, 2, 4, 16, math.inf]


def rows(count, kinds="coded"):
    """Rows that fit slots of half their size, that do not, raw ones, and zeros. kinds: one, or one for each row."""
    kinds = [kinds] * count if isinstance(kinds, str) else kinds
    made = torch.randn(count, COLUMNS).to(torch.bfloat16)
    for row, kind in zip(made, kinds):
        if kind == "sparse":
            row[8:] = 0
        elif kind == "noise":
            row.view(torch.int16).copy_(torch.randint(-(2**15), 2**15, (COLUMNS,), dtype=torch.int16))
        elif kind == "zeros":
            row.zero_()
    return made


def mixed(count=300):
    return rows(count, [("coded", "coded", "noise", "zeros", "coded")[row % 5] for row in range(count)])


def stored(table):
    """Bytes of every row as stored."""
    lengths = table.lengths.view(torch.int16).to(torch.int64) & 0xFFFF
    return stored_sizes(lengths, table.row_bytes, table.row_bytes)


def row_bytes_of(table, row):
    """The bytes of a row where they lie: in its slot, and in the overflow."""
    size, slot_bytes = int(stored(table)[row]), table.slot_bytes
    part = max(0, size - slot_bytes)
    base = int(table.bases[row]) if part else 0
    slot = table.slots[row * slot_bytes :][: size - part]
    return bytes(slot.tolist()), base, bytes(table.overflow[base : base + part].tolist())


# ---- place ----


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    x = mixed()
    table = ibp.spill.place(x, target, device="cpu")
    assert_same_bits(table.decompress(), x)
    ids = torch.randint(len(x), (50,))
    assert_same_bits(table.index_select(ids), x[ids])
    slot = 0 if math.isinf(target) else max(32, int(192 / target) // 32 * 32)
    assert table.slot_bytes == slot and table.slots.numel() == slot * len(x)
    parts = (stored(table) - slot).clamp(min=0)
    assert int((parts > 0).sum()) == (0 if target == 1 else int((stored(table) > slot).sum()))
    assert (table.device_bytes, table.host_bytes, table.spills_to_host) == (0, table.nbytes, False)


def test_progress_is_shown_only_if_asked_for(capfd):
    ibp.spill.place(mixed(), 2, device="cpu")
    assert capfd.readouterr() == ("", "")
    ibp.spill.place(mixed(), 2, device="cpu", progress=True)
    assert capfd.readouterr().err


def test_the_largest_target_within_a_threshold():
    x = torch.cat([rows(80, "sparse"), rows(20, "noise")])
    assert ibp.spill.place(x, device="cpu").slot_bytes < 192
    assert ibp.spill.place(x, threshold=0.1, device="cpu").slot_bytes == 192
    zeros = ibp.spill.place(torch.zeros(100, 50), device="cpu")
    assert zeros.slot_bytes == zeros.slots.numel() == zeros.overflow.numel() == 0
    assert_same_bits(zeros.decompress(), torch.zeros(100, 50))


def test_noise_keeps_its_target():
    """Rows that save nothing have slots of the target all the same, and the rest of them in overflow."""
    x = rows(100, "noise")
    table = ibp.spill.place(x, 2, device="cpu")
    assert (table.slot_bytes, table.slots.numel(), table.overflow.numel()) == (96, 9600, 9600)
    assert_same_bits(table.decompress(), x)
    whole = ibp.spill.place(x, 1, device="cpu")
    assert whole.scheme == "raw" and whole.slot_bytes == 192
    assert_same_bits(whole.decompress(), x)


@pytest.mark.filterwarnings("ignore:x requires grad")
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(0, 8),
        torch.randn(5, 0),
        torch.tensor(3.0),
        torch.randn(7),
        torch.randn(3, 5).T,
        torch.randn(40, 33),
        torch.randn(9, 4, 70, dtype=torch.float64),
        torch.randint(0, 9, (300, 16)),
        torch.randn(64, 64, requires_grad=True),
    ],
    ids=lambda x: f"{list(x.shape)} {x.dtype}",
)
def test_tensors_of_any_kind(x):
    for target in (None, 2, math.inf):
        table = ibp.spill.place(x, target, device="cpu")
        assert_same_bits(table.decompress(), x.detach().contiguous())


def test_tables_are_placed():
    """As they are coded; anew where the slots are to be others."""
    x = mixed()
    table = ibp.compress(x, scheme="planes", slot_bytes=96, device="cpu")
    assert ibp.spill.place(table, device="cpu") is table
    again = ibp.spill.place(table, 4, device="cpu")
    assert again.codebook is table.codebook and again.slot_bytes == 32
    assert_same_bits(again.decompress(), x)
    assert_same_bits(ibp.spill.place(table, slot_bytes=64, device="cpu").decompress(), x)


def test_what_place_refuses():
    x = mixed(50)
    codebook = ibp.codecs.analyze(x, scheme="planes")
    profile = ibp.spill.profile([{"x": x}])["x"]
    for error, match, arguments in (
        (ValueError, "target is 0.5", {"target": 0.5}),
        (ValueError, "target is nan", {"target": math.nan}),
        (TypeError, "target", {"target": "2"}),
        (ValueError, "both given", {"target": 2, "slot_bytes": 32}),
        (ValueError, "slot_bytes is 33", {"slot_bytes": 33}),
        (ValueError, "threshold is 1.5", {"threshold": 1.5}),
        (ValueError, "scheme is 'raw'", {"scheme": "raw"}),
        (ValueError, "row_bytes is 64", {"codebook": codebook, "row_bytes": 64}),
        (TypeError, "codebook is a list", {"codebook": [1]}),
        (ValueError, "target is a profile", {"target": profile, "slot_bytes": 32}),
    ):
        with pytest.raises(error, match=match):
            ibp.spill.place(x, device="cpu", **arguments)
    with pytest.raises(TypeError, match="x is a list"):
        ibp.spill.place([1.0], device="cpu")


# ---- where overflow lies ----

GPU, PEER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def two_gpus(monkeypatch):
    """Lets torch see two GPUs, of which GPU 0 can read the memory of GPU 1. Yields the pairs of GPUs between which
    access has been enabled."""
    enabled = []
    monkeypatch.setattr(memory, "canonical", torch.device)
    monkeypatch.setattr(memory, "_enable_access", lambda *pair: enabled.append(pair))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: (device, peer) == (GPU, PEER))
    return enabled


def test_homes_of_overflow(two_gpus):
    for where in (None, "pinned"):
        assert memory.overflow_home(where, GPU) == memory.overflow_home(where, CPU) == CPU
    assert two_gpus == []
    assert memory.overflow_home("cuda:1", GPU) == memory.overflow_home(PEER, GPU) == PEER
    assert two_gpus == [(GPU, PEER)] * 2


@pytest.mark.parametrize(
    ("where", "device", "match"),
    [
        ("disk", GPU, "overflow_memory is 'disk'; wanted 'pinned', another GPU, such as 'cuda:1', or None"),
        ("host", GPU, "overflow_memory is 'host'; wanted"),
        ("cpu", GPU, "overflow_memory is 'cpu'; wanted"),
        (CPU, GPU, "overflow_memory is device.type='cpu'.; wanted"),
        ([1], GPU, "overflow_memory is .1.; wanted"),
        ("cuda:0", GPU, "overflow_memory is 'cuda:0', the GPU of the slots; wanted another GPU"),
        (GPU, GPU, "overflow_memory is 'cuda:0', the GPU of the slots; wanted another GPU"),
        ("cuda:2", GPU, "overflow_memory is 'cuda:2', but torch sees 2 CUDA devices"),
        ("cuda:0", PEER, "overflow_memory is 'cuda:0', but cuda:1 cannot read the memory of cuda:0; wanted"),
        ("cuda:1", CPU, "overflow_memory is 'cuda:1', but the slots are in host memory; wanted slots on a GPU"),
    ],
    ids=str,
)
def test_refused_homes_of_overflow(two_gpus, where, device, match):
    with pytest.raises(ValueError, match=match):
        memory.overflow_home(where, device)
    assert two_gpus == []


def test_place_reads_where_overflow_is_to_lie():
    x = mixed(50)
    table = ibp.spill.place(x, 4, device="cpu", overflow_memory="pinned")
    assert table.overflow_memory == "host" and (table.host_bytes, table.peer_bytes) == (table.nbytes, 0)
    assert ibp.spill.place(table, device="cpu", overflow_memory="pinned") is table
    for of in (x, table):
        with pytest.raises(ValueError, match="'cuda:1', but the slots are in host memory"):
            ibp.spill.place(of, device="cpu", overflow_memory="cuda:1")
        with pytest.raises(ValueError, match="overflow_memory is 'device'; wanted 'pinned', another GPU"):
            ibp.spill.place(of, device="cpu", overflow_memory="device")
    codebook = ibp.codecs.analyze(x, scheme="planes")
    with pytest.raises(ValueError, match="overflow_memory is 'cuda:1'; wanted 'pinned' or None"):
        ibp.CodedRows(codebook, 1, slot_bytes=32, overflow_bytes=64, device="cpu", overflow_memory="cuda:1")


class FakeStream:
    """A stream that notes for which streams it waits."""

    def __init__(self, device):
        self.device, self.awaited = device, []

    def wait_stream(self, stream):
        self.awaited.append(stream)


def test_memory_of_a_peer_is_held_for_the_streams_that_use_it(monkeypatch):
    """The allocator must know the streams of both GPUs, and must not take one of them for its own."""
    current = {gpu: FakeStream(gpu) for gpu in (GPU, PEER)}
    entered, recorded = [], []

    def empty(size, dtype, device):
        assert (dtype, device) == (torch.uint8, PEER) and len(entered) == 1
        if size > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return types.SimpleNamespace(record_stream=recorded.append)

    monkeypatch.setattr(memory, "_overflow_streams", {})
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(entered.append(stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", current.get)
    memory.empty_overflow(1000, PEER, GPU)
    assert recorded == [*current.values()] and entered[0] not in recorded and entered[0].device == PEER
    assert current[GPU].awaited == entered and current[PEER].awaited == []
    entered.clear()
    with pytest.raises(torch.OutOfMemoryError, match="cuda:1 has no free memory for 1,001 bytes of overflow"):
        memory.empty_overflow(1001, PEER, GPU)


def test_overflow_is_copied_in_the_order_of_the_slots(monkeypatch):
    """The copy waits for the GPU of the slots, and this GPU for the copy; the current stream of the other GPU for
    nothing."""
    near, far = FakeStream(GPU), FakeStream(PEER)
    done = []
    to = types.SimpleNamespace(device=PEER, is_cuda=True, copy_=lambda source: done.append((source, [*far.awaited])))
    monkeypatch.setattr(memory, "_overflow_streams", {PEER: far})
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(done.append(stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", {GPU: near}.get)
    assert memory.copied_overflow(to, "source", GPU) is to
    assert done == [far, ("source", [near])] and near.awaited == [far]


def test_views_of_a_peer_keep_its_memory():
    data = torch.zeros(32, dtype=torch.uint8)
    owner = weakref.ref(data)
    capsule = ibp._core.map_peer(data, data.data_ptr(), data.nbytes, 1)
    del data
    assert owner() is not None
    del capsule
    assert owner() is None


# ---- files ----


def test_files_and_pickles(tmp_path):
    x = mixed()
    table = ibp.spill.place(x, 4, device="cpu").update_([3, 4], rows(2, "noise"))
    x = table.decompress()
    ibp.save(tmp_path / "x.safetensors", {"x": table})
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    for read in (
        ibp.load(tmp_path / "x.safetensors")["x"],
        pickle.loads(pickle.dumps(table)),
        torch.load(file, weights_only=True),
        table.clone(),
    ):
        assert read.slot_bytes == table.slot_bytes
        assert_same_bits(read.decompress(), x)
        assert_same_bits(ibp.spill.place(read, device="cpu").update_([0], x[1:2])[0], x[1])


# ---- rows that change ----

CHANGES = st.lists(
    st.lists(
        st.tuples(st.integers(0, 39), st.sampled_from(["sparse", "coded", "noise", "zeros"])), min_size=1, max_size=12
    ),
    min_size=1,
    max_size=8,
)


@given(st.sampled_from([4 / 3, 2, 4, math.inf]), CHANGES)
def test_changes_move_no_other_row(target, changes):
    torch.manual_seed(0)
    x = mixed(40)
    table = ibp.spill.place(x, target, device="cpu").update_([0], x[:1])  # from here on every row has a base of its own
    slots_bytes = table.slots.numel()
    for change in changes:
        ids = torch.tensor([id for id, _ in change])
        new = rows(len(ids), [kind for _, kind in change])
        others = sorted(set(range(40)) - set(ids.tolist()))
        before = {row: row_bytes_of(table, row) for row in others}
        table.update_(ids, new)
        for id, row in zip(ids.tolist(), new):
            x[id] = row
        assert {row: row_bytes_of(table, row) for row in others} == before
        assert table.slots.numel() == slots_bytes
        assert_same_bits(table.decompress(), x)
        assert_same_bits(table.index_select(ids), x[ids])


def test_rows_that_shrink_return_to_their_slots():
    x = rows(60, "sparse")
    table = ibp.spill.place(x, 4 / 3, device="cpu")
    assert int((stored(table) > table.slot_bytes).sum()) == 0
    table.update_(range(60), rows(60, "noise"))
    assert int((stored(table) > table.slot_bytes).sum()) == 60
    used = int(table._room.index.used)
    table.update_(range(60), x)
    assert int((stored(table) > table.slot_bytes).sum()) == 0 and table.stored_bytes < 60 * 192 // 2
    table.update_(range(60), rows(60, "noise"))
    assert int(table._room.index.used) == used, "rows take the rooms again that they had"
    with pytest.raises(IndexError):
        table.update_([60], x[:1])
    assert table.refit(device="cpu").num_rows == 60


@pytest.mark.parametrize("level", ["default", "fast"])
def test_placed_anew(monkeypatch, level):
    """What `refit` makes of a table that spills to host memory."""
    x = torch.randn(400, 512)
    table = ibp.spill.place(x, 4 / 3, level=level, device="cpu")
    monkeypatch.setattr(coding, "spills", lambda table: True)  # as on a GPU
    monkeypatch.setattr(coding, "decompress", lambda *args, **options: 100 * x)
    anew = coding.code_anew(table, Options(), level)
    monkeypatch.undo()
    assert_same_bits(ibp.decompress(anew), 100 * x)
    assert anew.slot_bytes == 1536 and anew.codebook.level == level and anew.codebook is not table.codebook


@pytest.mark.parametrize("row_bytes", [160, 150, 32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overflow_cost": 8.0},
        {"part_cost": 40.0},
        {"near": 1.2},
        {"overflow_cost": 0.0, "most_spilled": 3},
    ],
)
@given(data=st.data())
def test_the_cheapest_slots(row_bytes, options, data):
    """Against every size, row by row."""
    most = -(-row_bytes // 32)
    taken = data.draw(st.lists(st.integers(0, most), min_size=1, max_size=30))
    least = data.draw(st.sampled_from([0, 32]))
    sizes = [*range(least, row_bytes, 32), row_bytes]
    overflows = {size: [max(0, 32 * sectors - size) * (size < row_bytes) for sectors in taken] for size in sizes}
    costs = {}
    for size, parts in overflows.items():
        spilled = sum(part > 0 for part in parts)
        if spilled <= options.get("most_spilled", math.inf):
            costs[size] = size * len(taken) + options.get("overflow_cost", 1) * sum(parts)
            costs[size] += options.get("part_cost", 0) * spilled
    wanted = max(size for size, cost in costs.items() if cost <= options.get("near", 1) * min(costs.values()))
    survey = Survey(row_bytes, 0, torch.tensor([taken.count(k) for k in range(most + 1)]))
    found = survey.best_slots(least, **options)
    assert found == (wanted, pytest.approx(sum(overflows[wanted]) / len(taken)))


# ---- places ----


def test_a_place_that_spills():
    x = mixed(100)
    codebook = ibp.codecs.analyze(x, scheme="planes")
    place = ibp.CodedRows(
        codebook, 100, slot_bytes=32, overflow_bytes=100 * 192, device="cpu", overflow_memory="pinned"
    )
    ibp.encode_into(x, place)
    assert place.overflow_memory == "host" and place.counts().lost == 0
    assert_same_bits(place.decode(dtype=torch.bfloat16), x)
    assert_same_bits(place.table(x.shape, x.dtype)[7], x[7])
    short = ibp.CodedRows(codebook, 100, slot_bytes=32, overflow_bytes=64, device="cpu", overflow_memory="pinned")
    ibp.encode_into(x, short)
    assert short.counts().lost > 0
    with pytest.raises(ValueError, match="lost"):
        short.decode()
    with pytest.raises(ValueError, match="overflow_bytes is -64; wanted 0 or more"):
        ibp.CodedRows(codebook, 1, slot_bytes=32, overflow_bytes=-64, device="cpu")
    with pytest.raises(ValueError, match="overflow_memory is 'disk'; wanted 'pinned'"):
        ibp.CodedRows(codebook, 1, slot_bytes=32, overflow_bytes=64, device="cpu", overflow_memory="disk")


def test_pages_that_outgrow_their_slots():
    """A pool of small slots: no page is lost where overflow spills, and the pool counts slots alone."""
    pages = mixed(640).view(64, 10 * COLUMNS)
    codebook = ibp.codecs.analyze(mixed(), scheme="planes")
    options = {"page_bytes": 10 * 192, "num_pages": 64, "pool_bytes": 640 * 100, "device": "cpu", "memory": "device"}
    store = ibp.kv.KVStore(codebook, **options, overflow_memory="pinned")
    assert store.store(range(64), pages).lost() == []
    assert store.place.slot_bytes == 96 and store.pool_bytes == 640 * 96 and store.gain == 2
    assert "spills to host memory" in repr(store) and store.stats().spilled_rows > 0
    out = torch.empty_like(pages)
    store.load(range(64), out).synchronize()
    assert_same_bits(out, pages)
    store.store([5], pages[:1])
    store.load([4, 5, 6], out, [0, 1, 2]).synchronize()
    assert_same_bits(out[:3], pages[[4, 0, 6]])
    store.compact()
    store.load(range(5), out[:5]).synchronize()
    assert_same_bits(out[:5], pages[:5])
    assert ibp.kv.KVStore(codebook, **options).store(range(64), pages).lost() != []
    more = ibp.kv.KVStore(codebook, **(options | {"num_pages": None}), slot_bytes=32, overflow_memory="pinned")
    assert len(more) == 640 * 100 // 320
    with pytest.raises(ValueError, match="overflow_memory is 'disk'"):
        ibp.kv.KVStore(codebook, **options, overflow_memory="disk")


@pytest.mark.parametrize("slot_bytes", [0, 32, 96, 160, 192])
def test_pages_that_grow_again_and_again(slot_bytes):
    """Rows keep their parts of overflow: none is lost, whatever was there before."""
    codebook = ibp.codecs.analyze(mixed(), scheme="planes")
    store = ibp.kv.KVStore(
        codebook,
        page_bytes=10 * 192,
        num_pages=64,
        slot_bytes=slot_bytes,
        device="cpu",
        memory="device",
        overflow_memory="pinned",
    )
    out = torch.empty(64, 10 * COLUMNS, dtype=torch.bfloat16)
    for call, kind in enumerate(("sparse", "coded", "zeros", "noise", "coded", "noise")):
        pages = rows(640, kind).view(64, -1)
        assert store.store(range(64), pages).lost() == []
        store.load(range(64), out).synchronize()
        assert_same_bits(out, pages)
        if call == 1:
            assert store.compact() == 0
        if call == 4:
            store.clear()
    assert store.stats().lost_rows == 0


# ---- profile ----


def test_profile_chooses_the_largest_ratio_within_the_threshold():
    """Against rows that are compressed with the profile's codebook, and counted."""
    snapshots = [{"x": torch.cat([rows(80 - 4 * k, "sparse"), rows(20 + 4 * k, "noise")])} for k in range(3)]
    for ratios in (ibp.spill.RATIOS, None):
        for threshold in (0.1, 0.2, 0.25, 0.29, 1.0):
            found = ibp.spill.profile(snapshots, threshold, ratios=ratios, device="cpu")["x"]
            tables = [ibp.compress(of["x"], codebook=found.codebook, layout="packed") for of in snapshots]
            sizes = range(0, 193, 32) if ratios is None else [0, 32, 32, 96, 128, 192]
            allowed = [
                size
                for size in sizes
                if size == 192 or all((stored(table) > size).float().mean() <= threshold for table in tables)
            ]
            assert found.slot_bytes == min(allowed)


def test_a_profile_predicts_what_place_does():
    snapshots = [{"x": mixed(200), "zeros": torch.zeros(64, 64), "empty": torch.empty(0)} for _ in range(2)]
    report = ibp.spill.profile(iter(snapshots), device="cpu")
    assert list(report) == ["x", "zeros"] and report.num_snapshots == 2
    assert report["zeros"].slot_bytes == 0 and report["zeros"].target == math.inf
    table = ibp.spill.place(snapshots[0]["x"], report["x"], device="cpu")
    spill = report["x"].spill(0)
    assert table.codebook is report["x"].codebook and table.slot_bytes == report["x"].slot_bytes
    assert table.overflow.numel() == spill.num_bytes
    assert spill.rows == float((stored(table) > table.slot_bytes).double().mean())
    assert report.device_bytes == table.slots.numel() + table.index_bytes + 2 * 64 + 8 * 2
    assert report.host_bytes >= spill.num_bytes and report.ratio == report.original_bytes / report.device_bytes
    rates = [point.ratio for point in report.sweep]
    assert rates == sorted(rates) and report.best_ratio > 1
    assert [point.threshold for point in report.sweep] == [0.1, 0.2, 0.3, 0.4]
    for tensor in (*report.at(0.1).values(), *report.at(0.4).values()):
        assert tensor.spill().rows <= 0.4
    again = pickle.loads(pickle.dumps(report))
    assert repr(again) == repr(report) and "zeros" in repr(report) and "threshold 40%" in repr(report)


def test_a_profile_counts_the_bytes_of_overflow():
    """For slots of every size, those of the parts outside that `place` writes there."""
    x = mixed(200)
    found = ibp.spill.profile([{"x": x}], device="cpu")["x"]
    for slot_bytes in range(32, 193, 32):
        table = ibp.spill.place(x, codebook=found.codebook, slot_bytes=slot_bytes, device="cpu")
        spill = found.spill(0, slot_bytes)
        outside = (stored(table) - slot_bytes).clamp(min=0)
        assert spill.num_bytes == table.overflow.numel() == int(-(-outside // 32).sum()) * 32
        assert spill.rows == float((outside > 0).double().mean())
    assert found.spill(0, 192).num_bytes == 0 < found.spill(0, 96).num_bytes < found.spill(0, 0).num_bytes


def test_a_profile_keeps_tensors_that_change_in_place(monkeypatch):
    x = torch.zeros(500, COLUMNS, dtype=torch.bfloat16)

    def run():
        for _ in range(3):
            yield {"x": x}
            x.copy_(rows(500, "noise"))

    monkeypatch.setattr(spill, "_SAMPLE_BYTES", 200 * 192)
    report = ibp.spill.profile(run(), device="cpu")["x"]
    assert [sum(sectors) for sectors in report.histograms] == [200] * 3
    assert report.spill(0).rows == 0 and report.slot_bytes == 192


def test_what_profile_refuses():
    x = mixed(20)
    for error, match, arguments in (
        (ValueError, "there are no snapshots", ([],)),
        (TypeError, "a snapshot is a Tensor", ([x],)),
        (TypeError, "a is a list", ([{"a": [1]}],)),
        (ValueError, "it was", ([{"a": x}, {"a": x[:5]}],)),
        (ValueError, "threshold is 2", ([{"a": x}], 2)),
    ):
        with pytest.raises(error, match=match):
            ibp.spill.profile(*arguments, device="cpu")
    with pytest.raises(ValueError, match="target is 0"):
        ibp.spill.profile([{"a": x}], ratios=[0])
    assert ibp.spill.profile([{}]).ratio == 0 and "0 tensors" in repr(ibp.spill.profile([{}]))
