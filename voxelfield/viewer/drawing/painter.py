"""Pictures of a field from anywhere, in any mode."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from voxelfield.fields.field import warp_of
from voxelfield.grids.boxes import box_tensor
from voxelfield.rendering.cameras import Cameras, reference_camera
from voxelfield.rendering.march import visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.occupied_density import occupied_density
from voxelfield.rendering.pixels import MIN_VISIBLE_OPACITY, to_uint8
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.training.logs.densities import is_empty
from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.drawing.crop import cropped
from voxelfield.viewer.drawing.density_plane import draw_density
from voxelfield.viewer.drawing.look import Look
from voxelfield.viewer.drawing.maps import brightened, depth_map, normal_map, opacity_map, sample_map
from voxelfield.viewer.drawing.occupied_cells import cell_map
from voxelfield.viewer.drawing.photographs import Photographs, lay_photograph_over
from voxelfield.viewer.drawing.viewpoint import Viewpoint
from voxelfield.warps.warp import Warp

_GLANCE = 128
_REFERENCE_SIZE = 512  # pixels
"""Rows and columns of the picture that tells whether there is anything to be seen."""


class Painter:
    """Draws a field that does not change.

    Args:
        run: The field, where it is occupied, and how the run's own evaluation renders it.
        photographs: Photographs of the scene to compare with; None if there are none.

    Attributes:
        box: (2, 3) on the CPU: what matters of the scene, world units.
        device: Where the field is.
    """

    def __init__(self, run: TrainedModel, photographs: Photographs | None = None) -> None:
        self._run = run
        self._photographs = photographs
        self._frame = warp_of(run.field)
        self.device = run.field.aabb.device
        self._background = run.model.background
        self._settings = run.model.settings
        self.box = content_boxes(run)[0]
        self._crop: object = None
        self._occupancy = run.occupancy
        self._renderers: dict[bool, FieldRenderer] = {}

    @torch.no_grad()
    def picture(
        self,
        viewpoint: Viewpoint,
        look: Look,
        height: int,
        width: int,
        *,
        rows: tuple[int, int] | None = None,
        sharp: bool = False,
        photo: int | None = None,
    ) -> Tensor:
        """Draws a picture, or a band of one.

        Args:
            viewpoint: Where from.
            look: What to show, and how.
            height: Height of the whole picture.
            width: Width of the whole picture.
            rows: The band's first row and the one after its last; None: the whole picture.
            sharp: Whether pixels are made of as many rays as in the run's evaluation, instead of one.
            photo: Number of the photograph that was taken from here, if it is to be compared with.

        Returns:
            (rows, width, 3) uint8 on the CPU.
        """
        first, end = (0, height) if rows is None else rows
        self._take_crop(look)
        # Normals are differences of neighbours, which at a band's border belong to the next band.
        beyond = 1 if look.mode == "normal" else 0
        cameras = viewpoint.cameras(height, width, (first - beyond, end + beyond)).to(self.device)
        picture = self._drawn(cameras, look, sharp)[beyond : beyond + end - first]
        if beyond:
            cameras = viewpoint.cameras(height, width, (first, end)).to(self.device)
        if look.cut is not None:
            rays = cameras.image_rays(0, self._run.field.aabb)
            within = look.crop or look.cut.within
            picture = draw_density(
                picture,
                cameras.c2w[0, :3, 3],
                rays.directions.view(end - first, width, 3),
                self.box.to(self.device) if within is None else box_tensor(within, self.device),
                look.cut.axis,
                look.cut.position,
                self._optical_depth,
            )
        if photo is not None and self._photographs is not None:
            picture = lay_photograph_over(
                picture, self._photographs, photo, cameras, look.photo_share, self._background
            )
        return to_uint8(picture).cpu()

    def _drawn(self, cameras: Cameras, look: Look, sharp: bool) -> Tensor:
        """Returns the picture (H, W, 3) of a camera in a mode."""
        size = (cameras.height, cameras.width)
        if look.mode == "samples per ray":
            return sample_map(self._sample_counts(cameras).view(size))
        if look.mode == "occupancy":
            return self._cells(cameras).view(*size, 3)
        view = self._renderer(sharp).view(cameras, 0)
        if look.mode == "depth":
            return self._depth(view, cameras, look)
        if look.mode == "normal":
            directions = cameras.image_rays(0, self._run.field.aabb).directions.view(*size, 3)
            return normal_map(view.depth, view.opacity, cameras.c2w[0, :3, 3], directions)
        if look.mode == "opacity":
            return opacity_map(view.opacity)
        return brightened(view.rgb, look.exposure)

    @torch.no_grad()
    def absence(self, viewpoint: Viewpoint, look: Look) -> str:
        """Says why nothing of the field is to be seen; an empty string where something is.

        Args:
            viewpoint: Where from.
            look: What is shown.
        """
        self._take_crop(look)
        view = self._renderer(sharp=False).view(viewpoint.cameras(_GLANCE, _GLANCE).to(self.device), 0)
        # An opacity that is not finite is not empty space.
        if not float(view.opacity.max()) < MIN_VISIBLE_OPACITY:
            return ""
        if is_empty(self._run.model):
            return "the field is empty, so every picture shows only the background"
        if not bool(self._occupancy.occupied.any()):
            return "no part of the field lies within the crop box"
        return "no part of the field is visible from here"

    def _optical_depth(self, points: Tensor) -> Tensor:
        """Returns the density at world positions (M, 3), times the length of a step there."""
        density = occupied_density(self._run.field, self._occupancy, points)
        return density * self._settings.step * (1.0 if self._frame is None else self._frame.from_world(points)[1])

    def _depth(self, view: View, cameras: Cameras, look: Look) -> Tensor:
        low, high = self._limits(look)
        if self._frame is not None:
            nearest = self._frame.near if self._frame.is_forward_facing else 0.25 * float((high - low).norm())
            return depth_map(view.depth, view.opacity, nearest, float("inf"))
        camera = cameras.c2w[0, :3, 3].cpu()
        nearest = float((camera - torch.minimum(torch.maximum(camera, low), high)).norm())
        farthest = float(torch.maximum((camera - low).abs(), (camera - high).abs()).norm())
        return depth_map(view.depth, view.opacity, nearest, farthest)

    def _limits(self, look: Look) -> Tensor:
        return self.box if look.crop is None else box_tensor(look.crop, torch.device("cpu"))

    def _sample_counts(self, cameras: Cameras) -> Tensor:
        """Returns how many samples of each ray show, (R,)."""
        rays = cameras.image_rays(0, self._run.field.aabb)
        counts = []
        precision = getattr(torch, self._run.trainer.precision)
        narrow = precision != torch.float32
        with torch.autocast(self.device.type, precision if narrow else None, narrow, cache_enabled=False):
            for part in _chunks(rays, self._run.trainer.chunk):
                samples, _ = visible_samples(self._run.field, part, self._occupancy, self._settings)
                counts.append(samples.ray_offsets.diff())
        return torch.cat(counts)

    def _cells(self, cameras: Cameras) -> Tensor:
        rays = cameras.image_rays(0, self._run.field.aabb)
        edges = (self._occupancy.aabb[1] - self._occupancy.aabb[0]).cpu() / torch.tensor(self._occupancy.occupied.shape)
        step = 0.25 * float(edges.min())
        parts = _chunks(rays, self._run.trainer.chunk)
        return torch.cat([cell_map(part, self._occupancy, step, self._frame) for part in parts])

    def _take_crop(self, look: Look) -> None:
        if look.crop == self._crop:
            return
        whole = self._run.occupancy
        self._crop = look.crop
        self._occupancy = whole if look.crop is None else cropped(whole, look.crop, self._frame)
        self._renderers.clear()

    def _renderer(self, sharp: bool) -> FieldRenderer:
        sharp = sharp and self._run.trainer.evaluation.supersampling > 1
        if sharp not in self._renderers:
            model = replace(self._run.model, occupancy=self._occupancy)
            self._renderers[sharp] = model.renderer(supersampling=None if sharp else 1)
        return self._renderers[sharp]


def content_boxes(run: TrainedModel) -> list[Tensor]:
    """Returns boxes (2, 3) of a run's scene, world units, on the CPU, of which the first holds what matters.

    That is where cells are occupied. Of nested boxes, it is the smallest, and the others follow.
    """
    warp = warp_of(run.field)
    if warp is not None:
        return boxes_around(warp)
    occupancy: OccupancyGrid = run.occupancy
    return [occupancy.bounds() if bool(occupancy.occupied.any()) else occupancy.aabb.cpu()]


def boxes_around(warp: Warp) -> list[Tensor]:
    """Returns the boxes of a warp as (2, 3) each, world units, on the CPU, the smallest first."""
    return [box_tensor(warp.world_box(number), torch.device("cpu")) for number in range(1, warp.count + 1)]


def reference_of(warp: Warp | None) -> Cameras | None:
    """Returns the reference camera of a warp, from which to look first; None if there is none."""
    return reference_camera(warp, _REFERENCE_SIZE, _REFERENCE_SIZE)


def _chunks(rays: Rays, size: int) -> list[Rays]:
    return [rays[first : first + size] for first in range(0, len(rays), size)]
