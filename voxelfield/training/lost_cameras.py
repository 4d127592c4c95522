"""Finding the cameras again that refinement has lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.scene import Split
from voxelfield.fields.field import RadianceField
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import View
from voxelfield.rendering.rigid import compose, exp_se3, log_se3, turning_angles
from voxelfield.training.camera_refinement import CameraRefinement
from voxelfield.training.config import TrainerConfig
from voxelfield.training.evaluation import spread
from voxelfield.training.images import composite_background
from voxelfield.training.view_refinement import FINAL_FACTOR, fit_poses

_SIDE = 64
"""Most pixels of the longer side of the images that are compared."""

_LOST = 4.0
"""How many times the median error a camera has that counts as lost: 6 dB."""

_FOUND = 0.5
"""To which share of its error a camera must come to be moved: 3 dB."""

_SPREADS = (1.0, 2.0, 4.0)
"""How far starting poses lie apart, in standard deviations of what the other cameras have moved by."""

_ASIDE = 0.25
"""Standard deviation in radians, about each axis, of turns away from where other cameras are."""

_PROMISING = 8
_STEPS = 150
_RATE = 1e-2


@dataclass(frozen=True)
class Found:
    """A camera that was lost.

    Attributes:
        name: Of its image.
        before: Mean squared error of its small image before.
        after: The same from where it has been found; None: nowhere.
        turned: By how much it was turned, radians.
    """

    name: str
    before: float
    after: float | None
    turned: float

    def __str__(self) -> str:
        """Returns what a log says."""
        told = f"the camera of {self.name} shows its image far worse than others do ({_decibels(self.before)})"
        if self.after is None:
            return f"{told}, but no better pose was found"
        return f"{told}: found {math.degrees(self.turned):.0f} degrees away ({_decibels(self.after)})"


def _decibels(error: float) -> str:
    return f"{-10 * math.log10(max(error, 1e-10)):.1f} dB"


class LostCameras:
    """Looks for cameras whose images the field does not show, and for the poses from which it does.

    Gradients lead a camera to its place from about 20 degrees away; one that was further off, or that the fog of the
    first steps has led astray, rests where nothing near is better. Its image then is far worse than the others. Against
    a field which the other cameras have made, it is tried in many poses: at random about the given one, as far away as
    the others were found to have been, and further; and where the others are. The best few are refined, and the best of
    those is taken.

    Images are compared at 64 pixels or fewer, where details neither help nor mislead. Torch's random numbers stay.

    Args:
        split: Training images, and cameras as given.
        trainer: How rays are sampled and pixels are made of them.
        starts: Number of poses in which a camera is tried.
    """

    def __init__(self, split: Split, trainer: TrainerConfig, starts: int) -> None:
        cameras = split.cameras
        self._factor = min(-(-max(cameras.width, cameras.height) // _SIDE), cameras.width, cameras.height)
        self._split = shrunk(split, self._factor)
        self._trainer = trainer
        self._starts = starts

    @torch.no_grad()
    def find(
        self,
        refinement: CameraRefinement,
        field: RadianceField,
        occupancy: OccupancyGrid,
        render_view: Callable[[Cameras, int], View],
        background: Tensor,
    ) -> list[Found]:
        """Moves lost cameras to where they are found.

        Args:
            refinement: The training cameras; twists of those that are found are replaced.
            field: The field, which stays as it is.
            occupancy: Where to sample.
            render_view: Renders that field, as :meth:`voxelfield.FieldRenderer.view` does.
            background: (3,) what views are rendered over.

        Returns:
            All cameras that were lost, the worst first.
        """
        images = composite_background(self._split.images.to(background.device), background)
        small = refinement.refined().shrunk(self._factor)
        errors = torch.stack([self._error(render_view, small, index, images, index) for index in range(len(images))])
        lost = (errors > _LOST * errors.median()).nonzero()[:, 0]
        kept = errors <= _LOST * errors.median()
        found = []
        for index in lost[errors[lost].argsort(descending=True)].tolist():
            tried = self._copies(refinement, index, self._starting_twists(refinement, index, kept))
            promising = self._errors(render_view, tried, images, index).argsort()[:_PROMISING]
            tried = self._copies(refinement, index, tried.twists[promising])
            fit_poses(tried, field, occupancy, self._trainer, self._repeated(index, len(promising)), _STEPS)
            reached = self._errors(render_view, tried, images, index)
            best, pose = int(reached.argmin()), refinement.refined().c2w[index]
            name, before, after = self._split.names[index], float(errors[index]), float(reached[best])
            if not after < _FOUND * before:
                found.append(Found(name, before, None, 0.0))
                continue
            refinement.place(index, tried.twists[best])
            turned = turning_angles(pose[None, :3, :3], refinement.refined().c2w[index, None, :3, :3])
            found.append(Found(name, before, after, float(turned)))
        return found

    def _starting_twists(self, refinement: CameraRefinement, index: int, kept: Tensor) -> Tensor:
        """Returns motions (K, 6): half about the given pose, half to where cameras are that are not lost (M,) bool."""
        others, places = refinement.twists[kept], refinement.refined().c2w[kept]
        generator = torch.Generator().manual_seed(index)
        at_others = self._starts // 2
        count = self._starts - at_others
        wider = torch.tensor(_SPREADS).repeat(-(-count // len(_SPREADS)))[:count, None].to(others)
        drawn = torch.randn(count, 6, generator=generator).to(others)
        about_given = others.mean(dim=0) + wider * others.std(dim=0, correction=0) * drawn
        # More poses than cameras: several near each, all but the first turned about the centre.
        chosen = spread(min(at_others, len(places)), len(places))
        aside = torch.zeros(at_others, 6)
        aside[len(chosen) :, :3] = _ASIDE * torch.randn(at_others - len(chosen), 3, generator=generator)
        towards = refinement.twists_towards(index, places[[chosen[n % len(chosen)] for n in range(at_others)]])
        towards = log_se3(compose(exp_se3(aside.to(towards)), exp_se3(towards)))
        return torch.cat((about_given, towards))

    def _errors(
        self, render_view: Callable[[Cameras, int], View], tried: CameraRefinement, images: Tensor, index: int
    ) -> Tensor:
        """Returns the errors (K,) of copies of a camera."""
        cameras = tried.refined()
        return torch.stack([self._error(render_view, cameras, copy, images, index) for copy in range(len(cameras))])

    def _error(
        self, render_view: Callable[[Cameras, int], View], cameras: Cameras, camera: int, images: Tensor, index: int
    ) -> Tensor:
        error = (render_view(cameras, camera).rgb - images[index]).square().mean(dim=-1)
        mask = self._split.mask(index, error.device)
        return error.mean() if mask is None else torch.where(mask, error, 0).sum() / mask.sum()

    def _copies(self, refinement: CameraRefinement, index: int, twists: Tensor) -> CameraRefinement:
        return refinement.copies(index, twists, self._factor, steps=_STEPS, pose_lr=_RATE, final_factor=FINAL_FACTOR)

    def _repeated(self, index: int, count: int) -> Split:
        """Returns a camera's small image several times."""
        split, chosen = self._split, [index] * count
        names = tuple(str(copy) for copy in range(count))
        masks = None if split.masks is None else split.masks[chosen]
        return Split(split.images[chosen], split.cameras[chosen], names, masks)


def shrunk(split: Split, factor: int) -> Split:
    """Returns images in larger pixels, means of squares of the given ones, with cameras to match.

    Args:
        split: N images and cameras. A large pixel counts where all of its pixels do, or some of them if it is not so
            anywhere in the image.
        factor: Side of such a square.
    """
    images = torch.stack([_shrunk_image(image, factor) for image in split.images])
    masks = None if split.masks is None else torch.stack([_shrunk_mask(mask, factor) for mask in split.masks])
    return replace(split, images=images, cameras=split.cameras.shrunk(factor), masks=masks, paths=None)


def _shrunk_image(image: Tensor, factor: int) -> Tensor:
    rgba = image.permute(2, 0, 1).float()
    alpha = F.avg_pool2d(rgba[3:], factor)
    colors = F.avg_pool2d(rgba[:3] * rgba[3:], factor) / alpha.clamp(min=1e-6)
    return torch.cat((colors, alpha)).round().to(torch.uint8).permute(1, 2, 0)


def _shrunk_mask(mask: Tensor, factor: int) -> Tensor:
    share = F.avg_pool2d(mask[None].float(), factor)[0]
    return share >= min(1.0, float(share.max()))
