"""ibp.nn.Embedding, EmbeddingBag and EmbeddingCollection: what torch's modules compute, of weights that are given,
drawn, saved and loaded."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits, embedding, pairwise
from ibp.nn import _embedding
from interrupts import interrupt_at

ON_CPU = {"device": "cpu", "memory": "host"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bags_of(num_rows, seed=0):
    """(ids, offsets) with an empty bag and repeated ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_rows, (20,), generator=generator), torch.tensor([0, 4, 4, 13])


# ---- one table ----


@pytest.mark.parametrize(
    "mode, dtype, padding_idx, id_dtype, trainable",
    pairwise(["sum", "mean", "max"], DTYPES, [None, 3, -2], [torch.int64, torch.int32], [False, True]),
)
def test_bags_have_torchs_bits(mode, dtype, padding_idx, id_dtype, trainable):
    weight = embedding(40, 24, dtype)
    ours = ibp.nn.EmbeddingBag.from_pretrained(weight, freeze=not trainable, mode=mode, padding_idx=padding_idx)
    torchs = torch.nn.EmbeddingBag.from_pretrained(weight, mode=mode, padding_idx=padding_idx)
    ids, offsets = (part.to(id_dtype) for part in bags_of(40))
    ids[5] = 3
    weights = torch.rand(20).to(dtype) if mode == "sum" else None
    assert_same_bits(ours(ids, offsets, weights), torchs(ids, offsets, weights))
    assert_same_bits(ours(ids.view(5, 4)), torchs(ids.view(5, 4)))
    assert_same_bits(ours(ids[:0], offsets[:0]), torchs(ids[:0], offsets[:0]))


def test_last_offsets():
    weight = embedding(40, 24)
    ids, offsets = bags_of(40)
    offsets = torch.cat((offsets, torch.tensor([20])))
    ours, torchs = (
        kind.from_pretrained(weight, mode="mean", include_last_offset=True)
        for kind in (ibp.nn.EmbeddingBag, torch.nn.EmbeddingBag)
    )
    assert_same_bits(ours(ids, offsets), torchs(ids, offsets))


@pytest.mark.parametrize("kind, mode", [("Embedding", None), ("EmbeddingBag", "sum")])
def test_new_weights_are_torchs(kind, mode):
    made = []
    for module in (ibp.nn, torch.nn):
        torch.manual_seed(7)
        options = {"mode": mode} if mode else {}
        made.append(getattr(module, kind)(50, 16, padding_idx=-1, dtype=torch.bfloat16, **options))
    ours, torchs = made
    assert_same_bits(ours.weight.decompress(), torchs.weight.detach())
    assert ours.padding_idx == torchs.padding_idx == 49 and ours.trainable and ours.stays
    (weight,) = ours.parameters()
    assert weight.shape == torchs.weight.shape and weight.requires_grad and weight.table is ours.weight
    back = ours.to_torch()
    assert_same_bits(back.weight.detach(), torchs.weight.detach())
    assert back.padding_idx == 49 and back.weight.requires_grad


@pytest.mark.parametrize("num_sources", [1, 3])
def test_weights_are_made_block_by_block(monkeypatch, num_sources):
    """Blocks of 256 rows: rows and random numbers are as if made at once."""
    monkeypatch.setattr(_embedding, "_BLOCK_BYTES", 256 * 128 * 2)
    torch.manual_seed(3)
    expected = torch.empty(700, 128, dtype=torch.bfloat16).normal_()
    torch.manual_seed(3)
    drawn, others = (700, 128), embedding(300, 128, torch.bfloat16)
    given = [ibp.compress(others, **ON_CPU), expected[:5]]
    table = _embedding.table_of([drawn, *given][:num_sources], torch.bfloat16, "cpu")
    wanted = [expected, others, expected[:5]][:num_sources]
    assert_same_bits(table.decompress(), torch.cat(wanted))
    assert table.scheme == "planes" and table.savings > 0.2


