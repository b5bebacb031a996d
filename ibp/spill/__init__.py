"""Tables whose slots are on a GPU, and whose overflow is in pinned host memory (Buddy Compression, ISCA 2020):
`ibp.place` makes them, `ibp.profile` says how large slots have to be.

    targets     how many bytes of a row stay on the GPU
    profiling   snapshots of a run, and the targets that they call for
    placing     tensors and tables moved to such memory
"""
