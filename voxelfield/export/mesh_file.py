"""Meshes and points with normals and colours, and their files."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.files import atomic_path, atomic_write, check_suffix
from voxelfield.installed import import_optional
from voxelfield.rendering.pixels import linear_light

MESH_SUFFIXES = (".ply", ".obj", ".glb")
"""Suffixes of the files that meshes are written to."""

_FLOATS, _CHANNELS = ("x", "y", "z", "nx", "ny", "nz"), ("red", "green", "blue")
_POINT = np.dtype([*((name, "<f4") for name in _FLOATS), *((name, "u1") for name in _CHANNELS)])
_PLY_TYPES = {"<f4": "float", "|u1": "uchar"}


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
    rows = np.empty(len(cloud.points), _POINT)
    columns = (*cloud.points.T, *cloud.normals.T, *cloud.colors.T)
    for name, column in zip(_FLOATS + _CHANNELS, columns, strict=True):
        rows[name] = column.numpy()
    with atomic_write(path) as file:
        file.write(binary_ply(rows))


def binary_ply(rows: np.ndarray) -> bytes:
    """Returns the file of points, whose properties are the fields of ``rows``: little-endian float32, and bytes."""
    properties = "".join(f"property {_PLY_TYPES[rows.dtype[name].str]} {name}\n" for name in rows.dtype.names or ())
    header = f"ply\nformat binary_little_endian 1.0\nelement vertex {len(rows)}\n{properties}end_header\n"
    return header.encode() + rows.tobytes()


def save_mesh(path: Path | str, mesh: Mesh) -> None:
    """Writes a mesh, in the units and axes of the world, that is, of the input data.

    Vertex colours of a GLB are linear, as its specification requires, and its material is not shaded, because the
    colours already include the lighting. PLY and OBJ store sRGB. With a texture, an OBJ has a material and an image
    beside it, named like the file. All files are written completely, or none.

    Args:
        path: ``*.ply``, ``*.obj`` or ``*.glb``.
        mesh: The mesh; a PLY has vertex colours and no texture.

    Raises:
        MissingPackageError: trimesh is not installed.
        ValueError: The path has another suffix.
        FileExistsError: A file of the material's or the image's name exists without an OBJ to which it could belong.
        OSError: The file cannot be written.
    """
    path = Path(path)
    check_suffix("path", path, MESH_SUFFIXES)
    suffix = path.suffix.lower()
    whole = _as_trimesh(mesh, suffix)
    if suffix == ".ply":
        files: dict[str, Any] = {path.name: whole.export(file_type="ply", vertex_normal=True)}
    elif suffix == ".glb":
        files = {path.name: whole.export(file_type="glb", include_normals=True, tree_postprocessor=_unlit)}
    else:
        files = _obj_files(whole, path)
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


def _as_trimesh(mesh: Mesh, suffix: str) -> Any:
    trimesh = mesh_package("trimesh")
    whole = trimesh.Trimesh(
        mesh.vertices.numpy(), mesh.faces.numpy(), vertex_normals=mesh.normals.numpy(), process=False
    )
    if mesh.texture is not None and suffix != ".ply":
        from PIL import Image

        material = trimesh.visual.material.PBRMaterial(
            baseColorTexture=Image.fromarray(mesh.texture.image.numpy()), metallicFactor=0.0, roughnessFactor=1.0
        )
        whole.visual = trimesh.visual.TextureVisuals(uv=mesh.texture.uv.numpy(), material=material)
    else:
        colors = mesh.colors
        if suffix == ".glb":
            colors = (255 * linear_light(colors.float() / 255)).round().to(torch.uint8)
        whole.visual = trimesh.visual.ColorVisuals(whole, vertex_colors=colors.numpy())
    return whole


def _unlit(tree: dict[str, Any]) -> None:
    """Tells viewers to add no light (the extension KHR_materials_unlit of glTF)."""
    materials = tree.setdefault("materials", [])
    if not materials:
        materials.append({"pbrMetallicRoughness": {"metallicFactor": 0.0}})
        for mesh in tree["meshes"]:
            for primitive in mesh["primitives"]:
                primitive["material"] = 0
    for material in materials:
        material.setdefault("extensions", {})["KHR_materials_unlit"] = {}
    tree["extensionsUsed"] = sorted({*tree.get("extensionsUsed", ()), "KHR_materials_unlit"})


def _obj_files(whole: Any, path: Path) -> dict[str, Any]:
    """Returns the files of an OBJ by name: with a texture, also its material and picture."""
    if whole.visual.kind == "texture":
        whole.visual.material = whole.visual.material.to_simple()
        whole.visual.material.name = path.stem
    text, others = mesh_package("trimesh.exchange.obj").export_obj(
        whole, include_normals=True, return_texture=True, mtl_name=f"{path.stem}.mtl"
    )
    return {path.name: text, **others}
