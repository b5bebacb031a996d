"""Pickles of ibp 0.2 name classes at the root, and load. The root lacks every other name that moved since then."""

import io
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ibp
from helpers import assert_same_bits

ROOT = Path(__file__).resolve().parents[2]
MODULE_OF = {
    "CheckpointDelta": "deltas",
    "Choice": "codecs",
    "ClusteredCodebook": "codecs",
    "Codebook": "codecs",
    "CodingCost": "codecs",
    "Delta": "deltas",
    "PlanesCodebook": "codecs",
    "Profile": "spill",
    "TensorProfile": "spill",
    "WholeTensor": "codecs",
}


@pytest.mark.parametrize("name", MODULE_OF)
def test_pickles_find_classes_at_the_root(name):
    assert pickle.loads(f"cibp\n{name}\n.".encode()) is getattr(getattr(ibp, MODULE_OF[name]), name)
    assert name not in dir(ibp)


@pytest.mark.parametrize("name", ["KVStore", "compress_", "delta", "index_select_many", "place", "compres"])
def test_names_that_the_root_lacks(name):
    with pytest.raises(AttributeError, match=f"^module 'ibp' has no attribute '{name}'$"):
        getattr(ibp, name)


@pytest.mark.slow
def test_python_says_what_was_meant():
    command = [sys.executable, "-c", "import ibp; ibp.compres"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("module 'ibp' has no attribute 'compres'. Did you mean: 'compress'?\n")


def as_pickled_by_0_2(value):
    """Returns the pickle with the names of classes that ibp 0.2 wrote: all at the root."""
    data = pickle.dumps(value, protocol=2)
    for module in ("codecs", "deltas", "spill"):
        data = data.replace(f"cibp.{module}\n".encode(), b"cibp\n")
    names = [argument for _, argument, _ in pickletools.genops(io.BytesIO(data)) if isinstance(argument, str)]
    assert not any(name.startswith(("ibp.codecs", "ibp.deltas", "ibp.spill")) for name in names)
    return data


@pytest.mark.parametrize(
    "options", [{"scheme": "ibp"}, {"scheme": "planes"}, {"scheme": "ibp", "clusters": 2}], ids=str
)
def test_pickled_tables_of_0_2(options):
    rows = torch.randint(0, 3, (400, 64)).float()
    table = ibp.compress(rows, device="cpu", memory="host", **options)
    data = as_pickled_by_0_2(table)
    assert b"cibp\n" in data and b"Codebook\n" in data
    held = pickle.loads(data)
    assert_same_bits(held.decompress(), rows)
    assert type(held.codebook) is type(table.codebook)


def test_pickled_deltas_of_0_2():
    old = torch.zeros(1000)
    change = ibp.deltas.make(old + 1, old, device="cpu")
    assert_same_bits(pickle.loads(as_pickled_by_0_2(change)).apply(old), old + 1)
