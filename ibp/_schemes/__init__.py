"""How rows are coded, and how codebooks are learned.

`codebook.py` has what all codebooks share; `masks.py` (scheme "ibp"), `planes.py` and `clusters.py` each have a
codebook and the mathematics that finds one in rows. `learning.py` decides which codebook a tensor gets: it has the
options of `compress`, the table of schemes, the choice of "auto", and when a codebook is learned anew. `estimation.py`
tells what compressing would save. Each file imports only from the ones before it.
"""

# ruff: noqa: F401

from .clusters import ClusteredCodebook, with_clusters
from .codebook import AnyCodebook, check_codebook, coding_of, measure, surveyed
from .learning import SCHEMES, Options, Request, check_scheme, checked, learn
from .masks import Codebook
from .planes import PlanesCodebook
