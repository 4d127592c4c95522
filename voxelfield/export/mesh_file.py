"""Meshes and points with normals and colours, textures of meshes, and their files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.files import atomic_path, check_suffix, write_file
from voxelfield.installed import import_optional
from voxelfield.rendering.pixels import linear_light, to_uint8

MESH_SUFFIXES = (".ply", ".obj", ".glb")
"""Suffixes of the files that meshes are written to."""

Y_UP = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])  # rows are the axes of files with y up

_NAMES = ("x", "y", "z", "nx", "ny", "nz", "red", "green", "blue")
_POINT = np.dtype({"names": _NAMES, "formats": 6 * ["<f4"] + 3 * ["u1"]})
_PLY_TYPES = {"<f4": "float", "|u1": "uchar"}

_PADDING = 3  # texels between the charts of a texture, before it is reduced from xatlas's size to the wanted one
_MOST_PIXELS = 1 << 20  # of a texture, that are painted at once


@dataclass(frozen=True, eq=False)
class Texture:
    """An image that covers a mesh.

    Attributes:
        uv: (V, 2) float32, the position of each vertex in the image, from its bottom left corner, in [0, 1].
        image: (H, W, 3) uint8, sRGB, from the top row.
    """

    uv: Tensor
    image: Tensor


@dataclass(frozen=True, eq=False)
class Mesh:
    """Triangles, on the CPU.

    Attributes:
        vertices: (V, 3) float32, world units.
        faces: (F, 3) int64, counterclockwise as seen from outside.
        normals: (V, 3) float32, unit vectors that point outwards.
        colors: (V, 3) uint8, sRGB.
        texture: Covers the triangles; None: vertices have colours.
    """

    vertices: Tensor
    faces: Tensor
    normals: Tensor
    colors: Tensor
    texture: Texture | None = None

    def turned(self, axes: Tensor) -> Mesh:
        """Returns the mesh in other axes (3, 3), orthonormal and right-handed, one per row."""
        turn = axes.to(self.vertices).T
        return replace(self, vertices=self.vertices @ turn, normals=self.normals @ turn)


@dataclass(frozen=True, eq=False)
class PointCloud:
    """Points of a surface, uniform in area, on the CPU.

    Attributes:
        points: (M, 3) float32, world units.
        normals: (M, 3) float32, unit vectors that point outwards.
        colors: (M, 3) uint8, sRGB.
    """

    points: Tensor
    normals: Tensor
    colors: Tensor


def mesh_package(name: str) -> Any:
    """Imports a module of the extra ``mesh``, such as ``skimage.measure``; raises MissingPackageError without it."""
    return import_optional(name, "extract surfaces", "mesh")


def save_points(path: Path | str, cloud: PointCloud) -> None:
    """Writes points with their normals and colours as a binary PLY, in the units and axes of the world.

    Args:
        path: ``*.ply``.
        cloud: The points.

    Raises:
        ValueError: The path has another suffix.
        OSError: The file cannot be written.
    """
    check_suffix("path", path, (".ply",))
    columns = (*cloud.points.T, *cloud.normals.T, *cloud.colors.T)
    write_file(path, binary_ply(np.rec.fromarrays([column.numpy() for column in columns], _POINT)))


def binary_ply(rows: np.ndarray) -> bytes:
    """Returns the file of points, whose properties are the fields of ``rows``: little-endian float32, and bytes."""
    properties = "".join(f"property {_PLY_TYPES[rows.dtype[name].str]} {name}\n" for name in rows.dtype.names or ())
    header = f"ply\nformat binary_little_endian 1.0\nelement vertex {len(rows)}\n{properties}end_header\n"
    return header.encode() + rows.tobytes()


def save_mesh(path: Path | str, mesh: Mesh, up_axis: Literal["y", "z"] | None = None) -> None:
    """Writes a mesh, in the units of the world, that is, of the input data, with z or y as the axis that points up.

    Vertex colours of a GLB are linear, as its specification requires. Its material is not shaded, because the colours
    already include the lighting, and both sides of triangles are drawn. PLY and OBJ store sRGB. With a texture, an OBJ
    has a white material and an image beside it, named like the file, as the mesh itself is in OBJ and GLB. All files
    are written completely, or none.

    Args:
        path: ``*.ply``, ``*.obj`` or ``*.glb``.
        mesh: The mesh, whose z axis points up; a PLY has vertex colours and no texture.
        up_axis: Axis of the file that points up: ``z`` changes nothing, ``y`` turns the mesh by 90 degrees about x.
            None: ``y`` for GLB, as its specification requires, ``z`` for the others.

    Raises:
        MissingPackageError: trimesh is not installed.
        ValueError: The path has another suffix.
        FileExistsError: A file of the material's or the image's name exists without an OBJ to which it could belong.
        OSError: The file cannot be written.
    """
    path = Path(path)
    check_suffix("path", path, MESH_SUFFIXES)
    suffix = path.suffix.lower()
    if (up_axis or ("y" if suffix == ".glb" else "z")) == "y":
        mesh = mesh.turned(Y_UP)
    whole = _as_trimesh(mesh, path)
    if suffix == ".ply":
        files: dict[str, Any] = {path.name: whole.export(file_type="ply", vertex_normal=True)}
    elif suffix == ".glb":
        files = {path.name: whole.export(file_type="glb", include_normals=True, tree_postprocessor=_unlit)}
    else:
        text, others = mesh_package("trimesh.exchange.obj").export_obj(
            whole, include_normals=True, return_texture=True, mtl_name=f"{path.stem}.mtl"
        )
        files = {path.name: text, **others}
    others = [] if path.exists() else [name for name in files if name != path.name and path.with_name(name).exists()]
    if others:
        raise FileExistsError(
            f"{path} must have a name whose material and image do not exist yet, got {' and '.join(others)} that "
            "belong to something else: choose another name"
        )
    # A file appears after those that it refers to: files are put in place in the reverse order.
    with contextlib.ExitStack() as writing:
        for name, content in files.items():
            temporary = writing.enter_context(atomic_path(path.with_name(name)))
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _as_trimesh(mesh: Mesh, path: Path) -> Any:
    trimesh, suffix = mesh_package("trimesh"), path.suffix.lower()
    whole = trimesh.Trimesh(
        mesh.vertices.numpy(), mesh.faces.numpy(), vertex_normals=mesh.normals.numpy(), process=False
    )
    whole.metadata["name"] = path.stem
    texture = None if suffix == ".ply" else mesh.texture
    visual, image, uv = trimesh.visual, None, None
    if texture is not None:
        from PIL import Image

        image, uv = Image.fromarray(texture.image.numpy()), texture.uv.numpy()
    if suffix == ".glb":
        # Open surfaces are seen from behind, and merged triangles may cross each other.
        material = visual.material.PBRMaterial(
            path.stem, baseColorTexture=image, metallicFactor=0.0, roughnessFactor=1.0, doubleSided=True
        )
        whole.visual = visual.TextureVisuals(uv=uv, material=material)
        if texture is None:
            linear = to_uint8(F.pad(linear_light(mesh.colors.float() / 255), (0, 1), value=1.0))
            whole.visual.vertex_attributes["color"] = linear.numpy()
    elif texture is not None:
        white = (255, 255, 255)
        material = visual.material.SimpleMaterial(image, white, white, (0, 0, 0), name=path.stem)
        whole.visual = visual.TextureVisuals(uv=uv, material=material)
    else:
        whole.visual = visual.ColorVisuals(whole, vertex_colors=mesh.colors.numpy())
    return whole


def _unlit(tree: dict[str, Any]) -> None:
    """Tells viewers to add no light (the extension KHR_materials_unlit of glTF)."""
    for material in tree["materials"]:
        material["extensions"] = {"KHR_materials_unlit": {}}
    tree["extensionsUsed"] = ["KHR_materials_unlit"]


def textured(mesh: Mesh, size: int, colors: Callable[[Tensor, Tensor], Tensor]) -> Mesh:
    """Unwraps a mesh by xatlas, which duplicates vertices on seams, and paints its texture.

    ``colors`` maps positions (M, 3) and unit normals (M, 3), on the CPU, to colours (M, 3) in [0, 1]. The image is a
    square with sides of ``size`` pixels. xatlas only approximates this size, so its layout is stretched to it.
    """
    xatlas = mesh_package("xatlas")
    atlas, packing = xatlas.Atlas(), xatlas.PackOptions()
    packing.resolution, packing.padding = size, _PADDING
    atlas.add_mesh(mesh.vertices.numpy(), mesh.faces.int().numpy())
    atlas.generate(xatlas.ChartOptions(), packing)
    origin, triangles = (torch.from_numpy(array.astype("int64")) for array in atlas[0][:2])
    uv = torch.from_numpy(atlas[0][2])
    flat = Mesh(mesh.vertices[origin], triangles, mesh.normals[origin], mesh.colors[origin])
    image = torch.zeros(size, size, 3, dtype=torch.uint8)
    painted = torch.zeros(size, size, dtype=torch.bool)
    for column, row, face, weights in _pixels(uv * size, triangles):
        corners = triangles[face]
        points = (flat.vertices[corners] * weights[..., None]).sum(dim=1)
        normals = F.normalize((flat.normals[corners] * weights[..., None]).sum(dim=1), dim=-1)
        image[row, column] = to_uint8(colors(points, normals)).cpu()
        painted[row, column] = True
    # Pixels around the charts get the nearest colour, because textures are interpolated.
    nearest = mesh_package("scipy.ndimage").distance_transform_edt(
        ~painted.numpy(), return_distances=False, return_indices=True
    )
    image = image[tuple(torch.from_numpy(nearest).long())]
    # Rows were counted from the bottom of the image.
    return replace(flat, texture=Texture(uv, image.flip(0).contiguous()))


def _pixels(corners: Tensor, faces: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields columns and rows (P,) of pixels whose centres lie in triangles (F, 3) of vertices (V, 2), in pixels.

    With them come the triangles (P,) and the barycentric coordinates (P, 3) in these; about ``_MOST_PIXELS`` at once.
    """
    corners = corners[faces]
    low = (corners.amin(dim=1) - 0.5).ceil().long().clamp(min=0)
    counts = ((corners.amax(dim=1) - 0.5).floor().long() - low + 1).clamp(min=0)
    total = (counts[:, 0] * counts[:, 1]).cumsum(0)
    first = 0
    while first < len(faces):
        before = int(total[first - 1]) if first else 0
        stop = max(int(torch.searchsorted(total, before + _MOST_PIXELS, right=True)), first + 1)
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
    """Returns the barycentric coordinates (P, 3) of points (P, 2) in triangles (P, 3, 2); NaN in those without area.

    Each is a ratio of areas, so that a point on an edge of two triangles lies in one of them: none is what the others
    leave of 1, as in trimesh, where it can be negative in both.
    """
    a, b, c = corners.double().unbind(1)

    def area(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        return (q[:, 0] - p[:, 0]) * (r[:, 1] - p[:, 1]) - (q[:, 1] - p[:, 1]) * (r[:, 0] - p[:, 0])

    at = points.double()
    whole = area(a, b, c)
    return torch.stack((area(at, b, c), area(a, at, c), area(a, b, at)), dim=-1).div(whole[:, None]).float()
