"""Outputs and batches for tests of losses, from rendered rays and the pixels to which they belong."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.models.batch import Batch, Outputs
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import Rendering


def rendered(
    rendering: Rendering,
    pixels: Tensor,
    truth: Tensor,
    *,
    field_truth: Tensor | None = None,
    structure: Tensor | None = None,
) -> tuple[Outputs, Batch]:
    """R rendered rays and P opaque pixels; ``structure`` are weights in [0, 1]."""
    count = rendering.opacity.shape[0]
    ends = torch.zeros(count, 3, device=truth.device)
    rays = Rays(ends, ends, ends[:, 0], ends[:, 0])
    rgba = torch.cat((truth, torch.ones_like(truth[:, :1])), dim=1)
    data = {} if structure is None else {"structure": 255 * structure}
    batch = Batch(
        rays,
        rgba,
        torch.arange(len(truth), device=truth.device),
        torch.zeros_like(truth),
        look_up=lambda name, indices: data[name][indices],
    )
    return Outputs(rendering, rendering.rgb, pixels, truth if field_truth is None else field_truth, None), batch
