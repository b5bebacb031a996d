"""Encodes rows and learns codebooks.

`codebook.py` has the base class of all codebooks. `masks.py` (scheme "ibp"), `planes.py` and `clusters.py` each have a
class of codebooks and the functions that find a codebook for given rows. `learning.py` decides which codebook a tensor
gets: it has the options of `compress`, the table of schemes, the choice of scheme "auto", and the rules for learning a
codebook again. `estimation.py` estimates what compressing a tensor would save. Each of these files imports only from
files that are named before it.
"""

# ruff: noqa: F401

from .clusters import ClusteredCodebook, with_clusters
from .codebook import AnyCodebook, check_codebook, coding_of, measure, surveyed
from .learning import SCHEMES, Options, Request, check_scheme, checked, learn
from .masks import Codebook
from .planes import PlanesCodebook
