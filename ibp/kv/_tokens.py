"""`ibp.kv.TokenCoder`: what the layers of a KV-cache that grows have in common."""

from __future__ import annotations

import torch

from .._common.arguments import whole_number
from .._common.process import OfThisProcess
from .._fetch.calls import sms_of
from .._machine import memory as _memory
from .._schemes import AnyCodebook, check_scheme
from ._coding import Form, Options
from ._decoder import TokenDecoder, decoder_for
from ._history import TokenHistory

_SCHEMES = ("planes", "ibp", "raw")
_MOST_TOKENS = 2**31  # the largest block and window, in tokens


class TokenCoder(OfThisProcess):
    """How a KV-cache that grows token by token codes the older tokens of its layers, and what brings them back.

    It is for engines that keep the keys of a layer in one tensor, and the values in another one, as transformers does.
    `BlockStore` is for engines with paged caches. All layers of a cache have one coder, so that the coded bytes of one
    layer come while another layer's are decoded. Blocks of tokens are coded on the device of the keys and values, with
    codebooks that are learned from the first blocks (the prompt's, as in section 6.4 of the paper), and again when
    savings fall.

    Example:
        >>> coder = ibp.kv.TokenCoder(block=16, window=32)
        >>> [coder.num_due(num_raw) for num_raw in (32, 47, 48, 100)]    # blocks of 16 tokens that leave the window
        [0, 0, 1, 4]
        >>> layers = [coder.history(*torch.randn(2, 1, 4, 48, 32)) for _ in range(2)]
        >>> layers[0].num_tokens, coder.fetched_bytes
        (0, 0)

    Args:
        block: how many tokens are coded together, at least 1.
        window: how many of the newest tokens stay raw with the caller, at least 0.
        memory: where coded tokens are: "pinned", host memory that the GPU reads; or "device". None: pinned.
        scheme: "planes", "ibp" (the paper's) or "raw": blocks are moved as they are. Keys or values of which a codebook
            saves less than 2 % are kept raw even with the other schemes.
        level: level of scheme "planes", as in `ibp.compress`.
        codebooks: the initial codebooks of keys and of values, for all layers, made by `ibp.codecs.analyze` from
            tensors whose rows are one or more whole tokens of a head. None: they are learned.
        max_sms: at most this many multiprocessors decode. None: all, but 32 if tokens come over the link and a codebook
            has the same entries for every column.

    Attributes:
        memory: "pinned" or "device".
        devices: the devices of the layers so far.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """

    _instead = "make another with the same arguments"

    def __init__(
        self,
        *,
        block: int = 64,
        window: int = 64,
        memory: str | None = None,
        scheme: str = "planes",
        level: str = "default",
        codebooks: tuple[AnyCodebook, AnyCodebook] | None = None,
        max_sms: int | None = None,
    ) -> None:
        _memory.check_memory(memory, among=("device", "pinned"))
        if scheme not in _SCHEMES:
            raise ValueError(f"scheme is {scheme!r}; wanted one of {list(_SCHEMES)}")
        check_scheme("planes", level=level)
        if codebooks is not None and (scheme == "raw" or len(codebooks) != 2):
            raise ValueError("codebooks are a pair, of keys and of values, and not for scheme 'raw'")
        block = whole_number("block", block, 1, _MOST_TOKENS)
        window, self.memory = whole_number("window", window, 0, _MOST_TOKENS), memory or "pinned"
        self._options = Options(block, window, self.memory, scheme, level, codebooks, sms_of(max_sms))
        self._decoders: dict[torch.device, TokenDecoder] = {}

    @property
    def block(self) -> int:
        """How many tokens are coded together."""
        return self._options.block

    @property
    def devices(self) -> list[torch.device]:
        return list(self._decoders)

    def history(self, keys: torch.Tensor, values: torch.Tensor) -> TokenHistory:
        """Returns an empty history of a layer with such keys and values, [B, heads, tokens, head_dim]. Their tokens are
        not taken.

        Raises:
            ValueError: they are on neither a CPU nor a CUDA device, or do not fit the codebooks.
        """
        decoder, books = self._decoder_on(keys.device), self._options.codebooks or (None, None)
        forms = [Form.of(states, self.block, book) for states, book in zip((keys, values), books)]
        return TokenHistory(forms[0], forms[1], self._options, decoder)

    def clone_of(self, history: TokenHistory) -> TokenHistory:
        """Returns a copy of a layer's history that belongs to this coder."""
        return history.clone(self._decoder_on(history.device))

    def copy(self) -> TokenCoder:
        """Returns a coder with the same options, for another cache."""
        copied = TokenCoder.__new__(TokenCoder)
        copied._options, copied.memory, copied._decoders = self._options, self.memory, {}
        return copied

    def num_due(self, num_raw: int) -> int:
        """Returns how many blocks of the oldest raw tokens the window has left behind. num_raw: how many raw tokens a
        layer has."""
        return max(0, num_raw - self._options.window) // self.block

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that hold coded bytes which are being fetched."""
        return sum(decoder.device_bytes for decoder in self._decoders.values())

    @property
    def fetched_bytes(self) -> int:
        """Bytes that have gone from host memory to GPUs."""
        return sum(decoder.fetched_bytes for decoder in self._decoders.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes that have gone from GPUs to host memory."""
        return sum(decoder.sent_bytes for decoder in self._decoders.values())

    def _decoder_on(self, device: torch.device) -> TokenDecoder:
        if device not in self._decoders:
            self._decoders[device] = decoder_for(device, self._options)
        return self._decoders[device]
