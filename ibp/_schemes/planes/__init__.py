"""Scheme "planes": ranked symbols (FORMAT.md section 6). codebook.py: the codebook; cost.py: what rows take with one;
learning.py: how one is found."""
