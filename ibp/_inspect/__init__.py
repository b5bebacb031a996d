"""Reports on the content of files, as data, as a plot and as an HTML page: the size of each part, how each bit is
stored, and the savings of each tensor. Also describes this installation."""
