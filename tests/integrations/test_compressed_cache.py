"""CompressedCache of transformers: the tokens and logits of DynamicCache, whatever is done to the cache."""

import copy
import gc
import inspect
import itertools
import pickle

import pytest
import torch

from helpers import assert_same_bits
from interrupts import interrupt_at

pytestmark = pytest.mark.frameworks
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.cache_utils import DynamicSlidingWindowLayer  # noqa: E402

import ibp  # noqa: E402
from ibp.integrations.transformers import CompressedCache, CompressedLayer  # noqa: E402

# What models call their cache: past_key_values before transformers 5.24.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
HEADS, HEAD_DIM, LAYERS = 2, 16, 2
SMALL = {"block": 16, "window": 8}


def config(**options):
    return LlamaConfig(
        vocab_size=256,
        hidden_size=4 * HEAD_DIM,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        max_position_embeddings=1024,
        **options,
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(config()).bfloat16().eval()


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(256, (2, 70), generator=torch.Generator().manual_seed(1))


def answer(model, ids, cache, new_tokens=24, **options):
    torch.manual_seed(2)
    options = {"do_sample": False} | options
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        **{CACHE: cache},
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def assert_same_answer(answer, wanted):
    assert torch.equal(answer.sequences, wanted.sequences)
    assert len(answer.logits) == len(wanted.logits)
    for logits, right in zip(answer.logits, wanted.logits):
        assert_same_bits(logits, right)


def assert_same_tokens(cache, wanted):
    """Whether two caches hold the same bits."""
    for layer, right in zip(cache.layers, wanted.layers, strict=True):
        assert layer.get_seq_length() == right.get_seq_length()
        if right.get_seq_length():
            assert_same_bits(layer.keys, right.keys)
            assert_same_bits(layer.values, right.values)


def states(num_tokens, batch=2, dtype=torch.bfloat16, device="cpu", scale=0.02, heads=HEADS, dim=HEAD_DIM):
    """Keys and values as models give them: [B, heads, tokens, dim], tokens before heads in memory."""
    return tuple(
        (torch.randn(batch, num_tokens, heads, dim, device=device) * scale).to(dtype).transpose(1, 2) for _ in range(2)
    )


class Twins:
    """A CompressedCache and a DynamicCache that are given the same tokens, layer by layer as a model does."""

    def __init__(self, layers=LAYERS, device="cpu", dtype=torch.bfloat16, **options):
        self.device, self.dtype, self.num_layers = device, dtype, layers
        self.cache, self.right, self.batch = CompressedCache(**(SMALL | options)), DynamicCache(), 2

    def add(self, num_tokens, **options):
        for index in range(self.num_layers):
            keys, values = states(num_tokens, self.batch, self.dtype, self.device, **options)
            got, wanted = (cache.update(keys, values, index) for cache in (self.cache, self.right))
            for tensor, right in zip(got, wanted):
                assert tensor.stride() == right.stride()
                assert_same_bits(tensor, right)
        return self

    def both(self, name, *args):
        for cache in (self.cache, self.right):
            getattr(cache, name)(*args)
        assert_same_tokens(self.cache, self.right)
        return self

    def grow(self, steps):
        for _ in range(steps):
            self.add(1)
        return self


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampled, several answers"],
)
def test_tokens_and_logits_are_those_of_a_dynamic_cache(model, prompt, options):
    cache, right = CompressedCache(model.config, **SMALL), DynamicCache(config=model.config)
    assert_same_answer(answer(model, prompt, cache, **options), answer(model, prompt, right, **options))
    assert_same_tokens(cache, right)
    stats = cache.stats()
    assert stats.num_tokens == 93 and stats.num_coded_tokens == 80
    assert 0.25 < stats.savings < 0.4


@pytest.mark.parametrize("options", [{"memory": "device"}, {"scheme": "ibp"}, {"scheme": "raw"}, {"level": "fast"}])
def test_every_option_gives_the_same_bits(options):
    twins = Twins(**options).add(70).grow(20)
    assert_same_tokens(twins.cache, twins.right)
    saved = twins.cache.stats().savings
    assert saved == 0 if options == {"scheme": "raw"} else saved > 0.1


