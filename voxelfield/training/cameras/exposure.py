"""Exposure and white balance of photographs, learned per training image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import ops
from voxelfield.models.batch import Batch, Outputs, columns_and_rows
from voxelfield.models.part import Part
from voxelfield.rendering.cameras import Cameras

# A camera changes gains far more than offsets. Measured in this unit, offsets learn ten times more slowly and are more
# strongly regularised. Otherwise they would absorb half of the gain where a scene has little contrast.
_OFFSET_UNIT = 0.1

# Vertices of a bilateral grid along the columns, the rows and the luminance: the defaults of gsplat.
_VERTICES = (16, 16, 8)


class Correction(nn.Module):
    """Maps the field's colours to those that photographs show."""

    def photographed(self, rgb: Tensor, opacity: Tensor, batch: Batch) -> Tensor:
        """Returns the colours (R, 3) of a batch's rays, of opacities (R,), as they appear in their images."""
        raise NotImplementedError

    def penalty(self) -> Tensor:
        """Returns how far the corrections are from what is expected, ()."""
        raise NotImplementedError

    def centre(self) -> None:
        """Makes the mean of the corrections the identity, unless it always is."""


class AffineExposure(Correction):
    r"""A gain and an offset per colour channel for each training image.

    The colour :math:`c` that the field emits along a ray of opacity :math:`o` becomes
    :math:`e^{l_i} c + 0.1\, o\, b_i` in image i, where the means of :math:`l_i` and :math:`b_i` over the images are
    subtracted. The geometric mean of the gains is therefore always 1 and the mean of the offsets 0, and the field keeps
    the colours of an average photograph. Before training the correction is exactly the identity. It applies to encoded
    image values, and to an environment, but not to another background, which no camera has captured.

    Urban Radiance Fields (Rematas et al. 2022, on exposure compensation) multiplies the rendered colours by a 3 x 3
    matrix per image, which a network decodes from a latent code; the published code of 3D Gaussian Splatting (Kerbl et
    al. 2023) learns a 3 x 4 matrix per image. Here these matrices are diagonal, apart from the offset: exposure time,
    aperture and white balance change gains and cannot mix the channels. The appearance codes of NeRF in the Wild
    (Martin-Brualla et al. 2021) and Block-NeRF (Tancik et al. 2022) are inputs of the colour network instead. They can
    explain more, including effects that are not properties of the camera.

    Args:
        images: Number of training images N.

    Attributes:
        log_gain: (N, 3) logarithms of gains.
        offset: (N, 3) offsets, in tenths of the range of colours.

    Raises:
        ValueError: ``images`` is below 1.
    """

    def __init__(self, images: int) -> None:
        super().__init__()
        if images < 1:
            raise ValueError(f"images must be at least 1, got {images}")
        self.log_gain = nn.Parameter(torch.zeros(images, 3))
        self.offset = nn.Parameter(torch.zeros(images, 3))

    def corrections(self) -> tuple[Tensor, Tensor]:
        """Returns the images' gains (N, 3), positive, and offsets (N, 3), for colours in [0, 1]; differentiable."""
        log_gain, offset = self._centred()
        return log_gain.exp(), _OFFSET_UNIT * offset

    def forward(self, rgb: Tensor, opacity: Tensor, images: Tensor) -> Tensor:
        """Returns the colours of rays as they appear in their images.

        Args:
            rgb: (R, 3) float32, emitted colours without background; the rays of a pixel are consecutive.
            opacity: (R,) float32.
            images: (P,) int64, the image of each pixel, in [0, N); R is a multiple of P.

        Returns:
            (R, 3) float32 without background, differentiable with respect to everything but ``images``.
        """
        rays_per_pixel = rgb.shape[0] // max(images.shape[0], 1)
        # index_select instead of brackets, because on CUDA the backward pass of the latter sorts the indices.
        gain, offset = (values.index_select(0, images)[:, None] for values in self.corrections())
        rays = (images.shape[0], rays_per_pixel, -1)
        return (gain * rgb.view(rays) + offset * opacity.view(rays)).view(rgb.shape)

    def photographed(self, rgb: Tensor, opacity: Tensor, batch: Batch) -> Tensor:
        """Returns the colours (R, 3) of a batch's rays as they appear in their images."""
        return self(rgb, opacity, batch.images)

    @torch.no_grad()
    def undo(self, rgb: Tensor, images: Tensor) -> Tensor:
        """Returns the colours that the field must have to reproduce given image colours.

        Args:
            rgb: (P, 3) float32, straight-alpha colours of pixels.
            images: (P,) int64, the image of each pixel, in [0, N).

        Returns:
            (P, 3) float32 in [0, 1], without gradient.
        """
        gain, offset = (values.index_select(0, images) for values in self.corrections())
        # In an image that is nearly black, even little noise would give colours outside the field's range.
        return ((rgb - offset) / gain).clamp(0, 1)

    def penalty(self) -> Tensor:
        """Returns the mean square of the gains' logarithms plus that of the offsets in tenths, ()."""
        log_gain, offset = self._centred()
        return log_gain.square().mean() + offset.square().mean()

    def _centred(self) -> tuple[Tensor, Tensor]:
        return self.log_gain - self.log_gain.mean(dim=0), self.offset - self.offset.mean(dim=0)