def test_from_torchs_modules():
    torchs = torch.nn.EmbeddingBag(30, 8, mode="max", padding_idx=2, include_last_offset=True)
    ours = ibp.nn.EmbeddingBag.from_pretrained(torchs, freeze=False)
    assert (ours.mode, ours.padding_idx, ours.include_last_offset, ours.trainable) == ("max", 2, True, True)
    assert_same_bits(ours.weight.decompress(), torchs.weight.detach())
    table = ibp.compress(embedding(30, 8), **ON_CPU)
    assert ibp.nn.Embedding.from_pretrained(table).weight is table
    assert "trainable=True" in repr(ours) and "mode='max'" in repr(ours) and "padding_idx=2" in repr(ours)
    with pytest.raises(TypeError, match="embeddings is a Linear; wanted a torch.nn.EmbeddingBag or its weights"):
        ibp.nn.EmbeddingBag.from_pretrained(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="max_norm or scale_grad_by_freq"):
        ibp.nn.Embedding.from_pretrained(torch.nn.Embedding(3, 3, max_norm=1.0))


def test_wrong_arguments():
    table = ibp.compress(embedding(30, 8), **ON_CPU)
    for error, message, make in (
        (
            ValueError,
            "mode is 'median'; wanted one of sum, mean, max",
            lambda: ibp.nn.EmbeddingBag(table, mode="median"),
        ),
        (ValueError, "padding_idx is 30; wanted -30 to 29", lambda: ibp.nn.Embedding(table, padding_idx=30)),
        (TypeError, "there are 5 embeddings; wanted embedding_dim", lambda: ibp.nn.EmbeddingBag(5)),
        (TypeError, "are for new weights; a table has its own", lambda: ibp.nn.Embedding(table, 8)),
        (ValueError, "-1 rows of 8 values", lambda: ibp.nn.Embedding(-1, 8)),
        (TypeError, "dtype is torch.int32; wanted a floating", lambda: ibp.nn.Embedding(4, 8, dtype=torch.int32)),
        (TypeError, "table is a Tensor; wanted an ibp", lambda: ibp.nn.EmbeddingBag(embedding(3, 4))),
        (
            TypeError,
            "dtype torch.int64; wanted floating-point rows to train",
            lambda: ibp.nn.Embedding(ibp.compress(torch.zeros(3, 4, dtype=torch.int64), **ON_CPU), trainable=True),
        ),
    ):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize("trainable", [False, True])
def test_wrong_ids(trainable):
    table = ibp.compress(embedding(30, 8), **ON_CPU)
    for kind in (ibp.nn.Embedding, ibp.nn.EmbeddingBag):
        module = kind(table, trainable=trainable)
        for wrong in (30, -1):
            with pytest.raises(IndexError, match=f"{wrong}; wanted 0 to 29"):
                module(torch.tensor([[3, wrong]]))
    bags = ibp.nn.EmbeddingBag(table, trainable=trainable)
    for offsets in (None, [1], [0, 3], [0, 2, 1], [[0]]):
        with pytest.raises(ValueError, match="offsets"):
            bags(torch.tensor([3, 4]), offsets if offsets is None else torch.tensor(offsets))
    with pytest.raises(NotImplementedError, match="mode"):
        bags(torch.tensor([[3]]), per_sample_weights=torch.ones(1, 1))


def test_plain_checkpoints():
    torchs = torch.nn.Sequential(torch.nn.Embedding(60, 16), torch.nn.Linear(16, 2))
    ours = torch.nn.Sequential(ibp.nn.Embedding(60, 16), torch.nn.Linear(16, 2))
    assert str(ours.load_state_dict(torchs.state_dict())) == "<All keys matched successfully>"
    assert_same_bits(ours[0].weight.decompress(), torchs[0].weight.detach())
    dense = ours.state_dict()
    assert list(dense) == list(torchs.state_dict())
    other = torch.nn.Sequential(torch.nn.Embedding(60, 16), torch.nn.Linear(16, 2))
    other.load_state_dict(dense)
    assert_same_bits(other(torch.arange(60)), torchs(torch.arange(60)))


