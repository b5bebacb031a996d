"""The schemes side by side: what `auto` chooses, what `estimate` and `analyze` say of each, and tables of scheme planes
that are damaged."""

import numpy as np
import pytest
import torch

import ibp
import reference
import reference_planes
from golden.make_planes import KINDS, random_codebook
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import (
    SCHEMES,
    assert_same_bits,
    assert_same_table,
    bytes_of,
    compress_in_place,
    embedding,
    make_tensor,
    one_hot_rows,
    plain_table,
    planes_codebook,
    reference_planes_codebook,
    reference_row,
    spiky_rows,
)
from ibp._rows import estimation

CPU = torch.device("cpu")
NAMED = ["raw", "ibp", "planes"]


def compress(x, **arguments):
    return ibp.compress(x, device="cpu", memory="host", **arguments)


# ---- what auto chooses ---------------------------------------------------------------------------------------------

SETS = {
    "bfloat16 weights": lambda: embedding(3000, 64, torch.bfloat16),
    "float32 weights": lambda: embedding(1000, 100),
    "float16 weights": lambda: embedding(1000, 33, torch.float16),
    "one-hot": lambda: one_hot_rows(800, 120),
    "spiky": lambda: spiky_rows(800, 120),
    "half zeros": lambda: torch.where(
        torch.rand(500, 64, dtype=torch.float64) < 0.5, torch.randn(500, 64, dtype=torch.float64), 0.0
    ),
    "clipped": lambda: torch.randn(500, 80).relu(),
    "scaled columns": lambda: torch.randn(4000, 32) * 2.0 ** torch.arange(-16, 16),
    "counting": lambda: torch.arange(6400).view(100, 64),
    "ids": lambda: torch.randint(10**6, (700, 16)),
    "quantised": lambda: (torch.randn(600, 96) * 20).round().to(torch.int8),
    "fixed bits": lambda: (
        torch.randint(0, 256, (900, 40)).to(torch.uint8)
        & torch.tensor([0x11, 0x80, 0x42, 0xFF] * 10, dtype=torch.uint8)
    ),
    "equal": lambda: make_tensor((400, 50), torch.float32, "equal"),
    "noise": lambda: make_tensor((500, 64), torch.uint8, "random"),
    "noise of 64 bits": lambda: make_tensor((300, 33), torch.float64, "random"),
    "narrow rows": lambda: embedding(3000, 2),
    "rows of 40 bytes": lambda: embedding(3000, 20, torch.bfloat16),
    "one dimension": lambda: embedding(200, 64).reshape(-1),
    "few": lambda: embedding(3, 64),
    "one value": lambda: torch.tensor(2.5),
}


def fetch_cost(table):
    """Bytes of the sectors that fetching every row once reads, 64 for every second fetch, and the codebook."""
    plain = plain_table(table, None)
    second_fetches = sum(plain.part(row) > 0 for row in range(plain.num_rows)) if table.slot_bytes else 0
    return table.link_bytes + 64 * second_fetches + (table.codebook.nbytes if table.codebook else 0)


@pytest.mark.parametrize("name", SETS)
def test_auto_packs_as_well_as_the_best_scheme(name):
    """Where the sample is the whole table the choice is exact."""
    x = SETS[name]()
    tables = {scheme: compress(x, scheme=scheme, layout="packed") for scheme in NAMED}
    sizes = {scheme: table.stored_bytes + table.index_bytes for scheme, table in tables.items()}
    table = compress(x, layout="packed")
    assert table.stored_bytes + table.index_bytes == min(sizes.values()) <= bytes_of(x).numel(), sizes
    assert_same_bits(table.decompress(), x)


@pytest.mark.parametrize("name", SETS)
def test_auto_takes_the_least_to_fetch(name):
    """Of the schemes that are fetched faster than raw rows, or as fast and from less memory."""
    x = SETS[name]()
    better = [
        scheme
        for scheme, of in ibp.estimate(x, device="cpu").schemes.items()
        if (-of.fetch_speedup, of.nbytes) < (-1, bytes_of(x).numel())
    ]
    costs = {scheme: fetch_cost(compress(x, scheme=scheme)) for scheme in better or ["raw"]}
    table = compress(x)
    assert fetch_cost(table) == min(costs.values()), costs
    assert table.stored_bytes <= bytes_of(x).numel()
    assert_same_bits(table.decompress(), x)


