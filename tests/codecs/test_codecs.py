"""General codecs: tensors coded as a whole, in memory, in files, and by the command line."""

import contextlib
import copy
import importlib.util
import io
import pickle
import sys
import types

import numpy as np
import pytest
import torch

import ibp
import reference_files
from fake_nvcomp import FakeCodec, as_array
from helpers import assert_same_bits, bytes_of
from ibp._cli.main import main
from ibp._files import FileWriter
from ibp.codecs import _codec

PACKAGES = {"zstd": "zstandard", "lz4": "lz4"}
ABSENT = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None]
CPU_SCHEMES = ("zstd", "zstd:9", "zstd:-5", "lz4", "lz4:9")
NVCOMP_SCHEMES = tuple(f"nvcomp:{kind}" for kind in _codec._ALGORITHMS)
PAGEABLE = {"memory": "host"}


def needs(codec):
    """A mark of tests that the codec's package must be there for."""
    return pytest.mark.skipif(codec in ABSENT, reason=f"could not import {PACKAGES[codec]!r}")


def each(schemes):
    """Parameters, of which those without their package are skipped."""
    return [pytest.param(scheme, marks=needs(scheme.partition(":")[0])) for scheme in schemes]


def tensors():
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 9, (40, 500), generator=generator)
    return {
        "compressible": few,
        "transposed": few.t(),
        "bfloat16": torch.randn(100, 33, generator=generator).bfloat16(),
        "bool": few > 3,
        "complex": torch.complex(few[:3].float(), few[3:6].float()).conj(),
        "random bytes": torch.randint(0, 256, (70001,), dtype=torch.uint8, generator=generator),
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0, 5, dtype=torch.int16),
    }


@pytest.mark.parametrize("scheme", each(CPU_SCHEMES))
@pytest.mark.parametrize("name", tensors())
def test_round_trip(scheme, name):
    x = tensors()[name]
    whole = ibp.compress(x, scheme=scheme, chunk_bytes=4096, **PAGEABLE)
    assert isinstance(whole, ibp.codecs.WholeTensor) and whole.codec == whole.scheme == scheme.partition(":")[0]
    assert (whole.shape, whole.dtype, whole.device) == (x.shape, x.dtype, torch.device("cpu"))
    assert whole.original_bytes == x.numel() * x.dtype.itemsize and whole.numel() == x.numel()
    assert whole.stored_bytes <= whole.original_bytes
    assert_same_bits(ibp.decompress(whole), x.resolve_conj())
    assert_same_bits(whole.decompress(device="cpu"), x.resolve_conj())
    assert ibp.deltas.fingerprint(whole) == ibp.deltas.fingerprint(x)


@needs("zstd")
def test_out_and_many():
    x = tensors()["compressible"]
    whole, table = ibp.compress(x, scheme="zstd", **PAGEABLE), ibp.compress(x, scheme="planes", **PAGEABLE)
    for out in (torch.empty_like(x), torch.empty(x.shape[::-1], dtype=x.dtype).t(), torch.empty(4, 10, 500).long()):
        assert ibp.decompress(whole, out=out) is out
        assert_same_bits(out.reshape(x.shape), x)
    outs = [None, torch.empty_like(x), None]
    found = ibp.decompress([whole, table, whole], out=outs)
    assert found[1] is outs[1] and all(torch.equal(one, x) for one in found)
    with pytest.raises(TypeError, match="out has dtype torch.int32; wanted torch.int64"):
        whole.decompress(out=x.int())
    with pytest.raises(ValueError, match="max_sms and path are for tables; an ibp.WholeTensor has neither"):
        ibp.decompress(whole, path="gpu")


