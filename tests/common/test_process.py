"""Pickling and copying of what belongs to one process: a sentence says what to do instead, and that works."""

import copy
import pickle

import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding

X = embedding(256, 64).bfloat16()
PAGES = X.view(8, 32, 64)


def activations():
    return ibp.offload_activations(device="cpu")


def blocks():
    layers = [PAGES.view(8, -1).clone().view(torch.int8)]
    return ibp.kv.BlockStore([layers], num_pages=8, pool_bytes=1 << 18, dtype=torch.bfloat16)


def keyed_pages():
    kept = ibp.kv.KeyedPages(1 << 18, device="cpu")
    assert kept.put("a", PAGES[3])
    return kept


def offloaded():
    return ibp.offload(torch.nn.Sequential(torch.nn.Linear(64, 64)).eval(), device="cpu", min_bytes=1)


def place():
    rows = ibp.CodedRows(ibp.codecs.analyze(X, device="cpu"), 256, device="cpu")
    ibp.encode_into(X, rows)
    return rows


def row_cache():
    return ibp.RowCache(table(), 1 << 12, torch.rand(256), devices="cpu")


def rows_of_heads():
    rows = ibp.kv.KVRows(X.view(256, 1, 64), num_layers=1, num_tokens=256, device="cpu")
    rows.store(0, X.view(256, 1, 64), torch.arange(256))
    return rows


def store():
    made = ibp.kv.KVStore(PAGES, page_bytes=PAGES[0].nbytes, num_pages=8, device="cpu")
    made.store(range(8), PAGES, blocks=range(8)).wait()
    return made


def table():
    return ibp.compress(X, memory="host")


def transfer():
    return store().load([1], PAGES.clone(), blocks=[2])


def prefetch():
    return table().prefetch([1, 2])


INSTEAD = {
    activations: r"call ibp\.offload_activations\(\) where another one is needed",
    blocks: r"load\(\) its blocks into tensors, which can be pickled",
    keyed_pages: r"get\(\) its pages into tensors, which can be pickled",
    offloaded: r"save the model's state_dict\(\)",
    prefetch: r"wait\(\) gives its tensor, which can be pickled",
    row_cache: r"Send the table, which is shared, and make a cache of it there",
    rows_of_heads: r"load\(\) its rows into tensors, which can be pickled",
    store: r"load\(\) its pages into tensors, which can be pickled",
    transfer: r"wait\(\) for it in the process that began it",
}


@pytest.mark.parametrize("make", INSTEAD, ids=lambda make: make.__name__)
@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_what_cannot_be_pickled_or_copied(make, copied):
    made = make()
    with pytest.raises(TypeError, match=rf"^an ibp\.[\w.]+ cannot be pickled or copied: .*{INSTEAD[make]}$"):
        copied(made)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy], ids=["pickle", "copy"])
def test_coded_rows_cannot_be_pickled_but_their_tables_can(copied):
    made = place()
    with pytest.raises(TypeError, match=r"an ibp\.CodedRows cannot be pickled: .* its table\(shape, dtype\) can be"):
        copied(made)
    kept = pickle.loads(pickle.dumps(made.table(X.shape, X.dtype)))
    other = copy.deepcopy(made)
    ibp.encode_into(torch.zeros_like(X), made)
    assert_same_bits(kept.decompress(), X)
    assert_same_bits(other.decode(torch.arange(256), X.dtype), X)


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_copies_have_the_addresses_of_their_own_tensors(copied):
    """A copy that had the first one's would write to memory that may be another's by now."""
    tensors, kept = [torch.zeros_like(PAGES) for _ in range(2)], store()
    paged = copied(ibp.kv.PagedTensors(tensors[0]))
    kept.load([5], paged, blocks=[2]).wait()
    assert_same_bits(paged.tensors[0][2], PAGES[5])
    assert not tensors[0].any()
    buffers, rows = copied(ibp.Buffers([X[:128].clone(), X[128:].clone()])), place()
    buffers.tensors[0].zero_()
    ibp.encode_into(buffers, rows)
    assert_same_bits(rows.decode(torch.arange(256), X.dtype), torch.cat([torch.zeros_like(X[:128]), X[128:]]))
