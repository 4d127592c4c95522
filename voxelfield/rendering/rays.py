"""Rays, and their intersection with a box."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from voxelfield.ops._checks import check_field, check_float32


@dataclass(frozen=True, eq=False)
class Rays:
    """A batch of rays, each with the interval in which it is sampled.

    Args:
        origins: (R, 3) float32, world frame.
        directions: (R, 3) float32, world frame, unit length (not checked, because that would synchronise).
        near: (R,) float32, world units along the ray.
        far: (R,) float32, world units along the ray. ``near == far`` marks an empty interval.

    Raises:
        TypeError: A field is not a float32 tensor.
        ValueError: A field has another shape, or the fields are on different devices.
    """

    origins: Tensor
    directions: Tensor
    near: Tensor
    far: Tensor

    def __post_init__(self) -> None:
        check_field("Rays.origins", self.origins, ("R", 3), torch.float32)
        count = self.origins.shape[0]
        check_float32("Rays.directions", self.directions, (count, 3), "Rays.origins", self.origins)
        check_float32("Rays.near", self.near, (count,), "Rays.origins", self.origins)
        check_float32("Rays.far", self.far, (count,), "Rays.origins", self.origins)

    def __len__(self) -> int:
        return self.origins.shape[0]

    def __getitem__(self, index: slice | Tensor) -> Rays:
        return Rays(self.origins[index], self.directions[index], self.near[index], self.far[index])

    def to(self, device: torch.device | str) -> Rays:
        """Returns the same rays on ``device``."""
        return Rays(*(getattr(self, field.name).to(device) for field in fields(self)))


def intersect_aabb(origins: Tensor, directions: Tensor, aabb: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the interval of each ray inside an axis-aligned box.

    Uses the slab method of Kay and Kajiya, "Ray Tracing Complex Scenes", SIGGRAPH 1986, section 2. The box is closed: a
    ray that runs exactly in one of its faces counts as inside. Not usefully differentiable.

    Args:
        origins: (R, 3) float32 or float64, world frame.
        directions: (R, 3), same dtype and device, of any nonzero length; exact zeros in one or two components are fine.
        aabb: (2, 3), same dtype and device, low corner and high corner, world frame.

    Returns:
        ``near`` (R,) and ``far`` (R,) in units of the direction's length, ``0 <= near <= far``. A ray that starts
        inside has ``near == 0``. Both are 0 for a ray that misses the box, only touches it, or points away from it.

    Raises:
        TypeError: An argument is not a floating tensor, or the dtypes differ.
        ValueError: An argument has another shape or device.
    """
    dtype = origins.dtype if isinstance(origins, Tensor) and origins.is_floating_point() else torch.float32
    check_field("origins", origins, ("R", 3), dtype)
    check_field("directions", directions, (origins.shape[0], 3), dtype, "origins", origins)
    check_field("aabb", aabb, (2, 3), dtype, "origins", origins)
    low = (aabb[0] - origins).div_(directions)
    high = (aabb[1] - origins).div_(directions)
    # For a ray parallel to a slab, the division gives infinities of the right signs. Only an origin exactly on a face
    # gives 0 / 0, which must not bound the ray. minimum and maximum propagate the NaN; it is replaced afterwards.
    inf = float("inf")
    enter = torch.minimum(low, high).nan_to_num_(nan=-inf, posinf=inf, neginf=-inf)
    leave = torch.maximum(low, high).nan_to_num_(nan=inf, posinf=inf, neginf=-inf)
    near = enter.amax(dim=-1).clamp_(min=0.0)
    far = leave.amin(dim=-1)
    # No valid ray stays in a finite box forever: an infinite far comes from NaN or from a zero direction.
    missed = ~((far > near) & (far < inf))
    return near.masked_fill_(missed, 0.0), far.masked_fill_(missed, 0.0)
