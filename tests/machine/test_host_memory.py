"""Host memory of tables: pinned memory that is kept for its next user, and NUMA nodes."""

import ctypes
import pathlib
import platform

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp import _core
from ibp._machine import memory as _memory
from ibp._machine import segments
from native import (
    CSRC,
    INCLUDES,
    PLAIN,
    SANITIZED,
    TESTS,
    WARNINGS,
    can_sanitize,
    compiled,
    core_objects,
    cxx_compiler,
    linked,
    run,
)

CPU = torch.device("cpu")
MiB = 1 << 20
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}  # numbers of the system call


# ---- memory that is kept ----


@pytest.mark.parametrize("flags", [PLAIN, pytest.param(SANITIZED, marks=pytest.mark.slow)], ids=["plain", "sanitized"])
def test_the_pool(flags):
    if flags is SANITIZED and not can_sanitize():
        pytest.skip("the C compiler has no address and undefined behaviour sanitizers")
    command = [*cxx_compiler(), "-std=c++17", *flags, *INCLUDES]
    objects = compiled([(command, TESTS / "pinned_pool.cpp")])
    plain_c = core_objects(flags, [CSRC / "cuda" / "no_cuda.c", *sorted(CSRC.glob("core/version.c"))])
    program = linked(
        [*cxx_compiler(), *(flag for flag in flags if flag not in WARNINGS), "-pthread"], objects + plain_c
    )
    code, output = run([program], timeout=300)
    assert code == 0 and output == "0 wrong\n", output


def test_release_without_anything_kept():
    limit = _core.pinned_limit()
    try:
        ibp.release_pinned()
        assert ibp.release_pinned() == 0 and _core.kept_pinned_bytes() == 0
        assert ibp.release_pinned(limit_bytes=123) == 0 and _core.pinned_limit() == 123
        assert ibp.release_pinned() == 0 and _core.pinned_limit() == 123
    finally:
        ibp.release_pinned(limit_bytes=limit)
    memory = pathlib.Path("/proc/meminfo").read_text().split()[1]
    assert 0 < limit <= 4 << 30 and limit <= 1024 * int(memory) // 8


@pytest.mark.parametrize("limit", ["1", 1.5, True])
def test_limits_that_are_none(limit):
    with pytest.raises(TypeError, match="limit_bytes"):
        ibp.release_pinned(limit_bytes=limit)
    with pytest.raises(ValueError, match="limit_bytes"):
        ibp.release_pinned(limit_bytes=-1)


def test_memory_is_used_again(cuda):
    """What a table leaves is the next one's, and no byte of it is read as the new table's."""
    ibp.release_pinned()
    x = torch.randn(1 << 14, 256).to(torch.bfloat16)
    codebook = ibp.codecs.analyze(x)
    table = ibp.compress(x, codebook=codebook)
    held = [tensor.numel() for tensor in (table.slots, table.overflow) if tensor.numel() >= 64 << 10]
    address = table.slots.data_ptr()
    y = table.index_select(torch.arange(len(x)), device=cuda)  # may still run when the table is gone
    del table
    assert _core.kept_pinned_bytes() == sum(held) > 0
    again = ibp.compress(-x.flip(0), codebook=codebook)
    assert again.slots.data_ptr() == address and again.is_pinned()
    assert_same_bits(y.cpu(), x)
    assert_same_bits(again.decompress(device=cuda).cpu(), -x.flip(0))
    del again
    assert ibp.release_pinned() == sum(held) and _core.kept_pinned_bytes() == 0


