"""A field's surface as a mesh or as points."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from voxelfield.config import BelowOne, Count, Positive
from voxelfield.export.lattice import BOX, RESOLUTION, Lattice, box_lattice
from voxelfield.export.mesh_file import MESH_SUFFIXES, Mesh, PointCloud, mesh_package, save_mesh, save_points, textured
from voxelfield.export.registry import ExportFormat, ExportSource, Option
from voxelfield.export.surfaces import (
    density_surface,
    extract_surface,
    fused_surface,
    half_absorbing_density,
    rendered_colors,
    surface_colors,
    surface_normals,
)
from voxelfield.foundation.checks import check_at_least_one, check_choice
from voxelfield.installed import MissingPackageError
from voxelfield.models.model import Model
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import reference_camera, upright_axes
from voxelfield.rendering.pixels import to_uint8

logger = logging.getLogger(__name__)

SurfaceKind = Literal["density", "tsdf"]

LEVEL_LENGTH = 2.0
"""Length, in voxels, that absorbs half of the light at the default level; at one voxel, soft surfaces have holes."""

TRUNCATION = 2.0
"""Distance from a surface, in voxels, within which a depth map counts for more than empty space."""

PAINTING_REACH = 1.5
"""Distance from a surface, in voxels, at which the rays that paint a texture begin."""

# How long the line must be in which a nested box cuts through a surface to be worth a warning, in edges of the box.
_LEAST_CUT = 0.1


class FieldSurface:
    """The surface of a field, extracted once, from which meshes and points are made.

    Args:
        model: The field with its occupied cells and its sampling, such as
            :attr:`voxelfield.trained.trained_model.TrainedModel.model`.
        kind: ``density`` is where the density crosses a level, ``tsdf`` is fused from depth maps.
        level: Density at the surface, per world unit, for ``density``; None: the density at which two voxels absorb
            half of the light.
        resolution: Cells along the longest edge of the box; None: as many as the field has voxels along it.
        box: Number of the nested box to export, including all boxes inside it, with its voxel size; 1 is the smallest.
        cameras: Cameras whose depth maps are fused, for ``tsdf``, without their lenses.

    Attributes:
        vertices: (V, 3) float32, world units, on the CPU.
        faces: (F, 3) int64, counterclockwise as seen from outside, at least one.

    Raises:
        MissingPackageError: A package of the extra ``mesh`` is not installed.
        ValueError: An argument is not as above, the field has no such surface or box, or there are no cameras to fuse.
    """

    def __init__(
        self,
        model: Model,
        *,
        kind: SurfaceKind = "density",
        level: float | None = None,
        resolution: int | None = None,
        box: int = 1,
        cameras: Cameras | None = None,
    ) -> None:
        check_choice("surface", kind, get_args(SurfaceKind))
        if level is not None and not 0 < level < float("inf"):
            raise ValueError(f"level must be a density above 0, got {level:g}")
        if level is not None and kind == "tsdf":
            raise ValueError(f"level must be left out for surface tsdf, which has none, got {level:g}")
        # Before the surface is extracted, which may take minutes.
        for package in ("skimage.measure", "trimesh", "scipy.spatial"):
            mesh_package(package)
        self._model = model
        lattice, self._voxel = box_lattice(model, box, resolution)
        lattice = lattice.enlarged()  # with one more point on each side, the surface is closed at the field's box
        wanted = half_absorbing_density(LEVEL_LENGTH * self._voxel) if level is None else level
        if kind == "density":
            self._surface = density_surface(model, wanted)
        elif cameras is None or not len(cameras):
            raise ValueError("cameras must be at least one for surface tsdf, got none")
        else:
            pinholes = cameras.pinholes(all_round=True).to(model.device)
            self._surface = fused_surface(model, pinholes, TRUNCATION * self._voxel)
        self.vertices, self.faces = extract_surface(self._surface, lattice)
        if not len(self.faces):
            if kind == "tsdf":
                raise ValueError("cameras must see a surface for surface tsdf, got empty space in all of their pixels")
            wrong = f"level must be a density that the field reaches, got {wanted:g}"
            if level is None:
                wrong += f", at which {LEVEL_LENGTH:g} voxels absorb half of the light"
            raise ValueError(f"{wrong}: the field is empty, or it needs a lower level or surface tsdf")
        if model.warp is not None and box < model.warp.count and (faces := [*self._cut_faces(lattice)]):
            logger.warning(
                "box %d cuts through the surface at its faces %s: --box %d contains more of it, in larger voxels",
                *(box, ", ".join(faces), box + 1),
            )

    @torch.no_grad()
    def mesh(
        self,
        *,
        min_component: float = 1e-3,
        largest_component: bool = False,
        fill_holes: bool = False,
        max_faces: int | None = None,
        texture: int | None = None,
    ) -> Mesh:
        """Returns the surface as triangles with normals and colours.

        Normals are the directions in which the density, or the fused distance, decreases fastest, or the triangles' own
        if that is undefined or inward. Colours are :func:`surface_colors`. Both are computed before triangles are
        merged; each remaining vertex takes them from the nearest earlier one. A texture is painted with
        :func:`voxelfield.export.surfaces.rendered_colors`.

        Args:
            min_component: Remove connected parts with less than this share of the largest one's area; 0 keeps all.
            largest_component: Remove all but the connected part with the largest area.
            fill_holes: Then close holes by fans of triangles.
            max_faces: Then merge triangles until at most so many are left; None merges none.
            texture: Side, in pixels, of a texture, which is a square; None makes none.

        Raises:
            MissingPackageError: A package of the extra ``mesh`` is not installed.
            ValueError: A number is below 1, or a share is not one.
        """
        if not 0 <= min_component < 1:
            raise ValueError(f"min_component must lie in [0, 1), got {min_component}")
        for name, number, package in [("max_faces", max_faces, "fast_simplification"), ("texture", texture, "xatlas")]:
            if number is not None:
                check_at_least_one(name, number)
                mesh_package(package)
        share = 1.0 if largest_component else min_component
        vertices, faces = keep_largest_component(self.vertices, self.faces, share)
        if fill_holes:
            faces = close_holes(vertices, faces)
        outwards = torch.from_numpy(_trimesh(vertices, faces).vertex_normals.copy()).float()
        normals, colors = self._appearance(vertices, outwards)
        if max_faces is not None and len(faces) > max_faces:
            merged, faces = decimate(vertices, faces, max_faces)
            merged, faces = keep_largest_component(merged, faces, share)  # merging breaks some triangles off
            _, nearest = mesh_package("scipy.spatial").cKDTree(vertices.numpy()).query(merged.numpy())
            vertices, normals, colors = merged, normals[nearest], colors[nearest]
        mesh = Mesh(vertices, faces, normals, colors)
        if texture is None:
            return mesh

        def paint(points: Tensor, normals: Tensor) -> Tensor:
            at, outwards = points.to(self._model.device), normals.to(self._model.device)
            return rendered_colors(self._model, at, outwards, PAINTING_REACH * self._voxel)

        return textured(mesh, texture, paint)

    @torch.no_grad()
    def points(self, count: int, seed: int = 0) -> PointCloud:
        """Draws points of the surface, uniform in area, with normals and colours as :meth:`mesh` has them.

        Args:
            count: Number of points, at least 1.
            seed: Seed of the random point positions.

        Raises:
            ValueError: ``count`` is below 1.
        """
        check_at_least_one("count", count)
        mesh = _trimesh(self.vertices, self.faces)
        points, faces = mesh_package("trimesh.sample").sample_surface(mesh, count, seed=seed)
        points, outwards = (torch.from_numpy(np.asarray(each)).float() for each in (points, mesh.face_normals[faces]))
        return PointCloud(points, *self._appearance(points, outwards))

    def _cut_faces(self, lattice: Lattice) -> Iterator[str]:
        """Yields the faces of the lattice that it was extracted from, such as ``z-``, at which the surface ends."""
        edges = _trimesh(self.vertices, self.faces).edges_sorted
        ends = self.vertices[edges[mesh_package("trimesh.grouping").group_rows(edges, require_count=1)]]
        lengths = (ends[:, 1] - ends[:, 0]).norm(dim=1)
        steps = torch.tensor(lattice.shape) - 1
        for axis, end in itertools.product(range(3), range(2)):
            at_face = (ends[..., axis] - float(lattice.low[axis] + end * steps[axis] * lattice.spacing[axis])).abs()
            cut = lengths[(at_face < 0.5 * float(lattice.spacing[axis])).all(dim=1)].sum()
            if cut >= _LEAST_CUT * float((steps * lattice.spacing).max()):
                yield f"{'xyz'[axis]}{'-+'[end]}"

    def _appearance(self, points: Tensor, outwards: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normals and sRGB colours of points of triangles that face ``outwards``; all of them are (M, 3)."""
        there, outwards = points.to(self._model.device), outwards.to(self._model.device)
        normals = surface_normals(self._surface, there, self._voxel)
        normals = torch.where((normals * outwards).sum(dim=-1, keepdim=True) > 0, normals, outwards)
        colors = surface_colors(self._model.field, there, normals)
        return normals.cpu(), to_uint8(colors).cpu()


