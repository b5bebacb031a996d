"""How rows and whole tensors are fetched and decoded: the calls, and the paths that they can take to a GPU. Works on
`_table.Table`."""
