"""Operations of a cache of rows: find, gather, fill, claim, drop, set, against dictionaries in Python."""

import functools

import pytest
import torch

import ibp
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import assert_same_bits, embedding, make_tensor, spiky_rows
from ibp._machine import memory

CPU = torch.device("cpu")
EMPTY, REMOVED = -1, -2
CODED, PRESENT, DIRTY = 1 << 43, 1 << 60, 1 << 61
DEFAULT = 65535


def offset_of(entry):
    return entry & (1 << 40) - 1


def slab_of(entry):
    return entry >> 40 & 7


def length_of(entry):
    return entry >> 44 & 0xFFFF if entry & CODED else 0


def hash_of(row):
    z, mask = row + 0x9E3779B97F4A7C15 & 2**64 - 1, 2**64 - 1
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def home_of(row, num_sets):
    return (hash_of(row) >> 32) * num_sets >> 32


def owner_of(row, num_slabs):
    return (hash_of(row) & 0xFFFFFFFF) * num_slabs >> 32


def fault(device=CPU):
    return torch.zeros(4, dtype=torch.int64, device=device)


def empty_map(num_sets, ways, device=CPU):
    return torch.tensor([EMPTY, 0], device=device).repeat(num_sets * ways)


def ways_of(map_):
    """{row: entry} of a map."""
    pairs = map_.view(-1, 2).tolist()
    found = {row: entry for row, entry in pairs if row >= 0}
    assert len(found) == sum(row >= 0 for row, _ in pairs), "a row twice"
    return found


def mixed_rows(num_rows=300, columns=60):
    """FP32 rows: most can be coded, some are zeros, some noise, which is stored raw."""
    x = spiky_rows(num_rows, columns)
    x[::7] = 0
    x[3::11] = make_tensor((len(x[3::11]), columns), torch.int32, "random").view(torch.float32)
    return x


LAYOUTS = {
    "ibp": {"scheme": "ibp", "slot_bytes": 32},
    "planes": {"scheme": "planes", "slot_bytes": 64},
    "packed": {"scheme": "planes", "layout": "packed"},
    "in place": {"scheme": "ibp", "slot_bytes": 240},
    "raw": {"scheme": "raw"},
}


@functools.cache
def table_of(name):
    x = mixed_rows()
    arguments = LAYOUTS[name]
    table = ibp.compress(x, device="cpu", memory="host", **arguments)
    return x, table


def arguments_of(name, device=CPU):
    x, table = table_of(name)
    return x, [value.to(device) if isinstance(value, torch.Tensor) else value for value in values_of(table, CPU)]


def stored_bytes(table):
    """Of every row; 0 for default rows."""
    row_bytes, num_rows = table[5][1], table[8] * table[9] // table[5][1]
    if table[2].numel() == 0:
        return [row_bytes] * num_rows
    lengths = [int(length) for length in table[2].to(torch.int32).tolist()]
    return [0 if n == min(row_bytes, DEFAULT) else n or row_bytes for n in lengths]


