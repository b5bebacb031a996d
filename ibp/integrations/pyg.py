"""Keeps features of PyTorch Geometric's graphs in compressed tables.

    fetch = pyg.attach(data, "x", device="cuda")            # moves the rows of data.x to a compressed table
    loader = NeighborLoader(data, [25, 10], transform=fetch, filter_per_worker=False, ...)
    for batch in loader:                                    # batch.x is on the GPU, with the bits of data.x[batch.n_id]

`attach` and `FetchFeatures` work with every loader whose batches have `n_id`, the ids of their nodes. For features of
edges, batches must have `e_id`, the ids of their edges. `FeatureStore` implements PyG's interface of the same name.
Tested with torch_geometric 2.8.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
import torch_geometric.data  # type: ignore
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.transforms import BaseTransform  # type: ignore

import ibp

from ..adapters import Closing, checked_device
from .shared import TABLES, Table, check_rows, fetch, refuse_cuda_in_worker, table_of

__all__ = ["FeatureStore", "FetchFeatures", "attach"]

_Device = torch.device | str | int | None


def attach(
    data: Data | HeteroData,
    names: str | Iterable[str] = "x",
    *,
    device: _Device = None,
    cache_bytes: int = 0,
    **options: Any,
) -> FetchFeatures:
    """Compresses features of a graph, and removes them from the graph. Returns a transform that fetches their rows for
    batches.

    A feature is an attribute of nodes or of edges. In a HeteroData, the attribute is compressed for every type that has
    it. In the graph, a stand-in replaces each feature. Code that uses a stand-in as a tensor gets a RuntimeError that
    says how to get the rows. `close()` of the transform, or the end of a `with` block, puts the plain features back
    into the graph.

    Args:
        data: the graph. It is changed: stand-ins replace the features, and num_nodes is set if PyG derived it from the
            features.
        names: name or names of the attributes, which must be tensors with one row for each node or edge.
        device: the device of fetched rows. None, without caches: the device of a batch's ids, which is the CPU for most
            loaders. None, with caches: the GPU of the features, or the current CUDA device if all features are on the
            CPU.
        cache_bytes: size in bytes of the device memory for the cache (`ibp.RowCache`) of each feature of nodes. 0: no
            caches. The cache prefers nodes at which many edges begin. Nodes are sampled through these edges, so such
            nodes are needed most often.
        options: options of `ibp.compress`.

    Raises:
        TypeError: data is not a Data or HeteroData, or an attribute is not a tensor.
        KeyError: data has no such attribute.
        ValueError: an attribute does not have one row for each node or edge, or caches are asked for without a device
            although there is no CUDA device.
    """
    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(f"data is a {type(data).__name__}; wanted a torch_geometric Data or HeteroData")
    found = list(_features_of(data, [names] if isinstance(names, str) else list(names)))
    lacks_device = bool(cache_bytes) and device is None and not all(is_edge for _, _, is_edge, _ in found)
    if lacks_device and not ibp.cuda_is_available():
        raise ValueError("cache_bytes are given, but no device, and there is no CUDA device; wanted device=")
    tables = [table_of(store[name], what, options) for store, name, _, what in found]
    if lacks_device:
        device = next((table.device for table in tables if table.is_cuda), "cuda")
    for (store, _, is_edge, what), table in zip(found, tables):
        num_rows = store.num_edges if is_edge else store.num_nodes
        check_rows(table, num_rows, what, "edges" if is_edge else "nodes")
    nodes: dict[Any, Any] = {}
    edges: dict[Any, Any] = {}
    for (store, name, is_edge, _), table in zip(found, tables):
        kind = edges if is_edge else nodes
        if isinstance(data, HeteroData):
            kind = kind.setdefault(store._key, {})
        kind[name] = _cached(table, data, store, device, cache_bytes) if cache_bytes and not is_edge else table
    fetch = FetchFeatures(nodes, edges, device=device)
    for (store, name, is_edge, what), table in zip(found, tables):
        plain, counts = store[name], not is_edge and "num_nodes" not in store
        if counts:
            store.num_nodes = store.num_nodes  # otherwise PyG counts nodes by their features
        store[name] = stand_in = _StandIn(what, table.shape)
        home = plain.device if isinstance(plain, torch.Tensor) else None
        undo = functools.partial(_put_back, weakref.ref(store), name, stand_in, table, home, counts)
        fetch._undo = (*fetch._undo, undo)
    return fetch


def _put_back(
    graph: weakref.ref[Any], name: str, stand_in: _StandIn, table: Any, home: torch.device | None, counts: bool
) -> None:
    """Puts a plain feature back into a storage of a graph, which holds the attributes of one type of nodes or edges.
    Does nothing if the storage no longer exists, or if its attribute `name` is no longer the stand-in.

    Args:
        graph: a weak reference to the storage.
        name: name of the feature.
        stand_in: the object that replaced the feature.
        table: the table of the feature, or a cache of it.
        home: the device of the plain feature. None: the feature was a numpy array.
        counts: whether `attach` has set num_nodes of the storage. If so, num_nodes is removed.
    """
    store = graph()
    if store is None or name not in store or store[name] is not stand_in:
        return
    plain = table.decompress(device=home or "cpu", check=True)
    store[name] = plain.numpy() if home is None else plain
    if counts:
        del store["num_nodes"]


def _cached(table: Any, data: Data | HeteroData, store: Any, device: _Device, cache_bytes: int) -> Table:
    """Returns a cache of the table of a node feature. If the items of the table are not whole rows, returns the table
    itself. store: the storage that holds the feature."""
    if not table.geometry.has_whole_rows:
        return table
    hotness = torch.zeros(store.num_nodes, dtype=torch.int64, device="cpu")
    for edges in data.edge_stores:
        is_from_here = not isinstance(data, HeteroData) or edges._key[0] == store._key
        if is_from_here and "edge_index" in edges:
            hotness += torch.bincount(edges.edge_index[0].cpu(), minlength=store.num_nodes)
    return ibp.RowCache(table, cache_bytes, hotness, devices=device)


def _features_of(data: Data | HeteroData, names: list[str]) -> Iterator[tuple[Any, str, bool, str]]:
    """Yields (its storage, its name, whether it belongs to edges, its name in error messages) for every attribute with
    one of the given names."""
    for name in names:
        stores = [store for store in data.stores if name in store]
        if not stores:
            raise KeyError(f"data has no {name!r}; it has {sorted({key for store in data.stores for key in store})}")
        for store in stores:
            key = getattr(store, "_key", None)
            what = repr(name) if key is None else f"{name!r} of {key!r}"
            if isinstance(store[name], _StandIn):
                store[name].refuse()
            if not isinstance(store[name], (torch.Tensor, np.ndarray)):
                raise TypeError(f"{what} is a {type(store[name]).__name__}; wanted a tensor of one row a node or edge")
            is_edge = store.is_edge_attr(name)
            if not is_edge and not store.is_node_attr(name) or data.__cat_dim__(name, store[name], store) != 0:
                raise ValueError(
                    f"{what} has shape {list(store[name].shape)}; wanted a row for each node or edge in dimension 0"
                )
            yield store, name, is_edge, what


class _StandIn:
    """An object that replaces a feature in a graph after `attach` has removed the feature. It has the feature's shape.
    PyG can copy it to batches, and move it with them to a device. Operations that need rows raise RuntimeError."""

    __class__ = property(lambda self: torch.Tensor)  # convolutions check whether their arguments are tensors
    ndim = 0  # otherwise loaders would index the stand-in
    is_cuda = is_sparse = is_nested = requires_grad = False
    layout = torch.strided

    def __init__(self, what: str, shape: torch.Size) -> None:
        self._what, self.shape = what, shape

    def __reduce__(self) -> tuple[type, tuple[str, torch.Size]]:
        return _StandIn, (self._what, self.shape)

    def _itself(self, *_: Any, **__: Any) -> _StandIn:
        return self

    to = cpu = cuda = pin_memory = share_memory_ = clone = contiguous = detach = detach_ = record_stream = _itself

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self) -> str:
        return f"{list(self.shape)} in a table"

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._what} is in a table: give what attach returned to the loader as its transform=, or call it with "
            "each batch, and batches have the rows of their nodes and edges; its nodes and edges hold the tables"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and libraries look up such attributes, and expect an AttributeError
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        # Functions such as torch.stack take lists of tensors.
        given += [inner for value in given if isinstance(value, (list, tuple)) for inner in value]
        next(value for value in given if isinstance(value, _StandIn)).refuse()

    __getitem__ = __setitem__ = __len__ = __iter__ = __array__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = refuse
    __neg__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = refuse


class FetchFeatures(BaseTransform, Closing):
    """A transform that adds features to the batches of a loader. It fetches the rows at a batch's ids from tables.

    Pass it as `transform=` to a loader. The loader's data must not have these features, because the loader would gather
    them as well. The transform can be pickled. In worker processes, rows are decoded on the CPU. To get rows on a GPU,
    pass `filter_per_worker=False` to the loader; the transform then runs in the main process, on the current stream. If
    an id on the CPU is out of range, IndexError is raised at once. If an id on a GPU is out of range, the next fetch
    raises it (see `ibp.index_select`).

    Args:
        nodes: the features of nodes: {name: table} for a Data, or {type of node: {name: table}} for a HeteroData. For
            each feature, batch[name] becomes table[batch.n_id]. A table may also be given as an `ibp.RowCache` of the
            table, or as a tensor or array, which is then compressed.
        edges: the features of edges, in the same form. Their rows are fetched at batch.e_id.
        device: the device of fetched rows. None: the device of the ids.

    Attributes:
        nodes, edges: the given mappings, with tables in place of tensors and arrays.
        device: the given device, with its index, or None.

    Raises:
        TypeError: nodes, edges or a feature has a wrong type.
        ValueError: the two forms of mappings are mixed, or device cannot be used.
    """

    _undo: tuple[Callable[[], None], ...] = ()  # set by `attach`: functions that put the features back into the graph

    def __init__(
        self, nodes: Mapping[Any, Any] | None = None, edges: Mapping[Any, Any] | None = None, *, device: _Device = None
    ) -> None:
        self.nodes: dict[Any, Any]
        self.edges: dict[Any, Any]
        kinds = {isinstance(value, Mapping) for given in (nodes, edges) if given for value in _mapping(given).values()}
        if len(kinds) > 1:
            raise ValueError("some features are of types, some are not; wanted {name: table} or {type: {name: table}}")
        self._is_hetero, self._is_closed = True in kinds, False
        self.nodes, self.edges = (
            {key: _tables_of(value, f"{what}[{key!r}]") for key, value in given.items()}
            if self._is_hetero
            else _tables_of(given, what)
            for given, what in ((nodes or {}, "nodes"), (edges or {}, "edges"))
        )
        self.device = None if device is None else checked_device(device)

    def forward(self, data: Any) -> Any:
        """Adds the features to a batch, in place, and returns the batch.

        Raises:
            RuntimeError: the transform was closed, or a GPU would have to fetch rows in a worker process.
            TypeError: the batch is a Data although the features are given by type, or vice versa.
            KeyError: the batch has no ids, or lacks a type for which there are features.
            ValueError: the batch already has one of the features.
            IndexError: an id is out of range.
        """
        if self._is_closed:
            raise RuntimeError("the tables of this FetchFeatures were freed by close()")
        wanted = HeteroData if self._is_hetero else Data
        if not isinstance(data, wanted):
            raise TypeError(f"the batch is a {type(data).__name__}; these features are of a {wanted.__name__}")
        for tables, ids_name in ((self.nodes, "n_id"), (self.edges, "e_id")):
            if not self._is_hetero:
                self._fill(data, None, tables, ids_name)
                continue
            for key, of_type in tables.items():
                if key not in (*data.node_types, *data.edge_types):
                    raise KeyError(f"the batch has no type {key!r}; it has {[*data.node_types, *data.edge_types]}")
                self._fill(data[key], key, of_type, ids_name)
        return data

    def _fill(self, store: Any, key: Any, tables: dict[str, Table], ids_name: str) -> None:
        where = "data" if key is None else f"data[{key!r}]"
        for name, table in tables.items():
            what = repr(name) if key is None else f"{name!r} of {key!r}"
            ids = store[ids_name] if ids_name in store else None
            if ids is None:  # the batch has no such attribute, or the sampler has set it to None
                count = "num_nodes" if ids_name == "n_id" else "num_edges"
                raise KeyError(
                    f"the batch has no {ids_name} to fetch {what} by: for a loader that gives none, set "
                    f"{where}.{ids_name} = torch.arange({where}.{count}) before it is made"
                )
            if not isinstance(store[name] if name in store else None, (_StandIn, type(None))):
                raise ValueError(f"the batch has {what} already: take it out of the data that the loader is given")
            store[name] = fetch(table, ids, self.device, what)

    def close(self) -> None:
        """Drops the tables. Their memory is freed when nothing else holds them. If `attach` made the transform, first
        puts the plain features back into the graph, on their former devices. If another value has replaced a stand-in
        in the graph, that value stays in the graph. Copies of the graph and of the transform are not changed. A second
        call does nothing.

        Raises:
            CorruptTableError: a table is damaged.
        """
        for put_back in self._undo:
            put_back()
        self.nodes, self.edges, self._undo, self._is_closed = {}, {}, (), True

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy. Closing the copy does not change the graph."""
        return {name: value for name, value in vars(self).items() if name != "_undo"}

    def __repr__(self) -> str:
        def shown(tables: dict[Any, Any]) -> str:
            return ", ".join(
                f"{key!r}: " + (f"{{{shown(value)}}}" if isinstance(value, dict) else f"{list(value.shape)}")
                for key, value in tables.items()
            )

        device = "" if self.device is None else f", device={str(self.device)!r}"
        return f"FetchFeatures(nodes={{{shown(self.nodes)}}}, edges={{{shown(self.edges)}}}{device})"


