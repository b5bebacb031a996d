"""Converts the directories of models and of trainers: finds their files of tensors, copies their other files, and
changes their config.json.

If a directory is compressed or decompressed to a directory, each file of tensors is converted to a separate file, and
each set of files is converted to a set. `_files/paths.py` describes the names of the new files. All other files are
copied. After compression, a config.json beside weights says that they are coded; decompression removes this entry.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

from .._common.whole_files import check_replaceable, replaced, write_whole
from .._files import (
    INDEX_SUFFIX,
    SUFFIX,
    TENSOR_SUFFIXES,
    WEIGHTS,
    PathLike,
    check_other_files,
    check_other_sets,
    coded_name,
    file_of,
    index_of,
    is_there,
    is_url,
    open_regular,
    path_text,
    plain_name,
    read_index,
    target_of,
)
from ._source import NotTensorsError, Source
from ._sources import open_source

# The value of quant_method in quantization_config, by which transformers finds `ibp.integrations.transformers`.
METHOD = "ibp"
CODED_WEIGHTS = coded_name(WEIGHTS)
_CONFIG, _FIELD = "config.json", "quantization_config"
_COPIED_BYTES = 1 << 20  # number of bytes that are copied at once
# What is inserted before the last brace of a config.json.
_INSERTED = f',\n  "{_FIELD}": {{\n    "quant_method": "{METHOD}"\n  }}'


class Conversion:
    """A directory of this machine that is compressed or decompressed, to another directory or in place.

    The constructor opens the files of tensors, and checks that the other files can be read. The caller writes the new
    files of tensors, and then calls `finish`, which writes the other files.

    Attributes:
        sources: the opened files and sets of files of tensors. The key is the path, within the target, of the new file,
            or the path that the new set of files is named after.
        sets: the keys of `sources` that stand for sets of files.
    """

    def __init__(
        self, source: Path, target: Path, to_coded: bool, stack: contextlib.ExitStack, verify: bool = False
    ) -> None:
        self.source, self.target = source, target
        self._is_in_place = source.resolve() == target.resolve()
        files = _shown_files(source, None if self._is_in_place else target)
        tensors, others = _contents_of(source, files, stack, verify)
        name_of, other_name_of = (coded_name, plain_name) if to_coded else (plain_name, coded_name)
        self.sources: dict[Path, Source] = {}
        self.sets: set[Path] = set()
        # For each key of `sources`: the files in the target that hold the same tensors in the other form, plain if the
        # new file or set is coded, and vice versa. `finish` removes them.
        self._replaced: dict[Path, list[Path]] = {}
        for path, opened in tensors.items():
            new = path.with_name(name_of(path.name.removesuffix(INDEX_SUFFIX)))
            if new in self.sources:
                raise ValueError(f"{source} has {new.name} both plain and coded; wanted one of them")
            self.sources[new] = opened
            if is_index(path):
                self.sets.add(new)
            other = target / new.with_name(other_name_of(new.name))
            self._replaced[new] = _files_of(other) if other.name != new.name else []
        homes = {path.parent for path in tensors}
        # The other files, by new path: the path of the file to copy, or the new content of a config.json.
        self._beside: dict[Path, Path | bytes] = {}
        for path in others:
            os.close(open_regular(source / path))  # raises OSError if it cannot be read
            told = _told(source / path, to_coded) if path.name == _CONFIG and path.parent in homes else None
            if told is not None:
                self._beside[target / path] = told
            elif not self._is_in_place:
                self._beside[target / path] = source / path

    def paths(self) -> list[Path]:
        """Returns the existing paths that would be replaced or removed."""
        new = [self.target / path for path in self.sources]
        replaced = itertools.chain(*self._replaced.values())
        return [path for path in (*new, *map(index_of, new), *self._beside, *replaced) if os.path.lexists(path)]

    def skip(self, path: Path) -> None:
        """Drops a source, so that nothing is written for it. path: a key of `sources`."""
        del self.sources[path], self._replaced[path]

    def check(self) -> None:
        """Raises OSError if one of the other files would replace a directory, a device, or anything else that is not a
        regular file. Also raises OSError if the target contains the index of a set that this conversion neither writes
        nor removes."""
        for path in self._beside:
            check_replaceable(path)
        indices = [index_of(self.target / path) for path in self.sources]
        check_other_sets(self.target, [*indices, *itertools.chain(*self._replaced.values())])

    def keep(self, path: Path) -> None:
        """Removes a source from `sources`, so that its files are copied unchanged, as the other files are. path: a key
        of `sources`."""
        files = self.sources.pop(path).files
        home = self.target / path.parent
        names = [os.path.basename(file) for file in files]
        if path in self.sets:
            index = index_of(self.source / path)
            files, names = (*files, os.fspath(index)), [*names, index.name]
        if not self._is_in_place:
            self._beside.update({home / name: Path(file) for name, file in zip(names, files)})

    def other_files(self) -> tuple[str, ...]:
        """Returns the paths, within the target, of the files that `finish` writes."""
        return tuple(os.fspath(path.relative_to(self.target)) for path in self._beside)

    def finish(self) -> None:
        """Writes the other files, such as config.json, and then removes the files of tensors that the new ones
        supersede. The caller must call it after the new files of tensors are in place. Each file is written as a new
        file, which gets its name when it is complete. If a symbolic link has that name, the link is replaced, and the
        file to which it points does not change."""
        for path, content in self._beside.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                write_whole(path, content)
            else:
                size = content.stat().st_size
                with open(content, "rb") as source, replaced(path, size, like=[content]) as file:
                    shutil.copyfileobj(source, file, _COPIED_BYTES)
        for path in itertools.chain(*self._replaced.values()):
            path.unlink(missing_ok=True)


def conversion_of(
    inputs: PathLike | Iterable[PathLike],
    output: PathLike,
    to_coded: bool,
    stack: contextlib.ExitStack,
    verify: bool = False,
) -> Conversion | None:
    """Returns the conversion of the only input to the output, if both are directories of this machine; otherwise None.
    verify: as in `open_source`.

    Raises:
        FileNotFoundError: the directory has no file of tensors.
        SourceFormatError, ibp.FileFormatError: a file of tensors is damaged.
        ValueError: a config.json beside tensors is not JSON, or tensors exist both plain and coded.
    """
    given = inputs[0] if isinstance(inputs, (list, tuple)) and len(inputs) == 1 else inputs
    target = _target(output)
    if target is None or not isinstance(given, (str, os.PathLike)):
        return None
    text = path_text(given)
    return None if is_url(text) or not os.path.isdir(text) else Conversion(Path(text), target, to_coded, stack, verify)


def already_there(output: PathLike, name: str, conversion: Conversion | None) -> str | None:
    """Returns the path or URL of an existing file that the output would replace, or None if there is no such file.
    Raises OSError if that file must not be replaced, for instance because it is a device. name: the name of the new
    file if the output is a directory and there is no conversion."""
    if conversion is not None:
        there = next(map(os.fspath, conversion.paths()), None)
    else:
        there = file_of(output, name) if is_there(output, name) else None
    if there is not None and not is_url(there):
        check_replaceable(Path(there))
    return there


def check_output(output: PathLike, name: str, conversion: Conversion | None, force: bool) -> None:
    """Raises OSError if an output cannot be written: it exists, and `force` is not set; or something that must not be
    replaced, such as a device, has its name; or its directory has other weights, which programs that read the directory
    would load. The other arguments are as in `already_there`."""
    there = None if force else already_there(output, name, conversion)
    if there is not None:
        raise exists(there)
    if conversion is not None:
        conversion.check()
    elif (target := _target(output)) is not None:
        check_other_files(target / name)


def exists(there: str) -> FileExistsError:
    """Returns the error for an output that exists already."""
    return FileExistsError(f"{there} is there already; wanted another output, or force=True, which replaces it")


def _target(output: PathLike) -> Path | None:
    """Returns the directory of this machine that is the output, or None if it is not such a directory."""
    text = path_text(output)
    if is_url(text) or target_of(text) == Path(text):
        return None
    return target_of(text).parent


# ---- files of tensors ----


def files_to_verify(folder: str) -> list[str]:
    """Returns the paths of the safetensors files in a directory, at any depth; for a set of files, the path of its
    index. If there is only one path, or none, returns the path of the directory instead."""
    paths, _ = _units_of(Path(folder), _shown_files(Path(folder), None))
    found = [os.path.join(folder, path) for path in paths if path.name.removesuffix(INDEX_SUFFIX).endswith(SUFFIX)]
    return found if len(found) > 1 else [folder]


def is_index(path: Path) -> bool:
    """Returns whether a file is named like the index of a set of files of tensors."""
    return path.name.endswith(tuple(suffix + INDEX_SUFFIX for suffix in TENSOR_SUFFIXES))


def _units_of(folder: Path, files: list[Path]) -> tuple[list[Path], set[Path]]:
    """Finds tensor files by their suffixes. A checkpoint is a single file, or a set of files with an index. Returns
    (sorted paths of the single files and the indices, paths of the files that the indices name). All paths are relative
    to `folder`."""
    paths, parts = {path for path in files if path.name.endswith(TENSOR_SUFFIXES)}, set[Path]()
    for path in filter(is_index, files):
        named = {path.with_name(name) for name in read_index(folder / path).values()}
        if not named.isdisjoint(files):  # a download may have an index without its files
            paths.add(path)
            parts |= named
    return sorted(paths - parts), parts


def _contents_of(
    folder: Path, files: list[Path], stack: contextlib.ExitStack, verify: bool
) -> tuple[dict[Path, Source], list[Path]]:
    """Opens the files of tensors in a folder. Returns (sources by the path of their file or of their set's index, paths
    of all other files); the paths are within the folder. verify: as in `open_source`."""
    paths, parts = _units_of(folder, files)
    tensors: dict[Path, Source] = {}
    for path in paths:
        with contextlib.suppress(NotTensorsError):
            source = stack.enter_context(open_source(folder / path, verify=verify))
            if source.tensors:
                tensors[path] = source
    if not tensors:
        raise FileNotFoundError(f"{folder}: the directory has no file of tensors ({', '.join(TENSOR_SUFFIXES)})")
    return tensors, [path for path in files if path not in parts.union(tensors)]


def _files_of(path: Path) -> list[Path]:
    """Returns those files of an output that exist: the index of its set, the files that the index names, and the single
    file. path: the path that the set is named after, which is also that of the single file."""
    index = index_of(path)
    names = sorted(set(read_index(index).values())) if index.is_file() else []
    return [found for found in (index, *map(path.with_name, names), path) if os.path.lexists(found)]


def _shown_files(folder: Path, target: Path | None) -> list[Path]:
    """Returns the files in a folder, at any depth, that are neither hidden nor in the target, as paths within the
    folder."""
    apart = None if target is None else target.resolve()
    return [
        path.relative_to(folder)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and apart not in (path.parent.resolve(), *path.parent.resolve().parents)
    ]


# ---- config.json ----


def _told(path: Path, is_coded: bool) -> bytes | None:
    """Changes the text of a config.json. If `is_coded` is set, adds ibp's entry, which tells transformers and diffusers
    that the weights are coded; otherwise removes this entry. Returns the new text, or None if nothing changes. All
    other text stays the same, byte for byte. The exception is an entry that is to be removed, but whose text has
    changed since it was inserted: then all of the JSON is formatted anew."""
    try:
        text = path.read_bytes().decode()
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be told whether the weights beside it are coded, since it is no JSON in UTF-8: {error}"
        ) from None
    if not isinstance(config, dict) or not config:
        return None
    held = config.get(_FIELD)
    if is_coded and held is None:
        end = len(text[: text.rindex("}")].rstrip())
        return (text[:end] + _INSERTED + text[end:]).encode()
    if is_coded and not _is_ours(held):
        warnings.warn(
            f"{path} has a {_FIELD} of its own, which stays: its weights load where ibp is imported, and are decoded "
            "then",
            stacklevel=5,
        )
    if not is_coded and _is_ours(held):
        if text.count(_INSERTED) == 1:
            return text.replace(_INSERTED, "").encode()
        left = {key: value for key, value in config.items() if key != _FIELD}
        return f"{json.dumps(left, indent=2)}\n".encode()
    return None


def _is_ours(field: object) -> bool:
    return isinstance(field, dict) and field.get("quant_method") == METHOD


def lines_that_load(folder: str | os.PathLike[str]) -> str | None:
    """Returns the two lines of Python that load a directory of coded weights, or None if it is not a directory of
    transformers or diffusers."""
    for name in (_CONFIG, "model_index.json"):  # for a model, and for a pipeline
        with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
            config = json.loads(Path(folder, name).read_bytes())
            package, kind = "diffusers", config.get("_class_name")
            if kind is None:
                package, kind = "transformers", config["architectures"][0]
            return f"import ibp, {package}\nmodel = {package}.{kind}.from_pretrained({os.fspath(folder)!r})"
    return None
