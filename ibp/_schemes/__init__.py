"""The schemes: how rows can be coded, and how codebooks are learned.

`registry.py` is the table of schemes, a folder each: `masks` is scheme "ibp". `choice.py` is what "auto" takes. The
rest of the package takes what it needs from here, and the modules here take from it only what cuts tensors into rows
(`_layout/`, `_machine/staging.py`).
"""

# ruff: noqa: F401

from .clusters.codebook import ClusteredCodebook, with_clusters
from .clusters.learning import check_clusters, learn
from .codebook import AnyCodebook
from .masks.codebook import Codebook
from .planes.codebook import PlanesCodebook
from .registry import SCHEMES, check_scheme, coding_of, scheme_of
from .request import Options, Request
from .sizes import measure, stored_share, surveyed, total_stored
