"""Rows that change: `update_`, `append`, `refit`, against a tensor that is changed likewise."""

import copy
import io
import itertools
import pickle
import signal
import sys

import pytest
import torch

import ibp
from handles import handle_of
from helpers import assert_same_bits
from ibp._machine import memory
from ibp._rows.handle import spread_bytes
from ibp._tables import changes
from interrupts import interrupt_at

ON_CPU = {"device": "cpu", "memory": "host"}
KINDS = {
    "slots": {"scheme": "planes", "slot_bytes": 96},
    "packed": {"scheme": "planes", "layout": "packed"},
    "in place": {"scheme": "planes", "slot_bytes": 192},
    "masks": {"scheme": "ibp", "slot_bytes": 128},
    "clusters": {"scheme": "planes", "clusters": 3, "slot_bytes": 128},
    "raw": {"scheme": "raw"},
}
# Items of whole rows, of several, of pieces of rows, of rows that two items share, of bytes.
SHAPES = {
    "one row": ((150, 96), None),
    "three rows": ((50, 3, 96), 192),
    "many in a row": ((1000, 6), 192),
    "across rows": ((150, 50), 192),
    "numbers": ((5000,), 192),
}


def rows_like(x, count):
    """Rows that take few bytes, many, and as many as raw."""
    scale = 10.0 ** torch.randint(-20, 20, (count, *[1] * (x.dim() - 1)))
    rows = torch.randn(count, *x.shape[1:]) * torch.where(torch.rand(scale.shape) < 0.5, 1.0, scale)
    rows[torch.rand(count) < 0.2] = 0
    noise = torch.randint(-(2**15), 2**15, rows.shape, dtype=torch.int16).view(torch.bfloat16)
    is_noise = (torch.rand(scale.shape) < 0.2).expand(rows.shape)
    return torch.where(is_noise, noise, rows.to(torch.bfloat16))


def tensor(shape):
    return torch.randn(shape).to(torch.bfloat16)


