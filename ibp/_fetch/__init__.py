"""Fetches and decodes rows and whole tensors of a `Table` (_rows/table.py): the calls, and the paths by which the bytes
come to a GPU."""
