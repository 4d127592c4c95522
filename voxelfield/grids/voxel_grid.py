"""VoxelGrid: trainable features on the vertices of a regular grid that fills an axis-aligned box."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from voxelfield.foundation.autograd import traces_ops
from voxelfield.foundation.checks import (
    FLOATING,
    check_choice,
    check_dense,
    check_finite,
    check_not_negative,
    coordinate_dtype,
    widen_positions,
)
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError
from voxelfield.grids.boxes import PER_AXIS, box_extent, box_tensor, parse_box, parse_resolution, parse_size
from voxelfield.grids.grid import Grid
from voxelfield.grids.resampling import (
    migratable_state,
    refuse_computed,
    refuse_sharded,
    replace_values,
    sample_vertices,
    vertex_axes,
)
from voxelfield.grids.working_copies import WorkingCopies
from voxelfield.ops._grids import PADDINGS, Padding, sample_in_box
from voxelfield.ops._separable import KERNELS, sample_along

GridMode = Literal["linear", "nearest", "bspline", "convolution"]


def cubic_voxels(aabb: Sequence[Sequence[float]] | Tensor, mean_resolution: int) -> tuple[int, ...]:
    """Returns the resolution, a number along each axis, that fills a box with ``mean_resolution**3`` cubes.

    Args:
        aabb: (2, 3) box, world units; or one of two axes or one, to be filled with squares or pieces.
        mean_resolution: Cube root of the number of voxels: the geometric mean of the numbers along the axes.
    """
    extent = box_extent(parse_box(aabb, axes=(1, 2, 3)))
    edge = math.prod(extent) ** (1 / len(extent)) / mean_resolution
    return tuple(max(2, round(e / edge)) for e in extent)


class VoxelGrid(Grid):
    """Trainable features on a regular grid of vertices, read by trilinear interpolation at world positions.

    Vertices are spread evenly over the box with the first and the last one of every axis on the box's faces, or with
    ``align_corners=False`` at the centres of equal voxels that fill the box, as for
    :func:`torch.nn.functional.grid_sample`. An axis with a single vertex is constant. The index order is x, y, z
    everywhere.

    A box with corners of two numbers, or one, makes a grid of as many axes: features (X, Y, C) or (X, C), and positions
    (..., 2) or (..., 1). What is said of x, y and z then holds for these axes.

    The grid gives no meaning to its features, such as density or colour: it is a function from a position to
    ``channels`` numbers, differentiable twice in its features and in the position.

    Dtypes: ``.half()``, ``.bfloat16()`` and ``.double()`` convert the features only. The box stays float32, and
    positions are float32 or float64, because 16-bit coordinates cannot address the cells of a large grid.

    Args:
        resolution: Number of vertices along x, y and z; a single int means the same along all three. At least 1.
        channels: Number C of features per vertex. At least 1.
        aabb: Axis-aligned box in world units as ``((low_x, low_y, low_z), (high_x, high_y, high_z))``, or a tensor of
            shape (2, 3). Stored as float32.
        padding: The value read at a position outside the box. With ``"border"`` it is that of the nearest point of the
            box, with ``"zeros"`` features fade to zero within one cell of the outermost vertices, with
            ``"reflection"`` the grid is mirrored at the box's faces, and with ``"periodic"`` it is repeated. A period
            is one voxel longer than the distance of the outermost vertices: with ``align_corners=False`` it is the box.
        align_corners: Whether the outermost vertices lie on the faces of the box, or half a voxel inside. As a setting
            of the code, like ``padding``, this is not part of the ``state_dict``.
        mode: ``"linear"``; ``"nearest"`` for the value of the nearest vertex; ``"bspline"`` for cubic B-splines, of
            which the features are the coefficients; or ``"convolution"`` for cubic convolution
            (:func:`voxelfield.ops.sample_cubic`). Radiance fields, working copies and resampling need ``"linear"``.
        init_std: Standard deviation of the normal distribution from which the initial features are drawn.
        fill: Mean of that distribution; with ``init_std=0`` the initial value of all features.
        dtype: Type of the features: float32, float64, float16 or bfloat16.
        device: Where the features and the box live.

    Attributes:
        features: Parameter of shape (X, Y, Z, C), channels last.
        aabb: Buffer of shape (2, 3), float32, world units.
        working_copies: The copy that :meth:`enable_copies` has made, or None.

    Raises:
        TypeError: ``resolution`` or ``channels`` is not integer, or ``dtype`` is not one of the four.
        ValueError: A size is below 1, ``padding`` or ``mode`` is unknown, ``init_std`` is negative or not finite, or
            ``aabb`` is not a finite box with low < high along every axis.

    Example:
        >>> grid = VoxelGrid(resolution=64, channels=12, aabb=((-1, -1, -1), (1, 1, 1)))
        >>> grid(torch.zeros(5, 7, 3)).shape
        torch.Size([5, 7, 12])
    """

    features: nn.Parameter
    aabb: Tensor

    active = 1
    # If not None, initial features are drawn uniformly between plus and minus this, as the levels of a pyramid are.
    _init_range: float | None = None

    def __init__(
        self,
        resolution: int | Sequence[int],
        channels: int,
        aabb: Sequence[Sequence[float]] | Tensor,
        *,
        padding: Padding = "border",
        align_corners: bool = True,
        mode: GridMode = "linear",
        init_std: float = 0.0,
        fill: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._box = parse_box(aabb, axes=(1, 2, 3))
        shape = (*parse_resolution(resolution, len(self._box[0])), parse_size("channels", channels))
        if dtype not in FLOATING:
            raise ArgumentTypeError(f"dtype must be float32, float64, float16 or bfloat16, got {dtype}")
        check_choice("padding", padding, PADDINGS)
        check_choice("mode", mode, KERNELS)
        check_not_negative("init_std", init_std)
        check_finite("fill", fill)
        self.padding: Padding = padding
        self.align_corners = bool(align_corners)
        self.mode: GridMode = mode
        self.init_std = init_std
        self.fill = fill
        self.features = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.register_buffer("aabb", box_tensor(self._box, self.features.device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new features from the normal distribution given at construction, and restores the box.

        Torch's deferred initialisation calls this. The features and the box of a grid built under
        ``torch.device("meta")`` have no values; ``to_empty`` allocates memory for them, and this method fills it.
        """
        with torch.no_grad():
            self.aabb.copy_(box_tensor(self._box, torch.device("cpu")))
            if self._init_range is not None:
                self.features.uniform_(-self._init_range, self._init_range)
            elif self.init_std == 0:
                self.features.fill_(self.fill)
            elif not self.features.is_meta:  # nothing to draw, and normal_ on meta would make torch import its compiler
                self.features.normal_(self.fill, self.init_std)

    @property
    def resolution(self) -> tuple[int, int, int]:
        """Number of vertices along x, y and z."""
        return tuple(self.features.shape[:-1])  # type: ignore[return-value]  # three, unless the box has fewer axes

    @property
    def channels(self) -> int:
        """Number of features per vertex."""
        return self.features.shape[-1]

    @property
    def levels(self) -> list[nn.Parameter]:
        """A list of the features only, for code that also handles :class:`voxelfield.VoxelPyramid`."""
        return [self.features]

    @property
    def voxel_size(self) -> Tensor:
        """Distance between neighbouring vertices along x, y and z: (3,) float32, world units.

        Along an axis with a single vertex, this is the extent of the box.
        """
        cells = [max(size - 1, 1) if self.align_corners else size for size in self.resolution]
        return (self.aabb[1] - self.aabb[0]) / torch.tensor(cells, device=self.aabb.device)

    def vertices(self) -> Tensor:
        """Positions of the vertices.

        Returns:
            (X, Y, Z, 3) float32 world positions. The outermost vertices lie exactly on the faces of the box, or half a
            voxel inside with ``align_corners=False``. Along an axis with a single vertex, this vertex lies in the
            middle.
        """
        axes = vertex_axes(self.aabb, self.resolution, self.align_corners)
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)

    def to_unit(self, points: Tensor) -> Tensor:
        """Maps world positions to the unit cube, in which the functions in ``voxelfield.ops`` take positions.

        Args:
            points: (..., 3) world positions, float32 or float64, on the grid's device.

        Returns:
            (..., 3) in the dtype of ``points``: exactly 0 at the low and exactly 1 at the high face, less than 0 or
            more than 1 outside the box. Differentiable.

        Raises:
            TypeError: ``points`` is not a floating-point tensor.
            ValueError: Its last dimension is not 3, or it is on another device.
        """
        points = self._check_points(points)
        low, high = self.aabb.unbind()
        if points.dtype == torch.float64:
            low, high = low.double(), high.double()
        return (points - low) / (high - low)

    def contains(self, points: Tensor) -> Tensor:
        """Returns which positions lie in the box, faces included: (...) bool, False where one is not finite.

        Positions and errors are as for :meth:`to_unit`.
        """
        points = self._check_points(points)
        low, high = self.aabb
        return ((points >= low) & (points <= high)).all(dim=-1)

    @overload
    def forward(self, points: Tensor, *, with_gradient: Literal[False] = ...) -> Tensor: ...
    @overload
    def forward(self, points: Tensor, *, with_gradient: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def forward(self, points: Tensor, *, with_gradient: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Interpolates the features at world positions.

        Args:
            points: (..., 3) world positions, float32 or float64, on the grid's device. The leading shape is arbitrary
                and may contain zeros. Positions that are not finite read zeros and receive no gradient. 16-bit
                positions are converted to float32, with a warning: float16 has 11 significant bits, too few to
                distinguish the cells of a large grid.
            with_gradient: Also return the derivative with respect to the position, from the same pass over the grid,
                for surface normals or eikonal losses.

        Returns:
            features: (..., C) in the dtype of the grid, computed in float64 for a float64 grid and in float32
                otherwise. Outside the box the result depends on ``padding``.
            gradient: (..., C, 3), only with ``with_gradient``: the derivatives of the features per world unit along
                x, y and z, in the same dtype. In float16 a change of more than 65504 across the box overflows.

            The features alone are differentiable twice; features and gradient together are differentiable once.

        Raises:
            TypeError: ``points`` is not a floating-point tensor.
            ValueError: Its last dimension is not 3, or it is on another device.
        """
        if not with_gradient and (sampled := self._sample_eagerly(points)) is not None:
            return sampled
        # Positions are widened before they are mapped to the unit cube, so a float64 grid gets unrounded ones.
        points = self._check_points(points)
        unit = self.to_unit(points.double() if self.features.dtype == torch.float64 else points)
        if self.working_copies is not None and not with_gradient:
            sampled = self.working_copies.sample([self.features], unit.reshape(-1, 3).float(), self.padding)
            return sampled.reshape(*points.shape[:-1], self.channels)
        sampled = sample_along(self.features, unit, self.mode, self.padding, self.align_corners, with_gradient)
        if not with_gradient:
            return sampled
        values, slopes = sampled
        low, high = self.aabb.to(coordinate_dtype(slopes.dtype))
        return values, (slopes / (high - low)).to(slopes.dtype)

    def _sample_eagerly(self, points: Tensor) -> Tensor | None:
        """Interpolates at world positions in the common case; returns None if the general path must be taken.

        Gives the same result as the general path with as little host work as possible: it reads the tensors from
        `_parameters` and `_buffers`, because reading a module's attributes takes as long as adding two small tensors.
        """
        if self.working_copies is not None or type(self).to_unit is not VoxelGrid.to_unit or traces_ops():
            return None
        if self.mode != "linear":
            return None
        features: Any = self._parameters.get("features")  # a parametrized one is none
        aabb: Any = self._buffers["aabb"]
        if not (self.align_corners and isinstance(points, Tensor) and isinstance(features, Tensor)):
            return None
        if points.dtype is not torch.float32 or features.dtype is torch.float64 or points.requires_grad:
            return None
        if aabb.requires_grad or points.get_device() != features.get_device() or points.dim() == 0:
            return None
        if points.shape[-1] != 3 or features.dim() != 4:
            return None
        rows = points if points.dim() == 2 else points.reshape(-1, 3)
        sampled: Tensor = sample_in_box(features, rows, aabb, PADDINGS[self.padding])[0]
        return sampled if rows is points else sampled.view(*points.shape[:-1], features.shape[-1])

    def _new_copies(self, dtype: torch.dtype) -> WorkingCopies:
        if not self.align_corners:
            raise ArgumentValueError("align_corners must be True for enable_copies, got False")
        self.require_linear("enable_copies", axes=3)
        return super()._new_copies(dtype)

    def require_linear(self, purpose: str, axes: int | None = None) -> None:
        """Raises ValueError unless features are interpolated linearly, and along a number of axes if that is given."""
        if self.mode != "linear":
            raise ArgumentValueError(f"mode must be 'linear' for {purpose}, got {self.mode!r}")
        if axes not in (None, len(self.resolution)):
            raise ArgumentValueError(f"aabb must have {axes} axes for {purpose}, got {len(self.resolution)}")

    def _check_points(self, points: Tensor) -> Tensor:
        """Raises unless the points are positions on the grid's device; converts 16-bit ones to float32."""
        check_dense("points", points)
        points = widen_positions("points", points, torch.float32)
        if points.dtype not in (torch.float32, torch.float64):
            raise ArgumentTypeError(f"points must be float32 or float64, got {points.dtype}")
        if points.device != self.aabb.device:
            raise ArgumentValueError(f"points must be on the grid's device {self.aabb.device}, got {points.device}")
        axes = len(self.resolution)
        if points.dim() == 0 or points.shape[-1] != axes:
            raise ArgumentValueError(f"points must have shape (..., {axes}), got {tuple(points.shape)}")
        return points

    def upsample(self, resolution: int | Sequence[int], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Resamples the features to another resolution over the same box, and the optimizer's state with them.

        Every new vertex receives the value interpolated at its position. If the old vertices are among the new ones
        (R' - 1 is a multiple of R - 1, as in R -> 2R - 1), the field as a function of position stays the same up to
        rounding. The resolution may also be lower; values are then interpolated without smoothing. Beyond the old
        vertices, as with ``align_corners=False``, the outermost values are repeated, or the grid if its ``padding`` is
        ``"periodic"``. Only a small temporary is allocated besides the new tensor.

        The Parameter object stays the same, so optimizers and modules that refer to it remain valid; its ``grad`` is
        dropped. Wrap the model in ``DistributedDataParallel`` again afterwards; the previous wrapper raises an error.

        Args:
            resolution: New number of vertices along x, y and z, or one int for all three.
            optimizer: The optimizer that trains this grid, if any. Every tensor in its state that is shaped like the
                features (the moments of Adam, the momentum of SGD) is resampled like them. Step counts stay the same.

        Raises:
            TypeError: ``resolution`` is not integer.
            ValueError: A size is below 1, the grid is sharded (``fully_shard``), the optimizer does not train it, or
                its state for the grid has another shape and cannot be resampled, or ``mode`` is not ``"linear"``. In
                all these cases nothing has changed.
        """
        refuse_computed(self.features, "upsample")
        self.refit(self.aabb, resolution, optimizer)

    @torch.no_grad()
    def refit(
        self,
        aabb: Sequence[Sequence[float]] | Tensor,
        resolution: int | Sequence[int],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Resamples the grid to another box and resolution at once, and the optimizer's state with it.

        As :meth:`upsample`, with a new box, which may be smaller, to crop empty space, or larger.

        Args:
            aabb: New box in world units, as ``((low_x, low_y, low_z), (high_x, high_y, high_z))`` or (2, 3).
            resolution: New number of vertices along x, y and z, or one int for all three.
            optimizer: The optimizer that trains this grid, if any.

        Raises:
            TypeError: ``resolution`` is not integer.
            ValueError: ``aabb`` is not a finite box with low < high, or as for :meth:`upsample`. In all these cases
                nothing has changed.
        """
        axes = len(self.resolution)
        box, shape = parse_box(aabb, axes=(axes,)), parse_resolution(resolution, axes)
        refuse_computed(self.features, "refit")
        self.require_linear("resampling")
        state, shaped = migratable_state(self.features, optimizer) if optimizer is not None else ({}, [])
        low, high = self.aabb
        corners = (box_tensor(box, low.device) - low) / (high - low)
        # Beyond the old vertices the outermost values are repeated, or the whole grid.
        padding: Padding = "periodic" if self.padding == "periodic" else "border"

        def resampled(values: Tensor) -> Tensor:
            return sample_vertices(values, corners, shape, padding, self.align_corners)

        self.working_copies = None
        replace_values(self.features, resampled(self.features.detach()))
        for key in shaped:
            state[key] = resampled(state[key].to(self.features.dtype)).to(state[key].dtype)
        self._box = box
        self.aabb.copy_(box_tensor(box, torch.device("cpu")))

    def resize(
        self,
        mean_resolution: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        aabb: Sequence[Sequence[float]] | Tensor | None = None,
    ) -> None:
        """Resizes the grid to a number of nearly cubic voxels, as coarse-to-fine training does.

        Args:
            mean_resolution: Cube root of the number of voxels (:func:`cubic_voxels`).
            optimizer: The optimizer that trains this grid, if any.
            aabb: A box to which the grid is moved (:meth:`refit`), world units; None for the present one.

        Raises:
            ValueError: As for :meth:`refit`.
        """
        resolution = cubic_voxels(self.aabb if aabb is None else aabb, mean_resolution)
        if aabb is not None:
            self.refit(aabb, resolution, optimizer)
        elif resolution != self.resolution:
            self.upsample(resolution, optimizer)

    def total_variation(self, weights: Sequence[float] | None = None, *, channels: slice | None = None) -> Tensor:
        r"""Mean squared difference between neighbouring vertices.

        .. math:: \sum_{a \in \{x, y, z\}} \frac{w_a}{N_a} \sum_{v, c} (f_{v + e_a, c} - f_{v, c})^2

        where N_a is the number of pairs along axis a times the number of channels. The term of each axis is thus a mean
        over its own pairs for any resolution and number of channels; vertices at the border are not padded. Differences
        are per cell, not per world unit: for squared slopes, pass multiples of ``1 / grid.voxel_size**2`` as weights.
        An axis with a single vertex adds 0.

        This is the total variation loss of Plenoxels (Fridovich-Keil et al. 2022) without its square root. The root
        would couple the axes, and it has no derivative where the grid is flat.

        Args:
            weights: Three weights for x, y and z; all 1 if None.
            channels: Channels to take into account; all if None. Density and colour can thus be smoothed differently.

        Returns:
            Scalar, float64 for a float64 grid and float32 otherwise. Differentiable (twice) in the features.

        Raises:
            ValueError: There are not three finite weights, or ``channels`` selects none.
        """
        factors = (1.0,) * len(self.resolution) if weights is None else tuple(float(weight) for weight in weights)
        if len(factors) != len(self.resolution) or not all(math.isfinite(factor) for factor in factors):
            several = PER_AXIS[len(self.resolution) - 1]
            raise ArgumentValueError(f"weights must be finite numbers, {several}, got {weights!r}")
        values = self.features if channels is None else self.features[..., channels]
        if values.shape[-1] == 0:
            raise ArgumentValueError(f"channels must select at least one of {self.channels} channels, got {channels!r}")
        scales = tuple(
            factor * size / ((size - 1) * values.numel()) if size > 1 else 0.0
            for factor, size in zip(factors, self.resolution, strict=True)
        )
        values = values.to(coordinate_dtype(values.dtype))
        terms = (scale * values.diff(dim=axis).square().sum() for axis, scale in enumerate(scales))
        return torch.stack(list(terms)).sum()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> VoxelGrid:
        geometry = self.aabb
        super()._apply(fn, recurse)
        if self.aabb.dtype != geometry.dtype:
            self.aabb = geometry.to(self.aabb.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Adopts the saved resolution and box, because they are results of training and not settings of the code."""
        *_, error_msgs = args
        key = prefix + "features"
        saved = state_dict.get(key)
        self.working_copies = None  # copies of the old features
        if (
            isinstance(saved, Tensor)
            and saved.dim() == self.features.dim()
            and saved.numel()
            and saved.shape != self.features.shape
        ):
            if saved.shape[-1] == self.channels:
                for values in (self.features, nn.Parameter(saved, requires_grad=False)):
                    refuse_sharded(values, "load_state_dict of another resolution")
                replace_values(self.features, self.features.new_empty(saved.shape))
            else:
                error_msgs.append(
                    f"{key}: the checkpoint has {saved.shape[-1]} channels, this grid {self.channels}; a "
                    "grid adopts a saved resolution and box, but the model sets its number of channels."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.aabb = self.aabb.float()
        if type(self.aabb) is Tensor and not self.aabb.is_meta:
            low, high = self.aabb.tolist()
            self._box = (tuple(low), tuple(high))

    def extra_repr(self) -> str:
        """Describes the grid in one line, for ``print(module)``."""
        parts = [f"resolution={self.resolution}", f"channels={self.channels}", f"padding={self.padding!r}"]
        if not self.align_corners:
            parts.append("align_corners=False")
        if self.mode != "linear":
            parts.append(f"mode={self.mode!r}")
        if not self.aabb.is_meta:
            low, high = (", ".join(f"{value:.6g}" for value in corner) for corner in self.aabb.tolist())
            parts.insert(2, f"aabb=(({low}), ({high}))")
        return ", ".join(parts)