def assert_reads(table, x):
    """All ways to read rows on the CPU."""
    assert table.shape == x.shape and len(table) == len(x) and table.num_rows == -(-x.nbytes // table.row_bytes)
    assert_same_bits(table.decompress(), x)
    ids = torch.randint(len(x), (64,))
    assert_same_bits(table.index_select(ids), x[ids])
    assert_same_bits(table.index_select(ids.to(torch.int32)), x[ids])
    first, last = sorted(torch.randint(len(x) + 1, (2,)).tolist())
    assert_same_bits(table[first:last], x[first:last])
    assert_same_bits(table[-1], x[-1])
    for loaded in (pickle.loads(pickle.dumps(table)), table.clone(), copy.deepcopy(table)):
        assert_same_bits(loaded.decompress(), x)
        assert loaded.stored_bytes == table.stored_bytes


def change(table, x, count):
    ids = torch.randint(len(x), (count,))
    rows = rows_like(x, count)
    table.update_(ids, rows)
    x = x.clone()
    for id, row in zip(ids.tolist(), rows):
        x[id] = row  # the last one of equal ones counts
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_changes(kind, shape):
    shape, row_bytes = SHAPES[shape]
    x = tensor(shape)
    options = KINDS[kind] if row_bytes is None else {**KINDS[kind], "row_bytes": row_bytes}
    table = ibp.compress(x, **options, **ON_CPU)
    codebook = table.codebook
    for count in (1, 7, 40, 3):
        x = change(table, x, count)
        assert_reads(table, x)
        rows = rows_like(x, count)
        assert table.append(rows) is table
        x = torch.cat((x, rows))
        assert_reads(table, x)
    assert table.codebook is codebook
    before = table.nbytes
    assert table.refit(device="cpu") is table and table.nbytes <= before
    assert_reads(table, x)
    x = change(table, x, 20)
    assert_reads(table, x)


def test_rows_that_are_not_named_stay_where_they_are():
    """Bytes of the slots and of the overflow parts of other rows are as they were."""
    x = tensor((200, 96))
    table = ibp.compress(x, scheme="planes", slot_bytes=96, **ON_CPU)
    table.update_([5], rows_like(x, 1))
    slots, overflow, bases = table.slots.clone(), table.overflow.clone(), table.bases.clone()
    table.update_([17, 40], rows_like(x, 2))
    others = [row for row in range(200) if row not in (17, 40)]
    assert torch.equal(table.slots.view(200, 96)[others], slots.view(200, 96)[others])
    assert torch.equal(table.bases[others], bases[others])
    parts = (table.lengths.to(torch.int64) - 96).clamp(min=0)
    for row in others:
        base, size = int(bases[row]), int(parts[row])
        assert torch.equal(table.overflow[base : base + size], overflow[base : base + size])


def test_figures_stay_true():
    x = tensor((400, 96))
    table = ibp.compress(x, scheme="planes", slot_bytes=96, **ON_CPU)
    first = table.savings
    noise = torch.randint(-(2**15), 2**15, x.shape, dtype=torch.int16).view(torch.bfloat16)
    table.update_(torch.arange(200), noise[:200])
    codebook = table.codebook.nbytes
    measured = torch.ops.ibp.measure_rows(
        torch.cat((noise[:200], x[200:])).view(torch.uint8).view(-1), table.codebook.words("cpu"), table.codebook.codec
    ).to(torch.int64)
    assert table.stored_bytes == int(torch.where(measured == 0, 192, measured).sum()) + codebook
    assert table.savings < first / 1.9
    room = table._room
    memory = [room.slots, room.overflow, room.index.lengths, room.index.bases, room.index.rooms, room.index.used]
    words = table.codebook.words("cpu")
    assert table.nbytes == sum(tensor.nbytes for tensor in memory) + codebook + words.nbytes
    assert table.index_bytes == sum(tensor.nbytes for tensor in memory[2:])
    table.update_(torch.arange(200), torch.zeros(200, 96).bfloat16())
    default = table.stored_bytes
    assert default == int(measured[200:].sum()) + codebook, "rows of zeros have no bytes"
    assert table.link_bytes < ibp.compress(x, codebook=table.codebook, slot_bytes=96, **ON_CPU).link_bytes
    assert table.refit(scheme="planes", device="cpu").stored_bytes <= 1.05 * default


def test_memory_of_a_table_that_changes_for_long():
    """Rows remember the room that they have left: the overflow takes no more than two parts a row."""
    x = tensor((100, 96))
    table = ibp.compress(x, scheme="planes", slot_bytes=64, **ON_CPU)
    for _ in range(60):
        x = change(table, x, 50)
    assert_same_bits(table.decompress(), x)
    assert int(table._room.index.used) <= 100 * (128 + 128 + 32)


def test_appending_row_by_row_copies_little(monkeypatch):
    """The capacity grows by halves: few of many calls make new memory."""
    table = ibp.compress(tensor((10, 96)), scheme="planes", slot_bytes=128, **ON_CPU)
    made = []
    real = changes.memory.empty

    def counted(num_bytes, *arguments, **options):
        made.append(num_bytes)
        return real(num_bytes, *arguments, **options)

    monkeypatch.setattr(changes.memory, "empty", counted)
    rows = tensor((500, 96))
    for row in rows:
        table.append(row[None])
    assert len(table) == 510 and len(made) < 40
    assert_same_bits(table[10:], rows)


# ---- arguments ----


def test_ids_of_any_kind():
    x = tensor((50, 96))
    for ids in ([3, 4], (3, 4), range(3, 5), torch.tensor([3, 4], dtype=torch.int32), torch.tensor([3, 4]).numpy()):
        table = ibp.compress(x, **KINDS["slots"], **ON_CPU)
        rows = rows_like(x, 2)
        assert table.update_(ids, rows.requires_grad_(False)) is table
        assert_same_bits(table[3:5], rows)
    table.update_([], rows[:0]).append(rows[:0])
    table.update_(torch.empty(0, dtype=torch.int64), rows[:0])
    assert len(table) == 50
    table.update_([7], torch.nn.Parameter(rows[:1]))  # its values
    assert_same_bits(table[7], rows[0])
    apart = tensor((4, 2, 96))
    table.update_([1, 2, 3, 4], apart[:, 1])
    assert_same_bits(table[1:5], apart[:, 1])


@pytest.mark.parametrize("ids", [[50], [-1], [3, 50], [2**40]])
def test_ids_out_of_range_change_nothing(ids):
    x = tensor((50, 96))
    table = ibp.compress(x, **KINDS["slots"], **ON_CPU)
    for _ in range(2):
        with pytest.raises(IndexError, match="wanted 0 to 49"):
            table.update_(ids, tensor((len(ids), 96)))
        assert_reads(table, x)
        x = change(table, x, 5)


@pytest.mark.parametrize("count", [1, 2, 256, 257, 700])
def test_few_and_many_ids(count):
    """The last of equal ones counts, and one that is out of range changes nothing, however many there are; in inference
    mode and outside it."""
    x = torch.randn(1000, 60)
    table = ibp.compress(x, scheme="planes", device="cpu", memory="host")
    for ids in (torch.randperm(1000)[:count], torch.randint(1000, (count,)).sort().values, torch.zeros(count).long()):
        rows = torch.randn(count, 60)
        with torch.inference_mode(count % 2 == 0):
            table.update_(ids, rows)
        for number, row in zip(ids.tolist(), rows):
            x[number] = row
        assert_same_bits(table.decompress(), x)
        for bad in (-1, 1000):
            with pytest.raises(IndexError, match=rf"ids\[{count - 1}\] is {bad}; wanted 0 to 999"):
                table.update_(torch.cat([ids[:-1], torch.tensor([bad])]), rows)
    assert_same_bits(table.decompress(), x)


def test_arguments_that_do_not_fit():
    x = tensor((50, 96))
    table = ibp.compress(x, **KINDS["slots"], **ON_CPU)
    rows = tensor((2, 96))
    for wrong in (rows[:1], rows[:, :95], rows[0], rows.view(2, 2, 48)):
        with pytest.raises(ValueError, match="rows has shape"):
            table.update_([1, 2], wrong)
    for wrong in (rows[:, :95], rows[0], torch.tensor(3.0).bfloat16()):
        with pytest.raises(ValueError, match="rows has shape"):
            table.append(wrong)
    for call in (lambda rows: table.update_([1, 2], rows), table.append):
        with pytest.raises(TypeError, match="rows has dtype torch.float32; wanted the table's"):
            call(rows.float())
        with pytest.raises(TypeError, match="rows is a list"):
            call(rows.tolist())
        with pytest.raises(TypeError, match="rows is a torch.sparse"):
            call(rows.to_sparse())
    with pytest.raises(ValueError, match="ids has shape"):
        table.update_([[1, 2]], rows)
    with pytest.raises(TypeError, match="ids has dtype torch.float32"):
        table.update_(torch.tensor([1.0, 2.0]), rows)
    with pytest.raises(ValueError, match="0 dimensions"):
        ibp.compress(torch.tensor(1.0), **ON_CPU).append(torch.ones(1))
    with pytest.raises(ValueError, match="scheme"):
        table.refit(scheme="none")
    assert_reads(table, x)


@pytest.mark.parametrize(
    "options", [{}, {"scheme": "planes"}, {"scheme": "ibp"}, {"level": "default"}, {"clusters": 2}]
)
def test_refit_keeps_the_level(options):
    """Unless it is told otherwise."""
    table = ibp.compress(torch.randn(300, 64), level="fast", device="cpu")
    codebook = table.refit(device="cpu", **options).codebook
    assert codebook.level == ("fast" if options in ({}, {"scheme": "planes"}) else "default")


def test_small_and_empty_tables():
    for shape in ((0, 5), (1, 5), (3, 0), (0,), (1,)):
        x = torch.randn(shape)
        table = ibp.compress(x, **ON_CPU)
        table.append(torch.ones(3, *shape[1:]))
        x = torch.cat((x, torch.ones(3, *shape[1:])))
        assert_same_bits(table.decompress(), x)
        table.update_([0, 2], torch.full((2, *shape[1:]), 7.0))
        x[0] = x[2] = 7
        assert table.shape == x.shape
        assert_same_bits(table.decompress(), x)
        assert_same_bits(table.refit(device="cpu").decompress(), x)


def test_a_table_of_few_rows_among_many_tables():
    """32 rows and fewer share one base at first; with a row the two forms are one."""
    for count in (1, 2, 31, 32, 33):
        x = tensor((count, 96))
        table = ibp.compress(x, scheme="planes", slot_bytes=32, **ON_CPU)
        for _ in range(3):
            x = change(table, x, 2)
            assert_reads(table, x)


# ---- whose memory it is ----


def test_copies_do_not_change_with_a_table():
    x = tensor((100, 96))
    for kind in ("slots", "packed", "in place", "raw"):
        table = ibp.compress(x, **KINDS[kind], **ON_CPU)
        shallow, deep = copy.copy(table), copy.deepcopy(table)
        y = change(table, x, 30)
        again = copy.copy(table)
        z = change(again, y, 30)
        w = change(table, y, 30)
        for other, wanted in ((shallow, x), (deep, x), (again, z), (table, w)):
            assert_same_bits(other.decompress(), wanted)


def test_codebooks_are_shared_and_stay():
    x = tensor((100, 96))
    codebook = ibp.codecs.analyze(x, scheme="planes")
    first, second = (ibp.compress(x, codebook=codebook, slot_bytes=128, **ON_CPU) for _ in range(2))
    words = codebook.words("cpu").clone()
    y = change(first, x, 50)
    assert torch.equal(codebook.words("cpu"), words) and first.codebook is second.codebook
    assert_same_bits(second.decompress(), x)
    first.refit(device="cpu")
    assert first.codebook is not codebook
    assert_same_bits(first.decompress(), y)


def test_a_table_in_a_tensors_memory():
    x = tensor((100, 96))
    held = x.clone()
    table = ibp.compress(held, **ON_CPU, inplace=True)
    y = change(table, x, 30)
    assert table.slots.data_ptr() == held.data_ptr()
    rows = rows_like(x, 5)
    table.append(rows)  # which finds no room there
    assert table.slots.data_ptr() != held.data_ptr() and table._owner is None
    held.zero_()
    assert_same_bits(table.decompress(), torch.cat((y, rows)))
    assert_same_bits(table.share_memory_().decompress(), torch.cat((y, rows)))


def test_raw_rows_are_copied_once_when_slots_begin_to_hold_them_whole(monkeypatch):
    """The first change of a raw table with an overflow joins the parts of its rows in new memory. No other table has
    this memory, so the rows are not copied once more, and the tensor that had the old memory is let go."""
    x = tensor((100, 96))
    rows = x.view(torch.uint8).clone()
    slots, overflow = rows[:, :32].reshape(-1).clone(), rows[:, 32:].reshape(-1).clone()
    rest = {"lengths": torch.empty(0, dtype=torch.uint16), "bases": torch.arange(4) * 32 * 160, "codebook": None}
    form = {"shape": x.shape, "dtype": x.dtype, "scheme": "raw", "row_bytes": 192, "slot_bytes": 32}
    table = ibp.CompressedTensor(**form, slots=slots, overflow=overflow, **rest)
    table._owner = slots
    copied, made, empty = copy.copy(table), [], memory.empty
    monkeypatch.setattr(memory, "empty", lambda *args: made.append(empty(*args)) or made[-1])
    changes.make_room(copied)
    monkeypatch.undo()
    assert [part.data_ptr() for part in made if part.numel() == x.nbytes] == [copied.slots.data_ptr()]
    assert copied._owner is None and table._owner is slots
    y = change(copied, x, 30)
    assert_same_bits(copied.decompress(), y)
    assert_same_bits(table.decompress(), x)


def test_shared_tables_are_refused():
    x = tensor((100, 96))
    table = ibp.compress(x, **KINDS["slots"], **ON_CPU).share_memory_()
    for call in (lambda: table.update_([1], x[:1]), lambda: table.append(x[:1]), table.refit):
        with pytest.raises(RuntimeError, match="clone"):
            call()
    assert_same_bits(table.decompress(), x)
    changed = table.clone()
    y = change(changed, x, 20)
    changed.append(x[:3])
    assert_same_bits(ibp.distributed.open_shared(changed.share()).decompress(), torch.cat((y, x[:3])))


def test_files_of_changed_tables():
    """They hold the rows, and not what there is room for."""
    x = tensor((300, 96))
    for kind in KINDS:
        table = ibp.compress(x, **KINDS[kind], **ON_CPU)
        y = torch.cat((change(table, x, 40), x[:1]))
        table.append(x[:1])
        file = io.BytesIO()
        torch.save(table, file)
        assert len(file.getvalue()) < spread_bytes(table) + 12 * 302 + 20_000
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_same_bits(loaded.decompress(), y)
        z = change(loaded, y, 40)
        assert_reads(loaded, z)
        module = torch.nn.Sequential(ibp.nn.Embedding(table))
        assert_same_bits(module.state_dict()["0.weight"], y)


def test_corrupt_indexes_stay_harmless():
    """Bases and lengths that mean nothing: changed rows are right, and the others are what they were."""
    x = tensor((200, 96))
    for seed in range(20):
        torch.manual_seed(seed)
        table = ibp.compress(x, scheme="planes", slot_bytes=64, **ON_CPU)
        state = table.__getstate__()
        bad = torch.randint(-(2**62), 2**62, state["bases"].shape) if seed % 2 else state["bases"] + 32 * seed
        lengths = torch.randint(-(2**15), 2**15, state["lengths"].shape, dtype=torch.int16)
        state["bases"], state["lengths"] = bad, lengths if seed % 3 == 1 else state["lengths"]
        table = ibp.CompressedTensor.__new__(ibp.CompressedTensor)
        table.__setstate__(state)
        ids, rows = torch.randperm(200)[:50], rows_like(x, 50)
        table.update_(ids, rows)
        assert_same_bits(table.index_select(ids), rows)


# ---- interruptions ----


@pytest.mark.parametrize("call", ["update", "append", "refit"])
def test_interrupted(call):
    """An exception at any step: the table has the old rows or the new ones, and can be changed again."""
    assert sum(was_interrupted(call, at) for at in range(40)) > 10


def was_interrupted(call, at):
    """Interrupts a call at a line of the code that changes tables."""
    torch.manual_seed(at)
    x = tensor((77, 50))  # rows that items share
    table = ibp.compress(x, scheme="planes", slot_bytes=96, row_bytes=192, **ON_CPU)
    if at % 2:
        x = change(table, x, 5)
    ids, rows = torch.randperm(77)[:20], rows_like(x, 20)
    new = x.clone()
    new[ids] = rows
    if call != "update":
        new = x if call == "refit" else torch.cat((x, rows))
    steps = [0]
    ours = {changes.__file__, ibp._rows.forms.__file__, ibp._rows.table.__file__}

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in ours:
            return None
        if event == "line":
            steps[0] += 1
            if steps[0] == 1 + 5 * at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        {
            "update": lambda: table.update_(ids, rows),
            "append": lambda: table.append(rows),
            "refit": lambda: table.refit(scheme="planes", device="cpu"),
        }[call]()
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(None)
    now = table.decompress()
    assert any(now.shape == y.shape and torch.equal(now.view(torch.int16), y.view(torch.int16)) for y in (x, new))
    assert now.shape == table.shape
    now = change(table, now, 10)
    table.append(rows)
    assert_reads(table, torch.cat((now, rows)))
    return interrupted


def test_interrupted_append_to_a_short_row():
    """Its bytes are the old ones, or the completed ones."""
    x, rows = tensor((69, 50)), torch.randint(-(2**15), 2**15, (40, 50), dtype=torch.int16).view(torch.bfloat16)
    new = torch.cat((x, rows))
    made = ibp.compress(x, scheme="planes", slot_bytes=128, row_bytes=192, **ON_CPU)
    for moment in itertools.count(0, 3):
        table = made.clone()
        _, interrupts = interrupt_at(moment, None, lambda: table.append(rows))
        assert_same_bits(table.decompress(), x if len(table) == len(x) else new)
        if len(table) == len(x):
            table.append(rows)
            assert_same_bits(table.decompress(), new)
        if not interrupts:
            break
    assert moment > 5


def test_append_that_fails_when_the_overflow_has_grown(monkeypatch):
    """The short last row has its old bytes in the larger overflow, too."""
    torch.manual_seed(0)
    becomes = ibp._rows.table.Table._set_room

    def fails(self, room, geometry=None):
        if geometry is not None:
            raise KeyboardInterrupt
        return becomes(self, room)

    for num_items, slot_bytes in itertools.product((21, 69, 117), (64, 96, 128)):
        x, noise = tensor((num_items, 50)), torch.randint(-(2**15), 2**15, (300, 50), dtype=torch.int16)
        table = ibp.compress(x, scheme="planes", slot_bytes=slot_bytes, row_bytes=192, **ON_CPU)
        table.update_(torch.arange(num_items - 4, num_items), x[-4:])
        size_before = table.overflow.numel()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ibp._rows.table.Table, "_set_room", fails)
            table.append(noise.view(torch.bfloat16))
        assert table.overflow.numel() > size_before
        assert_same_bits(table.decompress(), x)


