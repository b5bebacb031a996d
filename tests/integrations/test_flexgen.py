"""FlexGen with compressed weights: its tokens, its weights bit for bit, its devices, and the memory that it takes."""

import csv
import dataclasses
import gc
import json
import sys
import types
import weakref

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.frameworks
pytest.importorskip("flexgen")

from flexgen import flex_opt, pytorch_backend  # noqa: E402
from flexgen.utils import cpu_mem_stats  # noqa: E402

import ibp  # noqa: E402
import ibp.integrations.flexgen as adapter  # noqa: E402
from benchmarks import flexgen_opt as host  # noqa: E402
from benchmarks import flexgen_parts  # noqa: E402
from helpers import assert_same_bits  # noqa: E402

H = host.TINY.input_dim
PROMPT_TOKENS, NEW_TOKENS = 9, 5
NUM_MATRICES = 3 + 6 * host.TINY.num_hidden_layers  # FlexGen loads the token embedding twice
ON_CPU = {"device": "cpu"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A directory with a tiny OPT in FlexGen's format."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("opt")
    host.write_weights(host.TINY, directory, "cpu")
    return directory


def has_memory(tensor):
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, fake and meta tensors
        return False
    return True


@pytest.fixture(autouse=True)
def countable_tensors(monkeypatch):
    """FlexGen counts the memory of every tensor alive, and fails at those without memory that other tests leave."""

    def objects():
        return [held for held in gc.get_objects() if type(held) is torch.Tensor and has_memory(held)]

    monkeypatch.setattr("flexgen.utils.gc", types.SimpleNamespace(get_objects=objects))


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    adapter.close()


@pytest.fixture
def env(tmp_path):
    with host.environment("cpu", tmp_path) as env:
        yield env


def make_policy(percent=(0, 100, 100, 0, 100, 0), batches=1, **others):
    return host.policy(percent, batch=2, batches=batches, on_gpu=False, **others)


def load(env, weights, policy=None):
    return flex_opt.OptLM(host.TINY, env, str(weights), policy or make_policy())


def generate(env, weights, policy):
    prompts = np.random.default_rng(1).integers(5, 1000, (2 * policy.num_gpu_batches, PROMPT_TOKENS))
    return load(env, weights, policy).generate(prompts, max_new_tokens=NEW_TOKENS).copy()


def file_of(weights, name):
    return torch.from_numpy(np.load(weights / f"tiny-np/decoder.{name}"))


def compressed(env, x, **options):
    compressor = adapter.WeightCompressor(ON_CPU | options)
    return adapter.CompressedWeight(lambda x: compressor.compress("weight", x), x, env.cpu)


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "percent, fields",
    [
        ((0, 100, 100, 0, 100, 0), {}),
        ((0, 100, 100, 0, 100, 0), {"batches": 2}),
        ((0, 100, 100, 0, 100, 0), {"overlap": False, "sep_layer": False}),
        ((30, 70, 0, 100, 0, 100), {}),
        ((0, 100, 50, 50, 100, 0), {}),  # a cache on two devices
        ((0, 100, 50, 50, 100, 0), {"cpu_cache_compute": True}),
    ],
    ids=["all", "batches", "no overlap", "part on the GPU", "mixed cache", "mixed cache, CPU"],
)
def test_tokens(env, weights, percent, fields):
    policy = make_policy(percent, **fields)
    expected = generate(env, weights, policy)
    assert len({tuple(row) for row in expected.tolist()}) == len(expected)
    with adapter.enable():
        assert np.array_equal(generate(env, weights, policy), expected)


def test_weights_are_those_of_the_files(env, weights):
    adapter.enable(**ON_CPU)
    model = load(env, weights)
    matrices = host.matrices_of(model)
    assert len(matrices) == NUM_MATRICES and all(type(weight) is adapter.CompressedWeight for weight in matrices)
    query, fc1 = model.weight_home[1].val[0], model.weight_home[2].val[0]
    assert_same_bits(query.copy(env.gpu).data, file_of(weights, "layers.0.self_attn.q_proj.weight"))
    assert_same_bits(fc1.copy(env.gpu).data, file_of(weights, "layers.0.fc1.weight"))
    bias = model.weight_home[1].val[1]
    assert type(bias) is pytorch_backend.TorchTensor
    assert_same_bits(bias.data, file_of(weights, "layers.0.self_attn.q_proj.bias"))
    assert all(weight.data.layout == "packed" and weight.data.savings > 0.13 for weight in matrices)