@pytest.mark.parametrize("block, window", [(1, 0), (3, 0), (16, 0), (24, 100), (64, 1)])
def test_any_block_and_window(block, window):
    twins = Twins(block=block, window=window).add(70).grow(19)
    raw = twins.cache.layers[0].raw[0].shape[-2]
    assert min(89, window) <= raw <= window + 2 * block


@pytest.mark.parametrize("window", [2, 40], ids=["into coded blocks", "within the window"])
def test_assisted_decoding_crops(model, prompt, window):
    torch.manual_seed(5)
    assistant = LlamaForCausalLM(config()).bfloat16().eval()  # whose proposals are mostly wrong
    cache, right = CompressedCache(model.config, block=8, window=window), DynamicCache(config=model.config)
    got = answer(model, prompt[:1], cache, 12, assistant_model=assistant)
    assert_same_answer(got, answer(model, prompt[:1], right, 12, assistant_model=assistant))
    assert_same_tokens(cache, right)


def test_prompt_in_chunks_and_several_answers(model, prompt):
    cache, right = CompressedCache(model.config, **SMALL), DynamicCache(config=model.config)
    answers = []
    for each in (cache, right):
        first = answer(model, prompt, each, 10, prefill_chunk_size=20)
        more = torch.cat([first.sequences, prompt[:, :33]], dim=-1)
        answers.append((first, answer(model, more, each, 10)))
    for got, wanted in zip(*answers):
        assert_same_answer(got, wanted)
    assert_same_tokens(cache, right)


def test_a_copy_of_a_prompt_serves_many_answers(model, prompt):
    cache, right = CompressedCache(model.config, **SMALL), DynamicCache(config=model.config)
    with torch.no_grad():
        for each in (cache, right):
            model(prompt, **{CACHE: each})
    copy.deepcopy(cache)  # which stores what is being coded
    before = cache.stats()
    for seed in range(2):
        ids = torch.cat([prompt, torch.randint(256, (2, 5), generator=torch.Generator().manual_seed(seed))], dim=-1)
        got, wanted = (answer(model, ids, copy.deepcopy(each), 12) for each in (cache, right))
        assert_same_answer(got, wanted)
    assert cache.stats() == before


