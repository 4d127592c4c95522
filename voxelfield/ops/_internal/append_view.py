"""The input of a colour network: geometry features beside the encoded viewing direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from voxelfield import _library
from voxelfield.foundation.autograd import hold_constant, last_derivative, refuse_jvp, refuse_vmap, run_raw
from voxelfield.foundation.checks import check_index, coordinate_dtype
from voxelfield.ops._registration import fake, register_autograd


def append_view(geometry: Tensor, directions: Tensor, ray_index: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Concatenates geometry and the spherical harmonics of each sample's viewing direction, in one pass.

    The harmonics are as in :func:`voxelfield.fields.decoders.spherical_harmonics`; the layout is as in Instant-NGP's
    colour network (Mueller et al. 2022, section 5.4).

    Args:
        geometry: (M, G), any floating dtype; column 0 is raw density. Differentiable.
        directions: (R, 3) float32 (float64 for float64 ``geometry``), the rays' unit directions, world frame.
        ray_index: (M,) int64, the ray of each sample, in [0, R); 0 where R is 0, as :class:`PackedSamples` has it. On
            CUDA not checked, because that would synchronise: an index outside selects the direction (0, 0, 0).
        degree: Highest band of the harmonics, 0 to 3.

    Returns:
        inputs (M, G + (degree + 1)**2) in the dtype of ``geometry``, and its first column (M,) in float32 (float64 for
        float64). Differentiable once, in ``geometry``.
    """
    (directions,) = hold_constant("append_view", directions=directions)
    rays = directions.shape[0]
    check_index("ray_index", ray_index, max(rays, 1), f"for {rays} directions")
    _library.ensure_loaded(geometry.device.type)
    if torch.compiler.is_compiling():
        inputs, raw = torch.ops.voxelfield.append_view.default(geometry, directions, ray_index, degree)
    else:
        inputs, raw = _AppendView.apply(geometry, directions, ray_index, degree)
    return inputs, raw


class _AppendView(Function):
    forward = run_raw("append_view")

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


@fake("append_view")
def _(geometry: Tensor, directions: Tensor, ray_index: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    rows, size = geometry.shape
    inputs = geometry.new_empty(rows, size + (degree + 1) ** 2)
    return inputs, geometry.new_empty(rows, dtype=coordinate_dtype(geometry.dtype))


fake("append_view_backward")(
    lambda grad_inputs, grad_raw, geometry_size: grad_inputs.new_empty(grad_inputs.shape[0], geometry_size),
)
register_autograd("append_view", _AppendView.apply)
register_autograd("append_view_backward", _AppendViewBackward.apply)
