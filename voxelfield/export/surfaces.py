"""Surfaces of a field: functions of position, their normals and colours, and their triangles, found by marching cubes.

Functions are level sets of the density, and depth maps fused into a signed distance. Marching cubes goes through the
lattice slab by slab, so that memory is bounded by a slab and not by the lattice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.lattice import CHUNK, SLAB, Lattice, in_chunks, occupied_layers
from voxelfield.fields.field import Field, colors_at
from voxelfield.models.model import Model
from voxelfield.ops.distances import distance_in_view, march_cubes
from voxelfield.progress import tracked
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.occupancy import OccupancyGrid, occupied_density
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import render

# Densities this many times e below or above the level are equivalent to zero or infinity.
_REACH = 8.0

# A surface through a vertex of the lattice would make triangles without area, and vertices on no definite edge.
_CLOSEST = 1e-2
_BISECTIONS = 8

# Colours of a surface: the directions around the normal from which it is seen, and their angle to it.
_AROUND = 6
_TILT = math.radians(45)
# A ray that absorbs less light than this has missed the surface.
_MIN_OPACITY = 0.1


@dataclass(frozen=True)
class Surface:
    """The zero set of a function of position.

    Attributes:
        model: The field, and the cells in which the function is evaluated.
        function: Maps world positions (M, 3) to values (M,), above 0 inside and below 0 outside; NaN where unknown.
        elsewhere: The function's value in other cells: below 0 where space is empty, NaN where the function is unknown.
            Surfaces have an open edge there.
    """

    model: Model
    function: Callable[[Tensor], Tensor]
    elsewhere: float


def density_surface(model: Model, level: float) -> Surface:
    """Returns the surface at which the density as rendered crosses a level, per world unit.

    Values are logarithms of the density's ratio to the level, because a density may grow a thousandfold within a voxel.
    """

    def ratio(points: Tensor) -> Tensor:
        return (occupied_density(model.field, model.occupancy, points) / level).log().clamp(-_REACH, _REACH)

    return Surface(model, ratio, -_REACH)


def fused_surface(model: Model, cameras: Cameras, truncation: float) -> Surface:
    """Returns where the mean signed distance to the surfaces that views show is zero (Curless and Levoy 1996).

    Each view gives the signed distance of a point to the surface in its depth map. More than ``truncation`` in front of
    the surface, the view only marks space as empty; more than ``truncation`` behind it, the view does not count. A
    point for which no view counts is unknown, so surfaces end where views end. Values are minus the mean distance, in
    units of the truncation, within [-1, 1].

    The distance is a function of position, computed from the depth maps; no grid of distances is stored.

    Args:
        model: The field; only its occupied cells and their neighbours are fused.
        cameras: N pinhole cameras, on its device.
        truncation: Distance, world units.
    """
    occupancy = model.occupancy
    wide = OccupancyGrid(tuple(occupancy.occupied.shape), occupancy.aabb).to(occupancy.aabb.device)
    wide.occupied.copy_(F.max_pool3d(occupancy.occupied[None].float(), 3, stride=1, padding=1)[0] > 0)
    maps = [_depth_map(model, cameras, view) for view in tracked(range(len(cameras)), "rendering depth maps")]

    def inwards(points: Tensor) -> Tensor:
        total = torch.zeros(len(points), device=points.device)
        count = torch.zeros_like(total)
        views = list(zip(cameras.c2w, cameras.intrinsics, maps, strict=True))
        for pose, intrinsics, depths in tracked(views, "fusing views"):
            distance, seen, _ = distance_in_view(points, pose, intrinsics, depths, truncation)
            total += torch.where(seen, distance, 0)
            count += seen
        return torch.where(count > 0, -total / count, torch.nan)

    return Surface(Model(model.field, wide, model.sampling), inwards, torch.nan)


@torch.no_grad()
def _depth_map(model: Model, cameras: Cameras, index: int) -> Tensor:
    """Renders the median depth of every pixel of one camera: where a ray has lost half of its light.

    Unlike the mean, the median is never between two surfaces that a pixel shows. The result (H, W) is the distances
    along the rays, world units; infinite where more than half of the light comes through.
    """
    # A ray has many samples.
    chunks = cameras.image_chunks(index, model.field.aabb, CHUNK // 16)
    return torch.cat([_median_depth(model, rays) for rays in chunks]).view(cameras.size(index)[::-1])


def _median_depth(model: Model, rays: Rays) -> Tensor:
    """Returns the depth (R,) of each ray, linear within the sample that takes the second half of its light."""
    found = render(model.field, rays, model.occupancy, model.settings)
    samples, weights = found.samples, found.weights.double()
    if not len(weights):
        return torch.full_like(rays.near, torch.inf)
    middle, length = samples.t, samples.dt
    if model.warp is not None:
        middle = model.warp.world_distances(samples, rays.origins, rays.directions)
        length = model.warp.world_lengths(samples, rays.origins, rays.directions)
    absorbed = weights.cumsum(0)
    before = torch.cat((absorbed.new_zeros(1), absorbed))
    start, stop = samples.ray_offsets[:-1], samples.ray_offsets[1:]
    wanted = before[start] + 0.5
    at = torch.searchsorted(absorbed, wanted)
    reached = at < stop
    at = at.clamp(max=len(weights) - 1)
    fraction = ((wanted - before[at]) / weights[at]).clamp(0, 1)
    return torch.where(reached, middle[at] + (fraction.float() - 0.5) * length[at], torch.inf)


def half_absorbing_density(length: float) -> float:
    """Returns the density, per world unit, at which a given length, in world units, absorbs half of the light."""
    return math.log(2) / length


def surface_normals(surface: Surface, points: Tensor, step: float) -> Tensor:
    """Returns the directions (M, 3) in which a surface's function decreases fastest at ``points`` (M, 3) on it.

    They are unit vectors, from central differences over a distance ``step``; zero where the function is constant or
    unknown.
    """
    offsets = torch.eye(3, device=points.device) * (step / 2)

    def normals(part: Tensor) -> Tensor:
        ends = torch.stack([part + sign * offset for offset in offsets for sign in (1, -1)])
        values = surface.function(ends.view(-1, 3)).view(3, 2, -1)
        return F.normalize((values[:, 1] - values[:, 0]).nan_to_num(0.0), dim=0).T

    return in_chunks(normals, points, evaluations=6, doing="computing normals")


@torch.no_grad()
def surface_colors(field: Field, points: Tensor, normals: Tensor) -> Tensor:
    """Returns the mean colour (M, 3), in [0, 1], of surface points (M, 3) over views that face them.

    Views are along the outward normals (M, 3), and along six directions around each, 45 degrees from it, so that a
    reflection seen from one of them does not become the surface's colour.
    """
    count = _AROUND + 1

    def means(part: Tensor, outwards: Tensor) -> Tensor:
        views = -_directions_around(outwards)
        rgb = colors_at(field, part.repeat_interleave(count, dim=0), views.reshape(-1, 3))
        return rgb.view(-1, count, 3).mean(dim=1).clamp(0, 1)

    return in_chunks(means, points, normals, evaluations=count, doing="computing colours")


def _directions_around(normals: Tensor) -> Tensor:
    """Returns the unit normals (M, 3) and the directions around each of them, (M, 7, 3)."""
    # Any axis that is not nearly parallel to the normal.
    axis = F.one_hot(normals.abs().argmin(dim=-1), 3).to(normals)
    across = F.normalize(torch.linalg.cross(normals, axis), dim=-1)
    along = torch.linalg.cross(normals, across)
    turn = (torch.arange(_AROUND, device=normals.device) * (2 * math.pi / _AROUND))[:, None]
    ring = across[:, None] * turn.cos() + along[:, None] * turn.sin()
    tilted = math.cos(_TILT) * normals[:, None] + math.sin(_TILT) * ring
    return torch.cat((normals[:, None], tilted), dim=1)


@torch.no_grad()
def rendered_colors(model: Model, points: Tensor, normals: Tensor, reach: float) -> Tensor:
    """Renders the colours of a surface along its normals, from slightly outside to slightly inside.

    So points of a simplified mesh beside the field's surface get the surface's colour. Where a ray hits nothing, the
    colour is :func:`surface_colors`. Rays begin at a distance ``reach``, world units, from the surface.
    """
    settings = model.settings

    def colors(part: Tensor, outwards: Tensor) -> Tensor:
        near = torch.zeros_like(part[:, 0])
        rays = Rays(part + reach * outwards, -outwards, near, near + 2 * reach)
        seen = render(model.field, rays, model.occupancy, settings)
        shown = seen.rgb / seen.opacity.clamp(min=_MIN_OPACITY)[:, None]
        missed = seen.opacity < _MIN_OPACITY
        shown[missed] = surface_colors(model.field, part[missed], outwards[missed])
        return shown.clamp(0, 1)

    # A ray has few samples, because it is short.
    return in_chunks(colors, points, normals, evaluations=16)


@torch.no_grad()
def extract_surface(surface: Surface, lattice: Lattice) -> tuple[Tensor, Tensor]:
    """Finds the triangles of a surface in the cells of a lattice by marching cubes (Lewiner et al. 2003).

    scikit-image finds the edges of the lattice that the surface crosses; bisection of the surface's function along
    them finds the positions. So vertices lie on the surface to 1/256 of an edge, however steep the function is.

    Returns:
        (V, 3) vertices, world units, float32, and (F, 3) triangles, int64, counterclockwise as seen from outside; on
        the CPU.
    """
    occupied = occupied_layers(surface.model, lattice)
    bounds = [0, *range(SLAB + 1, lattice.shape[0], SLAB), lattice.shape[0]]
    edges, triangles, vertices = [], [], []
    last, count = torch.zeros(0, *lattice.shape[1:]), 0
    for start, stop in tracked(list(pairwise(bounds)), "extracting the surface"):
        values = torch.cat((last, _evaluate(surface, lattice, occupied(start, stop), start)))
        first = start - len(last)
        last = values[-1:]
        steps, faces = march_cubes(values, inside_above=True)
        edges.append(_edges(steps, lattice, first))
        triangles.append(faces + count)
        count += len(steps)
        positive = values[steps.long().unbind(-1)] > 0
        vertices.append(_refined(surface, lattice, first, steps, positive))
    # Neighbouring slabs have the vertices on the layer between them in common.
    unique, index = torch.cat(edges).unique(return_inverse=True)
    merged = torch.zeros(len(unique), 3)
    merged[index] = torch.cat(vertices)
    return merged, index[torch.cat(triangles)]


def _evaluate(surface: Surface, lattice: Lattice, occupied: Tensor, first: int) -> Tensor:
    """Returns the values (n, Y, Z), on the CPU, of layers from ``first`` on, of which some points are occupied."""
    values = torch.full(occupied.shape, surface.elsewhere, device=occupied.device)
    flat = values.view(-1)
    for part in occupied.view(-1).nonzero()[:, 0].split(CHUNK):
        flat[part] = surface.function(lattice.layer_positions(part, first))
    return torch.where(values.abs() < _CLOSEST, torch.where(values < 0, -_CLOSEST, _CLOSEST), values).cpu()


def _edges(steps: Tensor, lattice: Lattice, first: int) -> Tensor:
    """Returns a number (V,) for the edge of the lattice that each vertex lies on, or for its cube if it is inside."""
    x, y, z = steps.long().unbind(-1)
    fraction = steps - steps.floor() > 0
    axis = torch.where(fraction.sum(dim=-1) == 1, fraction.byte().argmax(dim=-1), 3)
    return (((x + first) * lattice.shape[1] + y) * lattice.shape[2] + z) * 4 + axis


def _refined(surface: Surface, lattice: Lattice, first: int, steps: Tensor, positive: Tensor) -> Tensor:
    """Moves vertices along their edges to where the function changes its sign; returns world positions on the CPU.

    ``steps`` (V, 3) are from the first point of the layer ``first``; ``positive`` (V,) says whether the function is
    above 0 at the lower end of an edge. Vertices within a cube, of which there are few, stay in place.
    """
    device = surface.model.device
    shift = torch.tensor([first, 0, 0], device=device)

    def refine(part: Tensor, inside: Tensor) -> Tensor:
        low = part.floor().long()
        along = (part - low > 0).float()
        begin, end = torch.zeros_like(along[:, 0]), torch.ones_like(along[:, 0])
        for _ in range(_BISECTIONS):
            middle = (begin + end) / 2
            values = surface.function(lattice.positions(low + shift + along * middle[:, None]))
            same = (values > 0) == inside
            begin, end = torch.where(same, middle, begin), torch.where(same, end, middle)
        on_edge = along.sum(dim=-1, keepdim=True) == 1
        found = torch.where(on_edge, low + along * ((begin + end) / 2)[:, None], part)
        return lattice.positions(found.double() + shift).cpu()

    return in_chunks(refine, steps.to(device), positive.to(device))
