"""A radiance field defined by two plain functions, for models that do not use this package's grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from voxelfield.fields.field import Field
from voxelfield.foundation.checks import check_field, check_result
from voxelfield.foundation.errors import ArgumentTypeError
from voxelfield.grids.boxes import box_tensor, parse_box
from voxelfield.ops import PackedSamples

DensityFunction = Callable[[Tensor], Tensor]
"""Maps world positions (N, 3) to densities (N,), per world unit."""

ColorFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps world positions (N, 3) and unit viewing directions (N, 3) to colours (N, 3)."""


class CallbackField(Field):
    """Density and colour computed by two user functions.

    The functions may be modules, methods of one module, closures or compiled functions, and gradients reach whatever
    parameters they use. The field itself has no parameters: pass the parameters of the modules to the optimizer.

    The functions have to meet no requirements beyond those stated here. Rendering calls them with any number N of
    points, including 0; all points are finite and inside the box of the occupancy grid.

    Rendering evaluates the density twice: at all candidate samples without gradient, then with gradient at the visible
    samples. If density and colour share work, for example as two outputs of one network, derive a class from
    :class:`voxelfield.fields.field.Field` that does this work once.

    Args:
        density: Maps world positions (N, 3) float32 to densities (N,), at least 0, per world unit, as float32, float16
            or bfloat16.
        color: Maps world positions (N, 3) and unit viewing directions (N, 3), both float32, to colours (N, 3),
            nominally in [0, 1], in the same dtypes.
        aabb: (2, 3) box outside of which cameras see nothing, world units.
        device: Where the functions compute. By default the device of ``aabb`` if that is a tensor, otherwise torch's
            default device.

    Attributes:
        aabb: (2, 3) float32, on the device.

    Raises:
        TypeError: ``density`` or ``color`` cannot be called.
        ValueError: ``aabb`` is not a box.

    Example:
        >>> ball = CallbackField(
        ...     density=lambda points: 20.0 * (points.norm(dim=-1) < 0.7),
        ...     color=lambda points, directions: points.abs(),
        ...     aabb=((-1, -1, -1), (1, 1, 1)),
        ... )
        >>> ball.density(torch.zeros(1, 3))
        tensor([20.])
    """

    aabb: Tensor

    def __init__(
        self,
        density: DensityFunction,
        color: ColorFunction,
        aabb: Tensor | Sequence[Sequence[float]],
        *,
        device: torch.device | str | None = None,
    ) -> None:
        for name, function in (("density", density), ("color", color)):
            if not callable(function):
                raise ArgumentTypeError(f"{name} must be a function that returns a tensor, got {function!r}")
        if device is None:
            device = aabb.device if isinstance(aabb, Tensor) else torch.get_default_device()
        self.aabb = box_tensor(parse_box(aabb), torch.device(device))
        self._density = density
        self._color = color

    def density(self, points: Tensor) -> Tensor:
        """See :class:`Field`.

        Raises:
            TypeError: ``points`` or the function's result is not a tensor of the right dtype.
            ValueError: ``points`` or the function's result has another shape or device.
        """
        check_field("points", points, ("M", 3), torch.float32, "aabb", self.aabb)
        density = self._density(points)
        check_result("density(points)", density, (points.shape[0],), points)
        return density.float()

    def sample(self, samples: PackedSamples, directions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Field.sample`.

        Raises:
            TypeError: The result of a function is not a tensor of the right dtype.
            ValueError: The result of a function has another shape or device.
        """
        points = samples.positions
        density = self.density(points)
        rgb = self._color(points, directions.index_select(0, samples.ray_index))
        check_result("color(points, directions)", rgb, (points.shape[0], 3), points)
        return density, rgb.float()