def test_weights_elsewhere_stay(env, weights, tmp_path):
    """On the GPU, on the disk, and quantised by FlexGen: as FlexGen makes them."""
    with_disk = dataclasses.replace(env, disk=SynchronousDisk(tmp_path / "disk"))
    specs = [((512, H), np.float16, str(weights / "tiny-np/decoder.layers.0.fc1.weight"))] * 3
    adapter.enable(**ON_CPU)
    thirds = make_policy((34, 33, 100, 0, 100, 0))
    plain, devices = pytorch_backend.TorchTensor, [with_disk.disk, env.cpu, env.gpu]
    homes = flex_opt.init_weight_list(specs, thirds, with_disk)
    assert [type(weight) for weight in homes] == [plain, adapter.CompressedWeight, plain]
    assert [weight.device for weight in homes] == devices
    homes = flex_opt.init_weight_list(specs, dataclasses.replace(thirds, compress_weight=True), with_disk)
    assert [type(weight) for weight in homes] == [plain] * 3
    assert [weight.device.base_device for weight in homes] == devices


def test_a_layer_is_decoded_in_one_call(env, weights, monkeypatch):
    adapter.enable(**ON_CPU)
    model, calls = load(env, weights), []
    decompress = ibp.decompress
    monkeypatch.setattr(
        ibp, "decompress", lambda tables, **others: calls.append(len(tables)) or decompress(tables, **others)
    )
    prompts = np.full((2, 4), 7)
    model.generate(prompts, max_new_tokens=1)
    assert calls == [2, 4, 2, 4, 2, 1]
    adapter.close()  # the model goes on
    model.generate(prompts, max_new_tokens=1)
    assert sum(calls) == 2 * NUM_MATRICES and len(calls) == 6 + NUM_MATRICES


