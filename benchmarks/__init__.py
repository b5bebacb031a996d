"""Benchmarks of ibp. `python -m benchmarks` runs them all; README.md says what each answers."""