@pytest.mark.parametrize(
    "make, slot_bytes",
    [
        (lambda: embedding(2000, 128, torch.bfloat16), 192),
        (lambda: embedding(2000, 128, torch.bfloat16), 256),
        # Fmt: skip
        (lambda: spiky_rows(2000, 32), 32),
        (lambda: spiky_rows(2000, 32), 64),
        (lambda: spiky_rows(2000, 32), 128),
    ],
)
def test_auto_for_given_slots(make, slot_bytes):
    """Slots as long as the row save no memory, but a fetch reads less: rows are coded all the same."""
    x = make()
    table = compress(x, slot_bytes=slot_bytes)
    assert table.slot_bytes == slot_bytes and table.scheme != "raw"
    assert table.link_bytes <= 1.01 * min(
        compress(x, scheme=scheme, slot_bytes=slot_bytes).link_bytes for scheme in ("ibp", "planes")
    )


def test_auto_where_the_last_row_is_short():
    """A row of few bytes costs few bytes: it does not make a whole row's difference to the choice."""
    for length in (2049, 4096, 6000, 8193):
        x = (
            torch.full((length,), 7, dtype=torch.uint8)
            if length == 8193
            else embedding(length, 1, torch.bfloat16).reshape(-1)
        )
        sizes = {scheme: compress(x, scheme=scheme, layout="packed").stored_bytes for scheme in NAMED}
        assert compress(x, layout="packed").stored_bytes == min(sizes.values()), sizes


@pytest.mark.slow
def test_auto_of_a_sample():
    """Tables far larger than what is looked at."""
    for x in (embedding(60000, 64, torch.bfloat16), spiky_rows(40000, 64), torch.randn(60000, 16).relu()):
        sizes = [compress(x, scheme=scheme, layout="packed").stored_bytes for scheme in ("ibp", "planes")]
        assert compress(x, layout="packed").stored_bytes <= 1.002 * min(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["slots", "packed"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_choice_every_time(scheme, layout):
    """Samples are seeded, and nobody else's random numbers are touched."""
    x = embedding(40000, 16, torch.float16)
    tables = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        states = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
        tables.append(compress(x, scheme=scheme, layout=layout))
        assert torch.equal(states[0], torch.random.get_rng_state()) and states[1] == np.random.get_state()[1].tolist()
    assert_same_table(*tables)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex64], ids=str)
def test_random_bytes_stay_as_they_are(dtype):
    for shape in ((1, 1), (3, 5), (50, 64), (300, 100), (4000,)):
        for layout in ("slots", "packed"):
            for scheme in SCHEMES:
                table = compress(make_tensor(shape, dtype, "random"), scheme=scheme, layout=layout)
                assert table.scheme == "raw" and table.savings == 0 and table.codebook is None


def test_chunk_bytes_and_tau_mean_masks():
    x = embedding(3000, 64, torch.bfloat16)
    for arguments in ({"chunk_bytes": 4}, {"tau": 0.8}, {"chunk_bytes": 2, "tau": 0.9}):
        for scheme in ("auto", "ibp"):
            assert compress(x, scheme=scheme, **arguments).scheme == "ibp"
        assert_same_table(compress(x, **arguments), compress(x, scheme="ibp", **arguments))
        for scheme in ("planes", "raw"):
            with pytest.raises(ValueError, match=f"'ibp', but scheme is '{scheme}'"):
                compress(x, scheme=scheme, **arguments)
            with pytest.raises(ValueError, match=f"'ibp', but scheme is '{scheme}'"):
                ibp.compress(x.clone(), scheme=scheme, **arguments, inplace=True)
            with pytest.raises(ValueError, match=f"'ibp', but scheme is '{scheme}'"):
                ibp.codecs.analyze(x, scheme=scheme, **arguments)


@pytest.mark.parametrize("function", [ibp.compress, compress_in_place, ibp.codecs.analyze])
@pytest.mark.parametrize("scheme", ["zip", "", "IBP", None, 2])
def test_unknown_schemes(function, scheme):
    for x in (embedding(100, 8), torch.zeros(0, 4)):
        with pytest.raises(ValueError, match=r"scheme is .*; wanted one of \['auto', 'raw', 'ibp', 'planes'\]"):
            function(x, scheme=scheme)


# ---- estimate and analyze ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_estimates_are_what_compressing_gives(name):
    """A scheme that is not learned, because it cannot be the best, has its bound."""
    x = SETS[name]()
    estimates = ibp.estimate(x, device="cpu", layout="packed")
    assert list(estimates) == NAMED and estimates["raw"] == 0
    tolerance = 0.01 if name == "one dimension" else 0.002 if x.numel() > estimation._LEAST_ELEMENTS else 1e-9
    for scheme, savings in estimates.items():
        table = compress(x, scheme=scheme, layout="packed")
        near = 0.05 + 2 / table.num_rows if scheme == "ibp" != estimates.auto else tolerance
        assert savings >= 0 and savings == pytest.approx(table.savings, abs=near)


