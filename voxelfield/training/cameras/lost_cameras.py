"""Recovery of cameras that refinement has lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import evenly_spaced
from voxelfield.models.model import Model
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.images import composite_background
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.render import View
from voxelfield.rendering.rigid import compose, exp_se3, log_se3, turning_angles
from voxelfield.training.cameras.camera_refinement import CameraRefinement
from voxelfield.training.cameras.exposure import AffineExposure
from voxelfield.training.cameras.view_refinement import FINAL_FACTOR, fit_poses
from voxelfield.training.config import TrainerConfig

_SIDE = 64
"""Largest length in pixels of the longer side of the compared images."""

_LOST = 4.0
"""Ratio to the median error above which a camera counts as lost: 6 dB."""

_FOUND = 0.5
"""Ratio to its previous error that a camera must reach to be moved: 3 dB."""

_SPREADS = (1.0, 2.0, 4.0)
"""Spreads of the starting poses, in standard deviations of the motions of the other cameras."""

_ASIDE = 0.25
"""Standard deviation in radians, about each axis, of the rotations applied to the poses of other cameras."""

_PROMISING = 8
_STEPS = 150
_RATE = 1e-2


@dataclass(frozen=True, eq=False)
class LostCamera:
    """A camera that was lost, and the result of the search for it.

    Attributes:
        index: Number of the camera.
        name: Name of its image.
        before: Mean squared error of its downscaled image before the search.
        after: The same error at the new pose; None if no better pose was found.
        turned: Angle between the old and the new orientation, radians.
        twist: (6,) motion to the new pose, as in :attr:`CameraRefinement.twists`; None if no better pose was found.
    """

    index: int
    name: str
    before: float
    after: float | None = None
    turned: float = 0.0
    twist: Tensor | None = None

    def __str__(self) -> str:
        """Returns a description for the log."""
        before, *after = (
            f"{-10 * math.log10(max(x, 1e-10)):.1f} dB" for x in (self.before, self.after) if x is not None
        )
        told = f"the camera of {self.name} reproduces its image far worse than others ({before})"
        if not after:
            return f"{told}, but no better pose was found"
        return f"{told}: a better pose was found {math.degrees(self.turned):.0f} degrees away ({after[0]})"


class LostCameras:
    """Searches for cameras whose images the field does not reproduce, and for poses from which it does.

    Gradients lead a camera to its place from up to about 20 degrees away. A camera that was further off, or that was
    misled by the fog of the first steps, gets stuck in a local minimum, with an error far above that of the others.
    Such a camera is tried in many poses against the field, which the other cameras have shaped: random poses around the
    given one, as far away as the other cameras have moved, and further; and the poses of the other cameras. The best
    few are refined, and the best of these is used.

    Images are compared at about 64 pixels, where details neither help nor mislead; their shorter side is not reduced
    below one pixel. A view without valid pixels at that size is left out. Torch's global generator is not used.

    Args:
        split: Training images, and cameras as given.
        trainer: Settings of sampling and of the averaging of pixels.
        starts: Number of poses in which a camera is tried.
    """

    def __init__(self, split: Split, trainer: TrainerConfig, starts: int) -> None:
        cameras = split.cameras
        self._factor = min(-(-max(cameras.width, cameras.height) // _SIDE), cameras.shortest_side)
        self._split = shrunk(split, self._factor)
        self._comparable = torch.tensor([_has_pixels(split.mask(index), self._factor) for index in range(len(split))])
        self._trainer = trainer
        self._starts = starts

    @torch.no_grad()
    def find(
        self,
        refinement: CameraRefinement,
        model: Model,
        exposure: AffineExposure | None = None,
    ) -> list[LostCamera]:
        """Finds lost cameras and, where there are any, better poses for them; changes neither cameras nor field.

        Args:
            refinement: The training cameras.
            model: The model.
            exposure: Learned exposures of the training images, without which a dark photograph would seem lost.

        Returns:
            All cameras that are lost, the worst first.
        """
        background, render_view = model.background, model.renderer().view
        split = self._split if exposure is None else _without_exposure(self._split, exposure)
        images = composite_background(split.images.to(background.device), background)
        refined = refinement.refined()
        errors = self._errors(render_view, refined.shrunk(self._factor), images, range(len(images)))
        # Comparisons with NaN are False, so these views count neither as lost nor as kept.
        errors[~self._comparable.to(errors.device)] = math.nan
        limit = _LOST * errors.nanmedian()
        lost, kept = (errors > limit).nonzero()[:, 0], errors <= limit
        found = []
        for index in lost[errors[lost].argsort(descending=True)].tolist():
            copies = partial(
                refinement.copies,
                index,
                shrink=self._factor,
                steps=_STEPS,
                pose_lr=_RATE,
                final_factor=FINAL_FACTOR,
            )
            tried = copies(self._starting_twists(refinement, index, kept))
            reached = self._errors(render_view, tried.refined(), images, [index] * self._starts)
            tried = copies(tried.twists[reached.argsort()[:_PROMISING]])
            same = [index] * len(tried.twists)
            repeated = Split(
                split.images[same],
                split.cameras[same],
                tuple(map(str, range(len(same)))),
                None if split.masks is None else split.masks[same],
            )
            fit_poses(tried, model, self._trainer, repeated, _STEPS)
            reached = self._errors(render_view, tried.refined(), images, same)
            best, camera = int(reached.argmin()), LostCamera(index, split.names[index], float(errors[index]))
            after = float(reached[best])
            if after < _FOUND * camera.before:
                turned = turning_angles(refined.c2w[index, None, :3, :3], tried.refined().c2w[best, None, :3, :3])
                camera = replace(camera, after=after, turned=float(turned), twist=tried.twists[best].clone())
            found.append(camera)
        return found

    def _starting_twists(self, refinement: CameraRefinement, index: int, kept: Tensor) -> Tensor:
        """Returns motions (K, 6): half around the given pose, half to poses of the cameras ``kept``, (M,) bool."""
        others, places = refinement.twists[kept], refinement.refined().c2w[kept]
        generator = torch.Generator().manual_seed(index)
        at_others = self._starts // 2
        count = self._starts - at_others
        wider = torch.tensor(_SPREADS).repeat(-(-count // len(_SPREADS)))[:count, None].to(others)
        drawn = torch.randn(count, 6, generator=generator).to(others)
        about_given = others.mean(dim=0) + wider * others.std(dim=0, correction=0) * drawn
        # With more poses than cameras, several are near each camera, all but the first rotated about the centre.
        chosen = evenly_spaced(min(at_others, len(places)), len(places))
        aside = torch.zeros(at_others, 6)
        aside[len(chosen) :, :3] = _ASIDE * torch.randn(at_others - len(chosen), 3, generator=generator)
        towards = refinement.twists_towards(index, places[[chosen[n % len(chosen)] for n in range(at_others)]])
        towards = log_se3(compose(exp_se3(aside.to(towards)), exp_se3(towards)))
        return torch.cat((about_given, towards))

    def _errors(
        self, render_view: Callable[[Cameras, int], View], cameras: Cameras, images: Tensor, indices: Sequence[int]
    ) -> Tensor:
        """Returns the mean squared errors (K,) of the views of K cameras, as those of some of the images."""
        errors = []
        for camera, index in enumerate(indices):
            rgb = render_view(cameras, camera).rgb
            error = (rgb - images[index, : rgb.shape[0], : rgb.shape[1]]).square().mean(dim=-1)
            mask = self._split.mask(index, error.device)
            errors.append(error.mean() if mask is None else torch.where(mask, error, 0).sum() / mask.sum())
        return torch.stack(errors)


def _without_exposure(split: Split, exposure: AffineExposure) -> Split:
    """Returns the training images in the colours that the field must have to reproduce them."""
    device = exposure.log_gain.device
    colors = (split.images[..., :3].to(device).float() / 255).flatten(1, 2)
    numbers = torch.arange(len(split), device=device).repeat_interleave(colors.shape[1])
    corrected = to_uint8(exposure.undo(colors.view(-1, 3), numbers)).view(split.images[..., :3].shape)
    return replace(split, images=torch.cat((corrected.cpu(), split.images[..., 3:]), dim=-1))


def _has_pixels(mask: Tensor | None, factor: int) -> bool:
    """Returns whether a view has valid pixels left when it is downscaled by a factor."""
    return mask is None or bool(F.max_pool2d(mask[None].float(), factor).any())


def shrunk(split: Split, factor: int) -> Split:
    """Downscales images by averaging squares of pixels, and adapts their cameras.

    Args:
        split: N images and cameras. A downscaled pixel counts if all of its pixels do or, in an image without such
            pixels, if the share of its pixels that count is the largest. If only pixels that are cut off count, all do.
        factor: Side of the squares.
    """
    images = torch.stack([_shrunk_image(image, factor) for image in split.images])
    masks = None
    if split.masks is not None:
        masks = torch.zeros(images.shape[:3], dtype=torch.bool)
        for small, mask, (width, height) in zip(masks, split.masks, split.cameras.all_sizes().tolist(), strict=True):
            share = F.avg_pool2d(mask[None, :height, :width].float(), factor)[0]
            small[: height // factor, : width // factor] = share >= min(1.0, float(share.max()))
    return replace(split, images=images, cameras=split.cameras.shrunk(factor), masks=masks, paths=None, extras={})


def _shrunk_image(image: Tensor, factor: int) -> Tensor:
    rgba = image.permute(2, 0, 1).float()
    alpha = F.avg_pool2d(rgba[3:], factor)
    colors = F.avg_pool2d(rgba[:3] * rgba[3:], factor) / alpha.clamp(min=1e-6)
    return torch.cat((colors, alpha)).round().to(torch.uint8).permute(1, 2, 0)
