"""How tensors are coded: codebooks for tables of rows, general codecs for tensors that are only used as a whole, and
the choice between these codings.

    codebook = ibp.codecs.analyze(x, scheme="planes")     # learned once, for `ibp.compress(x, codebook=codebook)`
    choice   = ibp.codecs.choose(x, link_gbps=50)         # the coding that moves x over a link in the least time
    whole    = ibp.compress(x, scheme="zstd")             # an `ibp.codecs.WholeTensor`
"""

from .._common.process import published
from .._rows.clusters import ClusteredCodebook
from .._rows.codebook import AnyCodebook
from .._rows.learning import analyze
from .._rows.masks import Codebook
from .._rows.planes import PlanesCodebook
from ._compressing import Choice, CodingCost, choose
from ._whole import WholeTensor

__all__ = [
    "AnyCodebook",
    "Choice",
    "ClusteredCodebook",
    "Codebook",
    "CodingCost",
    "PlanesCodebook",
    "WholeTensor",
    "analyze",
    "choose",
]

__dir__ = published(__name__)
