"""Signed distances in grids: outside of the box, after a deformation, from depth images, and their surfaces.

A grid of signed distances holds, at each vertex, the distance to a surface in world units, below 0 inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.foundation.autograd import forward_mode_active, hold_constant, traces_ops
from voxelfield.foundation.checks import (
    FLOATING,
    check_choice,
    check_field,
    check_finite,
    check_has_values,
    coordinate_dtype,
    lies_within,
    truth_of,
)
from voxelfield.foundation.errors import ArgumentValueError, shown
from voxelfield.installed import import_optional
from voxelfield.ops._grids import check_volumes, grid_size
from voxelfield.ops._table import declare
from voxelfield.ops.grid import sample_trilinear

Bound = Literal["upper", "lower"]
Along = Literal["axis", "ray"]

# Lines of a grid whose distances are computed at once: few enough for the caches of a CPU.
_LINES = {"cpu": 1 << 11, "cuda": 1 << 20}
# Shifts of a line between two looks at whether all distances are found.
_SHIFTS = 8
# Steps along an axis to a surface, up to which it is a plane for a vertex.
_PLANE = 1.5
# Vertices that are projected into images at once.
_VERTICES = 1 << 20


def sample_distance(
    grid: Tensor, points: Tensor, aabb: Tensor, *, bound: Bound = "upper", with_gradient: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Samples a grid of signed distances, also outside of its box, where the result is a bound.

    Inside the box this is :func:`voxelfield.ops.sample_trilinear`. At a point outside, let q be the nearest point of
    the box, d the distance to it, and f the grid's value at q. If f is the distance to a surface, the distance at the
    point is

    - at most :math:`f + d` (``"upper"``), because distances change by at most one unit per unit;
    - at least :math:`\sqrt{f^2 + d^2}` (``"lower"``) where f is not negative, if the whole surface lies in the box,
      because every point of the box is at least at a right angle, seen from q. Where f is negative, the box cuts the
      surface, and the bound is :math:`f - d`.

    Both are continuous at the faces, the lower one but for where the surface crosses them, and the upper one is at most
    :math:`\sqrt 2` times the lower one where f is not negative.

    Args:
        grid: (X, Y, Z, C), or a batch (B, X, Y, Z, C): C distances per vertex, world units; float32, float64, float16
            or bfloat16, on CPU or CUDA.
        points: (..., 3), or (B, ..., 3) for a batch: world positions, on the grid's device, as for
            :func:`voxelfield.ops.sample_trilinear`. Those that are not finite yield zeros and receive no gradient.
        aabb: (2, 3) the box, at whose faces the outermost vertices lie, world units; in the dtype of ``points``.
        bound: Which bound is returned outside of the box: ``"upper"`` or ``"lower"``.
        with_gradient: Whether to also return the derivative of the result with respect to the point.

    Returns:
        (..., C), or (B, ..., C) for a batch, in the grid's dtype. Differentiable twice with respect to ``grid``,
        ``points`` and ``aabb``.

        With ``with_gradient``, a pair of this and its gradient (..., C, 3), in world units. Both are differentiable
        once.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or ``bound`` is unknown.
        NotImplementedError: A third derivative is requested, or a second one with ``with_gradient``.
    """
    check_choice("bound", bound, get_args(Bound))
    check_field("grid", grid, ("...",), FLOATING)
    check_field("points", points, ("...", 3), FLOATING, "grid", grid)
    check_field("aabb", aabb, (2, 3), (torch.float32, torch.float64), "grid", grid)
    wide = coordinate_dtype(grid.dtype)
    where, box = points.to(wide), aabb.to(wide)
    unit, distance = _place(where, box)
    sample: Callable[..., Any] = sample_trilinear
    sampled = sample(grid, unit, with_gradient=truth_of("with_gradient", with_gradient))
    value, slope = sampled if with_gradient else (sampled, None)
    value = value.to(wide)
    outside = distance > 0
    result = value + distance if bound == "upper" else value - distance
    if bound == "lower":
        known = outside & (value >= 0)
        hypotenuse = torch.where(known, distance.square() + value.square(), 1.0).sqrt()
        result = torch.where(known, hypotenuse, result)
    if slope is None:
        return result.to(grid.dtype)
    slope = slope.to(wide) / (box[1] - box[0])
    beyond = torch.where(outside, where - where.clamp(*box), 0.0)
    away = (beyond / torch.where(outside, distance, 1.0)).unsqueeze(-2)
    if bound == "upper":
        return result.to(grid.dtype), (slope + away).to(grid.dtype)
    curved = (value.unsqueeze(-1) * slope + beyond.unsqueeze(-2)) / hypotenuse.unsqueeze(-1)
    return result.to(grid.dtype), torch.where(known.unsqueeze(-1), curved, slope - away).to(grid.dtype)


