"""The input of a colour network: geometry features beside the encoded viewing direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from voxelfield import _library
from voxelfield.ops import _constants
from voxelfield.ops._autograd import below_autograd, last_derivative, register_autograd
from voxelfield.ops._checks import (
    FLOATING,
    check_dtype,
    check_index,
    check_same_device,
    check_tensor,
    coordinate_dtype,
)
from voxelfield.ops._no_derivative import hold_constant, refuse_jvp, refuse_vmap


def append_view(geometry: Tensor, directions: Tensor, ray_index: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Concatenates geometry and the spherical harmonics of each sample's viewing direction, in one pass.

    The harmonics are those of :func:`voxelfield.fields.decoders.spherical_harmonics`; the layout is that of
    Instant-NGP's colour network (Mueller et al. 2022, section 5.4).

    Args:
        geometry: (M, G), any floating dtype; column 0 is raw density. Differentiable.
        directions: (R, 3) float32 (float64 for float64 ``geometry``), the rays' unit directions, world frame.
        ray_index: (M,) int64, the ray of each sample, in [0, R); 0 where R is 0, as :class:`PackedSamples` has it. On
            CUDA not checked, because that would synchronise: an index outside selects the direction (0, 0, 0).
        degree: Highest band of the harmonics, 0 to 3.

    Returns:
        inputs (M, G + (degree + 1)**2) in the dtype of ``geometry``, and its first column (M,) in float32 (float64 for
        float64). Differentiable once, in ``geometry``.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or device, or ``degree`` is outside 0..3; or, on the CPU,
            ``ray_index`` leaves its range.
        NotImplementedError: A second derivative is requested.
    """
    check_tensor("geometry", geometry, ("M", "G"))
    check_dtype("geometry", geometry, FLOATING)
    check_tensor("directions", directions, ("R", 3))
    check_dtype("directions", directions, (coordinate_dtype(geometry.dtype),), f" for {geometry.dtype} geometry")
    check_tensor("ray_index", ray_index, (geometry.shape[0],), " as geometry has rows")
    check_dtype("ray_index", ray_index, (torch.int64,))
    check_same_device("directions", directions, "geometry", geometry)
    check_same_device("ray_index", ray_index, "geometry", geometry)
    if not 0 <= degree <= _constants.MAX_DEGREE:
        raise ValueError(f"degree must lie in 0..{_constants.MAX_DEGREE}, got {degree}")
    rays = directions.shape[0]
    check_index("ray_index", ray_index, max(rays, 1), f"for {rays} directions")
    _library.ensure_loaded(geometry.device.type)
    (directions,) = hold_constant("append_view", directions=directions)
    if torch.compiler.is_compiling():
        inputs, raw = torch.ops.voxelfield.append_view.default(geometry, directions, ray_index, degree)
    else:
        inputs, raw = _AppendView.apply(geometry, directions, ray_index, degree)
    return inputs, raw


class _AppendView(Function):
    @staticmethod
    def forward(geometry: Tensor, directions: Tensor, ray_index: Tensor, degree: int) -> tuple[Tensor, Tensor]:
        with below_autograd():
            inputs, raw = torch.ops.voxelfield.append_view.default(geometry, directions, ray_index, degree)
        return inputs, raw

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.geometry_size = inputs[0].shape[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _AppendViewBackward.apply(*grads, ctx.geometry_size), None, None, None

    jvp = refuse_jvp("append_view")
    vmap = refuse_vmap("append_view", "call it once with the rows of all calls")


_AppendViewBackward = last_derivative(
    "append_view_backward", "append_view is differentiable once; a second derivative was asked for"
)


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::append_view")
    def _(geometry: Tensor, directions: Tensor, ray_index: Tensor, degree: int) -> tuple[Tensor, Tensor]:
        rows, size = geometry.shape
        inputs = geometry.new_empty(rows, size + (degree + 1) ** 2)
        return inputs, geometry.new_empty(rows, dtype=coordinate_dtype(geometry.dtype))

    @torch.library.register_fake("voxelfield::append_view_backward")
    def _(grad_inputs: Tensor, grad_raw: Tensor, geometry_size: int) -> Tensor:
        return grad_inputs.new_empty(grad_inputs.shape[0], geometry_size)

    def forward(geometry: Tensor, directions: Tensor, ray_index: Tensor, degree: int) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = _AppendView.apply(geometry, directions, ray_index, degree)
        return result

    def backward(grad_inputs: Tensor, grad_raw: Tensor, geometry_size: int) -> Tensor:
        gradient: Tensor = _AppendViewBackward.apply(grad_inputs, grad_raw, geometry_size)
        return gradient

    register_autograd("append_view", forward)
    register_autograd("append_view_backward", backward)
