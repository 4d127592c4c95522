"""Activations that map raw features to densities."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F

from voxelfield.foundation import constants


class DensityActivation(nn.Module):
    r"""Softplus density, applied after interpolation so that a surface can be sharper than a voxel.

    :math:`\sigma = s \cdot \log(1 + e^{x + b})` with :math:`b` such that :math:`x = 0` gives the initial density (Sun
    et al. 2022, DirectVoxGO, section 5).

    Args:
        scale: Slope of the softplus for large features: density per unit of feature, per world unit of length.
        initial: Density of a zero feature, per world unit; should be small, so that space starts nearly empty.

    Raises:
        ValueError: ``scale`` or ``initial`` is not positive.
    """

    is_monotonic = True

    def __init__(self, scale: float, initial: float) -> None:
        super().__init__()
        if not (scale > 0 and initial > 0):
            raise ValueError(f"scale and initial must be positive, got {scale} and {initial}")
        self.scale = scale
        self.shift = math.log(math.expm1(initial / scale))

    def forward(self, raw: Tensor) -> Tensor:
        """Maps raw features (...) to densities (...) >= 0, float32, per world unit."""
        return self.scale * F.softplus(raw.float() + self.shift)

    def extra_repr(self) -> str:
        """Shows the settings in ``print(module)``."""
        return f"scale={self.scale}, shift={self.shift:.3f}"


class ExponentialDensity(nn.Module):
    r"""Exponential density, :math:`\sigma = \sigma_0 e^x`, whose gradient stays bounded.

    A network's output reaches any density within few steps (Mueller et al. 2022, Instant-NGP, whose ``trunc_exp``
    bounds the gradient in the same way).

    Args:
        initial: Density :math:`\sigma_0` at a zero output, per world unit.

    Raises:
        ValueError: ``initial`` is not positive.
    """

    is_monotonic = True

    def __init__(self, initial: float) -> None:
        super().__init__()
        if not initial > 0:
            raise ValueError(f"initial must be positive, got {initial}")
        self.initial = initial

    def forward(self, raw: Tensor) -> Tensor:
        """Maps raw outputs (...) to densities (...) >= 0, float32, per world unit."""
        return _BoundedExp.apply(raw.float(), self.initial)

    def extra_repr(self) -> str:
        """Shows the setting in ``print(module)``."""
        return f"initial={self.initial}"


class _BoundedExp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        # Not in place: torch 2.11 compiles a Function that changes a tensor in place without its gradient.
        result = x.clamp(max=constants.HIGHEST_RAW).exp() * scale
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return grad * result, None
