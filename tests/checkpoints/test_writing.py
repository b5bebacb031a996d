"""ibp.checkpoints.open, CheckpointWriter and is_coded: what loaders of frameworks read and write files with."""

import errno
import itertools
import os
import threading

import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding
from ibp._files import FileWriter
from ibp._rows.handle import Handle
from ibp.adapters import WeightCompressor
from ibp.checkpoints import CheckpointWriter, coded_name, is_coded
from ibp.checkpoints._coding import coded_on_its_gpu
from ibp.checkpoints._source import loaded_tensor
from ibp.checkpoints._writing import write_blocks

PLAIN = {"layer.weight": torch.randn(1000, 256).bfloat16(), "bias": torch.randn(5), "scalar": torch.tensor(2)}
SHAPES = {name: tensor.shape for name, tensor in PLAIN.items()}


def values():
    return [(name, ibp.compress(tensor) if tensor.dim() == 2 else tensor) for name, tensor in PLAIN.items()]


@pytest.mark.parametrize("together", [False, True])
def test_what_is_written_is_read(tmp_path, together):
    path = tmp_path / "made.ibp.safetensors"
    with CheckpointWriter(path, SHAPES, metadata={"step": "3"}) as writer:
        sizes = writer.compress(PLAIN) if together else {name: writer.write(name, value) for name, value in values()}
        assert not path.exists()
    assert list(sizes) == list(PLAIN) and 0 < sizes["layer.weight"] < PLAIN["layer.weight"].nbytes
    file = ibp.open(path, memory="host")
    assert file.metadata == {"step": "3"} and file.tables == ("layer.weight",)
    with ibp.checkpoints.open(path) as source:
        assert source.format == "ibp" and source.metadata == {"step": "3"}
        for name, tensor in PLAIN.items():
            found = source.tensors[name]
            assert (found.shape, found.dtype, found.table is not None) == (
                tensor.shape,
                tensor.dtype,
                tensor.dim() == 2,
            )
            assert_same_bits(found.tensor(), tensor)
            assert_same_bits(file.get_tensor(name), tensor)


def test_an_error_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "x.safetensors"
    ibp.save(path, {"old": torch.ones(3)})
    with pytest.raises(KeyError, match="no more"):
        with CheckpointWriter(path, SHAPES) as writer:
            writer.write(*values()[0])
            raise KeyError("no more")
    assert list(ibp.open(path)) == ["old"] and os.listdir(tmp_path) == ["x.safetensors"]


def test_a_file_that_is_not_open(tmp_path):
    writer = CheckpointWriter(tmp_path / "x.safetensors", {"a": [3]})
    for call in (lambda: writer.write("a", torch.ones(3)), lambda: writer.compress({"a": torch.ones(3)})):
        with pytest.raises(ValueError, match="the file is not open; wanted `with ibp.checkpoints.CheckpointWriter"):
            call()
    with writer:
        writer.write("a", torch.ones(3))
        writer.close()
        writer.close()
    assert list(ibp.open(tmp_path / "x.safetensors")) == ["a"]
    with pytest.raises(ValueError, match="the file is not open"):
        writer.write("b", torch.ones(3))


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="which readers of .npz files refuse"):
        CheckpointWriter(tmp_path / "x.npz", {})
    for shapes in ([3], {"a": 3}, {"a": None}):
        with pytest.raises(TypeError, match="shapes is .*; wanted a mapping from names to shapes"):
            CheckpointWriter(tmp_path / "x.safetensors", shapes)
    with pytest.raises(ValueError, match="wanted none that begins with 'ibp.'"):
        CheckpointWriter(tmp_path / "x.safetensors", {}, metadata={"ibp.a": ""})
    with pytest.raises(OSError, match="there is no such directory"):
        CheckpointWriter(tmp_path / "none" / "x.safetensors", {}).__enter__()
    with CheckpointWriter(tmp_path / "x.safetensors", {"a": [3]}) as writer:
        for value in ([1.0], torch.ones(3).to_sparse(), ibp.compress(torch.ones(3), scheme="raw").codebook):
            with pytest.raises(TypeError, match="'a' is a .*; wanted a"):
                writer.write("a", value)
        writer.write("a", torch.ones(3))


