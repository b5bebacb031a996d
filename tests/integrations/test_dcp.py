"""Checkpoints of torch.distributed.checkpoint with compressed tensors: bit for bit, for any number of ranks, and whole
whatever interrupts a save."""

import multiprocessing
import os
import pickle
import resource
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ibp
from helpers import assert_same_bits, embedding
from ibp._rows.handle import Handle
from ibp.integrations.dcp import Reader, Writer
from ranks import Ranks

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ROWS, COLUMNS = 512, 96


@pytest.fixture(autouse=True)
def quiet():
    """torch warns of calls without a group, and of checkpoints that are replaced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def states():
    """Tensors of every kind, and objects."""
    weight, generator = embedding(ROWS, COLUMNS, BF16), torch.Generator().manual_seed(0)
    return {
        "weight": weight,
        "transposed": embedding(COLUMNS, ROWS).t(),
        "of every second row": embedding(2 * ROWS, COLUMNS)[::2],
        "parameter": torch.nn.Parameter(embedding(ROWS, COLUMNS)),
        "fp16": weight.half(),
        "fp8": weight.to(FP8),
        "ids": torch.arange(10_000),
        "mask": torch.rand(10_000, generator=generator) < 0.01,
        "complex": torch.randn(900, 8, dtype=torch.complex64, generator=generator),
        "many bits": torch.randn(900, 8, dtype=torch.complex128, generator=generator),
        "random": torch.randint(256, (9000,), dtype=torch.uint8, generator=generator),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "small": torch.ones(3),
        "ibp.reserved": embedding(ROWS, COLUMNS),
        "weight:slots": embedding(ROWS, COLUMNS),
        "weight[1, 0]": embedding(ROWS, COLUMNS),
        "step": 7,
        "text": "abc",
    }


def empty_like(state):
    return {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}


def assert_loaded(directory, state, reader=Reader):
    loaded = empty_like(state)
    dcp.load(loaded, storage_reader=reader(directory), no_dist=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert_same_bits(loaded[name].detach(), value.detach())
        else:
            assert loaded[name] == value


def save(directory, state, **options):
    return dcp.save(state, storage_writer=Writer(directory, **options), no_dist=True)


def files_of(directory):
    return sorted(path.name for path in directory.iterdir())


def tensors_of(directory):
    (path,) = directory.glob("*.ibp.safetensors")
    return path


def test_all_kinds(tmp_path):
    save(tmp_path, states())
    assert_loaded(tmp_path, states())


@pytest.fixture
def num_threads(request):
    """Sets the number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
def test_tensors_of_several_blocks(tmp_path, monkeypatch, num_threads):
    """Each thread codes a whole block alone. The caller's thread codes only if torch has no other."""
    coders, encode = [], Handle.encode

    def watched(self, *arguments, **options):
        coders.append(threading.current_thread())
        return encode(self, *arguments, **options)

    monkeypatch.setattr(Handle, "encode", watched)
    rows = 5000  # of 2 KiB: two whole blocks, and a part
    state = {f"layers.{k}.weight": embedding(rows, 1024, BF16, seed=k) for k in range(3)}
    state["transposed"] = embedding(1024, rows, BF16, seed=3).t()
    state["random"] = torch.randint(256, (9 << 20,), dtype=torch.uint8)
    state["of zeros"] = torch.zeros(rows, 1024)
    state["odd"] = embedding(rows, 1025)[:, 1:].flatten()[:-3]
    save(tmp_path, state)
    if num_threads == 1:
        assert set(coders) == {threading.current_thread()}
    else:
        assert len(set(coders)) <= num_threads and threading.current_thread() not in coders
    assert len(coders) == 3 * 3 + 3 + 2 * 5  # "random" is not coded
    assert_loaded(tmp_path, state)
    file = ibp.open(tensors_of(tmp_path))
    assert list(file) == list(state)
    assert set(file.tables) == state.keys() - {"random"}
    assert all(file.fields(name).content is None for name in file.tables)  # To compute it takes a pass of its own.


def test_what_is_compressed(tmp_path):
    save(tmp_path, states())
    file = ibp.open(tensors_of(tmp_path))
    schemes = {name: file.info(name).scheme for name in file}
    assert schemes["weight"] == schemes["parameter"] == schemes["fp8"] == schemes["mask"] == "planes"
    assert schemes["random"] is schemes["small"] is schemes["empty"] is None  # as they are
    assert not {"ibp.reserved", "weight:slots", "weight[1, 0]", "step"} & schemes.keys()  # stored by torch
    assert_same_bits(file["weight"].decompress(device="cpu"), states()["weight"])


