"""Runs a notebook and stores its outputs in it: ``python docs/notebooks/run.py NAME FOLDER``.

FOLDER is where it runs, with what its cells need: for lego, the scene in ``data/lego``; for own_photographs, a scene or
photographs under the names that the notebook gives them. Needs the tests' requirements.
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

SIDE = 600
"""Longest side of pictures that are stored, in pixels."""


def main(name: str, folder: str) -> None:
    """Runs a notebook and replaces its file."""
    path = Path(__file__).with_name(f"{name}.ipynb")
    notebook = nbformat.read(path, as_version=4)
    metadata = notebook.metadata.copy()
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=None, record_timing=False, resources=resources).execute()
    notebook.metadata = metadata  # without versions of this machine's Python
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [small(output) for output in cell.outputs if output.get("name") != "stderr"]  # no bars
    nbformat.write(notebook, path)


def small(output: Any) -> Any:
    """Returns an output of a cell, its picture in one small file."""
    if picture := output.get("data", {}).get("image/png"):
        image = Image.open(io.BytesIO(base64.b64decode(picture)))
        image.thumbnail((SIDE, SIDE))
        file = io.BytesIO()
        image.quantize(256).save(file, "png", optimize=True)
        output["data"]["image/png"] = base64.b64encode(file.getvalue()).decode()
        output["data"].pop("image/jpeg", None)
    return output


if __name__ == "__main__":
    main(*sys.argv[1:])
