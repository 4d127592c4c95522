"""Exposure and white balance of photographs, learned per training image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import NotNegative, Positive
from voxelfield.fields.environment import environment_of
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.component import Component

# A camera changes gains far more than offsets. Measured in this unit, offsets learn ten times more slowly and are more
# strongly regularised. Otherwise they would absorb half of the gain where a scene has little contrast.
_OFFSET_UNIT = 0.1


@dataclass(frozen=True)
class ExposureSettings(ComponentSettings):
    """Settings of :class:`AffineExposure`.

    Attributes:
        exposure: Correction of exposure and white balance learned for each training image: ``none``, or ``affine``,
            a gain and an offset for each channel (:class:`voxelfield.components.exposure.AffineExposure`).
        penalty: Squared deviation of the exposure corrections from the identity, with ``trainer.exposure=affine``.
        exposure_lr: Learning rate of the exposures of training images, with ``trainer.exposure``, and of the cameras'
            ``trainer.vignetting`` and ``trainer.response``.
    """

    name = "exposure"
    # Corrections apply to an environment too. Terms are added up in the order of components.
    after = ("environment", "depth", "structure")
    exposure: Literal["none", "affine"] = key("trainer.exposure", "none", off="none", fixed=True)
    penalty: NotNegative = key("trainer.loss.exposure", 1e-3, idle=True)
    exposure_lr: Positive = key("optimizer.exposure_lr", 0.01)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        return [AffineExposure(len(training.scene.train)).learned(training, self.exposure_lr, self.penalty)]


class Correction(nn.Module, Component):  # type: ignore[misc]
    """Maps the field's colours to the colours of photographs, and is learned along with the field.

    Several join a step in the order in which light passes them.

    Attributes:
        name: Key of its state in checkpoints, and name of its penalty among the loss terms.
        environment: Whether the background of the field was captured too
            (:class:`voxelfield.components.environment.EnvironmentBackground`), so that the correction applies to it.
    """

    environment = False
    _lr, _weight = 0.0, 0.0
    _behind: Tensor | None = None

    def learned(self, training: Training, lr: float, weight: float) -> Correction:
        """Returns the correction on the device of a training, with its learning rate and the weight of its penalty."""
        self.environment = environment_of(training.model.field) is not None
        self._lr, self._weight = lr, weight
        return self.to(training.model.device)

    def photographed(self, rgb: Tensor, opacity: Tensor, batch: Batch) -> Tensor:
        """Returns the colours (R, 3) of a batch's rays, of opacities (R,), as they appear in their images."""
        raise NotImplementedError

    def penalty(self) -> Tensor:
        """Returns the squared deviation of the corrections from the identity, ()."""
        raise NotImplementedError

    def prepare(self, batch: Batch) -> None:
        """Applies the correction to an environment."""
        if self.environment:
            behind = batch.background
            self._behind = behind.detach()
            batch.background = self.photographed(behind, torch.ones_like(behind[:, 0]), batch)

    def adjust(self, outputs: Outputs, batch: Batch) -> None:
        """Applies the correction to the rendering, and moves the truth of the field by as much in the other direction.

        Not every correction has an inverse in closed form. The colours towards which the field must move differ from
        the true ones by as much as those of the field differ from the corrected ones, which is exact where the
        corrected ones are right.
        """
        rgb, opacity = outputs.rgb, outputs.rendering.opacity
        outputs.rgb = self.photographed(rgb, opacity, batch)
        with torch.no_grad():
            change = rgb - outputs.rgb
            if self._behind is not None:
                change = change + (1 - opacity)[:, None] * batch.for_rays(self._behind - batch.background)
            change = change.view(len(batch.rgba), batch.rays_per_pixel, 3).mean(dim=1)
            outputs.field_truth = (outputs.field_truth + change).clamp(0, 1)

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the penalty."""
        return {self.name: self._weight * self.penalty()} if self._weight > 0 else {}

    def param_groups(self) -> Mapping[str, tuple[Sequence[nn.Parameter], float]]:
        """Returns the parameters of the correction."""
        return {self.name: (list(self.parameters()), self._lr)}


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
    """

    name = "exposure"

    def __init__(self, images: int) -> None:
        super().__init__()
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
        """Returns the colours of a batch's rays as they appear in their images."""
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
        """Returns the mean square of the gains' logarithms plus the mean square of the offsets in tenths, ()."""
        log_gain, offset = self._centred()
        return log_gain.square().mean() + offset.square().mean()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state has another number of images."""
        for name, own in self.state_dict().items():
            if len(state[name]) != len(own):
                raise ValueError(
                    f"scene must have {len(state[name])} training images, one for each saved exposure, got {len(own)}"
                )

    def _centred(self) -> tuple[Tensor, Tensor]:
        return self.log_gain - self.log_gain.mean(dim=0), self.offset - self.offset.mean(dim=0)