def test_interrupted_by_a_signal():
    """A real one, while rows are coded."""
    x = tensor((20_000, 256))
    table = ibp.compress(x[:1000], scheme="planes", **ON_CPU).append(x[1000:])
    rows = tensor((20_000, 256))
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        table.update_(torch.arange(20_000), rows)
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    now = table.decompress()
    assert torch.equal(now, x) or torch.equal(now, rows)


# ---- the operation ----


def test_threads_code_the_rows_of_one_call(set_threads):
    set_threads(4)
    x = tensor((4000, 256))
    table = ibp.compress(x, scheme="planes", slot_bytes=256, **ON_CPU)
    for _ in range(3):
        x = change(table, x, 3000)
        assert_same_bits(table.decompress(), x)


def operands(x, numbers):
    """The arguments of encode_into for rows of a table of 50 that has changed, and the table."""
    table = ibp.compress(tensor((50, 96)), scheme="planes", slot_bytes=96, **ON_CPU)
    table.update_(torch.arange(50), rows_like(x, 50))
    room, codebook = table._room, table.codebook
    lengths, bases, rooms, used = room.index
    fault, counts = torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    slots = (room.slots, room.overflow, lengths, bases, codebook.words("cpu"), codebook.codec, 96, 0, 50, 192)
    return table, [handle_of(*slots, rooms, used), x, None, torch.tensor(numbers), 0, 0, counts, fault]