def sector_bytes(num_bytes):
    return -(-num_bytes // 32) * 32


class Slabs:
    """Slabs filled with rows, each in that of its owner, back to back."""

    def __init__(self, table, rows, num_slabs=1, ways=4, load=0.7, device=CPU):
        self.table, self.ways, self.maps, self.slabs, self.device = table, ways, [], [], device
        self.row_bytes, stored = table[5][1], stored_bytes(table)
        self.rows_per_item = table[9] // self.row_bytes
        for slab in range(num_slabs):
            own = [row for row in rows if owner_of(row, num_slabs) == slab]
            ends = [0]
            for row in own:
                ends.append(ends[-1] + stored[row])
            bytes_ = torch.zeros(ends[-1] + 16, dtype=torch.uint8, device=device)
            map_ = empty_map(max(1, round(len(own) / load / ways)), ways, device)
            noted = fault(device)
            given = torch.tensor(own, dtype=torch.int64, device=device), torch.tensor(ends[:-1], device=device).long()
            OPS.fill_slab(*table, *given, slab, ways, bytes_, map_, noted)
            assert noted.tolist() == [0, 0, 0, 0]
            self.maps.append(map_), self.slabs.append(bytes_)

    def find(self, ids, counts=None):
        entries = torch.full((ids.numel() * self.rows_per_item,), 77, device=self.device)
        lengths = self.table[2]
        OPS.find_cached(ids, self.rows_per_item, self.row_bytes, lengths, self.maps, self.ways, entries, counts)
        return entries

    def gather(self, ids, entries, positions=None, out_items=None):
        out = torch.full(((out_items or ids.numel()) * self.table[9],), 0xA5, dtype=torch.uint8, device=self.device)
        noted = fault(self.device)
        OPS.gather_items(*self.table, ids, 0, out, noted, positions, entries=entries, slabs=self.slabs)
        return out.view(-1, self.table[9]), noted.tolist()


def some_ids(x, device=CPU):
    return torch.randint(0, len(x), (200,), generator=torch.Generator().manual_seed(3)).to(device)


def expected_counts(table, cached, ids, num_slabs):
    stored, counts = stored_bytes(table), [0] * 10
    for row in ids.tolist():
        if row in cached:
            counts[owner_of(row, num_slabs)] += 1
        elif stored[row]:
            counts[8] += 1
            counts[9] += sector_bytes(stored[row])
    return counts


def check_found(name, num_slabs, ways, device=CPU):
    x, table = arguments_of(name, device)
    stored = stored_bytes(table)
    held = list(range(0, len(x), 3))
    cache = Slabs(table, held, num_slabs, ways, device=device)
    cached = {row for map_ in cache.maps for row in ways_of(map_)}
    assert cached == {row for row in held if stored[row]}
    ids = some_ids(x, device)
    counts = torch.zeros(10, dtype=torch.int64, device=device)
    entries = cache.find(ids, counts)
    assert [entry != 0 for entry in entries.tolist()] == [row in cached for row in ids.tolist()]
    assert counts.tolist() == expected_counts(table, cached, ids, num_slabs)
    out, noted = cache.gather(ids, entries)
    assert noted == [0, 0, 0, 0]
    assert_same_bits(out.cpu().view(x.dtype), x[ids.cpu()])
    for slab in cache.slabs:  # without the table's copy of what is cached, which is not read
        slab.fill_(0xFF)
    out, noted = cache.gather(ids, entries)
    missing = (entries == 0).cpu()
    assert_same_bits(out.cpu()[missing].view(x.dtype), x[ids.cpu()[missing]])
    assert noted[0] == (3 if noted[0] else 0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("num_slabs", "ways"), [(1, 2), (8, 4)])
def test_rows_come_from_slabs_and_the_table(name, num_slabs, ways):
    check_found(name, num_slabs, ways)


def test_entries_are_those_of_the_documentation():
    _, table = arguments_of("ibp")
    cache = Slabs(table, [5, 14, 20], num_slabs=2)
    ids = torch.tensor([5, 14, 20])
    entries = cache.find(ids).tolist()
    lengths = table[2].to(torch.int32).tolist()
    for row, entry in zip(ids.tolist(), entries):
        if lengths[row] == 240:
            assert entry == 0
            continue
        assert entry >> 60 == PRESENT >> 60 and slab_of(entry) == owner_of(row, 2)
        assert length_of(entry) == lengths[row]
        slab = cache.slabs[slab_of(entry)]
        stored = lengths[row] or 240
        assert offset_of(entry) + stored <= slab.numel()
    assert OPS.owners_of_rows(ids, 2).tolist() == [owner_of(row, 2) for row in ids.tolist()]
    assert OPS.owners_of_rows(ids, 7).dtype == torch.uint8


def test_items_of_several_rows_positions_and_int32_ids():
    x = spiky_rows(90, 180)
    table = ibp.compress(x, scheme="planes", row_bytes=240, slot_bytes=64, device="cpu", memory="host")
    arguments = values_of(table, CPU)
    assert arguments[9] == 720 and arguments[5][1] == 240
    cache = Slabs(arguments, range(0, 270, 2), num_slabs=3)
    ids = torch.tensor([3, 89, 0, 3], dtype=torch.int32)
    entries = cache.find(ids)
    assert entries.numel() == 12 and {entry != 0 for entry in entries.tolist()} == {True, False}
    out, noted = cache.gather(ids, entries)
    assert noted[0] == 0
    assert_same_bits(out.view(x.dtype), x[ids.long()])
    places = torch.tensor([4, 0, 2, 1], dtype=torch.int32)
    out, noted = cache.gather(ids, entries, places, 5)
    assert noted[0] == 0
    assert_same_bits(out.view(x.dtype)[places.long()], x[ids.long()])
    assert (out[3] == 0xA5).all()


def test_ids_out_of_range_have_no_entries_and_are_noted():
    x, table = arguments_of("planes")
    cache = Slabs(table, range(100))
    counts = torch.zeros(10, dtype=torch.int64)
    ids = torch.tensor([5, -1, 0, -2, len(x), 2**62, -(2**63)])
    entries = cache.find(ids, counts)
    assert stored_bytes(table)[5] and [entry != 0 for entry in entries.tolist()] == [True, *[False] * 6]
    assert counts.tolist() == [1, *[0] * 9]
    out, noted = cache.gather(ids, entries)
    assert noted[:3] == [2, 1, -1] and (out[3:] == 0).all()
    assert_same_bits(out[0].view(x.dtype), x[5])
    none = torch.empty(0, dtype=torch.int64)
    out, noted = cache.gather(none, cache.find(none))
    assert out.numel() == 0 and noted[0] == 0


def test_entries_may_lie_anywhere():
    """Outside their slab, in no slab, longer than a row: corrupt rows, and zeros."""
    x, table = arguments_of("planes")
    cache = Slabs(table, range(50))
    size = cache.slabs[0].numel()
    hostile = [
        PRESENT | CODED | (size - 3) | 4 << 44,
        PRESENT | (size - 239),
        PRESENT | (1 << 40) - 1,
        PRESENT | CODED | 3 << 40 | 8 << 44,
        PRESENT | CODED | 241 << 44,
        PRESENT | CODED | 65535 << 44,
    ]
    ids = torch.arange(len(hostile)) + 1
    for position, entry in enumerate(hostile):
        entries = cache.find(ids)
        entries[position] = entry
        out, noted = cache.gather(ids, entries)
        assert noted[:3] == [3, position, position + 1], hex(entry)
        assert (out[position] == 0).all()
        others = [k for k in range(len(hostile)) if k != position]
        assert_same_bits(out.view(x.dtype)[others], x[ids[others]])
    entries = torch.tensor([PRESENT | CODED | 240 << 44, PRESENT | DIRTY])
    out, noted = cache.gather(ids[:2], entries)  # a default row, and a raw one
    assert noted[0] == 0 and (out[0] == 0).all() and (out[1] == cache.slabs[0][:240]).all()


def test_maps_that_hold_anything_end_a_search():
    _, table = arguments_of("planes")
    ids = torch.arange(300)
    for ways in (2, 4, 8, 16, 32):
        for fill in (-2, -1, 0, 7, 2**63 - 1):
            map_ = torch.full((3 * ways * 2,), fill)
            entries = torch.zeros(300, dtype=torch.int64)
            OPS.find_cached(ids, 1, 240, table[2], [map_], ways, entries, None)
            noted = fault()
            slab = torch.zeros(64, dtype=torch.uint8)
            OPS.fill_slab(*table, ids, torch.zeros(300, dtype=torch.int64), 0, ways, slab, map_, noted)


def test_fill_leaves_out_what_it_cannot_hold():
    _, table = arguments_of("planes")
    stored = stored_bytes(table)
    rows = [row for row in range(40) if stored[row]][:6]
    offsets = [0, 300, 600, -1, 0, 900]
    given = [*rows[:3], rows[3], rows[0], len(stored)]
    slab, map_, noted = torch.zeros(1000, dtype=torch.uint8), empty_map(4, 4), fault()
    OPS.fill_slab(*table, torch.tensor(given), torch.tensor(offsets), 2, 4, slab, map_, noted)
    assert noted.tolist()[:3] == [2, 5, len(stored)]
    found = ways_of(map_)
    assert set(found) == set(rows[:3]) and {slab_of(entry) for entry in found.values()} == {2}
    noted = fault()
    last = torch.tensor([1000 - stored[rows[4]] + 1])
    OPS.fill_slab(*table, torch.tensor(rows[4:5]), last, 2, 4, slab, map_, noted)
    assert noted.tolist()[:3] == [4, 0, rows[4]] and set(ways_of(map_)) == set(rows[:3])
    noted = fault()  # there is room for 32 ways
    OPS.fill_slab(*table, torch.arange(300), torch.zeros(300, dtype=torch.int64), 2, 4, slab, map_, noted)
    assert noted.tolist()[0] == 0 and len(ways_of(map_)) == 16


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_fill_without_a_map_copies(name):
    check_copied(name, CPU)


def check_copied(name, device):
    """Rows as they are stored, equal ones too, back to back: a table in packed layout."""
    x, table = arguments_of(name, device)
    rows = torch.tensor([5, 299, 5, 0, 3, 14, 7])
    sizes = torch.tensor(stored_bytes(table))[rows]
    noted, copied = fault(device), torch.full((int(sizes.sum()),), 0xAA, dtype=torch.uint8, device=device)
    offsets = (sizes.cumsum(0) - sizes).to(device)
    OPS.fill_slab(*table, rows.to(device), offsets, 0, 32, copied, empty_map(0, 32, device), noted)
    lengths, none = table[2].cpu()[rows].to(device) if table[2].numel() else table[2], copied[:0]
    slots, overflow, slot_bytes = (copied, none, 240) if name == "raw" else (none, copied, 0)
    bases = torch.zeros(int(len(lengths) > 0), dtype=torch.int64, device=device)
    out, ids = torch.empty(7, 60, device=device), torch.arange(7, device=device)
    OPS.gather_items(slots, overflow, lengths, bases, *table[4:6], slot_bytes, 0, 7, 240, ids, 0, out, noted)
    assert_same_bits(out.cpu(), x[rows])
    assert noted.tolist() == [0] * 4


def test_a_map_filled_by_85_percent_leaves_out_few_rows():
    slots = torch.zeros(40000 * 32, dtype=torch.uint8)
    empty = [torch.empty(0, dtype=dtype) for dtype in (torch.uint8, torch.uint16, torch.int64, torch.int32)]
    table = [slots, *empty, [0, 32], 32, 0, 40000, 32]
    rows = torch.randperm(40000)[:20000]
    map_, noted = empty_map(round(20000 / 0.85 / 2), 2), fault()
    OPS.fill_slab(
        *table, rows, torch.zeros(20000, dtype=torch.int64), 0, 2, torch.zeros(32, dtype=torch.uint8), map_, noted
    )
    assert 19980 < len(ways_of(map_)) and noted[0] == 0


def test_lost_rows_are_noted_by_fill_and_claim():
    place = ibp.CodedRows(
        ibp.codecs.analyze(spiky_rows(50, 60), scheme="planes"), 8, slot_bytes=32, overflow_bytes=0, device="cpu"
    )
    noise = make_tensor((8, 60), torch.int32, "random").view(torch.float32)
    ibp.encode_into(noise, place)
    assert place.counts().lost == 8
    table, ids = list(place.handle.parts[:10]), torch.tensor([3, 5])
    noted, map_ = fault(), empty_map(1, 32)
    OPS.fill_slab(*table, ids, torch.tensor([0, 240]), 0, 32, torch.zeros(512, dtype=torch.uint8), map_, noted)
    assert noted.tolist()[:3] == [3, 0, 3] and not ways_of(map_)
    noted, entries = fault(), torch.ones(2, dtype=torch.int64)
    cache = Lru(table, 1, 256)
    OPS.claim_cached(*table, ids, 32, 256, *cache.state, entries, None, noted)
    assert noted.tolist()[:3] == [3, 0, 3] and entries.tolist() == [0, 0] and not ways_of(cache.map)


def test_drop_and_set():
    x, table = arguments_of("planes")
    cache = Slabs(table, range(60), ways=2, load=0.9)
    before = ways_of(cache.maps[0])
    dropped = list(before)[::3]
    OPS.drop_cached(torch.tensor([*dropped, 7, -1, -2, 10**6, dropped[0]]), 2, cache.maps[0])
    left = {row: entry for row, entry in before.items() if row not in dropped and row != 7}
    assert ways_of(cache.maps[0]) == left
    entries = cache.find(torch.arange(60))
    assert {row for row in range(60) if entries[row]} == set(left)
    out, noted = cache.gather(torch.arange(60), entries)
    assert noted[0] == 0
    assert_same_bits(out.view(x.dtype), x[:60])

    rows = list(left)[:3]
    new = torch.tensor([17, 0, 240], dtype=torch.uint16)
    OPS.set_cached(torch.tensor(rows), new, 2, True, cache.maps[0])
    found = ways_of(cache.maps[0])
    for row, length in zip(rows, new.tolist()):
        assert length_of(found[row]) == length and found[row] & DIRTY and found[row] & PRESENT
        assert bool(found[row] & CODED) == (length != 0)
        assert offset_of(found[row]) == offset_of(left[row])
    OPS.set_cached(torch.tensor([*rows, 10**6, -1]), torch.empty(0, dtype=torch.uint16), 2, False, cache.maps[0])
    cleaned = ways_of(cache.maps[0])
    assert {row: cleaned[row] for row in rows} == {row: found[row] & ~DIRTY for row in rows}


class Lru:
    """The state of a cache of least recently used rows, and a model of it."""

    def __init__(self, table, num_sets, slot_bytes, device=CPU):
        self.table, self.num_sets, self.slot_bytes, self.device = table, num_sets, slot_bytes, device
        self.map = empty_map(num_sets, 32, device)
        self.bytes = torch.zeros(num_sets * 32 * slot_bytes + 16, dtype=torch.uint8, device=device)
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        self.stamps = torch.zeros(num_sets * 33, dtype=torch.int32, device=device)
        self.state = self.bytes, self.map, self.stamps, self.clock
        self.stored = stored_bytes(table)
        self.used = [{} for _ in range(num_sets)]  # a set's rows and when each was used
        self.calls = 0

    def claim(self, ids, counts=None):
        rows_per_item = self.table[9] // self.table[5][1]
        entries = torch.full((ids.numel() * rows_per_item,), 77, device=self.device)
        noted = fault(self.device)
        OPS.claim_cached(*self.table, ids, 32, self.slot_bytes, *self.state, entries, counts, noted)
        return entries, noted.tolist()

    def model(self, rows):
        """Which of the rows, one after the other, are cached after a call; [hits, misses, bytes of misses]."""
        self.calls += 1
        counts = [0, 0, 0]
        were_there = set()
        for row in rows:
            if row in self.set_of(row):
                self.set_of(row)[row] = self.calls
                were_there.add(row)
                counts[0] += 1
        for row in rows:
            ways = self.set_of(row)
            if row in were_there or not self.stored[row]:
                continue
            if row in ways:
                counts[0] += 1
                continue
            counts[1] += 1
            counts[2] += sector_bytes(self.stored[row])
            if self.stored[row] > self.slot_bytes:
                continue
            if len(ways) == 32:
                oldest = min(ways.values())
                if oldest == self.calls:
                    continue
                evicted = self.evicted(row, [other for other, when in ways.items() if when == oldest])
                del ways[evicted]
            ways[row] = self.calls
        return [row in self.set_of(row) for row in rows], counts

    def evicted(self, row, candidates):
        """Of rows used equally long ago the one that the map no longer has."""
        return next(other for other in candidates if other not in ways_of(self.map))

    def set_of(self, row):
        return self.used[home_of(row, self.num_sets)]


@pytest.mark.parametrize("name", ["planes", "packed", "raw"])
def test_claim_keeps_the_rows_used_last(name):
    x, table = arguments_of(name)
    cache = Lru(table, 2, 256)
    draws = torch.Generator().manual_seed(5)
    for call in range(12):
        ids = torch.randint(0, 300 if call % 3 else 60, (30,), generator=draws)
        counts = torch.zeros(10, dtype=torch.int64)
        entries, noted = cache.claim(ids, counts)
        held, expected = cache.model(ids.tolist())
        assert [entry != 0 for entry in entries.tolist()] == held
        assert [int(counts[0]), *counts[8:].tolist()] == expected
        assert set(ways_of(cache.map)) == {row for ways in cache.used for row in ways}
        assert noted == [0, 0, 0, 0] and cache.clock.tolist() == [call + 1, call + 1]
        out = torch.zeros(30, 60)
        OPS.gather_items(*table, ids, 0, out, fault(), entries=entries, slabs=[cache.bytes])
        assert_same_bits(out, x[ids])
    assert len(ways_of(cache.map)) >= 60  # nearly full


def test_claim_with_more_rows_than_there_are_ways():
    """One call never takes a way twice; what finds none comes from the table."""
    x, table = arguments_of("raw")
    cache = Lru(table, 1, 256)
    ids = torch.arange(100).repeat(2)
    entries, _ = cache.claim(ids)
    assert sum(entry != 0 for entry in entries.tolist()) == 64 and len(ways_of(cache.map)) == 32
    assert entries[:100].tolist() == entries[100:].tolist()
    out = torch.zeros(200, 60)
    OPS.gather_items(*table, ids, 0, out, fault(), entries=entries, slabs=[cache.bytes])
    assert_same_bits(out, x[ids])
    entries, _ = cache.claim(torch.arange(200, 232))
    assert set(ways_of(cache.map)) == set(range(200, 232)) and (entries != 0).all()


def test_claim_leaves_rows_that_are_too_long_or_dirty():
    _, table = arguments_of("planes")
    stored = stored_bytes(table)
    cache = Lru(table, 1, 64)
    ids = torch.arange(300)
    entries, _ = cache.claim(ids)
    rows = ways_of(cache.map)
    assert len(rows) == 32 and all(0 < stored[row] <= 64 for row in rows)
    dirty = list(rows)[:30]
    OPS.set_cached(torch.tensor(dirty), torch.empty(0, dtype=torch.uint16), 32, True, cache.map)
    cache.claim(torch.tensor([row for row in range(300) if row not in rows]))
    assert set(dirty) < set(ways_of(cache.map)) != set(rows)
    entries, noted = cache.claim(torch.tensor([2, -1, 300]))
    assert noted[:3] == [2, 1, -1] and entries.tolist()[1:] == [0, 0]


def test_claim_of_removed_rows_and_wrapped_clocks():
    _, table = arguments_of("raw")
    cache = Lru(table, 1, 256)
    cache.clock[:] = 2**32 - 2  # the time of the next calls: 2^32 - 1, 0, 1
    for first in (0, 16, 8):
        cache.claim(torch.arange(first, first + 16))
    assert cache.clock.tolist() == [2**32 + 1] * 2
    cache.claim(torch.arange(100, 108))
    assert set(range(8)).isdisjoint(ways_of(cache.map)) and len(ways_of(cache.map)) == 32
    OPS.drop_cached(torch.tensor([16, 17]), 32, cache.map)
    cache.claim(torch.tensor([200, 201]))
    assert {200, 201} < set(ways_of(cache.map)) and len(ways_of(cache.map)) == 32


def test_no_cache_at_all():
    """No slabs, maps without sets, slabs without bytes: everything comes from the table."""
    x, table = arguments_of("planes")
    ids, counts = some_ids(x), torch.zeros(10, dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)
    for maps, slabs in (([], []), ([none], [torch.empty(0, dtype=torch.uint8)])):
        entries = torch.ones(200, dtype=torch.int64)
        OPS.find_cached(ids, 1, 240, table[2], maps, 4, entries, counts)
        assert not entries.any()
        out = torch.zeros(200, 60)
        OPS.gather_items(*table, ids, 0, out, fault(), entries=entries, slabs=slabs)
        assert_same_bits(out, x[ids])
    cache = Lru(table, 0, 64)
    entries, noted = cache.claim(ids)
    assert not entries.any() and noted[0] == 0


def refusals():
    """(what is wrong, call), each of which raises."""
    _, table = arguments_of("planes")
    ids, entries, map_ = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64), empty_map(2, 4)
    slab, out = torch.zeros(100, dtype=torch.uint8), torch.zeros(2, 60)
    find = OPS.find_cached
    yield "ways", lambda: find(ids, 1, 240, table[2], [map_], 3, entries, None)
    yield "ways", lambda: find(ids, 1, 240, table[2], [map_], 64, entries, None)
    yield "map has", lambda: find(ids, 1, 240, table[2], [map_[:-2]], 4, entries, None)
    yield "aligned", lambda: find(ids, 1, 240, table[2], [torch.zeros(17, dtype=torch.int64)[1:]], 2, entries, None)
    yield "more than 8", lambda: find(ids, 1, 240, table[2], [map_] * 9, 4, entries, None)
    yield "entries has", lambda: find(ids, 2, 240, table[2], [map_], 4, entries, None)
    yield "counts has", lambda: find(ids, 1, 240, table[2], [map_], 4, entries, torch.zeros(9, dtype=torch.int64))
    yield "rows_per_item", lambda: find(ids, 0, 240, table[2], [map_], 4, entries, None)
    yield "share memory", lambda: find(ids, 1, 240, table[2], [map_], 4, map_, None)
    yield "entries has", lambda: OPS.gather_items(*table, ids, 0, out, fault(), entries=entries[:1], slabs=[slab])
    yield "more than 8", lambda: OPS.gather_items(*table, ids, 0, out, fault(), entries=entries, slabs=[slab] * 9)
    yield "out has", lambda: OPS.gather_items(*table, ids, 0, out[0], fault(), entries=entries, slabs=[slab])
    parts = [*table[:8], 300 * 2, 120]
    yield "whole rows", lambda: OPS.gather_items(*parts, ids, 0, out, fault(), entries=entries, slabs=[slab])
    yield "slab is 8", lambda: OPS.fill_slab(*table, ids, ids, 8, 4, slab, map_, fault())
    yield "offsets has", lambda: OPS.fill_slab(*table, ids, ids[:1], 0, 4, slab, map_, fault())
    yield "dtype", lambda: OPS.fill_slab(*table, ids.int(), ids, 0, 4, slab, map_, fault())
    lru = Lru(table, 1, 64)

    def claim(ways, slot, *state):
        OPS.claim_cached(*table, ids, ways, slot, *state, entries, None, fault())

    yield "not 32", lambda: claim(16, 64, *lru.state)
    yield "multiple of 32", lambda: claim(32, 65, *lru.state)
    yield "bytes has", lambda: claim(32, 96, *lru.state)
    yield "stamps has", lambda: claim(32, 64, lru.bytes, lru.map, lru.stamps[:-1], lru.clock)
    yield "lengths has", lambda: OPS.set_cached(ids, torch.zeros(1, dtype=torch.uint16), 4, True, map_)
    yield "num_slabs", lambda: OPS.owners_of_rows(ids, 9)