def test_a_layer_that_fails_leaves_nothing(env, weights, monkeypatch):
    adapter.enable(**ON_CPU)
    model = load(env, weights)
    monkeypatch.setattr(env.gpu, "allocate", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.layers[1].load_weight(model.weight_home[1], flex_opt.ValueHolder(), 0)
    assert adapter._loading is None


def test_memory(env, weights, monkeypatch):
    """A layer's raw copy goes when its tables are there, and FlexGen's own count sees the rest."""
    held, raw = [], []
    original = flex_opt.init_weight_list
    monkeypatch.setattr(
        flex_opt,
        "init_weight_list",
        lambda *arguments: [held.append(weakref.ref(weight.data)) or weight for weight in original(*arguments)],
    )
    gc.collect()
    empty = cpu_mem_stats()
    plain = load(env, weights)
    raw_bytes = cpu_mem_stats() - empty
    assert raw_bytes >= sum(weight.bytes for weight in host.matrices_of(plain))
    del plain
    gc.collect()
    held.clear()
    adapter.enable(**ON_CPU)
    model = load(env, weights)
    raw = [tensor() for tensor in held if tensor() is not None]
    assert len(held) > len(raw) > 0 and all(tensor.dim() == 1 for tensor in raw)
    tables = [weight.data for weight in host.matrices_of(model)]
    assert sum(table.nbytes for table in tables) < 0.88 * sum(table.original_bytes for table in tables)
    gc.collect()
    assert cpu_mem_stats() - empty < 0.92 * raw_bytes


# ---- one weight ------------------------------------------------------------------------------------------------------


class SynchronousDisk(pytorch_backend.TorchDisk):
    """FlexGen's disk without its threads, which need a GPU."""

    def __init__(self, path):
        super().__init__(str(path), num_copy_threads=0)

    def submit_copy(self, dst, dst_indices, src, src_indices):
        source = pytorch_backend.map_to_torch_tensor(src, src_indices)
        pytorch_backend.map_to_torch_tensor(dst, dst_indices).copy_(source)


SLICES = [
    None,
    (),
    (slice(0, 300),),
    (slice(17, 41),),
    (slice(0, 300), slice(0, H)),
    (slice(3, 250), slice(0, H)),
    (slice(3, 250), slice(5, 99)),
    (slice(0, 300), slice(H - 1, H)),
    (slice(9, 9),),
    (slice(9, 9), slice(2, 7)),
]


@pytest.mark.parametrize("indices", SLICES, ids=str)
@pytest.mark.parametrize("x", [torch.randn(300, H).half(), torch.randn(300, H, 3)], ids=["float16", "float32"])
def test_copies(env, x, indices):
    """As FlexGen's own tensor copies, whatever the shape."""
    plain, weight = pytorch_backend.TorchTensor.create_from_torch(x, env.cpu), compressed(env, x)
    expected, got = plain.copy(env.gpu, indices), weight.copy(env.gpu, indices)
    assert type(got) is pytorch_backend.TorchTensor and got.device is env.gpu and got.data.is_contiguous()
    assert (tuple(got.shape), got.dtype) == (tuple(expected.shape), expected.dtype)
    assert_same_bits(got.data, expected.data)


def test_it_answers_what_flexgen_asks(env, tmp_path):
    x = torch.randn(64, H).half()
    plain, weight = pytorch_backend.TorchTensor.create_from_torch(x, env.cpu), compressed(env, x)
    assert (weight.shape, weight.dtype, weight.bytes, weight.device) == (x.shape, x.dtype, plain.bytes, env.cpu)
    assert weight.name.startswith("t_") and "CompressedWeight(TorchTensor(shape=" in str(weight)
    copied, is_copy = weight.smart_copy(env.gpu)
    assert is_copy and copied.device is env.gpu
    here, is_copy = weight.smart_copy(env.cpu)  # where it is already
    assert is_copy and type(here.data) is torch.Tensor
    assert_same_bits(here.data, x)
    assert weight.move(env.cpu) is weight
    moved = weight.move(env.gpu)
    assert weight.data is None and weight.device is None and "device=None" in str(weight)
    assert_same_bits(moved.data, x)


@pytest.mark.parametrize("indices", [None, (slice(4, 20),), (slice(4, 20), slice(3, 9))], ids=str)
def test_to_disk(env, tmp_path, indices):
    x, disk = torch.randn(64, H).half(), SynchronousDisk(tmp_path)
    copied = compressed(env, x).copy(disk, indices)
    assert_same_bits(torch.from_numpy(np.load(copied.data)), x[indices] if indices else x)
    copied.delete()


def test_other_values(env, tmp_path):
    x = torch.randn(64, H).half()
    weight = compressed(env, x)
    weight.load_from_np(2 * x.float().numpy())
    assert_same_bits(weight.copy(env.gpu).data, 2 * x)
    np.save(tmp_path / "x.npy", x.numpy())
    weight.load_from_np_file(tmp_path / "x.npy")
    assert_same_bits(weight.copy(env.gpu).data, x)
    with pytest.raises(RuntimeError):
        weight.load_from_np(np.zeros((64, H + 1), np.float16))
    assert_same_bits(weight.copy(env.gpu).data, x)


def test_what_cannot_be_copied(env):
    weight = compressed(env, torch.randn(64, H).half())
    with pytest.raises(TypeError, match="compressed device; wanted a GPU, the CPU or a disk"):
        weight.copy(env.gpu.compressed_device)
    with pytest.raises(ValueError, match="wanted slices without a step"):
        weight.copy(env.gpu, (slice(0, 10, 2),))


# ---- codebooks -------------------------------------------------------------------------------------------------------


def test_a_kind_shares_a_codebook():
    compressor = adapter.WeightCompressor(ON_CPU)
    xs = [(torch.randn(64, H) * 0.02).half() for _ in range(4)]
    xs[2] = torch.randint(0, 5, (64, H)).half()  # of which the others' codebook saves less than its own
    tables = [compressor.compress(f"decoder.layers.{i}.fc1.weight", x) for i, x in enumerate(xs)]
    assert tables[0].codebook is tables[1].codebook is not tables[2].codebook
    assert tables[2].stored_bytes <= 1.02 * ibp_bytes(xs[2])
    for table, x in zip(tables, xs):
        assert_same_bits(table.decompress(), x)
    other = compressor.compress("decoder.layers.0.fc2.weight", xs[0])
    assert other.codebook is not tables[0].codebook
    assert compressor.compress("decoder.layers.9.fc1.weight", xs[0][:32]).codebook is not tables[3].codebook


def ibp_bytes(x):
    return adapter.WeightCompressor(ON_CPU).compress("alone", x).stored_bytes


def test_options_reach_compress():
    x = (torch.randn(256, H) * 0.02).half()
    table = adapter.WeightCompressor({"scheme": "ibp", "row_bytes": 256, "layout": "slots"}).compress("w", x, **ON_CPU)
    assert (table.scheme, table.row_bytes, table.layout) == ("ibp", 256, "slots")
    clustered = adapter.WeightCompressor({"clusters": 2} | ON_CPU)
    one, two = (clustered.compress(f"w.{i}", torch.cat([x, x.to(torch.int16).half() + 1])) for i in range(2))
    assert one.codebook is two.codebook
    with pytest.raises(TypeError, match="codebook, colour: no such option; wanted some of .*tau"):
        adapter.enable(colour=1, codebook=one.codebook)


# ---- enabling --------------------------------------------------------------------------------------------------------


def seams():
    layers = [getattr(flex_opt, name).load_weight for name in ("InputEmbed", "SelfAttention", "MLP", "OutputEmbed")]
    return [flex_opt.init_weight_list, *layers]


def test_enabling_and_disabling(env, weights):
    own = seams()
    enabled = adapter.enable()
    once = seams()
    assert all(a is not b for a, b in zip(own, once))
    enabled.close()
    assert seams() == own
    adapter.enable()
    with adapter.enable(scheme="ibp", **ON_CPU):
        assert seams()[0].__wrapped__ is own[0]
        model = load(env, weights)
        assert {weight.data.scheme for weight in host.matrices_of(model)} <= {"ibp", "raw"}
    assert seams() == own
    adapter.close()
    assert seams() == own
    with pytest.raises(TypeError), adapter.enable(colour=1):
        pass
    assert seams() == own
    assert {type(weight) for weight in host.matrices_of(load(env, weights))} == {pytorch_backend.TorchTensor}


COMMAND = (
    "--model tiny --percent 0 100 100 0 100 0 --gpu-batch-size 2 --prompt-len 8 --gen-len 3 --pin-weight 0".split()
)


def test_the_command(env, weights, tmp_path, monkeypatch, capsys):
    """FlexGen's own command from its arguments to its log, with stand-ins for what needs a GPU or a network."""

    class Tokenizer:
        from_pretrained = classmethod(lambda cls, name, **others: cls())

        def __call__(self, prompts, padding, max_length):
            return types.SimpleNamespace(input_ids=[[7] * max_length for _ in prompts])

        def batch_decode(self, ids, skip_special_tokens):
            return [str(row.tolist()) for row in ids]

    loaded = []
    monkeypatch.setattr(flex_opt, "AutoTokenizer", Tokenizer)
    monkeypatch.setattr(flex_opt, "TorchDevice", flexgen_parts.cpu_device(flex_opt.TorchDevice))
    monkeypatch.setattr(flex_opt, "TorchDisk", SynchronousDisk)
    monkeypatch.setattr(flex_opt, "get_opt_config", lambda name: host.TINY)
    init = flex_opt.OptLM.init_all_weights
    monkeypatch.setattr(
        flex_opt.OptLM,
        "init_all_weights",
        lambda model: init(model) or loaded.extend(type(weight) for weight in host.matrices_of(model)),
    )
    arguments = [
        *COMMAND,
        *("--path", str(weights), "--offload-dir", str(tmp_path / "disk"), "--log-file", str(tmp_path / "log")),
    ]

    def printed(run):
        loaded.clear()
        run()
        text = capsys.readouterr().out
        return text[text.index("Outputs:") : text.index("TorchDevice")]

    def flexgens_own():
        parser = flex_opt.argparse.ArgumentParser()
        flex_opt.add_parser_arguments(parser)
        flex_opt.run_flexgen(parser.parse_args(arguments))

    expected = printed(flexgens_own)
    assert set(loaded) == {pytorch_backend.TorchTensor}
    own = seams()
    assert printed(lambda: adapter.main(arguments)) == expected and "7, 7, 7" in expected
    assert set(loaded) == {adapter.CompressedWeight} and seams() == own
    assert "total throughput" in (tmp_path / "log").read_text()
    monkeypatch.setattr(sys, "argv", ["flexgen", *arguments])
    assert printed(adapter.main) == expected
    with pytest.raises(SystemExit):
        adapter.main(["--percent", "1", "2"])
    assert "--percent has 2 numbers; wanted 6" in capsys.readouterr().err


def test_the_benchmark(tmp_path, capsys):
    assert host.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    with open(tmp_path / "flexgen_opt.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["dtype"] for row in rows[::2]] == ["bfloat16", "float16"]
    for plain, coded, saved in ((*rows[:2], 0.3), (*rows[2:], 0.14)):
        assert (plain["arm"], coded["arm"]) == ("FlexGen", "FlexGen, ibp")
        assert float(plain["savings"]) == 0 and float(coded["savings"]) > saved
        assert int(coded["host_bytes"]) < (1.01 - saved) * int(plain["host_bytes"])
    for row in rows:
        assert all(float(row[name]) > 0 for name in ("gbps", "token_s", "prefill_s", "load_s"))
        assert float(row["request_s"]) == pytest.approx(float(row["prefill_s"]) + 11 * float(row["token_s"]), rel=1e-3)


def test_intervals():
    assert host.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)] and host.union([]) == []
    assert host.length([(0, 2), (1, 3), (1, 2), (7, 9)]) == 5
    assert host.length_of_both([(0, 4), (6, 8)], [(3, 7), (3, 5)]) == 2
    assert host.length_of_both([(0, 1)], [(1, 2)]) == 0 == host.length_of_both([], [(0, 1)])


