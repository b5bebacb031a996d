"""Scheme ibp, called masks inside: invariant bits (FORMAT.md section 5)."""
