"""The notebooks run from their first cell to their last, on the bundled scene."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))

PARAMETERS = {
    "lego": 'SCENE, DOWNLOAD, TRAINER, OUTPUT = "bricks", False, "smoke", "out"',
    "own_photographs": f'PHOTOS, FOLDER, TRAINER, OUTPUT = "none", {str(ROOT / "data" / "bricks")!r}, "smoke", "out"',
}
"""What takes the place of the cell that a reader fills in."""


def parameters(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", ())]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs_and_have_one_cell_to_fill_in(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert len(parameters(notebook)) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_pictures(path, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    (cell,) = parameters(notebook)
    cell["source"] = PARAMETERS[path.stem]
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in data for data in shown) >= 3
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert [output for cell in notebook.cells for output in cell.get("outputs", ()) if "ename" in output] == []