REFUSALS = list(refusals())


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=lambda number: f"{REFUSALS[number][0]}-{number}")
def test_refusals(number):
    message, call = REFUSALS[number]
    with pytest.raises(RuntimeError, match=message):
        call()


# ---- on a GPU ----


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("num_slabs", "ways"), [(1, 2), (8, 4), (2, 32)])
def test_gpu_finds_and_gathers(name, num_slabs, ways, cuda):
    check_found(name, num_slabs, ways, cuda)


def assert_same_state(gpu, cpu, name):
    assert gpu.cpu().tolist() == cpu.tolist(), name


@pytest.mark.parametrize("name", ["ibp", "packed", "raw"])
def test_gpu_changes_maps_as_the_cpu_does(name, cuda):
    _, table = arguments_of(name)
    ours = Slabs(table, range(0, 300, 2), num_slabs=2, ways=4)
    maps = [map_.to(cuda) for map_ in ours.maps]
    rows = torch.arange(0, 300, 6)
    lengths = (torch.arange(50) % 240).to(torch.uint16)
    for map_, theirs in zip(ours.maps, maps):
        for given in (lengths, lengths[:0]):
            OPS.set_cached(rows, given, 4, given.numel() != 0, map_)
            OPS.set_cached(rows.to(cuda), given.to(cuda), 4, given.numel() != 0, theirs)
            assert_same_state(theirs, map_, "set")
        OPS.drop_cached(rows[:20], 4, map_)
        OPS.drop_cached(rows[:20].to(cuda), 4, theirs)
        assert_same_state(theirs, map_, "dropped")
    assert_same_state(OPS.owners_of_rows(rows.to(cuda), 5), OPS.owners_of_rows(rows, 5), "owners")


