"""Tables and codebooks through pickle and torch.save; truncated, foreign and damaged ones."""

import copy
import io
import pickle

import pytest
import torch

import ibp
from helpers import (
    SCHEMES,
    TENSORS,
    assert_same_bits,
    assert_same_table,
    make_tensor,
    one_hot_rows,
    pairwise,
    spiky_rows,
)

TABLES = {
    "slots": lambda: (spiky_rows(200, 60), {}),
    "small slots": lambda: (spiky_rows(200, 60), {"slot_bytes": 32}),
    "in place": lambda: (spiky_rows(200, 60), {"slot_bytes": 240}),
    "packed": lambda: (spiky_rows(200, 60), {"layout": "packed"}),
    "raw": lambda: (make_tensor((50, 64), torch.uint8, "random"), {}),
    "bfloat16": lambda: (make_tensor((70, 33), torch.bfloat16, "narrow"), {}),
    "float8": lambda: (make_tensor((70, 33), torch.float8_e4m3fn, "sparse"), {"layout": "packed"}),
    "one dimension": lambda: (make_tensor((9000,), torch.int64, "sparse"), {}),
    "no dimension": lambda: (torch.tensor(1.5), {}),
    "empty": lambda: (torch.zeros(0, 5), {}),
}


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_torch(weights_only):
    def save_and_load(value):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=weights_only)

    return save_and_load


WAYS = {
    "pickle": through_pickle,
    "torch": through_torch(False),
    "torch, weights only": through_torch(True),
    "deepcopy": copy.deepcopy,
}


def check_equal(loaded, table, x):
    for name in ("shape", "dtype", "device", "num_rows", "index_bytes", "savings"):
        assert getattr(loaded, name) == getattr(table, name), name
    assert_same_table(loaded, table)
    assert_same_bits(loaded.decompress(), x)


@pytest.mark.parametrize("name, scheme, way", pairwise(list(TABLES), SCHEMES, list(WAYS)))
def test_table(name, scheme, way):
    x, arguments = TABLES[name]()
    table = ibp.compress(x, scheme=scheme, device="cpu", memory="host", **arguments)
    check_equal(WAYS[way](table), table, x)


@pytest.mark.parametrize("way", WAYS)
def test_codebook(way):
    for arguments in ({}, {"tau": 0.8, "chunk_bytes": 2}, {"paper": True}):
        codebook = ibp.codecs.analyze(one_hot_rows(200, 60), **arguments)
        loaded = WAYS[way](codebook)
        assert loaded == codebook and (loaded.tau, loaded.expected_savings) == (codebook.tau, codebook.expected_savings)
        assert_same_bits(loaded.palette, codebook.palette)
        assert_same_bits(loaded.index, codebook.index)


