"""How close a result must come to its float64 reference, and why so close.

The ops compute in float32 (float64 for float64 tensors) and round to the tensor's own dtype once, at the end. So an
error has two parts:

- the final rounding, at most half a unit in the last place of each element: ``rtol`` is one ``eps`` of the result's
  dtype;
- what arithmetic loses: a coordinate ``p * (R - 1)`` rounded at R <= 16 moves a weight by up to R/2 ``eps``, and sums
  of products add a few more, relative to the largest terms rather than to a result that may cancel. ``atol`` is 128
  ``eps`` of the arithmetic's dtype, times the largest magnitude in the reference (at least 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

ARITHMETIC_EPS = 128


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of coordinates, and of arithmetic, that goes with features of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_matches(actual: Tensor, reference: Tensor, what: str = "result") -> None:
    """Fails unless ``actual`` is the float64 ``reference``, up to what its dtype explains."""
    assert actual.shape == reference.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(reference.shape)}"
    largest = reference.abs().max().item() if reference.numel() else 0.0
    torch.testing.assert_close(
        actual.double(),
        reference,
        rtol=torch.finfo(actual.dtype).eps,
        atol=ARITHMETIC_EPS * torch.finfo(arithmetic(actual.dtype)).eps * max(largest, 1.0),
        msg=lambda text: f"{what} ({actual.dtype}): {text}",
    )
