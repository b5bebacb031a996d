"""Tables that several processes or machines share, and coded versions of the collectives of torch.distributed.

ibp.distributed.share_table        shares one rank's table with all ranks of a group on one machine
ibp.distributed.open_shared        opens a table that another process shares with `table.share()`
ibp.distributed.ShardedTable       a table whose rows are spread over the ranks of a group
ibp.distributed.broadcast_delta    sends the changes of weights from one process to the others
ibp.distributed.all_gather_into_tensor (or all_gather_single), all_to_all_single, broadcast, gather, scatter, send, recv
                                   do the same as in torch.distributed, but code tensors if that is faster
ibp.distributed.compress_all_gather
                                   makes FSDP2's all-gathers code tensors if that is faster
ibp.distributed.Codec              says how tensors are coded, for the argument `codec` of collectives
ibp.distributed.measure_link       measures how fast a group's all-gathers are
"""

from .._common.process import published
from .._machine.segments import SharedHandle
from ..deltas._sending import broadcast_delta
from ._calls import all_gather_into_tensor, all_gather_single, all_to_all_single, broadcast, gather, recv, scatter, send
from ._fsdp import compress_all_gather
from ._links import Link, measure_link
from ._messages import Codec
from ._tables import ShardedTable, open_shared, share_table

__all__ = [
    "Codec",
    "Link",
    "ShardedTable",
    "SharedHandle",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_to_all_single",
    "broadcast",
    "broadcast_delta",
    "compress_all_gather",
    "gather",
    "measure_link",
    "open_shared",
    "recv",
    "scatter",
    "send",
    "share_table",
]

__dir__ = published(__name__)
