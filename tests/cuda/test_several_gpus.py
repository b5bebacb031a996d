"""One table and two GPUs: pinned memory serves both, whichever device is current and whichever pinned it; tables, ids
and results on different GPUs.

Skips where there are fewer than two GPUs; with IBP_REQUIRE_CUDA_DEVICES=2 it fails there.
"""

import copy
import functools
import io
import itertools
import pickle

import pytest
import torch

import ibp
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import assert_same_bits, assert_same_table, bytes_of, embedding, in_threads, layout_arguments, spiky_rows
from ibp._machine import memory
from models import IDS, Net, Wide

CPU = torch.device("cpu")
SCHEMES = ["raw", "ibp", "planes"]
NUM_ITEMS, COLUMNS = 700, 60
PAIRS = list(itertools.product(range(2), repeat=2))


@pytest.fixture
def x():
    return spiky_rows(NUM_ITEMS, COLUMNS)


def random_ids(count=300):
    return torch.randint(NUM_ITEMS, (count,))


def make_table(x, scheme, gpu, layout="slots", **arguments):
    """A table in pinned memory that was pinned while the GPU was current."""
    with torch.cuda.device(gpu):
        table = ibp.compress(x, scheme=scheme, **layout_arguments(layout, 4 * COLUMNS), **arguments)
    assert table.is_pinned() and table.device == CPU
    return table


def place_of(x, place, gpus):
    """x compressed in pinned memory, or on the first GPU."""
    table = make_table(x, "planes", gpus[0])
    return table if place == "pinned" else table.to(gpus[0])


# ---- pinned tables ----


