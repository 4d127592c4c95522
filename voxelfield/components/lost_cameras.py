"""Recovery of cameras that refinement has lost."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import processes
from voxelfield.components.exposure import AffineExposure
from voxelfield.components.refinement import CameraRefinement, fit_poses
from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import Natural
from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import evenly_spaced
from voxelfield.models.component import Component
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.pixels import composite_background, to_uint8
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.rendering.rigid import compose, exp_se3, log_se3, turning_angles

logger = logging.getLogger(__name__)

# Largest length in pixels of the longer side of the compared images.
_SIDE = 64
# Ratio to the median error above which a camera counts as lost, 6 dB, and ratio to its previous error that it must
# reach to be moved, 3 dB.
_LOST, _FOUND = 4.0, 0.5
# Spreads of the starting poses, in standard deviations of the motions of the other cameras.
_SPREADS = (1.0, 2.0, 4.0)
# Standard deviation in radians, about each axis, of the rotations applied to the poses of other cameras.
_ASIDE = 0.25
# The refinement of the most promising poses.
_PROMISING, _STEPS, _RATE = 8, 150, 1e-2


@dataclass(frozen=True)
class LostCameraSettings(ComponentSettings):
    """The setting of :class:`LostCameras`.

    Attributes:
        search_poses: Number of poses tried for a camera that reproduces little of its image at the beginning of a stage
            (:class:`voxelfield.components.lost_cameras.LostCameras`); 0 disables the search.
    """

    name = "lost_cameras"
    after = ("cameras", "exposure")
    requires = ("cameras",)
    excludes: ClassVar[Mapping[str, str]] = {"tones": "which cannot be undone in photographs"}
    search_poses: Natural = key("camera.search_poses", 128, off=0)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        return [LostCameras(self.search_poses, training)]


@dataclass(frozen=True, eq=False)
class LostCamera:
    """A camera that was lost, and the result of the search for it.

    Attributes:
        index: Number of the camera.
        name: Name of its image.
        before: Mean squared error of its downscaled image before the search.
        after: The same error at the new pose; None if no better pose was found.
        turned: Angle between the old and the new orientation, radians.
        twist: (6,) motion to the new pose, as in :attr:`CameraRefinement.twists`, on the CPU; None if no better pose
            was found.
    """

    index: int
    name: str
    before: float
    after: float | None = None
    turned: float = 0.0
    twist: Tensor | None = None


class LostCameras(Component):
    """At the start of each stage, searches for cameras whose images the field does not reproduce, and for their poses.

    Gradients lead a camera to its position from up to about 20 degrees away. A camera that was further off, or that was
    misled by the fog of the first steps, gets stuck in a local minimum, with an error far above the median.
    Such a camera is tried in many poses against the field, which the other cameras have shaped: random poses around the
    given one, as far away as the other cameras have moved, and further; and the poses of the other cameras. The best
    few are refined, and the best of these is used.

    Images are compared at about 64 pixels, where details neither help nor mislead; their shorter side is not reduced
    below one pixel. A view without valid pixels at that size is left out. Torch's global generator is not used.

    Args:
        starts: Number of poses in which a camera is tried.
        training: The training, whose cameras are refined. Without the exposures that it learns, a dark photograph would
            seem lost.
    """

    name = "lost_cameras"

    def __init__(self, starts: int, training: Training) -> None:
        refinement, split = training.component(CameraRefinement), training.scene.train
        assert refinement is not None
        self._refinement, self._exposure = refinement, training.component(AffineExposure)
        self._model, self._trainer, cameras = training.model, training.config.trainer, split.cameras
        self._factor = min(-(-max(cameras.width, cameras.height) // _SIDE), cameras.shortest_side)
        self._split = shrunk(split, self._factor)
        masks = map(split.mask, split.local_indices)
        comparable = [mask is None or bool(F.max_pool2d(mask[None].float(), self._factor).any()) for mask in masks]
        self._comparable = torch.tensor(split.all_gather(comparable))
        self._starts = starts

    def before_step(self, step: int) -> None:
        """Moves the cameras that were lost in earlier stages if a stage begins."""
        if step == 0 or all(stage.step != step for stage in self._trainer.stages):
            return
        # Each device would find slightly different poses, so the first process decides.
        lost = self.find() if processes.is_first() else []
        for camera in processes.gather_objects(lost)[0]:
            found = "but no better pose was found"
            if camera.twist is not None and camera.after is not None:
                self._refinement.set_pose(camera.index, camera.twist)
                degrees = math.degrees(camera.turned)
                found = f"a better pose was found {degrees:.0f} degrees away ({_decibels(camera.after):.1f} dB)"
            logger.info(
                "step %d: the camera of %s reproduces its image far worse than others (%.1f dB), %s",
                *(step, camera.name, _decibels(camera.before), found),
            )

    @torch.no_grad()
    def find(self) -> list[LostCamera]:
        """Finds lost cameras and, where there are any, better poses for them; changes neither cameras nor field.

        Returns:
            All cameras that are lost, the worst first.
        """
        renderer, refinement, split = self._model.renderer(few=True), self._refinement, self._split
        if self._exposure is not None:
            split = _without_exposure(split, self._exposure)
        images = composite_background(split.images.to(self._model.device), self._model.background)
        refined = refinement.refined()
        errors = self._errors(renderer, refined.shrunk(self._factor), images, range(len(images)))
        # Comparisons with NaN are False, so these views count neither as lost nor as reproduced.
        errors[~self._comparable.to(errors.device)] = math.nan
        limit = _LOST * errors.nanmedian()
        lost, reproduced = (errors > limit).nonzero()[:, 0], errors <= limit
        found = []
        for index in lost[errors[lost].argsort(descending=True)].tolist():
            copies = partial(refinement.copies, index, shrink=self._factor, pose_lr=_RATE, steps=_STEPS)
            tried = copies(self._starting_twists(index, reproduced))
            reached = self._errors(renderer, tried.refined(), images, [index] * self._starts)
            tried = copies(tried.twists[reached.argsort()[:_PROMISING]])
            same = [index] * len(tried.twists)
            masks = None if split.masks is None else split.masks[same]
            repeated = Split(split.images[same], split.cameras[same], tuple(map(str, range(len(same)))), masks)
            fit_poses(tried, self._model, self._trainer, repeated)
            reached = self._errors(renderer, tried.refined(), images, same)
            best, camera = int(reached.argmin()), LostCamera(index, split.names[index], float(errors[index]))
            after = float(reached[best])
            if after < _FOUND * camera.before:
                turned = turning_angles(refined.c2w[index, None, :3, :3], tried.refined().c2w[best, None, :3, :3])
                camera = replace(camera, after=after, turned=float(turned), twist=tried.twists[best].clone().cpu())
            found.append(camera)
        return found

    def _starting_twists(self, index: int, reproduced: Tensor) -> Tensor:
        """Returns motions (K, 6): half around the given pose, half to the poses of the ``reproduced`` cameras."""
        refinement = self._refinement
        others, poses = refinement.twists[reproduced], refinement.refined().c2w[reproduced]
        generator = torch.Generator().manual_seed(index)
        at_others = self._starts // 2
        count = self._starts - at_others
        wider = torch.tensor(_SPREADS).repeat(-(-count // len(_SPREADS)))[:count, None].to(others)
        drawn = torch.randn(count, 6, generator=generator).to(others)
        about_given = others.mean(dim=0) + wider * others.std(dim=0, correction=0) * drawn
        # With more starts than cameras, several are near each camera, all but the first rotated about the centre.
        chosen = evenly_spaced(min(at_others, len(poses)), len(poses))
        aside = torch.zeros(at_others, 6)
        aside[len(chosen) :, :3] = _ASIDE * torch.randn(at_others - len(chosen), 3, generator=generator)
        towards = refinement.twists_towards(index, poses[[chosen[n % len(chosen)] for n in range(at_others)]])
        towards = log_se3(compose(exp_se3(aside.to(towards)), exp_se3(towards)))
        return torch.cat((about_given, towards))

    def _errors(self, renderer: FieldRenderer, cameras: Cameras, images: Tensor, indices: Sequence[int]) -> Tensor:
        """Returns the mean squared errors (K,) between the views of K cameras and the images of these indices."""
        errors = []
        for camera, index in enumerate(indices):
            rgb = renderer.view(cameras, camera).rgb
            error = (rgb - images[index, : rgb.shape[0], : rgb.shape[1]]).square().mean(dim=-1)
            mask = self._split.mask(index, error.device)
            errors.append(error.mean() if mask is None else torch.where(mask, error, 0).sum() / mask.sum())
        return torch.stack(errors)


def _decibels(error: float) -> float:
    return -10 * math.log10(max(error, 1e-10))


def _without_exposure(split: Split, exposure: AffineExposure) -> Split:
    """Returns the training images in the colours that the field must have to reproduce them."""
    device = exposure.log_gain.device
    colors = (split.images[..., :3].to(device).float() / 255).flatten(1, 2)
    numbers = torch.arange(len(split), device=device).repeat_interleave(colors.shape[1])
    corrected = to_uint8(exposure.undo(colors.view(-1, 3), numbers)).view(split.images[..., :3].shape)
    return replace(split, images=torch.cat((corrected.cpu(), split.images[..., 3:]), dim=-1))


def shrunk(split: Split, factor: int) -> Split:
    """Downscales images by averaging squares of pixels, and adapts their cameras.

    A collective call if the split has a ``local_slice``; the result has all images.

    Args:
        split: N images and cameras. A downscaled pixel counts if all of its pixels do or, in an image without such
            pixels, if the share of its pixels that count is the largest. If only pixels that are cut off count, all do.
        factor: Side of the squares.
    """
    rgba = split.images.movedim(-1, 1)
    images = torch.stack(split.all_gather([_shrunk_image(image.float(), factor) for image in rgba]))
    masks = None
    if split.masks is not None:
        own = torch.zeros(len(split.local_indices), *images.shape[1:3], dtype=torch.bool)
        sizes = split.cameras.all_sizes()[split.local_slice or slice(None)].tolist()
        for small, mask, (width, height) in zip(own, split.masks, sizes, strict=True):
            share = F.avg_pool2d(mask[None, :height, :width].float(), factor)[0]
            small[: height // factor, : width // factor] = share >= min(1.0, float(share.max()))
        # Each mask would otherwise be pickled with the memory of all.
        masks = torch.stack(split.all_gather([small.clone() for small in own]))
    cameras = split.cameras.shrunk(factor)
    return replace(split, images=images, cameras=cameras, masks=masks, paths=None, extras={}, local_slice=None)


def _shrunk_image(rgba: Tensor, factor: int) -> Tensor:
    alpha = F.avg_pool2d(rgba[3:], factor)
    colors = F.avg_pool2d(rgba[:3] * rgba[3:], factor) / alpha.clamp(min=1e-6)
    return torch.cat((colors, alpha)).round().to(torch.uint8).permute(1, 2, 0)