def _trimesh(vertices: Tensor, faces: Tensor) -> Any:
    return mesh_package("trimesh").Trimesh(vertices.numpy(), faces.numpy(), process=False)


def keep_largest_component(vertices: Tensor, faces: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the connected part with the largest area of a mesh, and those with at least a ``share`` of its area.

    Vertices are (V, 3) and faces (F, 3). The log says how many parts are left out.
    """
    edges = torch.cat((faces[:, :2], faces[:, 1:]))
    labels = mesh_package("trimesh.graph").connected_component_labels(edges.numpy(), node_count=len(vertices))
    numbers, part = np.unique(labels[faces[:, 0].numpy()], return_inverse=True)
    areas = np.bincount(part, weights=_trimesh(vertices, faces).area_faces)
    large = areas >= share * areas.max()
    if large.all():
        return vertices, faces
    lost = 100 * areas[~large].sum() / areas.sum()
    logger.info("left out %d of %d loose parts, %.2g %% of the area", (~large).sum(), len(numbers), lost)
    used, index = faces[torch.from_numpy(large[part])].unique(return_inverse=True)
    return vertices[used], index


def close_holes(vertices: Tensor, faces: Tensor) -> Tensor:
    """Returns faces that also close the holes, each with a fan of triangles between the vertices of its rim.

    A fan is flat where the rim is, and good where the rim is convex; a large hole of another shape gets folds. A hole
    whose rim touches itself may stay open.
    """
    mesh = _trimesh(vertices, faces)
    mesh_package("trimesh.repair").fill_holes(mesh, use_fan=True)
    return torch.from_numpy(mesh.faces.copy()).long()


def decimate(vertices: Tensor, faces: Tensor, max_faces: int) -> tuple[Tensor, Tensor]:
    """Merges triangles down to ``max_faces`` by their quadric error (Garland and Heckbert 1997)."""
    simplify = mesh_package("fast_simplification").simplify
    # It merges within fixed lengths, from 0.0015 on, whatever is first: in small units, all triangles would be within.
    scale = 10 * math.sqrt(len(faces) / _trimesh(vertices, faces).area)
    points, triangles = simplify(scale * vertices.double().numpy(), faces.int().numpy(), target_count=max_faces)
    return torch.from_numpy(points / scale).float(), torch.from_numpy(triangles).long()


def _check_texture(path: Path, given: Mapping[str, Any]) -> None:
    if "texture" in given and path.suffix.lower() == ".ply":
        raise ValueError(f"--texture must be written to an obj or glb, got --mesh {path}")


def _surface(source: ExportSource, surface: SurfaceKind = "density", **options: Any) -> FieldSurface:
    cameras = source.scene(("train",)).train.cameras if surface == "tsdf" else None
    return FieldSurface(source.model, kind=surface, cameras=cameras, **options)


def upright(source: ExportSource) -> Tensor:
    """Returns axes (3, 3), one per row, of which z points up in the training images."""
    cameras = reference_camera(source.model.warp, 1, 1)
    if cameras is None:
        try:
            cameras = source.training_cameras()
        except (OSError, ValueError, MissingPackageError) as error:
            logger.warning("z is taken to point up, because the scene's cameras are not there: %s", error)
            return torch.eye(3)
    return upright_axes(cameras)


def _write_mesh(path: Path, source: ExportSource, up_axis: Literal["y", "z"] | None = None, **options: Any) -> str:
    of_surface = {option.name: options.pop(option.name) for option in _SURFACE if option.name in options}
    mesh = source.once(_surface, **of_surface).mesh(**options)
    if up_axis is not None or path.suffix.lower() == ".glb":
        mesh = mesh.turned(source.once(upright))
    save_mesh(path, mesh, up_axis)
    return f"{len(mesh.faces)} triangles of {len(mesh.vertices)} vertices"


def _write_points(path: Path, source: ExportSource, count: int = 1_000_000, **options: Any) -> str:
    save_points(path, source.once(_surface, **options).points(count))
    return f"{count} points"


_SURFACE = (
    Option(
        "surface",
        "density: where the density crosses a level; tsdf: fused from depth maps of the training cameras, smoother but "
        "without parts thinner than a voxel; needs the scene (default: density)",
        SurfaceKind,
    ),
    Option("level", "density at the surface, per unit (default: two voxels absorb half of the light)", Positive),
    RESOLUTION,
    BOX,
)
MESH = ExportFormat(
    name="mesh",
    help="triangles with normals and colours: ply, obj or glb",
    opens="Blender or MeshLab",
    write=_write_mesh,
    suffixes=MESH_SUFFIXES,
    options=(
        *_SURFACE,
        Option("min_component", "leave out parts below SHARE of the largest area (default: 0.001)", BelowOne, "SHARE"),
        Option("largest_component", "leave out all but the largest connected part"),
        Option("fill_holes", "close holes with fans of triangles"),
        Option("max_faces", "merge triangles until at most N are left", Count, "N"),
        Option("texture", "paint a texture with sides of PIXELS (obj, glb; see --max-faces)", Count, "PIXELS"),
        Option("up_axis", "axis that points up (default: y for glb, else as in the poses)", Literal["y", "z"]),
    ),
    check=_check_texture,
)
POINTS = ExportFormat(
    name="points",
    help="points of the surface with normals and colours: ply",
    opens="MeshLab or CloudCompare",
    write=_write_points,
    suffixes=(".ply",),
    options=(*_SURFACE, Option("count", "number of points (default: 1000000)", Count, "N")),
)
