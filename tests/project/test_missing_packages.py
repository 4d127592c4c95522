"""What needs a package that is not installed is skipped by its name; every other import that fails is an error."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import missing_packages
import pytest
from warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
# What every test may import (torch requires typing_extensions), the folders whose modules tests import by bare names,
# and what Python 3.10 lacks.
REQUIRED = {"filelock", "pytest", "setuptools", "torch", "typing_extensions", "voxelfield", "tomllib"}
LOCAL = ("tests", "benchmarks", "data", "docs", "examples", "packaging")
IMPORTERS = ("importorskip", "import_module", "mesh_package")

# In these, av is not installed, trimesh and xatlas are (as the packages below), and pycolmap is one that needs av.
PACKAGES = {
    "trimesh": "",
    "xatlas": "raise ImportError('libxatlas.so: cannot open shared object file')",
    "pycolmap": "import av",
}
SKIPPED = {
    "test_import": "import av",
    "test_part": "from av.video.frame import VideoFrame",
    "test_helper": "import needs_av",
    "test_plugin": "pytest_plugins = ['needs_av']",
    "test_package": "import pycolmap",
    "test_reraised": """
        try:
            import av
        except ImportError as error:
            raise ImportError("videos cannot be read") from error
        """,
    "test_cuda": """
        import av, pytest
        @pytest.mark.cuda
        def test():
            pass
        """,
    "test_body": """
        def test():
            import av
        """,
    "test_fixture": """
        import pytest
        @pytest.fixture(scope="module")
        def reader():
            import av
        def test(reader):
            pass
        """,
    "test_program": """
        import subprocess, sys
        def test():
            program = "raise ModuleNotFoundError(\\"No module named 'av.video'\\")"
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        """,
    "test_log": """
        import logging
        def test():
            logging.getLogger("voxelfield").error("av-of-old must be installed to write a video: pip install it")
            assert False
        """,
    "test_output": """
        import sys
        def test():
            print("av-of-old must be installed for `voxelfield render`: pip install it", file=sys.stderr)
            assert False
        """,
    "folder/conftest": "import av",
}
ERRORS = {
    "test_misspelt": "import trimehs",
    "test_no_module": "import voxelfield.nowhere",
    "test_no_name": "from voxelfield import nowhere",
    "test_no_part": "import trimesh.nowhere",
    "test_broken": "import xatlas",
    "test_hidden": """
        import sys
        def test(monkeypatch):
            monkeypatch.setitem(sys.modules, "trimesh", None)
            import trimesh
        """,
    "test_mentioned": """
        def test():
            assert False, "ModuleNotFoundError: No module named 'av'"
        """,
    "test_goes_on": """
        import logging
        def test():
            logging.error("av-of-old must be installed to write a video: pip install it")
            logging.error("no space left")
            assert False
        """,
    "test_program_that_goes_on": """
        import subprocess, sys
        def test():
            program = "import sys; sys.exit('av must be installed to write videos\\\\nno space left')"
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        """,
}


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of pytest's summary on all of these files, with the project's conftest.py."""
    root = tmp_path_factory.mktemp("suite")
    conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    others = {"conftest": conftest, "hiding": "import sys\nsys.modules['av'] = None", "needs_av": "import av"}
    packages = {f"{name}/__init__": content for name, content in PACKAGES.items()}
    for name, content in (others | packages | SKIPPED | ERRORS | {"folder/test_folder": "def test(): pass"}).items():
        path = root / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(inspect.cleandoc(content) if content.startswith("\n") else content, encoding="utf-8")
    (root / "pytest.ini").touch()
    folders = os.pathsep.join(map(str, (root, ROOT / "tests", ROOT)))
    environment = {**os.environ, "PYTHONPATH": folders, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
    command = ["-m", "pytest", "-p", "hiding", "-p", "no:cacheprovider", "-rsfE", "--continue-on-collection-errors"]
    environment["VOXELFIELD_REQUIRE_CUDA"] = "1"
    options = {"cwd": root, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command], check=False, **options)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.partition("short test summary info")[2].splitlines()


@pytest.mark.parametrize("name", SKIPPED)
def test_what_needs_a_missing_package_is_skipped_by_its_name(summary, name):
    name = name.removesuffix("/conftest")
    where = name if name == "folder" else f"{name}.py"
    package = "av-of-old" if "av-of-old" in SKIPPED.get(name, "") else "av"
    assert f"SKIPPED [1] {where}: {package} is not installed" in summary


@pytest.mark.parametrize("name", ERRORS)
def test_other_imports_that_fail_are_errors(summary, name):
    (line,) = (line for line in summary if f"{name}.py" in line)
    assert line.startswith(f"FAILED {name}.py::test " if "def test" in ERRORS[name] else f"ERROR {name}.py")


def test_a_program_that_lacks_a_package_ends_the_test_that_waits_for_it(monkeypatch):
    program = ("-c", "raise ModuleNotFoundError(\"No module named 'av'\")")
    monkeypatch.setattr(missing_packages, "MISSING", frozenset())
    assert warm_python.run(*program).returncode == 1
    monkeypatch.setattr(missing_packages, "MISSING", frozenset({"av"}))
    for merged in (False, True):
        running = warm_python.start(*program, merged=merged)
        while running.poll() is None:
            time.sleep(0.01)
        with pytest.raises(subprocess.CalledProcessError) as caught:
            running.wait()
        assert missing_packages.missing_package(caught.value) == "av"
    assert warm_python.run("-c", "raise ModuleNotFoundError(\"No module named 'viser'\")").returncode == 1


@pytest.mark.parametrize(
    ("complaints", "package"),
    [
        ('no-such must be installed for `voxelfield eval`: pip install "voxelfield[train]"\n', "no-such"),
        ("a warning\nno.such must be installed to write videos", "no.such"),
        ("[2026-11-28 16:47:01,552][train][ERROR] - no-such must be installed to record a run\n", "no-such"),
        ("16:47:01 error: no-such must be installed to record a run\n", "no-such"),
        ("16:47:01 warning: no-such must be installed to record a run\n", None),
        ("[2026-11-28 16:47:01,552][train][WARNING] - no-such must be installed to record a run\n", None),
        ('torch must be installed for `voxelfield eval`: pip install "voxelfield[train]"', None),
        ("no-such must be installed to write videos\nno space left", None),
        ("ModuleNotFoundError: No module named 'voxelfield.nowhere'", None),
        ("", None),
    ],
)
def test_the_last_line_says_which_package_a_program_needs(complaints, package):
    assert missing_packages.package_needed(complaints) == package


def test_folders_of_a_package_that_was_uninstalled_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "left_behind" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not missing_packages.is_installed("left_behind")
    (tmp_path / "left_behind" / "__init__.py").touch()
    assert missing_packages.is_installed("left_behind")


def imported(path: Path) -> set[str]:
    """The first parts of the names that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTERS):
            names.update(word.value for word in node.args[:1] if isinstance(word, ast.Constant))
    return {name.partition(".")[0] for name in names}


def test_every_optional_package_is_listed():
    files = [path for folder in ("voxelfield", *LOCAL) for path in (ROOT / folder).rglob("*.py")]
    local = {"make_bricks"} | {path.stem for path in files if "voxelfield" not in path.relative_to(ROOT).parts}
    third_party = set().union(*map(imported, files)) - sys.stdlib_module_names - local - REQUIRED
    assert sorted(third_party - set(missing_packages.OPTIONAL)) == []
