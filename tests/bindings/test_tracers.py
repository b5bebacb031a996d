"""torch.jit.trace, torch.jit.script, torch.export and torch.vmap of calls that read tables: refused in one sentence.
A graph would leave out what calls write to tensors, and an exported program would hold addresses of this process."""

import re

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits, embedding
from ibp._rows.table import handle_on

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.")

IDS = torch.randint(500, (64,), generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def x():
    return embedding(500, 64)


@pytest.fixture(scope="module")
def table(x):
    return ibp.compress(x, memory="host")


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def cached(table):
    return ibp.RowCache(table, 20_000, torch.rand(500), devices="cpu")


def offloaded(table):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).eval()
    ibp.offload(model, device="cpu", min_bytes=1)
    return model


CASES = {
    "index_select": (lambda table: lambda ids: table.index_select(ids), IDS),
    "torch.index_select": (lambda table: lambda ids: torch.index_select(table, 0, ids), IDS),
    "index_select of several tables": (
        lambda table: lambda ids: ibp.index_select([table, table], ids, table_numbers=ids % 2),
        IDS,
    ),
    "[]": (lambda table: lambda ids: table[ids], IDS),
    "RowCache": (lambda table: cached(table).index_select, IDS),
    "F.embedding": (lambda table: lambda ids: F.embedding(ids, table), IDS),
    "F.linear": (lambda table: lambda x: F.linear(x, table), X),
    "decompress": (lambda table: lambda x: x @ ibp.decompress(table).T, X),
    "raw": (lambda table: ibp.compress(table.decompress(), scheme="raw", memory="host").index_select, IDS),
    "nn.Embedding": (lambda table: ibp.nn.Embedding(table), IDS),
    "a net": (lambda table: torch.nn.Sequential(ibp.nn.Embedding(table), torch.nn.Linear(64, 8)), IDS),
    "nn.EmbeddingBag": (lambda table: ibp.nn.EmbeddingBag(table, mode="sum"), IDS.view(8, 8)),
    "nn.Linear": (lambda table: ibp.nn.Linear(table), X),
    "offload": (offloaded, X),
    "trainable": (lambda table: ibp.nn.Embedding(table.clone(), trainable=True), IDS),
}


@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("name", CASES)
def test_tracing_is_refused(table, name, is_used):
    """Of a table that is used for the first time, and of one that is ready for calls."""
    make, given = CASES[name]
    function = make(table)
    module = function if isinstance(function, torch.nn.Module) else Call(function)
    if is_used:
        module(given)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace.* cannot record ibp's operations \(here ibp::\w+\)"):
        torch.jit.trace(module, given)
    module(given)  # it works as before


NOT_SCRIPTED = re.escape(
    "torch.jit.script cannot record ibp's operations: give it plain tensors, as ibp.decompress(table) and "
    "ibp.nn.decompress(model) make them, or use torch.compile"
)
NOT_EXPORTED = r"torch\.export cannot record ibp's operations"
NOT_MAPPED = r"torch\.vmap cannot map ibp's operations: call them without torch\.vmap, with all ids or vectors at once"


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("name", CASES)
def test_exporting_is_refused(table, name, strict):
    make, given = CASES[name]
    function = make(table)
    module = function if isinstance(function, torch.nn.Module) else Call(function)
    before = module(given)
    with pytest.raises(Exception, match=NOT_EXPORTED):
        torch.export.export(module, (given,), strict=strict)
    assert_same_bits(module(given), before)


@pytest.mark.parametrize("name", ["nn.Embedding", "a net", "nn.EmbeddingBag", "nn.Linear", "offload", "trainable"])
def test_scripting_is_refused(table, name):
    """Before torch compiles anything of the module."""
    module, given = CASES[name][0](table), CASES[name][1]
    with pytest.raises(RuntimeError, match=NOT_SCRIPTED):
        torch.jit.script(module)
    module(given)


@pytest.mark.parametrize("name", ["index_select", "torch.index_select", "[]", "RowCache", "F.embedding", "trainable"])
def test_mapping_ids_is_refused(table, name):
    function, given = CASES[name][0](table), IDS.view(8, 8)
    with pytest.raises(RuntimeError, match=NOT_MAPPED):
        torch.vmap(function)(given)
    with pytest.raises(RuntimeError, match=NOT_MAPPED):
        torch.vmap(torch.vmap(function))(given)


def test_mapping_operations_is_refused(table):
    """An operation that gets mapped tensors says so itself."""
    handle = handle_on(table, torch.device("cpu")).table
    out, noted = torch.empty(8, 8, 64), torch.zeros(8, 4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"here ibp::gather_items\): call them without torch\.vmap"):
        torch.vmap(lambda ids, out, noted: torch.ops.ibp.gather_items(handle, ids, 0, out, noted))(
            IDS.view(8, 8), out, noted
        )


@pytest.mark.parametrize("name", ["F.linear", "nn.Linear", "offload"])
def test_mapping_vectors(table, name):
    """Products of mapped vectors have the bits of torch's."""
    function = CASES[name][0](table)
    assert_same_bits(torch.vmap(function)(X), function(X))


def test_closed_models_can_be_scripted():
    """close() leaves the model as torch made it."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).eval()
    ibp.offload(model, device="cpu", min_bytes=1).close()
    assert_same_bits(torch.jit.script(model)(X), model(X))


def test_tracing_what_a_table_gives(table, x):
    """What the message says."""
    traced = torch.jit.trace(torch.nn.Embedding.from_pretrained(ibp.decompress(table)), IDS)
    assert_same_bits(traced(IDS + 1 - 1), x[IDS])