def test_copies_forget_gradients():
    module = ibp.nn.EmbeddingBag(20, 8, mode="sum")
    module(torch.tensor([[1, 2]])).sum().backward()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.row_gradient() is None
        assert_same_bits(copied.weight.decompress(), module.weight.decompress())
        ibp.optim.SGD(copied, lr=1.0)
        copied(torch.tensor([[1, 2]])).sum().backward()
        copied.write_rows(torch.tensor([1]), torch.ones(1, 8))
    assert module.row_gradient() is not None and not torch.equal(module.weight[1], torch.ones(8))


# ---- many tables ----

TABLES = {"user": (50, 16), "ad": (30, 8), "page": (20, 16)}


def make_collection(**options):
    torch.manual_seed(1)
    return ibp.nn.EmbeddingCollection(TABLES, **{"mode": "sum", **options})


def keyed(names, num_bags=3, seed=0):
    """(keys, values, lengths) with an empty bag."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, (len(names) * num_bags,), generator=generator)
    lengths[1] = 0
    counts = lengths.view(len(names), -1).sum(1).tolist()
    values = [torch.randint(TABLES[name][0], (n,), generator=generator) for name, n in zip(names, counts)]
    return names, torch.cat(values), lengths


def test_keyed_bags_of_an_empty_batch():
    """Features of one width, which share a group, and of two widths."""
    none = torch.empty(0, dtype=torch.int64)
    for names, width in ((["user", "page"], 32), (["user", "ad"], 24)):
        assert make_collection()((names, none, none)).shape == (0, width)


def keyed_by_torch(collection, names, values, lengths, weights=None):
    weights_of = collection.to_torch()
    counts = lengths.view(len(names), -1).sum(1).tolist()
    parts = zip(names, values.split(counts), lengths.view(len(names), -1))
    per_sample = [None] * len(names) if weights is None else weights.split(counts)
    return torch.cat(
        [
            F.embedding_bag(
                ids,
                weights_of[name].weight,
                torch.cat((bags.new_zeros(1), bags.cumsum(0))),
                mode=collection.mode,
                include_last_offset=True,
                per_sample_weights=own,
            )
            for (name, ids, bags), own in zip(parts, per_sample)
        ],
        1,
    ).detach()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("names", [["page", "user"], ["ad", "page", "user", "page"]], ids=["one width", "two widths"])
def test_collections_have_torchs_bits(mode, names):
    collection = make_collection(mode=mode)
    features = keyed(names)
    assert_same_bits(collection(features).detach(), keyed_by_torch(collection, *features))
    if mode == "sum":
        weights = torch.rand(features[1].numel())
        assert_same_bits(collection((*features, weights)).detach(), keyed_by_torch(collection, *features, weights))


def test_collections_of_dicts():
    collection = make_collection(mode="mean")
    torchs = collection.to_torch()
    ids, offsets = bags_of(20)
    features = {"user": torch.randint(50, (4, 3)), "page": (ids, offsets), "ad": torch.randint(30, (2, 5))}
    results = collection(features)
    assert list(results) == list(features)
    for name in ("user", "ad"):
        assert_same_bits(results[name], torchs[name](features[name]))
    assert_same_bits(results["page"], torchs["page"](ids, offsets))
    assert_same_bits(collection({"ad": features["ad"]})["ad"], results["ad"])


class Keyed:
    """As torchrec's KeyedJaggedTensor."""

    def __init__(self, keys, values, lengths, weights=None):
        self._parts = keys, values, lengths, weights

    def keys(self):
        return self._parts[0]

    def values(self):
        return self._parts[1]

    def lengths(self):
        return self._parts[2]

    def weights_or_none(self):
        return self._parts[3]


def test_keyed_jagged_tensors():
    collection, features = make_collection(), keyed(["page", "user"])
    assert_same_bits(collection(Keyed(*features)), collection(features))
    weights = torch.rand(features[1].numel())
    assert_same_bits(collection(Keyed(*features, weights)), collection((*features, weights)))