HTOD, GATHER, PRODUCT = "Memcpy HtoD (Pinned -> Device)", "void ibp::gather_items<Decoder>", "sm90_gemm"
# What the GPU does in a layer of 100 us: (name, start, microseconds, bytes).
LAYER = ((HTOD, 5, 60, 1000), (GATHER, 50, 20, 0), (PRODUCT, 10, 30, 0), (PRODUCT, 80, 10, 0))


def write_trace(path, num_layers, layer=LAYER):
    """Writes a trace as torch.profiler does. The host launches all work of a layer at its start. The GPU's clock is 7
    us behind, so that the first copy of a layer seems to start before the wait of the layer before it ends."""
    events = [{"ph": "M", "name": "process_name", "args": {}}]
    for number in range(num_layers):
        at = 100.0 * number
        for name, start, dur, num_bytes in layer:
            args = {"correlation": len(events), "bytes": num_bytes}
            launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 1, "dur": 2, "args": args}
            kind = "gpu_memcpy" if name == HTOD else "kernel"
            events += [
                {"ph": "X", **launch},
                {"ph": "X", "cat": kind, "name": name, "ts": at + start - 7, "dur": dur, "args": args},
            ]
        wait = {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": at + 90, "dur": 10}
        events.append({"ph": "X", **wait, "args": {"correlation": 10**6 + number}})
    events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 1e5, "dur": 1})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_is_divided_into_layers(tmp_path):
    work, waits = host.read_trace(write_trace(tmp_path / "trace.json", 3))
    layers = host.by_layer(work, waits, 310)  # The first layer begins 10 us earlier.
    assert [len(own) for own, _ in layers] == [4, 4, 4] and [us for _, us in layers] == [110, 100, 100]
    times = host.times_of(*layers[1], True)
    assert [times[name] for name in host.TIMES] == pytest.approx([0.1, 0.06, 0.02, 0.04, 0.03, 0.025, 0.06])
    assert (times["link_binds"], times["copied_bytes"], times["kernels"]) == (1, 1000, 4)
    reading = host.times_of(*layers[1], False)  # ibp's kernels read pinned memory, and so keep the link busy.
    assert [reading[name] for name in host.TIMES] == pytest.approx([0.1, 0.065, 0, 0.04, 0.03, 0.025, 0.065])
    assert host.by_layer([], waits, 310) == []


