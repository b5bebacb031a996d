"""Files of tables: safetensors files whose tensors are the parts of tables, and what they hold otherwise (FORMAT.md
section 9).

Modules import only those before them in this list:

    regular   files opened, and nothing that is no file
    fields    the lines of a file's metadata
    checks    checksums of blocks
    writer    a file, written as a stream
    sets      names of the files of a set, and its index
    header    the header of a file, and what a path opens
    paths     paths and URLs, by way of files of this machine
    reader    tables and tensors of a mapped file
    shared    one copy of a table for all processes
    opened    ibp.open, ibp.File, ibp.load
    saving    ibp.save
"""
