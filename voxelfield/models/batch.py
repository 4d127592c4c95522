"""Input and output of a model in a training step: pixels with the rays through them, and their renderings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import Rendering


@dataclass(eq=False)
class Batch:
    """Pixels of the training images, and the rays through them.

    Attributes:
        rays: R rays; the rays of each pixel are consecutive, so R is a multiple of P.
        rgba: (P, 4) the pixels' colours, float32 in [0, 1], straight alpha.
        pixels: (P,) int64, indices into the pixels of all images, each padded to the largest image.
        background: (P, 3) colours behind the pixels, float32; a component may replace them before the batch is
            rendered.
        patches: Number of square patches that the first pixels form, patch by patch and row by row.
        patch_size: Side of the patches in pixels.
        weights: (P,) float32, factors on the pixels' squared errors; None: all are 1. See :meth:`weigh`.
        look_up: Returns the data of a name for pixels (P,), as :meth:`__getitem__` does.
        images_of: Returns the images of pixels (P,).
    """

    rays: Rays
    rgba: Tensor
    pixels: Tensor
    background: Tensor
    patches: int = 0
    patch_size: int = 1
    weights: Tensor | None = None
    look_up: Callable[[str, Tensor], Tensor] | None = field(default=None, repr=False)
    images_of: Callable[[Tensor], Tensor] = field(default=torch.zeros_like, repr=False)

    @property
    def rays_per_pixel(self) -> int:
        """Number of rays per pixel."""
        return len(self.rays) // max(self.rgba.shape[0], 1)

    @cached_property
    def images(self) -> Tensor:
        """(P,) int64, the index of the image to which each pixel belongs."""
        return self.images_of(self.pixels)

    @cached_property
    def truth(self) -> Tensor:
        """(P, 3) the pixels' colours over :attr:`background`, constant even where that is learned."""
        rgb, alpha = self.rgba.split((3, 1), dim=1)
        return rgb * alpha + self.background.detach() * (1 - alpha)

    def __getitem__(self, name: str) -> Tensor:
        """Returns further data of the pixels, (P, ...), in the dtype of the data.

        Args:
            name: Name of data for each image or for each pixel (:attr:`voxelfield.datasets.scene.Split.extras`), such
                as ``"time"`` or ``"depth"``. Those for each pixel are read by all processes that train together.

        Raises:
            KeyError: The images carry no data of that name; the message lists what there is.
        """
        if self.look_up is None:
            raise KeyError(f"the training images carry no {name!r}")
        return self.look_up(name, self.pixels)

    def weigh(self, factors: Tensor) -> None:
        """Multiplies the weights of the pixels' squared errors by factors (P,); for :meth:`Component.prepare`."""
        self.weights = factors if self.weights is None else self.weights * factors

    def for_rays(self, values: Tensor) -> Tensor:
        """Repeats values (P, ...) of pixels for each of their rays, giving (R, ...)."""
        return values.repeat_interleave(self.rays_per_pixel, dim=0)


@dataclass(eq=False)
class Outputs:
    """A model's renderings of a batch.

    On CUDA, rays from ``rendering.rays_kept`` on did not fit, and rows of ``rendering.samples`` from the last offset on
    are unused. Losses must exclude both. Their numbers stay on the device, because reading them would synchronise.

    Attributes:
        rendering: The R rays, rendered.
        rgb: (R, 3) colours of the rays without background, as the cameras of their images see them; equal to
            ``rendering.rgb``, unless a component corrects them.
        pixels: (P, 3) the pixels' colours over the background.
        field_truth: (P, 3) the true colours before the cameras' corrections, for comparison with colours of the field
            itself; equal to ``batch.truth``, unless a component corrects them.
        field: The field that was rendered, for losses on its features or at other points.
    """

    rendering: Rendering
    rgb: Tensor
    pixels: Tensor
    field_truth: Tensor
    field: RadianceField

    @property
    def ray_count(self) -> Tensor:
        """Number of rays that fit, () int64, at least 1 so that it can be a divisor."""
        return self.rendering.rays_kept.clamp(min=1)

    def mean_over_rays(self, values: Tensor) -> Tensor:
        """Returns the mean of values (R,) over the rays that fit."""
        counts = torch.arange(values.shape[0], device=values.device) < self.rendering.rays_kept
        return torch.where(counts, values, 0.0).sum() / self.ray_count

    def zero_unused(self, values: Tensor) -> Tensor:
        """Returns values (M, ...) of samples, with zeros in unused rows."""
        rows = torch.arange(values.shape[0], device=values.device).view(-1, *[1] * (values.dim() - 1))
        return torch.where(rows < self.rendering.samples.ray_offsets[-1], values, 0.0)


def columns_and_rows(pixels: Tensor, width: int, height: int) -> Tensor:
    """Returns where pixels (P,) of images, each padded to the size of the largest, lie in theirs, (P, 2) int64."""
    return torch.stack((pixels % width, pixels // width % height), dim=1)


def background_for(kind: str, rays: int, device: torch.device) -> Tensor:
    """Returns backgrounds (R, 3): ``random`` in each row, ``white`` or ``black``."""
    if kind == "random":
        return torch.rand(rays, 3, device=device)
    return torch.full((rays, 3), 1.0 if kind == "white" else 0.0, device=device)
