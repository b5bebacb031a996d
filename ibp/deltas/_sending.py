"""`ibp.deltas.Sender`: a trainer's side of keeping weights the same elsewhere."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence

import torch

from .._common.arguments import whole_number
from .._common.sequences import cut, one_ahead
from .._machine import memory as _memory
from .._machine import staging
from ._coding import bits_of
from ._fingerprint import fingerprint
from ._making import begin_differences
from ._packing import Change, head_of, message_of
from ._regions import Named, OwnRegion, PushHead, Region, own_regions
from ._tensors import Delta

PIECE_BYTES = 256 << 20
_CODED_SHARE = 4  # a piece's changes take at most this part of it, most of the time


class Sender:
    """Tells receivers what has changed in weights since it told them last: the trainer's side of `ibp.deltas.Receiver`.

    It keeps a copy of the weights as it sent them last, and sends the differences. The messages are plain bytes: send
    them by whatever moves bytes, to any number of receivers, all of one push before the next one's.

    Ranks of FSDP2 push their own shards: each has a sender with its `part`, and receivers take the messages of all.
    DTensors that are sharded by rows (`Shard(0)`) or replicated are not gathered, and one rank sends the replicated
    ones. `push` gathers DTensors of other placements (`full_tensor`), so that all ranks have to call it. Each sender
    sends the plain tensors that it is given.

    Example:
        >>> weights = {"w": torch.zeros(1000, 64)}
        >>> sender = ibp.deltas.Sender(weights)
        >>> receiver = ibp.deltas.Receiver({"w": torch.zeros(1000, 64)})
        >>> weights["w"][17] = 1  # a step of training
        >>> for message in sender.push(weights):
        ...     receiver.apply(message)
        True
        >>> sender.version, receiver.version
        (1, 1)

    Args:
        weights: the weights that receivers have already (version 0), in any form that `push` accepts. None: receivers
            have other weights, and the first push sends all weights whole.
        part: (which, of how many) senders of the same weights, such as rank and world size.
        memory: where the copy is kept: "device", where the weights are; "pinned" or "host", in host memory, from where
            it is brought to the weights' GPU while it is compared.
        piece_bytes: of weights whose changes one message holds, or the changes of one row. Tensors of less than 1/16 of
            it are coded together. Besides its messages a push takes memory for two pieces of these, or for the changes
            of four pieces: a GPU measures the next ones meanwhile.
        device: where messages are; None: where the weights are.

    Attributes:
        version: of the weights that were pushed last.

    Raises:
        TypeError, ValueError: an argument is none of these.
        RuntimeError: memory is "pinned", and there is no CUDA device.
    """

    def __init__(
        self,
        weights: Named | None = None,
        *,
        part: tuple[int, int] = (0, 1),
        memory: str = "device",
        piece_bytes: int = PIECE_BYTES,
        device: torch.device | str | int | None = None,
    ) -> None:
        _memory.check_memory(memory)
        count = whole_number("part[1]", part[1], 1, 2**31)
        self._part = whole_number("part[0]", part[0], 0, count - 1), count
        self._piece_bytes = whole_number("piece_bytes", piece_bytes, 1, 2**40)
        self._is_pinned = None if memory == "device" else bool(_memory.pins(memory))
        self._device = None if device is None else _memory.canonical(device)
        self._id = uuid.uuid4().hex
        self._kept: dict[bytes, torch.Tensor] = {}  # by their rows
        self.version = 0
        if weights is not None:
            regions = own_regions(weights, self._part, self._piece_bytes)
            self._kept = {region.rows: self._copy(region, region.values(), None, None) for region in regions}

    def push(self, weights: Named, *, full: bool = False) -> list[torch.Tensor]:
        """What makes receivers' weights these ones: a new version.

        If it raises, neither the version nor the copy has changed, or the next push sends all.

        Args:
            weights: a module, whose state dict is taken, or tensors by name, as a mapping or pairs. They must not
                change during the call. New names, and tensors of another shape or dtype, are sent whole.
            full: sends all weights whole, to receivers that have lost a message.

        Returns:
            Messages, uint8 [bytes] each, at least one. They share no memory with the weights. On a GPU the current
            stream still makes them.

        Raises:
            TypeError, ValueError: weights are no tensors, or DTensors of more ranks than there are parts.
        """
        regions = own_regions(weights, self._part, self._piece_bytes)
        kept, self._kept = self._kept, {}  # interrupted, it has nothing, and the next push sends all
        base = None if full or not kept else self.version  # asked before copies are taken out
        pieces = cut(regions, lambda region: region.nbytes, self._piece_bytes)
        rounds = cut(enumerate(pieces), lambda piece: sum(map(self._beside, piece[1])), self._piece_bytes)
        made: dict[bytes, torch.Tensor] = {}

        def begin(numbered: list[tuple[int, list[OwnRegion]]]) -> Callable[[], list[torch.Tensor]]:
            """Lets GPUs measure the changes of pieces; their messages, to be called for."""
            held = [region for _, piece in numbered for region in piece]
            values, olds = [region.values() for region in held], [self._like(region, kept) for region in held]
            bases = olds if base is not None else [None] * len(held)
            pairs = [(new, old) for new, old in zip(values, bases) if old is not None]
            differences = begin_differences(pairs, None, updates_bases=self._is_pinned is None)

            def finish() -> list[torch.Tensor]:
                found = iter(differences())
                changes: list[Change] = [new if old is None else next(found) for new, old in zip(values, bases)]
                parts = iter(zip(held, values, changes))
                messages = [
                    self._message(list(itertools.islice(parts, len(piece))), base, (number, len(pieces)))
                    for number, piece in numbered
                ]
                for region, new, old, change in zip(held, values, olds, changes):
                    made[region.rows] = self._copy(region, new, old, change)
                return messages

            return finish

        done = map(lambda finish: finish(), one_ahead(map(begin, rounds)))
        messages = list(itertools.chain.from_iterable(done))
        self._kept = made
        self.version += 1
        return messages

    def _like(self, region: OwnRegion, kept: dict[bytes, torch.Tensor]) -> torch.Tensor | None:
        """The kept copy of a region, if it has its dtype, which is taken out: joined copies are replaced one by one."""
        base = kept.pop(region.rows, None)
        return base if base is not None and base.dtype == region.dtype else None

    def _beside(self, region: OwnRegion) -> int:
        """Bytes of memory, about, that working on a region takes."""
        return region.nbytes if region.is_joined or self._is_pinned is not None else region.nbytes // _CODED_SHARE

    def _message(
        self, piece: Sequence[tuple[OwnRegion, torch.Tensor, Change]], base: int | None, number: tuple[int, int]
    ) -> torch.Tensor:
        regions, sent = [], []
        for region, new, change in piece:
            head, result = None, change.result if isinstance(change, Delta) else fingerprint(new)
            if not (isinstance(change, Delta) and change.is_empty):
                head = head_of(change)
                sent.append((head, change))
            regions.append(Region(region.rows, region.dtype, result, head))
        device = self._device or (piece[0][0].device if piece else torch.device("cpu"))
        said = PushHead(self._id, self._part, self.version + 1, base, number, regions)
        return message_of(said, [head for head, _ in sent], [change for _, change in sent], device)

    def _copy(
        self, region: OwnRegion, values: torch.Tensor, old: torch.Tensor | None, change: Change | None
    ) -> torch.Tensor:
        """What is kept of a region. old: the copy that there was; on the device a delta has made it the new one."""
        if old is not None and isinstance(change, Delta) and (self._is_pinned is None or change.is_empty):
            return old
        if region.is_joined and self._is_pinned is None:
            return values
        base = self._empty_like(values) if old is None else old
        bits_of(base).copy_(bits_of(values))
        return base

    def _empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_pinned is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if self._is_pinned:
            return staging.pinned_like(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