def test_the_header_has_room_for_many_dimensions(tmp_path, monkeypatch):
    monkeypatch.setattr("ibp._files.writer._FileOutput._move", None)
    tensors = {f"{'name' * 50}{number}": torch.ones([1] * 60) for number in range(30)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    with CheckpointWriter(tmp_path / "x.safetensors", shapes) as writer:
        writer.compress(tensors)
    assert ibp.open(tmp_path / "x.safetensors").keys() == tensors.keys()


def test_what_a_file_takes():
    x, takes = torch.ones(3), CheckpointWriter.takes
    assert takes("a.b-c", x) and takes("a", torch.nn.Parameter(x)) and takes("a", torch.tensor(1))
    for name in ("a:slots", "a[0]", "ibp.a", "__metadata__", "a\nb"):
        assert not takes(name, x)
    of_subclass, of_dtype = x.as_subclass(type("Of", (torch.Tensor,), {})), torch.ones(3, dtype=torch.complex32)
    assert not any(takes("a", other) for other in (x.to_sparse(), x.to("meta"), of_subclass, of_dtype))


# ---- tensors that are compressed and written ----

ROWS = 5000  # of 2 KiB: two whole blocks on the CPU, and a part


def tensors_of_every_form():
    """Tensors, by name, that differ in size, strides, dtype and class."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{k}.weight": embedding(ROWS, 1024, torch.bfloat16, seed=k) for k in range(3)}
    parts = torch.randn(2, 300, 500, generator=generator)
    return {
        **tensors,
        "transposed": embedding(1024, ROWS, torch.bfloat16, seed=3).t(),
        "random": torch.randint(256, (9 << 20,), dtype=torch.uint8, generator=generator),
        "of zeros": torch.zeros(ROWS, 1024),
        "odd": embedding(ROWS, 1025)[:, 1:].flatten()[:-3],
        "every second row": embedding(2000, 64)[::2],
        "expanded": torch.arange(2000).expand(7, 2000),
        "conjugated": torch.complex(*parts).conj(),
        "negated": torch.complex(*parts).conj().imag,
        "parameter": torch.nn.Parameter(embedding(512, 96)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "empty and conjugated": torch.empty(0, 4, dtype=torch.complex64).conj(),
        "small": torch.ones(3),
        "at[1, 0]": embedding(512, 96),  # the name of a part of a tensor
    }


def write_compressed(path, tensors, **options):
    with CheckpointWriter(path, {name: tensor.shape for name, tensor in tensors.items()}) as writer:
        return writer.compress(tensors, **options)


def assert_holds(path, tensors):
    """Compares a file with the tensors that were written to it. Returns the file."""
    file = ibp.open(path, memory="host")
    file.verify()
    assert list(file) == list(tensors)
    for name, tensor in tensors.items():
        assert_same_bits(file.get_tensor(name), tensor.detach().cpu().resolve_conj().resolve_neg())
    return file


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_tensors_in_host_memory(tmp_path, monkeypatch, jobs):
    """Each thread codes a whole block alone. The caller's thread codes if it is the only one, and never writes."""
    coders, encode, writers, part = [], Handle.encode, set(), FileWriter.part

    def watched(self, *arguments, **options):
        coders.append(threading.current_thread())
        return encode(self, *arguments, **options)

    def watched_part(self, *arguments):
        writers.add(threading.current_thread())
        return part(self, *arguments)

    monkeypatch.setattr(Handle, "encode", watched)
    monkeypatch.setattr(FileWriter, "part", watched_part)
    tensors = tensors_of_every_form()
    sizes = write_compressed(tmp_path / "x.safetensors", tensors, jobs=jobs)
    if jobs == 1:
        assert set(coders) == {threading.current_thread()}
    else:
        assert len(set(coders)) <= jobs and threading.current_thread() not in coders
    assert len(writers) == 1 and writers.isdisjoint({threading.current_thread(), *coders})
    file = assert_holds(tmp_path / "x.safetensors", tensors)
    plain = {"random", "scalar", "empty", "empty and conjugated", "small"}
    assert set(file.tables) == tensors.keys() - plain
    assert len({id(file[f"layers.{k}.weight"].codebook) for k in range(3)}) == 1
    assert sizes == {name: file.info(name).stored_bytes for name in tensors}
    assert all(file.fields(name).content is None for name in file.tables)  # To compute it takes a pass of its own.


def test_several_calls(tmp_path):
    """`write` and `compress` may follow each other. Equal codebooks are stored once."""
    tensors = {name: embedding(512, 96, seed=7) for name in ("a", "b", "c")}
    with CheckpointWriter(tmp_path / "x.safetensors", {name: (512, 96) for name in tensors}) as writer:
        writer.compress({"a": tensors["a"]})
        writer.write("b", tensors["b"])
        writer.compress({"c": tensors["c"]}, jobs=1)
        assert writer.compress({}) == {}
    file = assert_holds(tmp_path / "x.safetensors", tensors)
    assert file["a"].codebook is file["c"].codebook


NAMES = {
    "a": (ValueError, "there are two tensors 'a' in a file"),
    "a:overflow": (ValueError, "a part of the table 'a' and another tensor both have the name 'a:overflow'"),
    "ibp.checks": (ValueError, "'ibp.checks' is reserved"),
    "ibp.x": (ValueError, "'ibp.x' is reserved; wanted one that does not begin with 'ibp.'"),
    "__metadata__": (ValueError, "'__metadata__' is reserved"),
    "half \ud800": (ValueError, "half of a surrogate pair; wanted Unicode"),
    3: (TypeError, "the name 3 is of type int; wanted text"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_refused(tmp_path, name):
    """Before anything is written, so that other tensors can still be written."""
    error, message = NAMES[name]
    x, table = embedding(512, 96), ibp.compress(embedding(512, 96), device="cpu")
    with CheckpointWriter(tmp_path / "x.safetensors", {"a": (512, 96), "b": (512, 96)}) as writer:
        writer.write("a", table)
        for call in (
            lambda: writer.write(name, table),
            lambda: writer.write(name, torch.ones(3)),
            lambda: writer.compress({"c": x, name: x}),
        ):
            with pytest.raises(error, match=message):
                call()
        writer.compress({"b": x})
    assert_holds(tmp_path / "x.safetensors", {"a": x, "b": x})


def test_names_that_refuse_each_other(tmp_path):
    x = embedding(512, 96)
    with CheckpointWriter(tmp_path / "x.safetensors", {"a": (512, 96)}) as writer:
        for names in (("a", "a:overflow"), ("a:overflow", "a")):
            with pytest.raises(ValueError, match="a part of the table 'a' and another tensor .* name 'a:overflow'"):
                writer.compress(dict.fromkeys(names, x))
        for given in ([x], x, "a"):
            with pytest.raises(TypeError, match=f"tensors is a {type(given).__name__}; wanted a mapping from names to"):
                writer.compress(given)
        writer.write("a:overflow", x)
        with pytest.raises(ValueError, match="a part of the table 'a' and another tensor .* name 'a:overflow'"):
            writer.write("a", ibp.compress(x, device="cpu"))
    assert_holds(tmp_path / "x.safetensors", {"a:overflow": x})


def test_tensors_that_are_refused(tmp_path):
    x = torch.ones(3)
    of_subclass = x.as_subclass(type("Of", (torch.Tensor,), {}))
    with CheckpointWriter(tmp_path / "x.safetensors", {"a": [3]}) as writer:
        for value, error, message in (
            ([1.0], TypeError, "'a' is a list; wanted a torch.Tensor"),
            (x.to_sparse(), TypeError, "'a' is a torch.sparse_coo tensor on cpu; wanted a dense tensor"),
            (x.to("meta"), TypeError, "'a' is a torch.strided tensor on meta; wanted a dense tensor"),
            (of_subclass, TypeError, "'a' is a Of; wanted a torch.Tensor or torch.nn.Parameter"),
            (x.to(torch.complex32), ValueError, "'a' has torch.complex32, which safetensors lacks"),
        ):
            with pytest.raises(error, match=message):
                writer.compress({"first": x, "a": value})
        for jobs in (0, 1025):
            with pytest.raises(ValueError, match="jobs is"):
                writer.compress({"a": x}, jobs=jobs)
        writer.compress({"a": x})  # Nothing was written before.
    assert_holds(tmp_path / "x.safetensors", {"a": x})


def fill_the_disk(monkeypatch):
    pwrite, left = os.pwrite, [3]

    def full(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", full)


def break_off(monkeypatch):
    encode, left = Handle.encode, [4]

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(Handle, "encode", interrupted)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize(
    "fault, error, message",
    [
        (fill_the_disk, OSError, r"No space left on device: wanted room for at least"),
        (break_off, KeyboardInterrupt, "^$"),
    ],
)
def test_faults_while_tensors_are_compressed(tmp_path, monkeypatch, fault, error, message, jobs):
    """The earlier file stays, the temporary one goes, and no thread is left."""
    path, before = tmp_path / "x.safetensors", threading.active_count()
    ibp.save(path, {"old": torch.ones(3)})
    fault(monkeypatch)
    with pytest.raises(error, match=message):
        write_compressed(path, tensors_of_every_form(), jobs=jobs)
    assert threading.active_count() == before
    assert list(ibp.open(path)) == ["old"] and os.listdir(tmp_path) == ["x.safetensors"]


def break_a_part(monkeypatch):
    part = FileWriter.part

    def interrupted(self, name, dtype):
        if name.endswith(":lengths"):
            raise MemoryError("no memory")
        return part(self, name, dtype)

    monkeypatch.setattr(FileWriter, "part", interrupted)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "fault, told", [(fill_the_disk, "OSError: .*No space left"), (break_a_part, "MemoryError: no memory")]
)
def test_an_error_that_the_caller_catches(tmp_path, monkeypatch, fault, told, together):
    """What is half written is not finished, whatever the caller does with the error."""
    path, before = tmp_path / "x.safetensors", threading.active_count()
    ibp.save(path, {"old": torch.ones(3)})
    tensors = {f"layers.{k}.weight": embedding(ROWS, 1024, torch.bfloat16, seed=k) for k in range(2)}
    table = ibp.compress(tensors["layers.0.weight"], device="cpu")
    refused = pytest.raises(ValueError, match=f"{path} cannot be completed.* has failed while it was writing: {told}")
    with refused, CheckpointWriter(path, {name: tensor.shape for name, tensor in tensors.items()}) as writer:
        with monkeypatch.context() as patch:
            fault(patch)
            with pytest.raises((OSError, MemoryError)):
                if together:
                    writer.compress(tensors, jobs=2)
                else:
                    for name in tensors:
                        writer.write(name, table)
        for call in (lambda: writer.write("new", torch.ones(3)), lambda: writer.compress({"new": torch.ones(3)})):
            with pytest.raises(ValueError, match="cannot be completed"):
                call()
    assert threading.active_count() == before
    assert list(ibp.open(path)) == ["old"] and os.listdir(tmp_path) == ["x.safetensors"]


def test_an_interrupt_that_the_caller_catches(tmp_path, monkeypatch):
    """The tensors before the one that was interrupted are complete, but not all were written."""
    tensors = {f"layers.{k}.weight": embedding(512, 96, seed=k) for k in range(9)}
    with pytest.raises(ValueError, match="while it was writing: KeyboardInterrupt; wanted the file written anew"):
        with CheckpointWriter(tmp_path / "x.safetensors", {}) as writer:
            break_off(monkeypatch)
            with pytest.raises(KeyboardInterrupt):
                writer.compress(tensors, jobs=1)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_tables_with_clusters(tmp_path, monkeypatch):
    """The codebooks of clusters need more space in the header than the shapes tell. `ibp.save` knows the codebooks."""
    x = embedding(4096, 1024, torch.bfloat16) * (0.5 ** (torch.arange(4096) % 64))[:, None].bfloat16()
    table = ibp.compress(x, scheme="planes", clusters=64, device="cpu")
    assert len(table.codebook.codebooks) > 30
    with CheckpointWriter(tmp_path / "x.safetensors", {"before": (9,), "a": x.shape}) as writer:
        writer.write("before", torch.arange(9))
        writer.write("a", table)
    assert_holds(tmp_path / "x.safetensors", {"before": torch.arange(9), "a": x})
    monkeypatch.setattr("ibp._files.writer._FileOutput._move", None)
    ibp.save(tmp_path / "x.safetensors", {"a": table})
    assert_holds(tmp_path / "x.safetensors", {"a": x})


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_functions_that_return_tensors(tmp_path, jobs):
    """They may make a new tensor in each call, and lie among tensors."""
    tensors = tensors_of_every_form()
    mixed = {
        name: tensor if number % 3 == 2 else lambda tensor=tensor: tensor.clone()
        for number, (name, tensor) in enumerate(tensors.items())
    }
    with CheckpointWriter(tmp_path / "x.safetensors", {name: tensor.shape for name, tensor in tensors.items()}) as file:
        sizes = file.compress(mixed, jobs=jobs)
        with pytest.raises(TypeError, match="'b' is a float; wanted a torch.Tensor"):
            file.compress({"b": lambda: 1.0})
        with pytest.raises(ZeroDivisionError):
            file.compress({"b": lambda: 1 / 0})
    assert_holds(tmp_path / "x.safetensors", tensors)
    assert sizes == write_compressed(tmp_path / "y.safetensors", tensors)


@pytest.mark.parametrize("changed", [torch.zeros(200, 64, dtype=torch.bfloat16), torch.zeros(100, 64)])
def test_functions_that_return_another_tensor_later(tmp_path, changed):
    calls = itertools.count()
    first, path = torch.randn(100, 64).bfloat16(), tmp_path / "x.safetensors"

    def given():
        return first if next(calls) == 0 else changed

    others = {f"other.{number}": torch.randn(100 + number, 64) for number in range(3)}
    with pytest.raises(RuntimeError, match="the function of 'w' has returned .* and now .*: wanted the same"):
        with CheckpointWriter(path, {"w": first.shape, **{name: x.shape for name, x in others.items()}}) as file:
            file.compress({"w": given, **{name: lambda x=x: x.clone() for name, x in others.items()}}, jobs=1)
    assert not path.exists()


def write_as_on_a_gpu(path, tensors):
    """Writes tensors as those on a GPU are written, wherever they are."""
    compressor = WeightCompressor({"memory": "host"})
    with FileWriter(path) as writer:
        sources = {loaded_tensor(name, tensor, path): tensor.detach() for name, tensor in tensors.items()}
        write_blocks(writer, path.name, (coded_on_its_gpu(one, x, compressor) for one, x in sources.items()))


@pytest.mark.slow
def test_the_code_for_gpus_on_a_cpu(tmp_path):
    tensors = tensors_of_every_form()
    write_as_on_a_gpu(tmp_path / "x.safetensors", tensors)
    file = assert_holds(tmp_path / "x.safetensors", tensors)
    assert set(file.tables) == tensors.keys() - {"random", "scalar", "empty", "empty and conjugated", "small"}
    assert all(file.fields(name).content is None for name in file.tables)


def test_tensors_on_a_gpu(cuda, tmp_path):
    """Work that is queued on the current stream, which is not the default one, fills the tensors. Every third tensor is
    in host memory."""
    tensors = tensors_of_every_form()
    on_gpu = {name: tensor.detach().to(cuda) for name, tensor in tensors.items()}
    mixed = {}
    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        torch.cuda.current_stream(cuda).wait_stream(torch.cuda.default_stream(cuda))
        targets = {name: torch.zeros_like(tensor) for name, tensor in on_gpu.items()}
        torch.cuda.current_stream(cuda).synchronize()
        torch.cuda._sleep(200_000_000)  # The copies below are still to run when the call begins.
        for number, (name, tensor) in enumerate(tensors.items()):
            targets[name].copy_(on_gpu[name])
            mixed[name] = tensor if number % 3 == 2 else targets[name]
        sizes = write_compressed(tmp_path / "x.safetensors", mixed, jobs=3)
        for target in targets.values():
            target.zero_()  # The call has read all tensors.
    file = assert_holds(tmp_path / "x.safetensors", tensors)
    assert sizes.keys() == tensors.keys()
    assert set(file.tables) == tensors.keys() - {"random", "scalar", "empty", "empty and conjugated", "small"}
    again = ibp.load(tmp_path / "x.safetensors", device=cuda)
    for name in file.tables:
        assert_same_bits(again[name].decompress(device=cuda).cpu(), file.get_tensor(name))


def test_a_gpu_writes_what_the_cpu_reads_of_views(cuda, tmp_path):
    """Views on the GPU itself: transposed, with steps, expanded, conjugated and negated."""
    base = torch.randn(600, 500, generator=torch.Generator().manual_seed(0)).to(cuda)
    pairs = torch.complex(base, base + 1)
    views = {
        "transposed": base.t(),
        "steps": base[::2, ::3],
        "expanded": base[0].expand(40, 500),
        "conjugated": pairs.conj(),
        "negated": pairs.conj().imag,
        "scalar": base[3, 4],
        "parameter": torch.nn.Parameter(base.bfloat16()),
    }
    write_compressed(tmp_path / "x.safetensors", views)
    assert_holds(tmp_path / "x.safetensors", views)


# ---- other functions ----


def test_files_of_ibp(tmp_path):
    plain, coded, cut = (tmp_path / f"{name}.safetensors" for name in ("plain", "coded", "cut"))
    ibp.save(coded, {"a": ibp.compress(torch.ones(100, 100))})
    ibp.checkpoints.decompress(coded, plain)
    cut.write_bytes(coded.read_bytes()[:20])
    (tmp_path / "empty.safetensors").touch()
    assert is_coded(coded) and is_coded(os.fspath(coded))
    for other in (plain, cut, tmp_path / "empty.safetensors", tmp_path / "there is none.bin"):
        assert not is_coded(other)
    (tmp_path / "long.safetensors").write_bytes(b"\xff" * 100)
    assert not is_coded(tmp_path / "long.safetensors")
    with pytest.raises(FileNotFoundError):
        is_coded(tmp_path / "there is none.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(OSError, match="is a pipe; wanted a regular file"):
        is_coded(tmp_path / "pipe.safetensors")


def test_coded_names():
    assert coded_name("model.safetensors") == coded_name("model.ibp.safetensors") == "model.ibp.safetensors"
    assert coded_name("optimizer.pt") == "optimizer.pt.ibp.safetensors"
