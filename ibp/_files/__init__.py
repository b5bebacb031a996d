"""Files of tables: safetensors files whose tensors are the parts of tables, and everything else that such a file holds
(FORMAT.md section 9).

    ibp.save, ibp.checkpoints -> FileWriter, which writes one file, tensor by tensor
    ibp.open, ibp.load        -> File, a file or a set -> OpenFile, which reads one file -> Checks, its checksums

`format.py` defines what the bytes of a file say: a `Header` has an `Entry` for each tensor, and metadata; these have
the fields of tables (`TableFields`), of codebooks, and of tensors that share memory (`View`). `paths.py` handles paths,
URLs, sets of files, and what an output replaces. `reader.py` reads one file, and makes tables of its parts. `opened.py`
has `ibp.open`, `ibp.load` and `ibp.File`, which also reads sets of files. `writer.py` has `ibp.save` and the writer of
one file. Each module imports only modules that are named before it here.
"""

# ruff: noqa: F401

from .format import (
    FORMAT,
    MAX_HEADER_BYTES,
    MOST_TIMES,
    STORAGE,
    VIEW_KEY,
    ChecksumError,
    Entry,
    FileFormatError,
    TableFields,
    View,
    checksum_bytes,
    dtype_name,
    dtype_of,
    entry_of,
    form_of,
    other_format,
    rounded_up,
)
from .opened import File, TensorInfo, damage_in, load, open, range_verifier, stored_in, views_in
from .paths import (
    INDEX_SUFFIX,
    SUFFIX,
    SUFFIXES,
    TENSOR_SUFFIXES,
    WEIGHTS,
    PathLike,
    check_names_safetensors,
    check_other_files,
    check_other_sets,
    coded_name,
    file_of,
    file_system,
    find_files,
    format_of_name,
    index_of,
    is_of_set,
    is_of_weights,
    is_there,
    is_url,
    names_of_set,
    open_regular,
    output_of,
    outputs_of,
    path_text,
    plain_name,
    read_here,
    read_index,
    replacing,
    target_of,
    write_index,
    written_to,
)
from .reader import read_header
from .writer import (
    FileWriter,
    check_names,
    checked_metadata,
    codebook_bytes,
    header_room,
    save,
    write_plain,
    write_table,
)