def test_gpu_entries_may_lie_anywhere(cuda):
    x, table = arguments_of("planes", cuda)
    cache = Slabs(table, range(50), device=cuda)
    ids = torch.arange(64, device=cuda)
    draws = torch.Generator().manual_seed(1)
    for _ in range(20):
        entries = torch.randint(-(2**63), 2**63 - 1, (64,), generator=draws).to(cuda)
        entries[::3] = cache.find(ids)[::3]
        entries[1::3] &= ~PRESENT
        out, noted = cache.gather(ids, entries)
        kept = torch.arange(64) % 3 != 2
        assert_same_bits(out.cpu()[kept].view(x.dtype), x[:64][kept])
        assert noted[0] in (0, 3)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_gpu_fills_without_a_map(name, cuda):
    check_copied(name, cuda)


def test_gpu_fills_from_equal_rows_and_with_faults(cuda):
    _, table = arguments_of("packed", cuda)
    stored = stored_bytes(table)
    rows = [row for row in range(300) if stored[row]][:100]
    given = torch.tensor(rows * 3 + [300], device=cuda)
    offsets = torch.arange(given.numel(), device=cuda) * 240
    slab, map_, noted = torch.zeros(301 * 240, dtype=torch.uint8, device=cuda), empty_map(80, 2, cuda), fault(cuda)
    OPS.fill_slab(*table, given, offsets, 0, 2, slab, map_, noted)
    assert noted.tolist()[:3] == [2, 3 * len(rows), 300] and set(ways_of(map_)) == set(rows)


