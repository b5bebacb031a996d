"""Has what all other folders use, and knows nothing about tables. Each module has one subject, and imports no other
folder.

For arguments and results: `arguments.py` checks numbers, and the patterns by which callers choose tensors.
`sequences.py` rounds sizes up, cuts sequences into parts, and works ahead of the caller on threads. `manners.py` has
the base classes of objects that stand for tensors (`TensorManners`), say what coding saves (`Saves`) or count
(`Statistics`).

For processes and files: `process.py` has what a process has once, or what survives a fork: locks, progress bars,
warnings, the public names of packages, work that waits for an import, and the base classes of objects that hold
resources (`Closing`, `OfThisProcess`). `whole_files.py` writes files that appear only when they are complete
(`NewFile`). `wire.py` passes values to other processes, as bytes and by collective calls (`RankGroup`).

For torch: `ops.py` declares the operations `torch.ops.ibp`. `modes.py` decides what the library does inside of torch's
modes, transforms and tracers.
"""