def test_the_operation_on_the_cpu():
    x = torch.zeros(3, 96).bfloat16()
    torch.library.opcheck(torch.ops.ibp.encode_into.default, operands(x, [4, 0, 9])[1])
    table, arguments = operands(x, [4, 50, 9])
    torch.ops.ibp.encode_into(*arguments)
    assert arguments[-1].tolist()[:3] == [2, 1, 50]  # IBP_INDEX_OUT_OF_RANGE, noted and left out
    assert not table[[4, 9]].any()
    for wrong in (x[:2], x.float().view(torch.uint8)[:, :191]):
        table, arguments = operands(x, [4, 0, 9])
        with pytest.raises(RuntimeError, match="row_ids has|x has"):
            torch.ops.ibp.encode_into(arguments[0], wrong, *arguments[2:])


# ---- on GPUs ----


@pytest.fixture(params=["on the GPU", "pinned", "pageable"])
def home(request, cuda):
    return request.param


def table_at(home, x, **options):
    if home == "on the GPU":
        return ibp.compress(x.cuda(), **options)
    return ibp.compress(x, memory={"pinned": "pinned", "pageable": "host"}.get(home), **options)


def assert_reads_on_gpu(table, x, cuda):
    paths = [None, "gpu", "bucketed"] if table.is_cuda or table.is_pinned() else [None]
    near = x.to(cuda)
    ids = torch.randint(len(x), (64,), device=cuda)
    for path in paths:
        assert_same_bits(table.index_select(ids, device=cuda, path=path).cpu(), near[ids].cpu())
    assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)
    assert_same_bits(table[3:50].cpu(), x[3:50])
    if not table.is_cuda:
        assert_same_bits(
            table.index_select(ids.cpu(), device=cuda, path="cpu" if x.dim() > 1 else None).cpu(), x[ids.cpu()]
        )
        assert_same_bits(table.index_select(ids.cpu()), x[ids.cpu()])
    if table.is_pinned():
        for path in ("copy", "gpu"):
            assert_same_bits(table.decompress(device=cuda, path=path, check=True).cpu(), x)
    table.check()


