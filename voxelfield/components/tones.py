"""Vignetting and response of the cameras that took the photographs, learned for each camera."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxelfield.components.exposure import Correction
from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import NotNegative
from voxelfield.models.batch import Batch, columns_and_rows
from voxelfield.models.component import Component
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import View

# Pieces of a response curve. A power of two, so that the identity is exact.
_PIECES = 8
# Below this opacity a ray shows nothing whose colour could be found by a division.
_THINNEST = 1e-6


@dataclass(frozen=True)
class ToneSettings(ComponentSettings):
    """Settings of :class:`CameraTones`.

    Attributes:
        vignetting: Whether to learn how each camera darkens its images away from their middle
            (:class:`voxelfield.components.tones.CameraTones`).
        response: Whether to learn a curve for each camera and channel that maps the colours of the field, which are
            those of an average camera, to those of its images (the same class); for several cameras.
        penalty: Squared deviation of ``trainer.vignetting`` and ``trainer.response`` from the identity.
        exposure_lr: The rate at which exposures are learned.
    """

    name = "tones"
    after = ("exposure",)  # as light passes them
    vignetting: bool = key("trainer.vignetting", False, off=False, fixed=True)
    response: bool = key("trainer.response", False, off=False, fixed=True)
    penalty: NotNegative = key("trainer.loss.tones", 1e-3, idle=True)
    exposure_lr: float = key("optimizer.exposure_lr")

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        views = training.pixels.cameras
        known = distinct(views)
        if self.response and len(known) == 1:
            raise ValueError(
                "trainer.response must be false for photographs of a single camera, whose response the colours of the "
                "field contain, got true"
            )
        tones = CameraTones(known, views, vignetting=self.vignetting, response=self.response)
        return [tones.learned(training, self.exposure_lr, self.penalty)]


class CameraTones(Correction):
    r"""The vignetting and the response of each camera, as its photographs show them.

    Photographs of one size with the same intrinsics come from one camera. At the distance :math:`r` from its principal
    point, in halves of the image's diagonal, camera j darkens colours by
    :math:`v_j(r) = e^{a_j r^2 + b_j r^4 + c_j r^6}`, and then maps each channel by a curve :math:`f_j` of eight linear
    pieces with :math:`f_j(0) = 0`. The pieces' slopes are exponentials, so that curves rise; the mean of their
    logarithms over the cameras is subtracted, so that the field keeps the colours of an average camera. The colour
    :math:`c` that the field emits along a ray of opacity :math:`o` becomes :math:`o f_j(v_j(r)\, c / o)`. Before
    training, this is exactly the identity.

    Goldman and Chen (2005, "Vignette and exposure calibration and compensation") fit an even polynomial of the sixth
    degree to the vignetting, and a response common to all images; ADOP (Rückert et al. 2022) learns both for each
    camera, along with the scene. There they apply to linear light. Here they apply to encoded values, as exposures do;
    there the logarithm of the vignetting is only divided by the exponent of the encoding. That is why the polynomial is
    one of the logarithm, which cannot become negative either.

    As they belong to cameras, not to photographs, held-out views have them too. Views of other cameras are left as they
    are.

    Args:
        known: (K, 6) the result of :func:`distinct` for the training cameras.
        views: The N cameras of the photographs to which :meth:`photographed` refers.
        vignetting: Whether vignetting is learned.
        response: Whether responses are learned.

    Attributes:
        known: As given.
        camera: (N,) int64, the camera of each view, in [0, K); K for another one.
        falloff: (K, 3) parameter, the coefficients a, b and c; None without vignetting.
        log_slopes: (K, 3, 8) parameter, logarithms of the slopes for each channel; None without responses.
    """

    name = "tones"
    known: Tensor
    camera: Tensor
    sizes: Tensor
    middles: Tensor

    def __init__(self, known: Tensor, views: Cameras, *, vignetting: bool, response: bool) -> None:
        super().__init__()
        self._width, self._height = views.width, views.height
        self.register_buffer("known", known)
        same = (_traits(views)[:, None] == known.to(views.c2w.device)).all(dim=-1)
        camera = torch.where(same.any(dim=1), same.int().argmax(dim=1), len(known))
        self.register_buffer("camera", camera, persistent=False)
        self.register_buffer("sizes", views.all_sizes().to(camera.device).float(), persistent=False)
        self.register_buffer("middles", views.intrinsics[:, 2:].clone(), persistent=False)
        self.falloff = nn.Parameter(torch.zeros(len(known), 3)) if vignetting else None
        self.log_slopes = nn.Parameter(torch.zeros(len(known), 3, _PIECES)) if response else None

    @classmethod
    def restored(cls, state: Mapping[str, Tensor], views: Cameras) -> CameraTones:
        """Returns the tones of a state dict for other views, on the CPU and without gradients.

        The cameras of the views have the intrinsics and sizes of the scene as loaded for training.
        """
        kinds = {"vignetting": "falloff" in state, "response": "log_slopes" in state}
        tones = cls(state["known"].cpu(), views.to("cpu"), **kinds)
        tones.load_state_dict(state)
        return tones.requires_grad_(False)

    def forward(self, rgb: Tensor, opacity: Tensor, places: Tensor, views: Tensor) -> Tensor:
        """Returns the colours of rays as their cameras show them.

        Args:
            rgb: (R, 3) float32, emitted colours without background; the rays of a pixel are consecutive.
            opacity: (R,) float32.
            places: (P, 2) float32, the middles of pixels, x and y in their image; R is a multiple of P.
            views: (P,) int64, the view of each pixel, in [0, N).

        Returns:
            (R, 3) float32 without background, differentiable with respect to colours, opacities and parameters.
        """
        camera, pixels = self.camera.index_select(0, views), views.shape[0]
        rays = (pixels, rgb.shape[0] // max(pixels, 1), 3)
        if self.falloff is not None:
            half_diagonal = 0.5 * self.sizes.index_select(0, views).norm(dim=1)
            off = (places - self.middles.index_select(0, views)) / half_diagonal[:, None]
            squared = off.square().sum(dim=1)
            a, b, c = F.pad(self.falloff, (0, 0, 0, 1)).index_select(0, camera).unbind(dim=1)
            factor = (squared * (a + squared * (b + squared * c))).exp()
            rgb = (factor[:, None, None] * rgb.view(rays)).view(rgb.shape)
        if self.log_slopes is None:
            return rgb
        slopes, intercepts = self._curves()
        with torch.no_grad():
            straight = rgb / opacity.clamp(min=_THINNEST)[:, None]
            piece = (straight.nan_to_num(0.0) * _PIECES).clamp(0, _PIECES - 1).long()
            channel = camera[:, None, None] * 3 + torch.arange(3, device=piece.device)
            # index_select instead of brackets, because on CUDA the backward pass of the latter sorts the indices.
            flat = (channel * _PIECES + piece.view(rays)).flatten()
        slope, intercept = (curve.flatten().index_select(0, flat).view_as(rgb) for curve in (slopes, intercepts))
        return slope * rgb + intercept * opacity[:, None]

    def photographed(self, rgb: Tensor, opacity: Tensor, batch: Batch) -> Tensor:
        """Returns the colours (R, 3) of a batch's rays as they appear in their images."""
        places = columns_and_rows(batch.pixels, self._width, self._height) + 0.5
        return self(rgb, opacity, places, batch.images)

    def photograph(self, view: View, index: int, background: Tensor | None) -> View:
        """Returns a rendered view as its camera shows it.

        Args:
            view: The view, on the device of the parameters.
            index: Its index among the views.
            background: (3,) the colour behind it, which no camera has captured; None if all of it was captured, as with
                an environment.
        """
        (height, width), device = view.opacity.shape, view.rgb.device
        places = columns_and_rows(torch.arange(height * width, device=device), width, height) + 0.5
        opacity = torch.ones_like(view.opacity) if background is None else view.opacity
        behind = 0.0 if background is None else (1 - opacity)[..., None] * background
        views = torch.full_like(places[:, 0], index, dtype=torch.int64)
        rgb = self((view.rgb - behind).view(-1, 3), opacity.flatten(), places, views)
        return replace(view, rgb=rgb.view_as(view.rgb) + behind)

    def penalty(self) -> Tensor:
        """Returns the mean squares of the coefficients and of the logarithms of slopes, summed, ()."""
        terms: list[Tensor] = [] if self.falloff is None else [self.falloff]
        terms += [] if self.log_slopes is None else [self._centred()]
        return torch.stack([term.square().mean() for term in terms]).sum()

    @torch.no_grad()
    def scalars(self) -> dict[str, float]:
        """Returns the mean factor of the vignetting at half a diagonal from the principal point, if it is learned."""
        return {} if self.falloff is None else {"tones/corner": float(self.falloff.sum(dim=1).exp().mean())}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state belongs to other cameras."""
        saved, own = state["known"], self.known
        if saved.shape != own.shape or not torch.equal(saved.to(own.device), own):
            raise ValueError(
                f"scene must have the {len(saved)} cameras of the checkpoint, whose vignetting or response it has, got "
                f"{len(own)} of which not all are the same"
            )

    def _centred(self) -> Tensor:
        assert self.log_slopes is not None
        return self.log_slopes - self.log_slopes.mean(dim=0)

    def _curves(self) -> tuple[Tensor, Tensor]:
        """Returns slopes and intercepts of the pieces, both (K + 1, 3, 8); the last row is the identity."""
        slopes = F.pad(self._centred(), (0, 0, 0, 0, 0, 1)).exp()
        starts = torch.arange(_PIECES, device=slopes.device) / _PIECES
        return slopes, (slopes.cumsum(dim=-1) - slopes) / _PIECES - slopes * starts


def distinct(cameras: Cameras) -> Tensor:
    """Returns the intrinsics and sizes (K, 6) of the different cameras that took photographs, in a fixed order."""
    return _traits(cameras).unique(dim=0)


def _traits(cameras: Cameras) -> Tensor:
    return torch.cat((cameras.intrinsics, cameras.all_sizes().to(cameras.intrinsics)), dim=1)
