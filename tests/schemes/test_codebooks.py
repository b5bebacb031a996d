"""What holds of codebooks of every scheme: they are frozen once checked, own their tensors, and load wherever their
file is."""

import copy
import io
import pickle
import subprocess
import sys
import types

import pytest
import torch

import ibp
from ibp._rows.learning import SCHEMES

CPU = torch.device("cpu")


def masks(row_bytes=64, invert=False):
    mask = torch.zeros(row_bytes, dtype=torch.uint8)
    mask[::4] = 255
    return ibp.codecs.Codebook.from_masks(
        mask.flip(0) if invert else mask, torch.zeros(row_bytes, dtype=torch.uint8), 4
    )


def many_masks():
    """More than 256 pairs: the index is of 16 bits."""
    mask = torch.arange(1200).mul(7).to(torch.uint8)
    return ibp.codecs.Codebook.from_masks(mask, mask & 0x55, 2)


def planes(*entries, row_bytes=64):
    return ibp.codecs.PlanesCodebook(
        row_bytes, 2, 1, 8, (1, 1), False, False, 0, 0, torch.tensor([entries or (126, 127)])
    )


KINDS = {
    "masks": masks,
    "masks, wide index": many_masks,
    "planes": planes,
    "clusters of masks": lambda: ibp.codecs.ClusteredCodebook([masks(), masks(invert=True)]),
    "clusters of planes": lambda: ibp.codecs.ClusteredCodebook([planes(1, 2), planes(3, 4)]),
}


@pytest.fixture(params=KINDS)
def codebook(request):
    return KINDS[request.param]()


def unpickled(codebook, state):
    """A codebook of the same class with a state, made as unpickling makes it."""
    made = type(codebook).__new__(type(codebook))
    made.__setstate__(state)
    return made


# ---- frozen --------------------------------------------------------------------------------------------------------


def test_attributes_cannot_be_set(codebook):
    before = copy.deepcopy(codebook)
    for name in (*codebook._fields, "words", "scheme", "_words", "colour"):
        with pytest.raises(AttributeError):
            setattr(codebook, name, 0)
        with pytest.raises(AttributeError):
            delattr(codebook, name)
    assert codebook == before


def test_a_finished_codebook_is_not_built_again(codebook):
    state = codebook.__getstate__()
    for again in (state, {}, None):
        with pytest.raises(ValueError, match="finished"):
            codebook.__setstate__(again)


@pytest.mark.parametrize("state", [None, [], "text", (1, 2), 5], ids=repr)
def test_states_that_are_no_dicts(codebook, state):
    with pytest.raises(
        ValueError, match=f"the state of a {type(codebook).__name__} is a {type(state).__name__}; wanted a dict"
    ):
        unpickled(codebook, state)


def test_states_that_lack_fields_or_have_others(codebook):
    state = codebook.__getstate__()
    assert unpickled(codebook, state) == codebook
    for name in state:
        with pytest.raises(ValueError, match=name):
            unpickled(codebook, {key: value for key, value in state.items() if key != name})
    for wrong in ({}, {**state, "colour": "red"}, {**state, 5: 6}):
        with pytest.raises(ValueError, match="has the fields"):
            unpickled(codebook, wrong)


@pytest.mark.parametrize(
    "value", ["much", torch.zeros(3), torch.tensor(0.5), float("nan"), float("inf"), [0.5], b"1"], ids=repr
)
def test_savings_that_are_no_numbers(codebook, value):
    with pytest.raises(ValueError, match="expected_savings"):
        unpickled(codebook, {**codebook.__getstate__(), "expected_savings": value})


@pytest.mark.parametrize(
    "name, values",
    [
        ("row_bytes", [0, -4, 65537, 64.0, "64", None, torch.zeros(2)]),
        ("chunk_bytes", [0, 3, 16, 4.0, None]),
        ("flag_all", [2, -1, None, "no"]),
        ("tau", ["high", torch.tensor(0.8), float("nan")]),
        (
            "palette",
            [
                None,
                [[1]],
                torch.zeros(1, 2, 4),
                torch.zeros(0, 2, 4, dtype=torch.uint8),
                torch.zeros(2, 4, dtype=torch.uint8),
                torch.zeros(1, 2, 4, dtype=torch.uint8, device="meta"),
                torch.zeros(1, 2, 4, dtype=torch.uint8).to_sparse(),
                torch.zeros(1, dtype=torch.uint8).expand(1 << 40, 2, 4),
                torch.full((1, 2, 4), 255, dtype=torch.uint8) * torch.tensor([[0], [1]], dtype=torch.uint8),
            ],
        ),
        (
            "index",
            [
                None,
                torch.zeros(16, dtype=torch.uint8),
                torch.zeros(16),
                torch.zeros(1, dtype=torch.uint8).expand(1 << 40),
            ],
        ),
    ],
)
def test_wrong_fields_of_masks(name, values):
    state = masks().__getstate__()
    for value in values:
        with pytest.raises(ValueError):
            unpickled(masks(), {**state, name: value})


# ---- tensors of its own --------------------------------------------------------------------------------------------