@pytest.mark.parametrize("kind", KINDS)
def test_changes_on_a_gpu(cuda, home, kind):
    x = tensor((700, 96))
    table = table_at(home, x, **KINDS[kind])
    for step, where in enumerate(["cpu", cuda, cuda, "cpu", cuda]):
        count = (1, 50, 300, 7, 20)[step]
        ids, rows = torch.randint(len(x), (count,)), rows_like(x, count)
        for id, row in zip(ids.tolist(), rows):
            x[id] = row
        table.update_(ids.to(where), rows.to(where))
        assert_reads_on_gpu(table, x, cuda)
        rows = rows_like(x, count)
        table.append(rows.to(where))
        x = torch.cat((x, rows))
        assert_reads_on_gpu(table, x, cuda)
        assert_reads(table.cpu(), x)
    with pytest.raises(IndexError, match="wanted 0 to"):
        table.update_(torch.tensor([len(x)], device=cuda), x[:1].to(cuda))
    stored = table.stored_bytes
    assert stored == ibp.compress(x, codebook=table.codebook, scheme=table.scheme, **ON_CPU).stored_bytes or (
        table.scheme == "raw"
    )
    table.refit()
    assert table.is_pinned() == (home == "pinned") and table.is_cuda == (home == "on the GPU")
    assert_reads_on_gpu(table, x, cuda)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_on_a_gpu(cuda, home, shape):
    shape, row_bytes = SHAPES[shape]
    x = tensor(shape)
    table = table_at(home, x, scheme="planes", slot_bytes=96, row_bytes=row_bytes or 192)
    for count in (5, 40):
        ids, rows = torch.randperm(len(x))[:count], rows_like(x, count)
        x[ids] = rows
        table.update_(ids.to(cuda), rows.to(cuda))
        table.append(rows.to(cuda))
        x = torch.cat((x, rows))
        assert_same_bits(table.decompress(device=cuda, check=True).cpu(), x)
        assert_same_bits(table.cpu().decompress(), x)