@pytest.mark.parametrize("name", ["planes", "packed", "raw"])
def test_gpu_claims(name, cuda):
    x, table = arguments_of(name, cuda)
    cache = Lru(table, 4, 256, cuda)
    draws = torch.Generator().manual_seed(5)
    for call in range(20):
        ids = torch.randint(0, 300 if call % 3 else 60, (30,), generator=draws)
        counts = torch.zeros(10, dtype=torch.int64, device=cuda)
        entries, noted = cache.claim(ids.to(cuda), counts)
        held, expected = cache.model(ids.tolist())
        assert [entry != 0 for entry in entries.tolist()] == held
        assert [int(counts[0]), *counts[8:].tolist()] == expected
        assert set(ways_of(cache.map)) == {row for ways in cache.used for row in ways}
        assert noted == [0, 0, 0, 0] and cache.clock.tolist() == [call + 1, call + 1]
        assert not cache.stamps[4 * 32 :].any()  # no set is locked
        out = torch.zeros(30, 60, device=cuda)
        OPS.gather_items(*table, ids.to(cuda), 0, out, fault(cuda), entries=entries, slabs=[cache.bytes])
        assert_same_bits(out.cpu(), x[ids])


def test_gpu_claims_many_equal_rows_of_few_sets(cuda):
    """Every way is taken once, whatever warps want it."""
    x = make_tensor((5000, 64), torch.int32, "random").view(torch.float32)
    table = ibp.compress(x, scheme="raw")
    table = values_of(table, cuda)
    cache = Lru(table, 8, 256, cuda)
    draws = torch.Generator().manual_seed(2)
    for call in range(6):
        ids = torch.randint(0, (200, 5000)[call % 2], (20000,), generator=draws).to(cuda)
        counts = torch.zeros(10, dtype=torch.int64, device=cuda)
        entries, noted = cache.claim(ids, counts)
        there = ways_of(cache.map)
        assert len(there) <= 256 and noted[0] == 0 and int(counts[:9].sum()) == 20000
        assert [entry != 0 for entry in entries.tolist()] == [row in there for row in ids.tolist()]
        out = torch.zeros(20000, 64, device=cuda)
        OPS.gather_items(*table, ids, 0, out, fault(cuda), entries=entries, slabs=[cache.bytes])
        assert_same_bits(out.cpu(), x[ids.cpu()])


