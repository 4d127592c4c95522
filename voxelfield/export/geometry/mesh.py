"""Meshes with normals and colours, and their files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.geometry.packages import mesh_package
from voxelfield.files import atomic_path
from voxelfield.rendering.images import linear_light

MESH_SUFFIXES = (".ply", ".obj", ".glb")
"""Endings of the files that meshes are written to."""


@dataclass(frozen=True, eq=False)
class Texture:
    """A picture that covers a mesh.

    Attributes:
        places: (V, 2) float32, the place of each vertex in the picture, from its bottom left corner, in [0, 1].
        image: (H, W, 3) uint8, sRGB, from the top row.
    """

    places: Tensor
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


def vertex_normals(vertices: Tensor, faces: Tensor) -> Tensor:
    """Returns the mean direction, weighted by area, of the triangles around each vertex.

    Args:
        vertices: (V, 3).
        faces: (F, 3) int64.

    Returns:
        (V, 3) unit vectors, float32; zero for a vertex of no triangle.
    """
    corners = vertices[faces].double()
    outwards = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    total = torch.zeros(len(vertices), 3, dtype=torch.float64)
    total.index_add_(0, faces.flatten(), outwards.repeat_interleave(3, dim=0))
    return F.normalize(total, dim=-1, eps=1e-300).float()


def check_mesh_path(name: str, path: Path) -> None:
    """Raises unless a path has the ending of a kind of mesh file.

    Args:
        name: What the caller calls the path, for the message.
        path: The path.

    Raises:
        ValueError: It has another ending.
    """
    if path.suffix.lower() not in MESH_SUFFIXES:
        raise ValueError(f"{name} must be a file *{', *'.join(MESH_SUFFIXES)}, got {path}")


def save_mesh(path: Path | str, mesh: Mesh) -> None:
    """Writes a mesh, in the units and axes of the world, that is, of the input data.

    GLB has the colours that its specification wants: those of vertices are linear light, and no light falls on the
    surface, because the colours already include it. PLY and OBJ store them unchanged. With a texture, an OBJ has
    a material and a picture beside it, named like the file. All files are written completely, or none of them is.

    Args:
        path: ``*.ply``, ``*.obj`` or ``*.glb``.
        mesh: What to write; a PLY has vertices' colours and no texture.

    Raises:
        MissingPackageError: trimesh is not installed.
        ValueError: The path has another ending.
        FileExistsError: A file of the material's or the picture's name exists without an OBJ to which it could belong.
        OSError: The file cannot be written.
    """
    path = Path(path)
    check_mesh_path("path", path)
    suffix = path.suffix.lower()
    as_linear = suffix == ".glb" and mesh.texture is None
    whole = _as_trimesh(mesh, as_linear, suffix != ".ply")
    if suffix == ".ply":
        files: dict[str, Any] = {path.name: whole.export(file_type="ply", vertex_normal=True)}
    elif suffix == ".glb":
        files = {path.name: whole.export(file_type="glb", include_normals=True, tree_postprocessor=_unlit)}
    else:
        files = _obj_files(whole, path)
    _check_others(path, files)
    # What refers to another file appears after it: files are put in place in the reverse order.
    with contextlib.ExitStack() as writing:
        for name, content in files.items():
            temporary = writing.enter_context(atomic_path(path.with_name(name)))
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def _check_others(path: Path, names: Iterable[str]) -> None:
    """Raises FileExistsError if files beside an OBJ would replace files of something else."""
    present = [] if path.exists() else [name for name in names if name != path.name and path.with_name(name).exists()]
    if present:
        raise FileExistsError(
            f"{path} must have a name whose material and picture are not there yet, got {' and '.join(present)} that "
            "belong to something else: choose another name"
        )


def _as_trimesh(mesh: Mesh, linear: bool, textured: bool) -> Any:
    trimesh = mesh_package("trimesh")
    whole = trimesh.Trimesh(
        mesh.vertices.numpy(), mesh.faces.numpy(), vertex_normals=mesh.normals.numpy(), process=False
    )
    if mesh.texture is not None and textured:
        from PIL import Image

        material = trimesh.visual.material.PBRMaterial(
            baseColorTexture=Image.fromarray(mesh.texture.image.numpy()), metallicFactor=0.0, roughnessFactor=1.0
        )
        whole.visual = trimesh.visual.TextureVisuals(uv=mesh.texture.places.numpy(), material=material)
    else:
        colors = _linear_light(mesh.colors) if linear else mesh.colors
        whole.visual = trimesh.visual.ColorVisuals(whole, vertex_colors=colors.numpy())
    return whole


def _linear_light(colors: Tensor) -> Tensor:
    """Decodes sRGB colours, uint8."""
    return (255 * linear_light(colors.float() / 255)).round().to(torch.uint8)


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