def test_bytes(tmp_path):
    """BF16 weights take a third less than by torch, and the metadata say how much."""
    state = {f"layers.{k}.weight": embedding(4096, 256, BF16, seed=k) for k in range(4)}
    save(tmp_path / "ibp", state)
    metadata = Reader(tmp_path / "ibp").read_metadata()
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).iterdir()) for name in ("ibp", "torch")]
    assert sizes[0] < 0.72 * sizes[1]
    assert sum(place.length for place in metadata.storage_data.values()) == pytest.approx(sizes[0], rel=0.05)


def test_read_from_torch(tmp_path):
    dcp.save(states(), checkpoint_id=tmp_path, no_dist=True)
    assert_loaded(tmp_path, states())


def test_torch_refuses(tmp_path):
    save(tmp_path, states())
    with pytest.raises(CheckpointException, match=r"ValueError: Unknown extension name='ibp.integrations.dcp'"):
        assert_loaded(tmp_path, states(), dcp.FileSystemReader)


def test_other_dtype(tmp_path):
    """As with torch's reader, a target has the dtype that the caller wants."""
    state = states()
    save(tmp_path, state)
    loaded = {"weight": torch.zeros(ROWS, COLUMNS)}
    dcp.load(loaded, storage_reader=Reader(tmp_path), no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"].float())


# ---- arguments ----


@pytest.mark.parametrize("name", ["serialization_format", "_extensions", "single_file_per_rank"])
def test_refused_options(tmp_path, name):
    with pytest.raises(TypeError, match=f"{name}: ibp decides how tensors are stored"):
        Writer(tmp_path, **{name: None})


def test_urls(tmp_path):
    for call in (Writer, Reader, Writer(tmp_path).reset, Reader(tmp_path).reset):
        with pytest.raises(ValueError, match="'s3://b/step' is a URL; wanted a directory of this machine"):
            call("s3://b/step")


def test_checkpoint_ids(tmp_path):
    """`checkpoint_id` takes the place of the path that writer and reader were made with."""
    dcp.save({"a": torch.ones(5000)}, checkpoint_id=tmp_path / "1", storage_writer=Writer(tmp_path), no_dist=True)
    loaded = {"a": torch.zeros(5000)}
    dcp.load(loaded, checkpoint_id=tmp_path / "1", storage_reader=Reader(tmp_path), no_dist=True)
    assert torch.equal(loaded["a"], torch.ones(5000))
    assert files_of(tmp_path) == ["1"]


# ---- what is there before ----


def test_an_earlier_checkpoint_is_replaced(tmp_path):
    """Its files go, and others stay."""
    save(tmp_path, states())
    (tmp_path / "notes.ibp.safetensors").write_text("mine")
    later = {"weight": embedding(ROWS, COLUMNS, seed=5)}
    save(tmp_path, later)
    assert_loaded(tmp_path, later)
    assert len(files_of(tmp_path)) == 3  # metadata, tensors, and the notes


def test_no_overwriting(tmp_path):
    save(tmp_path, states())
    before = files_of(tmp_path)
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        save(tmp_path, states(), overwrite=False)
    assert files_of(tmp_path) == before
    assert_loaded(tmp_path, states())


class _Copies(DefaultSavePlanner):
    """Makes a new tensor in each call, and counts the calls and the tensors that are alive."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.calls = self.alive = self.most_alive = 0

    def resolve_data(self, item):
        copy = super().resolve_data(item).numpy().copy()
        self.count(1)
        weakref.finalize(copy, self.count, -1)  # A tensor keeps its array for as long as anything uses its memory.
        return torch.from_numpy(copy)

    def count(self, change):
        with self.lock:
            self.calls += change > 0
            self.alive += change
            self.most_alive = max(self.most_alive, self.alive)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
def test_a_planner_that_copies(tmp_path, num_threads):
    """A rank holds a few of its tensors at once: those of its threads, and those whose blocks wait to be written."""
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{k}.weight": embedding(ROWS, COLUMNS, seed=k) for k in range(40)}
    state |= {f"random {k}": torch.randint(256, (9000 + k,), dtype=torch.uint8, generator=generator) for k in range(40)}
    state |= {f"of several blocks {k}": embedding(5000, 300 + k) for k in range(4)}
    planner = _Copies()
    dcp.save(state, storage_writer=Writer(tmp_path), planner=planner, no_dist=True)
    assert planner.alive == 0 and planner.most_alive <= 4 * num_threads + 4
    assert planner.calls <= 5 * len(state)
    assert_loaded(tmp_path, state)


class _Interrupted(DefaultSavePlanner):
    def __init__(self, calls):
        super().__init__()
        self.calls_left = calls

    def resolve_data(self, item):
        if item.index.fqn == "mask":
            self.calls_left -= 1
            if not self.calls_left:
                raise OSError("interrupted")
            return super().resolve_data(item).clone()
        return super().resolve_data(item)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_an_interrupted_save(tmp_path, calls):
    """The checkpoint before it is whole, and the next save removes what is left. The planner fails at its first call
    for a tensor, or at a later one, on the thread that reads the tensor."""
    save(tmp_path, states())
    changed = {**states(), "weight": embedding(ROWS, COLUMNS, seed=9)}
    with pytest.raises(CheckpointException, match="interrupted"):
        dcp.save(changed, storage_writer=Writer(tmp_path), planner=_Interrupted(calls), no_dist=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ibp")]
    assert len(list(tmp_path.glob("*.ibp.safetensors"))) == 1
    assert_loaded(tmp_path, states())
    save(tmp_path, changed)
    assert_loaded(tmp_path, changed)
    assert len(files_of(tmp_path)) == 3


def _save_to_a_full_disk(directory):
    """Saves more bytes than this process may write to a file, of a tensor that is stored as it is, and of one that is
    coded."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for x in (torch.randint(256, (200_000,), dtype=torch.uint8), embedding(8 * ROWS, COLUMNS)):
        with pytest.raises(CheckpointException, match=r"File too large.*tensors.ibp.safetensors"):
            save(directory, {"weight": x})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ibp")]


def test_a_full_disk(tmp_path):
    """A limit of the system in its place. The error names the file and the bytes, and the earlier checkpoint stays."""
    save(tmp_path, {"weight": torch.ones(2000)})
    before = files_of(tmp_path)
    # torch asks CUDA whether a tensor is pinned, which a forked process cannot answer.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    process = context.Process(target=_save_to_a_full_disk, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert files_of(tmp_path) == before
    assert_loaded(tmp_path, {"weight": torch.ones(2000)})


# ---- files that contradict each other ----


def change_metadata(directory, change):
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda of: setattr(of.properties, "dtype", torch.float32),
            "has 'weight' as torch.bfloat16.*say torch.float32",
        ),
        (lambda of: of.chunks[0].__dict__.update(sizes=torch.Size([ROWS, 8])), r"\[512, 96\]; .*bfloat16 \[512, 8\]"),
        (lambda of: of.chunks.clear(), "the checkpoint's metadata say torch.bfloat16 nothing"),
    ],
)
def test_metadata_that_lie(tmp_path, change, message):
    save(tmp_path, states())
    change_metadata(tmp_path, lambda metadata: change(metadata.state_dict_metadata["weight"]))
    reader = Reader(tmp_path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    (index,) = (index for index in metadata.storage_data if index.fqn == "weight")
    with pytest.raises(ibp.FileFormatError, match=message), ibp.open(tensors_of(tmp_path)) as file:
        reader._value(file, index)


def test_a_tensor_is_missing(tmp_path):
    save(tmp_path, states())
    ibp.save(tensors_of(tmp_path), {"other": torch.ones(3)})
    with pytest.raises(CheckpointException, match="has no tensor 'weight', which the checkpoint's metadata name"):
        assert_loaded(tmp_path, {"weight": states()["weight"]})


def test_a_file_is_missing(tmp_path):
    save(tmp_path, states())
    tensors_of(tmp_path).unlink()
    with pytest.raises(CheckpointException, match="No such file"):
        assert_loaded(tmp_path, states())


# ---- ranks ----


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    two = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield two
    two.end()


X, ODD = embedding(ROWS, COLUMNS, BF16), embedding(ROWS + 1, COLUMNS)


def sharded(x, dim):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(dim)])