@pytest.mark.parametrize("scheme", ["planes", "raw"])
def test_gpu_rows_from_pinned_memory_in_a_graph(scheme, cuda):
    """Claim and gather are captured once; replays take other ids."""
    x = embedding(4000, 128)
    table = ibp.compress(x, scheme=scheme)
    arguments = values_of(table, cuda)
    cache = Lru(arguments, 8, 512, cuda)
    ids, out = torch.zeros(500, dtype=torch.int64, device=cuda), torch.zeros(500, 128, device=cuda)
    entries, noted = torch.zeros(500, dtype=torch.int64, device=cuda), fault(cuda)
    counts = torch.zeros(10, dtype=torch.int64, device=cuda)

    def call():
        OPS.claim_cached(*arguments, ids, 32, 512, *cache.state, entries, counts, noted)
        OPS.gather_items(*arguments, ids, 0, out, noted, entries=entries, slabs=[cache.bytes])

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(5):
        wanted = torch.randint(0, 700, (500,), generator=torch.Generator().manual_seed(seed))
        ids.copy_(wanted)
        graph.replay()
        assert_same_bits(out.cpu(), x[wanted])
    assert noted[0] == 0 and int(counts[0]) > 0 and cache.clock.tolist() == [6, 6]


def test_a_gpu_reads_slabs_of_its_peer(gpus):
    x = embedding(3000, 128)
    near, far = gpus
    assert memory.can_read(near, far)
    table = ibp.compress(x, scheme="planes")
    arguments, of_peer = values_of(table, near), values_of(table, far)
    stored = stored_bytes(of_peer)
    maps, slabs = [], []
    for slab, (device, given) in enumerate(((near, arguments), (far, of_peer))):
        rows = [row for row in range(3000) if row % 4 and owner_of(row, 2) == slab]
        ends = torch.tensor([stored[row] for row in rows]).cumsum(0)
        bytes_ = torch.zeros(int(ends[-1]) + 16, dtype=torch.uint8, device=device)
        map_, noted = empty_map(len(rows), 4, device), fault(device)
        offsets = torch.cat((ends.new_zeros(1), ends[:-1])).to(device)
        OPS.fill_slab(*given, torch.tensor(rows, device=device), offsets, slab, 4, bytes_, map_, noted)
        assert noted[0] == 0
        maps.append(map_), slabs.append(bytes_)
    torch.cuda.synchronize(far)
    ids = torch.randint(0, 3000, (2000,), device=near)
    for given in (maps, [map_.to(near) for map_ in maps]):
        entries, out = torch.zeros(2000, dtype=torch.int64, device=near), torch.zeros(2000, 128, device=near)
        counts, noted = torch.zeros(10, dtype=torch.int64, device=near), fault(near)
        OPS.find_cached(ids, 1, 512, arguments[2], given, 4, entries, counts)
        OPS.gather_items(*arguments, ids, 0, out, noted, entries=entries, slabs=slabs)
        assert noted[0] == 0 and (counts[:2] > 500).all() and int(counts[8]) > 300
        assert_same_bits(out.cpu(), x[ids.cpu()])
