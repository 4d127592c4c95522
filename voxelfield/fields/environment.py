"""The surroundings of a field at infinity, such as the sky: a colour for each direction."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from voxelfield import ops
from voxelfield.fields.field import Field
from voxelfield.foundation.checks import check_tensor
from voxelfield.ops._internal.cameras import sphere_points, sphere_rays

ROWS = (8, 32, 128)
"""Rows of the maps that are added. Coarse maps learn fast and determine the colour where few photographs do."""

# Keeps the logits of black and white finite.
_DARKEST = 1 / 255


class Environment(nn.Module):
    r"""Colours of directions, in a panorama, for the transmittance with which rays leave a field.

    It is infinitely far away, so its colours depend on the direction alone, in the world frame. With the transmittance
    :math:`T` behind the last sample of a ray of direction :math:`d`, its colour is

    .. math:: \sum_i w_i c_i + T\, e(d).

    Urban Radiance Fields (Rematas et al. 2022, section 4.2) models the sky like this, by a network of the direction. A
    map is read in a fraction of the time, any other program can show it, and its detail does not depend on a network's.

    The panorama is the sum of maps of 8, 32 and 128 rows and twice as many columns, between whose texels it is
    interpolated linearly, around the whole circle; a sigmoid maps the sum to colours. The projection is
    equirectangular: +z is up, the middle column is +x, and -y is a quarter of the width to the right of it.

    Args:
        device: Device of the maps.

    Attributes:
        maps: The maps, each (rows, columns, 1, 3) float32.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        shapes = [(rows, 2 * rows, 1, 3) for rows in ROWS]
        self.maps = nn.ParameterList([nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes])

    def forward(self, directions: Tensor) -> Tensor:
        """Returns the colours of directions.

        Args:
            directions: (R, 3) float32 of any positive length, world frame, on the device of the maps.

        Returns:
            (R, 3) float32 in [0, 1], encoded as images are; differentiable with respect to maps and directions.

        Raises:
            ValueError: ``directions`` has another shape.
        """
        check_tensor("directions", directions, ("R", 3))
        row, column = project(directions)
        logits = torch.zeros_like(directions)
        for each in self.maps:
            # Periodic in azimuth, clamped at the poles.
            inside = row.clamp(0.5 / each.shape[0], 1 - 0.5 / each.shape[0])
            points = torch.stack((inside, column, torch.zeros_like(column)), dim=-1)
            logits = logits + ops.sample_trilinear(each, points, padding="periodic", align_corners=False)
        return torch.sigmoid(logits)

    @torch.no_grad()
    def fill(self, color: Tensor) -> None:
        """Gives all directions a colour (3,) in [0, 1], on any device."""
        for each in self.maps:
            each.zero_()
        self.maps[0].copy_(color.clamp(_DARKEST, 1 - _DARKEST).logit().expand_as(self.maps[0]))

    @torch.no_grad()
    def panorama(self) -> Tensor:
        """Returns the panorama (H, 2 H, 3), float32, in the projection of the maps, as high as the finest of them."""
        rows, device = ROWS[-1], self.maps[0].device
        down = math.pi * ((torch.arange(rows, device=device) + 0.5) / rows - 0.5)
        right = 2 * math.pi * ((torch.arange(2 * rows, device=device) + 0.5) / (2 * rows) - 0.5)
        down, right = torch.meshgrid(down, right, indexing="ij")
        y, z, x = sphere_rays(torch.stack((right, down), dim=-1)).unbind(dim=-1)
        directions = torch.stack((x, -y, -z), dim=-1)
        return self(directions.view(-1, 3)).view(rows, 2 * rows, 3)


def project(directions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where a panorama shows directions (R, 3): its row and its column, both (R,), as fractions from 0 to 1.

    Differentiable, also where a direction is vertical and has no azimuth.
    """
    x, y, z = directions.unbind(dim=-1)
    right, down = sphere_points(torch.stack((-y, -z, x), dim=-1)).unbind(dim=-1)
    return 0.5 + down / math.pi, 0.5 + right / (2 * math.pi)


def environment_of(field: Field) -> Environment | None:
    """Returns a field's attribute ``environment``; None if it has none."""
    return getattr(field, "environment", None)
