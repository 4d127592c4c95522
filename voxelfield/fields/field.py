"""Radiance fields: the interface that rendering requires, and the package's field, a grid with a decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from voxelfield.fields.decoders import Decoder, DeferredMLPDecoder, FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.foundation import constants
from voxelfield.foundation.checks import FLOATING, check_dtype, check_same_device, check_tensor
from voxelfield.foundation.errors import shown
from voxelfield.foundation.extensions import complete
from voxelfield.grids.boxes import box_tensor, parse_box
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.voxel_grid import VoxelGrid
from voxelfield.ops import PackedSamples
from voxelfield.ops.ray_sums import spread
from voxelfield.warps.warp import Warp


@dataclass(frozen=True, eq=False)
class PyramidDensity:
    """The density of a pyramid followed by a network, as the arguments of the op that marches through it.

    ``levels`` are the active ones, with their ``blocks`` (:attr:`VoxelPyramid.blocks`). The network has the two
    matrices ``density_weights``, and the density at its zero output is ``density_initial``.
    """

    levels: list[Tensor]
    blocks: list[Tensor | None]
    aabb: Tensor
    density_weights: list[Tensor]
    density_initial: float


# Members of a field without a default.
_REQUIRED = ("aabb", "density", "sample")


class Field:
    """The base class of fields, which need not be an ``nn.Module``: what rendering requires, and what a field may have.

    A subclass must have :attr:`aabb`, :meth:`density` and :meth:`sample`. With only these, the general path renders it:
    candidate samples are placed in occupied cells, :meth:`density` determines which of them are visible, and
    :meth:`sample` evaluates the visible ones. Two more attributes are looked for, which may be modules and so have no
    default in the class: ``grid``, the features of a field that reads them from one (:func:`grid_of`), and
    ``environment``, colours of directions behind the field
    (:func:`voxelfield.fields.environment.environment_of`).

    Attributes:
        aabb: The box (2, 3) outside of which cameras see nothing, float32, world units, on the field's device.
        warp: The warp of a field that has one, and then :meth:`density_in_warp` too: the positions, distances and
            lengths of its samples are in warped coordinates. None for the world frame.
        skips_nan: Whether NaN positions have no influence on the field's gradients. If True, the unused rows of samples
            with a fixed capacity (:class:`voxelfield.rendering.march.Capacity`) have NaN positions, for which grids
            access no memory. Otherwise unused rows have positions in the occupancy grid's box: the gradient that they
            receive is zero, but a network that reads NaN would turn it into NaN.
        extra_inputs: Names of :attr:`voxelfield.Rays.values` that :meth:`sample` takes as keyword arguments (R, ...),
            except :attr:`optional_inputs` that the rays do not have. Rays that lack another value are rejected.
        optional_inputs: As above.
        density_inputs: Names of those that :meth:`density` takes as keyword arguments (M, ...); they need a default,
            because the density is also evaluated away from rays.
        shade: A method for deferred shading, or None: :meth:`sample` then returns features (M, C) in place of rgb, the
            first three of which are a diffuse colour. ``shade(features, directions, count=None)`` takes the means
            (R, C) of these features along rays, weighted as colours are, and the rays' unit directions (R, 3), and
            returns the colours (R, 3) that the rays would have if they were opaque. Given the features of a point, it
            returns the point's colour. Only the first ``count`` rows are needed, one int64 on the device; None: all.
    """

    if TYPE_CHECKING:  # no attribute of the class, which would hide a buffer of this name

        @property
        def aabb(self) -> Tensor:
            """As above."""

    warp: Warp | None = None
    skips_nan: bool = False
    extra_inputs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    density_inputs: tuple[str, ...] = ()
    shade: Callable[..., Tensor] | None = None

    def density(self, points: Tensor) -> Tensor:
        """Maps world positions (M, 3) to densities (M,), per world unit; float32."""
        raise NotImplementedError(f"{type(self).__name__} must define density")

    def density_in_warp(self, warped: Tensor) -> Tensor:
        """Maps warped coordinates (M, 3) to densities (M,), per unit there; only for a field with a warp."""
        raise NotImplementedError(f"{type(self).__name__} must define density_in_warp")

    def sample(self, samples: PackedSamples, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluates the field at packed ray samples.

        Args:
            samples: M samples of R rays.
            directions: (R, 3) the rays' unit directions.

        Returns:
            density (M,), per world unit, and rgb (M, 3); float32. With a method ``shade``, features in place of rgb.
        """
        raise NotImplementedError(f"{type(self).__name__} must define sample")

    def vertex_density(self) -> Tensor | None:
        """Returns the densities (X, Y, Z) at the vertices of the field's grid if they bound the density, else None."""
        return None

    def pyramid_density(self) -> PyramidDensity | None:
        """Returns the density in the form that a single kernel can march through, or None if it has another form."""
        return None


