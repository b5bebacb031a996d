"""Names of ibp 0.2: those that moved say where to, and pickles that hold them load."""

import io
import pickle
import pickletools
import warnings

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp._common import moved

PUBLIC_0_2 = """ActivationOffload ActivationStats AnyCodebook Buffers CacheStats Calibration CheckpointDelta
CheckpointEstimate CheckpointReport ChecksumError Choice ClusteredCodebook Codebook CoderRates CodingCost
CompressedTensor CorruptTableError Delta DeltaMismatchError Estimate File FileFormatError H200 KVRows KVRowsStats
KVStore KVStoreStats OffloadStats Offloaded PagedTensors Place PlaceCounts PlanesCodebook Prefetch Profile RowCache
SharedHandle SourceFormatError TensorEstimate TensorInfo TensorProfile TensorReport Transfer WholeTensor analyze
calibrate choose compress compress_ compress_checkpoint count_accesses cuda_is_available decompress
decompress_checkpoint decompress_many delta distributed embedding_bag encode_into estimate estimate_checkpoint
fingerprint get_include get_library_dir index_select index_select_many linear load nn offload offload_activations open
open_shared optim place profile release_pinned save show_config""".split()


@pytest.mark.parametrize("name", PUBLIC_0_2)
def test_every_name_is_there_or_says_where(name):
    if name in ibp.__all__:
        assert getattr(ibp, name) is not None
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = getattr(ibp, name)
        except AttributeError as error:
            said = str(error)
        else:
            said = str(caught[0].message)
            assert caught[0].category is DeprecationWarning and found.__name__ == name
    assert said.startswith(f"ibp.{name}") and " is ibp." in said and said.endswith(" now")
    where = said.rpartition(" is ")[2].removesuffix(" now").partition("(")[0]
    target = ibp
    for part in where.split(".")[1:]:
        target = getattr(target, part)  # the place that the text names


def test_unknown_names():
    with pytest.raises(AttributeError, match="^module 'ibp' has no attribute 'compres'"):
        ibp.compres  # noqa: B018
    assert set(moved._PICKLED) <= set(PUBLIC_0_2) - set(ibp.__all__)


def as_pickled_by_0_2(value):
    """The pickle with the names of classes that ibp 0.2 wrote: all at the root."""
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
    with pytest.warns(DeprecationWarning, match=r"is ibp\.codecs\."):
        held = pickle.loads(data)
    assert_same_bits(held.decompress(), rows)
    assert type(held.codebook) is type(table.codebook)


def test_pickled_deltas_of_0_2():
    old = torch.zeros(1000)
    change = ibp.deltas.make(old + 1, old, device="cpu")
    with pytest.warns(DeprecationWarning, match="is ibp.deltas.Delta now"):
        held = pickle.loads(as_pickled_by_0_2(change))
    assert_same_bits(held.apply(old), old + 1)
