"""Rays, and their intersection with a box."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from voxelfield.foundation.checks import check_field, check_same_device


@dataclass(frozen=True, eq=False)
class Rays:
    """A batch of rays, each with the interval in which it is sampled.

    Args:
        origins: (R, 3) float32, world frame.
        directions: (R, 3) float32, world frame, unit length (not checked, because that would synchronise).
        near: (R,) float32, world units along the ray.
        far: (R,) float32, world units along the ray. ``near == far`` marks an empty interval.
        values: Further tensors (R, ...) by name, of any dtype, on which a field may depend besides positions and
            directions, such as the time or the index of the image (:attr:`voxelfield.fields.field.Field`).
        part: Of a batch that several processes share, the numbers (R,) of these rays, int64, and how many rays it has;
            None if these are all of a batch.

    Raises:
        TypeError: One of the first four is not a float32 tensor, or a value is not a tensor.
        ValueError: A tensor has another shape, or the tensors are on different devices.
    """

    origins: Tensor
    directions: Tensor
    near: Tensor
    far: Tensor
    values: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    part: tuple[Tensor, int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_field("Rays.origins", self.origins, ("R", 3), torch.float32)
        count = self.origins.shape[0]
        check_field("Rays.directions", self.directions, (count, 3), torch.float32, "Rays.origins", self.origins)
        check_field("Rays.near", self.near, (count,), torch.float32, "Rays.origins", self.origins)
        check_field("Rays.far", self.far, (count,), torch.float32, "Rays.origins", self.origins)
        check_values("Rays.values", self.values, count, self.origins)

    def __len__(self) -> int:
        return self.origins.shape[0]

    def __getitem__(self, index: slice | Tensor) -> Rays:
        part = None if self.part is None else (self.part[0][index], self.part[1])
        return self._mapped(lambda values: values[index], part)

    def to(self, device: torch.device | str) -> Rays:
        """Returns the same rays on ``device``."""
        return self._mapped(lambda values: values.to(device), self.part)

    def _mapped(self, change: Callable[[Tensor], Tensor], part: tuple[Tensor, int] | None) -> Rays:
        geometry = map(change, (self.origins, self.directions, self.near, self.far))
        return Rays(*geometry, values={name: change(value) for name, value in self.values.items()}, part=part)

    def random(self) -> Tensor:
        """Draws a number (R,) in [0, 1) for each ray from torch's global generator, in the dtype of :attr:`near`.

        Of a batch that processes share, numbers are drawn for all rays. A ray's number then does not depend on how many
        processes there are.
        """
        if self.part is None:
            return torch.rand_like(self.near)
        rows, total = self.part
        return torch.rand(total, dtype=self.near.dtype, device=self.near.device)[rows]

    def select_values(self, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Tensor]:
        """Returns values, (R, ...) by name, on which a field depends.

        Args:
            names: Their names, such as :attr:`voxelfield.fields.field.Field.extra_inputs`.
            optional: Names that are left out if the rays do not have the values.

        Raises:
            ValueError: The rays do not have a value that is not optional.
        """
        missing = [name for name in names if name not in self.values and name not in optional]
        if missing:
            raise ValueError(
                f"Rays.values must contain {', '.join(map(repr, missing))}, which the field depends on, got "
                f"{', '.join(map(repr, self.values)) or 'no values'}: give them to cameras by Cameras.with_values, or "
                "to rays when they are constructed"
            )
        return {name: self.values[name] for name in names if name in self.values}


def check_values(name: str, values: Mapping[str, Tensor], count: int, like: Tensor) -> None:
    """Raises unless every value is a tensor (count, ...) on the device of ``like``."""
    for key, value in values.items():
        label = f"{name}[{key!r}]"
        if not isinstance(value, Tensor):
            raise TypeError(f"{label} must be a tensor, got {type(value).__name__}")
        if value.shape[:1] != (count,):
            raise ValueError(f"{label} must have shape ({count}, ...), got {tuple(value.shape)}")
        check_same_device(label, value, name.split(".")[0], like)


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