def test_rows_by_table_numbers():
    given = {name: embedding(size, 16, torch.bfloat16, seed=size) for name, size in (("a", 5), ("b", 9), ("c", 3))}
    collection = ibp.nn.EmbeddingCollection(given)
    ids, numbers = torch.tensor([4, 8, 0, 2, 4]), torch.tensor([0, 1, 1, 2, 0], dtype=torch.int32)
    expected = torch.stack([list(given.values())[n][i] for n, i in zip(numbers.tolist(), ids.tolist())])
    assert_same_bits(collection.lookup(ids, numbers), expected)
    assert not collection.groups[0].trainable
    with pytest.raises(IndexError, match=r"ids\[1\] is 5; wanted 0 to 4 of table 'a'"):
        collection.lookup(torch.tensor([4, 5]), torch.tensor([0, 0]))
    with pytest.raises(IndexError, match=r"table_numbers\[0\] is 3; wanted 0 to 2"):
        collection.lookup(torch.tensor([4]), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"tables are \[8, 16\] wide; wanted one width"):
        make_collection().lookup(ids, numbers)


def test_ids_never_reach_the_next_table():
    collection = make_collection()
    for features, error, message in (
        ({"user": torch.tensor([[50]])}, IndexError, r"50; wanted 0 to 49 of table 'user'"),
        ({"page": torch.tensor([[-1]])}, IndexError, r"-1; wanted 0 to 19 of table 'page'"),
        ((["user", "page"], torch.tensor([1, 20]), torch.tensor([1, 1])), IndexError, "of table 'page'"),
        ((["user", "page"], torch.tensor([1, 2]), torch.tensor([1, 2])), ValueError, "add up to 3; wanted 2"),
        ((["user", "page"], torch.tensor([1]), torch.tensor([2, -1])), ValueError, "none below 0"),
        ((["user", "ad"], torch.tensor([1, 2]), torch.tensor([1, 2])), ValueError, "add up to 3; wanted 2"),
        ((["user", "page"], torch.tensor([1]), torch.tensor([1])), ValueError, "1 lengths for 2 keys"),
        ((["user"], torch.tensor([1.0]), torch.tensor([1])), TypeError, "values has dtype torch.float32"),
        (
            (["user"], torch.tensor([1]), torch.tensor([1]), torch.ones(2)),
            ValueError,
            r"weights is \[2\]; wanted a tensor \[1\]",
        ),
        ({"nobody": torch.tensor([[1]])}, KeyError, "no table 'nobody'; the collection has"),
        ({"user": torch.tensor([1])}, ValueError, "bags of table 'user' are wrong"),
        ({"user": (torch.tensor([1]), torch.tensor([1]))}, ValueError, "offsets of table 'user' are not in order"),
        (torch.tensor([1]), TypeError, "features is a Tensor"),
    ):
        with pytest.raises(error, match=message):
            collection(features)


NO_IDS = [torch.tensor([1.7, 2.2]), torch.tensor([True, False]), torch.tensor([1 + 0j, 2])]


@pytest.mark.parametrize("wrong", NO_IDS, ids=lambda wrong: str(wrong.dtype))
@pytest.mark.parametrize("trainable", [False, True])
def test_what_is_no_integer_is_no_id(wrong, trainable):
    """Every entrance refuses it, and nothing is truncated."""
    table, good = ibp.compress(embedding(40, 16), **ON_CPU), torch.tensor([1, 2])
    embeddings, bags = (kind(table, trainable=trainable) for kind in (ibp.nn.Embedding, ibp.nn.EmbeddingBag))
    collection = ibp.nn.EmbeddingCollection({"user": table}, trainable=trainable)
    for name, call in (
        ("ids", lambda: embeddings(wrong)),
        ("ids", lambda: bags(wrong[None])),
        ("offsets", lambda: bags(good, wrong)),
        ("the ids tensor of table 'user'", lambda: collection({"user": wrong[None]})),
        ("the ids tensor of table 'user'", lambda: collection({"user": (wrong, torch.tensor([0]))})),
        ("the offsets tensor of table 'user'", lambda: collection({"user": (good, wrong)})),
        ("values", lambda: collection((["user"], wrong, torch.tensor([2])))),
        ("lengths", lambda: collection((["user"], good, wrong))),
        ("ids", lambda: collection.lookup(wrong, torch.tensor([0, 0]))),
        ("table_numbers", lambda: collection.lookup(good, wrong)),
    ):
        with pytest.raises(TypeError, match=f"^{name} has dtype {wrong.dtype}; wanted torch.int32 or torch.int64"):
            call()


