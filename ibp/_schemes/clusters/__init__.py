"""Codebooks for rows of several kinds (the paper's section 6.5; FORMAT.md section 7). codebook.py: the codebook, which
holds one for each kind; kmeans.py: rows that are like each other; learning.py: how codebooks are found."""
