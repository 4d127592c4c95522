"""Colours of a surface: at points, and as a texture of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.lattice import CHUNK, in_chunks
from voxelfield.export.mesh_file import Mesh, Texture, mesh_package
from voxelfield.fields.field import Field, colors_at
from voxelfield.models.model import Model
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import render

# The normal itself, and as many directions around it, at this angle to it.
_AROUND = 6
_TILT = math.radians(45)
_PADDING = 2  # texels between the charts of a texture
# A ray that absorbs less light than this has missed the surface.
_MIN_OPACITY = 0.1


@torch.no_grad()
def surface_colors(field: Field, points: Tensor, normals: Tensor) -> Tensor:
    """Returns the mean colour of surface points over views that face them.

    Views are along the normal, and along six directions around it, 45 degrees from it, so that a reflection seen from
    one of them does not become the surface's colour.

    Args:
        field: The field.
        points: (M, 3) world positions, on the field's device.
        normals: (M, 3) unit vectors that point out of the surface.

    Returns:
        (M, 3) in [0, 1], float32.
    """
    count = _AROUND + 1

    def means(part: Tensor, outwards: Tensor) -> Tensor:
        views = -_directions_around(outwards)
        rgb = colors_at(field, part.repeat_interleave(count, dim=0), views.reshape(-1, 3))
        return rgb.view(-1, count, 3).mean(dim=1).clamp(0, 1)

    return in_chunks(means, points, normals, evaluations=count)


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


def textured(mesh: Mesh, size: int, colors: Callable[[Tensor, Tensor], Tensor]) -> Mesh:
    """Unwraps a mesh (by xatlas) and paints its texture.

    Args:
        mesh: The mesh.
        size: Wanted side of the image, in pixels; xatlas only approximates it, and the image is seldom square.
        colors: Maps positions (M, 3) and unit normals (M, 3), on the CPU, to colours (M, 3) in [0, 1].

    Returns:
        The mesh with its texture; vertices on seams are duplicated.

    Raises:
        MissingPackageError: xatlas or scipy is not installed.
    """
    xatlas = mesh_package("xatlas")
    atlas, packing = xatlas.Atlas(), xatlas.PackOptions()
    packing.resolution, packing.padding = size, _PADDING
    atlas.add_mesh(mesh.vertices.numpy(), mesh.faces.int().numpy())
    atlas.generate(xatlas.ChartOptions(), packing)
    origin, triangles = (torch.from_numpy(array.astype("int64")) for array in atlas[0][:2])
    uv = torch.from_numpy(atlas[0][2])
    flat = Mesh(mesh.vertices[origin], triangles, mesh.normals[origin], mesh.colors[origin])
    image = torch.zeros(atlas.height, atlas.width, 3, dtype=torch.uint8)
    painted = torch.zeros(atlas.height, atlas.width, dtype=torch.bool)
    for column, row, face, weights in _pixels(uv * torch.tensor([atlas.width, atlas.height]), triangles):
        corners = triangles[face]
        points = (flat.vertices[corners] * weights[..., None]).sum(dim=1)
        normals = F.normalize((flat.normals[corners] * weights[..., None]).sum(dim=1), dim=-1)
        shown = colors(points, normals)
        image[row, column] = (255 * shown).round().to(torch.uint8).cpu()
        painted[row, column] = True
    # Pixels around the charts get the nearest colour, because textures are interpolated.
    nearest = mesh_package("scipy.ndimage").distance_transform_edt(
        ~painted.numpy(), return_distances=False, return_indices=True
    )
    image = image[tuple(torch.from_numpy(nearest).long())]
    # Rows were counted from the bottom of the image.
    return replace(flat, texture=Texture(uv, image.flip(0).contiguous()))


def _pixels(corners: Tensor, faces: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields the pixels whose centres lie in triangles (F, 3) of vertices (V, 2), in pixels, about ``CHUNK`` at once.

    Yields:
        (P,) columns, (P,) rows, (P,) triangles and (P, 3) barycentric coordinates in them.
    """
    corners = corners[faces]
    low = (corners.amin(dim=1) - 0.5).ceil().long().clamp(min=0)
    counts = ((corners.amax(dim=1) - 0.5).floor().long() - low + 1).clamp(min=0)
    total = (counts[:, 0] * counts[:, 1]).cumsum(0)
    first = 0
    while first < len(faces):
        before = int(total[first - 1]) if first else 0
        stop = max(int(torch.searchsorted(total, before + CHUNK, right=True)), first + 1)
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