@needs("zstd")
def test_what_it_saves():
    x = torch.arange(1 << 16).view(64, -1)
    whole = ibp.compress(x, scheme="zstd", **PAGEABLE)
    assert whole.stored_bytes == whole.blocks.numel() and whole.savings == 1 - whole.stored_bytes / x.nbytes > 0.5
    assert whole.nbytes == whole.stored_bytes + 8 * len(whole.offsets)
    assert (whole.size(), whole.size(0), whole.dim(), whole.ndim, len(whole), whole.element_size()) == (
        (x.shape), 64, 2, 2, 64, 8,
    )  # fmt: skip
    assert "codec='zstd'" in repr(whole) and f"of {x.nbytes:,}), stored_bytes={whole.stored_bytes:,}, savings=" in repr(
        whole
    )
    smaller = ibp.compress(x, scheme="zstd:19", **PAGEABLE)
    assert smaller.stored_bytes < ibp.compress(x, scheme="zstd:-50", **PAGEABLE).stored_bytes
    assert not whole.is_pinned() and whole.cpu() is whole


@needs("lz4")
def test_copies():
    x = tensors()["compressible"]
    whole = ibp.compress(x, scheme="lz4", chunk_bytes=8192, **PAGEABLE)
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(whole)), copy.deepcopy(whole), torch.load(file)):
        assert other is not whole and repr(other) == repr(whole)
        assert_same_bits(other.decompress(), x)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_they_are_no_tensors():
    none = {"blocks": torch.empty(0, dtype=torch.uint8), "offsets": torch.zeros(1, dtype=torch.int64)}
    coded = ibp.codecs.WholeTensor(shape=(0,), dtype=torch.int8, codec="zstd", block_bytes=8, options={}, **none)
    for call, error, what in (
        (lambda: coded + 1, TypeError, "takes part in no arithmetic"),
        (lambda: coded.mean(), AttributeError, "has no 'mean'"),
        (lambda: torch.as_tensor(coded), TypeError, "has no elements in memory"),
    ):
        with pytest.raises(error, match=rf"a tensor that is coded as a whole {what}: call ibp.decompress\(coded\) for"):
            call()


@needs("zstd")
def test_rows_are_refused():
    x = tensors()["compressible"]
    whole = ibp.compress(x, scheme="zstd", **PAGEABLE)
    ids = torch.tensor([1])
    for call in (
        lambda: ibp.index_select(whole, ids),
        lambda: whole.index_select(ids),
        lambda: whole.update_(ids, x[:1]),
        lambda: whole.prefetch(ids),
        lambda: whole[0],
        lambda: list(whole),
    ):
        with pytest.raises(TypeError, match="coded by 'zstd' has no rows that decode alone"):
            call()


@pytest.mark.parametrize(
    "scheme, options, message",
    [
        ("nvcomp:brotli", {}, "wanted one of"),
        ("zstd:fast", {}, "wanted one of"),
        ("zstd:99", {}, "the level of 'zstd' is 99; wanted -100 to 22"),
        ("lz4:0", {}, "the level of 'lz4' is 0; wanted 1 to 12"),
        ("nvcomp:ans:3", {}, "has no levels"),
        ("nvcomp:cascaded:r1d0b1", {}, "wanted one of"),
        ("nvcomp:lz4:bytes", {}, "wanted one of"),
        ("zstd", {"chunk_bytes": 100}, "chunk_bytes is 100; 'zstd' takes a multiple of 8 from 4096"),
        ("nvcomp:ans", {"chunk_bytes": 100}, "chunk_bytes is 100; 'nvcomp:ans' takes a multiple of 16"),
        ("zstd", {"tau": 0.8}, "tau is given, but 'zstd' codes whole tensors"),
        ("zstd", {"level": "fast"}, "level is given, but"),
        ("lz4", {"clusters": 2}, "clusters is given, but"),
        ("nvcomp:ans", {"layout": "packed"}, "layout is given, but 'nvcomp:ans' codes whole tensors"),
        ("nvcomp:anz", {}, r"scheme is 'nvcomp:anz' \(did you mean 'nvcomp:ans'"),
        ("ZST", {}, r"scheme is 'ZST' \(did you mean 'zstd'\?\); wanted one of \['auto'"),
        ("plane", {}, r"scheme is 'plane' \(did you mean 'planes'\?\); wanted one of \['auto'"),
    ],
)
def test_wrong_arguments(scheme, options, message):
    with pytest.raises(ValueError, match=message):
        ibp.compress(torch.arange(10), scheme=scheme, **options)