def saves_shards(rank, directory):
    state = {"rows": sharded(X, 0), "columns": sharded(X, 1), "odd": sharded(ODD, 0), "rank": rank}
    dcp.save(state, storage_writer=Writer(directory))


def loads_shards(rank, directory):
    state = {"rows": sharded(torch.zeros_like(X), 1), "columns": sharded(torch.zeros_like(X), 0)}
    dcp.load(state, storage_reader=Reader(directory))
    return [value.full_tensor() for value in state.values()]


def test_another_number_of_ranks(ranks, tmp_path):
    """Two ranks save shards of rows, of columns, and of uneven rows. One rank loads all, and two load other shards."""
    ranks(saves_shards, tmp_path)
    assert len(list(tmp_path.glob("*.ibp.safetensors"))) == 2
    assert_loaded(tmp_path, {"rows": X, "columns": X, "odd": ODD})
    for loaded in ranks(loads_shards, tmp_path):
        for value in loaded:
            assert_same_bits(value, X)


class _Part(dcp.DefaultLoadPlanner):
    """Gives one tensor to read to."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def resolve_tensor(self, item):
        return self.part


def test_rows_without_the_rest(tmp_path):
    """What a rank does not want is not read: there, the file may be damaged."""
    x = embedding(40_000, COLUMNS, BF16)
    save(tmp_path, {"x": x})
    path = tensors_of(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 100_000] = bytes(100_000)
    path.write_bytes(content)
    reader = Reader(tmp_path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    (index,) = metadata.storage_data
    part = torch.zeros(100, 40, dtype=BF16)
    place = {"storage_offsets": torch.Size([30, 20]), "lengths": torch.Size([100, 40])}
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size([0, 0]), index, **place)
    reader.read_data(LoadPlan([item]), _Part(part)).wait()
    assert_same_bits(part, x[30:130, 20:60])
    with pytest.raises(CheckpointException, match="ChecksumError: .* has another checksum"):
        assert_loaded(tmp_path, {"x": x})


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))


def step(model, optimizer):
    model(torch.ones(4, 128)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saves_training(rank, directory):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    weights, of_optimizer = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": of_optimizer}, storage_writer=Writer(directory))


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def test_training_goes_on(ranks, tmp_path):
    """FSDP2 on two ranks with Adam, saved with flattened names of states, goes on as a plain model on one process."""
    ranks(saves_training, tmp_path)
    model, wanted = net(), net()
    optimizers = [torch.optim.Adam(of.parameters()) for of in (model, wanted)]
    step(wanted, optimizers[1])
    weights, of_optimizer = get_state_dict(model, optimizers[0], options=FLAT)
    assert "state.0.weight.exp_avg" in of_optimizer
    dcp.load({"model": weights, "optimizer": of_optimizer}, storage_reader=Reader(tmp_path), no_dist=True)
    options = {"model_state_dict": weights, "optim_state_dict": of_optimizer, "options": FLAT}
    set_state_dict(model, optimizers[0], **options)
    for _ in range(2):
        for value, of_wanted in zip(model.parameters(), wanted.parameters()):
            torch.testing.assert_close(value, of_wanted, rtol=0, atol=1e-6)
        step(model, optimizers[0])
        step(wanted, optimizers[1])


def saves_later(rank, directory):
    x = torch.full((ROWS, COLUMNS), 1.0)
    future = dcp.async_save({"x": x}, storage_writer=Writer(directory))
    x.fill_(2)
    future.result()


def test_asynchronous_saves(ranks, tmp_path):
    """What changes after the call is not saved."""
    ranks(saves_later, tmp_path)
    assert_loaded(tmp_path, {"x": torch.full((ROWS, COLUMNS), 1.0)})


class _Dies(DefaultSavePlanner):
    def resolve_data(self, item):
        if dist.get_rank() == 1:
            os._exit(1)
        return super().resolve_data(item)


def saves_or_dies(rank):
    try:
        dcp.save({"x": sharded(X + 1, 0)}, storage_writer=Writer(os.environ["DIRECTORY"]), planner=_Dies())
    except BaseException as error:
        return type(error).__name__
    return None


@pytest.mark.slow
def test_a_rank_that_dies(tmp_path, tmp_path_factory, monkeypatch):
    """The others raise, and the checkpoint before is whole."""
    save(tmp_path, {"x": X})
    monkeypatch.setenv("DIRECTORY", str(tmp_path))  # for processes that are forked now
    two = Ranks(2, tmp_path_factory.mktemp("ranks"), timeout=5)
    ((_, name),) = two.survivors(saves_or_dies, 1)
    assert name is not None
    assert_loaded(tmp_path, {"x": X})


# ---- on a GPU ----


def test_on_a_gpu(cuda, tmp_path):
    """A save waits for the work of the current stream, which is not the default one. Rows are compressed and
    decompressed on the GPU, and so are parts of tensors. Tensors in host memory lie between those on the GPU."""
    x = {f"layers.{k}.weight": embedding(ROWS, COLUMNS, BF16, seed=k) for k in range(3)}
    x["transposed"] = embedding(COLUMNS, ROWS).t()
    x["random"] = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    x["small"], x["scalar"], x["empty"] = torch.ones(3), torch.tensor(2.5), torch.empty(0, 4)
    near = {name: tensor.to(cuda) for name, tensor in x.items()}
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        state = {}
        for name in x:
            state[name] = torch.zeros_like(near[name])
            state[f"{name} on the host"] = x[name]
        torch.cuda._sleep(200_000_000)
        for name in x:
            state[name].copy_(near[name])
        save(tmp_path, {**state, "weight:slots": near["layers.0.weight"], "step": 7})
        assert_loaded(tmp_path, {**state, "weight:slots": near["layers.0.weight"], "step": 7})
    with ibp.open(tensors_of(tmp_path)) as file:
        file.verify()
        assert list(file) == list(state)
        assert {"layers.0.weight", "transposed", "transposed on the host"} <= set(file.tables)
        assert len({id(file[f"layers.{k}.weight"].codebook) for k in range(3)}) == 1
    assert_loaded(tmp_path, {**x, **{f"{name} on the host": tensor for name, tensor in x.items()}})