class RadianceField(Field, nn.Module):
    """Density and view-dependent colour throughout a box.

    Args:
        grid: The features.
        decoder: Maps features to density and colour; one of this package's decoders or any other
            :class:`voxelfield.fields.decoders.Decoder`.
        warp: The warp of the grid if that is not the world frame, to extend the field beyond one box:
            :class:`voxelfield.warps.nested_boxes.NestedBoxes` or
            :class:`voxelfield.warps.ndc_box.NdcBox`. The grid's box is then
            :attr:`Warp.warped_aabb`. :meth:`sample` and :meth:`density_in_warp` take positions in warped coordinates,
            and all other methods take world positions.

    Attributes:
        warp: The warp of the grid; None for the world frame.
        extra_inputs: Values of rays on which the decoder depends (:class:`Field`); none by default.
        optional_inputs: As for :class:`Field`.
        density_inputs: As for :class:`Field`.

    Raises:
        ValueError: The decoder expects another number of channels, or the grid does not span its warp.
    """

    skips_nan = True  # at NaN positions a grid returns zeros and receives no gradient

    def __init__(self, grid: VoxelGrid | VoxelPyramid, decoder: Decoder, warp: Warp | None = None) -> None:
        super().__init__()
        if isinstance(grid, VoxelGrid):
            grid.require_linear("a radiance field", axes=3)
        complete("decoder", decoder, Decoder, ("channels", "density", "__call__"))
        if grid.channels != decoder.channels:
            raise ValueError(f"decoder.channels must be {grid.channels}, as the grid has, got {decoder.channels}")
        self.grid = grid
        self.decoder = decoder
        if warp is not None and not grid.aabb.is_meta and parse_box(grid.aabb) != warp.warped_aabb:
            raise ValueError(f"grid.aabb must be warp.warped_aabb, {warp.warped_aabb}, got {grid.aabb.tolist()}")
        self.warp = warp
        self._outermost: tuple[Warp, Tensor] | None = None
        self._inputs, self._density_inputs = decoder.extra_inputs, decoder.density_inputs
        self.extra_inputs = (*self.extra_inputs, *(name for name in self._inputs if name != "position"))
        self.optional_inputs = (*self.optional_inputs, *decoder.optional_inputs)
        self.density_inputs = (*self.density_inputs, *(name for name in self._density_inputs if name != "position"))

    @property
    def shade(self) -> Callable[..., Tensor] | None:  # type: ignore[override]
        """See :class:`Field`. The decoder's method of this name, or None if it has none."""
        return self.decoder.shade

    @property
    def aabb(self) -> Tensor:
        """A box (2, 3) around all that the field represents, world units: the grid's box, or its warp's."""
        if self.warp is None:
            return self.grid.aabb
        # Cached, because tensors cannot be copied from the host during CUDA graph capture.
        cached, device = self._outermost, self.grid.aabb.device
        if cached is None or cached[0] != self.warp or cached[1].device != device:
            cached = self._outermost = (self.warp, box_tensor(self.warp.outermost, device))
        return cached[1]

    def forward(self, points: Tensor, directions: Tensor, **values: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluates the field.

        Args:
            points: (M, 3) world positions.
            directions: (M, 3) unit viewing directions, world frame.
            values: (M, ...) the values of :attr:`extra_inputs`, by name.

        Returns:
            density (M,), per world unit, and rgb (M, 3), nominally in [0, 1]; float32.

        Raises:
            TypeError: An argument is not a floating-point tensor.
            ValueError: An argument has another shape, or is on another device.
        """
        check_tensor("points", points, ("M", 3))
        check_tensor("directions", directions, tuple(points.shape), " as points")
        check_dtype("directions", directions, FLOATING)
        check_same_device("directions", directions, "points", points)
        each = torch.arange(points.shape[0], device=points.device)
        warped, unit = self._locate(points)
        density, rgb = self._decode(warped, directions, each, values)
        if self.shade is not None:
            rgb = self.shade(rgb, directions)
        return (density if unit is None else _in_world(density, warped, unit)), rgb

    def density(self, points: Tensor, **values: Tensor) -> Tensor:
        """Evaluates the density alone.

        Args:
            points: (M, 3) world positions.
            values: (M, ...) the values of :attr:`density_inputs`, by name; the decoder's defaults if absent.

        Returns:
            (M,), per world unit; float32.
        """
        warped, unit = self._locate(points)
        density = self.density_in_warp(warped, **values)
        return density if unit is None else _in_world(density, warped, unit)

    def density_in_warp(self, warped: Tensor, **values: Tensor) -> Tensor:
        """Evaluates the density in warped coordinates, which is the world frame if :attr:`warp` is None.

        Args:
            warped: (M, 3) positions in warped coordinates.
            values: As for :meth:`density`.

        Returns:
            (M,), per unit of warped coordinates; float32.
        """
        return self.decoder.density(self.grid(warped), **_select(self._density_inputs, warped, values))

    def _decode(
        self, warped: Tensor, directions: Tensor, ray_index: Tensor, values: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        inputs = _select(self._inputs, warped, values)
        density, rgb = self.decoder(self.grid(warped), directions, ray_index, **inputs)
        return density, rgb

    def _locate(self, points: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns world positions in warped coordinates, and the length of its unit there (None in the world frame)."""
        return (points, None) if self.warp is None else self.warp.from_world(points)

    def sample(self, samples: PackedSamples, directions: Tensor, **values: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluates the field at packed ray samples.

        Args:
            samples: M samples of R rays, in warped coordinates.
            directions: (R, 3) the rays' unit directions, world frame.
            values: (R, ...) the values of :attr:`extra_inputs`, by name.

        Returns:
            density (M,), per unit in warped coordinates, and rgb (M, 3) in [0, 1]; float32. With :attr:`shade`,
            features in place of rgb.
        """
        ray_index = samples.ray_index
        if torch.is_grad_enabled() and directions.requires_grad:
            # One direction per sample, so that the gradient of each ray is a sum along the ray. The backward pass of
            # indexing, which decoders use, would serialise its atomic additions on the one ray of all unused rows.
            directions = spread(directions, samples.ray_offsets, len(ray_index))
            values = {name: value.index_select(0, ray_index) for name, value in values.items()}
            ray_index = torch.arange(len(ray_index), device=ray_index.device)
        return self._decode(samples.positions, directions, ray_index, values)

    def vertex_density(self) -> Tensor | None:
        """See :class:`Field`.

        They do for a single grid with a decoder whose ``density_is_monotonic`` is True and whose density depends on
        features only.
        """
        if len(self.grid.levels) > 1 or self.density_inputs or self._density_inputs:
            return None
        if not self.decoder.density_is_monotonic:
            return None
        features = self.grid.sampled_levels[0].float()
        return self.decoder.density(features.flatten(0, 2)).view(features.shape[:-1])

    def pyramid_parts(self) -> tuple[VoxelPyramid, FusedMLPDecoder, ExponentialDensity] | None:
        """Returns the grid, the decoder and its activation if a single kernel can march through the density, or None.

        This requires a pyramid of at most 8 levels, concatenated, with "border" padding, each of 4 channels and fewer
        than 2^31 elements; and a fused network decoder, deferred or not, with at most 16 geometry outputs and an
        exponential density. All parameters must be float32 or float16. Subclasses do not qualify, because they may
        compute something else.
        """
        grid, decoder = self.grid, self.decoder
        if type(self) is not RadianceField or type(grid) is not VoxelPyramid:
            return None
        if not isinstance(decoder, FusedMLPDecoder) or type(decoder) not in (FusedMLPDecoder, DeferredMLPDecoder):
            return None
        activation = decoder.activation
        if type(activation) is not ExponentialDensity:
            return None
        fits = (
            decoder.density_network[-1].shape[0] <= constants.MAX_GEOMETRY
            and grid.reduce == "concat"
            and grid.active <= constants.MAX_FIELD_LEVELS
            and all(level.padding == "border" and level.channels == constants.LEVEL_CHANNELS for level in grid.grids)
            and all(level.numel() < 2**31 - 1 for level in grid.levels)  # the kernels count in 32 bits
            and all(x.dtype in (torch.float32, torch.float16) for x in (*grid.levels, *decoder.parameters()))
        )
        return (grid, decoder, activation) if fits else None

    def pyramid_density(self) -> PyramidDensity | None:
        """Returns the density in the form that a single kernel can march through.

        None if it has another form (:meth:`pyramid_parts`) or if, on CUDA, it is not read from float16 copies
        (:meth:`VoxelPyramid.enable_copies`).
        """
        parts = self.pyramid_parts()
        if parts is None:
            return None
        grid, decoder, activation = parts
        levels = grid.sampled_levels
        if levels[0].is_cuda and levels[0].dtype != torch.float16:
            return None
        first, last = decoder.density_network
        # Inactive levels read zero, so their columns of the first matrix have no effect.
        weights = [first[:, : constants.LEVEL_CHANNELS * len(levels)], last]
        return PyramidDensity(levels, grid.blocks[: len(levels)], grid.aabb, weights, activation.initial)


def warp_of(field: Field) -> Warp | None:
    """Returns the warp of a field's samples; None for the world frame.

    Raises:
        TypeError: The field lacks a member that :class:`Field` does not define, or its attribute ``warp`` is something
            else.
    """
    if isinstance(field, DistributedDataParallel):
        raise TypeError(
            "field must not be a DistributedDataParallel, which has forward() alone: pass its .module, or for training "
            "wrap a module whose forward() renders the field"
        )
    complete("field", field, Field, _REQUIRED)
    warp = field.warp
    if warp is not None and not hasattr(warp, "map_rays"):
        raise TypeError(
            f"{type(field).__name__}.warp must be a Warp or None, got {shown(warp)}: fields use this "
            "attribute for the warp of their samples"
        )
    return warp


def warped_points(field: Field, points: Tensor) -> Tensor:
    """Returns world positions (M, 3) in the field's warp, if it has one; infinite where that does not reach."""
    warp = warp_of(field)
    return points if warp is None else warp.from_world(points)[0]


def grid_of(field: Field) -> Any:
    """Returns the features that a field reads, its attribute ``grid``; None if it has none."""
    return getattr(field, "grid", None)


def colors_at(field: Field, points: Tensor, directions: Tensor) -> Tensor:
    """Returns the colours (M, 3) at world positions (M, 3), seen along unit directions (M, 3).

    Raises:
        ValueError: Colours depend on values of rays besides.
    """
    points = warped_points(field, points)
    if needed := [name for name in field.extra_inputs if name not in field.optional_inputs]:
        raise ValueError(f"field must depend on position and direction alone, got one that needs {', '.join(needed)}")
    rgb = field.sample(single_samples(points), directions)[1]
    return rgb if field.shade is None else field.shade(rgb, directions)


def single_samples(points: Tensor) -> PackedSamples:
    """Returns points (M, 3), in the field's coordinates, as the only samples of M rays."""
    rays = torch.arange(len(points) + 1, device=points.device)
    zeros = torch.zeros_like(points[:, 0])
    return PackedSamples(points, zeros, zeros, rays[:-1], rays, rays[-1:])


def density_at_samples(field: Field) -> Callable[..., Tensor]:
    """Returns the function that maps positions of samples to densities, both in warped coordinates."""
    return field.density if warp_of(field) is None else field.density_in_warp


def _select(names: tuple[str, ...], warped: Tensor, values: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the decoder's further inputs: the positions, and values of rays."""
    given = {"position": warped, **values}
    return {name: given[name] for name in names if name in given}


def _in_world(density: Tensor, warped: Tensor, unit: Tensor) -> Tensor:
    """Converts densities from a field's warp to world units; the density where the warp does not reach is zero."""
    return torch.where(warped.isfinite().all(dim=-1), density / unit, 0)