def _mapping(given: Any) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"the features are a {type(given).__name__}; wanted {{name: table}} or {{type: {{name: table}}}}"
        )
    return given


def _tables_of(given: Mapping[str, Any], what: str) -> dict[Any, Any]:
    return {name: table_of(value, f"{what}[{name!r}]", {}) for name, value in given.items()}


class FeatureStore(torch_geometric.data.FeatureStore, Closing):
    """A PyG FeatureStore that keeps features in compressed tables. Tensors are compressed when they are put into the
    store.

    For a graph without types, PyG's loaders (`NeighborLoader((store, graph_store), ...)`) require that all features
    belong to nodes. Use `FetchFeatures` for features of edges.

    Args:
        device: the device of fetched rows. None: the device of the ids. If it is a GPU, loaders with workers need
            `filter_per_worker=False`.
        options: options of `ibp.compress`, for every tensor that is put into the store.
    """

    def __init__(self, *, device: _Device = None, **options: Any) -> None:
        super().__init__()
        self._tables: dict[tuple[Any, str], Table] = {}
        self._device = None if device is None else checked_device(device)
        self._options, self._is_closed = options, False

    def close(self) -> None:
        """Drops the tables. Their memory is freed when nothing else holds them. Later calls raise RuntimeError."""
        self._tables.clear()
        self._is_closed = True

    def table(self, group_name: Any, attr_name: str) -> Table:
        """Returns the table of a feature. Raises KeyError if there is no such feature."""
        tables = self._open_tables()
        try:
            return tables[group_name, attr_name]
        except KeyError:
            raise KeyError(f"there is no feature {(group_name, attr_name)}; there are {list(tables)}") from None

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Returns the group and name of every feature."""
        return [TensorAttr(group_name, attr_name) for group_name, attr_name in self._open_tables()]

    def _open_tables(self) -> dict[tuple[Any, str], Table]:
        if self._is_closed:
            raise RuntimeError("the tables of this FeatureStore were freed by close()")
        return self._tables

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        """Compresses a tensor or array and stores the table. If `tensor` is a table or a cache of a table, stores it
        unchanged. Raises ValueError if attr has an index, because rows of a stored table cannot be replaced."""
        what = repr((attr.group_name, attr.attr_name))
        if attr.index is not None:
            raise ValueError(f"index of {what} is a {type(attr.index).__name__}; wanted None: rows of tables are fixed")
        options = {} if isinstance(tensor, TABLES) else self._options
        self._open_tables()[attr.group_name, attr.attr_name] = table_of(tensor, what, options)
        return True

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor:
        """Returns the rows of a feature at attr.index, which may be a tensor, an array, a slice or an int. Returns all
        rows if attr.index is None. Raises KeyError if there is no such feature."""
        what = repr((attr.group_name, attr.attr_name))
        table, index = self.table(attr.group_name, attr.attr_name), attr.index
        if isinstance(index, np.ndarray):
            index = torch.from_numpy(np.ascontiguousarray(index))
        elif isinstance(index, slice):
            index = torch.arange(*index.indices(len(table)), device="cpu")
        if isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype != torch.bool:
            return fetch(table, index, self._device, what)
        refuse_cuda_in_worker(table, self._device, what)
        if index is None:
            return table.decompress(device=self._device)
        rows = table[index]
        return rows if self._device is None else rows.to(self._device)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._open_tables().pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        table = self._open_tables().get((attr.group_name, attr.attr_name))
        return None if table is None else tuple(table.shape)

    def __len__(self) -> int:
        return len(self._open_tables())

    def __repr__(self) -> str:
        features = "" if self._is_closed else ", ".join(f"{key}: {list(x.shape)}" for key, x in self._tables.items())
        return f"FeatureStore({features})"