def test_collections_are_saved_and_loaded():
    collection, other = make_collection(), ibp.nn.EmbeddingCollection(TABLES)
    coded = ibp.nn.coded_state_dict(collection)
    assert list(coded) == ["groups.0.weight", "groups.1.weight"]
    other.load_state_dict(coded)
    assert all(torch.equal(other.weight(name), collection.weight(name)) for name in TABLES)
    model = torch.nn.Sequential(collection)
    dense = model.state_dict()
    assert {key: list(value.shape) for key, value in dense.items()} == {
        f"0.embedding_bags.{name}.weight": list(size) for name, size in TABLES.items()
    }
    loaded = torch.nn.Sequential(ibp.nn.EmbeddingCollection(TABLES))
    assert str(loaded.load_state_dict(dense)) == "<All keys matched successfully>"
    assert all(torch.equal(loaded[0].weight(name), collection.weight(name)) for name in TABLES)
    for key, value, message in (
        ("0.embedding_bags.page.weight", None, "Missing key.*embedding_bags.page.weight"),
        ("0.embedding_bags.page.weight", torch.zeros(3, 3), r"page.weight is torch.float32 \[3, 3\]; wanted"),
        ("0.embedding_bags.other.weight", torch.zeros(3, 3), "Unexpected.*other"),
    ):
        changed = {name: held for name, held in {**dense, key: value}.items() if held is not None}
        with pytest.raises(RuntimeError, match=message):
            loaded.load_state_dict(changed)


def test_collections_are_copied():
    collection, features = make_collection(), keyed(["page", "user"])
    expected = collection(features).detach()
    for copied in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))):
        assert_same_bits(copied(features).detach(), expected)


class Scaled(torch.nn.Embedding):
    def forward(self, ids):
        return 3 * super().forward(ids)


class ScaledBag(torch.nn.EmbeddingBag):
    def forward(self, *args, **kwargs):
        return 3 * super().forward(*args, **kwargs)


def test_modules_that_compute_something_else():
    with pytest.raises(TypeError, match="embeddings is a Scaled with a forward of its own"):
        ibp.nn.Embedding.from_pretrained(Scaled(30, 8))
    with pytest.raises(TypeError, match="embeddings is a ScaledBag with a forward of its own"):
        ibp.nn.EmbeddingBag.from_pretrained(ScaledBag(30, 8))
    with pytest.raises(TypeError, match="table 'a' is a ScaledBag with a forward of its own"):
        ibp.nn.EmbeddingCollection({"a": ScaledBag(30, 8)})


def test_collections_that_are_wrong():
    for tables, error, message in (
        ({}, ValueError, "there are no tables"),
        ({"a": 5}, TypeError, "table 'a' is a int"),
        ({"a": torch.zeros(4)}, ValueError, r"table 'a' has shape \[4\]"),
        ({"a": torch.zeros(4, 4), "b": torch.zeros(4, 4).half()}, ValueError, "dtypes torch.float16, torch.float32"),
    ):
        with pytest.raises(error, match=message):
            ibp.nn.EmbeddingCollection(tables)


# ---- GPUs ----


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(cuda, pinned, dtype):
    weight = embedding(500, 64, dtype)
    table = ibp.compress(weight, memory="pinned") if pinned else ibp.compress(weight.to(cuda))
    ids, offsets = (part.to(cuda) for part in bags_of(500))
    for mode in ("sum", "mean", "max"):
        for trainable in (False, True):
            ours = ibp.nn.EmbeddingBag(table, mode=mode, padding_idx=7, trainable=trainable).to(cuda)
            torchs = torch.nn.EmbeddingBag.from_pretrained(weight.to(cuda), mode=mode, padding_idx=7)
            assert_same_bits(ours(ids, offsets), torchs(ids, offsets))
    assert ours.weight is table
    with pytest.raises(IndexError, match="500"):
        ours(torch.tensor([[500]], device=cuda))
    with pytest.raises(ValueError, match="offsets go from 0 to 1; wanted 0 to at most 20"):
        ours(ids, torch.tensor([0, 7, 1], device=cuda))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_row_on_a_gpu(cuda, mode):
    weight = embedding(50, 64)  # torch has no gradient of maxima of BF16 on a GPU
    weight[3] = -0.0
    ours = ibp.nn.EmbeddingBag(ibp.compress(weight.to(cuda)), mode=mode, trainable=True)
    torchs = torch.nn.EmbeddingBag.from_pretrained(weight.to(cuda), mode=mode, freeze=False)
    ids = torch.tensor([[3], [9], [3]], device=cuda)
    assert_same_bits(ours(ids).detach(), torchs(ids).detach())
    for module in (ours, torchs):
        module(ids).sum().backward()
    gradient = ours.row_gradient()
    assert gradient.ids.tolist() == [3, 9]
    assert_same_bits(gradient.grad, torchs.weight.grad[gradient.ids])