@pytest.fixture
def no_packages(monkeypatch):
    _codec._module.cache_clear()
    for name in ("zstandard", "lz4.block", "nvidia.nvcomp"):
        monkeypatch.setitem(sys.modules, name, None)
    yield
    _codec._module.cache_clear()


@pytest.mark.parametrize("scheme, package", [*PACKAGES.items(), ("nvcomp:ans", "nvidia-nvcomp-cu13")])
def test_absent_packages(no_packages, scheme, package):
    wanted = f"the codec {scheme!r} needs the package {package}: type `pip install {package}` [(]"
    with pytest.raises(ImportError, match=wanted):
        ibp.compress(torch.arange(1000), scheme=scheme)


@needs("zstd")
def test_what_an_absent_package_has_coded(request, tmp_path):
    whole = ibp.compress(torch.arange(1000), scheme="zstd", **PAGEABLE)
    ibp.save(tmp_path / "x.safetensors", whole)
    request.getfixturevalue("no_packages")
    with pytest.raises(ImportError, match="needs the package zstandard"):
        whole.decompress()
    with pytest.raises(ibp.FileFormatError, match="the codec 'zstd' needs the package zstandard"):
        ibp.load(tmp_path / "x.safetensors")


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", each(["zstd", "lz4"]))
def test_damaged_blocks(scheme):
    x = torch.arange(20000)
    whole = ibp.compress(x, scheme=scheme, chunk_bytes=1 << 15, **PAGEABLE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        blocks = whole.blocks.clone()
        at = int(torch.randint(len(blocks) - 4, (1,), generator=generator))
        blocks[at : at + 4] = torch.randint(0, 256, (4,), generator=generator, dtype=torch.uint8)
        damaged = ibp.codecs.WholeTensor(**{**whole.__getstate__(), "blocks": blocks})
        try:
            found = damaged.decompress()
            assert found.shape == x.shape  # bytes of the tensor itself may be others, without checksums
        except ibp.CorruptTableError as error:
            assert f"of a tensor coded by {scheme!r} is damaged" in str(error)
    offsets = whole.offsets.clone()
    offsets[1] += 1
    with pytest.raises(ibp.CorruptTableError):
        ibp.codecs.WholeTensor(**{**whole.__getstate__(), "offsets": offsets}).decompress()


@needs("zstd")
def test_a_frame_of_another_size_is_refused():
    """Of zstd the frame itself says how long it is: nothing is allocated for one that lies."""
    import zstandard

    whole = ibp.compress(torch.arange(1000), scheme="zstd", **PAGEABLE)
    bomb = torch.frombuffer(bytearray(zstandard.compress(bytes(1 << 24))), dtype=torch.uint8)
    state = {**whole.__getstate__(), "blocks": bomb, "offsets": torch.tensor([0, len(bomb)])}
    with pytest.raises(ibp.CorruptTableError, match="it stands for 16777216 bytes; wanted 8000"):
        ibp.codecs.WholeTensor(**state).decompress()


def nvcomp_options(chunk_bytes, data_type):
    return {"codec_chunk_bytes": chunk_bytes, "codec_data_type": data_type}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"offsets": torch.tensor([0, 5])}, "offsets do not rise from 0 to"),
        ({"offsets": torch.tensor([0])}, "offsets is torch.int64 .1.; wanted int64 .2."),
        ({"block_bytes": 0}, "block_bytes is 0; wanted a multiple of 8"),
        ({"shape": (1 << 62, 8)}, "too many bytes; wanted at most 2.63 - 1"),
        ({"blocks": torch.zeros(8000)}, "blocks is torch.float32 .8000.*; wanted contiguous torch.uint8"),
        (
            {"blocks": torch.zeros(1, dtype=torch.uint8).expand(8000), "offsets": torch.tensor([0, 8000])},
            "blocks is torch.uint8 .8000. on cpu, strides .0,.; wanted contiguous",
        ),
        ({"shape": (-1,)}, "that of no tensor"),
        ({"codec": "zip"}, "codec is 'zip'; wanted one of"),
        ({"options": {"codec_key": "1"}}, "'zstd' has the options .'codec_key'.; wanted .."),
        ({"codec": "nvcomp:ans"}, "'nvcomp:ans' has the options ..; wanted .'codec_chunk_bytes', 'codec_data_type'."),
        ({"codec": "nvcomp:ans", "options": nvcomp_options("1e9", "|u1")}, "chunk_bytes is 1e9"),
        ({"codec": "nvcomp:ans", "options": nvcomp_options("65536", "<f16")}, "the type is '<f16'"),
    ],
)
def test_wrong_states(change, message):
    state = {"shape": (1000,), "dtype": torch.int64, "codec": "zstd", "block_bytes": 1 << 20, "options": {}}
    state |= {"blocks": torch.zeros(8000, dtype=torch.uint8), "offsets": torch.tensor([0, 8000])}
    assert ibp.codecs.WholeTensor(**state).savings == 0
    with pytest.raises(ValueError, match=message):
        ibp.codecs.WholeTensor(**{**state, **change})