def test_forward_within_inference_mode_and_without(model, prompt):
    cache, right = CompressedCache(model.config, **SMALL), DynamicCache(config=model.config)
    for start, end, mode in ((0, 40, torch.inference_mode), (40, 60, torch.no_grad), (60, 70, torch.inference_mode)):
        with mode():
            logits = [model(prompt[:, start:end], **{CACHE: each}).logits for each in (cache, right)]
        assert_same_bits(*logits)
    with torch.no_grad():
        for _ in range(12):
            assert_same_bits(*(model(prompt[:, :1], **{CACHE: each}).logits for each in (cache, right)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype):
    twins = Twins(dtype=dtype).add(70).grow(20)
    assert_same_tokens(twins.cache, twins.right)
    assert twins.cache.stats().savings > (0.1 if dtype != torch.float64 else 0.05)


def test_float8():
    twins = Twins(dtype=torch.float8_e4m3fn, layers=2)
    for num_tokens in (64, 1, 1, 30, 1):
        for index in range(2):
            keys, values = states(num_tokens, dtype=torch.float8_e4m3fn, scale=0.1)
            got = twins.cache.update(keys, values, index)
            wanted = twins.right.update(keys.view(torch.uint8), values.view(torch.uint8), index)
            for tensor, right in zip(got, wanted):
                assert_same_bits(tensor.view(torch.uint8), right)
    assert twins.cache.stats().num_coded_tokens == 80


def test_values_may_be_of_another_width():
    cache, right = CompressedCache(**SMALL), DynamicCache()
    for num_tokens in (70, 1, 30, 1):
        keys, values = states(num_tokens, dim=24)[0], states(num_tokens, dim=8)[1]
        for got, wanted in zip(cache.update(keys, values, 0), right.update(keys, values, 0)):
            assert_same_bits(got, wanted)
    assert cache.stats().num_coded_tokens == 80


@pytest.mark.parametrize("scheme", ["planes", "raw"])
@pytest.mark.parametrize("removed", [1, 9, 17, 40, 76, 100])
def test_crop(removed, scheme):
    twins = Twins(scheme=scheme).add(70).grow(6)
    twins.both("crop", -removed).grow(20)
    assert_same_tokens(twins.cache, twins.right)


def test_much_that_was_cropped_is_coded_anew():
    twins = Twins().add(400).grow(2)
    full = twins.cache.stats().stored_bytes
    twins.both("crop", -300).grow(3)
    assert twins.cache.stats().num_coded_tokens == 96
    assert twins.cache.stats().stored_bytes < 0.3 * full
    twins.both("crop", 0).grow(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python prints interrupts in __del__.
@pytest.mark.parametrize("call", ["store", "crop", "sparse", "crop while blocks are coded", "reset"])
def test_interrupted_changes_lose_no_token(call):
    """Whether blocks were added or removed or not, each token is either coded or raw."""
    for moment in itertools.count():
        layer, (keys, values) = CompressedLayer(ibp.kv.TokenCoder(**SMALL)), states(70)
        layer.update(keys, values)
        if call == "store":
            _, interrupts = interrupt_at(moment, None, lambda: layer.store(wait=True))
            possible = {70}
        elif call == "crop while blocks are coded":
            assert layer._pending.num_blocks == 3
            _, interrupts = interrupt_at(moment, None, lambda: layer.crop(-50))
            layer.store(wait=True)
            possible = {70, 20}
        elif call == "reset":
            layer.store(wait=True)
            _, interrupts = interrupt_at(moment, None, layer.reset)
            possible = {70, 0}
            if layer.get_seq_length() == 0:
                assert layer.keys is None
                layer.update(keys, values)
        else:
            layer.store(wait=True)
            removed = 20 if call == "crop" else 60
            _, interrupts = interrupt_at(moment, None, lambda: layer.crop(-removed))
            possible = {70, 70 - removed}
        assert layer.get_seq_length() in possible
        for got, wanted in zip((layer.keys, layer.values), (keys, values)):
            assert_same_bits(got, wanted[:, :, : layer.get_seq_length()])
        if not interrupts:
            break
    assert moment > 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python prints interrupts in __del__.
@pytest.mark.parametrize("is_stored", [False, True])
def test_an_interrupted_reorder_reorders_all_tokens_or_none(is_stored):
    """Tokens that are coded, that are being coded, and that are raw."""
    order = torch.tensor([1, 1])
    for moment in itertools.count():
        layer, (keys, values) = CompressedLayer(ibp.kv.TokenCoder(**SMALL)), states(70)
        layer.update(keys, values)
        layer.store(wait=True)
        more = states(40)
        layer.update(*more)
        keys, values = (torch.cat(pair, dim=-2) for pair in zip((keys, values), more))
        assert layer._pending is not None and layer.history.num_blocks
        _, interrupts = interrupt_at(moment, None, lambda: layer.reorder_cache(order))
        if is_stored:
            layer.store(wait=True)
        found, wanted = (layer.keys, layer.values), (keys, values)
        if torch.equal(found[0][:1, :, -1], keys[1:, :, -1]):
            wanted = keys[order], values[order]
        for got, tensor in zip(found, wanted):
            assert_same_bits(got, tensor)
        if not interrupts:
            assert_same_bits(wanted[0], keys[order])
            break
    assert moment > 5


def test_crop_wants_a_number_that_is_not_positive():
    twins = Twins().add(20)
    with pytest.raises(ValueError, match="tokens_to_remove is 3"):
        twins.cache.crop(3)


@pytest.mark.parametrize("scheme", ["planes", "raw"])
def test_sequences_reordered_repeated_and_selected(scheme):
    twins = Twins(scheme=scheme).add(70).grow(2)
    twins.both("batch_repeat_interleave", 3)
    twins.batch = 6
    twins.grow(9)
    for order in ([5, 4, 3, 2, 1, 0], [0, 0, 1, 1, 5, 5], [2, 2, 2, 3, 3, 3]):
        twins.both("reorder_cache", torch.tensor(order)).grow(7)
    twins.both("crop", -30).grow(5)
    twins.both("batch_select_indices", torch.tensor([4, 1, 2]))
    twins.batch = 3
    twins.grow(20).both("batch_select_indices", torch.tensor([True, False, True]))
    twins.batch = 2
    twins.grow(20)


def test_a_reorder_while_blocks_are_coded_and_fetched():
    twins = Twins().add(70)  # the last layer's blocks are not stored yet, the first one is fetched ahead
    twins.both("reorder_cache", torch.tensor([1, 0])).grow(1)
    twins.grow(22).both("reorder_cache", torch.tensor([0, 0])).grow(30)


def test_coded_tokens_of_many_sequences_that_end_are_given_up():
    twins = Twins()
    twins.batch = 8
    twins.add(100).grow(1)
    full = twins.cache.stats().stored_bytes
    twins.both("batch_select_indices", torch.tensor([3]))
    twins.batch = 1
    twins.grow(2)
    assert twins.cache.stats().stored_bytes < 0.2 * full


def test_reset_and_use_again(model, prompt):
    cache = CompressedCache(model.config, **SMALL)
    wanted = answer(model, prompt, DynamicCache(), 20)
    for _ in range(2):
        assert_same_answer(answer(model, prompt, cache, 20), wanted)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.stats().host_bytes == 0
        assert cache.layers[0].keys is None and list(cache.layers[0].raw) == []


def test_layers_may_come_in_any_order_and_of_any_length():
    cache, right = CompressedCache(**SMALL), DynamicCache()
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        index = int(torch.randint(3, (1,), generator=generator)) if step > 2 else step
        keys, values = states(int(torch.randint(1, 25, (1,), generator=generator)))
        for got, wanted in zip(cache.update(keys, values, index), right.update(keys, values, index)):
            assert_same_bits(got, wanted)


def test_codebooks_are_learned_again_when_savings_fall():
    twins = Twins(layers=1, window=0).add(160, scale=0.02).grow(1)
    learned = twins.cache.stats().num_codebooks
    for _ in range(8):
        twins.add(16, scale=3000.0)
    stats = twins.cache.stats()
    assert learned == 2 and stats.num_codebooks == 4
    assert stats.savings > 0.28
    twins.both("crop", -100).grow(20)  # back into blocks of the first codebook
    twins.both("reorder_cache", torch.tensor([1, 1])).grow(20)


def test_noise_is_kept_raw():
    cache = CompressedCache(**SMALL)
    keys, values = (torch.randint(-(2**15), 2**15, (2, HEADS, 200, HEAD_DIM), dtype=torch.int16) for _ in range(2))
    cache.update(keys, values, 0)
    got = cache.update(keys[:, :, :1], values[:, :, :1], 0)
    assert_same_bits(got[0], torch.cat([keys, keys[:, :, :1]], dim=2))
    stats = cache.stats()
    assert stats.num_coded_tokens == 192 and 0 <= -stats.savings < 0.02


def test_tokens_that_compress_are_coded_after_noise():
    """A cache that was kept raw looks for codebooks again."""
    cache, right = CompressedCache(**SMALL), DynamicCache()
    for number in range(6):
        most = 4 if number else 2**15
        both = [torch.randint(-most, most, (2, HEADS, 96, HEAD_DIM), dtype=torch.int16) for _ in range(2)]
        for got, wanted in zip(cache.update(*both, 0), right.update(*both, 0)):
            assert_same_bits(got, wanted)
        assert cache.stats().num_codebooks == 2 * (number > 0)
    assert cache.stats().savings > 0.5


def test_given_codebooks(model, prompt):
    learned_from = DynamicCache()
    wanted = answer(model, prompt, learned_from, 20)
    keys, values = learned_from.layers[1].keys, learned_from.layers[1].values
    rows = (x[:, :, :64].contiguous().view(-1, 8 * HEAD_DIM) for x in (keys, values))
    books = tuple(ibp.codecs.analyze(x, scheme="planes") for x in rows)
    cache = CompressedCache(model.config, **SMALL, codebooks=books)
    assert_same_answer(answer(model, prompt, cache, 20), wanted)
    assert cache.stats().num_codebooks == 0 and cache.stats().savings > 0.1
    wrong = CompressedCache(block=7, codebooks=books)
    with pytest.raises(ValueError, match="rows of 256 bytes; wanted a divisor of 224"):
        wrong.update(keys, values, 0)


def test_sliding_layers_stay_those_of_transformers(prompt):
    torch.manual_seed(0)
    options = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {name: getattr(config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, use_sliding_window=True, **options)).bfloat16().eval()
    cache = CompressedCache(model.config, **SMALL)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, CompressedLayer]
    assert cache.is_sliding == [True, False]
    assert_same_answer(answer(model, prompt, cache), answer(model, prompt, DynamicCache(config=model.config)))
    copied = copy.deepcopy(cache)
    assert_same_tokens(copied, cache)


def test_encoder_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).bfloat16().eval()
    ids = torch.randint(64, (2, 50))
    answers = [
        answer(model, ids, EncoderDecoderCache(make(), make()), num_beams=2)
        for make in (lambda: CompressedCache(**SMALL), DynamicCache)
    ]
    assert_same_answer(*answers)


