"""Constants that C++ and Python share: read from the compiled module, and the limits that it enforces."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from voxelfield import _library
from voxelfield.foundation import constants
from voxelfield.ops import sample_pyramid


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_importing_reads_none_of_them():
    code = "import voxelfield.foundation.constants; from voxelfield import _library; print(_library.loaded_modules())"
    assert run(code) == "{}"


@pytest.mark.slow
def test_the_first_use_may_be_under_fake_tensors():
    code = (
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from voxelfield.foundation import constants\n"
        "with FakeTensorMode():\n"
        "    print(type(constants.MAX_WIDTH).__name__, constants.MAX_WIDTH)"
    )
    assert run(code) == "int 128"


def test_every_name_has_a_value():
    _library.ensure_loaded("cpu")
    values = torch.ops.voxelfield.constants()
    assert [getattr(constants, name) for name in constants._NAMES] == values
    with pytest.raises(AttributeError, match="MAX_NOTHING"):
        constants.MAX_NOTHING  # noqa: B018


def test_the_kernels_enforce_the_limit_on_levels():
    _library.ensure_loaded("cpu")
    points = torch.rand(1, 5, 3)
    grids = [torch.rand(1, 2, 2, 2, 1)] * constants.MAX_LEVELS
    options = (points, 0, True, False, False, False)
    assert torch.ops.voxelfield.sample_trilinear(grids, *options).shape[-1] == constants.MAX_LEVELS
    with pytest.raises(RuntimeError, match=rf"{constants.MAX_LEVELS} tensors, got {constants.MAX_LEVELS + 1}"):
        torch.ops.voxelfield.sample_trilinear([*grids, grids[0]], *options)


def test_they_are_numbers_to_a_compiler():
    grids, points = [torch.rand(3, 3, 3, 2)] * 2, torch.rand(7, 3)
    compiled = torch.compile(sample_pyramid, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(grids, points), sample_pyramid(grids, points))
