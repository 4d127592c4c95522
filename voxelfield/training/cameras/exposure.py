"""Exposure and white balance of photographs, learned per training image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield.models.batch import Batch, Outputs, over
from voxelfield.models.part import Part

# A camera changes gains far more than offsets. Measured in this unit, offsets learn ten times more slowly and are more
# strongly regularised. Otherwise they would absorb half of the gain where a scene has little contrast.
_OFFSET_UNIT = 0.1


class AffineExposure(nn.Module):
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


class ExposureCorrection(Part):
    """Learns an :class:`AffineExposure` along with the field.

    Args:
        exposure: The corrections, on the device.
        lr: Their learning rate.
        weight: Weight of their penalty; 0 for none.

    Attributes:
        exposure: As given.
    """

    name = "exposure"

    def __init__(self, exposure: AffineExposure, lr: float, weight: float) -> None:
        self.exposure = exposure
        self._lr = lr
        self._weight = weight

    def adjust(self, outputs: Outputs, batch: Batch) -> None:
        """Applies the corrections of the pixels' images to the rendering, and undoes them in the truth of the field."""
        rgb, alpha = batch.rgba[:, :3], batch.rgba[:, 3:]
        outputs.rgb = self.exposure(outputs.rgb, outputs.rendering.opacity, batch.images)
        outputs.field_truth = over(self.exposure.undo(rgb, batch.images), alpha, batch.background.detach())

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the penalty."""
        return {"exposure": self._weight * self.exposure.penalty()} if self._weight > 0 else {}

    def param_groups(self) -> Mapping[str, tuple[Sequence[nn.Parameter], float]]:
        """Returns the gains and offsets."""
        return {"exposure": (list(self.exposure.parameters()), self._lr)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the gains and offsets."""
        return self.exposure.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state has another number of images."""
        if len(state["offset"]) != len(self.exposure.offset):
            raise ValueError(
                f"scene must have {len(state['offset'])} training images, one for each saved exposure, got "
                f"{len(self.exposure.offset)}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads gains and offsets."""
        self.exposure.load_state_dict(state)