def test_the_trace_of_the_benchmark(tmp_path, monkeypatch):
    """On the CPU nothing is traced; with a trace of six layers there is a row for the layers of each class."""
    argv = ["--trace", "--device", "cpu", "--quick", "--out", str(tmp_path)]
    (tmp_path / "flexgen_opt.csv").write_text("rows of the other part")

    def rows():
        assert (tmp_path / "flexgen_opt.csv").read_text() == "rows of the other part"
        with open(tmp_path / "flexgen_trace.csv", newline="") as file:
            return list(csv.DictReader(file))

    assert host.main(argv) == 0
    assert [row["step"] for row in rows()] == 4 * ["3", "4", "5"] and {row["part"] for row in rows()} == {"all"}
    assert all(
        row["link_ms"] == "0" and row["ms"] == row["idle_ms"] and float(row["untraced_ms"]) > 0 for row in rows()
    )
    trace = host.read_trace(write_trace(tmp_path / "trace.json", 2 + 2 * host.TINY.num_hidden_layers))
    traced = host.traced

    def with_work(*arguments):
        tokens, found, untraced_s = traced(*arguments)
        return tokens, {step: (*trace, 600e-6) for step in found}, untraced_s

    monkeypatch.setattr(host, "traced", with_work)
    monkeypatch.setattr(host, "DTYPES", (torch.float16,))
    assert host.main(argv) == 0
    parts = {row["part"]: row for row in rows() if row["step"] == "4" and row["arm"] == "FlexGen, ibp"}
    assert {part: row["layers"] for part, row in parts.items()} == {
        **{"all": "6", "InputEmbed": "1", "SelfAttention": "2", "MLP": "2", "OutputEmbed": "1"}
    }
    assert len(rows()) == 2 * 3 * 5
    for part, row in parts.items():
        assert float(row["ms"]) == pytest.approx(0.1 * int(row["layers"]), rel=1e-3), part
        assert int(row["copied_bytes"]) == 1000 * int(row["layers"])


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_env(cuda, tmp_path_factory):
    """FlexGen's own devices. Its disk pins 8 GiB."""
    with host.environment(cuda, tmp_path_factory.mktemp("disk")) as env:
        yield env


