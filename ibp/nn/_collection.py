"""`EmbeddingCollection`: many embedding tables whose bags are pooled in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch

from .._common.modes import outside_of_modes
from .._fetch.calls import checked_ids, list_of_ids
from .._tables.compressed_tensor import CompressedTensor
from ..cache import RowCache
from ._embedding import Rows, RowsModule, check_mode, size_of, table_of
from ._tables import check_forward, saves_tables

Bags = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Weights = CompressedTensor | torch.Tensor | torch.nn.EmbeddingBag | tuple[int, int]

_DENSE = "embedding_bags"  # The name under which torchrec's EmbeddingBagCollection saves its tables.


class _Part(NamedTuple):
    """One table, as a part of a group. A group holds the rows of all tables of one width."""

    group: int  # number of the group
    number: int  # number of the part in the group
    first: int  # number of the part's first row in the group
    num_rows: int


class _Group(RowsModule):
    """All tables of one width, stored one after the other in one compressed table."""

    def __init__(
        self, table: CompressedTensor, sizes: Sequence[int], trainable: bool, cache: RowCache | int | None
    ) -> None:
        super().__init__(table, trainable=trainable, stays=True, cache=cache)
        self._sizes = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        self._firsts = self._sizes.cumsum(0) - self._sizes
        self._near: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._numbers: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}

    def _numbers_on(self, device: torch.device, parts: Sequence[_Part]) -> torch.Tensor:
        """Returns the numbers of the parts as int64 [parts] on a device. Keeps the tensor for later calls with the same
        parts."""
        key = device, tuple(part.number for part in parts)
        if key not in self._numbers:
            with outside_of_modes():
                self._numbers[key] = torch.tensor(key[1], dtype=torch.int64, device=device)
        return self._numbers[key]

    def rows_of(self, ids: torch.Tensor, numbers: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """Returns, for each id, the number of its row in the group. ids: [K]; ids[k] is the number of a row in part
        numbers[k].

        If an id is outside its part, the CPU raises IndexError. On a GPU the returned row number is then outside the
        group, so reading the row fails. A row of another part is never read instead.
        """
        if ids.device not in self._near:
            with outside_of_modes():
                self._near[ids.device] = self._firsts.to(ids.device), self._sizes.to(ids.device)
        firsts, sizes = self._near[ids.device]
        is_bad = (ids < 0) | (ids >= sizes[numbers])
        if not ids.is_cuda and bool(is_bad.any()):
            at = int(is_bad.nonzero()[0])
            part = int(numbers[at])
            raise IndexError(
                f"ids[{at}] is {int(ids[at])}; wanted 0 to {int(sizes[part]) - 1} of table {names[part]!r}"
            )
        return torch.where(is_bad, self.num_embeddings, ids + firsts[numbers])

    def pooled(
        self,
        parts: Sequence[_Part],
        bags: Sequence[int],
        ids: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None,
        mode: str,
        names: Sequence[str],
    ) -> torch.Tensor:
        """Returns the pooled bags of several parts, [bags, embedding_dim]: first all bags of the first part, then those
        of the next one.

        If the lengths do not add up to the number of ids, or a length is negative, the CPU raises ValueError. On a GPU
        all ids then become invalid, so reading the rows fails.

        On the CPU each part is pooled in a separate call, because gradients must have the same bits as with a separate
        module for each part. (The order in which torch adds up the gradients of a row depends on all ids of a call.)

        Args:
            parts: the parts.
            bags: the number of bags of each part.
            ids: [K], each is a row number within its part.
            lengths: int64 [bags], the number of ids in each bag.
            weights: [K], the factor of each row. None: all factors are 1.
            mode: as in `EmbeddingCollection`.
            names: the names of all parts of the group, for errors.
        """
        ids = ids.to(torch.int64)
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        is_wrong = (lengths < 0).any() | (offsets[-1] != ids.numel())
        if not ids.is_cuda and bool(is_wrong):
            raise ValueError(
                f"lengths add up to {int(offsets[-1])}; wanted {ids.numel()}, one for each id, none below 0"
            )
        device = offsets.device
        # Finds the part of each id. This must not fail, even if the lengths are wrong.
        ends = offsets[_ends_of(bags, device)]
        places = torch.searchsorted(ends, torch.arange(ids.numel(), device=device), right=True)
        numbers = self._numbers_on(device, parts)[places.clamp_(max=len(parts) - 1)]
        rows = self.rows_of(torch.where(is_wrong, -1, ids), numbers, names)
        if ids.is_cuda or len(parts) == 1:
            offsets = offsets.clamp(0, ids.numel()).cummax(0).values
            return self._pool(rows, offsets, mode, weights, include_last_offset=True)
        results, bounds = [], [0, *accumulate(bags)]
        for first, last in zip(bounds, bounds[1:]):
            part = slice(int(offsets[first]), int(offsets[last]))
            own = offsets[first : last + 1] - offsets[first]
            of_part = None if weights is None else weights[part]
            results.append(self._pool(rows[part], own, mode, of_part, include_last_offset=True))
        return torch.cat(results)

    def _save_tables(self, state: dict[str, Any], prefix: str) -> None:
        if saves_tables():
            super()._save_tables(state, prefix)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_near": {}, "_numbers": {}}

    def _refusal(self, wrong: int) -> str:
        return "an id is out of range of its table, or lengths do not add up to the number of ids"


def _ends_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns the cumulative sums of the counts on a device. If all counts are equal, nothing is copied from the
    host."""
    if len(set(counts)) == 1:
        return torch.arange(1, len(counts) + 1, device=device) * counts[0]
    return torch.tensor(counts, dtype=torch.int64, device=device).cumsum(0)


