"""A picture that covers a mesh, painted with the field's colours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.geometry.appearance import surface_colors
from voxelfield.export.geometry.mesh import Mesh, Texture
from voxelfield.export.geometry.packages import mesh_package
from voxelfield.fields.field import RadianceField
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import render

PointColors = Callable[[Tensor, Tensor], Tensor]
"""Maps world positions (M, 3) of a surface and its unit normals (M, 3) to colours (M, 3) in [0, 1]."""

_PADDING = 2  # texels between the parts of a picture
# Where less light than this is lost, a ray has missed the surface.
_MIN_OPACITY = 0.1


class RenderedColors:
    """Colours of a surface as a view along its normal shows them, from a little outside to as far inside.

    So the colour is that of the matter there, also at points of a mesh that lie a little beside the field's surface, as
    those of a mesh of few triangles do. Where a ray shows nothing, the colour is :func:`surface_colors`.

    Args:
        field: The field.
        occupancy: Where rays are sampled, on the field's device.
        settings: How they are sampled.
        reach: Distance from the surface at which rays begin, world units.
        chunk: Evaluations at once, to bound memory.
    """

    def __init__(
        self, field: RadianceField, occupancy: OccupancyGrid, settings: RenderSettings, reach: float, chunk: int
    ) -> None:
        self._field, self._occupancy, self._settings = field, occupancy, settings
        self._reach, self._chunk = reach, chunk

    @torch.no_grad()
    def __call__(self, points: Tensor, normals: Tensor) -> Tensor:
        """See :data:`PointColors`; on the field's device."""
        found = []
        # A ray has few samples, because it is short.
        size = max(self._chunk // 16, 1)
        for part, outwards in zip(points.split(size), normals.split(size), strict=True):
            near = torch.zeros_like(part[:, 0])
            rays = Rays(part + self._reach * outwards, -outwards, near, near + 2 * self._reach)
            seen = render(self._field, rays, self._occupancy, self._settings)
            shown = seen.rgb / seen.opacity.clamp(min=_MIN_OPACITY)[:, None]
            missed = seen.opacity < _MIN_OPACITY
            shown[missed] = surface_colors(self._field, part[missed], outwards[missed], self._chunk)
            found.append(shown.clamp(0, 1))
        return torch.cat(found) if found else points.new_zeros(0, 3)


def textured(mesh: Mesh, size: int, colors: PointColors, device: torch.device, chunk: int) -> Mesh:
    """Lays a mesh out flat (by xatlas) and paints the picture that covers it.

    Args:
        mesh: The mesh.
        size: Wanted side of the picture, in pixels; xatlas makes it a little larger or smaller, and seldom square.
        colors: What it is painted with.
        device: On which ``colors`` computes.
        chunk: Pixels at once, to bound memory.

    Returns:
        The mesh with its texture; vertices are doubled where the surface is cut.

    Raises:
        MissingPackageError: xatlas or scipy is not installed.
    """
    xatlas = mesh_package("xatlas")
    atlas, packing = xatlas.Atlas(), xatlas.PackOptions()
    packing.resolution, packing.padding = size, _PADDING
    atlas.add_mesh(mesh.vertices.numpy(), mesh.faces.int().numpy())
    atlas.generate(xatlas.ChartOptions(), packing)
    origin, triangles = (torch.from_numpy(array.astype("int64")) for array in atlas[0][:2])
    places = torch.from_numpy(atlas[0][2])
    flat = replace(
        mesh,
        vertices=mesh.vertices[origin],
        faces=triangles,
        normals=mesh.normals[origin],
        colors=mesh.colors[origin],
    )
    image = torch.zeros(atlas.height, atlas.width, 3, dtype=torch.uint8)
    painted = torch.zeros(atlas.height, atlas.width, dtype=torch.bool)
    scaled = places * torch.tensor([atlas.width, atlas.height])
    for column, row, face, weights in _pixels(scaled, triangles, chunk):
        corners = triangles[face]
        points = (flat.vertices[corners] * weights[..., None]).sum(dim=1)
        normals = F.normalize((flat.normals[corners] * weights[..., None]).sum(dim=1), dim=-1)
        shown = colors(points.to(device), normals.to(device))
        image[row, column] = (255 * shown).round().to(torch.uint8).cpu()
        painted[row, column] = True
    # Around the parts, as between them: pictures are read in between pixels.
    nearest = mesh_package("scipy.ndimage").distance_transform_edt(
        ~painted.numpy(), return_distances=False, return_indices=True
    )
    image = image[tuple(torch.from_numpy(nearest).long())]
    # Rows of the picture were counted from its bottom.
    return replace(flat, texture=Texture(places, image.flip(0).contiguous()))


def _pixels(places: Tensor, faces: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields the pixels whose centres lie in triangles of the plane.

    Args:
        places: (V, 2) corners, in pixels.
        faces: (F, 3) triangles.
        chunk: Pixels that are looked at at once, unless one triangle has more around it.

    Yields:
        (P,) columns, (P,) rows, (P,) triangles and (P, 3) weights of their corners.
    """
    corners = places[faces]
    low = (corners.amin(dim=1) - 0.5).ceil().long().clamp(min=0)
    counts = ((corners.amax(dim=1) - 0.5).floor().long() - low + 1).clamp(min=0)
    total = (counts[:, 0] * counts[:, 1]).cumsum(0)
    first = 0
    while first < len(faces):
        before = int(total[first - 1]) if first else 0
        stop = max(int(torch.searchsorted(total, before + chunk, right=True)), first + 1)
        face = torch.arange(first, stop).repeat_interleave(counts[first:stop].prod(dim=1))
        within = torch.arange(len(face)) + before - (total - counts.prod(dim=1))[face]
        width = counts[face, 0]
        pixel = low[face] + torch.stack((within % width, within // width), dim=-1)
        weights = _weights(corners[face], pixel + 0.5)
        inside = (weights >= 0).all(dim=-1)
        column, row = pixel[inside].unbind(-1)
        yield column, row, face[inside], weights[inside]
        first = stop


def _weights(corners: Tensor, points: Tensor) -> Tensor:
    """Returns the barycentric coordinates (P, 3) of points (P, 2) in triangles (P, 3, 2); NaN in those without area."""
    a, b, c = corners.double().unbind(1)

    def area(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        return (q[:, 0] - p[:, 0]) * (r[:, 1] - p[:, 1]) - (q[:, 1] - p[:, 1]) * (r[:, 0] - p[:, 0])

    at = points.double()
    whole = area(a, b, c)
    return torch.stack((area(at, b, c), area(a, at, c), area(a, b, at)), dim=-1).div(whole[:, None]).float()