# ---- files ----------------------------------------------------------------------------------------------------------


def saved(tmp_path):
    items = {name: ibp.compress(x, scheme="zstd", chunk_bytes=4096, **PAGEABLE) for name, x in tensors().items()}
    other = "zstd:1" if "lz4" in ABSENT else "lz4:5"
    items |= {"other": ibp.compress(tensors()["transposed"], scheme=other, **PAGEABLE)}
    items |= {"table": ibp.compress(tensors()["compressible"], **PAGEABLE), "plain": torch.arange(5)}
    path = tmp_path / "x.safetensors"
    ibp.save(path, items, content=True)
    originals = {**tensors(), "other": tensors()["transposed"], "table": tensors()["compressible"]}
    return path, {name: x.resolve_conj() for name, x in originals.items()}


@needs("zstd")
def test_files(tmp_path):
    path, originals = saved(tmp_path)
    with ibp.open(path) as file:
        assert file.verify(content=True) > 0
        for name, x in originals.items():
            assert_same_bits(file[name].decompress(), x)
        info = file.info("compressible")
        assert (info.codec, info.scheme, info.dtype, info.shape) == ("zstd", None, torch.int64, (40, 500))
        assert info.num_bytes == originals["compressible"].nbytes
    loaded = ibp.load(path, verify=True)
    for name, x in originals.items():
        assert_same_bits(loaded[name].decompress(), x)
    ibp.save(path, loaded, shard_bytes=10000)
    with ibp.open(tmp_path) as file:
        assert_same_bits(file["other"].decompress(), originals["other"])


@needs("zstd")
def test_files_are_as_the_format_says(tmp_path):
    path, originals = saved(tmp_path)
    file = reference_files.File.at(path)
    for name in ("compressible", "random bytes", "other", "empty", "scalar"):
        dtype, shape, data = reference_files.decode([file], name)
        x = originals[name]
        assert shape == list(x.shape) and data == bytes_of(x).numpy().tobytes()


def write_file(path, line, blocks, offsets):
    with FileWriter(path) as writer:
        writer._add_line("ibp.table.x", line)
        for part, dtype, array in (("blocks", "U8", blocks), ("offsets", "U64", offsets)):
            with writer.part(f"x:{part}", dtype) as write:
                write(np.asarray(array, {"U8": "u1", "U64": "<u8"}[dtype]))


