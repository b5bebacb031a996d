"""`ibp.kv.TokenCoder`, which has the options and the decoders that all layers of a growing KV-cache share."""

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
    """Codes the older tokens of a KV-cache that grows token by token, and decodes them when they are needed.

    The class is for engines that keep the keys of a layer in one tensor, and the values in another, as transformers
    does. (`BlockStore` is for engines with paged caches.) All layers of a cache must use the same coder, so that the
    coded bytes of one layer can be copied while those of another layer are decoded. Tokens are coded in blocks, on the
    device of the keys and values. Codebooks are learned from the first blocks, which are usually those of the prompt,
    as in section 6.4 of the paper. They are learned again when savings fall.

    Example:
        >>> coder = ibp.kv.TokenCoder(block=16, window=32)
        >>> [coder.num_due(num_raw) for num_raw in (32, 47, 48, 100)]    # blocks of 16 tokens that leave the window
        [0, 0, 1, 4]
        >>> layers = [coder.history(*torch.randn(2, 1, 4, 48, 32)) for _ in range(2)]
        >>> layers[0].num_tokens, coder.fetched_bytes
        (0, 0)

    Args:
        block: number of tokens that are coded together, at least 1.
        window: number of the newest tokens that stay raw with the caller, at least 0.
        memory: the memory that holds coded tokens: "pinned" (host memory that the GPU reads) or "device". None:
            "pinned".
        scheme: "planes", "ibp" (the paper's) or "raw", which stores blocks without coding them. With every scheme, keys
            or values are stored raw if a learned codebook would save less than 2 % of their bytes.
        level: level of scheme "planes", as in `ibp.compress`.
        codebooks: the initial codebooks (for keys, for values) of all layers. `ibp.codecs.analyze` must have made them
            from tensors whose rows are one or more complete tokens of a head. None: codebooks are learned.
        max_sms: keep at most this many multiprocessors busy with decoding. None: all if coded tokens are on the device,
            or if a codebook has separate entries for each column; otherwise 32, which are enough to keep up with the
            link.

    Attributes:
        memory: "pinned" or "device".
        devices: the devices of the layers for which `history` has been called.

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
        """Number of tokens that are coded together."""
        return self._options.block

    @property
    def devices(self) -> list[torch.device]:
        return list(self._decoders)

    def history(self, keys: torch.Tensor, values: torch.Tensor) -> TokenHistory:
        """Returns an empty history for a layer. keys, values: [B, heads, tokens, head_dim], tensors with the dtype,
        heads and head_dim of the layer's keys and values. Their tokens are not added to the history.

        Raises:
            ValueError: keys are on neither a CPU nor a CUDA device, or keys or values do not suit the codebooks.
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
        """Returns the number of blocks that should be coded now, max(0, num_raw - window) // block: the newest `window`
        tokens stay raw, and the older ones are coded in complete blocks. num_raw: number of raw tokens of the layer."""
        return max(0, num_raw - self._options.window) // self.block

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the buffers on devices to which coded bytes are copied."""
        return sum(decoder.device_bytes for decoder in self._decoders.values())

    @property
    def fetched_bytes(self) -> int:
        """Number of bytes that have been copied from host memory to GPUs."""
        return sum(decoder.fetched_bytes for decoder in self._decoders.values())

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that have been copied from GPUs to host memory."""
        return sum(decoder.sent_bytes for decoder in self._decoders.values())

    def _decoder_on(self, device: torch.device) -> TokenDecoder:
        if device not in self._decoders:
            self._decoders[device] = decoder_for(device, self._options)
        return self._decoders[device]