@pytest.mark.parametrize("way", WAYS)
def test_codebook_with_a_wide_index(way):
    mask = make_tensor((2000,), torch.uint8, "random")
    codebook = ibp.codecs.Codebook.from_masks(mask, mask & 0x55, 4)
    assert codebook.index.dtype == torch.uint16
    assert WAYS[way](codebook) == codebook


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_inside_containers(scheme, way):
    x = spiky_rows(200, 60)
    table = ibp.compress(x, scheme=scheme, device="cpu", memory="host")
    loaded = WAYS[way]({"features": table, "more": [table, torch.arange(3)]})
    check_equal(loaded["features"], table, x)
    check_equal(loaded["more"][0], table, x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_table_compressed_in_place(scheme):
    x = spiky_rows(200, 60)
    table = ibp.compress(x.clone(), scheme=scheme, device="cpu", memory="host", inplace=True)
    check_equal(through_pickle(table), table, x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file(tmp_path, scheme):
    x = spiky_rows(200, 60)
    table = ibp.compress(x, scheme=scheme, layout="packed", device="cpu", memory="host")
    torch.save(table, tmp_path / "table.pt")
    assert (tmp_path / "table.pt").stat().st_size < x.nbytes / 2
    check_equal(torch.load(tmp_path / "table.pt"), table, x)


# ---- what must not be accepted ----


class State:
    """Pickles as a table (or codebook) with any state."""

    def __init__(self, kind, state):
        self.kind, self.state = kind, state

    def __reduce__(self):
        return copy_new, (self.kind,), self.state


def copy_new(kind):
    return kind.__new__(kind)


def load_state(kind, state):
    value = kind.__new__(kind)
    value.__setstate__(state)
    return value


@pytest.fixture(params=["ibp", "planes"])
def state(request):
    state = ibp.compress(
        spiky_rows(200, 60), scheme=request.param, slot_bytes=32, device="cpu", memory="host"
    ).__getstate__()
    assert all(state[name].numel() for name in TENSORS)
    return state


def test_the_state_itself_is_good(state):
    assert_same_bits(load_state(ibp.CompressedTensor, state).decompress(), spiky_rows(200, 60))


@pytest.mark.parametrize("version", [0, 2, -1, 10**6, None, "1"])
def test_another_format_version(state, version):
    state["format_version"] = version
    with pytest.raises(ValueError, match=f"version {version}"):
        load_state(ibp.CompressedTensor, state)
    with pytest.raises(ValueError, match=f"version {version}"):
        pickle.loads(pickle.dumps(State(ibp.CompressedTensor, state)))


def test_what_to_do_with_other_versions(state):
    with pytest.raises(ValueError, match="release before 0.2: decompress it with that release"):
        load_state(ibp.CompressedTensor, {**state, "format_version": 0})
    newer = {**state, "format_version": 2, "release": "9.1.0"}
    with pytest.raises(
        ValueError, match=f"ibp {ibp.__version__} reads versions up to 1: ibp 9.1.0 wrote it and reads it"
    ):
        load_state(ibp.CompressedTensor, newer)
    del newer["release"]
    with pytest.raises(ValueError, match="a later ibp wrote it"):
        load_state(ibp.CompressedTensor, newer)


def test_no_format_version(state):
    del state["format_version"]
    with pytest.raises(ValueError, match="version None"):
        load_state(ibp.CompressedTensor, state)


def test_missing_and_unknown_fields(state):
    for name in state.keys() - {"format_version", "release"}:
        with pytest.raises(ValueError, match=name):
            load_state(ibp.CompressedTensor, {key: value for key, value in state.items() if key != name})
    with pytest.raises(ValueError, match="colour"):
        load_state(ibp.CompressedTensor, {**state, "colour": "red"})


@pytest.mark.parametrize("name", ["slots", "lengths", "bases"])
@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t[:-1],
        lambda t: t[: len(t) // 2],
        lambda t: t.view(1, -1),
        lambda t: t.to(torch.float32),
        lambda t: torch.cat([t, t]),
        lambda t: None,
    ],
    ids=["one short", "half", "2-D", "float", "double", "None"],
)
def test_truncated_and_misshapen_tensors(state, name, keep):
    state[name] = keep(state[name])
    with pytest.raises(ValueError, match=f"{name}.*wanted"):
        load_state(ibp.CompressedTensor, state)


@pytest.mark.parametrize("name", TENSORS)
def test_strided_tensors(state, name):
    """Equal values in memory that is not contiguous: refused, or read right."""
    state[name] = torch.stack([state[name].view(torch.int16 if name == "lengths" else state[name].dtype)] * 2, 1)[:, 0]
    assert not state[name].is_contiguous()
    try:
        table = load_state(ibp.CompressedTensor, state)
    except ValueError as error:
        assert name in str(error)
    else:
        assert_same_bits(table.decompress(), spiky_rows(200, 60))


def test_an_empty_index_is_truncated(state):
    state["lengths"] = state["lengths"][:0]
    with pytest.raises(ValueError, match="lengths"):
        load_state(ibp.CompressedTensor, state)


def test_truncated_overflow_is_found_when_it_is_read(state):
    """Its size cannot be known without reading the index; the rows that need it are reported as corrupt."""
    state["overflow"] = state["overflow"][:-32]
    table = load_state(ibp.CompressedTensor, state)
    with pytest.raises(ibp.CorruptTableError):
        table.decompress()
    state["bases"] = state["bases"][:0]
    with pytest.raises(ibp.CorruptTableError):
        load_state(ibp.CompressedTensor, state).decompress()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scheme": "zip"}, "scheme.*zip"),
        ({"row_bytes": 0}, "0.*65536"),
        ({"row_bytes": 1 << 20}, "1048576"),
        ({"row_bytes": -240}, "-240"),
        ({"row_bytes": 120}, "wanted"),
        ({"slot_bytes": 33}, "slot_bytes.*33"),
        ({"slot_bytes": -32}, "slot_bytes.*-32"),
        ({"slot_bytes": 480}, "slot_bytes.*480"),
        ({"slot_bytes": 64}, "slots.*wanted"),
        ({"slot_bytes": 0}, "slots.*wanted"),
        ({"shape": (400, 60)}, "wanted"),
        ({"shape": (1 << 62, 60)}, "wanted"),
        ({"dtype": torch.float64}, "wanted"),
        ({"codebook": None}, "codebook.*None"),
        (
            {
                "codebook": ibp.codecs.Codebook.from_masks(
                    torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), 4
                )
            },
            "codebook.*240",
        ),
        (
            {
                "codebook": ibp.codecs.PlanesCodebook(
                    8, 4, 1, 24, (), False, False, 0, 0, torch.zeros(1, 0, dtype=torch.int64)
                )
            },
            "codebook.*240",
        ),
        ({"codebook": "codebook"}, "codebook"),
        ({"scheme": "raw"}, "wanted"),
        ({"scheme": "auto"}, "scheme.*auto"),
    ],
    ids=str,
)
def test_impossible_states(state, change, message):
    with pytest.raises(ValueError, match=message):
        load_state(ibp.CompressedTensor, {**state, **change})