@pytest.mark.parametrize("percent", [(0, 100, 100, 0, 100, 0), (30, 70, 50, 50, 0, 100)], ids=str)
@pytest.mark.parametrize("path", ["copy", "gpu"])
def test_tokens_on_a_gpu(gpu_env, weights, percent, path):
    policy = host.policy(percent, batch=2)
    expected = generate(gpu_env, weights, policy)
    with adapter.enable(path=path):
        assert np.array_equal(generate(gpu_env, weights, policy), expected)


@pytest.mark.parametrize("pin_weight", [True, False])
def test_weights_on_a_gpu(gpu_env, weights, pin_weight):
    adapter.enable()
    model = load(gpu_env, weights, host.policy(batch=2, pin_weight=pin_weight))
    assert {weight.data.is_pinned() for weight in host.matrices_of(model)} == {pin_weight}
    fc1, expected = model.weight_home[2].val[0], file_of(weights, "layers.0.fc1.weight")
    assert fc1.copy(gpu_env.gpu).data.is_cuda
    for indices in SLICES:
        in_range = [slice(min(s.start, n), min(s.stop, n)) for s, n in zip(indices or (), fc1.shape)]
        got = fc1.copy(gpu_env.gpu, tuple(in_range)).data.cpu()
        assert_same_bits(got, expected[tuple(in_range)].contiguous())


def test_a_layer_comes_on_the_current_stream_without_waiting(gpu_env, weights):
    adapter.enable()
    model = load(gpu_env, weights, host.policy(batch=2))
    layer, home = model.layers[1], model.weight_home[1]
    layer.load_weight(home, flex_opt.ValueHolder(), 0)  # what a table keeps on the GPU comes with the first call
    torch.cuda.synchronize()
    read, stream, late = flex_opt.ValueHolder(), torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000_000)
            layer.load_weight(home, read, 0)
            late.record()
        returned_early = not late.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert returned_early, "the call came back only when the GPU was done"
    late.synchronize()  # the layer's weights are there when the stream is through
    assert_same_bits(read.val[0][0].data.cpu(), file_of(weights, "layers.0.self_attn.q_proj.weight"))