@needs("zstd")
@pytest.mark.parametrize(
    "line, offsets, message",
    [
        ("dtype=U8 shape=64 codec=zstd block_bytes=0", [0, 64], "block_bytes is '0'"),
        ("dtype=U8 shape=64 codec=zstd block_bytes=1", [0, 64], "'x:offsets' is U64"),
        ("dtype=U8 shape=64 codec=zstd block_bytes=64", [0, 1 << 40], "'x:blocks' is U8"),
        ("dtype=U8 shape=64 codec=zstd block_bytes=64", [0, 1 << 63], "'x:blocks' is U8"),
        ("dtype=U8 shape=64 codec=zstd block_bytes=32", [0, 65, 64], "offsets do not rise"),
        ("dtype=U8 shape=64 codec=zstd block_bytes=64 codec_window=5", [0, 64], "has the options"),
        ("dtype=U8 shape=4611686018427387904,4 codec=zstd block_bytes=64", [0, 64], "at most 2.63 - 1 bits"),
        ("dtype=U8 shape=64 codec=brotli block_bytes=64", [0, 64], "coded by 'brotli', which this ibp lacks"),
    ],
)
def test_wrong_files(tmp_path, line, offsets, message):
    write_file(tmp_path / "x.safetensors", line, [1] * 64, offsets)
    with pytest.raises(ibp.FileFormatError, match=message):
        ibp.load(tmp_path / "x.safetensors")


@needs("zstd")
def test_the_command_line(tmp_path, capsys):
    path, originals = saved(tmp_path)
    assert main(["verify", "--content", str(path)]) == 0
    assert main(["inspect", str(path)]) == 0
    assert main(["inspect", "--tensor", "other", str(path)]) == 0
    out = capsys.readouterr().out
    assert "coded blocks" in out and "zstd" in out
    plain = tmp_path / "plain.safetensors"
    assert main(["decompress", "-q", str(path), "-o", str(plain)]) == 0
    for name, x in ibp.load(plain).items():
        assert_same_bits(x, originals[name] if name in originals else torch.arange(5))


# ---- nvCOMP ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_nvcomp(monkeypatch):
    module = types.SimpleNamespace(Codec=FakeCodec, as_array=as_array)
    monkeypatch.setattr(_codec, "_module", lambda codec: module)
    monkeypatch.setattr(_codec, "stream_number", lambda device: 1)
    monkeypatch.setattr(_codec.NvComp, "device_type", "cpu")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    yield
    _codec.forget_coders()