def test_estimates_of_a_sample():
    x = embedding(60000, 64, torch.bfloat16)
    for scheme, savings in ibp.estimate(x, device="cpu").items():
        assert savings == pytest.approx(compress(x, scheme=scheme, layout="packed").savings, abs=0.005)


def test_estimates_of_nothing():
    assert all(savings == 0 for savings in ibp.estimate(torch.zeros(0, 7)).values())


def test_estimate_takes_row_bytes():
    x = embedding(500, 64)
    for row_bytes in (100, 4096):
        estimates = ibp.estimate(x, row_bytes=row_bytes, device="cpu")
        for scheme in ("ibp", "planes"):
            assert estimates[scheme] == pytest.approx(
                compress(x, scheme=scheme, row_bytes=row_bytes, layout="packed").savings, abs=0.01
            )


def test_analyze_by_scheme():
    x = embedding(1000, 128, torch.bfloat16)
    assert isinstance(ibp.codecs.analyze(x), ibp.codecs.Codebook) and isinstance(
        ibp.codecs.analyze(x, scheme="ibp"), ibp.codecs.Codebook
    )
    assert (
        isinstance(ibp.codecs.analyze(x, scheme="planes"), ibp.codecs.PlanesCodebook)
        and ibp.codecs.analyze(x, scheme="raw") is None
    )
    assert isinstance(ibp.codecs.analyze(x, scheme="auto"), ibp.codecs.PlanesCodebook)
    assert ibp.codecs.analyze(make_tensor((500, 64), torch.uint8, "random"), scheme="auto") is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_analyze_gives_what_compress_uses(scheme):
    for x in (embedding(1000, 128, torch.bfloat16), spiky_rows(500, 60)):
        codebook = ibp.codecs.analyze(x, scheme=scheme, sample=None, device="cpu")
        assert_same_table(compress(x, codebook=codebook), compress(x, scheme=scheme))
        assert ibp.estimate(x, codebook, device="cpu").stored_bytes == compress(x, codebook=codebook).stored_bytes
        assert codebook.expected_savings == pytest.approx(compress(x, codebook=codebook).savings, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_compress_with_any_planes_codebook(kind):
    """The codebook is used as it is, however little it fits; rows that would grow stay raw."""
    rng = np.random.default_rng(0)
    for element_bytes in (1, 2, 4, 8):
        codebook = planes_codebook(
            random_codebook(rng, element_bytes, 240 // element_bytes, 1, 8 * element_bytes - 5, (1, 2), kind)
        )
        for x in (spiky_rows(300, 60), embedding(300, 60), make_tensor((300, 120), torch.int16, "narrow")):
            table = compress(x, codebook=codebook)
            assert table.scheme == "raw" or table.codebook is codebook
            assert_same_bits(table.decompress(), x)
            assert ibp.estimate(x, codebook, device="cpu").stored_bytes == table.stored_bytes


def test_a_codebook_goes_before_a_scheme():
    x = spiky_rows(500, 60)
    for scheme in ("ibp", "planes"):
        codebook = ibp.codecs.analyze(x, scheme=scheme, device="cpu")
        for asked in SCHEMES:
            assert compress(x, scheme=asked, codebook=codebook).scheme == scheme


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("scheme", NAMED)
def test_in_place_with_every_scheme(scheme, name):
    x = SETS[name]()
    mine = x.clone()
    table = ibp.compress(mine, scheme=scheme, device="cpu", memory="host", inplace=True)
    assert table.scheme in (scheme, "raw") and table.slots.data_ptr() == mine.data_ptr()
    assert_same_bits(table.decompress(), x)


# ---- damaged tables ------------------------------------------------------------------------------------------------


def planes_table(kind, layout, seed=0):
    """A table of 150 rows of 48 elements, coded, raw and, with slots of 32, in two parts."""
    x = {
        "dense": lambda: embedding(150, 48),
        "per_column": lambda: torch.randn(150, 48) * 2.0 ** torch.arange(-24, 24),
        "listed": lambda: spiky_rows(150, 48),
    }[kind]()
    x[::17] = make_tensor((9, 48), torch.float32, "random", seed)
    rows = bytes_of(x).numpy().reshape(150, -1)
    settings = {
        "rotate": 1,
        "residual_bits": 24,
        "digit_bits": (1, 2, 2),
        "per_column": kind == "per_column",
        "listed": kind == "listed",
    }
    table = compress(x, codebook=planes_codebook(reference_planes.make_codebook(rows, 4, **settings)), **layout)
    assert table.scheme == "planes" and (table.lengths.view(torch.int16) == 0).any()
    return x, table


def decoded_by_numpy(table, row):
    """The row's bytes, or zeros where they contradict each other; and whether they do."""
    plain = plain_table(table, None)
    try:
        return reference_row(plain, reference_planes_codebook(table.codebook), row), False
    except (reference.CorruptRow, reference_planes.CorruptRow):
        return bytes(plain.valid(row)), True


def check_against_numpy(table):
    """Every row decoded alone is what numpy makes of it, or zeros and a fault; the whole table has a fault if any row
    has. Returns how many have."""
    size, corrupt = table.row_bytes, []
    arguments = values_of(table, CPU)
    for row in range(table.num_rows):
        out, fault = torch.full((size,), 0xA5, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
        OPS.decode_bytes(*arguments, row * size, (row + 1) * size, 0, out, fault)
        expected, is_corrupt = decoded_by_numpy(table, row)
        assert out.numpy().tobytes() == expected
        assert fault.tolist()[:3] == ([3, row, row] if is_corrupt else [0, 0, 0])
        corrupt += [row] if is_corrupt else []
    if corrupt:
        with pytest.raises(ibp.CorruptTableError, match=f"row {corrupt[0]} at"):
            table.decompress()
        with pytest.raises(ibp.CorruptTableError, match=f"{corrupt[-1]} at position 0"):
            ibp.index_select(table, torch.tensor([corrupt[-1]]))
    else:
        table.decompress()
    assert table.link_bytes >= 0 and table.stored_bytes > 0 and repr(table)
    return len(corrupt)


DAMAGED_LAYOUTS = [{}, {"slot_bytes": 32}, {"slot_bytes": 192}, {"layout": "packed"}]


@pytest.mark.slow
@pytest.mark.parametrize("layout", DAMAGED_LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_bytes(kind, layout):
    """Other bytes of rows: right bytes, other bytes or a fault, as numpy has it."""
    found = 0
    for seed in range(4):
        _, table = planes_table(kind, layout, seed)
        rng = np.random.default_rng(seed)
        used = np.minimum(table.lengths.numpy().astype(np.int64), table.slot_bytes)
        in_slots = np.flatnonzero(np.arange(table.slot_bytes or 1) < used[:, None]) if table.slot_bytes else []
        for array, places in (
            (table.slots.numpy(), in_slots),
            (table.overflow.numpy(), np.arange(table.overflow.numel())),
        ):
            if len(places):
                at = rng.choice(places, 60)
                array[at] = (
                    rng.integers(0, 256, 60) if seed % 2 else array[at] ^ (1 << rng.integers(0, 8, 60)).astype(np.uint8)
                )
        found += check_against_numpy(table)
    assert found > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", DAMAGED_LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_index(kind, layout):
    found = 0
    for seed in range(4):
        _, table = planes_table(kind, layout, seed)
        rng = np.random.default_rng(seed)
        lengths, bases = table.lengths.numpy(), table.bases.numpy()
        at = rng.integers(0, 150, 12)
        lengths[at] = [rng.integers(0, 65536, 12), rng.integers(0, 193, 12), lengths[at] + 1, lengths[at] - 1][seed % 4]
        if len(bases) and seed % 2:
            bases[rng.integers(0, len(bases))] = (
                rng.integers(-(2**63), 2**63 - 1) if seed % 4 == 1 else rng.integers(0, len(table.overflow) + 40)
            )
        found += check_against_numpy(table)
    assert found > 0


@pytest.mark.parametrize("kind", KINDS)
def test_other_entries(kind):
    """Entries of another codebook give other bytes; entries that are no symbols are refused before anything is read."""
    x, table = planes_table(kind, {"layout": "packed"})
    state = table.__getstate__()
    for seed in range(5):
        fields = state["codebook"].__getstate__()
        fields["entries"] = torch.randint(
            0, 256, fields["entries"].shape, generator=torch.Generator().manual_seed(seed)
        )
        codebook = ibp.codecs.PlanesCodebook.__new__(ibp.codecs.PlanesCodebook)
        codebook.__setstate__(fields)
        other = ibp.CompressedTensor.__new__(ibp.CompressedTensor)
        other.__setstate__({**state, "codebook": codebook})
        assert check_against_numpy(other) == 0
        assert bytes_of(other.decompress()).ne(bytes_of(x)).any()
        for change in (
            torch.full_like(fields["entries"], 256),
            torch.full_like(fields["entries"], -1),
            fields["entries"][:, :-1],
            fields["entries"].int(),
        ):
            with pytest.raises(ValueError, match="entries"):
                ibp.codecs.PlanesCodebook.__new__(ibp.codecs.PlanesCodebook).__setstate__({**fields, "entries": change})


@pytest.mark.slow
def test_a_table_of_other_rows():
    """A codebook of other settings: refused, or read without harm."""
    x, table = planes_table("dense", {"layout": "packed"})
    state = table.__getstate__()
    rng = np.random.default_rng(0)
    for number in range(60):
        element_bytes = [1, 2, 4, 8][number % 4]
        row_bytes = 192 if number % 10 else 96
        codebook = random_codebook(
            rng,
            element_bytes,
            row_bytes // element_bytes,
            number % 2,
            int(rng.integers(0, 8 * element_bytes + 1)),
            tuple(rng.integers(1, 5, number % 5).tolist()),
            KINDS[number % 3],
        )
        other = ibp.CompressedTensor.__new__(ibp.CompressedTensor)
        if row_bytes != 192:
            with pytest.raises(ValueError, match="wanted one of scheme 'planes' for rows of 192 bytes"):
                other.__setstate__({**state, "codebook": planes_codebook(codebook)})
            continue
        other.__setstate__({**state, "codebook": planes_codebook(codebook)})
        check_against_numpy(other)


# ---- the operations beneath ----------------------------------------------------------------------------------------


def test_ops_check_codecs_of_planes():
    """codec: [2, row_bytes, element_bytes, rotate, residual_bits, per_column, listed, default, closed, what is
    left out, in six numbers, digits ...]."""
    for kind in KINDS:
        x, table = planes_table(kind, {"layout": "packed"})
        arguments = values_of(table, CPU)
        words, codec = arguments[4:6]
        assert codec[:7] == [2, 192, 4, 1, 24, int(kind == "per_column"), int(kind == "listed")]
        assert codec[9:] == [0, 0, 0, 0, 0, 0, 1, 2, 2]
        data, ids, out, fault = (
            bytes_of(x),
            torch.tensor([7]),
            torch.zeros(192, dtype=torch.uint8),
            torch.zeros(4, dtype=torch.int64),
        )

        def refuses(words, codec):
            with pytest.raises(RuntimeError, match="ibp"):
                OPS.measure_rows(data, words, codec)
            with pytest.raises(RuntimeError, match="ibp"):
                OPS.encode_rows(*arguments[:4], words, codec, *arguments[6:], data, fault)
            with pytest.raises(RuntimeError, match="ibp"):
                OPS.gather_items(*arguments[:4], words, codec, *arguments[6:], ids, 0, out, fault)
            with pytest.raises(RuntimeError, match="ibp"):
                OPS.decode_bytes(*arguments[:4], words, codec, *arguments[6:], 0, 192, 0, out, fault)

        wrong = {
            1: [0, -4, 65540, 2**33],
            2: [0, 3, 5, 9, 16, -4, 2**32 + 4],
            3: [2, -1, 2**32],
            4: [-1, 33, 64, 2**32 + 24],
            7: [2**32, -1, 2**62],
            8: [2**32, -1, -(2**63)],
            9: [9, 32, 64, -1, 2**32],
            10: [1, -1],
            14: [48, 49, -1, 2**32],
            15: [0, 5, -1, 2**32 + 1],
            17: [0, 5],
        }
        for place, values in wrong.items():
            for value in values:
                refuses(words, [*codec[:place], value, *codec[place + 1 :]])
        refuses(words, [2, 191, *codec[2:]])
        for short in ([], [2], codec[:2], codec[:14], [*codec, 1, 1]):
            refuses(words, short)
        refuses(words, [*codec[:5], 1, 1, *codec[7:]])
        refuses(words, [*codec[:5], -1, 5, *codec[7:]])
        refuses(words, [3, *codec[1:]])
        for bad in (
            words[:-1],
            words[:0],
            words.to(torch.int32),
            words.view(torch.int8),
            torch.stack([words] * 2, 1)[:, 0],
        ):
            refuses(bad, codec)
        OPS.gather_items(*arguments, ids, 0, out, fault)
        assert fault[0] == 0
        assert_same_bits(out, bytes_of(x[7]))


def test_counting_hits_is_of_masks():
    x, table = planes_table("dense", {})
    with pytest.raises(RuntimeError, match="ibp"):
        OPS.count_hits(bytes_of(x), table.codebook.words(CPU), table.codebook.codec)
