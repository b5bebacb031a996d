"""torch.ops.ibp: schemas and fake implementations agree with the real ones, and the operations can be traced and
compiled."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import ibp
from handles import BY_VALUES, handle_of, values_of, with_handle
from helpers import assert_same_bits, bytes_of, embedding, make_tensor, spiky_rows
from ibp._rows.table import handle_on

OPS = torch.ops.ibp
CPU = torch.device("cpu")


def fault():
    return torch.zeros(4, dtype=torch.int64)


CODED = ["ibp", "planes"]


def table_arguments(scheme, **arguments):
    x = spiky_rows(100, 60)
    return x, values_of(ibp.compress(x, scheme=scheme, device="cpu", memory="host", **arguments), CPU)


def encode_arguments(scheme):
    x = spiky_rows(100, 60)
    table = ibp.compress(x, scheme=scheme, slot_bytes=32, device="cpu", memory="host")
    slots, overflow, *rest = values_of(table, CPU)
    return (torch.zeros_like(slots), torch.zeros_like(overflow), *rest, bytes_of(x), fault())


def place_arguments(scheme):
    """(the values of a place for rows, the rows, a table of them in slots)."""
    slots, overflow, lengths, bases, *rest, rows, _ = encode_arguments(scheme)
    own = [torch.zeros_like(part) for part in (slots, overflow, lengths)]
    used = torch.zeros(1, dtype=torch.int64)
    return [*own, bases.new_zeros(len(lengths)), *rest, None, used], rows, bases


def packed_arguments(data, codebook):
    """The arguments of encode_into for packed rows."""
    lengths = torch.zeros(-(-data.numel() // codebook.row_bytes), dtype=torch.uint16)
    out, stored = torch.zeros(data.numel(), dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    index, sizes = (lengths, stored[:0], codebook.words(CPU)), (codebook.codec, 0, 0, 1, data.numel())
    return out[:0], out, *index, *sizes, None, stored, data, None, None, 0, 0, None, None


def piece_samples(data, codebook):
    """A piece of 100 rows of 240 bytes: counters, bases, lengths, overflow."""
    first = 1088
    memory = torch.full((first + 100 * 256,), 7, dtype=torch.uint8)
    coded, words = memory.clone(), codebook.words(CPU)
    OPS.encode_piece(data, words, codebook.codec, first, 0, coded)
    yield "encode_piece", (data, words, codebook.codec, first, 0, memory)
    yield "decode_piece", (coded, words, codebook.codec, first, 0, torch.zeros_like(data), fault())


def any_planes(per_column=False, listed=False, default=0):
    """A codebook for rows of 30 64-bit elements."""
    entries = torch.arange(30 * 6).view(30, 6) if per_column else torch.arange(6).view(1, 6)
    return ibp.codecs.PlanesCodebook(240, 8, 1, 50, (2, 2), per_column, listed, default, 0, entries)


def samples():
    """One call of every operation that runs on the CPU: (operation, arguments, keyword arguments)."""
    for name, arguments, *options in samples_by_values():
        yield name, with_handle(name, arguments), options[0] if options else {}
    x = spiky_rows(100, 60)
    table, ids = ibp.compress(x, scheme="planes", device="cpu", memory="host"), torch.tensor([5, 99, 5])
    handle = handle_on(table, CPU)
    yield "take", (handle.table, ids, handle.like, 0, 0), {}
    yield "take", (handle.table, ids[::2] - 100, handle.like, 3, 1, 100), {}
    yield "take.out", (handle.table, ids, torch.zeros(3, 2, 60)[:, 1], 0, 0), {}
    yield "take.out", (handle.table, ids, torch.zeros(60, 3).T, 0, 0), {}
    positions = torch.tensor([2, 0, 1], dtype=torch.int32)
    yield "take_many", ([handle.table] * 2, ids, positions, [0, 2, 3], 0, torch.zeros(3, 60)), {}
    other = ibp.compress(spiky_rows(50, 60), scheme="raw", device="cpu", memory="host")
    caches = [ibp.RowCache(each, 20_000, [0], devices="cpu", policy="lru") for each in (table, other)]
    described = [cache._state.described_on(CPU) for cache in caches]
    likes = [torch.empty(0, 4, 60), torch.empty_strided((0, 60, 2), (120, 1, 60))]
    stacks = ([handle.table, handle_on(other, CPU).table], described)
    for some in (torch.tensor([[3, 24], [0, 3]]), ids.int() % 25):
        spare = torch.zeros(1, dtype=torch.int64)
        yield "take_matrices", (*stacks, some, likes, 25, 4, [4, 2], spare, [0, 3], 0, []), {}
    for policy in ("static", "lru"):
        cache = ibp.RowCache(table, 20_000, torch.rand(100), devices="cpu", policy=policy)
        cache.index_select(ids)
        state = cache._state
        known, counts = state.generation.described[CPU], state.counts[CPU]
        yield "take", (handle.table, ids, handle.like, 0, 0, 0, known), {}
        yield "take.out", (handle.table, ids, torch.zeros(3, 60), 0, 0, known), {}
        (maps, slabs), slab = state.generation.view_of(CPU), state.generation.slabs[0]
        slot_bytes = 0 if slab.stamps is None else state.generation.slot_bytes
        lru = (slab.stamps, slab.clock, slot_bytes)
        yield "describe_cache", (maps, state.generation.ways, slabs, counts, *lru), {}


def samples_by_values():
    """The same, with the values that describe a table in the place of its handle."""
    x, slots_table = table_arguments("ibp", slot_bytes=32)
    tables = [slots_table, table_arguments("planes", slot_bytes=32)[1]]
    tables += [table_arguments(scheme, layout="packed")[1] for scheme in CODED]
    dense = ibp.compress(embedding(100, 60), scheme="planes", layout="packed", device="cpu", memory="host")
    assert not dense.codebook.listed and len(dense.codebook.codec) > 9
    tables.append(values_of(dense, CPU))
    data, codebook = bytes_of(x), ibp.codecs.analyze(x)
    words, mask = codebook.words(CPU), make_tensor((50,), torch.uint8, "random")
    raw = values_of(ibp.compress(make_tensor((9, 8), torch.int32, "random"), device="cpu", memory="host"), CPU)
    lengths = OPS.measure_rows(data, words, codebook.codec)
    ids, ids32 = torch.tensor([5, 99, 5, 0]), torch.tensor([1, 2], dtype=torch.int32)
    yield "codebook_words", (mask, mask & 7, 4, False)
    yield "codebook_words", (mask, mask & 7, 8, True)
    yield "threshold_bits", (OPS.count_bits(data, 240), 100, 0.8)
    yield "choose_masks", (data, 240, 4)
    yield "choose_masks", (data[: 7 * 239], 239, 2)
    yield "estimate_masks", (data, 240)
    yield "estimate_masks", (data[: 7 * 239], 239)
    yield "learn_planes", (data, 240, 4, 8, 1000, False, False)
    yield "learn_planes", (data[: 7 * 239], 239, 1, 0, 7, True, True)
    yield "learn_entries", (data, dense.codebook.words(CPU), dense.codebook.codec)
    yield "count_bits", (data, 240)
    yield "count_hits", (data, words, codebook.codec)
    yield "measure_rows", (data, words, codebook.codec)
    yield "measure_rows", (data[:-100], words, codebook.codec)
    of_planes = [ibp.codecs.analyze(x, scheme="planes"), dense.codebook]
    of_planes += [any_planes(per_column=True), any_planes(listed=True, default=2**64 - 1)]
    for planes in of_planes:
        yield "measure_rows", (data[:-100], planes.words(CPU), planes.codec)
    yield "index_rows", (lengths, data.numel(), 240, 32)
    yield "index_rows", (lengths[:0], data.numel() - 7, 240, 0)
    yield "survey_rows", (lengths, data.numel() - 7, 240)
    yield "sum_words", (x, 0, torch.zeros(1, dtype=torch.int64))
    yield "sum_words", (data[:1001], 2**40, torch.zeros(2, dtype=torch.int64))
    for scheme in CODED:
        yield "encode_rows", encode_arguments(scheme)
        place, rows, bases = place_arguments(scheme)
        yield "encode_into", (*place, rows, None, None, 0, 0, torch.zeros(2, dtype=torch.int64), fault(), True)
        yield "move_parts", (*place, bases, torch.zeros_like(place[1]))
    for planes in of_planes:
        yield "encode_into", packed_arguments(data[:-100], planes)
        yield from piece_samples(data, planes)
    yield "encode_into", packed_arguments(data, codebook)
    change = torch.zeros(1, dtype=torch.int64)
    yield "add_rows", (*tables[1], 4, False, x.clone(), change, fault())
    yield "add_rows", (*tables[2], 4, True, x.clone(), change.clone(), fault())
    for arguments in tables:
        yield "gather_items", (*arguments, ids, 0, torch.zeros(4 * 240, dtype=torch.uint8), fault())
        yield "decode_bytes", (*arguments, 1000, 7777, 0, torch.zeros(6777, dtype=torch.uint8), fault())
    yield "gather_items", (*slots_table, ids32, 5, torch.zeros(2 * 240, dtype=torch.uint8), fault())
    view = torch.zeros(2, 3, 2, 60)[:, 1]
    yield "gather_items", (*slots_table, ids, 0, view, fault()), {"outer_dims": 2}
    yield "gather_items", (*slots_table, None, 3, torch.zeros(100, 2, 60)[:, 1], fault()), {"outer_dims": 1}
    pieces = torch.zeros(4, 100, dtype=torch.float32)
    addresses = torch.tensor([pieces.data_ptr() + 400 * k for k in (2, 0, 3, 1)])
    yield "gather_items", (*slots_table, ids, 0, pieces, fault()), {"addresses": addresses}
    starts, flags = torch.tensor([1000, 5000]), torch.ones(3, 2, dtype=torch.uint8)
    of_pages = (torch.tensor([2, 9]), torch.tensor([0, 1]), 3, 4, 2, 0, starts, None, 100, 7, 1)
    planned = torch.zeros(8, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    yield "plan_pages", (*of_pages, flags, *planned)
    index = torch.ones(12, dtype=torch.uint16), torch.zeros(12, dtype=torch.uint16)
    yield "note_pages", (torch.tensor([8, 9, -1, -1]), 2, *index, flags, flags.clone())
    yield "describe_table", (*slots_table,)
    yield "describe_table", (*slots_table, None, None, fault(), [1 << 14, 4, 16])
    yield "gather_items", (*raw, ids32, 0, torch.zeros(2 * 32, dtype=torch.uint8), fault())
    yield "gather_items", (*slots_table, ids32, 0, torch.zeros(5, 60), fault(), torch.tensor([4, 0], dtype=torch.int32))
    yield "decode_bytes", (*raw, 0, 9 * 32, 0, torch.zeros(9 * 32, dtype=torch.uint8), fault())
    for some in (ids, ids32, ids[:0], ids.view(2, 2)):
        yield "partition_ids", (some, 100, 3)
        yield "group_vectors", (some, 9)
        yield "list_matrices", (some, 9, 4, [3, 1], torch.zeros(1, dtype=torch.int64))
        yield "list_matrices", (some, 9, 6, [], None)
    yield from cache_samples(slots_table)
    for arguments in tables:
        index = torch.zeros(4, dtype=torch.uint16), torch.zeros(1, dtype=torch.int64)
        buffers = (*index, torch.zeros(40 * 240, dtype=torch.uint8))
        yield "select_rows", (*arguments, ids, 1, *buffers, torch.zeros(2, dtype=torch.int64), fault())


def cache_samples(table):
    """A slab of 3 rows of a table of 240-byte rows, and another one whose rows are replaced."""
    ids, lengths = torch.tensor([5, 99, 7]), table[2]
    empty = torch.tensor([-1, 0]).repeat(64)
    rows, offsets, slab, stamps = ids, torch.tensor([0, 240, 480]), torch.zeros(720, dtype=torch.uint8), torch.zeros(66)
    yield "fill_slab", (*table, rows, offsets, 1, 4, slab.clone(), empty.clone(), fault())
    map_, counts = empty.clone(), torch.zeros(10, dtype=torch.int64)
    BY_VALUES.fill_slab(*table, rows, offsets, 0, 4, slab, map_, fault())
    for given in (counts, None):
        yield "find_cached", (ids, 1, 240, lengths, [map_], 4, torch.zeros(3, dtype=torch.int64), given)
    entries = torch.zeros(3, dtype=torch.int64)
    OPS.find_cached(ids, 1, 240, lengths, [map_], 4, entries, None)
    yield "gather_items", (*table, ids, 0, torch.zeros(3, 60), fault()), {"entries": entries, "slabs": [slab]}
    lru = torch.zeros(64 * 256, dtype=torch.uint8), empty.clone(), stamps.int(), torch.zeros(2, dtype=torch.int64)
    yield "claim_cached", (*table, ids, 32, 256, *lru, entries.clone(), counts, fault())
    yield "owners_of_rows", (rows, 3)
    yield "drop_cached", (rows, 4, map_.clone())
    yield "set_cached", (rows, torch.tensor([9, 0, 4], dtype=torch.uint16), 4, True, map_.clone())


SAMPLES = list(samples())
NAMES = {"add_rows", "choose_masks", "claim_cached", "codebook_words", "count_bits", "count_hits", "decode_bytes",
         "decode_piece", "describe_cache", "describe_table", "drop_cached", "encode_into", "encode_piece",
         "encode_rows", "estimate_masks", "fill_slab", "find_cached", "gather_items", "group_vectors", "index_rows",
         "learn_entries", "learn_planes", "list_matrices", "measure_rows", "move_parts", "note_pages", "owners_of_rows",
         "partition_ids", "plan_pages", "select_rows", "set_cached", "sum_words", "survey_rows", "take",
         "take_many", "take_matrices", "threshold_bits"}  # fmt: skip
DELTAS = {"measure_deltas", "encode_deltas", "apply_deltas"}


def operation_of(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(OPS, packet), overload or "default")


def first_and_slow(names):
    """The numbers of names: of each name the first, and, marked as slow, the others."""
    marks = [[pytest.mark.slow] * (name in names[:number]) for number, name in enumerate(names)]
    return [pytest.param(number, id=f"{name}-{number}", marks=marks[number]) for number, name in enumerate(names)]


@pytest.mark.parametrize("number", first_and_slow([name for name, *_ in SAMPLES]))
def test_opcheck(number):
    name, arguments, options = SAMPLES[number]
    tests = ["test_schema", "test_faketensor"]
    if not name.startswith("describe_"):  # which returns addresses of its arguments: a graph's are others
        tests += ["test_autograd_registration"]
        # torch cannot make an operation functional that writes an argument and returns a list. Graphs leave it out.
        tests += ["test_aot_dispatch_dynamic"] if name != "take_matrices" else []
    torch.library.opcheck(operation_of(name), arguments, options, test_utils=tests)


def test_every_operation_is_checked():
    """tests/fetch/test_products.py checks times_matrix. The others need a GPU: test_streaming.py, test_large_tables.py,
    test_places_cuda.py, test_bags.py, test_linear.py and test_delta.py check them."""
    names = [schema.name for schema in torch._C._jit_get_all_schemas()]
    defined = {name.removeprefix("ibp::") for name in names if name.startswith("ibp::")}
    assert defined == NAMES | {
        "decode_many",
        "stream_bytes",
        "stage_items",
        "sum_bags",
        "linear",
        "linear_groups",
        "decode_matrix",
        "times_matrix",
        *DELTAS,
    }
    assert {name.partition(".")[0] for name, *_ in SAMPLES} == NAMES


@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=lambda number: f"{SAMPLES[number][0]}-{number}")
def test_fake_tensors_have_the_real_shapes(number):
    name, arguments, options = SAMPLES[number]
    if name == "learn_planes":
        pytest.skip("how large a codebook is depends on the data")
    real = operation_of(name)(*arguments, **options)
    with FakeTensorMode() as mode:
        given, named = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, options))
        fake = operation_of(name)(*given, **named)
    as_tuple = lambda value: value if isinstance(value, (tuple, list)) else () if value is None else (value,)  # noqa: E731
    looks = lambda value: [(t.shape, t.dtype, t.device) for t in as_tuple(value)]  # noqa: E731
    assert looks(fake) == looks(real)


@pytest.mark.parametrize("scheme", CODED)
def test_operations_give_what_the_methods_give(scheme):
    x, arguments = table_arguments(scheme, layout="packed")
    out, noted = torch.zeros(3 * 240, dtype=torch.uint8), fault()
    BY_VALUES.gather_items(*arguments, torch.tensor([9, 0, 99]), 0, out, noted)
    assert_same_bits(out.view(torch.float32).view(3, 60), x[[9, 0, 99]])
    assert noted.tolist() == [0, 0, 0, 0]
    BY_VALUES.gather_items(*arguments, torch.tensor([9, 100, -1]), 0, out, noted)
    assert noted.tolist()[:3] == [2, 1, 100] and (out[240:] == 0).all()
    assert_same_bits(out[:240].view(torch.float32), x[9])


@pytest.mark.parametrize("scheme", CODED)
def test_items_go_to_addresses(scheme):
    x, arguments = table_arguments(scheme, slot_bytes=32)
    pieces, noted = [torch.full((60,), 7.0) for _ in range(3)], fault()
    addresses = torch.tensor([piece.data_ptr() for piece in pieces])
    BY_VALUES.gather_items(*arguments, torch.tensor([9, 100, 0]), 0, pieces[0], noted, addresses=addresses)
    assert_same_bits(pieces[0], x[9])
    assert_same_bits(pieces[2], x[0])
    assert noted.tolist()[:3] == [2, 1, 100] and (pieces[1] == 0).all()
    with pytest.raises(RuntimeError, match="addresses"):
        BY_VALUES.gather_items(*arguments, torch.tensor([9, 0]), 0, pieces[0], noted, addresses=addresses[:1])


@pytest.mark.parametrize("scheme", CODED)
def test_encode_rows_writes_the_table(scheme):
    *arguments, data, noted = encode_arguments(scheme)
    BY_VALUES.encode_rows(*arguments, data, noted)
    out = torch.zeros_like(data)
    BY_VALUES.decode_bytes(*arguments, 0, data.numel(), 0, out, noted)
    assert noted[0] == 0
    assert_same_bits(out, data)
    data[:240] = 0xA5
    BY_VALUES.encode_rows(*arguments, data, noted)
    assert noted[0] == 3


@pytest.mark.parametrize("scheme", CODED)
def test_one_pass_codes_what_two_do(scheme):
    slots, overflow, lengths, bases, *rest = encode_arguments(scheme)
    BY_VALUES.encode_rows(slots, overflow, lengths, bases, *rest)
    place, rows, _ = place_arguments(scheme)
    place[0].fill_(77)  # whole slots are written
    BY_VALUES.encode_into(*place, rows, None, None, 0, 0, None, None, True)
    moved = torch.zeros_like(overflow)
    BY_VALUES.move_parts(*place, bases, moved)
    for met, wanted in ((place[0], slots), (place[2], lengths), (moved, overflow)):
        assert_same_bits(met, wanted)
    assert int(place[-1]) == len(overflow) > 0


def test_one_pass_without_room():
    """Lengths are right also of rows for whose part there is no room."""
    (slots, overflow, *others), rows, _ = place_arguments("planes")
    counts = torch.zeros(2, dtype=torch.int64)
    BY_VALUES.encode_into(slots, overflow[:64], *others, rows, None, None, 0, 0, counts, None, True)
    assert_same_bits(others[0], encode_arguments("planes")[2])
    assert counts.tolist()[1] == int((others[1] == -1).sum()) > 0


@pytest.mark.parametrize("scheme", CODED)
def test_packed_rows_are_those_of_a_packed_table(scheme):
    x, (_, overflow, lengths, _, *_) = table_arguments(scheme, layout="packed")
    codebook = ibp.compress(x, scheme=scheme, layout="packed", device="cpu").codebook
    arguments = packed_arguments(bytes_of(x), codebook)
    BY_VALUES.encode_into(*arguments)
    out, found, stored = arguments[1], arguments[2], int(arguments[11])
    assert_same_bits(found, lengths)
    assert_same_bits(out[:stored], overflow)
    arguments = packed_arguments(bytes_of(x), codebook)
    counts = torch.zeros(2, dtype=torch.int64)
    BY_VALUES.encode_into(arguments[0], arguments[1][:stored], *arguments[2:-2], counts, None)
    num_lost = counts.tolist()[1]  # a row needs room for its raw bytes
    assert 0 < num_lost < len(x) and int(arguments[11]) < stored


@pytest.mark.parametrize("which", ["new", "packed"])
def test_rows_that_come_in_order_have_no_ids(which):
    place, rows, _ = place_arguments("planes")
    arguments = (*place, rows)
    if which == "packed":
        arguments = packed_arguments(rows, ibp.codecs.analyze(spiky_rows(100, 60), scheme="planes"))[:13]
    with pytest.raises(RuntimeError, match="row_ids|table"):
        BY_VALUES.encode_into(*arguments, None, torch.arange(100), 0, 0, None, None, which == "new")


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend, scheme):
    x, arguments = table_arguments(scheme, slot_bytes=32)

    def gather_and_sum(table, ids):
        out, noted = torch.zeros(ids.numel() * 240, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
        OPS.gather_items(table, ids, 0, out, noted)
        return out.view(torch.float32).view(-1, 60).sum(0), noted

    compiled = torch.compile(gather_and_sum, fullgraph=True, backend=backend)
    for ids in (torch.tensor([3, 4, 99]), torch.tensor([0, 0, 1]), torch.tensor([17, 18, 19, 20, 21])):
        total, noted = compiled(handle_of(*arguments), ids)
        assert_same_bits(total, x[ids].sum(0))
        assert noted.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_the_coding(backend, scheme):
    """From bytes to an index in one traced function; to a table with it, whose handle is made outside, and back in
    another one."""
    x = embedding(300, 16)
    codebook = ibp.codecs.analyze(x, scheme=scheme)

    def index(data, words):
        lengths = OPS.measure_rows(data, words, codebook.codec)
        return lengths, OPS.index_rows(lengths, data.numel(), 64, 32)

    def round_trip(table, data):
        before, out = (torch.zeros_like(data) for _ in range(2))
        noted, early = (torch.zeros(4, dtype=torch.int64) for _ in range(2))
        OPS.decode_bytes(table, 0, data.numel(), 0, before, early)
        OPS.encode_rows(table, data, noted)
        OPS.decode_bytes(table, 0, data.numel(), 0, out, noted)
        return before, out, noted

    compiled = [torch.compile(function, fullgraph=True, backend=backend) for function in (index, round_trip)]
    lengths, bases = compiled[0](bytes_of(x), codebook.words(CPU))
    assert int(lengths.to(torch.int64).sum()) > 0
    slots, overflow = torch.zeros(300 * 32, dtype=torch.uint8), torch.zeros(300 * 64, dtype=torch.uint8)
    table = handle_of(slots, overflow, lengths, bases[:-1], codebook.words(CPU), codebook.codec, 32, 0, 300, 64)
    for given in (x, x.flip(1).contiguous()):
        before, out, noted = compiled[1](table, bytes_of(given))
        assert noted[0] in ((0,) if given is x else (0, 3)) and not torch.equal(before, out)
        if noted[0] == 0:
            assert_same_bits(out, bytes_of(given))


def test_handles_of_many_tables_are_one_compiled_function():
    """A handle is a tensor of a graph, not a number in it."""

    class Rows(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def forward(self, ids):
            return ibp.index_select(self.table, ids) + 1

    counter = CompileCounter()
    for seed in range(5):
        x = embedding(100, 16, seed=seed)
        table = ibp.compress(x, scheme="planes", device="cpu", memory="host")
        table.index_select(torch.tensor([0]))
        ids = torch.tensor([5, seed])
        found = torch.compile(Rows(table), fullgraph=True, backend=counter)(ids)
        assert_same_bits(found, x[ids] + 1)
    assert counter.frame_count == 1


def test_a_survey_of_damaged_lengths():
    """A row that claims more bytes than rows have counts as one of all sectors; a default row has none."""
    lengths = torch.tensor([0, 1, 32, 33, 40, 65535], dtype=torch.uint16)
    assert OPS.survey_rows(lengths, 6 * 40, 40).tolist() == [40 + 1 + 32 + 33 + 65535, 1, 2, 3]
    assert OPS.survey_rows(lengths[:1], 7, 40).tolist() == [7, 0, 1, 0]