def floats(dtype=torch.float32):
    """Dense values, and rows of which most are zero and the others one."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(64, 4096, generator=generator)
    return dense.to(dtype), (torch.rand(64, 4096, generator=generator) < 0.02).to(dtype)


def test_a_coder_passes_policies_on():
    made = []
    module = types.SimpleNamespace(Codec=lambda **options: made.append(options))
    _codec.Coder(module, "ans", "<f2", 65536, 0, 1, execution_policy="latency")
    assert made[0]["execution_policy"] == "latency" and made[0]["algorithm"] == "ANS"


@pytest.mark.slow
@pytest.mark.parametrize("dtype, data_type", [(torch.float32, "<f4"), (torch.bfloat16, "<f2"), (torch.float16, "<f2")])
def test_ans_codes_floats_by_the_type_that_saves_more(fake_nvcomp, dtype, data_type):
    dense, sparse = floats(dtype)
    for x, wanted in ((dense, data_type), (sparse, "|u1")):
        whole = ibp.compress(x, scheme="nvcomp:ans", **PAGEABLE)
        assert whole.options["codec_data_type"] == wanted and whole.codec == "nvcomp:ans"
        assert_same_bits(whole.decompress(), x)
        stored = {}
        for scheme, given in (("nvcomp:ans:floats", data_type), ("nvcomp:ans:bytes", "|u1")):
            one = ibp.compress(x, scheme=scheme, **PAGEABLE)
            assert one.options["codec_data_type"] == given and one.codec == "nvcomp:ans"
            assert_same_bits(one.decompress(), x)
            stored[given] = one.stored_bytes
        assert whole.stored_bytes == stored[wanted] == min(stored.values())
    assert sparse.nbytes > 8 * whole.stored_bytes  # and as floats it would not be


def test_ans_tries_types_of_floats_only(fake_nvcomp, monkeypatch):
    tried = []
    monkeypatch.setattr(_codec, "_sample", lambda data, chunk_bytes: tried.append(data.numel()) or data)
    for x in (torch.arange(1000), torch.randn(100).double(), torch.empty(0, 4)):
        for scheme in ("nvcomp:ans", "nvcomp:ans:floats", "nvcomp:ans:bytes", "nvcomp:lz4"):
            assert_same_bits(ibp.compress(x, scheme=scheme, **PAGEABLE).decompress(), x)
    ibp.compress(torch.randn(100), scheme="nvcomp:ans:bytes", **PAGEABLE)
    assert tried == []
    ibp.compress(torch.randn(100), scheme="nvcomp:ans", **PAGEABLE)
    assert tried == [400]


def test_samples_of_ans(monkeypatch):
    """Whole chunks, from the first one on."""
    monkeypatch.setattr(_codec, "_SAMPLE_BYTES", 1 << 12)
    data = torch.arange(1 << 15).to(torch.uint8)
    assert _codec._sample(data[: 1 << 12], 1 << 10) is not None and len(_codec._sample(data[: 1 << 12], 16)) == 1 << 12
    found = _codec._sample(data[:-1], 1 << 10)
    assert len(found) == 1 << 12 and torch.equal(found[: 1 << 10], data[: 1 << 10])
    assert torch.equal(found[1 << 10 : 2 << 10], data[8 << 10 : 9 << 10])
    assert len(_codec._sample(data, 1 << 14)) == 1 << 14


def test_files_of_nvcomp(fake_nvcomp, tmp_path):
    dense, sparse = floats()
    ibp.save(tmp_path / "x.safetensors", {"dense": ibp.compress(dense, scheme="nvcomp:ans", **PAGEABLE)}, content=True)
    ibp.save(tmp_path / "y.safetensors", ibp.compress(sparse, scheme="nvcomp:lz4", **PAGEABLE))
    assert_same_bits(ibp.load(tmp_path / "x.safetensors")["dense"].decompress(), dense)
    with ibp.open(tmp_path / "y.safetensors") as file:
        (name,) = file
        assert_same_bits(file[name].decompress(), sparse)


def test_choose_measures_both_types_of_ans(fake_nvcomp):
    dense, sparse = floats()
    names = ["nvcomp:ans:floats", "nvcomp:ans:bytes"]
    for x in (dense, sparse):
        found = ibp.codecs.choose(x, 1e-6, device="cpu", schemes=["nvcomp:ans"])
        assert {one.scheme for one in found.table} == {*names, "raw"}
        assert found.stored_bytes == min(one.stored_bytes for one in found.table)
        assert_same_bits(found.compress(x, memory="host").decompress(), x)
    assert found.scheme == names[1]
    only = ibp.codecs.choose(sparse, 1e-6, device="cpu", schemes=[names[1]])
    assert {one.scheme for one in only.table} == {names[1], "raw"}
    ids = ibp.codecs.choose(torch.arange(5000), 1e-6, device="cpu", schemes=["nvcomp:ans"])
    assert {one.scheme for one in ids.table} == {"nvcomp:ans", "raw"}


def test_what_comes_back_otherwise_is_not_chosen(fake_nvcomp, monkeypatch):
    monkeypatch.setattr(FakeCodec, "decode", lambda self, array, out, decompression_config: out.zero_())
    found = ibp.codecs.choose(torch.arange(5000), 1e-6, device="cpu", schemes=["nvcomp:lz4"])
    assert [one.scheme for one in found.table] == ["raw"]


@pytest.mark.parametrize("scheme", NVCOMP_SCHEMES)
def test_nvcomp(cuda, scheme, tmp_path):
    pytest.importorskip("nvidia.nvcomp")
    for x in tensors().values():
        near = x.to(cuda)
        whole = ibp.compress(near, scheme=scheme)
        assert whole.device == near.device and whole.stored_bytes <= whole.original_bytes
        assert_same_bits(whole.decompress().cpu(), x.resolve_conj())
        out = torch.empty(x.shape, dtype=x.dtype, device=cuda)
        assert ibp.decompress(whole, out=out) is out
        assert_same_bits(out.cpu(), x.resolve_conj())
        assert_same_bits(whole.cpu().decompress(), x.resolve_conj())
    far = ibp.compress(tensors()["compressible"], scheme=scheme)
    assert far.device.type == "cpu" and far.savings > (0 if scheme != "nvcomp:ans" else -1)
    ibp.save(tmp_path / "x.safetensors", {"x": far}, content=True)
    assert_same_bits(ibp.load(tmp_path / "x.safetensors")["x"].decompress(device=cuda).cpu(), tensors()["compressible"])
    with ibp.open(tmp_path / "x.safetensors") as file:
        file.verify(content=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_nvcomp_keeps_every_bit_of_floats(cuda, dtype):
    """Among normal values NaNs with payloads, infinities, zeros of both signs and subnormal numbers; a short last
    chunk."""
    pytest.importorskip("nvidia.nvcomp")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150_001, generator=generator).to(dtype)
    bits = torch.randint(0, 256, (3000 * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    x[:3000], x[3000:3004] = bits, torch.tensor([0.0, -0.0, float("nan"), 1e-40]).to(dtype)
    for scheme in NVCOMP_SCHEMES:
        whole = ibp.compress(x.to(cuda), scheme=scheme)
        assert_same_bits(whole.decompress().cpu(), x)
        assert scheme != "nvcomp:ans" or dtype == torch.float64 or whole.savings > 0.05


def test_nvcomp_streams(cuda):
    """The work is that of the current stream, the default one too, and in order with it."""
    pytest.importorskip("nvidia.nvcomp")
    x = (torch.randn(1 << 22, device=cuda) * 0.02).bfloat16()
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            late, out = torch.zeros_like(x), torch.zeros_like(x)
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            whole = ibp.compress(late, scheme="nvcomp:ans")
            torch.cuda._sleep(20_000_000)
            whole.decompress(out=out)
            seen = out.clone()
        stream.synchronize()
        assert whole.savings > 0.25 and torch.equal(seen, x)


def test_nvcomp_is_in_torchs_memory(cuda):
    pytest.importorskip("nvidia.nvcomp")
    x = (torch.randn(1 << 22, device=cuda) * 0.02).bfloat16()
    out = torch.empty_like(x)
    whole = ibp.compress(x, scheme="nvcomp:ans")
    whole.decompress(out=out)
    torch.cuda.synchronize()
    counted = torch.cuda.memory_stats()["allocation.all.allocated"]

    def taken():
        """Bytes that leave the GPU's free memory in a call; other processes use it, too."""
        free = torch.cuda.mem_get_info()[0]
        whole.decompress(out=out)
        torch.cuda.synchronize()
        return free - torch.cuda.mem_get_info()[0]

    assert 0 in (taken() for _ in range(50))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == counted


def test_nvcomp_decodes_no_unchecked_bytes(cuda, tmp_path):
    pytest.importorskip("nvidia.nvcomp")
    path = tmp_path / "x.safetensors"
    ibp.save(path, ibp.compress(torch.arange(1 << 16, device=cuda), scheme="nvcomp:lz4"))
    data = bytearray(path.read_bytes())
    start = reference_files.File.at(path).tensors["tensor:blocks"]
    at = data.index(start[2][:64]) + 100
    data[at] ^= 255
    path.write_bytes(data)
    with pytest.raises(ibp.ChecksumError):
        ibp.load(path, verify=False)
