"""Damages tables, caches, places, files and deltas in memory, over and over, on a CPU or a GPU.

Each round damages many places of one object, uses it, and checks that nothing outside of the results was written and
that an intact table still decodes. If an assertion fails or the process ends, the library has a fault.
"""

import torch

import ibp
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import bytes_of, embedding, make_tensor, one_hot_rows, spiky_rows

U8, I64 = torch.uint8, torch.int64
CPU = torch.device("cpu")
SPOTS = 64  # A round damages this many bytes.
CANARY = 4096  # This many bytes before and after results are watched.
WAYS, NUM_SETS, SLOT_BYTES = 32, 3, 64

NUM_ROWS = 400
ON_CPU = {"device": "cpu", "memory": "host"}
KINDS = {
    "masks": lambda: ibp.compress(spiky_rows(NUM_ROWS, 60), scheme="ibp", slot_bytes=32, **ON_CPU),
    "masks in place": lambda: ibp.compress(spiky_rows(NUM_ROWS, 33), scheme="ibp", slot_bytes=132, **ON_CPU),
    "masks of bytes": lambda: ibp.compress(spiky_rows(NUM_ROWS, 61), scheme="ibp", chunk_bytes=1, **ON_CPU),
    "masks of clusters": lambda: ibp.compress(spiky_rows(NUM_ROWS, 60), scheme="ibp", clusters=3, **ON_CPU),
    "dense": lambda: ibp.compress(embedding(NUM_ROWS, 256, torch.bfloat16), scheme="planes", **ON_CPU),
    "dense packed": lambda: ibp.compress(embedding(NUM_ROWS, 100), scheme="planes", layout="packed", **ON_CPU),
    "dense of clusters": lambda: ibp.compress(
        embedding(NUM_ROWS, 64, torch.bfloat16), scheme="planes", clusters=3, **ON_CPU
    ),
    "fast": lambda: ibp.compress(embedding(NUM_ROWS, 512, torch.bfloat16), level="fast", **ON_CPU),
    "doubles": lambda: ibp.compress(embedding(NUM_ROWS, 40, torch.float64), scheme="planes", **ON_CPU),
    "listed": lambda: ibp.compress(one_hot_rows(NUM_ROWS, 300), scheme="planes", **ON_CPU),
    "listed packed": lambda: ibp.compress(make_tensor((NUM_ROWS, 700), torch.int32), layout="packed", **ON_CPU),
    "changing": lambda: _changed(ibp.compress(embedding(NUM_ROWS, 64), scheme="planes", **ON_CPU)),
    "raw": lambda: ibp.compress(embedding(NUM_ROWS, 64), scheme="raw", **ON_CPU),
}


def _changed(table):
    """Returns a table whose rows were changed in place, so that each row has its own base."""
    table.update_(torch.arange(0, NUM_ROWS, 3), embedding(len(range(0, NUM_ROWS, 3)), 64, seed=1))
    return table


class Result:
    """Memory for results between two canaries."""

    def __init__(self, num_bytes, device):
        self.whole = torch.full((num_bytes + 2 * CANARY,), 0xA5, dtype=U8, device=device)
        self.bytes = self.whole[CANARY : CANARY + num_bytes]

    def check(self):
        """Returns, as a tensor of one flag, whether the canaries are unchanged."""
        return (self.whole[:CANARY] == 0xA5).all() & (self.whole[CANARY + self.bytes.numel() :] == 0xA5).all()


class Damage:
    """Arrays that are damaged, with copies of them from before. seed: seed of the damage."""

    def __init__(self, arrays, seed):
        self.arrays = [array.view(-1).view(U8) for array in arrays if array.numel()]
        self.before = [array.clone() for array in self.arrays]
        self.device = self.arrays[0].device
        self.draw = torch.Generator(self.device).manual_seed(seed)

    def spoil(self, spots=SPOTS):
        """Flips bits in the arrays, or overwrites bytes with random ones, equally many in each array. Returns their
        number."""
        each = -(-spots // len(self.arrays))
        for array in self.arrays:
            at = torch.randint(array.numel(), (each,), generator=self.draw, device=self.device)
            drawn = torch.randint(256, (each,), generator=self.draw, device=self.device, dtype=U8)
            bits = torch.ones_like(drawn) << (drawn & 7)
            array[at] = torch.where(drawn > 127, drawn, array[at] ^ bits)
        return each * len(self.arrays)

    def mend(self):
        for array, before in zip(self.arrays, self.before, strict=True):
            array.copy_(before)


class Whole:
    """An intact table, which shows whether a device still works."""

    def __init__(self, device):
        x = embedding(64, 64, torch.bfloat16)
        self.wanted = bytes_of(x).to(device)
        self.arguments = on_device(ibp.compress(x, scheme="planes", **ON_CPU), device)

    def check(self):
        """Returns, as a tensor of one flag, whether the table decodes to its original bytes."""
        out, fault = torch.zeros_like(self.wanted), torch.zeros(4, dtype=I64, device=self.wanted.device)
        OPS.decode_bytes(*self.arguments, 0, out.numel(), 0, out.view(-1), fault)
        return (out == self.wanted).all() & (fault == 0).all()


def on_device(table, device):
    """Returns the arguments that describe a table to operations, with their tensors on a device."""
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values_of(table, CPU)]


