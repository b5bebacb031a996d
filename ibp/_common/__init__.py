"""Has what all other folders use, and knows nothing about tables. Each module has one subject, and imports no other
folder.

For arguments and results: `arguments.py` checks numbers, and the patterns by which callers choose tensors.
`sequences.py` rounds sizes up, cuts sequences into parts, and works ahead of the caller on threads. `statistics.py` has
the base classes of objects that say what coding saves (`Saves`) and that count (`Statistics`).

For processes and files: `process.py` has locks and progress bars that survive a fork, warnings that are given once, and
the base classes of objects that hold resources (`Closing`, `OfThisProcess`). `whole_files.py` writes files that appear
only when they are complete (`NewFile`). `wire.py` converts values to bytes for other processes, and `group.py` sends
them by collective calls (`RankGroup`).

For torch: `ops.py` declares the operations `torch.ops.ibp`. `modes.py` decides what the library does inside of torch's
modes, transforms and tracers. `models.py` helps functions that change a model in place. `importing.py` publishes the
names of packages, and delays work until another package is imported.
"""
