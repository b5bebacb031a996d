"""Knows the machine: the memory of the host and of GPUs, and how fast bytes move between them.

`memory.py` allocates pinned memory, interprets the arguments `memory`, `device` and `numa` of calls, and has `Pool`,
the pinned buffers of one owner. `segments.py` makes memory that several processes map: `Segment`, the shared memory of
a table, and `FileRows`, the rows of a table in a mapped file. `staging.py` copies host memory to a GPU and back, block
by block, through the buffers (`Turn`) of a `Ring`, while the GPU works. `calibration.py` has the rates of the machine,
a `Calibration`, and the `Clock` that measures them. The last three modules import `memory.py`, but not each other.
"""