def some_ids(draw, num_items, count, device):
    """Returns random ids, most of them in range."""
    ids = torch.randint(-2, num_items + 2, (count,), generator=draw, device=device)
    ids[0] = -(2**63)
    ids[1] = 2**62
    return ids


def check_device(*flags):
    """Asserts all flags at once. This waits for the device, so that errors of kernels are raised here."""
    assert bool(torch.stack([flag.reshape(()) for flag in flags]).all())


def corrupt_table(make, device, corruptions, *, pinned=False, seed=0):
    """Gathers and decodes a damaged table. pinned: the GPU reads it in host memory.

    Returns (number of damaged places, (decoded bytes, arguments) of the first round). In that round the codebook is
    intact, so that all decoders must return the same bytes. With a damaged codebook decoding is safe, but decoders may
    return different bytes.
    """
    table = make()
    arguments = values_of(table.pin_memory(), device) if pinned else on_device(table, device)
    damage, whole = Damage(arguments[:4], seed), Whole(device)
    codebook = Damage([arguments[4]], seed + 1) if arguments[4].numel() else damage
    num_items, item_bytes = arguments[8], arguments[9]
    out, rows = Result(num_items * item_bytes, device), Result(96 * item_bytes, device)
    fault, first = torch.zeros(4, dtype=I64, device=device), None
    OPS.decode_bytes(*arguments, 0, out.bytes.numel(), 0, out.bytes, fault)
    pristine = out.bytes.clone()
    assert fault.tolist() == [0, 0, 0, 0]
    done = 0
    while done < corruptions:
        done += damage.spoil()
        if first is not None and done % 3 == 0:
            done += codebook.spoil(4)
        ids = some_ids(damage.draw, num_items, 96, device)
        fault.zero_()
        OPS.decode_bytes(*arguments, 0, out.bytes.numel(), 0, out.bytes, fault)
        OPS.gather_items(*arguments, ids, 0, rows.bytes, fault)
        flags = [out.check(), rows.check(), whole.check(), fault[0] >= 0, fault[0] <= 3]
        if first is None:
            first = (
                out.bytes.clone(),
                [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments],
            )
        damage.mend()
        codebook.mend()
        fault.zero_()
        OPS.decode_bytes(*arguments, 0, out.bytes.numel(), 0, out.bytes, fault)
        check_device(*flags, (out.bytes == pristine).all(), (fault == 0).all())
    return done, first


def read_by_c(arguments):
    """Decodes a damaged table in plain C. Returns its bytes, and whether a fault was found."""
    near = [value.cpu() if isinstance(value, torch.Tensor) else value for value in arguments]
    out, fault = torch.zeros(near[8] * near[9], dtype=U8), torch.zeros(4, dtype=I64)
    OPS.decode_bytes(*near, 0, out.numel(), 0, out, fault)
    return out


def corrupt_cache(make, device, corruptions, seed=0):
    """Damages slabs, maps, stamps and entries of caches over a table; then looks rows up, fills and claims slots,
    changes and reads rows."""
    table = on_device(make(), device)
    num_items, item_bytes, row_bytes = table[8], table[9], table[5][1]
    rows_per_item, num_ways = item_bytes // row_bytes, NUM_SETS * WAYS
    slab = torch.zeros(num_ways * SLOT_BYTES, dtype=U8, device=device)
    ways = torch.tensor([-1, 0], device=device).repeat(num_ways)
    stamps, clock = torch.zeros(num_ways + NUM_SETS, dtype=torch.int32, device=device), torch.zeros_like(ways[:2])
    counts, fault = torch.zeros(10, dtype=I64, device=device), torch.zeros(4, dtype=I64, device=device)
    entries = torch.zeros(96 * rows_per_item, dtype=I64, device=device)
    damage, whole = Damage([slab, ways, stamps, entries], seed), Whole(device)
    out, done = Result(96 * item_bytes, device), 0
    lru = WAYS, SLOT_BYTES, slab, ways, stamps, clock
    while done < corruptions:
        damage.mend()
        clock.zero_()
        ids = some_ids(damage.draw, num_items, 96, device)
        offsets = torch.randint(-2, slab.numel() + 2, (96,), generator=damage.draw, device=device)
        OPS.claim_cached(*table, ids, *lru, entries, counts, fault)
        done += damage.spoil()
        OPS.gather_items(*table, ids, 0, out.bytes, fault, entries=entries, slabs=[slab, slab])
        OPS.find_cached(ids, rows_per_item, row_bytes, table[2], [ways], WAYS, entries, counts)
        OPS.gather_items(*table, ids, 0, out.bytes, fault, entries=entries, slabs=[slab])
        OPS.fill_slab(*table, ids, offsets, 0, WAYS, slab, ways, fault)
        OPS.set_cached(ids, torch.empty(0, dtype=torch.uint16, device=device), WAYS, True, ways)
        OPS.drop_cached(ids[:9], WAYS, ways)
        OPS.claim_cached(*table, ids, *lru, entries, counts, fault)
        OPS.gather_items(*table, ids, 0, out.bytes, fault, entries=entries, slabs=[slab])
        check_device(out.check(), whole.check())
    return done


