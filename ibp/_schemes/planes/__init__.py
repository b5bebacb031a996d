"""Scheme "planes": ranked symbols (FORMAT.md section 6). codebook.py: the codebook;
learning.py: how one is found."""
