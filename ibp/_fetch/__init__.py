"""Fetching rows and whole tensors from a table."""
