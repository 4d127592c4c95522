"""The compiled module: when it is loaded, and the constants that C++ and Python share."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from voxelfield import _library
from voxelfield.foundation import constants


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FIRST = {
    "accumulate_trilinear_": """
import sys, torch
from voxelfield.ops._internal.stencil import accumulate_trilinear_
total = torch.zeros(3, 3, 3, 1, device=sys.argv[1])
accumulate_trilinear_([total], total.new_ones(5, 1), total.new_full((5, 3), 0.5), padding="periodic")
assert abs(float(total.sum()) - 5) < 1e-5
""",
    "splat_trilinear, with its gradient": """
import sys, torch
from voxelfield import ops
values = torch.ones(5, 2, device=sys.argv[1], requires_grad=True)
ops.splat_trilinear(values, torch.full((5, 1), 0.5, device=sys.argv[1]), 3).sum().backward()
assert float((values.grad - 1).abs().max()) < 1e-5
""",
}


@pytest.mark.parametrize("op", FIRST)
def test_an_op_may_be_the_first_one_of_a_process(device, op):
    """Kernels are loaded when the first op asks for them, also by an autograd Function that calls the raw op."""
    run(FIRST[op], str(device))


@pytest.mark.slow
def test_importing_reads_no_constant():
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