def test_compiled_code_breaks_at_updates():
    cache, right = CompressedCache(**SMALL), DynamicCache()

    @torch.compile(backend="eager")
    def scaled(keys, values):
        keys, values = cache.update(2 * keys, values, 0)
        return 2 * keys, values

    for num_tokens in (50, 1, 30):
        keys, values = states(num_tokens)
        got, wanted = scaled(keys, values), right.update(2 * keys, values, 0)
        assert_same_bits(got[0], 2 * wanted[0])
        assert_same_bits(got[1], wanted[1])
    assert not cache.is_compileable and cache.stats().num_coded_tokens > 0


def test_a_cache_answers_what_generation_asks(model, prompt):
    cache = CompressedCache(model.config, **SMALL)
    assert len(cache) == LAYERS and not cache.is_initialized and cache.get_seq_length() == 0
    assert cache.get_max_length() == -1 and cache.is_croppable
    with torch.no_grad():
        model(prompt, **{CACHE: cache})
    assert cache.get_seq_length() == 70 and cache.get_mask_sizes(3, 0) == (73, 0) and cache.is_initialized
    assert [keys.shape for keys, _, _ in cache] == [torch.Size([2, HEADS, 70, HEAD_DIM])] * LAYERS
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert "70 tokens, 48 of them coded" in repr(cache.layers[0])
    stats = cache.stats()
    plain_bytes = sum(2 * keys.nbytes for keys, _, _ in cache)
    assert stats.nbytes == stats.host_bytes + stats.device_bytes and stats.plain_bytes == plain_bytes
    assert (
        f"CompressedCache(2 layers, tokens=70, coded=48, nbytes={stats.nbytes:,} "
        f"({stats.nbytes / plain_bytes:.1%} of {plain_bytes:,}), stored_bytes={stats.stored_bytes:,}, savings="
    ) in repr(cache)
    cropped = copy.deepcopy(cache)
    cropped.crop(-27)  # the 48 coded tokens came in one call, so their bytes are kept
    assert cropped.stats().plain_bytes == sum(2 * keys.nbytes for keys, _, _ in cropped) < plain_bytes
    assert cropped.stats().original_bytes > cropped.stats().plain_bytes
    cropped.batch_repeat_interleave(2)
    assert cropped.stats().plain_bytes == sum(2 * keys.nbytes for keys, _, _ in cropped)
    with pytest.raises(AttributeError, match="cannot be set"):
        cache.layers[0].keys = prompt
    for held in (cache, cache.layers[0]):
        with pytest.raises(TypeError, match="cannot be pickled.*: .*pickle .* keys and values"):
            pickle.dumps(held)
    again = CompressedCache(model.config, **SMALL)  # what the message says
    for number, layer in enumerate(cache.layers):
        again.update(*pickle.loads(pickle.dumps((layer.keys, layer.values))), number)
    assert again.get_seq_length() == 70
    for layer, other in zip(cache.layers, again.layers):
        assert_same_bits(other.keys, layer.keys)
        assert_same_bits(other.values, layer.values)
    cache.early_initialization(2, HEADS, HEAD_DIM, torch.bfloat16, torch.device("cpu"))
    early = CompressedCache(model.config, **SMALL)
    early.early_initialization(2, HEADS, HEAD_DIM, torch.bfloat16, torch.device("cpu"))
    assert early.is_initialized and early.get_seq_length() == 0
    assert_same_answer(answer(model, prompt, early, 20), answer(model, prompt, DynamicCache(), 20))


