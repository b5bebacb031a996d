"""General codecs, for tensors that are only ever wanted whole, and the choice between them and the schemes of rows.

Modules import only those before them in this list:

    codec     what a codec is, and the table of them
    host      zstd and lz4 on the CPU, by the packages zstandard and lz4
    nvcomp    nvCOMP's codecs on a GPU, by the package nvidia-nvcomp-cu13
    whole     WholeTensor: a tensor coded by one of them
    chosen    Choice: what was found, as a table
    choice    ibp.choose
"""
