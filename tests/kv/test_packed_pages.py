"""Pages as messages (ibp.kv.pack and unpack): what comes back, how many bytes travel, and what is refused. On a GPU
also graphs, other streams and numbers that only the GPU knows.
"""

import pickle
import random

import pytest
import torch

import ibp
from helpers import assert_same_bits, take
from ibp.kv import _paged

PAGE = (16, 8, 64)  # tokens, heads, head dim
NUM_BLOCKS = 40


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return request.getfixturevalue("cuda") if request.param == "cuda" else torch.device("cpu")


def cache(device, dtype=torch.bfloat16, shape=PAGE, num_blocks=NUM_BLOCKS, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_blocks, *shape, generator=generator) * scale).to(dtype).to(device)


def noise(device, num_blocks=NUM_BLOCKS, seed=0):
    """Pages that no codebook shrinks: random bits."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (num_blocks, *PAGE), generator=generator, dtype=torch.int16)
    return bits.to(device).view(torch.bfloat16)


def sent(packed):
    """The bytes of a message that travel, where they arrive."""
    return packed.message[: int(packed.used)].clone()


def unpack(message, codec, out, blocks=None):
    ibp.kv.unpack(message, codec, out=out, blocks=blocks)
    codec.check()


@pytest.mark.parametrize("level", ["default", "fast"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_pages_come_back(device, dtype, level):
    kv = cache(device, dtype)
    codec = ibp.kv.PageCodec.learn(kv, level=level)
    blocks, targets = [3, 17, 3, 39, 0], [5, 4, 39, 0, 11]
    packed = ibp.kv.pack(kv, codec, blocks=blocks)
    raw_bytes = 5 * codec.page_bytes
    assert packed.message.numel() == ibp.kv.packed_bytes(codec, 5) and packed.message.dtype == torch.uint8
    assert packed.message.device == packed.used.device == kv.device
    assert packed.message.numel() < 1.02 * raw_bytes and int(packed.used) < 0.95 * raw_bytes
    out = torch.zeros_like(kv)
    unpack(sent(packed), codec, out, targets)
    assert_same_bits(take(out, torch.tensor(targets)), take(kv, torch.tensor(blocks)))
    untouched = torch.tensor([b for b in range(NUM_BLOCKS) if b not in targets])
    assert not take(out, untouched).view(torch.uint8).any()


@pytest.mark.parametrize("count", [0, 1, 7, NUM_BLOCKS])
def test_numbers_of_pages(device, count):
    kv = cache(device)
    codec = ibp.kv.PageCodec.learn(kv)
    blocks = random.Random(0).sample(range(NUM_BLOCKS), count)
    packed = ibp.kv.pack(kv, codec, blocks=torch.tensor(blocks, dtype=torch.int32))
    assert packed.message.numel() % 64 == 0
    out = torch.zeros_like(kv)
    unpack(sent(packed), codec, out, blocks)
    assert_same_bits(out[blocks], kv[blocks])
    assert int(out.view(torch.int16).ne(0).any(-1).any(-1).any(-1).sum()) == count


def test_all_blocks_into_one_buffer(device):
    """Memory that is there, used again for messages of other sizes; both ends at the start of the next one."""
    kv, out = cache(device), torch.zeros(NUM_BLOCKS, *PAGE, dtype=torch.bfloat16, device=device)
    codec = ibp.kv.PageCodec.learn(kv)
    buffer = torch.full((2 * ibp.kv.packed_bytes(codec, NUM_BLOCKS),), 7, dtype=torch.uint8, device=device)
    for count in (NUM_BLOCKS, 3, 20):
        size = ibp.kv.packed_bytes(codec, count)
        packed = ibp.kv.pack(kv[:count], codec, out=buffer)
        assert packed.message.data_ptr() == buffer.data_ptr() and packed.message.numel() == size
        ibp.kv.pack(kv[-count:], codec, out=buffer[size:])
        unpack(buffer[: int(packed.used)], codec, out[:count])
        assert_same_bits(out[:count], kv[:count])
        unpack(buffer[size:], codec, out[:count])
        assert_same_bits(out[:count], kv[-count:])
    assert (buffer[2 * ibp.kv.packed_bytes(codec, NUM_BLOCKS) - 1 :] == 7).all()


def test_pages_that_do_not_shrink(device):
    kv = cache(device)
    codec = ibp.kv.PageCodec.learn(kv)
    kv[1::2] = noise(device)[1::2]
    kv[4] = 0
    packed = ibp.kv.pack(kv, codec)
    assert int(packed.used) <= packed.message.numel()
    out = torch.empty_like(kv)
    unpack(sent(packed), codec, out)
    assert_same_bits(out, kv)
    all_raw = ibp.kv.pack(noise(device), codec)
    assert packed.used < all_raw.used and int(all_raw.used) <= all_raw.message.numel() == packed.message.numel()
    unpack(sent(all_raw), codec, out)
    assert_same_bits(out, noise(device))


def layouts(device):
    """Paged caches as engines have them: (tensors, row_bytes)."""
    both = torch.stack([cache(device), cache(device, seed=1)])
    yield [both[0], both[1]], None  # keys and values, blocks in one piece
    yield [cache(device, shape=(2, *PAGE), seed=seed)[:, 0] for seed in range(3)], None  # blocks apart
    yield [cache(device, shape=(2, NUM_BLOCKS, *PAGE), num_blocks=1)[0].transpose(0, 1)], None  # in two pieces
    yield [cache(device, shape=(8, 16, 64)).transpose(1, 2)], 128  # heads before tokens


@pytest.mark.parametrize("number", range(4))
def test_layouts(device, number):
    tensors, row_bytes = list(layouts(device))[number]
    paged = ibp.kv.PagedTensors(tensors)
    codec = ibp.kv.PageCodec.learn(tensors[0].contiguous(), row_bytes=row_bytes)
    blocks = [7, 2, 31]
    packed = ibp.kv.pack(paged, codec, blocks=blocks)
    assert packed.message.numel() == ibp.kv.packed_bytes(codec, 3 * len(tensors))
    plain = [torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for tensor in tensors]
    unpack(sent(packed), codec, plain, [0, 1, 2])
    for out, tensor in zip(plain, tensors):
        assert_same_bits(out[:3], tensor[blocks].contiguous())
    ibp.kv.pack(plain, codec, blocks=[0, 1, 2], out=packed.message)
    unpack(packed.message, codec, paged, [39, 38, 37])
    for tensor in tensors:
        assert_same_bits(tensor[[39, 38, 37]].contiguous(), tensor[blocks].contiguous())


def test_layers_one_by_one(device):
    """Layers that are sent alone, as they are computed, by the codec of all."""
    layers = [cache(device, seed=seed, scale=10.0**seed) for seed in range(3)]
    codec = ibp.kv.PageCodec.learn(torch.cat([layer[:4] for layer in layers]))
    for layer in layers:
        out = torch.zeros_like(layer)
        unpack(sent(ibp.kv.pack(layer, codec, blocks=[5, 6])), codec, out, [1, 2])
        assert_same_bits(out[1:3], layer[5:7])


def test_the_codec_travels(device):
    kv = cache(device)
    codec = ibp.kv.PageCodec.learn(kv)
    packed, out = ibp.kv.pack(kv, codec), torch.empty_like(kv)
    for there in (ibp.kv.PageCodec.from_bytes(codec.to_bytes()), pickle.loads(pickle.dumps(codec))):
        assert (there.fingerprint, there.page_bytes) == (codec.fingerprint, codec.page_bytes)
        unpack(sent(packed), there, out)
        assert_same_bits(out, kv)
        out.zero_()
    for content in (b"", codec.to_bytes()[:-1], codec.to_bytes() + b"0"):
        with pytest.raises(ValueError, match="the message is damaged"):
            ibp.kv.PageCodec.from_bytes(content)
    other = ibp.distributed.Codec.learn(cache(torch.device("cpu")))
    with pytest.raises(ValueError, match="of a Codec; wanted those of a PageCodec"):
        ibp.kv.PageCodec.from_bytes(ibp._common.wire.written(other))


@pytest.mark.parametrize("scheme", ["ibp", "planes"])
def test_given_codebooks(device, scheme):
    kv = cache(device)
    codebook = ibp.codecs.analyze(kv.view(-1, 1024), scheme=scheme, device=device)
    codec, out = ibp.kv.PageCodec(codebook, kv[0].nbytes), torch.empty_like(kv)
    unpack(sent(ibp.kv.pack(kv, codec)), codec, out)
    assert_same_bits(out, kv)
    with pytest.raises(ValueError, match="page_bytes is 1000; wanted whole rows of 2048 bytes"):
        ibp.kv.PageCodec(codebook, 1000)
    long = ibp.codecs.analyze(kv.view(-1, 1 << 15), scheme=scheme, device=device)
    with pytest.raises(ValueError, match="rows of 65536 bytes; wanted at most 65534"):
        ibp.kv.PageCodec(long, 1 << 17)


def test_inference_mode(device):
    """Memory that is made in it is written to outside, and the other way round."""
    codec, kv = ibp.kv.PageCodec.learn(cache(device)), cache(device)
    for made_in, used_in in ((True, False), (False, True)):
        with torch.inference_mode(made_in):
            out, packed = torch.zeros_like(kv), ibp.kv.pack(kv, codec)
            unpack(packed.message, codec, out)
        with torch.inference_mode(used_in):
            unpack(ibp.kv.pack(kv, codec, out=packed.message).message, codec, out)
            assert_same_bits(out, kv)
            with pytest.raises(ValueError, match="a different number of pages"):
                unpack(packed.message, codec, out, [1])


# ---- what is refused ----


def test_a_message_of_another_codec_or_size(device):
    kv = cache(device)
    codec, other = ibp.kv.PageCodec.learn(kv), ibp.kv.PageCodec.learn(cache(device, scale=1e-3))
    wide = ibp.kv.PageCodec(codec.codebook, 2 * codec.page_bytes)
    assert len({codec.fingerprint, other.fingerprint, wide.fingerprint}) == 3
    message, _ = ibp.kv.pack(kv, codec, blocks=[1, 2, 3, 4])
    out = torch.ones_like(kv)
    for read_by, tensor, blocks in (
        (other, out, [1, 2, 3, 4]),
        (wide, out.view(NUM_BLOCKS // 2, -1), [1, 2]),
        (codec, out, [1, 2, 3]),
        (codec, out, []),
    ):
        with pytest.raises(ValueError, match="was not packed by this codec, or holds a different number of pages"):
            unpack(message, read_by, tensor, blocks)
        read_by.check()  # it was raised once
    assert not out[1:5].any() and (out[6:] == 1).all()
    unpack(message, codec, out, [1, 2, 3, 4])
    assert_same_bits(out[1:5], kv[1:5])


def test_a_message_that_has_not_arrived(device):
    kv = cache(device)
    codec = ibp.kv.PageCodec.learn(kv)
    nothing = torch.zeros(ibp.kv.packed_bytes(codec, 4), dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="was not packed by this codec"):
        unpack(nothing, codec, kv, [0, 1, 2, 3])
    assert not kv[:4].any()
    half = sent(ibp.kv.pack(kv, codec))
    half = half[: half.numel() // 2]
    with pytest.raises(ibp.CorruptTableError, match="piece [0-9]+ of a message"):
        unpack(half, codec, kv)
    with pytest.raises(ValueError, match="message has 64 bytes; wanted [0-9]+ or more"):
        unpack(half[:64], codec, kv)


def test_a_buffer_that_is_used_for_each_message(device):
    """Pages are unpacked before later work on the stream writes the buffer."""
    kv = cache(device)
    codec, out = ibp.kv.PageCodec.learn(kv), torch.zeros_like(kv)
    buffer = torch.empty(ibp.kv.packed_bytes(codec, 1), dtype=torch.uint8, device=device)
    for block in range(NUM_BLOCKS):
        packed = ibp.kv.pack(kv, codec, blocks=[block], out=buffer)
        ibp.kv.unpack(packed.message, codec, out=out, blocks=[block])
        buffer.fill_(255)
    codec.check()
    assert_same_bits(out, kv)


def test_damaged_messages(device):
    """Any bit may have flipped: an error or other values come, and nothing is written but the blocks."""
    kv, guard = cache(device), 0.5
    codec, generator = ibp.kv.PageCodec.learn(kv), torch.Generator().manual_seed(0)
    right = sent(ibp.kv.pack(kv, codec, blocks=[0, 1, 2]))
    index = 64 + 10 * 3 * codec.page_bytes // codec.codebook.row_bytes
    num_raised = 0
    for trial in range(60):
        message, end = right.clone(), index if trial % 2 else right.numel()
        place = int(torch.randint(0, end, (1,), generator=generator))
        message[place] ^= 1 << trial % 8
        out = torch.full_like(kv, guard)
        try:
            unpack(message, codec, out, [10, 20, 30])
        except ValueError:
            num_raised += 1
        untouched = [b for b in range(NUM_BLOCKS) if b not in (10, 20, 30)]
        assert (out[untouched] == guard).all()
    assert num_raised > 20
    noise_ = torch.randint(256, (right.numel(),), generator=generator, dtype=torch.uint8).to(device)
    noise_[:64] = right[:64]
    with pytest.raises(ibp.CorruptTableError):
        unpack(noise_, codec, kv, [1, 2, 3])


def test_wrong_arguments(device):
    kv = cache(device)
    codec = ibp.kv.PageCodec.learn(kv)
    size = ibp.kv.packed_bytes(codec, NUM_BLOCKS)
    buffer = torch.empty(size + 64, dtype=torch.uint8, device=device)
    for out, error, message in (
        (buffer[: size - 1], ValueError, f"out has {size - 1} bytes; wanted {size} or more"),
        (buffer[1:], ValueError, "no multiple of 64"),
        (buffer[: size // 64 * 64].view(64, -1), ValueError, "of one dimension"),
        (buffer.view(torch.int8), ValueError, "wanted contiguous torch.uint8"),
        (buffer[::2], ValueError, "wanted contiguous torch.uint8"),
        ([1], TypeError, "out is a list; wanted a tensor"),
    ):
        with pytest.raises(error, match=message):
            ibp.kv.pack(kv, codec, out=out)
    for pages, error, message in (
        (kv[:, :8], ValueError, "a block has 8192 bytes; the codec's pages have 16384"),
        ([kv, kv[1:]], ValueError, "the tensors differ"),
        (kv.view(NUM_BLOCKS, 16, 64, 8).transpose(2, 3), ValueError, "make the codec with a row_bytes"),
        ("kv", TypeError, "wanted a tensor"),
    ):
        with pytest.raises(error, match=message):
            ibp.kv.pack(pages, codec)
        with pytest.raises(error, match=message):
            ibp.kv.unpack(buffer, codec, out=pages)
    with pytest.raises(IndexError, match=r"blocks\[1\] is 40; wanted 0 to 39"):
        ibp.kv.pack(kv, codec, blocks=[0, 40])
    with pytest.raises(ValueError, match="blocks has a number more than once"):
        ibp.kv.unpack(buffer, codec, out=kv, blocks=[1, 1])
    with pytest.raises(ValueError, match="num_pages is -1"):
        ibp.kv.packed_bytes(codec, -1)
    with pytest.raises(ValueError, match="max_sms"):
        ibp.kv.pack(kv, codec, max_sms=0)
    with pytest.raises(TypeError):
        ibp.kv.PageCodec("codebook", 4096)


def test_numbers_that_the_host_does_not_know(device, monkeypatch):
    """A page of a block that does not exist is damaged where it arrives; others are right."""
    if device.type == "cpu":  # as if the numbers were a GPU's
        monkeypatch.setattr(_paged, "numbers_on", lambda device, name, numbers, count: (numbers.long(), None))
    kv = cache(device)
    codec = ibp.kv.PageCodec.learn(kv)
    paged, out = ibp.kv.PagedTensors([kv, kv.flip(0)]), [torch.ones_like(kv) for _ in range(2)]
    packed = ibp.kv.pack(paged, codec, blocks=torch.tensor([3, NUM_BLOCKS, 5, -1], device=device))
    with pytest.raises(IndexError, match="a block number that was packed is out of range"):
        codec.check()
    targets = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=device)
    with pytest.raises(ibp.CorruptTableError, match="of a message"):
        unpack(sent(packed), codec, out, targets)
    for tensor, right in zip(out, paged.tensors):
        assert_same_bits(tensor[[1, 3]], right[[3, 5]])
        assert not tensor[[2, 4]].any() and (tensor[5:] == 1).all()
    packed = ibp.kv.pack(paged, codec, blocks=torch.tensor([3, 4], device=device))
    with pytest.raises(IndexError, match="to be unpacked to is out of range"):
        ibp.kv.unpack(packed.message, codec, out=out, blocks=torch.tensor([-1, 8], device=device))
        if device.type == "cuda":  # the next call says it
            torch.cuda.synchronize()
            ibp.kv.pack(paged, codec)
    codec.check()
    assert_same_bits(out[0][8], kv[4])


# ---- on the GPU ----


def test_graphs(cuda):
    """Both ends captured: block numbers, pages and the message are other ones at each replay."""
    kv, out = cache(cuda), cache(cuda, seed=1)
    codec = ibp.kv.PageCodec.learn(kv)
    paged, to = ibp.kv.PagedTensors(kv), ibp.kv.PagedTensors(out)
    blocks, targets = torch.arange(8, device=cuda), torch.arange(8, device=cuda)
    buffer = torch.empty(ibp.kv.packed_bytes(codec, 8), dtype=torch.uint8, device=cuda)
    arrived = torch.zeros_like(buffer)

    def transfer():
        used = ibp.kv.pack(paged, codec, blocks=blocks, out=buffer).used
        arrived.copy_(buffer)
        ibp.kv.unpack(arrived, codec, out=to, blocks=targets)
        return used

    transfer()
    codec.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        used = transfer()
    for seed in range(3):
        kv.copy_(noise(cuda) if seed == 1 else cache(cuda, seed=seed + 2))
        blocks.copy_(torch.randperm(NUM_BLOCKS)[:8])
        targets.copy_(torch.randperm(NUM_BLOCKS)[:8])
        arrived.zero_()
        graph.replay()
        assert_same_bits(out[targets], kv[blocks])
        assert int(used) == int(ibp.kv.pack(paged, codec, blocks=blocks).used)
    codec.check()


def test_the_host_does_not_wait(cuda):
    kv, out = cache(cuda), torch.zeros(NUM_BLOCKS, *PAGE, dtype=torch.bfloat16, device=cuda)
    codec = ibp.kv.PageCodec.learn(kv)
    paged, to = ibp.kv.PagedTensors(kv), ibp.kv.PagedTensors(out)
    numbers = torch.arange(NUM_BLOCKS, device=cuda)
    for blocks in (None, numbers, list(range(NUM_BLOCKS))):
        unpack(ibp.kv.pack(paged, codec, blocks=blocks).message, codec, to, blocks)
        out.zero_()
        torch.cuda.synchronize()
        own = torch.cuda.Stream(cuda)
        with torch.cuda.stream(own):
            torch.cuda._sleep(200_000_000)
            torch.cuda.set_sync_debug_mode("error")
            try:
                packed = ibp.kv.pack(paged, codec, blocks=blocks)
                ibp.kv.unpack(packed.message, codec, out=to, blocks=blocks)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not own.query()
            codec.check()
            assert_same_bits(out, kv)


def test_messages_of_both_devices_are_read_by_both(cuda):
    kv = cache(cuda)
    codec, out = ibp.kv.PageCodec.learn(kv), torch.empty_like(kv)
    unpack(sent(ibp.kv.pack(kv, codec)).cpu(), codec, out_of_host := torch.empty_like(kv, device="cpu"))
    assert_same_bits(out_of_host, kv.cpu())
    unpack(sent(ibp.kv.pack(kv.cpu(), codec)).to(cuda), codec, out)
    assert_same_bits(out, kv)
    with pytest.raises(ValueError, match="wanted contiguous torch.uint8 of one dimension on cuda"):
        ibp.kv.unpack(ibp.kv.pack(kv.cpu(), codec).message, codec, out=kv)
