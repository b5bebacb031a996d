"""torch.ops.ibp with arguments that contradict each other: they raise RuntimeError. tests/core/test_sanitized.py
runs all of it under AddressSanitizer."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ibp
from handles import BY_VALUES, handle_of, takes_table, values_of
from helpers import bytes_of, spiky_rows

OPS = torch.ops.ibp
CPU = torch.device("cpu")
U8, U16, I32, I64 = torch.uint8, torch.uint16, torch.int32, torch.int64
MOST = 2**63 - 1
PIECE_INDEX = 1088  # bytes before the overflow of a piece of 100 rows
INTS = [-(2**63), -(2**62), -1, 0, 1, 3, 31, 65537, 2**31, 2**32 + 1, 2**62, MOST]


def empty(dtype):
    return torch.empty(0, dtype=dtype)


def zeros(count, dtype=U8):
    return torch.zeros(count, dtype=dtype)


def fault():
    return zeros(4, I64)


def raw_table(num_items=2, item_bytes=64, slots=None):
    """The arguments of a table of raw rows of 64 bytes."""
    slots = torch.arange(num_items * item_bytes).to(U8) if slots is None else slots
    return [slots, empty(U8), empty(U16), empty(I64), empty(I32), [0, 64], 64, 0, num_items, item_bytes]


def coded_table(scheme):
    x = spiky_rows(100, 60)
    table = ibp.compress(x, scheme=scheme, slot_bytes=32, device="cpu", memory="host")
    assert table.overflow.numel() and table.bases.numel()
    return x, [value.clone() if isinstance(value, torch.Tensor) else value for value in values_of(table, CPU)]


def fresh_piece():
    """Memory for 100 rows of 240 bytes: counters, bases, lengths, overflow."""
    return zeros(PIECE_INDEX + 100 * 256)


def selected():
    """The outputs of select_rows for 40 rows of 240 bytes and those that share their bases."""
    return [zeros(40, U16), zeros(2, I64), zeros(80 * 240), zeros(2, I64), fault()]


def good_calls():
    """(operation, arguments), which are right, of every operation of the CPU; whoever changes an argument breaks
    the call."""
    for scheme in ("ibp", "planes"):
        x, table = coded_table(scheme)
        data, words, codec = bytes_of(x).clone(), table[4], table[5]
        yield "measure_rows", [data, words, codec]
        yield "encode_rows", [*table, data, fault()]
        positions = torch.tensor([1, 2, 0], dtype=I32)
        for some in (None, positions):
            yield "gather_items", [*table, torch.tensor([5, 99, 5]), 0, torch.zeros(3, 60), fault(), some]
        yield "decode_bytes", [*table, 100, 7777, 0, zeros(7677), fault()]
        yield "select_rows", [*table, torch.arange(50), 2, *selected()]
        if scheme == "ibp":
            yield "count_hits", [data, words, codec]
        coded = fresh_piece()
        OPS.encode_piece(data, words, codec, PIECE_INDEX, 0, coded)
        yield "encode_piece", [data, words, codec, PIECE_INDEX, 0, fresh_piece()]
        yield "decode_piece", [coded, words, codec, PIECE_INDEX, 0, zeros(len(data)), fault()]
    lengths = OPS.measure_rows(data, words, codec)
    yield "index_rows", [lengths, data.numel(), 240, 32]
    yield "survey_rows", [lengths, data.numel(), 240]
    yield "codebook_words", [torch.full((50,), 15, dtype=U8), torch.full((50,), 5, dtype=U8), 4, False]
    yield "threshold_bits", [torch.arange(64) % 11, 10, 0.8]
    yield "choose_masks", [data, 240, 4]
    yield "estimate_masks", [data, 240]
    yield "learn_planes", [data, 240, 4, 8, 100, False, False]
    yield "count_bits", [data, 240]
    yield "partition_ids", [torch.tensor([7, 99, 3]), 100, 3]
    yield "group_vectors", [torch.tensor([7, 99, 3]), 100]
    yield "list_matrices", [torch.tensor([7, 99, 3]), 100, 4, [2, 5], None]
    yield "sum_words", [data, 7, zeros(1, I64)]
    yield "sum_parts", [[data, data[:80]], [7, 9], [1, 0], zeros(2, I64)]


GOOD = list(good_calls())
WRITTEN = {
    "slots",
    "overflow",
    "out",
    "fault",
    "memory",
    "lengths_out",
    "bases_out",
    "rows_out",
    "taken",
    "sum",
    "sums",
}

ANY_DTYPE = {"out", "part"}  # memory, whatever it holds


def may_be_shorter(name, called, arguments):
    """Where fewer elements are a smaller problem, rows that lie outside their table, or room for fewer rows."""
    is_free = name == "decode_piece" or (name == "gather_items" and arguments[-1] is not None)
    less_work = {"slots", "overflow", "ids", "mask", "part", "lengths_out", "bases_out", "rows_out", "memory", "coded"}
    return called in less_work or (called == "data" and name != "encode_rows") or (called == "out" and is_free)


def names_of(name):
    return [argument.name for argument in getattr(OPS, name).default._schema.arguments]


def arguments_of(name):
    """What the arguments of a call are called, the values that describe a table among them."""
    return [*names_of("describe_table")[:10], *names_of(name)[1:]] if takes_table(name) else names_of(name)


def tensors_of(name, arguments):
    """(place, name) of the tensors that have elements."""
    pairs = zip(itertools.count(), arguments_of(name), arguments)
    return [(place, called) for place, called, value in pairs if isinstance(value, torch.Tensor) and value.numel()]


def call(name, arguments):
    return getattr(BY_VALUES, name)(*arguments)


def changed(arguments, place, value):
    return [*arguments[:place], value, *arguments[place + 1 :]]


def wrong_tensors(tensor, any_dtype):
    """(what is wrong, tensor), none of which an operation can take."""
    if not any_dtype:
        for dtype in (torch.int8, torch.float32, torch.bool, torch.complex64, torch.bits8):
            yield str(dtype), torch.empty(tensor.shape, dtype=dtype)
    if tensor.numel() > 1:
        yield "not contiguous", tensor.repeat_interleave(2, -1)[..., ::2]
        yield "expanded", tensor.flatten()[:1].expand(tensor.numel())
    if tensor.dtype != U16:
        yield "sparse", tensor.to_sparse()
    for kept in (0, 1):
        short = tensor.clone()
        short.untyped_storage().resize_(kept)
        yield f"storage of {kept} bytes", short
    yield "quantised", torch.quantize_per_tensor(torch.zeros(tensor.shape), 1.0, 0, torch.quint8)


def numbered(cases):
    ids = [f"{name}-{number}" for number, (name, _) in enumerate(cases)]
    return pytest.mark.parametrize("name, arguments", cases, ids=ids)


def test_a_first_row_past_all():
    place = [*raw_table(), empty(U16), zeros(1, I64)]
    with pytest.raises(RuntimeError, match=f"2 rows from row {MOST} on are not among 2"):
        BY_VALUES.encode_into(*place, zeros(128), None, None, MOST, 0, zeros(2, I64), fault())


def test_a_table_is_no_place():
    with pytest.raises(RuntimeError, match="table is described for reading alone"):
        OPS.encode_into(handle_of(*raw_table()), zeros(128), None, None, 0, 0, zeros(2, I64), fault())
    with pytest.raises(RuntimeError, match="table is described for reading alone"):
        OPS.encode_into(handle_of(*raw_table()), zeros(128), None, None, 0, 0, None, None, True)


def test_bytes_that_are_no_handle():
    table, (out, noted) = handle_of(*raw_table()), (zeros(128), fault())
    OPS.decode_bytes(table.clone(), 0, 128, 0, out, noted)  # a copy is one
    assert out.tolist() == list(range(128))
    unmarked, repeated = table.clone(), table.repeat_interleave(2)[::2]
    unmarked[:8] = 0
    for wrong in (unmarked, repeated, table[:-1], table[:0], table.view(I64), zeros(4096), table.to("meta")):
        with pytest.raises(RuntimeError, match="table"):
            OPS.decode_bytes(wrong, 0, 128, 0, out, noted)
    with pytest.raises(RuntimeError, match="out and table share memory"):
        OPS.decode_bytes(table, 0, 128, 0, table[:128], noted)


@numbered(GOOD)
def test_the_calls_are_good(name, arguments):
    call(name, arguments)


@pytest.mark.filterwarnings("ignore")
@numbered(GOOD)
def test_wrong_tensors(name, arguments):
    for place, called in tensors_of(name, arguments):
        for what, wrong in wrong_tensors(arguments[place], any_dtype=called in ANY_DTYPE):
            with pytest.raises(RuntimeError):
                call(name, changed(arguments, place, wrong))
                pytest.fail(f"{name} takes {called}: {what}")
        if len(tensors_of(name, arguments)) > 1:
            with pytest.raises(RuntimeError, match="one device"):
                call(name, changed(arguments, place, torch.empty_like(arguments[place], device="meta")))
        with pytest.raises((RuntimeError, TypeError)):
            call(name, changed(arguments, place, None if called != "positions" else "none"))


@numbered(GOOD)
def test_short_tensors(name, arguments):
    """Every array is as long as what reads it says."""
    for place, called in tensors_of(name, arguments):
        tensor = arguments[place].flatten()
        if may_be_shorter(name, called, arguments):
            continue
        with pytest.raises(RuntimeError):
            call(name, changed(arguments, place, tensor[:-1].clone()))
            pytest.fail(f"{name} takes {called} with an element too few")


@numbered(GOOD)
def test_odd_numbers(name, arguments):
    """Any number in the place of any other raises or is harmless; negative sizes raise."""
    codecs = [changed(arguments[place], k, n) for place, value in enumerate(arguments) if isinstance(value, list)
              for k in range(len(value)) for n in INTS]  # fmt: skip
    for place, value in enumerate(arguments):
        numbers = INTS if type(value) is int else codecs if isinstance(value, list) else []
        for number in numbers:
            try:
                call(name, changed(arguments, place, number))
            except RuntimeError:
                continue
            assert not isinstance(number, int) or number >= 0, f"{name} takes {arguments_of(name)[place]} = {number}"


@numbered(GOOD)
def test_shared_memory(name, arguments):
    """What is written shares no byte with another tensor."""
    tensors = tensors_of(name, arguments)
    for (place, called), (other, beside) in itertools.permutations(tensors, 2):
        if called not in WRITTEN or (name != "encode_rows" and called in ("slots", "overflow")):
            continue
        if name == "encode_rows" and {called, beside} == {"slots", "overflow"} and place > other:
            continue
        sizes = [arguments[p].nbytes for p in (place, other)]
        memory = torch.zeros(sum(sizes) - 1 + 16, dtype=U8)
        start = (sizes[0] - 1) // 16 * 16  # the last bytes of one are the first of the other
        both = [memory[at : at + size].view(arguments[p].dtype).view(arguments[p].shape)
                for p, at, size in ((place, 0, sizes[0]), (other, start, sizes[1]))]  # fmt: skip
        both[1].copy_(arguments[other])
        with pytest.raises(RuntimeError, match="share memory"):
            call(name, changed(changed(arguments, place, both[0]), other, both[1]))
            pytest.fail(f"{name} takes {called} and {beside} in the same memory")


def words_with(entry, row_bytes=64):
    """A codebook's words with the same entry of flags everywhere, and all bits invariant."""
    words = torch.zeros(3, -(-row_bytes // 16) * 4, dtype=I32)
    words[0], words[2] = -1, entry
    return words


CONTRADICTIONS = {
    "items so large that count x item_bytes wraps": lambda: BY_VALUES.gather_items(
        *raw_table(0, 1 << 62, empty(U8)), zeros(4, I64), 0, zeros(16), fault()),
    "one huge item": lambda: BY_VALUES.gather_items(
        *raw_table(1, 1 << 62, empty(U8)), zeros(4, I64), 0, zeros(16), fault()),
    "a table of 2^80 bytes": lambda: BY_VALUES.encode_rows(
        *raw_table(1 << 40, 1 << 40, empty(U8)), zeros(128), fault()),
    "partition of a negative number of items": lambda: OPS.partition_ids(torch.arange(10), -(2**63), 0),
    "partition with too many windows": lambda: OPS.partition_ids(torch.arange(10), 1 << 40, 3),
    "index of a negative number of bytes": lambda: OPS.index_rows(empty(U16), -100, 64, 32),
    "index of 2^63 - 1 bytes": lambda: OPS.index_rows(empty(U16), MOST, 65536, 32),
    "index larger than any memory": lambda: OPS.index_rows(empty(U16), 1 << 57, 1, 32),
    "survey of 2^63 - 1 bytes": lambda: OPS.survey_rows(empty(U16), MOST, 64),
    "survey of more rows than lengths": lambda: OPS.survey_rows(zeros(3, U16), 640, 64),
    "rows of no bytes": lambda: OPS.count_bits(zeros(10), 0),
    "a threshold of a negative number of rows": lambda: OPS.threshold_bits(zeros(8, I64), -3, 0.5),
    "a threshold that is no number": lambda: OPS.threshold_bits(zeros(8, I64), 3, float("nan")),
    "counts of part of a byte": lambda: OPS.threshold_bits(zeros(15, I64), 3, 0.5),
    "bitval outside its mask": lambda: OPS.codebook_words(zeros(64), torch.ones(64, dtype=U8), 4, False),
    "bitval shorter than its mask": lambda: OPS.codebook_words(zeros(64), zeros(3), 4, False),
    "chunks of three bytes": lambda: OPS.choose_masks(zeros(64), 8, 3),
    "no rows to estimate from": lambda: OPS.estimate_masks(zeros(7), 8),
    "no rows to learn from": lambda: OPS.learn_planes(zeros(7), 8, 4, 8, 1, False, False),
    "rows to learn from that cut elements": lambda: OPS.learn_planes(zeros(64), 6, 4, 8, 10, False, False),
    "an exponent of all bits": lambda: OPS.learn_planes(zeros(64), 8, 4, 32, 10, False, False),
    "more bytes than there are": lambda: BY_VALUES.decode_bytes(*raw_table(), -(2**63), MOST, 0, zeros(16), fault()),
    "out too small": lambda: BY_VALUES.decode_bytes(*raw_table(), 0, 128, 0, zeros(16), fault()),
    "a fault too short for nothing": lambda: BY_VALUES.decode_bytes(*raw_table(), 0, 0, 0, zeros(16), zeros(3, I64)),
    "a selection from before its ids": lambda: BY_VALUES.select_rows(*raw_table(), zeros(3, I64), -1, *selected()),
    "a selection of huge items": lambda: BY_VALUES.select_rows(*raw_table(0, 1 << 62), zeros(3, I64), 0, *selected()),
    "a selection of parts of rows": lambda: BY_VALUES.select_rows(*raw_table(2, 32), zeros(1, I64), 0, *selected()),
    "more participation bits than chunks": lambda: OPS.measure_rows(zeros(64), words_with(0), [1, 64, 4, 17]),
    "hits of scheme planes": lambda: OPS.count_hits(zeros(64), empty(U8), [2, 64, 8, 0, 64, *[0] * 10]),
    "elements of three bytes": lambda: OPS.measure_rows(zeros(63), empty(U8), [2, 63, 3, 0, 8, *[0] * 10]),
    "raw rows with lengths": lambda: BY_VALUES.gather_items(
        *changed(raw_table(), 2, torch.ones(2, dtype=U16)), torch.tensor([0]), 0, zeros(64), fault()),
    "items to positions and to addresses": lambda: BY_VALUES.gather_items(
        *raw_table(), zeros(1, I64), 0, zeros(64), fault(), zeros(1, I32), addresses=zeros(1, I64)),
    "entries without slabs": lambda: BY_VALUES.gather_items(
        *raw_table(), zeros(1, I64), 0, zeros(64), fault(), entries=zeros(1, I64)),
    "entries and dimensions": lambda: BY_VALUES.gather_items(
        *raw_table(), zeros(1, I64), 0, zeros(64), fault(), entries=zeros(1, I64), slabs=[zeros(64)], outer_dims=0),
    "numbers behind scheme raw": lambda: OPS.measure_rows(zeros(64), empty(I32), [0, 64, 4, 5]),
    "an index longer than what stands before overflow": lambda: OPS.encode_piece(
        zeros(101 * 64), words_with(0), [1, 64, 4, 0], 1064, 0, fresh_piece()),
    "a piece shorter than its index": lambda: OPS.decode_piece(
        fresh_piece()[:1087], words_with(0), [1, 64, 4, 0], PIECE_INDEX, 0, zeros(100 * 64), fault()),
    "a piece that is not aligned": lambda: OPS.decode_piece(
        fresh_piece()[1:], words_with(0), [1, 64, 4, 0], PIECE_INDEX, 0, zeros(100 * 64), fault()),
    "a piece of raw rows": lambda: OPS.encode_piece(
        zeros(100 * 64), empty(I32), [0, 64], PIECE_INDEX, 0, fresh_piece()),
    "an unknown scheme": lambda: OPS.measure_rows(zeros(64), empty(I32), [3, 64]),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions(what):
    with pytest.raises(RuntimeError):
        CONTRADICTIONS[what]()


def test_an_error_of_torch_says_what_it_was():
    """Torch's functions return error codes to the operations, which make them exceptions again; none of that goes
    through a C++ stream, which a compiler that links parts of libstdc++ statically makes crash."""
    with pytest.raises(RuntimeError, match="ibp: torch refuses"):
        OPS.index_rows(empty(U16), 1 << 57, 1, 32)
    library = (Path(ibp.__file__).parent / "_lib" / "libibp_torch.so").read_bytes()
    if b"libstdc++.so" in library:  # else the compiler has put all of libstdc++ into it
        assert b"basic_stringstream" not in library and b"basic_ostringstream" not in library


def test_positions_outside_of_out():
    """Noted as a fault; huge items too."""
    noted = fault()
    ids = torch.tensor([0, 1])
    BY_VALUES.gather_items(*raw_table(), ids, 0, zeros(64), noted, torch.tensor([-1, 0], dtype=I32))
    assert noted.tolist()[:2] == [2, 2**32 - 1]
    noted = fault()
    huge = raw_table(0, 1 << 57, empty(U8))
    BY_VALUES.gather_items(*huge, ids, 0, zeros(64), noted, torch.tensor([7, -1], dtype=I32))
    assert noted[0] == 2


def two_changes(count, seed):
    """Calls with two odd arguments each, drawn at random."""
    draw = random.Random(seed)
    for _ in range(count):
        name, arguments = draw.choice(GOOD)
        for place in draw.sample(range(len(arguments)), 2):
            value = arguments[place]
            if type(value) is int:
                arguments = changed(arguments, place, draw.choice(INTS))
            elif isinstance(value, list):
                arguments = changed(arguments, place, changed(value, draw.randrange(len(value)), draw.choice(INTS)))
            elif isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in (U8, U16, I32, I64):
                noise = torch.randint(0, 256, (value.nbytes + draw.choice([0, 8, 800]),), dtype=U8).view(value.dtype)
                less = value[: value.numel() // 2].clone()
                arguments = changed(arguments, place, draw.choice([noise, value[:0], less]))
        yield name, [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]


def test_two_odd_arguments():
    for name, arguments in two_changes(400, seed=0):
        try:
            call(name, arguments)
        except RuntimeError:
            pass


LITTLE_WORK = """
import os, torch, ibp
from handles import BY_VALUES

OPS, U8, I64 = torch.ops.ibp, torch.uint8, torch.int64

def threads():
    return len(os.listdir("/proc/self/task"))

data = torch.frombuffer(bytearray(8 << 20), dtype=U8)  # torch.zeros would start threads
few, fault = data[: 100 * 256], torch.zeros(4, dtype=I64)
before = threads()
mask, bitval = OPS.choose_masks(few, 256, 4)
words, codec = OPS.codebook_words(mask, bitval, 4, False), [1, 256, 4, 64]
OPS.count_bits(few, 256), OPS.count_hits(few, words, codec)
lengths = OPS.measure_rows(few, words, codec)
bases = OPS.index_rows(lengths, 100 * 256, 256, 0)
rows = torch.zeros(int(bases[-1]), dtype=U8)
table = [data[:0], rows, lengths, bases[:-1], words, codec, 0, 0, 100, 256]
BY_VALUES.encode_rows(*table, few, fault)
BY_VALUES.decode_bytes(*table, 0, 100 * 256, 0, torch.ones(100 * 256, dtype=U8), fault)
BY_VALUES.gather_items(*table, torch.arange(100), 0, torch.ones(100 * 256, dtype=U8), fault)
rows, taken = torch.zeros(100 * 256, dtype=U8), torch.zeros(2, dtype=I64)
BY_VALUES.select_rows(*table, torch.arange(60), 0, lengths.clone(), bases.clone(), rows, taken, fault)
assert fault[0] == 0
little = threads()
OPS.measure_rows(data, words, codec)
print(before, little, threads())
"""


@pytest.mark.slow
def test_little_work_stays_on_the_calling_thread():
    """25 KiB wake none of torch's threads, 8 MiB do."""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LITTLE_WORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, little, much = map(int, done.stdout.split())
    assert before == little < much
