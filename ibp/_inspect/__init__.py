"""Reports on the content of files: the bytes of each part, the use of each bit, and the savings of each tensor; as
data, as a plot and as a page. Also describes this installation."""
