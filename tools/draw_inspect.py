"""Draws the pictures of docs/cli.md: `python tools/draw_inspect.py [DIRECTORY]`, by default docs/images.

They show a plot and a page of `ibp inspect`, for a file with the weights of data/stories260k.npz and the KV-cache of
data/kv_stories260k.npz. The script needs matplotlib, transformers, and chromium, which photographs the page.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import ibp  # noqa: E402
from ibp._cli import main as command_line  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SHOWN = "model.layers.2.mlp.gate_proj.weight"  # The page shows this tensor opened.
SIZE = "1200,1000"


def write_file(path: Path) -> None:
    """Writes the model and the cache to a file, compressed as whole checkpoints are."""
    from stories260k import load_model

    tensors = {name: tensor.detach() for name, tensor in load_model().named_parameters()}
    with np.load(ROOT / "data" / "kv_stories260k.npz") as cache:
        for name in ("k", "v"):
            tensors[f"cache.{name}"] = torch.from_numpy(cache[f"{name}_bf16"]).view(torch.bfloat16)
    tables = {name: ibp.compress(x, layout="packed", memory="host") for name, x in tensors.items() if x.dim() > 1}
    ibp.save(path, {**tensors, **tables})


def photograph(page: Path, number: int, picture: Path) -> None:
    """Writes a picture of the page as a browser shows it, with one of its tensors opened."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        sys.exit(f"no browser is installed; wanted one of {', '.join(names)}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}"]
    subprocess.run(
        [browser, *options, f"--screenshot={picture}", f"file://{page}#t{number}"],
        check=True,
        timeout=60,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    images = Path(sys.argv[1] if len(sys.argv) > 1 else IMAGES).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # The pictures then name the file without its directory.
        path, page = Path("stories260k.safetensors"), Path(folder) / "page.html"
        write_file(path)
        with ibp.open(path) as file:
            number = list(file).index(SHOWN)
        drawn = ["--plot", str(images / "inspect_plot.png"), "--html", str(page), "--quiet", "--force"]
        if command_line.main(["inspect", str(path), *drawn]) != 0:
            sys.exit(1)
        photograph(page, number, images / "inspect_page.png")
        os.chdir(images)


if __name__ == "__main__":
    main()