class EmbeddingCollection(torch.nn.Module):
    """Many embedding tables whose bags one call pools: `torchrec.EmbeddingBagCollection` over compressed rows.

    The tables of one width are stored one after the other in one compressed table, so the number of kernels that a call
    launches does not grow with the number of tables. Results have the same bits as those of one torch.nn.EmbeddingBag
    for each table, on the same device.

    Example:
        >>> rows = torch.arange(1000.0)[:, None].repeat(1, 64)
        >>> collection = ibp.nn.EmbeddingCollection({"user": rows, "item": -rows}, device="cpu")
        >>> pooled = collection({"user": torch.tensor([[3, 5]]), "item": torch.tensor([[7]])})
        >>> pooled["user"][0, 0], pooled["item"][0, 0]
        (tensor(8.), tensor(-7.))

    Args:
        tables: a dict from names to tables: a table or tensor [num_embeddings, embedding_dim], a torch.nn.EmbeddingBag,
            or (num_embeddings, embedding_dim) for new weights, which are drawn from N(0, 1). All tables must have the
            same dtype.
        mode: "sum", "mean" or "max", for all tables.
        trainable: whether rows get gradients. None: they do if all weights are new.
        device: the device of the weights. None: the CPU, in pinned memory if there is a GPU; but a compressed table
            that is the only one of its width stays where it is.
        dtype: the dtype of new weights. None: the dtype of the given weights or, if all weights are new, torch's
            default dtype.
        cache_bytes: the tables of each width share a cache of this size in bytes in device memory, see `cache` of
            `Embedding`. None: no cache. If rows train, `groups[number].cache.refill` fills the cache.

    Raises:
        TypeError: a table is of another type, or trainable weights are not floating-point numbers.
        ValueError: there are no tables, their dtypes differ, one does not have two dimensions, or mode is unknown.
    """

    def __init__(
        self,
        tables: Mapping[str, Weights],
        *,
        mode: str = "sum",
        trainable: bool | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        super().__init__()
        check_mode(mode)
        if not tables:
            raise ValueError("there are no tables; wanted one at least")
        given = {name: _given(name, weights) for name, weights in tables.items()}
        is_new = all(isinstance(weights, tuple) for weights in given.values())
        found = {weights.dtype for weights in given.values() if not isinstance(weights, tuple)}
        found |= {dtype} if dtype is not None else set() if found else {torch.get_default_dtype()}
        if len(found) != 1:
            raise ValueError(f"the tables have dtypes {', '.join(sorted(map(str, found)))}; wanted one")
        dtype = found.pop()
        self.mode = mode
        self.embedding_dims = {name: int(size_of(weights)[1]) for name, weights in given.items()}
        self._names: list[list[str]] = []  # for each group, the names of its parts
        self._parts: dict[str, _Part] = {}
        self.groups = torch.nn.ModuleList()
        for dim in dict.fromkeys(self.embedding_dims.values()):
            own = {name: weights for name, weights in given.items() if self.embedding_dims[name] == dim}
            trainable = is_new if trainable is None else trainable
            sizes = [size_of(weights)[0] for weights in own.values()]
            for number, (name, first) in enumerate(zip(own, accumulate(sizes, initial=0))):
                self._parts[name] = _Part(len(self.groups), number, first, sizes[number])
            table = next(iter(own.values()))
            if len(own) > 1 or not isinstance(table, CompressedTensor) or device is not None:
                table = table_of(list(own.values()), dtype, device)
            self.groups.append(_Group(table, sizes, trainable, cache_bytes))
            self._names.append(list(own))

    # ---- look-ups ----

    def forward(self, features: Any) -> dict[str, torch.Tensor] | torch.Tensor:
        """Pools bags of rows of some tables.

        Args:
            features: one of
                a dict: the name of a table -> its bags, ids [B, L] or (ids [K], offsets [B]);
                (keys, values, lengths) or (keys, values, lengths, weights). keys: names of tables. values: [K], the ids
                for all these tables. lengths: integers [len(keys) * B], the number of ids in each bag, first for all
                bags of the first table. weights: [K], the factor of each row, only for mode "sum";
                an object with keys(), values(), lengths() and optionally weights_or_none(), such as a
                KeyedJaggedTensor.

        Returns:
            For a dict, a dict: the name of a table -> [B, embedding_dim]. Otherwise a tensor [B, sum of the tables'
            embedding_dims]: the results of the tables side by side, in the order of the keys.

        Raises:
            KeyError: there is no table of that name.
            IndexError: an id is out of its table's range. On a GPU the error is raised at once if rows train, otherwise
                as `ibp.index_select` says.
            TypeError, ValueError: features is not as described, the sizes of its tensors are inconsistent, or ids,
                offsets or lengths are not integers.
        """
        if isinstance(features, Mapping):
            return self._pool_dict(features)
        if isinstance(features, (tuple, list)) and len(features) in (3, 4):
            return self._pool_keyed(*features)
        if all(callable(getattr(features, name, None)) for name in ("keys", "values", "lengths")):
            weights = features.weights_or_none() if hasattr(features, "weights_or_none") else None
            return self._pool_keyed(features.keys(), features.values(), features.lengths(), weights)
        raise TypeError(f"features is a {type(features).__name__}; wanted a dict, (keys, values, lengths) or the like")

    def lookup(self, ids: torch.Tensor, table_numbers: torch.Tensor) -> torch.Tensor:
        """Returns [K, embedding_dim]: for each k, row ids[k] of table number table_numbers[k]. Tables are numbered in
        the order in which they were passed to the constructor.

        Args:
            ids: int32 or int64 [K].
            table_numbers: int32 or int64 [K], on the same device.

        Raises:
            TypeError: ids or table numbers are not integers.
            ValueError: the tables have several widths, or shapes differ.
            IndexError: an id or a table number is out of range; on a GPU as for `forward`.
        """
        if len(self.groups) != 1:
            raise ValueError(f"the tables are {sorted(set(self.embedding_dims.values()))} wide; wanted one width")
        ids = checked_ids(ids).to(torch.int64)
        numbers = checked_ids(table_numbers, "table_numbers").to(torch.int64)
        if ids.dim() != 1 or numbers.shape != ids.shape:
            raise ValueError(f"ids have shape {list(ids.shape)}, table_numbers {list(numbers.shape)}; wanted [K]")
        group, names = self._group(0), self._names[0]
        is_bad = (numbers < 0) | (numbers >= len(names))
        if not ids.is_cuda and bool(is_bad.any()):
            at = int(is_bad.nonzero()[0])
            raise IndexError(f"table_numbers[{at}] is {int(numbers[at])}; wanted 0 to {len(names) - 1}")
        rows = group.rows_of(torch.where(is_bad, -1, ids), numbers.clamp(0, len(names) - 1), names)
        return group.rows_at(rows)

    def _pool_dict(self, features: Mapping[str, Bags]) -> dict[str, torch.Tensor]:
        parts = [self._part(name) for name in features]
        bags = [_flat(name, bags) for name, bags in features.items()]
        pooled = self._pool_lists(parts, [ids for ids, _ in bags], [lengths for _, lengths in bags], None)
        return dict(zip(features, pooled))

    def _pool_keyed(
        self, keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        keys = list(keys)
        parts = [self._part(key) for key in keys]
        values, lengths = list_of_ids(values, "values"), list_of_ids(lengths, "lengths").to(torch.int64)
        if not keys or lengths.numel() % len(keys):
            raise ValueError(
                f"there are {lengths.numel()} lengths for {len(keys)} keys; wanted the same number for each key"
            )
        if weights is not None and (not isinstance(weights, torch.Tensor) or weights.shape != values.shape):
            got = list(weights.shape) if isinstance(weights, torch.Tensor) else f"a {type(weights).__name__}"
            raise ValueError(f"weights is {got}; wanted a tensor [{values.numel()}], one for each value")
        num_bags = lengths.numel() // len(keys)
        groups = {part.group for part in parts}
        if len(groups) == 1:
            number, bags = groups.pop(), [num_bags] * len(keys)
            group, names = self._group(number), self._names[number]
            results = group.pooled(parts, bags, values, lengths, weights, self.mode, names).split(bags)
        else:  # divides the values among the groups of their tables, which waits for the GPU if the lengths are on one
            of_keys = lengths.view(len(keys), -1)
            counts = of_keys.sum(1).tolist()
            if min(counts) < 0 or sum(counts) != values.numel():
                raise ValueError(f"lengths add up to {sum(counts)}; wanted {values.numel()}, one for each id")
            divided = None if weights is None else weights.split(counts)
            results = self._pool_lists(parts, values.split(counts), of_keys.unbind(), divided)
        return torch.cat(results, 1)

    def _pool_lists(
        self,
        parts: Sequence[_Part],
        ids: Sequence[torch.Tensor],
        lengths: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Returns the pooled bags of each of several tables, in one call for the tables of a group. The arguments have
        an entry for each table; the entries are as in `_Group.pooled`."""
        results: dict[int, torch.Tensor] = {}
        for number, names in enumerate(self._names):
            own = [at for at, part in enumerate(parts) if part.group == number]
            if own:
                bags = [lengths[at].numel() for at in own]
                pooled = self._group(number).pooled(
                    [parts[at] for at in own],
                    bags,
                    torch.cat([ids[at] for at in own]),
                    torch.cat([lengths[at] for at in own]),
                    None if weights is None else torch.cat([weights[at] for at in own]),
                    self.mode,
                    names,
                )
                results.update(zip(own, pooled.split(bags)))
        return [results[at] for at in range(len(parts))]

    def _group(self, number: int) -> _Group:
        return cast(_Group, self.groups[number])

    def _part(self, name: str) -> _Part:
        try:
            return self._parts[name]
        except KeyError:
            raise KeyError(f"there is no table {name!r}; the collection has {', '.join(self._parts)}") from None

    # ---- the tables ----

    def weight(self, name: str) -> torch.Tensor:
        """Returns the rows of a table, uncompressed, in the memory where the table is: [num_embeddings,
        embedding_dim]."""
        part = self._part(name)
        table = self._group(part.group).current_table()
        return table[part.first : part.first + part.num_rows]

    def to_torch(self) -> dict[str, torch.nn.EmbeddingBag]:
        """Returns a dict from the names of the tables to modules of torch with the same weights, uncompressed."""
        return {
            name: torch.nn.EmbeddingBag.from_pretrained(
                self.weight(name), freeze=not self._group(part.group).trainable, mode=self.mode
            )
            for name, part in self._parts.items()
        }

    def flush(self) -> None:
        """Writes rows that have changed only in caches back to the tables."""
        for number in range(len(self.groups)):
            self._group(number).flush()

    def refit(self, **options: Any) -> None:
        """Compresses all rows again, as `EmbeddingBag.refit` does."""
        for number in range(len(self.groups)):
            self._group(number).refit(**options)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Saves a plain tensor for each table. For `coded_state_dict`, the groups save their compressed tables
        instead."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not saves_tables():
            destination.update({_dense_key(prefix, name): self.weight(name).cpu() for name in self._parts})

    def _load_from_state_dict(self, *args: Any) -> None:
        """If the state has plain tensors of single tables, compresses them into one table for each group, which the
        group loads."""
        state_dict, prefix, _, _, missing_keys, _, error_msgs = args
        dense = {name: state_dict.pop(key) for name in self._parts if (key := _dense_key(prefix, name)) in state_dict}
        for number, names in enumerate(self._names):
            found = [name for name in names if name in dense]
            wrong = [error for name in found if (error := self._misfit(name, dense[name]))]
            error_msgs.extend(wrong)
            if found and len(found) < len(names):
                missing_keys.extend(_dense_key(prefix, name) for name in names if name not in dense)
            key, held = f"{prefix}groups.{number}.weight", self._group(number).weight
            if found == names and not wrong:
                state_dict[key] = table_of([dense[name] for name in names], held.dtype, held.device)
            elif found:
                state_dict[key] = held
        super()._load_from_state_dict(*args)

    def _misfit(self, name: str, weight: Any) -> str | None:
        """Returns why a loaded weight cannot replace the rows of a table, or None if it can."""
        part = self._parts[name]
        held = self._group(part.group).weight
        wanted = [part.num_rows, held.shape[1]]
        if not isinstance(weight, torch.Tensor) or (list(weight.shape), weight.dtype) != (wanted, held.dtype):
            got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
            return f"{_DENSE}.{name}.weight is {got}; wanted {held.dtype} {wanted}"
        return None

    def extra_repr(self) -> str:
        sizes = (f"{name}: [{part.num_rows}, {self.embedding_dims[name]}]" for name, part in self._parts.items())
        return f"{', '.join(sizes)}, mode={self.mode!r}"


def _dense_key(prefix: str, name: str) -> str:
    return f"{prefix}{_DENSE}.{name}.weight"


def _given(name: str, weights: Any) -> Rows:
    """Checks what the constructor was given for a table, and returns its weights or sizes.

    Raises:
        TypeError, ValueError: the weights are not as `EmbeddingCollection` describes them.
    """
    if isinstance(weights, torch.nn.EmbeddingBag):
        check_forward(f"table {name!r}", weights, torch.nn.EmbeddingBag)
        weights = weights.weight
    if isinstance(weights, (CompressedTensor, torch.Tensor)):
        if weights.dim() != 2:
            raise ValueError(f"table {name!r} has shape {list(weights.shape)}; wanted two dimensions")
        return weights
    if isinstance(weights, (tuple, list)) and len(weights) == 2 and all(type(size) is int for size in weights):
        return weights[0], weights[1]
    raise TypeError(
        f"table {name!r} is a {type(weights).__name__}; wanted a table, a tensor, a torch.nn.EmbeddingBag or "
        "(num_embeddings, embedding_dim)"
    )


def _flat(name: str, bags: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids [K], the number of ids in each bag [B]) for a table's bags. name: the table's name, for errors.

    Raises:
        TypeError: ids or offsets are not integers.
        ValueError: the bags are not as `EmbeddingCollection.forward` describes them.
    """
    what, of_offsets = (f"the {part} tensor of table {name!r}" for part in ("ids", "offsets"))
    if isinstance(bags, torch.Tensor) and bags.dim() == 2:
        lengths = torch.full((bags.shape[0],), bags.shape[1], dtype=torch.int64, device=bags.device)
        return checked_ids(bags, what).reshape(-1), lengths
    is_pair = (
        isinstance(bags, (tuple, list)) and len(bags) == 2 and all(isinstance(part, torch.Tensor) for part in bags)
    )
    if not is_pair or bags[0].dim() != 1 or bags[1].dim() != 1:
        raise ValueError(f"the bags of table {name!r} are wrong; wanted ids [B, L], or (ids [K], offsets [B])")
    ids, offsets = (
        checked_ids(bags[0], what),
        checked_ids(bags[1], of_offsets).to(torch.int64),
    )
    ends = torch.cat((offsets[1:], offsets.new_tensor([ids.numel()])))[: offsets.numel()]
    if not ids.is_cuda and offsets.numel() and (int(offsets[0]) != 0 or bool((ends < offsets).any())):
        raise ValueError(f"the offsets of table {name!r} are not in order from 0 to {ids.numel()}")
    return ids, ends - offsets