def test_collections_on_a_gpu(cuda):
    collection, on_cpu = make_collection(), keyed(["page", "user", "page"])
    names, values, lengths = on_cpu
    expected = keyed_by_torch(collection, *on_cpu)
    torch.testing.assert_close(collection((names, values.to(cuda), lengths.to(cuda))).cpu(), expected)
    for values, lengths in (([20], [1, 0]), ([1, 2], [1, 2]), ([1, 2], [3, -1])):
        with pytest.raises(IndexError), torch.no_grad():
            collection((["page", "user"], torch.tensor(values, device=cuda), torch.tensor(lengths, device=cuda)))
            collection.groups[0].weight.check()


def test_collections_in_graphs(cuda):
    """Bags without gradients ask nothing of the host: a graph looks other ids up each time."""
    collection = make_collection(trainable=False)
    names, values, lengths = keyed(["page", "user"])
    bags = (names, values.to(cuda), lengths.to(cuda))
    expected = collection(bags)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooled = collection(bags)
    graph.replay()
    assert_same_bits(pooled, expected)
    bags[1].zero_()
    graph.replay()
    assert_same_bits(pooled, collection(bags))
    assert not torch.equal(pooled, expected)


@pytest.mark.parametrize("call", ["conversion", "own table"])
def test_changed_rows_stay_when_the_table_is_replaced(call):
    """Rows that have changed only in the cache go to the table before it is copied, or becomes another's."""
    torch.manual_seed(0)
    rows, new, ids = torch.randn(64, 64).bfloat16(), torch.randn(8, 64).bfloat16(), torch.arange(8)
    module = ibp.nn.Embedding(ibp.compress(rows, device="cpu"), trainable=True, stays=False)
    module.cache = ibp.RowCache(module.weight, 20_000, list(range(64)), devices="cpu", writable=True)
    state = ibp.nn.coded_state_dict(module)
    module.write_rows(ids, new)
    rows[:8] = new
    if call == "conversion":
        module._apply(lambda part: part.clone())
    else:
        module.load_state_dict(state, assign=True)
    assert_same_bits(module(torch.arange(64)).detach(), rows)
    assert_same_bits(module.current_table().decompress(), rows)


@pytest.mark.parametrize("call", ["write_rows", "load_state_dict"])
def test_interrupted_changes_leave_no_old_row(call):
    """An optimizer gets the present rows of a gradient, and the cache has the rows of the table."""
    torch.manual_seed(0)
    old, new, ids = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.arange(64)
    table, cache_bytes = ibp.compress(old, device="cpu"), 0 if call == "write_rows" else 20_000
    state = {"weight": ibp.compress(new, device="cpu")}
    for moment in itertools.count(0, 3):
        module = ibp.nn.Embedding(table.clone(), trainable=call == "write_rows")
        if cache_bytes:
            module.cache = ibp.RowCache(module.weight, cache_bytes, ids.tolist(), devices="cpu")
        loss = module(ids).float().sum()

        def work():
            return module.write_rows(ids, new) if call == "write_rows" else module.load_state_dict(state)

        _, interrupts = interrupt_at(moment, None, work)
        assert_same_bits(module(ids).detach(), module.weight.decompress())
        if call == "write_rows":
            loss.backward()
            gradient = module.row_gradient()
            assert_same_bits(gradient.rows, module.weight.index_select(gradient.ids))
        if not interrupts:
            break
    assert moment > 5