def _place(points: Tensor, aabb: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where points (..., 3) are in the unit cube, and their distances to the box (..., 1).

    Places of points that are not finite are not finite either, and their distances are 0.
    """
    if not forward_mode_active():
        unit, distance = _place_in_box(points.reshape(-1, 3), aabb)
        return unit.view(points.shape), distance.view(*points.shape[:-1], 1)
    low, high = aabb
    finite = points.isfinite().all(dim=-1, keepdim=True)
    # A position that is not finite must not reach the box's gradient.
    where = torch.where(finite, points, low)
    squared = (where - where.clamp(low, high)).square().sum(dim=-1, keepdim=True)
    outside = squared > 0
    distance = torch.where(outside, torch.where(outside, squared, 1.0).sqrt(), 0.0)
    return torch.where(finite, (where - low) / (high - low), math.nan), distance


def _gradients_of_place(
    points: Tensor, aabb: Tensor, distance: Tensor, grad_unit: Tensor, grad_distance: Tensor, needs: set[str]
) -> dict[str, Tensor]:
    low, high = aabb
    outside = distance > 0
    beyond = torch.where(outside[:, None], points - points.clamp(low, high), 0.0)
    toward = beyond * (grad_distance / torch.where(outside, distance, 1.0))[:, None]
    found = {"points": grad_unit / (high - low) + toward}
    if "aabb" in needs:
        (found["aabb"],) = torch.func.vjp(partial(_place, points), aabb)[1]((grad_unit, grad_distance[:, None]))
    return found


_place_in_box = declare(
    "place_in_box",
    lambda points: (points.new_empty(points.shape), points.new_empty(points.shape[0])),
    gradients=_gradients_of_place,
    differentiable=("points", "aabb"),
)


@torch.no_grad()
def redistance(grid: Tensor, aabb: Tensor) -> Tensor:
    """Makes a grid that changes its sign at a surface a grid of signed distances to that surface (reinitialisation).

    The surface is where the grid, linear along its edges, is zero. The distance of a vertex to the nearest crossing of
    an edge is exact: squared distances are separable (Saito and Toriwaki 1994), so that axis after axis is searched.
    Within 1.5 steps of the surface, it is that to the plane through the crossings along the three axes instead (Russo
    and Smereka 2000), so that the surface stays where it is. Distances of a smooth surface are right to about a
    twentieth of a step on average next to it, and better further away.

    Args:
        grid: (X, Y, Z, C), or a batch (B, X, Y, Z, C), float32, float64, float16 or bfloat16, on CPU or CUDA; below 0
            inside. Values that are not a number are unknown: they remain, and no surface is beside them.
        aabb: (2, 3) the box of the grid, world units, float32 or float64, on its device.

    Returns:
        A tensor like ``grid`` of signed distances, world units; plus or minus infinity where there is no surface.
        ``grid`` and ``aabb`` are treated as constants: the result requires no gradient. Time grows with the fourth
        power of the resolution.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device.
        NotImplementedError: An argument has a tangent of forward mode, or is mapped by ``torch.vmap``.
    """
    check_volumes(grid)
    check_field("aabb", aabb, (2, 3), (torch.float32, torch.float64), "grid", grid)
    grid, aabb = hold_constant("redistance", grid=grid, aabb=aabb)
    values = grid.to(coordinate_dtype(grid.dtype))
    steps = [
        x / max(size - 1, 1) for x, size in zip((aabb[1] - aabb[0]).to(values.dtype), grid.shape[-4:-1], strict=True)
    ]
    axes = range(values.dim() - 4, values.dim() - 1)
    inverse, near, along = torch.zeros_like(values), torch.zeros_like(values, dtype=torch.bool), []
    for axis, step in zip(axes, steps, strict=True):
        count = _steps_to_crossing(values, axis)
        near |= count <= _PLANE
        inverse += (step * count).square().reciprocal()
        along.append((step * count).square())
    x, y, z = zip(along, axes, steps, strict=True)
    found = torch.minimum(_nearest(x[0], *y[1:]), _nearest(y[0], *x[1:]))
    found = torch.minimum(_nearest(found, *z[1:]), _nearest(_nearest(z[0], *x[1:]), *y[1:]))
    distance = torch.where(near, inverse.rsqrt(), found.sqrt())
    return torch.where(values < 0, -distance, torch.where(values >= 0, distance, values)).to(grid.dtype)


def _steps_to_crossing(values: Tensor, axis: int) -> Tensor:
    """Returns how far the nearest change of sign on its line is from each vertex, in steps; infinity if none is."""
    count = values.shape[axis]
    index = torch.arange(count, dtype=values.dtype, device=values.device).view(-1, *[1] * (values.dim() - 1 - axis))
    if count < 2:
        return torch.full_like(values, math.inf)
    first, second = values.narrow(axis, 0, count - 1), values.narrow(axis, 1, count - 1)
    crossing = ((first < 0) & (second >= 0)) | ((first >= 0) & (second < 0))
    # Infinities of both signs meet half-way.
    place = index[:-1] + torch.where(crossing, first / (first - second), 0.0).nan_to_num(0.5)
    none = torch.full_like(values.narrow(axis, 0, 1), math.inf)
    ahead = torch.cat((torch.where(crossing, place, math.inf), none), dim=axis)
    behind = torch.cat((-none, torch.where(crossing, place, -math.inf)), dim=axis)
    for i in range(1, count):  # cummin and cummax would find indices too, which takes several times as long
        behind.select(axis, i).clamp_(min=behind.select(axis, i - 1))
        ahead.select(axis, count - 1 - i).clamp_(max=ahead.select(axis, count - i))
    return torch.minimum(ahead - index, index - behind)


def _nearest(squared: Tensor, axis: int, step: Tensor) -> Tensor:
    """Returns, for each vertex, the least sum of a squared distance on its line and of the squared way there."""
    lines = squared.movedim(axis, 0)
    count, rows = len(lines), lines.flatten(1)
    added = (step * torch.arange(count, dtype=squared.dtype, device=squared.device)).square().unbind(0)
    parts, traced = [], traces_ops() or squared.is_meta  # when no number can be looked at
    known: Any = slice(None)
    if not traced:
        known = rows.isfinite().any(dim=0).nonzero()[:, 0]
        if len(known) == 0:
            return squared
    for part in rows[:, known].split(_LINES.get(squared.device.type, 1 << 20), dim=1):
        part = part.contiguous()
        least = part.clone()
        for shift in range(1, count):
            # From further away, nothing is nearer than the farthest distance found so far.
            if shift % _SHIFTS == 0 and not traced and bool(added[shift] >= least.max()):
                break
            sums = part + added[shift]
            torch.minimum(least[shift:], sums[:-shift], out=least[shift:])
            torch.minimum(least[:-shift], sums[shift:], out=least[:-shift])
        parts.append(least)
    found = torch.full_like(rows, math.inf)  # a line without any distance remains without one
    found[:, known] = torch.cat(parts, dim=1)
    return found.view(lines.shape).movedim(0, axis)


class FusedDepth(NamedTuple):
    """Depth images fused into a grid, by :func:`integrate_depth`.

    Attributes:
        distances: (X, Y, Z, 1) mean signed distances, world units, within the truncation; NaN where no image counts.
        weights: (X, Y, Z, 1) sums of their weights.
        colors: (X, Y, Z, C) mean colours of the images within the truncation of their surfaces, NaN elsewhere; C may
            be 0.
        color_weights: (X, Y, Z, 1) sums of their weights.
    """

    distances: Tensor
    weights: Tensor
    colors: Tensor
    color_weights: Tensor


def integrate_depth(
    depths: Tensor,
    c2w: Tensor,
    intrinsics: Tensor,
    aabb: Tensor,
    into: FusedDepth | int | Sequence[int],
    *,
    truncation: float,
    colors: Tensor | None = None,
    weights: Tensor | None = None,
    along: Along = "axis",
) -> FusedDepth:
    """Fuses depth images into a grid of truncated signed distances (Curless and Levoy 1996).

    Each image gives a vertex the signed distance, along the ray through it, to the surface that the image shows there.
    More than ``truncation`` in front of that surface, the image marks the vertex as empty: its distance is
    ``truncation``. Behind the surface, the weight of the image falls linearly, to zero at a depth of ``truncation``.
    A depth is interpolated between the four pixels around a vertex's image where these show one surface, within
    ``truncation``, and else is the nearest pixel's, as colours and weights are.

    Args:
        depths: (V, H, W) depth images, world units; float32, float64 or a 16-bit dtype, on CPU or CUDA. Infinity says
            that nothing is there: all of the ray is empty. 0, negative values and NaN say that nothing is known.
        c2w: (V, 4, 4) poses, camera to world, looking along -z with y up.
        intrinsics: (V, 4) fx, fy, cx, cy in pixels; the centre of the first pixel is at (0.5, 0.5).
        aabb: (2, 3) the box of the grid, at whose faces the outermost vertices lie, world units.
        into: What earlier images were fused into, which stays as it is; or the numbers of vertices along x, y and z of
            a new grid, one int for all.
        truncation: Distance from a surface at which its influence ends, world units; a few voxels.
        colors: (V, H, W, C) colours of the images, or None.
        weights: (V, H, W) weights of the pixels, for which Curless and Levoy take the cosine between the ray and the
            normal of the surface. None is 1.
        along: Whether depths are distances along the camera's ``"axis"`` or along each pixel's ``"ray"``.

    Returns:
        The grid, float64 if ``depths`` are and else float32. Differentiable any number of times with respect to
        ``depths``, ``c2w``, ``intrinsics``, ``aabb``, ``colors`` and ``weights``.

    Raises:
        TypeError: An argument is not a tensor, or has the wrong dtype.
        ValueError: An argument has the wrong shape or is on another device, or an option is unknown.
    """
    check_choice("along", along, get_args(Along))
    check_field("depths", depths, ("V", "H", "W"), FLOATING)
    wide, views = coordinate_dtype(depths.dtype), len(depths)
    given = {"c2w": (c2w, (views, 4, 4)), "intrinsics": (intrinsics, (views, 4)), "aabb": (aabb, (2, 3))}
    for name, (value, shape) in given.items():
        check_field(name, value, shape, (torch.float32, torch.float64), "depths", depths)
    if not lies_within("truncation", truncation, 1e-30, 1e30):
        raise ArgumentValueError(f"truncation must be a positive distance, got {shown(truncation)}")
    images = torch.ones_like(depths, dtype=wide)[..., None]
    if weights is not None:
        check_field("weights", weights, tuple(depths.shape), FLOATING, "depths", depths)
        images = weights.to(wide)[..., None]
    if colors is not None:
        check_field("colors", colors, (*depths.shape, "C"), FLOATING, "depths", depths)
        images = torch.cat((images, colors.to(wide)), dim=-1)
    size = into.weights.shape[:3] if isinstance(into, FusedDepth) else grid_size("into", into)
    x, y, z = (torch.linspace(0, 1, count, dtype=wide, device=depths.device) for count in size)
    cameras = [each.to(wide) for each in (c2w, intrinsics, depths)]
    (low, high), sums = aabb.to(wide), []
    for planes in x.split(max(1, _VERTICES // (len(y) * len(z)))):
        points = low + (high - low) * torch.cartesian_prod(planes, y, z)
        total = points.new_zeros(len(points), 2 + images.shape[-1])
        for pose, pinhole, depth, image in zip(*cameras, images, strict=True):
            distance, counts, pixel = distance_in_view(points, pose, pinhole, depth, truncation, along)
            rows = image.flatten(0, 1)[pixel]
            weight = torch.where(counts, rows[:, 0] * (1 + distance).clamp(max=1), 0.0)[:, None]
            near, distance = torch.where(distance < 1, weight.T, 0.0).T, distance[:, None]
            total = total + torch.cat((weight, weight * distance, near, near * rows[:, 1:]), dim=-1)
        sums.append(total)
    total = torch.cat(sums).view(*size, 2 + images.shape[-1])
    if isinstance(into, FusedDepth):
        channels = images.shape[-1] - 1
        if into.colors.shape[-1] != channels:
            raise ArgumentValueError(f"into must have colors of {channels} channels, got {into.colors.shape[-1]}")
        distances, count, known, near = into
        parts = (count, count * distances.nan_to_num(0.0) / truncation, near, near * known.nan_to_num(0.0))
        total = total + torch.cat(parts, dim=-1)
    count, distances, near, known = total.split((1, 1, 1, total.shape[-1] - 3), dim=-1)
    return FusedDepth(_mean(distances * truncation, count), count, _mean(known, near), near)


def _mean(total: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1.0), math.nan)


def distance_in_view(
    points: Tensor, pose: Tensor, intrinsics: Tensor, depths: Tensor, truncation: float, along: Along = "ray"
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns how far points (M, 3) are before the surface in a depth image (H, W), along the rays through them.

    Returns:
        The distances (M,), in units of the truncation and at most 1; whether the image counts (M,), because it shows
        the point, and a surface no more than the truncation in front of it; and the pixels (M,) that show the points.
    """
    arm = points - pose[:3, 3]
    # Not a product of matrices, which autocast would narrow.
    right, up, backward = (arm.unsqueeze(-1) * pose[:3, :3]).sum(dim=-2).unbind(-1)
    fx, fy, cx, cy = intrinsics.split(1)
    height, width = depths.shape
    before = backward < 0
    toward = torch.where(before, backward, -1.0)
    column, row = cx - fx * right / toward, cy + fy * up / toward
    inside = before & (column >= 0) & (column < width) & (row >= 0) & (row < height)
    column, row = torch.where(inside, column, 0.0), torch.where(inside, row, 0.0)
    left, top = (column - 0.5).clamp(0, width - 1), (row - 0.5).clamp(0, height - 1)
    x, y = left.long(), top.long()
    u, v = left - x, top - y
    xs, ys = (x, (x + 1).clamp(max=width - 1)), (y, (y + 1).clamp(max=height - 1))
    corners = torch.stack([depths[y, x] for y in ys for x in xs])
    weights = torch.stack(((1 - u) * (1 - v), u * (1 - v), (1 - u) * v, u * v))
    least = corners.amin(dim=0)
    one_surface = (corners.amax(dim=0) - least < truncation) & (least > 0)  # 0 is no depth
    pixel = row.long() * width + column.long()
    # Gradients of what is left out must be zeros, so that it must be finite.
    mean = (torch.where(one_surface, corners, 0.0) * weights).sum(dim=0)
    shown = torch.where(one_surface, mean, depths.flatten()[pixel])
    finite, reach = shown.isfinite(), arm.norm(dim=-1)
    depth = torch.where(finite, shown, 0.0)
    if along == "axis":
        depth = depth * (reach / -toward)
    distance = torch.where(finite, (depth - reach) / truncation, 1.0).clamp(max=1)
    return distance, inside & (shown > 0) & (distance >= -1), pixel


def marching_cubes(
    grid: Tensor, aabb: Tensor, level: float = 0.0, *, inside: Literal["below", "above"] = "below"
) -> tuple[Tensor, Tensor]:
    """Finds the triangles of a level set of a grid by marching cubes (Lewiner et al. 2003), with scikit-image.

    Args:
        grid: (X, Y, Z) or (X, Y, Z, 1), float32, float64, float16 or bfloat16; it is copied to the CPU. Cells with a
            value that is not a number are left out.
        aabb: (2, 3) the box of the grid, at whose faces the outermost vertices lie, world units.
        level: The value at the surface.
        inside: Where the inside is, from which triangles face away: ``"below"`` the level, as for distances, or
            ``"above"`` it, as for densities.

    Returns:
        (V, 3) vertices, world units, float32, and (F, 3) triangles, int64, counterclockwise as seen from outside, both
        on the CPU; none if the grid does not cross the level. They are constants: they require no gradient.

    Raises:
        MissingPackageError: scikit-image is not installed.
        TypeError: An argument is not a tensor, or has the wrong dtype, or ``level`` is no number.
        ValueError: An argument has the wrong shape, ``level`` is not finite, or ``inside`` is unknown.
        NotImplementedError: An argument has a tangent of forward mode, or is mapped by ``torch.vmap``.
    """
    check_choice("inside", inside, ("below", "above"))
    check_finite("level", level)
    check_field("grid", grid, ("...",), FLOATING)
    check_field("aabb", aabb, (2, 3), (torch.float32, torch.float64))
    for name, value in (("grid", grid), ("aabb", aabb)):
        check_has_values(name, value)
    grid, aabb = hold_constant("marching_cubes", grid=grid, aabb=aabb)
    values = grid.squeeze(-1) if grid.dim() == 4 and grid.shape[-1] == 1 else grid
    if values.dim() != 3 or 0 in values.shape:
        raise ArgumentValueError(f"grid must have shape (X, Y, Z) or (X, Y, Z, 1), got {tuple(grid.shape)}")
    values = values.float().cpu() - level if level else values.float().cpu()
    first, values = _crossed(values)
    steps, faces = march_cubes(values, inside == "above")
    low, high = aabb.double().cpu()
    cells = torch.tensor([max(size - 1, 1) for size in grid.shape[:3]])
    return (low + (high - low) / cells * (steps.double() + first)).float(), faces


def _crossed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the part of a grid in which its sign may change, and the index (3,) of its first vertex."""
    low, high = values.amin(2), values.amax(2)
    first = torch.zeros(3, dtype=torch.int64)
    if bool(low.isnan().any()):
        return first, values
    ends = [(low.amin(1), high.amax(1)), (low.amin(0), high.amax(0)), (values.amin((0, 1)), values.amax((0, 1)))]
    for axis, (least, most) in enumerate(ends):
        crossed = ((torch.minimum(least[1:], least[:-1]) < 0) & (torch.maximum(most[1:], most[:-1]) > 0)).nonzero()
        if len(crossed) == 0:
            return first, values[:1]
        first[axis] = crossed[0, 0]
        values = values.narrow(axis, int(crossed[0]), int(crossed[-1] - crossed[0]) + 2)
    return first, values


def march_cubes(values: Tensor, inside_above: bool) -> tuple[Tensor, Tensor]:
    """Finds triangles where values (X, Y, Z), float32 on the CPU, change their sign; leaves out cells with a NaN.

    Returns:
        (V, 3) vertices in steps from the first value, and (F, 3) triangles, which face away from the inside.
    """
    none = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64)
    if min(values.shape) < 2 or not (bool((values > 0).any()) and bool((values < 0).any())):
        return none
    unknown, mask = values.isnan(), None
    if bool(unknown.any()):
        # scikit-image reads the mask at each cube's corner farthest from the origin.
        mask = F.pad(F.max_pool3d(unknown[None].float(), 2, stride=1)[0] == 0, (1, 0) * 3).numpy()
        values = values.nan_to_num(-1.0)
    measure = import_optional("skimage.measure", "extract surfaces", "mesh")
    direction = "ascent" if inside_above else "descent"
    try:
        found = measure.marching_cubes(values.numpy(), 0.0, gradient_direction=direction, mask=mask)
    except RuntimeError:  # every cube with a change of sign has an unknown corner
        return none
    steps, faces = (torch.from_numpy(array.copy()) for array in found[:2])
    return steps, faces.long()