def test_changes_are_in_order_with_reads(cuda, home):
    """Many of both on one stream, nothing waited for in between."""
    x = tensor((2000, 256))
    table = table_at(home, x, scheme="planes", slot_bytes=352)
    near, results = x.to(cuda), []
    for _ in range(30):
        ids = torch.randperm(len(x), device=cuda)[:500]
        rows = rows_like(x, 500).to(cuda)
        before = table.index_select(ids, device=cuda)
        table.update_(ids, rows)
        results += [(before, near[ids]), (table.index_select(ids, device=cuda), rows)]
        near[ids] = rows
    for found, wanted in results:
        assert_same_bits(found.cpu(), wanted.cpu())
    table.check()


def test_a_graph_reads_what_has_changed(cuda, home):
    if home == "pageable":
        return
    x = tensor((500, 256))
    table = table_at(home, x, scheme="planes", slot_bytes=512)  # no overflow, which would grow
    table.update_(torch.arange(500, device=cuda), rows_like(x, 500).to(cuda))
    ids = torch.arange(0, 500, 7, device=cuda)
    out = torch.empty(len(ids), 256, dtype=torch.bfloat16, device=cuda)
    table.index_select(ids, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.index_select(ids, out=out)
    rows = tensor((500, 256)).to(cuda)
    table.update_(torch.arange(500, device=cuda), rows)
    graph.replay()
    assert_same_bits(out.cpu(), rows[ids].cpu())


def test_two_gpus_and_the_cpu_see_every_change(gpus):
    x = tensor((500, 256))
    table = ibp.compress(x, scheme="planes", slot_bytes=256)
    devices = [*gpus, torch.device("cpu")]
    for step in range(6):
        ids, rows = torch.randperm(500)[:50], rows_like(x, 50)
        x[ids] = rows
        table.update_(ids, rows.to(devices[step % 3]))
        for device in devices:
            assert_same_bits(table.index_select(ids.to(device), device=device).cpu(), rows)
            assert_same_bits(table.decompress(device=device).cpu(), x)
