"""A field's surface as a mesh or as points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.geometry.appearance import surface_colors
from voxelfield.export.geometry.depth_maps import depth_maps
from voxelfield.export.geometry.extraction import CHUNK, SLAB, extract_surface
from voxelfield.export.geometry.fused_depth import FusedDepth
from voxelfield.export.geometry.mesh import Mesh, vertex_normals
from voxelfield.export.geometry.packages import mesh_package
from voxelfield.export.geometry.repair import decimate, fill_holes, largest_component
from voxelfield.export.geometry.surface import DensitySurface, Surface, half_absorbing_density, surface_normals
from voxelfield.export.geometry.texture import RenderedColors, textured
from voxelfield.export.region import Region
from voxelfield.fields.field import RadianceField
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.training.trained_model import TrainedModel

SurfaceKind = Literal["density", "tsdf"]

TRUNCATION = 2.0
"""Voxels from a surface within which a depth map counts for more than empty space."""


PAINTING_REACH = 1.5
"""Voxels from a surface at which the rays begin that a texture is painted with."""


@dataclass(frozen=True)
class SurfaceOptions:
    """Which surface of a field is meant, and how finely it is searched for.

    Args:
        kind: ``density`` is where the density crosses a level, ``tsdf`` is fused from depth maps.
        level: Density at the surface, per world unit, for ``density``; None: the one of which the length of a voxel
            absorbs half of the light.
        resolution: Cells along the longest edge of the box; None: as many as the field has voxels along it.
        box: Number of the nested box that is searched, including all boxes inside it, with its voxel size; 1 is the
            smallest.
        slab: Layers of cells at once, to bound memory.
        chunk: Evaluations of the field at once, to bound memory.

    Raises:
        ValueError: An argument is not as above.
    """

    kind: SurfaceKind = "density"
    level: float | None = None
    resolution: int | None = None
    box: int = 1
    slab: int = SLAB
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        if self.kind not in get_args(SurfaceKind):
            raise ValueError(f"surface must be one of {', '.join(get_args(SurfaceKind))}, got {self.kind!r}")
        if self.level is not None and not 0 < self.level < float("inf"):
            raise ValueError(f"level must be a density above 0, got {self.level:g}")
        if self.level is not None and self.kind == "tsdf":
            raise ValueError(f"level must be left out for surface tsdf, which has none, got {self.level:g}")
        for name in ("resolution", "box", "slab", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class MeshOptions:
    """What is done to a mesh, in this order.

    Args:
        largest_component: Keep nothing but the connected part with the largest area.
        fill_holes: Close holes by fans of triangles.
        max_faces: Merge triangles until there are no more; None merges none.
        texture: About the side, in pixels, of a picture that covers the mesh; None makes none.

    Raises:
        ValueError: A number is below 1.
    """

    largest_component: bool = False
    fill_holes: bool = False
    max_faces: int | None = None
    texture: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_faces", "texture"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


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


class FieldSurface:
    """The surface of a field, found once; meshes and points are made of it.

    Args:
        field: The field.
        occupancy: Where rays are sampled, on the field's device.
        settings: How they are sampled.
        options: Which surface is meant.
        cameras: Whose depth maps are fused, for ``tsdf``. Their lenses are left out: the maps are those of pinholes.

    Attributes:
        vertices: (V, 3) float32, world units, on the CPU.
        faces: (F, 3) int64, counterclockwise as seen from outside, at least one.

    Raises:
        MissingPackageError: A package of the extra ``mesh`` is not installed.
        ValueError: The field has no such surface or box, or there are no cameras to fuse.
    """

    def __init__(
        self,
        field: RadianceField,
        occupancy: OccupancyGrid,
        settings: RenderSettings,
        options: SurfaceOptions,
        cameras: Cameras | None = None,
    ) -> None:
        # Before minutes go into finding the surface.
        for package in ("skimage.measure", "trimesh", "scipy.spatial"):
            mesh_package(package)
        self._field, self._occupancy, self._settings, self._chunk = field, occupancy, settings, options.chunk
        region = Region.of(field, options.box)
        self._voxel = region.voxel
        self._surface = self._fused(cameras) if options.kind == "tsdf" else self._level_set(options)
        # One more point all around: outside of the field there is nothing, so its surface is closed there.
        lattice = region.lattice(options.resolution).enlarged()
        self.vertices, self.faces = extract_surface(self._surface, lattice, slab=options.slab, chunk=options.chunk)
        if not len(self.faces):
            if options.kind == "tsdf":
                raise ValueError("cameras must see a surface for surface tsdf, got empty space in all of their pixels")
            wrong = f"level must be a density that the field reaches, got {self._level(options):g}"
            if options.level is None:
                wrong += ", at which a voxel absorbs half of the light"
            raise ValueError(f"{wrong}: the field is empty, or it needs a lower level or surface tsdf")

    @torch.no_grad()
    def mesh(self, options: MeshOptions | None = None) -> Mesh:
        """Returns the surface as triangles with normals and colours.

        Normals are those of the field: the direction in which the density, or the fused distance, falls the fastest.
        Where that is none, or points inwards, they are the triangles' own. Colours are :func:`surface_colors`. Both are
        found before triangles are merged; a vertex that is left has those of the nearest one that was there. A texture
        is painted with :class:`voxelfield.export.geometry.texture.RenderedColors`.

        Args:
            options: What is done to the mesh; None: nothing.

        Raises:
            MissingPackageError: A package of the extra ``mesh`` is not installed.
        """
        options = options or MeshOptions()
        for wanted, package in ((options.max_faces, "fast_simplification"), (options.texture, "xatlas")):
            if wanted is not None:
                mesh_package(package)
        vertices, faces = self.vertices, self.faces
        if options.largest_component:
            vertices, faces = largest_component(vertices, faces)
        if options.fill_holes:
            vertices, faces = fill_holes(vertices, faces)
        normals, colors = self._appearance(vertices, vertex_normals(vertices, faces))
        if options.max_faces is not None:
            merged, faces = decimate(vertices, faces, options.max_faces)
            if options.largest_component:  # merging breaks some triangles off
                merged, faces = largest_component(merged, faces)
            _, nearest = mesh_package("scipy.spatial").cKDTree(vertices.numpy()).query(merged.numpy())
            vertices, normals, colors = merged, normals[nearest], colors[nearest]
        mesh = Mesh(vertices, faces, normals, colors)
        if options.texture is None:
            return mesh
        painter = RenderedColors(
            self._field, self._occupancy, self._settings, PAINTING_REACH * self._voxel, self._chunk
        )
        return textured(mesh, options.texture, painter, self._field.aabb.device, self._chunk)

    @torch.no_grad()
    def points(self, count: int, seed: int = 0) -> PointCloud:
        """Draws points of the surface, uniform in area, with normals and colours as :meth:`mesh` has them.

        Args:
            count: Number of points, at least 1.
            seed: Seed of the random point positions.

        Raises:
            ValueError: ``count`` is below 1.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        corners = self.vertices[self.faces]
        across, along = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
        outwards = torch.linalg.cross(across.double(), along.double())
        area = outwards.norm(dim=-1).cumsum(0)
        generator = torch.Generator().manual_seed(seed)
        place = torch.rand(count, generator=generator, dtype=torch.float64) * area[-1]
        face = torch.searchsorted(area, place).clamp(max=len(area) - 1)
        u, v = torch.rand(2, count, 1, generator=generator).unbind()
        beyond = u + v > 1
        u, v = torch.where(beyond, 1 - u, u), torch.where(beyond, 1 - v, v)
        points = corners[face, 0] + u * across[face] + v * along[face]
        normals, colors = self._appearance(points, F.normalize(outwards[face], dim=-1).float())
        return PointCloud(points, normals, colors)

    def _level(self, options: SurfaceOptions) -> float:
        return half_absorbing_density(self._voxel) if options.level is None else options.level

    def _level_set(self, options: SurfaceOptions) -> Surface:
        return DensitySurface(self._field, self._occupancy, self._level(options))

    def _fused(self, cameras: Cameras | None) -> Surface:
        if cameras is None or not len(cameras):
            raise ValueError("cameras must be at least one for surface tsdf, got none")
        pinholes = replace(cameras.to(self._field.aabb.device), lens=None)
        # A ray has many samples.
        maps = depth_maps(self._field, self._occupancy, self._settings, pinholes, max(self._chunk // 16, 1))
        return FusedDepth(self._field, self._occupancy, pinholes, maps, TRUNCATION * self._voxel)

    def _appearance(self, points: Tensor, outwards: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normals and sRGB colours of points of triangles that face ``outwards``; all of them are (M, 3)."""
        device = self._field.aabb.device
        there, outwards = points.to(device), outwards.to(device)
        normals = surface_normals(self._surface, there, self._voxel, self._chunk)
        normals = torch.where((normals * outwards).sum(dim=-1, keepdim=True) > 0, normals, outwards)
        colors = surface_colors(self._field, there, normals, self._chunk)
        return normals.cpu(), (255 * colors).round().to(torch.uint8).cpu()


def surface_of(
    run: TrainedModel, options: SurfaceOptions | None = None, cameras: Cameras | None = None
) -> FieldSurface:
    """Finds the surface of a run's field, from which meshes and points are made.

    Args:
        run: The run, as :func:`voxelfield.load` returns it.
        options: Definition of the surface; None for the level set of the density at its default level.
        cameras: As for :class:`FieldSurface`.

    Raises:
        MissingPackageError: A package of the extra ``mesh`` is not installed.
        ValueError: The field has no such surface or box, or there are no cameras to fuse.
    """
    return FieldSurface(run.field, run.occupancy, run.model.settings, options or SurfaceOptions(), cameras)
