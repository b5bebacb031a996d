"""`ibp verify`: compares the contents of files with their checksums."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from typing import Any, cast

import ibp
from ibp._files import damaged_blocks, views_in
from ibp.checkpoints._sources import local_path, open_source

from . import output, work

GOOD, DAMAGED, UNCHECKED = "good", "damaged", "no checksums"


def run(arguments: argparse.Namespace) -> int:
    with work.local(arguments.inputs) as given, work.threads(arguments.jobs):
        found = [_checked(path, arguments) for path in work.files_to_verify(given)]
    document = {"files": found, "good": all(one["status"] == GOOD for one in found)}
    output.report(arguments, document, *_parts(found))
    return 0 if document["good"] else 1


def _checked(path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Verifies one file. Returns what the command reports about it."""
    told: dict[str, Any] = {"path": path, "status": GOOD, "bytes": 0, "tensors": 0, "tables": 0}
    told.update(error=None, damaged=[], by_codebook=[], suspect=[])
    if work.has_other_format(path):
        with open_source(path) as read:
            return {**told, "status": UNCHECKED, "tensors": len(read.tensors)}
    try:
        with local_path(path) as near, ibp.open(near) as file:
            told.update(tensors=len(file), tables=len(file.tables))
            try:
                told["bytes"] = file.verify(content=arguments.content, progress=output.show_bars(arguments))
            except (ibp.ChecksumError, ibp.CorruptTableError) as error:
                told.update(status=DAMAGED, error=output.sentence(error))
                with contextlib.suppress(ibp.ChecksumError):  # a header or the checksums themselves are damaged
                    told.update(_damage(file, arguments.content))
            if told["status"] == GOOD and not file.has_checksums:
                told["status"] = UNCHECKED
    except ibp.FileFormatError as error:
        told.update(status=DAMAGED, error=output.sentence(error))
    return told


def _damage(file: ibp.File, content: bool) -> dict[str, Any]:
    """Returns a dictionary with the names of tensors in a damaged file, in three lists: "damaged"; "by_codebook", the
    damaged tensors that share a damaged codebook; and "suspect", tensors that may be damaged. If blocks are damaged,
    "error" is a sentence about the first of them.

    Checksums tell which blocks are damaged. Fingerprints tell which tables are damaged. If no tensor and no codebook in
    a damaged block is known to be damaged, all tensors with bytes in the block may be damaged, except those that are
    known to be intact. If the block has bytes of only one tensor, this tensor is damaged.

    Args:
        content: whether to decode tables outside of damaged blocks, too.
    """
    blocks = damaged_blocks(file)
    inside = {name for block in blocks for name in block.tensors}
    used = {name for block in blocks for users in block.codebooks for name in users}
    good = {name: _is_what_it_was(file, name) for name in {*inside, *used, *(file if content else ())}}
    # For each codebook that is certainly damaged, the tables that use it. A codebook in a damaged block is certainly
    # damaged if all tables that use it are damaged. If only one table uses it, this table must also have no rows in a
    # damaged block. Otherwise the rows may be damaged, and not the codebook.
    shared = [
        users
        for block in blocks
        for users in block.codebooks
        if all(good[name] is False for name in users) and (len(users) > 1 or users[0] not in inside)
    ]
    by_codebook = set(itertools.chain(*shared))
    damaged, suspect = {name for name, is_good in good.items() if is_good is False}, set[str]()
    for block in blocks:
        books = [users for users in block.codebooks if not any(good[name] for name in users)]
        tensors = [name for name in block.tensors if not good[name] and name not in by_codebook]
        if any(users in shared for users in books) or not damaged.isdisjoint(tensors):
            continue
        names = {*tensors, *itertools.chain(*books)}
        is_alone = len({*block.tensors, *itertools.chain(*block.codebooks)}) == 1
        (damaged if is_alone else suspect).update(names)
    found = {"damaged": damaged, "by_codebook": by_codebook & damaged, "suspect": suspect - damaged}
    bases = {name: view.base for name, view in views_in(file).items()}  # a view is in the same lists as its base
    told: dict[str, Any] = {
        kind: [name for name in file if bases.get(name, name) in names] for kind, names in found.items()
    }
    if blocks:
        more = output.show_count(len(blocks) - 1, "other block")
        others = f", as {more} {'has' if len(blocks) == 2 else 'have'}" if len(blocks) > 1 else ""
        told["error"] = output.one_line(f"{blocks[0].place}, has another checksum{others}")
    return told


def _is_what_it_was(file: ibp.File, name: str) -> bool | None:
    """Returns whether the decoded content of a table has the fingerprint in the file. Returns None if the file has no
    fingerprint for it."""
    if name not in file.tables or file.fields(name).content is None:
        return None
    try:
        return ibp.deltas.fingerprint(cast(ibp.CompressedTensor, file[name])) == file.fields(name).content
    except (ibp.FileFormatError, ibp.CorruptTableError):
        return False


def _parts(found: list[dict[str, Any]]) -> list[output.Part]:
    rows = [
        [one["path"], one["tensors"], one["tables"], output.show_size(one["bytes"]), one["status"]] for one in found
    ]
    parts: list[output.Part] = [output.table(["file", ">tensors", ">tables", ">checked", "status"], rows)]
    for one in found:
        if one["status"] == DAMAGED:
            parts += ["", one["error"]]
            for name in one["damaged"]:
                shared = " (by its codebook, which it shares with others)" if name in one["by_codebook"] else ""
                parts.append(f"  damaged: {output.shown(name)}{shared}")
            parts += [f"  perhaps damaged: {output.shown(name)}" for name in one["suspect"]]
        if one["status"] == UNCHECKED:
            verified = f"only {output.show_size(one['bytes'])} were" if one["bytes"] else "nothing was"
            parts += ["", f"{output.shown(one['path'])} has no checksums: {verified} verified."]
    return parts
