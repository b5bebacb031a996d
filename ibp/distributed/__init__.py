"""Tables in several processes and on several machines, and collectives whose tensors travel coded, over
torch.distributed.

ibp.distributed.share_table        one table in host memory for all processes of a machine
ibp.distributed.open_shared        a table that another process shares by `table.share()`
ibp.distributed.ShardedTable       a table whose rows are spread over machines
ibp.distributed.broadcast_delta    what changed in weights, from one process to the others
ibp.distributed.all_gather_into_tensor (or all_gather_single), all_to_all_single, broadcast, send, recv
                                   as in torch.distributed, with tensors coded where that is faster
ibp.distributed.compress_all_gather
                                   FSDP2, whose all-gathers do the same
"""

from .._common.publishing import published
from .._machine.segments import SharedHandle
from ..deltas._broadcasting import broadcast_delta
from ._calls import all_gather_into_tensor, all_gather_single, all_to_all_single, broadcast
from ._codec import Codec
from ._fsdp import compress_all_gather
from ._links import Link
from ._pairs import recv, send
from ._planning import measure_link
from ._sharded import ShardedTable
from ._sharing import open_shared, share_table

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
    "measure_link",
    "open_shared",
    "recv",
    "send",
    "share_table",
]

__dir__ = published(__name__)
