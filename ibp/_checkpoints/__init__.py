"""Whole checkpoints in and out: files of tensors of any size, read, coded and written by blocks.

Modules import only those before them in this list:

    maps            files as arrays of bytes
    source          what a file of tensors is to its readers
    safetensors_files, numpy_files, torch_files, ibp_files
                    sources, one module a format
    sources         opening them: which format a file has, globs, directories, URLs
"""
