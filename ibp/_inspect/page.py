"""Makes one page of HTML from reports. The page needs no other file: page.html, page.css and page.js, with the data
between them."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from .drawing import FIELDS
from .report import FileReport, TensorContents


def make_page(files: Sequence[FileReport]) -> str:
    """Returns the page. All text of the files is data in it: no name can become markup or code."""
    title = ", ".join(file.path for file in files)
    style, script = (_resource(name) for name in ("page.css", "page.js"))
    parts = {
        "title": html.escape(title),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": style,
        "data": _inline(_data(files)),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _resource("page.html"))


def _resource(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _inline(data: Any) -> str:
    """Returns JSON that can be in a script element: it has no character that begins or ends markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(files: Sequence[FileReport]) -> dict[str, Any]:
    """Returns what page.js draws. Each codebook's description is there once; parts and fields of floats are there by
    name."""
    codebooks: dict[str, int] = {}
    return {
        "fields": {
            dtype: FIELDS[dtype] for file in files for r in file.tensors for dtype in [r.dtype] if dtype in FIELDS
        },
        "files": [
            {**file.as_dict(), "tensors": [_tensor(report, codebooks) for report in file.tensors]} for file in files
        ],
        "codebooks": list(codebooks),
    }


def _tensor(report: TensorContents, codebooks: dict[str, int]) -> dict[str, Any]:
    """Returns a report without entries that are empty or zero."""
    values = vars(report) | {
        "codebook": codebooks.setdefault(report.codebook, len(codebooks)) if report.codebook else None,
        "left_out": report.left_out if any(report.left_out) else [],
        "ranked": report.ranked if any(report.ranked) else [],
        "entries": [(name, meaning, round(share, 4)) for name, meaning, share in report.entries],
    }
    always = ("name", "original_bytes", "stored_bytes", "shape", "parts", "entropy")
    return {key: value for key, value in values.items() if key in always or value or (key, value) == ("codebook", 0)}