@pytest.mark.parametrize("pinned_by", range(2))
@pytest.mark.parametrize("layout", ["slots", "packed"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_pinned_table_serves_both(gpus, x, scheme, layout, pinned_by):
    """Items and whole tensors, to every GPU from every current one, to new memory and to given memory, with ids
    anywhere."""
    table = make_table(x, scheme, gpus[pinned_by], layout)
    for current, target in PAIRS:
        device, ids = gpus[target], random_ids()
        with torch.cuda.device(gpus[current]):
            for where in (CPU, *gpus):
                out = torch.full((len(ids), COLUMNS), 7.0, device=device)
                near = ids.to(where)
                got = ibp.index_select(table, near, out=out, check=True)
                assert got is out
                for items in (out, ibp.index_select(table, near, device=device, check=True)):
                    assert items.device == device
                    assert_same_bits(items.cpu(), x[ids])
            out = torch.full_like(x, 7.0, device=device)
            for whole in (table.decompress(device=device, check=True), table.decompress(out=out, check=True)):
                assert whole.device == device
                assert_same_bits(whole.cpu(), x)
            assert torch.cuda.current_device() == current


@pytest.mark.parametrize("path", ["gpu", "bucketed", "cpu"])
def test_every_path_of_items(gpus, x, path):
    table = make_table(x, "planes", gpus[1])
    for current, target in PAIRS:
        ids = random_ids()
        with torch.cuda.device(gpus[current]):
            near = ids if path == "cpu" else ids.to(gpus[target])
            items = ibp.index_select(table, near, device=gpus[target], path=path, check=True)
        assert items.device == gpus[target]
        assert_same_bits(items.cpu(), x[ids])


@pytest.mark.parametrize("path", ["gpu", "copy"])
def test_every_path_of_whole_tensors(gpus, x, path):
    """Several tensors, to both GPUs in one call."""
    xs = [x, embedding(NUM_ITEMS, COLUMNS), x + 1, spiky_rows(90, COLUMNS, seed=3)]
    tables = [make_table(one, "planes", gpus[number % 2], "packed") for number, one in enumerate(xs)]
    for current, first in PAIRS:
        with torch.cuda.device(gpus[current]):
            outs = [torch.empty_like(one, device=gpus[(first + number) % 2]) for number, one in enumerate(xs)]
            ibp.decompress(tables, out=outs, path=path, check=True)
            for one, out in zip(xs, outs):
                assert_same_bits(out.cpu(), one)
            for one, out in zip(xs, ibp.decompress(tables, device=gpus[first], path=path, check=True)):
                assert out.device == gpus[first]
                assert_same_bits(out.cpu(), one)


@pytest.mark.parametrize("how", ["pin_memory", "in place", "torch"])
def test_however_it_was_pinned(gpus, x, how):
    """By ibp, where the rows are, and by torch."""
    with torch.cuda.device(gpus[1]):
        if how == "in place":
            table = ibp.compress(x.clone(), scheme="planes", memory="pinned", inplace=True)
        elif how == "pin_memory":
            table = ibp.compress(x, scheme="planes", memory="host").pin_memory()
        else:
            table = ibp.compress(x.clone().pin_memory(), scheme="planes", inplace=True)
    assert table.is_pinned()
    for current, target in PAIRS:
        with torch.cuda.device(gpus[current]):
            ids = random_ids().to(gpus[target])
            assert_same_bits(ibp.index_select(table, ids, check=True).cpu(), x[ids.cpu()])


def test_views_of_pinned_memory(gpus):
    """Of both GPUs over the same bytes, and nothing over bytes that are not pinned."""
    for current in gpus:
        with torch.cuda.device(current):
            host = memory.empty(800, CPU, pin=True).view(torch.int64).copy_(torch.arange(100)).view(10, 10)
            views = [memory.device_view(host, gpu) for gpu in gpus]
            assert [view.device for view in views] == gpus
            host[3, 3] = -1
            for view in views:
                assert_same_bits((view + 0).cpu(), host)
                assert int((view + 1).sum()) == int(host.sum()) + 100
            with pytest.raises(RuntimeError):
                memory.device_view(torch.zeros(100), gpus[1])
            assert torch.cuda.current_device() == current.index


# ---- tables and results on different GPUs ----


@pytest.mark.parametrize("scheme", SCHEMES)
def test_from_one_gpu_to_the_other(gpus, x, scheme):
    for home, target in PAIRS:
        table = make_table(x, scheme, gpus[0]).to(gpus[home])
        assert table.device == gpus[home]
        for current, where in itertools.product(gpus, (CPU, *gpus)):
            ids = random_ids()
            with torch.cuda.device(current):
                out = torch.empty(len(ids), COLUMNS, device=gpus[target])
                assert_same_bits(ibp.index_select(table, ids.to(where), device=gpus[target], check=True).cpu(), x[ids])
                assert_same_bits(ibp.index_select(table, ids.to(where), out=out, check=True).cpu(), x[ids])
                whole = torch.empty_like(x, device=gpus[target])
                assert_same_bits(table.decompress(out=whole, check=True).cpu(), x)
                assert_same_bits(table[5:9].cpu(), x[5:9])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressing_and_moving(gpus, x, scheme):
    """The worker changes nothing; a table on a GPU moves to the other one, and home."""
    table = make_table(x, scheme, gpus[0])
    for current, worker in PAIRS:
        with torch.cuda.device(gpus[current]):
            assert_same_table(ibp.compress(x, scheme=scheme, device=gpus[worker], slot_bytes=table.slot_bytes), table)
            near = ibp.compress(x.to(gpus[worker]), scheme=scheme, slot_bytes=table.slot_bytes)
            assert near.device == gpus[worker]
            for moved in (near, near.to(gpus[current]), near.to(gpus[1 - current]), near.to("cpu")):
                assert_same_bits(moved.decompress().cpu(), x)
            in_place = ibp.compress(x.clone(), scheme=scheme, device=gpus[worker], inplace=True)
            assert_same_bits(in_place.decompress(device=gpus[1 - worker]).cpu(), x)


def test_operations_refuse_two_devices(gpus, x):
    """Whatever is on the other GPU, or the CPU."""
    table = make_table(x, "ibp", gpus[0])
    for here, there in (gpus, gpus[::-1]):
        out, fault = torch.empty(2, COLUMNS, device=here), torch.zeros(4, dtype=torch.int64, device=here)
        arguments = [*values_of(table, here), torch.tensor([5, 6], device=here), 0, out, fault]
        OPS.gather_items(*arguments)
        assert_same_bits(arguments[-2].cpu(), x[5:7])
        for place, value in enumerate(arguments):
            for other in (there, CPU):
                if isinstance(value, torch.Tensor):
                    moved = torch.empty_like(value, device=other)
                    with pytest.raises(RuntimeError, match="device"):
                        OPS.gather_items(*arguments[:place], moved, *arguments[place + 1 :])


# ---- at the same time ----


@pytest.mark.parametrize("place", ["pinned", "device"])
def test_graphs(gpus, x, place):
    """One captured on each GPU, replayed in turn, and the faults of each."""
    tables = [make_table(x, "planes", gpus[0])] * 2
    if place == "device":
        tables = [tables[0].to(gpu) for gpu in gpus]
    graphs, ids, outs, wholes = [], [], [], []
    for gpu, table in zip(gpus, tables):
        ids.append(random_ids().to(gpu))
        outs.append(torch.empty(300, COLUMNS, device=gpu))
        wholes.append(torch.empty_like(x, device=gpu))
        with torch.cuda.device(gpu):
            table.index_select(ids[-1], out=outs[-1]), table.decompress(out=wholes[-1])
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            own = torch.cuda.Stream(gpu)  # torch's capture stream is the first GPU's
            with torch.cuda.graph(graphs[-1], stream=own):
                table.index_select(ids[-1], out=outs[-1]), table.decompress(out=wholes[-1])
    for current in (*gpus, *gpus):
        with torch.cuda.device(current):
            others = [random_ids() for _ in gpus]
            for k, gpu in enumerate(gpus):
                with torch.cuda.device(gpu):
                    ids[k].copy_(others[k]), outs[k].zero_(), wholes[k].zero_()
                    graphs[k].replay()
            for k in range(2):
                assert_same_bits(outs[k].cpu(), x[others[k]])
                assert_same_bits(wholes[k].cpu(), x)
    for k, gpu in enumerate(gpus):
        ids[k][5 + k] = NUM_ITEMS
        with torch.cuda.device(gpu):
            graphs[k].replay()
        with pytest.raises(IndexError, match=rf"ids\[{5 + k}\] is {NUM_ITEMS}.* on {gpu}"):
            tables[k].check()
        assert (outs[k][5 + k] == 0).all()


@pytest.mark.parametrize("place", ["pinned", "device"])
def test_faults_of_each(gpus, x, place):
    """A bad id on one GPU is raised once, by whoever asks for it, and leaves the other alone."""
    table = place_of(x, place, gpus)
    workers = gpus if place == "pinned" else gpus[:1]
    for worker, current in itertools.product(workers, gpus):
        with torch.cuda.device(current):
            ids = random_ids().to(worker)
            ids[17] = -3
            items = ibp.index_select(table, ids)
            with pytest.raises(IndexError, match=rf"ids\[17\] is -3.* on {worker}"):
                table.check()
            table.check()
            assert (items[17] == 0).all()
            ids[17] = 3
            assert_same_bits(ibp.index_select(table, ids, check=True).cpu(), x[ids.cpu()])
            ids[9] = NUM_ITEMS
            with pytest.raises(IndexError, match=r"ids\[9\] is"):
                ibp.index_select(table, ids, check=True)
    if place == "device":
        return
    for gpu in gpus:  # both at once: each is told
        ids = torch.tensor([0, NUM_ITEMS + gpu.index], device=gpu)
        ibp.index_select(table, ids)
    for gpu in gpus:
        with pytest.raises(IndexError, match=f"is {NUM_ITEMS + gpu.index}"):
            torch.cuda.synchronize(gpu)
            ibp.index_select(table, torch.tensor([0], device=gpu))
    table.check()


def test_corrupt_rows(gpus, x):
    """A table that both GPUs find corrupt."""
    table = make_table(x, "planes", gpus[0])
    bad = copy.deepcopy(table)
    bad.lengths[33] = 1
    bad = pickle.loads(pickle.dumps(bad)).pin_memory()
    for current, target in PAIRS:
        with torch.cuda.device(gpus[current]):
            with pytest.raises(ibp.CorruptTableError, match="33"):
                bad.decompress(device=gpus[target], check=True)
            intact = torch.tensor([31, 64], device=gpus[target])
            assert_same_bits(ibp.index_select(bad, intact, check=True).cpu(), x[[31, 64]])


def test_streams(gpus, x):
    """Side streams of both GPUs at the same time."""
    table = make_table(x, "planes", gpus[1])
    streams = [torch.cuda.Stream(gpu) for gpu in gpus for _ in range(2)]
    for current in gpus:
        ids, results = [random_ids() for _ in streams], []
        with torch.cuda.device(current):
            for some, stream in zip(ids, streams):
                with torch.cuda.stream(stream):
                    near = some.to(stream.device)
                    results.append((ibp.index_select(table, near), table.decompress(device=stream.device, path="copy")))
            for stream in streams:
                stream.synchronize()
        table.check()
        for some, (items, whole) in zip(ids, results):
            assert_same_bits(items.cpu(), x[some])
            assert_same_bits(whole.cpu(), x)


def test_threads(gpus, x):
    """A thread a GPU, from the first use of a table on."""
    for scheme in SCHEMES:
        table, wrong = make_table(x, scheme, gpus[0]), []

        def work(gpu, seed, table=table, wrong=wrong):
            generator = torch.Generator().manual_seed(seed)
            torch.cuda.set_device(gpu)
            for _ in range(20):
                ids = torch.randint(NUM_ITEMS, (200,), generator=generator)
                items = [ibp.index_select(table, ids.to(gpu)), ibp.index_select(table, ids, device=gpu, path="cpu")]
                same = [torch.equal(bytes_of(one.cpu()), bytes_of(x[ids])) for one in items]
                same.append(torch.equal(bytes_of(table.decompress(device=gpu, path="copy").cpu()), bytes_of(x)))
                if not all(same):
                    wrong.append((gpu, same))

        in_threads(*(functools.partial(work, gpu, seed) for seed, gpu in enumerate(gpus * 2)))
        table.check()
        assert not wrong


# ---- the rest ----


@pytest.mark.parametrize("place", ["pinned", "device"])
def test_pickling(gpus, x, place):
    """A table comes back where it was, or where map_location says."""
    table = make_table(x, "planes", gpus[1])
    table = table if place == "pinned" else table.to(gpus[1])
    file = io.BytesIO()
    torch.save(table, file)
    for current in gpus:
        with torch.cuda.device(current):
            again = [pickle.loads(pickle.dumps(table)), copy.deepcopy(table)]
            for location in (None, "cpu", {"cuda:1": "cuda:0"}):
                file.seek(0)
                again.append(torch.load(file, map_location=location, weights_only=True))
            homes = [table.device] * 3 + [CPU, gpus[0] if place == "device" else CPU]
            for loaded, home in zip(again, homes):
                assert loaded.device == home
                for target in gpus:
                    assert_same_bits(loaded.decompress(device=target).cpu(), x)
            for target in gpus if place == "pinned" else []:
                assert_same_bits(again[0].pin_memory().decompress(device=target, check=True).cpu(), x)


def test_compiled(gpus, x):
    table = make_table(x, "planes", gpus[0])
    for current, target in PAIRS:
        torch.compiler.reset()
        with torch.cuda.device(gpus[current]):
            ids = random_ids()
            table.index_select(ids.to(gpus[target]))
            gather = torch.compile(lambda some: ibp.index_select(table, some) + 0, fullgraph=True, backend="aot_eager")
            assert_same_bits(gather(ids.to(gpus[target])).cpu(), x[ids] + 0)


@torch.no_grad()
def test_blocks_of_a_model_take_turns(gpus):
    """Each GPU has its own arena and ring; hidden states go from one to the other."""
    plain, model = Net(dtype=torch.bfloat16).to(gpus[0]), Net(dtype=torch.bfloat16)
    ids = IDS.to(gpus[0])
    wanted = plain(ids)
    for options in ({}, {"resident_bytes": 20000}):
        with ibp.offload(model, gpus, min_bytes=1000, group_bytes=20000, **options) as offloaded:
            for _ in range(4):
                assert_same_bits(model(ids).cpu(), wanted.cpu())
            assert offloaded.stats().misses == 0
            assert {parameter.device for parameter in model.parameters()} == set(gpus)


@torch.no_grad()
@pytest.mark.parametrize("current", [0, 1])
def test_weights_on_the_second_gpu(gpus, current):
    """Whichever GPU is current."""
    model = Wide()
    with torch.cuda.device(current), ibp.offload(model, gpus[1], group_bytes=1 << 24):
        for _ in range(3):
            model(IDS.to(gpus[1]))
        model.check(3)