def test_a_codebook_of_another_scheme(state):
    other = {"ibp": "planes", "planes": "ibp"}[state["scheme"]]
    codebook = ibp.codecs.analyze(spiky_rows(200, 60), scheme=other)
    for change in ({"scheme": other}, {"codebook": codebook}):
        with pytest.raises(ValueError, match="codebook.*wanted one of scheme"):
            load_state(ibp.CompressedTensor, {**state, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"shape": "abc"},
        {"shape": (-200, -60)},
        {"dtype": "float32"},
        {"row_bytes": "240"},
        {"slot_bytes": None},
        {"row_bytes": 240.0},
        {"dtype": torch.complex128},
    ],
    ids=str,
)
def test_states_of_the_wrong_types(state, change):
    with pytest.raises((ValueError, TypeError)):
        load_state(ibp.CompressedTensor, {**state, **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"palette": torch.zeros(1, 2, 3, dtype=torch.uint8)}, "palette"),
        ({"chunk_bytes": 3}, "chunk_bytes"),
        ({"row_bytes": 0}, "row_bytes"),
        ({"row_bytes": 241}, "index|past the end"),
        ({"index": torch.zeros(5, dtype=torch.uint8)}, "index"),
        ({"palette": None}, "palette"),
    ],
    ids=str,
)
def test_impossible_codebooks(change, message):
    state = ibp.codecs.analyze(one_hot_rows(200, 60), chunk_bytes=4).__getstate__()
    assert load_state(ibp.codecs.Codebook, dict(state)).row_bytes == 240
    with pytest.raises(ValueError, match=message):
        load_state(ibp.codecs.Codebook, {**state, **change})


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_do_no_harm(state, seed):
    """Any change of slots, overflow, lengths or bases: right bytes, other bytes or CorruptTableError, never a crash."""
    generator = torch.Generator().manual_seed(seed)
    for name in TENSORS:
        tensor = state[name].clone()
        places = torch.randint(len(tensor), (5,), generator=generator)
        tensor[places] = torch.randint(
            -(2**63) if name == "bases" else 0, 2**62 if name == "bases" else 255, (5,), generator=generator
        ).to(tensor.dtype)
        state[name] = tensor
    table = load_state(ibp.CompressedTensor, state)
    try:
        assert table.decompress().shape == (200, 60)
    except ibp.CorruptTableError as error:
        row = int(str(error).split("row ")[-1].split()[0])
        assert 0 <= row < 200
    assert table.link_bytes >= 0 and table.stored_bytes > 0 and repr(table)
