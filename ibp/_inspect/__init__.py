"""Reports on the content of files: the size of each part, how each bit is stored, and the savings of each tensor. Also
describes this installation.

`splitting.py` finds out what the bytes and bits of a table are used for, `report.py` makes the reports on tensors and
files, and `drawing.py` draws them as a plot and as an HTML page. `config.py` has `ibp.show_config`.
"""
