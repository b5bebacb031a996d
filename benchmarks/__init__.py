"""Benchmarks of ibp. `python -m benchmarks` runs them all; README.md says which question each of them answers."""
