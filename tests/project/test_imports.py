from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module imports only modules of its own room, of the rooms in the lines before, and of those beside it in its line,
# between which there is no circle. "" is the room of the modules directly in voxelfield/.
ORDER = (
    ("", "foundation", "_build"),
    ("ops",),
    ("grids",),
    ("distributed",),
    ("warps",),
    ("fields",),
    ("rendering",),
    ("media",),
    ("datasets", "captures"),
    ("evaluation",),
    ("models",),
    ("components",),
    ("settings",),
    ("trained",),
    ("training",),
    ("export", "report", "viewer"),
    ("runs",),
    ("compat", "cli"),
)

# Modules that import others by names that are not written where they are imported.
BY_NAME = {"voxelfield", "voxelfield.installed", "voxelfield.foundation.extensions", "voxelfield.cli.command"}

# Each takes from a tenth of a second to several seconds to import.
SLOW = ("torch._dynamo", "torchmetrics", "sympy", "av", "tensorboard", "matplotlib", "pooch", "numpy", "PIL", "viser")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "needed"), [("voxelfield", ("numpy",)), ("voxelfield.runs.train", ("numpy", "PIL"))]
)
def test_importing_a_module_leaves_slow_ones_for_their_first_use(module, needed):
    unwanted = [name for name in SLOW if name not in needed]
    # torch itself imports some of them in some versions.
    code = (
        f"import sys, torch; before = set(sys.modules); import {module}; "
        f"print(*(name for name in {unwanted} if name in sys.modules and name not in before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def imports(path: Path, modules: set[str]) -> set[str]:
    """The package's modules that a file imports anywhere, those imported for types alone included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in modules else node.module for name in names)
    return found & modules


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """The package's modules and their files."""
    found = {}
    for path in (ROOT / "voxelfield").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.fixture(scope="module")
def graph(files) -> dict[str, set[str]]:
    """What each module imports of the package."""
    found = {module: imports(path, set(files)) - {module} for module, path in files.items()}
    assert sum(map(len, found.values())) > 100, "the imports were not found"
    return found


def test_imports_go_from_room_to_room_in_one_direction(files, graph):
    folders = {path.parent.name for path in (ROOT / "voxelfield").glob("*/__init__.py")}
    lines = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
    assert folders <= lines.keys()

    def room(module: str) -> str:
        name = module.split(".")[1]
        # "python -m voxelfield" is the command.
        return "cli" if name == "__main__" else name if name in folders else ""

    def number(module: str) -> int:
        # The package itself has names of many rooms, of which those of training are the last.
        return lines["training" if module == "voxelfield" else room(module)]

    pairs = [(module, imported) for module, others in graph.items() for imported in others]
    wrong = [pair for pair in pairs if pair[0] != "voxelfield" and number(pair[1]) > number(pair[0])]
    assert wrong == []


def test_only_registries_import_by_names_that_are_made(files):
    for module, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                name = getattr(node.args[0], "value", None)
                written = isinstance(name, str) and not name.startswith("voxelfield")
                assert written or module in BY_NAME or module.endswith(".registry"), f"{module}: {ast.unparse(node)}"


def test_no_module_imports_one_that_imports_it(graph):
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_no_package_imports_one_that_imports_it(graph):
    packages: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if module == "voxelfield":
            continue  # the names of the package itself are those of all packages
        package = module.split(".")[1]
        packages.setdefault(package, set()).update(
            name.split(".")[1] for name in imported if name != "voxelfield" and name.split(".")[1] != package
        )
    assert {"ops", "grids", "fields", "rendering", "models", "training", "runs", "cli"} <= packages.keys()
    graphlib.TopologicalSorter(packages).prepare()


@pytest.mark.slow
def test_a_session_whose_settings_are_all_given_needs_no_hydra():
    pytest.importorskip("omegaconf")
    program = """
import sys

sys.modules["hydra"] = None
import voxelfield
from voxelfield.models.dense import DenseConfig
from voxelfield.settings import OccupancyConfig, OptimizerConfig, TrainerConfig

scene = voxelfield.load_scene("bricks", image_size=50)
few = {"steps": 2, "preview_every": 0, "visible_samples": 4096, "candidate_samples": 16384, "max_rays": 256}
trainer = TrainerConfig(**few, occupancy=OccupancyConfig(resolution=16))
session = voxelfield.Session(scene, DenseConfig(), trainer=trainer, optimizer=OptimizerConfig(), device="cpu")
assert session.fit()
assert session.step == 2
# Which torch does for some operations on the meta device, and which takes seconds.
assert not {"torch._dynamo", "sympy"} & sys.modules.keys(), "training has imported the compiler"
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.slow
def test_training_does_not_import_the_compiler(tmp_path):
    """It takes seconds, and torch's optimizers would do it at their first call."""
    program = """
import sys
import torch

before = set(sys.modules)
import voxelfield
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.settings import preset

scene = voxelfield.load_scene("bricks", image_size=50)
settings = preset("model=pyramid", "model.resolutions=[8]", "trainer=smoke", "trainer.steps=2", device="cpu")
session = voxelfield.Session(scene, settings, output=sys.argv[1])
assert session.fit()
session.restore(load_checkpoint(sys.argv[1]))
session.evaluate(views=1)
print(*({"torch._dynamo", "sympy"} & set(sys.modules) - before))
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []
