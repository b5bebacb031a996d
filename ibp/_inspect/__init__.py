"""What is in a file: bytes by part, bits by use, savings by tensor; as a report, a plot and a page. And what this
installation is."""