def corrupt_place(device, corruptions, seed=0):
    """Encodes rows into a place whose index, rooms and counter are damaged."""
    rows = embedding(NUM_ROWS, 64).to(device)
    noise = torch.randint(0, 256, (NUM_ROWS, 256), dtype=U8, device=device).view(torch.float32)
    place = ibp.CodedRows(
        ibp.codecs.analyze(rows, scheme="planes"), NUM_ROWS, slot_bytes=96, overflow_bytes=1 << 17, device=device
    )
    ibp.encode_into(rows, place)
    arrays = [place.slots, place.overflow, place.lengths, place.bases, place.rooms, place.used]
    damage, whole, done = Damage(arrays, seed), Whole(device), 0
    while done < corruptions:
        done += damage.spoil()
        ids = some_ids(damage.draw, NUM_ROWS, 96, device)
        ibp.encode_into(noise[:96], place, ids)
        ibp.encode_into(rows, place)
        out, fault = torch.empty(NUM_ROWS * 256, dtype=U8, device=device), torch.zeros(4, dtype=I64, device=device)
        OPS.decode_bytes(*place.handle.parts[:10], 0, out.numel(), 0, out, fault)
        check_device(whole.check())
        damage.mend()
        place.fault.zero_()
    ibp.encode_into(rows, place)
    assert torch.equal(place.decode(dtype=torch.float32).view(torch.int32), rows.view(torch.int32))
    return done


def corrupt_file(path, device, corruptions, seed=0):
    """Changes bytes of a file with tables of all kinds, and loads it to a device. Only an exception may say what is
    wrong."""
    ibp.save(path, {name: make() for name, make in KINDS.items()} | {"plain": embedding(40, 8)})
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=U8)
    header_bytes = 8 + int.from_bytes(content[:8].numpy().tobytes(), "little")
    data, whole, done, read = Damage([content[header_bytes:]], seed), Whole(device), 0, 0
    header = Damage([content[:header_bytes]], seed + 1)
    while done < corruptions:
        in_header = done // SPOTS % 8 == 7
        done += header.spoil(2) if in_header else data.spoil()
        path.write_bytes(content.numpy().tobytes())
        try:
            loaded = ibp.load(path, device=device, verify=False)
        except ValueError:  # A header or codebook contradicts itself.
            loaded = {}
        for value in loaded.values():
            if not isinstance(value, ibp.CompressedTensor):
                continue
            try:
                value.decompress(device=device, check=True)
                read += 1
            except ibp.CorruptTableError:
                pass
        check_device(whole.check())
        (header if in_header else data).mend()
    return done, read


def corrupt_delta(device, corruptions, seed=0):
    """Applies damaged deltas. The target must stay as it was, or become the version that the delta names."""
    base = embedding(NUM_ROWS, 256, torch.bfloat16).to(device)
    new = base.clone()
    new.view(-1)[::37] *= 2
    delta = ibp.deltas.make(new, base)
    table, whole, done, applied = delta.table, Whole(device), 0, 0
    damage = Damage([table.slots, table.overflow, table.lengths, table.bases], seed)
    while done < corruptions:
        done += damage.spoil(4)
        held = base.clone()
        try:
            delta.apply_(held)
            applied += 1
            assert torch.equal(held.view(torch.int16), new.view(torch.int16))
        except ValueError:
            assert torch.equal(held.view(torch.int16), base.view(torch.int16))
        check_device(whole.check())
        damage.mend()
    held = base.clone()
    delta.apply_(held)
    assert torch.equal(held.view(torch.int16), new.view(torch.int16))
    return done, applied
