"""Files with a flipped bit or a missing end: none is loaded with other contents."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from short_runs import ROOT, run
from test_kills import tensors

import voxelfield
from voxelfield import _build, _library
from voxelfield.run_directory import MODEL_FILE
from voxelfield.trained.checkpoint_file import CheckpointError, checkpoint_path, load_checkpoint, load_newest
from voxelfield.trained.model_file import ModelFileError

pytestmark = pytest.mark.sweep

FLIPS, CUTS = 200, 50


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with two checkpoints and a model file."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    status, text = run("trainer.keep_checkpoints=true", f"hydra.run.dir={directory}")
    assert status == 0, text
    return directory


def damages(whole: bytes, flips: int, cuts: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yields copies of a file, each with one flipped bit or without its end, and what was done to them."""
    chance = random.Random(seed)
    for _ in range(flips):
        at, bit = chance.randrange(len(whole)), chance.randrange(8)
        yield f"bit {bit} of byte {at} flipped", whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    for _ in range(cuts):
        length = chance.randrange(len(whole))
        yield f"cut to {length} bytes", whole[:length]


def check_refused(load: Callable[[], object], kind: type[Exception], path: Path, what: str) -> None:
    """Checks that loading a damaged file is refused in one line that names it."""
    try:
        load()
    except kind as error:
        message = str(error)
    else:
        pytest.fail(f"accepted: {what}")
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 700


def try_checkpoints(trained: Path, folder: Path, flips: int, cuts: int) -> int:
    older, newest = (checkpoint_path(folder, step) for step in (10, 20))
    for path in (older, newest):
        shutil.copy(trained / path.name, path)
    expected = tensors(load_checkpoint(older))
    load_checkpoint(newest)
    tried = 0
    for what, content in damages(newest.read_bytes(), flips, cuts, seed=2):
        newest.write_bytes(content)
        found = load_newest(folder)
        assert found is not None
        assert found[0] == older, what
        check_refused(lambda: load_checkpoint(newest), CheckpointError, newest, what)
        assert tensors(found[1]).keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(found[1]).items()), what
        tried += 1
    return tried


def try_models(trained: Path, folder: Path, flips: int, cuts: int) -> int:
    path = folder / MODEL_FILE
    tried = 0
    for what, content in damages((trained / MODEL_FILE).read_bytes(), flips, cuts, seed=3):
        path.write_bytes(content)
        check_refused(lambda: voxelfield.load(path, "cpu"), ModelFileError, path, what)
        tried += 1
    return tried


def try_modules(folder: Path, flips: int, cuts: int) -> int:
    """Refuses damaged copies of the compiled module before they are loaded."""
    module = _library.loaded_modules()[_build.sources.CPU_MODULE]
    copy = folder / module.name
    shutil.copy(_build.sources.digest_path(module), _build.sources.digest_path(copy))
    tried = 0
    for what, content in damages(module.read_bytes(), flips, cuts, seed=4):
        copy.write_bytes(content)
        misfit = _library._misfit(_build.sources.CPU_MODULE, copy)
        assert misfit is not None, what
        reason = misfit.reason
        # Damage to the stamp itself makes it one of other sources.
        assert reason.startswith(("is damaged, or was changed: ", "was compiled from other sources than ")), what
        assert "\n" not in reason
        tried += 1
    copy.write_bytes(module.read_bytes())
    assert _library._misfit(_build.sources.CPU_MODULE, copy) is None, "the whole one must be taken"
    return tried


def test_damaged_checkpoints_are_refused_and_the_one_before_is_taken(trained, tmp_path):
    assert try_checkpoints(trained, tmp_path, 30, 8) == 38


def test_damaged_model_files_are_refused(trained, tmp_path):
    assert try_models(trained, tmp_path, 30, 8) == 38


def test_damaged_modules_are_refused(tmp_path):
    _library.ensure_loaded("cpu")
    assert try_modules(tmp_path, 30, 8) == 38


@pytest.mark.long
def test_two_hundred_flips_and_fifty_cuts_of_each_are_refused(trained, tmp_path):
    _library.ensure_loaded("cpu")
    for number, attempt in enumerate((try_checkpoints, try_models)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert attempt(trained, folder, FLIPS, CUTS) == FLIPS + CUTS
    (tmp_path / "modules").mkdir()
    assert try_modules(tmp_path / "modules", FLIPS, CUTS) == FLIPS + CUTS


PROGRAM = """
import torch
from voxelfield.ops import sample_trilinear
print(sample_trilinear(torch.arange(8.0).reshape(2, 2, 2, 1), torch.full((1, 3), 0.5)).item())
"""


@pytest.mark.parametrize("damage", ["cut", "flip", "without its digest"])
def test_a_process_says_in_one_line_that_its_module_is_damaged(tmp_path, damage):
    """Loading such a module would end the process with SIGBUS, or compute something else."""
    _library.ensure_loaded("cpu")
    module = _library.loaded_modules()[_build.sources.CPU_MODULE]
    ignored = shutil.ignore_patterns("_C*", "__pycache__", "build-*")
    shutil.copytree(ROOT / "voxelfield", tmp_path / "voxelfield", ignore=ignored)
    shutil.copytree(ROOT / "extension", tmp_path / "extension")
    copy = tmp_path / "voxelfield" / module.name
    shutil.copy(module, copy)
    if damage != "without its digest":
        shutil.copy(_build.sources.digest_path(module), _build.sources.digest_path(copy))
    if damage == "cut":
        os.truncate(copy, copy.stat().st_size - 5000)
    elif damage == "flip":
        content = bytearray(copy.read_bytes())
        content[100_000] ^= 4
        copy.write_bytes(content)
    # No compiler, and no other copy: what is said is all that can be done.
    program = "from voxelfield import _library; _library.importlib.metadata.distributions = lambda **_: []\n" + PROGRAM
    variables = {"PYTHONPATH": str(tmp_path), "CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    options = {"cwd": tmp_path, "env": {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ""}, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)
    assert done.returncode == 1, done.stderr
    reason = "has no digest beside it" if damage == "without its digest" else "is damaged, or was changed"
    lines = [line for line in done.stderr.splitlines() if "ignoring" in line]
    assert len(lines) == 1, done.stderr
    assert f"ignoring {copy} {reason}" in lines[0]
