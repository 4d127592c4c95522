"""Exposure and white balance of photographs, learned per training image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# A camera changes gains far more than offsets. Measured in this unit, offsets learn ten times more slowly and are more
# strongly regularised. Otherwise they would absorb half of the gain where a scene has little contrast.
_OFFSET_UNIT = 0.1


class AffineExposure(nn.Module):
    r"""A gain and an offset per colour channel for each training image.

    The colour :math:`c` that the field emits along a ray of opacity :math:`o` becomes
    :math:`e^{l_i} c + 0.1\, o\, b_i` in image i, where the means of :math:`l_i` and :math:`b_i` over the images are
    subtracted. The geometric mean of the gains is therefore always 1 and the mean of the offsets 0, and the field keeps
    the colours of an average photograph. Before training the correction is exactly the identity. It applies to encoded
    image values, and not to the background, which no camera has captured.

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