def test_tensors_are_copies(codebook):
    """Whoever keeps a tensor that a codebook was made from, as a pickle can, does not change the codebook with it."""
    state = copy.deepcopy(codebook.__getstate__())
    made, words = unpickled(codebook, state), codebook.words(CPU).clone()
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(1)
    assert made == codebook and torch.equal(made.words(CPU), words)


def test_words_are_made_with_the_codebook(codebook):
    assert torch.equal(codebook.words("cpu"), unpickled(codebook, codebook.__getstate__())._words[CPU])
    assert codebook.words("cpu") is codebook.words(CPU)


def test_savings_of_another_object(codebook):
    other = codebook.with_savings(0.25)
    assert other == codebook and hash(other) == hash(codebook) and type(other) is type(codebook)
    assert codebook.expected_savings is None and other.expected_savings == 0.25 and other.is_finished
    with pytest.raises(ValueError, match="expected_savings"):
        codebook.with_savings("much")


def test_codebooks_of_other_kinds_are_not_equal():
    made = [make() for make in KINDS.values()]
    assert all((a == b) == (i == j) for i, a in enumerate(made) for j, b in enumerate(made))
    assert made[0] != "a codebook" and len(set(made)) == len(made)


# ---- files ---------------------------------------------------------------------------------------------------------


class Builds:
    """Pickles as (a codebook, the same codebook after a second BUILD with another state)."""

    def __init__(self, first, member, state):
        self.first, self.member, self.state = first, member, state


class BuildingPickler(pickle._Pickler):
    """Writes Builds by hand: every opcode is one that torch.load(weights_only=True) accepts."""

    def save(self, obj, save_persistent_id=True):
        if not isinstance(obj, Builds):
            return super().save(obj, save_persistent_id)
        super().save(obj.first)
        self.write(self.get(self.memo[id(obj.member)][0]))
        super().save(obj.state)
        self.write(pickle.BUILD + pickle.TUPLE2)


def test_a_file_cannot_rebuild_a_member():
    """A member of clusters that grows after they were checked would be read past its end."""
    clusters = ibp.codecs.ClusteredCodebook([masks(), masks(invert=True)])
    file, module = io.BytesIO(), types.ModuleType("pickle")
    module.Pickler, module.dumps = BuildingPickler, pickle.dumps
    torch.save(Builds(clusters, clusters.codebooks[1], masks(row_bytes=272).__getstate__()), file, pickle_module=module)
    for weights_only in (True, False):
        file.seek(0)
        with pytest.raises(Exception, match="finished Codebook"):
            torch.load(file, weights_only=weights_only)


def test_unfinished_members_are_refused():
    for kind in (ibp.codecs.Codebook, ibp.codecs.PlanesCodebook):
        with pytest.raises(ValueError, match="finished"):
            ibp.codecs.ClusteredCodebook([kind.__new__(kind)] * 2)


@pytest.mark.parametrize("kind", [ibp.codecs.Codebook, ibp.codecs.PlanesCodebook, ibp.codecs.ClusteredCodebook])
def test_tables_refuse_unfinished_codebooks(kind):
    state = ibp.compress(torch.zeros(50, 16), scheme="ibp", layout="packed", device="cpu", memory="host").__getstate__()
    made = ibp.CompressedTensor.__new__(ibp.CompressedTensor)
    with pytest.raises(ValueError, match="codebook is .*wanted one of scheme"):
        made.__setstate__({**state, "codebook": kind.__new__(kind)})


def test_names_do_not_depend_on_files(codebook):
    """Saved by one process, loaded by another that has imported nothing but ibp."""
    assert type(codebook).__module__ == "ibp.codecs" and getattr(ibp.codecs, type(codebook).__name__) is type(codebook)
    assert b"_schemes" not in pickle.dumps(codebook)


@pytest.mark.slow
def test_a_fresh_process_loads_them(tmp_path):
    made = [make().with_savings(0.5) for make in KINDS.values()]
    torch.save(made, tmp_path / "codebooks.pt")
    program = (
        "import sys, ibp, torch\nfor codebook in torch.load(sys.argv[1], weights_only=True): print(repr(codebook))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "codebooks.pt"], check=True, capture_output=True, text=True
    ).stdout
    assert printed.splitlines() == [repr(codebook) for codebook in made]


# ---- the table of schemes ------------------------------------------------------------------------------------------


def test_the_table_of_schemes():
    assert list(SCHEMES) == ["raw", "ibp", "planes"]
    for number, made in ((1, masks()), (2, planes())):
        assert type(made).number == number and made.codec[:2] == [number, made.row_bytes]
        assert SCHEMES[made.scheme].relearn is not None


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(50, 32).bfloat16(), lambda: torch.arange(1600).view(50, 32).to(torch.int16)]
)
def test_relearning_keeps_the_form(make):
    x = make()
    rows = x.view(torch.uint8).reshape(-1)
    for name in ("ibp", "planes"):
        one = ibp.codecs.analyze(x, scheme=name, device="cpu")
        request = types.SimpleNamespace(tau=None)
        found = SCHEMES[name].relearn(one, rows, [20, 1, 29], request)
        assert [codebook.form for codebook in found] == [one.form] * 3
        alone = [
            SCHEMES[name].relearn(one, part, [len(part) // 64], request)[0]
            for part in rows.split([20 * 64, 64, 29 * 64])
        ]
        assert found == alone
