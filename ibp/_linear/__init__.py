"""Products with a compressed matrix: `linear` (products.py), and what it makes once of a table (escapes.py)."""

from .escapes import Escapes, escapes_of
from .products import linear, slot_bytes_for

__all__ = ["Escapes", "escapes_of", "linear", "slot_bytes_for"]
