"""The input of a colour network: geometry features beside the encoded viewing direction."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from voxelfield.foundation.checks import check_index, coordinate_dtype
from voxelfield.ops._table import declare


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
    rays = directions.shape[0]
    check_index("ray_index", ray_index, max(rays, 1), f"for {rays} directions")
    inputs, raw = _append_view(geometry, directions, ray_index, degree)
    return inputs, raw


def _results(geometry: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    rows, size = geometry.shape
    inputs = geometry.new_empty(rows, size + (degree + 1) ** 2)
    return inputs, geometry.new_empty(rows, dtype=coordinate_dtype(geometry.dtype))


def _gradients(grad_inputs: Tensor, grad_raw: Tensor, geometry: Tensor) -> dict[str, Any]:
    return {"geometry": _append_view_backward(grad_inputs, grad_raw, geometry.shape[1])}


_append_view = declare("append_view", _results, gradients=_gradients, constants=("directions",))
_append_view_backward = declare(
    "append_view_backward",
    lambda grad_inputs, geometry_size: grad_inputs.new_empty(grad_inputs.shape[0], geometry_size),
    refusal="append_view is differentiable once; a second derivative was asked for",
)
