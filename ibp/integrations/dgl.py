"""Keeps features of DGL's graphs in compressed tables.

    ibp.integrations.dgl.attach(g, "feat")          # g.ndata["feat"] is compressed; g is used as before

All code that reads features through the graph gets the same bits as before. This includes `DataLoader` with
`prefetch_node_feats` and `prefetch_edge_feats`, blocks and subgraphs (`block.srcdata["feat"]`), their copies in worker
processes, and `g.ndata["feat"]`, which decodes the complete tensor at every read. `close` puts the plain tensor back.

This module is for DGL's classic graphs, and was tested with DGL 2.1.0; `ibp.integrations.graphbolt` is for features of
GraphBolt. `import dgl` fails if DGL has no binary of GraphBolt for the installed torch, and no release of DGL has a
binary for a version of torch that ibp supports. So import this module before `dgl`: it makes DGL work without
GraphBolt.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ibp

from ..adapters import Closing, OfThisProcess
from .shared import TABLES, Table, check_rows, fetch, refuse_cuda_in_worker, table_of


def _leave_out_graphbolt() -> None:
    """Replaces GraphBolt with an empty module if GraphBolt's binary does not exist. Does nothing if DGL has already
    been imported."""
    found = None if "dgl" in sys.modules else importlib.util.find_spec("dgl")
    if found is None or found.origin is None:
        return
    version = torch.__version__.split("+")[0]
    if not (Path(found.origin).parent / "graphbolt" / f"libgraphbolt_pytorch_{version}.so").exists():
        sys.modules["dgl.graphbolt"] = types.ModuleType("dgl.graphbolt", f"Left out by ibp: no binary for {version}.")


_leave_out_graphbolt()

import dgl  # type: ignore # noqa: E402
from dgl.frame import Column, Frame, Scheme  # type: ignore # noqa: E402

__all__ = ["AttachedFeature", "NotAttachedError", "attach", "close"]

_EdgeType = str | tuple[str, str, str]


class AttachedFeature(OfThisProcess, Closing):
    """A feature that `attach` has put into a table. `close()` or the end of a `with` block puts the plain tensor back.

    Attributes:
        table: the table, or the cache that `attach` was given.
    """

    _instead = "pickle its table, or the graph, which keeps the table"

    def __init__(self, table: Table, undo: Callable[[], torch.Tensor]) -> None:
        self.table, self._undo = table, undo

    def close(self) -> None:
        """Puts the plain tensor back into the graph. Does nothing if the feature is no longer attached."""
        with contextlib.suppress(NotAttachedError):
            self._undo()


class NotAttachedError(ValueError):
    """Raised by `close` if the feature is not one that `attach` keeps in a table."""


def attach(
    graph: dgl.DGLGraph,
    name: str,
    *,
    ntype: str | None = None,
    edges: bool = False,
    etype: _EdgeType | None = None,
    table: Table | None = None,
    **options: Any,
) -> AttachedFeature:
    """Keeps a feature of a graph's nodes or edges in a compressed table.

    Rows cannot be changed while a feature is attached. Code that writes to rows, or that adds nodes (or edges, for a
    feature of edges), turns the feature back into a plain tensor, with a warning. Reading a whole feature returns a new
    tensor each time, so changing that tensor does not change the feature. Attach features before you make loaders with
    workers.

    Args:
        graph: a graph on the CPU or a GPU, homogeneous or not.
        name: name of the feature, as in graph.ndata[name].
        ntype: type of the nodes. None: the graph has only one type.
        edges: whether it is a feature of edges, graph.edata[name].
        etype: type of the edges, which implies `edges`. None: the graph has only one type.
        table: an existing table of the feature, in host memory or on the graph's device, or an `ibp.RowCache` of such a
            table. None: the graph's tensor with this name is compressed. If this table is in host memory and there is a
            GPU, the table is pinned.
        options: options of `ibp.compress`.

    Returns:
        An object whose `close()` undoes the attachment; it is also a context manager. Its `table` is the table, or the
        cache of the table.

    Raises:
        TypeError: graph is not a DGLGraph, or table is not a table.
        KeyError: the graph has no such feature or type.
        ValueError: the feature is already attached, the table has another number of rows or is on another device, or
            ntype is given for a feature of edges.
    """
    frame, what, num_rows = _frame_of(graph, name, ntype, edges, etype)
    if table is None:
        column = frame._columns.get(name)
        if column is None:
            raise KeyError(f"the graph has no {what}; it has {sorted(frame.keys())}")
        if isinstance(column, _TableColumn) and column.is_attached:
            raise ValueError(f"{what} is attached already")
        table = table_of(column.data, what, options)
    elif isinstance(table, TABLES):
        table = table_of(table, what, options)
    else:
        raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor or an ibp.RowCache")
    check_rows(table, num_rows, what, "edges" if edges or etype is not None else "nodes")
    if table.is_cuda and table.device != graph.device:
        raise ValueError(f"{what} is on {table.device}; wanted host memory or the graph's device, {graph.device}")
    device: tuple | None = None if graph.device == table.device else (graph.device, {})
    frame._columns[name] = _TableColumn(table, Scheme(tuple(table.shape[1:]), table.dtype), None, device)
    return AttachedFeature(table, functools.partial(close, graph, name, ntype=ntype, edges=edges, etype=etype))


def close(
    graph: dgl.DGLGraph, name: str, *, ntype: str | None = None, edges: bool = False, etype: _EdgeType | None = None
) -> torch.Tensor:
    """Puts the plain tensor of an attached feature back into the graph, and returns it.

    Subgraphs that were taken before still hold the table.

    Args:
        graph, name, ntype, edges, etype: as in `attach`.

    Raises:
        TypeError: graph is not a DGLGraph.
        KeyError: the graph has no such type.
        ValueError: the feature is not attached (`NotAttachedError`), or ntype is given for a feature of edges.
    """
    frame, what, _ = _frame_of(graph, name, ntype, edges, etype)
    column = frame._columns.get(name)
    if not isinstance(column, _TableColumn) or not column.is_attached:
        raise NotAttachedError(f"{what} is not attached")
    frame._columns[name] = Column(column.data)
    return frame[name]


def _frame_of(graph: Any, name: str, ntype: str | None, edges: bool, etype: _EdgeType | None) -> tuple[Frame, str, int]:
    """Returns (the frame that holds a feature, the feature's name in error messages, the feature's number of rows)."""
    if not isinstance(graph, dgl.DGLGraph):
        raise TypeError(f"graph is a {type(graph).__name__}; wanted a dgl.DGLGraph")
    of_edges = edges or etype is not None
    if of_edges and ntype is not None:
        raise ValueError(f"ntype is {ntype!r}, but the feature is one of edges")
    kind, given, types_ = ("edge", etype, graph.canonical_etypes) if of_edges else ("node", ntype, graph.ntypes)
    if given is None and len(types_) != 1:
        raise KeyError(f"the graph has {len(types_)} types of {kind}s; wanted one of {types_} as {kind[0]}type")
    try:
        place = graph.get_etype_id(given) if of_edges else graph.get_ntype_id(given)
    except dgl.DGLError as error:
        raise KeyError(f"{kind[0]}type is {given!r}; wanted one of {types_}") from error
    what = f"{kind} feature {name!r}" + (f" of {given!r}" if given is not None else "")
    if of_edges:
        return graph._edge_frames[place], what, graph.num_edges(graph.canonical_etypes[place])
    return graph._node_frames[place], what, graph.num_nodes(graph.ntypes[place])


class _TableColumn(Column):
    """A column of a frame whose storage is a table. A column with an index, such as the column of a subgraph, reads its
    rows from the table when they are first needed. From then on it holds them as a tensor, as DGL's own columns do. A
    column without an index has all rows, and always keeps its table."""

    storage: Any  # a table or a tensor; None while the column comes from a worker process
    index: Any  # None, a tensor, or a dgl.frame._LazyIndex of several tensors
    device: tuple[Any, dict[str, Any]] | None  # the device to which rows go when they are read
    deferred_dtype: torch.dtype | None

    @property
    def is_attached(self) -> bool:
        """Whether the storage is a table."""
        return isinstance(self.storage, TABLES)

    @property
    def _holds_table(self) -> bool:
        """Whether this is a column without an index, whose storage is a table."""
        return self.is_attached and self.index is None

    def _where(self) -> torch.device | None:
        return None if self.device is None else torch.device(self.device[0])

    def _converted(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.deferred_dtype is None else rows.to(self.deferred_dtype)

    def _rows(self, ids: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        return self._converted(fetch(self.storage, ids, device, "a feature"))

    @property
    def data(self) -> torch.Tensor:
        if not self.is_attached:
            return Column.data.fget(self)
        if self.index is None:
            refuse_cuda_in_worker(self.storage, self._where(), "a feature")
            return self._converted(self.storage.decompress(device=self._where()))
        index = self.index if isinstance(self.index, torch.Tensor) else self.index.flatten()
        rows = self._rows(index, self._where())
        self.storage, self.index, self.device, self.deferred_dtype = rows, None, None, None
        return rows

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.is_attached:
            dgl.base.dgl_warning("a feature that ibp compresses is written to: it is a plain tensor from now on")
        Column.data.fset(self, value)

    def __getitem__(self, rowids: torch.Tensor) -> torch.Tensor:
        return self._rows(rowids, self._where()) if self._holds_table else super().__getitem__(rowids)

    def fetch(self, indices: torch.Tensor, device: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """Fetches rows. DGL's loaders call this method to prefetch. A GPU fetches its rows itself, on the current
        stream, so pin_memory has no effect."""
        if self._holds_table:
            return self._rows(indices, torch.device(device))
        return super().fetch(indices, device, pin_memory=pin_memory, **kwargs)

    def astype(self, new_dtype: torch.dtype) -> Column:
        if self.dtype == new_dtype:
            return self.clone()
        if not self.is_attached or self.deferred_dtype is not None:
            return Column(self.data).astype(new_dtype)
        column = self.clone()
        column.deferred_dtype = new_dtype
        return column

    def clone(self) -> _TableColumn:
        return _TableColumn(self.storage, self.scheme, self.index, self.device, self.deferred_dtype)

    def deepclone(self) -> Column:
        """Returns a deep copy. A table is shared, not copied, because tables do not change."""
        return self.clone() if self._holds_table else super().deepclone()

    def subcolumn(self, rowids: torch.Tensor) -> _TableColumn:
        made = super().subcolumn(rowids)
        return _TableColumn(made.storage, made.scheme, made.index, made.device, made.deferred_dtype)

    def pin_memory_(self) -> None:
        if self._holds_table:
            self.storage.pin_memory()
        else:
            super().pin_memory_()

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        if not self.is_attached:
            super().record_stream(stream)
            return
        table = self.storage.table if isinstance(self.storage, ibp.RowCache) else self.storage
        held = [table.slots, table.overflow, table.lengths, table.bases]
        if isinstance(self.index, torch.Tensor):
            held.append(self.index)
        elif self.index is not None:
            self.index.record_stream(stream)
        for tensor in held:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle. A column without an index is pickled with its table. If a change of its dtype is
        pending, it is pickled with the converted tensor instead. A pending move to a device is not pickled."""
        if not self._holds_table:
            return super().__getstate__()
        if self.deferred_dtype is not None:
            return {**self.__dict__, "storage": self.data, "device": None, "deferred_dtype": None}
        return {**self.__dict__, "device": None}

    def __repr__(self) -> str:
        return repr(self.storage) if self._holds_table else super().__repr__()