def test_no_more_is_kept_than_the_limit(cuda):
    limit = _core.pinned_limit()
    ibp.release_pinned(limit_bytes=MiB)
    try:
        blocks = [_memory.empty(MiB // 2 + i, CPU, pin=True) for i in range(5)]
        assert all(block.is_pinned() for block in blocks)
        del blocks
        assert 0 < _core.kept_pinned_bytes() <= MiB
        assert _memory.empty(4 * MiB, CPU, pin=True).is_pinned()
        assert _core.kept_pinned_bytes() <= MiB
    finally:
        ibp.release_pinned(limit_bytes=limit)
    assert _core.kept_pinned_bytes() == 0


# ---- NUMA nodes ----


def test_nodes_of_this_machine():
    nodes = _memory.online_nodes()
    assert nodes and all(node >= 0 for node in nodes)
    assert _memory.node_of(None) == _memory.node_of("cpu") == _memory.node_of(CPU) == _memory.CALLERS_NODE
    for node in nodes:
        assert _memory.node_of(node) == node


def test_lists_of_nodes(tmp_path, monkeypatch):
    file = tmp_path / "online"
    monkeypatch.setattr(_memory, "_NODES", file)
    assert _memory.online_nodes() == {0}  # the system does not say
    for text, nodes in (("0\n", {0}), ("0-1\n", {0, 1}), ("0,2-4,7\n", {0, 2, 3, 4, 7})):
        file.write_text(text)
        assert _memory.online_nodes() == nodes
    assert _memory.node_of(7) == 7


@pytest.mark.parametrize("text, node", [("1\n", 1), ("0\n", 0), ("-1\n", -1), ("5\n", -1), ("", -1), (None, -1)])
def test_the_node_of_a_gpu(text, node, tmp_path, monkeypatch):
    """What the system says of a PCI device; the caller's where it says nothing, or a node that is not there."""

    class Properties:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x9B, 0

    (tmp_path / "online").write_text("0-1")
    monkeypatch.setattr(_memory, "_NODES", tmp_path / "online")
    monkeypatch.setattr(_memory, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    if text is not None:
        (tmp_path / "0000:9b:00.0").mkdir()
        (tmp_path / "0000:9b:00.0" / "numa_node").write_text(text)
    assert _memory.node_of_gpu(torch.device("cuda", 0)) == node


def test_nodes_that_are_none():
    x = torch.randn(100, 64)
    table = ibp.compress(x, device="cpu", memory="host")
    for call in (
        lambda numa: ibp.compress(x, numa=numa, device="cpu", memory="host"),
        lambda numa: table.share_memory_(numa=numa),
        lambda numa: table.pin_memory(numa=numa),
    ):
        with pytest.raises(ValueError, match="numa is 4000; this machine has"):
            call(4000)
        with pytest.raises(TypeError, match="numa"):
            call(1.5)
        with pytest.raises(ValueError, match="device"):
            call("nowhere")
    assert not table.is_shared()


def policy_at(address):
    """(mode, nodes) of the memory policy of a page."""
    mode, nodes = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = GET_MEMPOLICY.get(platform.machine())
    if number is None:
        pytest.skip(f"no number of the system call is known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    of_address = 2
    if libc.syscall(number, ctypes.byref(mode), nodes, 1024, ctypes.c_void_p(address), of_address) != 0:
        pytest.skip("the system does not say what policy memory has")
    return mode.value, [64 * word + bit for word in range(16) for bit in range(64) if nodes[word] >> bit & 1]


def can_bind(address, num_bytes):
    libc = ctypes.CDLL(None, use_errno=True)
    node, preferred = ctypes.c_ulong(1), 1
    number = {"x86_64": 237, "aarch64": 235}[platform.machine()]
    return libc.syscall(number, ctypes.c_void_p(address), num_bytes, preferred, ctypes.byref(node), 65, 0) == 0


@pytest.mark.parametrize("numa", [None, 0])
def test_new_memory_asks_for_its_node(numa):
    table = ibp.compress(torch.randn(1000, 64), device="cpu", memory="host")
    table.share_memory_(numa=numa)
    address = table.slots.data_ptr() // 4096 * 4096
    mode, nodes = policy_at(address)
    if not can_bind(address, 4096):
        pytest.skip("the system refuses to bind memory to nodes")
    preferred = 1
    assert mode == preferred and len(nodes) == 1 and nodes[0] in _memory.online_nodes()
    assert numa is None or nodes == [numa]


def test_memory_where_the_system_refuses_a_node():
    """A node that is not there: the memory is somewhere, and all of it can be written."""
    segment = segments.Segment.new(3 * MiB + 5, node=1000)
    memory = torch.frombuffer(segment.pages, dtype=torch.uint8)
    assert memory.numel() == 3 * MiB + 5 and not memory.any()
    assert memory.fill_(7).eq(7).all()


@pytest.mark.parametrize("numa", [None, 0, "cuda"])
def test_pinned_memory_on_a_node(cuda, numa):
    ibp.release_pinned()
    x = torch.randn(1 << 12, 256).to(torch.bfloat16)
    table = ibp.compress(x, numa=numa)
    mode, nodes = policy_at(table.slots.data_ptr())
    if can_bind(table.slots.data_ptr(), 4096):
        assert mode == 1 and len(nodes) == 1 and nodes[0] in _memory.online_nodes()
    assert table.is_pinned()
    assert_same_bits(table.decompress(device=cuda).cpu(), x)
    assert ibp.compress(x, memory="host").pin_memory(numa=numa).is_pinned()


def test_large_memory_of_the_host_has_huge_pages(monkeypatch):
    asked = []
    monkeypatch.setattr(_core, "ask_for_huge_pages", lambda *of: asked.append(of))
    least = _memory._LEAST_HUGE_BYTES
    for shape, dtype, num_bytes in (((least,), torch.uint8, least), ((3, 5, least), torch.complex64, 120 * least)):
        found = _memory.empty_tensor(shape, dtype)
        assert (found.shape, found.dtype) == (torch.Size(shape), dtype) and not found._is_view()
        assert asked.pop() == (found.data_ptr(), num_bytes) and not asked
    _memory.empty_tensor(least - 1)
    with torch._subclasses.FakeTensorMode():
        _memory.empty_tensor(least)
    assert not asked


def test_memory_keeps_its_bytes_when_huge_pages_are_asked_for():
    held = torch.arange(3 << 20)
    for start, num_bytes in ((0, held.nbytes), (4095, 3 << 20), (1, 4096), (5, 0), (0, 2**64 - 1)):
        _core.ask_for_huge_pages(held.data_ptr() + start, num_bytes)
    assert torch.equal(held, torch.arange(3 << 20))
