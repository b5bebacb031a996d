"""Scheme "ibp", called masks inside: invariant bits (FORMAT.md section 5). codebook.py: the codebook; learning.py: how
one is found."""
