"""The guides run: every python block of a page, in order and in one namespace, as a reader would type it.

The op that docs/extension.md adds is added to a copy of the project, compiled, and passes the tests that come with it.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from build_testing import environment
from free_ports import free_port
from warm_python import warm_python

import voxelfield

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/use_in_your_model.md",
    "docs/trilinear.md",
    "docs/rendering.md",
    "docs/callbacks.md",
    "docs/nerfacc.md",
    "docs/session.md",
    "docs/open_training.md",
    "docs/export.md",
]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A file name on its own line, followed by the content of the file.
FILE = re.compile(r"^`([^`\n]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# In files that exist already, what the page shows goes in front of this line.
INSERT_BEFORE = {
    "extension/module/library.cpp": "}\n",
    "voxelfield/ops/__init__.py": "\n__all__ = [\n",
    "tests/op_contracts.py": "# --- space, lenses and images\n",
}


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page} has no python block"
    # A module, because dataclasses look their annotations up in that of their class.
    guide = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", guide)
    for block in blocks:
        # Blank lines in front put the page's own line numbers, and thus its lines, into tracebacks.
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], str(path), "exec", dont_inherit=True), guide.__dict__)


@pytest.mark.slow
def test_the_training_loop_on_several_gpus_runs_on_two_processes_as_on_one(tmp_path: Path) -> None:
    program = dict(FILE.findall((ROOT / "docs" / "several_gpus.md").read_text(encoding="utf-8")))["fit_field.py"]
    path = tmp_path / "fit_field.py"
    path.write_text(program)
    fields = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        # What torchrun sets.
        shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        running = [
            warm_python.start(str(path), cwd=folder, env={**os.environ, **shared, **own}, merged=True) for own in ranks
        ]
        ended = [process.wait(120) for process in running]
        assert [done.returncode for done in ended] == [0] * processes, "".join(done.stdout for done in ended)
        assert float(re.findall(r"^loss (.*)$", ended[0].stdout, re.MULTILINE)[0]) < 0.02
        fields.append(torch.load(folder / "field.pt"))
    one, two = fields
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-3)


def imports_of_pages() -> list[tuple[str, str, str]]:
    """Returns page, module and name of everything that a guide imports from voxelfield, but for the one about ops."""
    found = []
    pages = {*PAGES, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))} - {"docs/extension.md"}
    for page in sorted(pages):
        for block in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(block[1])):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "voxelfield":
                    found += [(page, node.module or "", alias.name) for alias in node.names]
    return found


def test_what_guides_import_is_public() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    reference = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    imported = imports_of_pages()
    assert len(imported) > 20, "the imports were not found"
    hidden = []
    for page, module, name in imported:
        home = importlib.import_module(module)
        defined = getattr(getattr(home, name), "__module__", module)
        documented = {f"{module}.{name}", module, f"{defined}.{name}", defined} & reference
        if name in voxelfield.__all__:
            if module != "voxelfield":
                hidden.append(f"{page}: {name} must be imported from voxelfield, not from {module}")
        elif name not in getattr(home, "__all__", ()) and not documented:
            hidden.append(f"{page}: {module}.{name} is neither exported nor in docs/api")
    assert hidden == []


def test_contributing_names_what_there_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    # Paths stand in code or are a link's target. Those with a NAME are yet to be written, and loss/opacity is a tag.
    paths = re.findall(r"`([\w.]+(?:/[\w.]+)*/?)`", text) + re.findall(r"\]\(([^)#]+)", text)
    paths = [path for path in paths if "/" in path and not re.search("NAME|ROOM|objects|^loss/", path)]
    assert len(paths) > 20, "the paths were not found"
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.sweep
@pytest.mark.skipif(os.name == "nt", reason="drives a POSIX compiler")
def test_the_op_that_is_added_compiles_and_passes_its_tests(tmp_path: Path) -> None:
    for folder in ("extension", "voxelfield", "tests"):
        ignored = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "fixtures")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shown = dict(FILE.findall((ROOT / "docs" / "extension.md").read_text(encoding="utf-8")))
    assert len(shown) > len(INSERT_BEFORE)
    for name, content in shown.items():
        path = tmp_path / name
        assert path.exists() == (name in INSERT_BEFORE), f"{name} is not where the page has it"
        if name in INSERT_BEFORE:
            before, line, after = path.read_text().rpartition(INSERT_BEFORE[name])
            content = before + content + line + after
        path.write_text(content)

    quick = environment(tmp_path, tmp_path / "cache", VOXELFIELD_CUDA="0")
    for command in (
        ["voxelfield", "build", "--only", "cpu", "--out", str(tmp_path / "voxelfield")],
        ["pytest", "-x", "-q", "-m", "not cuda", "-k", "opacity", "tests/ops/test_contracts.py"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, env=quick, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command[0]}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert " passed" in done.stdout
