"""Directories of models: the files beside the weights, and what config.json says of coded weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

from .._common.whole_files import write_whole
from .._files.paths import PathLike, file_of, is_there, is_url, path_text, target_of
from .._files.sets import INDEX_SUFFIX
from ._sources import holds_something_else, is_named_as_tensors

METHOD = "ibp"  # quant_method of quantization_config, by which transformers finds `ibp.integrations.transformers`
WEIGHTS, _OF_DIFFUSERS = "model.safetensors", "diffusion_pytorch_model.safetensors"
_CONFIG, _FIELD = "config.json", "quantization_config"
_INSERTED = f',\n  "{_FIELD}": {{\n    "quant_method": "{METHOD}"\n  }}'
_OF_OTHERS = (".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pdparams", ".tflite")  # weights, too


def weights_of(inputs: PathLike | Iterable[PathLike], output: PathLike) -> PathLike:
    """The output; where a directory of a model of diffusers becomes a directory, the file that diffusers looks for."""
    folder, target = _directory(inputs), _target(output)
    is_there = folder is not None and any((folder / f"{_OF_DIFFUSERS}{end}").exists() for end in ("", INDEX_SUFFIX))
    return target / _OF_DIFFUSERS if is_there and target is not None else output


def already_there(inputs: PathLike | Iterable[PathLike], output: PathLike) -> str | None:
    """What is there already of an output of these inputs, or None."""
    weights = weights_of(inputs, output)
    if is_there(weights):
        return file_of(weights)
    return next((os.fspath(path) for path in files_beside(inputs, output).values() if path.exists()), None)


def check_free(inputs: PathLike | Iterable[PathLike], output: PathLike, force: bool) -> None:
    """FileExistsError if an output is there already, unless `force` is set."""
    there = None if force else already_there(inputs, output)
    if there is not None:
        raise FileExistsError(f"{there} is there already; wanted another output, or force=True, which replaces it")


def files_beside(inputs: PathLike | Iterable[PathLike], output: PathLike) -> dict[Path, Path]:
    """Which files are copied where, if one directory becomes another on this machine: all but weights, hidden files
    and links to nothing. Empty where anything else is compressed or decompressed."""
    folder, target = _directory(inputs), _target(output)
    if folder is None or target is None or folder.resolve() == target.resolve():
        return {}
    files = [path for path in _shown_files(folder, target) if not _are_weights(path)]
    return {path: target / path.relative_to(folder) for path in files}


def copy_files_beside(inputs: PathLike | Iterable[PathLike], output: PathLike, *, is_coded: bool) -> None:
    """Copies these files. config.json of the copy says whether weights are coded, for transformers. A warning names
    weights that stay behind: in formats that `ibp.checkpoints` does not read, and in directories inside."""
    for source, copy in files_beside(inputs, output).items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        if copy.name == _CONFIG and copy.parent == _target(output):
            _say_in_config(copy, is_coded)
    folder, target = _directory(inputs), _target(output)
    if folder is not None and target is not None:
        left = [
            str(path.relative_to(folder))
            for path in _shown_files(folder, target)
            if path.name.endswith(_OF_OTHERS) or (path.parent != folder and _are_weights(path))
        ]
        if left:
            warnings.warn(f"left out: {', '.join(left)} of {folder}, weights that are not read", stacklevel=3)


def _shown_files(folder: Path, target: Path) -> list[Path]:
    """The files in a directory, of any depth, that are neither hidden nor in the output."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and target.resolve() not in (path.parent.resolve(), *path.parent.resolve().parents)
    ]


def _directory(inputs: PathLike | Iterable[PathLike]) -> Path | None:
    """The directory of this machine that is the only input."""
    given = inputs[0] if isinstance(inputs, (list, tuple)) and len(inputs) == 1 else inputs
    if not isinstance(given, (str, os.PathLike)):
        return None
    text = path_text(given)
    return Path(text) if not is_url(text) and os.path.isdir(text) else None


def _target(output: PathLike) -> Path | None:
    """The directory of this machine that is the output."""
    text = path_text(output)
    if is_url(text) or target_of(text) == Path(text):
        return None
    return target_of(text).parent


def _are_weights(path: Path) -> bool:
    if path.name.endswith((INDEX_SUFFIX, *_OF_OTHERS)):
        return True
    return is_named_as_tensors(path.name) and not holds_something_else(os.fspath(path))


# ---- config.json ----


def _say_in_config(path: Path, is_coded: bool) -> None:
    """Adds what transformers is to know to config.json, or takes it away. Other text stays as it is, byte for byte."""
    text = path.read_text(encoding="utf-8")
    with contextlib.suppress(ValueError):
        config = json.loads(text)
        if not isinstance(config, dict) or not config:
            return
        held = config.get(_FIELD)
        if is_coded and held is None:
            end = len(text[: text.rindex("}")].rstrip())
            write_whole(path, (text[:end] + _INSERTED + text[end:]).encode())
        elif is_coded and not _is_ours(held):
            warnings.warn(
                f"{path} has a {_FIELD} of its own, which stays: its weights load where ibp.integrations.transformers "
                "is imported, and are decoded then",
                stacklevel=4,
            )
        elif not is_coded and _is_ours(held):
            write_whole(path, _without_field(text, config).encode())


def _is_ours(field: object) -> bool:
    return isinstance(field, dict) and field.get("quant_method") == METHOD


def _without_field(text: str, config: dict) -> str:
    if text.count(_INSERTED) == 1:
        return text.replace(_INSERTED, "")
    return json.dumps({key: value for key, value in config.items() if key != _FIELD}, indent=2) + "\n"
