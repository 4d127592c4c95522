"""Constants that C++ and Python share, read from the compiled module."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from voxelfield import _library
from voxelfield.foundation import constants


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
