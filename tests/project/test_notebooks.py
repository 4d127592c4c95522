"""The notebooks run from their first cell to their last, on the bundled scene."""

from __future__ import annotations

import json
import runpy
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
def test_notebooks_are_kept_with_small_outputs_and_have_one_cell_to_fill_in(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, "progress bars are outputs of a terminal"
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert max(len(json.dumps(output)) for output in outputs) < 200_000
    assert path.stat().st_size < 800_000
    assert len(parameters(notebook)) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_has_its_cells_and_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    page = runpy.run_path(str(ROOT / "docs" / "site" / "notebooks.py"))["as_markdown"](notebook)
    for cell in notebook["cells"]:
        assert "".join(cell["source"]) in page
        for output in cell.get("outputs", ()):
            picture = output.get("data", {}).get("image/png")
            shown = output.get("text") or output["data"].get("text/html") or output["data"]["text/plain"]
            assert ("".join(shown).rstrip() if picture is None else "".join(picture.split())) in page


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
