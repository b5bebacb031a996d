"""The schemes: how rows can be coded, and how codebooks are learned.

Modules import only those before them in this list:

    codebook    what codebooks of all schemes share
    sizes       what rows take with a codebook
    request     what a codebook is learned for, and from which rows
    masks       scheme "ibp": codebook, learning
    planes      scheme "planes": codebook, learning
    registry    the table of schemes
    clusters    several codebooks for one table: codebook, kmeans, learning
    kinds       data that share a codebook, and when it is learned anew
    choice      the scheme and codebook that `auto` takes
    estimation  what rows would take: `ibp.estimate`

The rest of the package takes what it needs from here, and the modules here take from it only what cuts tensors into
rows (`_layout/`, `_machine/staging.py`).
"""

from .clusters.codebook import ClusteredCodebook, with_clusters
from .clusters.learning import check_clusters, learn
from .codebook import AnyCodebook
from .masks.codebook import Codebook
from .planes.codebook import PlanesCodebook
from .planes.learning import learn_exponents
from .registry import SCHEMES, check_scheme, coding_of, scheme_of
from .request import Request, check_sample
from .sizes import measure, stored_share, surveyed, total_stored

__all__ = [
    "SCHEMES",
    "AnyCodebook",
    "ClusteredCodebook",
    "Codebook",
    "PlanesCodebook",
    "Request",
    "check_clusters",
    "check_sample",
    "check_scheme",
    "coding_of",
    "learn",
    "learn_exponents",
    "measure",
    "scheme_of",
    "stored_share",
    "surveyed",
    "total_stored",
    "with_clusters",
]