@pytest.mark.parametrize(
    "dtype, heads, dim",
    [(torch.bfloat16, 8, 128), (torch.bfloat16, 2, 32), (torch.float16, 4, 64), (torch.float32, 4, 64)],
)
def test_a_cache_that_grows_takes_less_than_a_plain_one(dtype, heads, dim):
    cache, sizes = CompressedCache(), []
    for count in [1] + 2300 // 23 * [23]:
        cache.update(*states(count, 1, dtype, heads=heads, dim=dim), 0)
        stats = cache.stats()
        sizes.append((stats.num_tokens, stats.nbytes / stats.plain_bytes))
    assert max(size for num_tokens, size in sizes if num_tokens >= 128) < 1
    assert all(size <= 1 for num_tokens, size in sizes if num_tokens < 128)


def test_how_much_a_cache_takes_that_grows():
    """The figures are those of docs/kv-cache.md: the most that the cache takes from a length on."""
    cache, sizes = CompressedCache(), []
    for _ in range(96):
        cache.update(*states(64, 1, heads=8, dim=128), 0)
        cache.layers[0].store(wait=True)
        sizes.append(cache.stats().nbytes / cache.stats().plain_bytes)
    for num_tokens, most in ((128, 0.99), (256, 0.99), (1024, 0.89), (4096, 0.84)):
        assert most - 0.02 < max(sizes[num_tokens // 64 - 1 :]) < most + 0.005


@pytest.mark.parametrize("num_tokens, share", [(128, 0.83), (256, 0.75), (1024, 0.69), (4096, 0.67)])
def test_a_prompt_takes_its_coded_bytes_and_the_raw_window(num_tokens, share):
    """The figures are those of docs/kv-cache.md."""
    cache = CompressedCache()
    cache.update(*states(num_tokens, 1, heads=8, dim=128), 0)
    cache.layers[0].store(wait=True)
    assert f"{cache.stats().nbytes / cache.stats().plain_bytes:.2f}" == f"{share:.2f}"


@pytest.mark.filterwarnings("error::FutureWarning")
def test_the_present_name_of_the_cache_warns_of_nothing(model, prompt):
    with torch.no_grad():
        model(prompt, **{CACHE: CompressedCache(model.config)})
    answer(model, prompt, CompressedCache(model.config))


def test_gradients_are_refused(model, prompt):
    with pytest.raises(RuntimeError, match="torch.no_grad"):
        model(prompt, **{CACHE: CompressedCache(model.config)})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory": "disk"}, "memory is 'disk'"),
        ({"scheme": "zip"}, "scheme is 'zip'"),
        ({"level": "best"}, "level is 'best'"),
        ({"block": 0}, "block"),
        ({"window": -1}, "window"),
        ({"max_sms": 0}, "max_sms"),
        ({"codebooks": (None,)}, "codebooks are a pair"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        CompressedCache(**options)


def test_other_devices_are_refused():
    cache = CompressedCache()
    keys, values = (x.to("meta") for x in states(3))
    with pytest.raises(ValueError, match="meta"):
        cache.update(keys, values, 0)


def test_damaged_tokens_are_noticed():
    twins = Twins(layers=1).add(100)
    layer = twins.cache.layers[0]
    layer.store(wait=True)
    ((_, memory),) = layer.history.arena.parts()
    memory[:4096] = 255
    memory[-4096:] = 255
    layer.history.keys.spans[0]._lengths.view(torch.int16)[:] = 9
    keys, values = states(1)
    with pytest.raises(RuntimeError, match="damaged"):
        twins.cache.update(keys, values, 0)


# ---- on a GPU ----


@pytest.mark.parametrize("memory", ["pinned", "device"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampled"])
def test_answers_on_a_gpu(cuda, model, prompt, memory, options):
    near, ids = copy.deepcopy(model).to(cuda), prompt.to(cuda)
    cache, right = CompressedCache(near.config, **SMALL, memory=memory), DynamicCache(config=near.config)
    assert_same_answer(answer(near, ids, cache, **options), answer(near, ids, right, **options))
    assert_same_tokens(cache, right)
    stats = cache.stats()
    assert stats.num_coded_tokens == 80 and stats.savings > 0.25
    if memory == "pinned":
        assert stats.host_bytes >= stats.stored_bytes and stats.fetched_bytes >= stats.stored_bytes
    else:
        assert stats.host_bytes == stats.fetched_bytes == stats.sent_bytes == 0


@pytest.mark.parametrize("memory", ["pinned", "device"])
@pytest.mark.parametrize("scheme", ["planes", "ibp", "raw"])
def test_changes_on_a_gpu(cuda, memory, scheme):
    twins = Twins(device=cuda, memory=memory, scheme=scheme, layers=4).add(300).grow(40)
    twins.both("crop", -3).grow(20).both("crop", -90).grow(2)
    twins.both("batch_repeat_interleave", 2)
    twins.batch = 4
    twins.grow(20).both("reorder_cache", torch.tensor([3, 3, 0, 1], device=cuda)).grow(40)
    twins.both("batch_select_indices", torch.tensor([2], device=cuda))
    twins.batch = 1
    twins.add(50).grow(30)
    copied = copy.deepcopy(twins.cache)
    assert_same_tokens(copied, twins.right)


def test_long_histories_on_a_gpu(cuda):
    """The host is far ahead of the GPU, with many fetches under way."""
    shape = {"heads": 8, "dim": 128}
    cache, right = CompressedCache(), DynamicCache()
    for num_tokens in [3000, 1, 1, 1000] + [1] * 80:
        for index in range(6):
            keys, values = states(num_tokens, device=cuda, **shape)
            got, wanted = cache.update(keys, values, index), right.update(keys, values, index)
            for tensor, exact in zip(got, wanted):
                assert torch.equal(tensor, exact)
    assert cache.stats().num_coded_tokens > 3900
    assert 0.30 < cache.stats().savings < 0.34


def test_other_streams_and_caches_that_are_dropped(cuda):
    side = torch.cuda.Stream(cuda)
    for stream in (side, torch.cuda.current_stream(cuda), side):
        stream.wait_stream(torch.cuda.default_stream(cuda))
        with torch.cuda.stream(stream):
            twins = Twins(device=cuda, layers=2)
            twins.add(200).grow(3)
            kept = [torch.full((1 << 20,), 7.0, device=cuda) for _ in range(4)]
            del twins  # while the next layer is being fetched
            gc.collect()
            more = [torch.full((1 << 20,), 8.0, device=cuda) for _ in range(4)]
            assert all(bool((x == 7).all()) for x in kept) and all(bool((x == 8).all()) for x in more)
        torch.cuda.default_stream(cuda).wait_stream(stream)


def test_layers_on_two_streams_of_use(cuda):
    twins = Twins(device=cuda, layers=2).add(200)
    side = torch.cuda.Stream(cuda)
    for step in range(40):
        stream = side if step % 3 else torch.cuda.default_stream(cuda)
        stream.wait_stream(torch.cuda.default_stream(cuda))
        with torch.cuda.stream(stream):
            twins.add(1)
        torch.cuda.default_stream(cuda).wait_stream(stream)


def test_graphs_are_refused(cuda):
    twins = Twins(device=cuda, layers=1).add(100)
    keys, values = states(1, device=cuda)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        twins.cache.update(keys, values, 0)
    twins.grow(3)


def test_layers_on_two_gpus(gpus):
    cache, right = CompressedCache(**SMALL), DynamicCache()
    for step, num_tokens in enumerate([200, 1, 1, 20] + [1] * 30):
        for index in range(4):
            with torch.cuda.device(step % 2):  # whichever is current
                keys, values = states(num_tokens, device=f"cuda:{index // 2}")
                got, wanted = cache.update(keys, values, index), right.update(keys, values, index)
            for tensor, exact in zip(got, wanted):
                assert_same_bits(tensor, exact)
    assert len(cache._coder.devices) == 2 and cache.stats().num_coded_tokens == 240
