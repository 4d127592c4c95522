from __future__ import annotations

import subprocess
import sys

import pytest

# Each takes from a tenth of a second to several seconds to import.
SLOW = ("torch._dynamo", "torchmetrics", "sympy", "imageio", "tensorboard", "pooch", "numpy", "PIL")


@pytest.mark.parametrize(
    ("module", "needed"), [("voxelfield", ("numpy",)), ("voxelfield.training.run", ("numpy", "PIL"))]
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
