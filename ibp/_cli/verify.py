"""`ibp verify`: compares files with their checksums."""

from __future__ import annotations

import argparse
from typing import Any, cast

import ibp
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
    told.update(error=None, damaged=[], suspect=[])
    if work.has_other_format(path):
        with open_source(path) as read:
            return {**told, "status": UNCHECKED, "tensors": len(read.tensors)}
    try:
        with local_path(path) as near, ibp.open(near) as file:
            told.update(tensors=len(file), tables=len(file.tables))
            try:
                told["bytes"] = file.verify(content=arguments.content, progress=output.show_bars(arguments))
            except (ibp.ChecksumError, ibp.CorruptTableError) as error:
                told.update(status=DAMAGED, error=output.sentence(error), **_damage(file, arguments.content))
            if told["status"] == GOOD and not file.has_checksums:
                told["status"] = UNCHECKED
    except ibp.FileFormatError as error:
        told.update(status=DAMAGED, error=output.sentence(error))
    return told


def _damage(file: ibp.File, content: bool) -> dict[str, list[str]]:
    """Returns the names of the damaged tensors in a file, and of the "suspect" ones, which may be damaged because they
    lie in a block with damaged bytes. A table whose decoded content has its fingerprint is in neither list."""
    found: dict[str, list[str]] = {"damaged": [], "suspect": []}
    for name in file:
        try:
            file.verify([name], content=content)
        except (ibp.FileFormatError, ibp.CorruptTableError):
            good = _is_what_it_was(file, name)
            if not good:
                found["suspect" if good is None else "damaged"].append(name)
    return found


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
            parts += [f"  damaged: {output.shown(name)}" for name in one["damaged"]]
            parts += [f"  perhaps damaged: {output.shown(name)}" for name in one["suspect"]]
        if one["status"] == UNCHECKED:
            verified = f"only {output.show_size(one['bytes'])} were" if one["bytes"] else "nothing was"
            parts += ["", f"{output.shown(one['path'])} has no checksums: {verified} verified."]
    return parts