class BilateralExposure(Correction):
    r"""A bilateral grid of affine colour transforms for each training image: exposure and tone that vary within it.

    A grid has 16 x 16 vertices across its image and 8 along the luminance. At the place of a pixel and the luminance of
    a ray, trilinear interpolation gives a 3 x 3 matrix D and an offset b, and the colour :math:`c` that the field emits
    along the ray of opacity :math:`o` becomes :math:`c + D c + 0.1\, o\, b`. All rays of a pixel are placed at its
    centre. After each step, :meth:`centre` subtracts the mean over the images at each vertex: the mean of all grids is
    the identity, and the field keeps the colours of an average photograph. What all images share, such as the vignette
    of their lens, is therefore not corrected. Before training, the correction is exactly the identity. It applies to
    the same values as :class:`AffineExposure`.

    The grids are those of "Bilateral Guided Radiance Field Processing" (Wang et al. 2024), in the size that gsplat
    uses; there, their mean is free.

    Args:
        cameras: The N cameras of the training images, for the sizes of these.

    Attributes:
        grids: (N, 16, 16, 8, 12) the rows of D and, at the end of each, the element of b, in tenths of the range of
            colours; vertex by vertex along columns, rows and luminance. About 0.6 MB of memory for each image in
            training, with gradients and moments.

    Raises:
        ValueError: There is no camera.
    """

    sizes: Tensor

    def __init__(self, cameras: Cameras) -> None:
        super().__init__()
        if len(cameras) < 1:
            raise ValueError("cameras must be at least 1, got 0")
        self._width, self._height = cameras.width, cameras.height
        self.register_buffer("sizes", cameras.all_sizes().float(), persistent=False)
        self.grids = nn.Parameter(torch.zeros(len(cameras), *_VERTICES, 12))

    def corrections(self) -> Tensor:
        """Returns the images' colour transforms (N, 16, 16, 8, 3, 4), for colours in [0, 1]; differentiable."""
        transforms = self.grids.unflatten(-1, (3, 4))
        return transforms * transforms.new_tensor([1, 1, 1, _OFFSET_UNIT]) + torch.eye(3, 4).to(transforms)

    def forward(self, rgb: Tensor, opacity: Tensor, pixels: Tensor) -> Tensor:
        """Returns the colours of rays as they appear in their images.

        Args:
            rgb: (R, 3) float32, emitted colours without background; the rays of a pixel are consecutive.
            opacity: (R,) float32.
            pixels: (P,) int64, the pixels' numbers among those of all images, each with the room of the largest image;
                R is a multiple of P.

        Returns:
            (R, 3) float32 without background, differentiable with respect to everything but ``pixels``.
        """
        columns = _VERTICES[0]
        images = pixels // (self._width * self._height)
        corners = columns_and_rows(pixels, self._width, self._height)
        x, y = ((corners + 0.5) / self.sizes.index_select(0, images)).unbind(dim=1)
        # One grid of all images side by side. The centre of a pixel is too far from the edge of its image for a
        # rounding error to reach the next image.
        x = (images * columns + x * (columns - 1)) / (len(self.grids) * columns - 1)
        places = torch.stack((x, y), dim=1).repeat_interleave(rgb.shape[0] // max(pixels.shape[0], 1), dim=0)
        red, green, blue = rgb.unbind(dim=1)
        luminance = 0.299 * red + 0.587 * green + 0.114 * blue  # of encoded colours, by ITU-R BT.601
        points = torch.cat((places.to(rgb), luminance.clamp(0, 1)[:, None]), dim=1)
        change = ops.sample_trilinear(self.grids.flatten(0, 1), points).view(-1, 3, 4)
        return rgb + (change * torch.cat((rgb, _OFFSET_UNIT * opacity[:, None]), dim=1)[:, None]).sum(dim=-1)

    def photographed(self, rgb: Tensor, opacity: Tensor, batch: Batch) -> Tensor:
        """Returns the colours (R, 3) of a batch's rays as they appear in their images."""
        return self(rgb, opacity, batch.pixels)

    def penalty(self) -> Tensor:
        """Returns the mean squared difference between neighbouring vertices, summed over the three axes, ()."""
        return _TotalVariation.apply(self.grids)

    @torch.no_grad()
    def centre(self) -> None:
        """Subtracts the mean of all images at each vertex."""
        self.grids.sub_(self.grids.mean(dim=0))


class _TotalVariation(torch.autograd.Function):
    """Mean squared differences along the inner axes of grids (N, X, Y, L, C), with a gradient made in the same pass.

    Composed of torch's differentiable functions, it would read and write thrice as many tensors of the grids' size.
    """

    @staticmethod
    def forward(ctx: Any, grids: Tensor) -> Tensor:
        gradient, total = torch.zeros_like(grids), grids.new_zeros(())
        for axis in (1, 2, 3):
            change = grids.diff(dim=axis)
            total += change.square().mean()
            pairs, factor = change.shape[axis], 2 / change.numel()
            gradient.narrow(axis, 1, pairs).add_(change, alpha=factor)
            gradient.narrow(axis, 0, pairs).sub_(change, alpha=factor)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        return grad * gradient


Exposure = AffineExposure | BilateralExposure
"""The corrections of the training images."""


class ColorCorrection(Part):
    """Learns a :class:`Correction` along with the field.

    Several join a step in the order in which light passes them.

    Args:
        correction: The correction, on the device.
        lr: Its learning rate.
        weight: Weight of its penalty; 0 for none.
        environment: Whether what is behind the field was captured too
            (:class:`voxelfield.training.environment.EnvironmentBackground`), so that the correction applies to it.
    """

    def __init__(self, correction: Correction, lr: float, weight: float, *, environment: bool = False) -> None:
        self._correction, self._lr, self._weight = correction, lr, weight
        self._environment = environment
        self._behind: Tensor | None = None

    def prepare(self, batch: Batch) -> None:
        """Applies the correction to an environment."""
        if self._environment:
            behind = batch.background
            self._behind = behind.detach()
            batch.background = self._correction.photographed(behind, torch.ones_like(behind[:, 0]), batch)

    def adjust(self, outputs: Outputs, batch: Batch) -> None:
        """Applies the correction to the rendering, and moves the truth of the field by as much in the other direction.

        Not every correction has an inverse in closed form. The colours towards which the field must move differ from
        the true ones by as much as those of the field differ from the corrected ones, which is exact where the
        corrected ones are right.
        """
        rgb, opacity = outputs.rgb, outputs.rendering.opacity
        outputs.rgb = self._correction.photographed(rgb, opacity, batch)
        with torch.no_grad():
            change = rgb - outputs.rgb
            if self._behind is not None:
                change = change + (1 - opacity)[:, None] * batch.for_rays(self._behind - batch.background)
            change = change.view(len(batch.rgba), batch.rays_per_pixel, 3).mean(dim=1)
            outputs.field_truth = (outputs.field_truth + change).clamp(0, 1)

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the penalty."""
        return {self.name: self._weight * self._correction.penalty()} if self._weight > 0 else {}

    def after_step(self, step: Tensor) -> None:
        """Keeps the mean of the corrections at the identity."""
        self._correction.centre()

    def param_groups(self) -> Mapping[str, tuple[Sequence[nn.Parameter], float]]:
        """Returns the parameters of the correction."""
        return {self.name: (list(self._correction.parameters()), self._lr)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the correction."""
        return self._correction.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of the correction."""
        self._correction.load_state_dict(state)


class ExposureCorrection(ColorCorrection):
    """Learns an :data:`Exposure` along with the field.

    Args:
        exposure: The corrections of the training images, on the device.
        lr: As for :class:`ColorCorrection`.
        weight: As for :class:`ColorCorrection`.
        environment: As for :class:`ColorCorrection`.

    Attributes:
        exposure: As given.
    """

    name = "exposure"

    def __init__(self, exposure: Exposure, lr: float, weight: float, *, environment: bool = False) -> None:
        super().__init__(exposure, lr, weight, environment=environment)
        self.exposure = exposure

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state has another number of images."""
        for name, own in self.state_dict().items():
            if len(state[name]) != len(own):
                raise ValueError(
                    f"scene must have {len(state[name])} training images, one for each saved exposure, got {len(own)}"
                )
