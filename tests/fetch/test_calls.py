"""How many Python functions of ibp a call enters: the way into an operation is short, whatever the arguments are."""

import pytest
import torch

import ibp
from counted import calls_of
from helpers import assert_same_bits, embedding
from products import kernels_on_the_cpu, lists

MOST_OF_SELECT, MOST_OF_INDEX, MOST_OF_DECOMPRESS, MOST_OF_LINEAR = 12, 10, 15, 15
CPU = torch.device("cpu")


@pytest.fixture(params=["pageable", "pinned", "device"])
def place(request):
    if request.param != "pageable":
        request.getfixturevalue("cuda")
    return request.param


def table_in(place, x):
    table = ibp.compress(x, scheme="planes", device="cpu", memory="host")
    return {"pageable": lambda: table, "pinned": table.pin_memory, "device": lambda: table.to("cuda")}[place]()


def home_of(place):
    return CPU if place == "pageable" else torch.device("cuda", 0)


def selections(x, table, home):
    """(name, a call of `index_select`, its ids): one of each form of arguments."""
    ids = torch.tensor([5, 99, 5])
    out = torch.empty(3, 60, dtype=x.dtype, device=home)
    spread = torch.empty(3, 2, 60, dtype=x.dtype, device=home)[:, 1]
    paths = ("gpu", "bucketed") if home.type == "cuda" else ()
    for name, given in (("a tensor", ids.to(home)), ("int32", ids.int().to(home)), ("a list", [5, 99, 5])):
        for options in (
            {},
            {"device": home},
            {"out": out},
            {"out": spread, "check": True},
            {"device": home, "out": out, "max_sms": 3, "check": True},
            *({"device": home, "out": out, "max_sms": 3, "check": True, "path": path} for path in paths),
        ):
            yield f"{name} {sorted(options)}", lambda given=given, options=options: table.index_select(given, **options)
    yield "to the CPU", lambda: ibp.index_select(table, ids, device="cpu")
    yield "ids of the CPU", lambda: ibp.index_select(table, ids, device=home)


def test_index_select(place):
    x, home = embedding(100, 60), home_of(place)
    table = table_in(place, x)
    for name, call in selections(x, table, home):
        assert_same_bits(call().cpu(), x[[5, 99, 5]])
        entered = calls_of(call)
        assert len(entered) <= MOST_OF_SELECT, (name, entered)


def test_the_plainest_calls(place):
    """They enter the public function and the one that calls the operation."""
    x, home = embedding(100, 60), home_of(place)
    table, ids = table_in(place, x), torch.tensor([5, 99, 5], device=home)
    most = 3 if place == "pinned" else 2  # a plan is of the calibration in force
    assert len(calls_of(lambda: ibp.index_select(table, ids))) <= most
    assert len(calls_of(lambda: table[ids])) <= most + 1


def test_index(place):
    x, home = embedding(100, 60), home_of(place)
    table = table_in(place, x)
    for key in (torch.tensor([5, -1, 5], device=home), torch.tensor([[5], [-1]], device=home), [5, -1], 7):
        assert_same_bits(table[key].cpu(), x[torch.as_tensor(key).cpu()] if not isinstance(key, int) else x[key])
        entered = calls_of(lambda key=key: table[key])
        assert len(entered) <= MOST_OF_INDEX, (key, entered)


def test_decompress(place):
    x, home = embedding(100, 60), home_of(place)
    table = table_in(place, x)
    out, spread = torch.empty_like(x, device=home), torch.empty(100, 2, 60, dtype=x.dtype, device=home)[:, 1]
    for options in (
        {},
        {"device": home},
        {"out": out},
        {"out": spread},
        {"out": out, "check": True, "max_sms": 3},
        {"device": home, "out": spread, "check": True, "max_sms": 3},
    ):
        call = lambda options=options: ibp.decompress(table, **options)  # noqa: E731
        assert_same_bits(call().cpu(), x)
        entered = calls_of(call)
        assert len(entered) <= MOST_OF_DECOMPRESS, (options, entered)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(with_bias, monkeypatch):
    plain = torch.nn.Linear(128, 64, bias=with_bias).bfloat16().requires_grad_(False)
    module, x = ibp.nn.Linear.from_linear(plain), torch.randn(3, 128).bfloat16()
    lists(module.weight)
    with kernels_on_the_cpu(monkeypatch) as multiplied:
        for call in (lambda: module(x), lambda: ibp.linear(x, module.weight, module.bias)):
            entered = calls_of(call)
            assert len(entered) <= MOST_OF_LINEAR, entered
    assert multiplied == 6 * [3]


def test_linear_on_a_gpu(cuda):
    plain = torch.nn.Linear(128, 64, device=cuda).bfloat16().requires_grad_(False)
    module, x = ibp.nn.Linear.from_linear(plain), torch.randn(3, 128, device=cuda).bfloat16()
    for call in (lambda: module(x), lambda: ibp.linear(x, module.weight, module.bias)):
        entered = calls_of(call)
        assert len(entered) <= MOST_OF_LINEAR, entered


def test_the_count_counts():
    """Of a call that learns a codebook and codes rows."""
    x = embedding(100, 60)
    entered = calls_of(lambda: ibp.compress(x, device="cpu"))
    assert len(entered) > MOST_OF_DECOMPRESS and any("compress" in name for name in entered)
