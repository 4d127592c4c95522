"""Pictures of a field from any viewpoint, in any mode."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from voxelfield.grids.boxes import Box, box_tensor, parse_box
from voxelfield.models.model import Model
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import visible_samples
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.display import Display, Viewpoint
from voxelfield.viewer.maps import cell_map, depth_map, normal_map, sample_map
from voxelfield.viewer.photographs import Photographs


class Painter:
    """Draws a field that does not change.

    Args:
        run: The field, and the settings with which its own evaluation renders it.
        photographs: Photographs of the scene, to compare with.

    Attributes:
        run: The field.
    """

    def __init__(self, run: TrainedModel, photographs: Photographs | None = None) -> None:
        self.run = run
        self._photographs = photographs
        self._device = run.model.device
        self._warp = run.model.warp
        self._content = content_box(run)
        self._crop: Box | None = None
        self._cropped = run.model
        self._renderers: dict[bool, FieldRenderer] = {}

    @torch.no_grad()
    def picture(
        self,
        viewpoint: Viewpoint,
        display: Display,
        height: int,
        width: int,
        *,
        rows: tuple[int, int] | None = None,
        sharp: bool = False,
        photo: int | None = None,
    ) -> Tensor:
        """Draws a picture, or a band of one.

        Args:
            viewpoint: The camera.
            display: How the field is displayed.
            height: Height of the whole picture, pixels.
            width: Width of the whole picture, pixels.
            rows: First row of the band, and the one after its last; None for the whole picture.
            sharp: Use as many rays per pixel as the run's own evaluation instead of one.
            photo: Number of the photograph that was taken from here, if it is to be compared with.

        Returns:
            (rows, width, 3) uint8 on the CPU.
        """
        first, end = (0, height) if rows is None else rows
        self._set_crop(display.crop)
        # Normals are differences between neighbours, which at the border of a band belong to the next band.
        margin = 1 if display.mode == "normal" else 0
        cameras = viewpoint.cameras(height, width, (first - margin, end + margin)).to(self._device)
        picture = self._draw(cameras, display, sharp)[margin : margin + end - first]
        if margin:
            cameras = viewpoint.cameras(height, width, (first, end)).to(self._device)
        if photo is not None and self._photographs is not None:
            background = self.run.model.background
            picture = self._photographs.overlay(photo, picture, cameras, display.photo_fraction, background)
        return to_uint8(picture).cpu()

    def _draw(self, cameras: Cameras, display: Display, sharp: bool) -> Tensor:
        """Returns the picture (H, W, 3) of a camera in a mode."""
        size = (cameras.height, cameras.width)
        if display.mode == "samples per ray":
            return sample_map(self._sample_counts(cameras).view(size))
        if display.mode == "occupancy":
            return self._cells(cameras).view(*size, 3)
        view = self._renderer(sharp).view(cameras, 0)
        if display.mode == "depth":
            return self._depth(view, cameras, display)
        if display.mode == "normal":
            directions = self._rays(cameras).directions.view(*size, 3)
            return normal_map(view.depth, view.opacity, cameras.c2w[0, :3, 3], directions)
        if display.mode == "opacity":
            return view.opacity[..., None].expand(*size, 3)
        return view.rgb

    def _depth(self, view: View, cameras: Cameras, display: Display) -> Tensor:
        low, high = box_tensor(display.crop or self._content, torch.device("cpu"))
        if self._warp is not None:
            nearest = self._warp.near if self._warp.is_forward_facing else 0.25 * float((high - low).norm())
            return depth_map(view.depth, view.opacity, nearest, float("inf"))
        camera = cameras.c2w[0, :3, 3].cpu()
        nearest = float((camera - torch.minimum(torch.maximum(camera, low), high)).norm())
        farthest = float(torch.maximum((camera - low).abs(), (camera - high).abs()).norm())
        return depth_map(view.depth, view.opacity, nearest, farthest)

    def _sample_counts(self, cameras: Cameras) -> Tensor:
        """Returns the number of visible samples of each ray, (R,)."""
        model, counts = self._cropped, []
        with model.autocast():
            for rays in self._chunks(cameras):
                samples, _ = visible_samples(model.field, rays, model.occupancy, model.settings)
                counts.append(samples.ray_offsets.diff())
        return torch.cat(counts)

    def _cells(self, cameras: Cameras) -> Tensor:
        occupancy = self._cropped.occupancy
        edges = (occupancy.aabb[1] - occupancy.aabb[0]).cpu() / torch.tensor(occupancy.occupied.shape)
        step = 0.25 * float(edges.min())
        return torch.cat([cell_map(rays, occupancy, step, self._warp) for rays in self._chunks(cameras)])

    def _rays(self, cameras: Cameras) -> Rays:
        return cameras.image_rays(0, self._cropped.field.aabb)

    def _chunks(self, cameras: Cameras) -> list[Rays]:
        rays, size = self._rays(cameras), self.run.trainer.chunk
        return [rays[first : first + size] for first in range(0, len(rays), size)]

    def _set_crop(self, crop: Box | None) -> None:
        if crop == self._crop:
            return
        self._crop = crop
        self._cropped = self.run.model if crop is None else _cropped(self.run.model, crop)
        self._renderers.clear()

    def _renderer(self, sharp: bool) -> FieldRenderer:
        sharp = sharp and self.run.trainer.evaluation.supersampling > 1
        if sharp not in self._renderers:
            self._renderers[sharp] = self._cropped.renderer(supersampling=None if sharp else 1)
        return self._renderers[sharp]


def content_box(run: TrainedModel) -> Box:
    """Returns the part of space that matters, world units: the smallest of nested boxes, or the occupied cells."""
    if run.model.warp is not None:
        return run.model.warp.aabb
    occupancy = run.occupancy
    return parse_box(occupancy.bounds() if bool(occupancy.occupied.any()) else occupancy.aabb)


def crop_limits(run: TrainedModel) -> Box:
    """Returns the largest crop box, world units: the second smallest of nested boxes, or the content box."""
    warp = run.model.warp
    return content_box(run) if warp is None else warp.world_box(min(2, warp.count))


def _cropped(model: Model, box: Box) -> Model:
    """Returns a model without the occupied cells whose centres lie outside of a box (world units)."""
    occupancy, warp = model.occupancy, model.warp
    part = copy.deepcopy(occupancy)
    low, high = occupancy.aabb
    cells = occupancy.occupied.nonzero()
    centres = low + (cells + 0.5) / torch.tensor(occupancy.occupied.shape, device=cells.device) * (high - low)
    if warp is not None:
        centres = warp.to_world(centres)[0]
    limits = box_tensor(box, cells.device)
    outside = ((centres < limits[0]) | (centres > limits[1])).any(dim=-1)
    part.occupied[tuple(cells[outside].unbind(-1))] = False
    return model.around(occupancy=part)
