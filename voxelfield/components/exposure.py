"""Colours of photographs, learned: exposure and white balance of images, vignetting and response of cameras."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import NotNegative, Positive
from voxelfield.fields.environment import environment_of
from voxelfield.models.batch import Batch, Outputs, columns_and_rows
from voxelfield.models.component import Component
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import View

logger = logging.getLogger(__name__)

# A camera changes gains far more than offsets. Measured in this unit, offsets learn ten times more slowly and are more
# strongly regularised. Otherwise they would absorb half of the gain where a scene has little contrast.
_OFFSET_UNIT = 0.1
# With ``auto``: the standard deviation of the logarithms of gains from which on exposures vary
# (docs/experiments/photographs.md#exposure-of-photographs).
_VARIES = 0.05
# Logarithms of gains of encoded values start at this multiple of those of exposures, as a response of gamma 2.2 has it.
_RESPONSE = 1 / 2.2
# Exposures of other views are predicted from this many training images, weighted by the inverse of this power of the
# distance. A difference of directions counts as one of these numbers of distances between neighbouring cameras.
_NEIGHBOURS = 3
_POWER = 3
_TURNS = (1.0, 3.0, 10.0, 30.0)
_NEAREST = 1e-6
# Number of training images for which a prediction is compared with what was learned.
_MAX_COMPARED = 1000
# Pieces of a response curve. A power of two, so that the identity is exact.
_PIECES = 8
# Below this opacity a ray shows nothing whose colour could be found by a division.
_THINNEST = 1e-6


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
        if outputs.rgb is rgb:
            return
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


@dataclass(frozen=True)
class ExposureSettings(ComponentSettings):
    """Settings of :class:`AffineExposure`.

    Attributes:
        exposure: Correction of exposure and white balance learned for each training image: ``none``, ``affine``, a gain
            and an offset for each channel (:class:`voxelfield.components.exposure.AffineExposure`), or ``auto``, which
            gives them up when the last stage of ``trainer.stages`` begins, unless they vary by then. With ``auto``,
            exposures that the EXIF data of all training images state are where the gains start.
        penalty: Squared deviation of the exposure corrections from the identity, with ``trainer.exposure``.
        exposure_lr: Learning rate of the exposures of training images, with ``trainer.exposure``, and of the cameras'
            ``trainer.vignetting`` and ``trainer.response``.
    """

    name = "exposure"
    # Corrections apply to an environment too. Terms are added up in the order of components.
    after = ("environment", "depth", "structure")
    exposure: Literal["none", "affine", "auto"] = key("trainer.exposure", "none", off="none", fixed=True)
    penalty: NotNegative = key("trainer.loss.exposure", 1e-3, idle=True)
    exposure_lr: Positive = key("optimizer.exposure_lr", 0.01)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        train, auto = training.scene.train, self.exposure == "auto"
        exif = train.exposures if auto else None
        if exif is not None:
            stops = float(exif.std(correction=0)) / math.log(2)
            logger.info("EXIF states the exposures of all training images: they differ by %.2g stops", stops)
        exposure = AffineExposure(train.cameras.c2w, exif)
        if auto:
            exposure.decided_at = max(stage.step for stage in training.config.trainer.stages)
        return [exposure.learned(training, self.exposure_lr, self.penalty)]


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
        poses: (N, 4, 4) camera to world, of the training images.
        exif: (N,) logarithms of their exposures, of which the gains begin as those of a response of gamma 2.2; or None.

    Attributes:
        log_gain: (N, 3) logarithms of gains.
        offset: (N, 3) offsets, in tenths of the range of colours.
        poses: As given, on the CPU at first.
        exif: As given, or as in a loaded state, likewise.
        applied: () bool; False once the correction is given up, because exposures do not vary, and is the identity.
        decided_at: The number of steps after which that is decided; None or 0 if it is not.
    """

    name = "exposure"
    poses: Tensor
    applied: Tensor
    exif: Tensor | None

    def __init__(self, poses: Tensor, exif: Tensor | None = None) -> None:
        super().__init__()
        start = torch.zeros(len(poses)) if exif is None else _RESPONSE * (exif - exif.mean())
        self.log_gain = nn.Parameter(start[:, None].repeat(1, 3))
        self.register_buffer("exif", exif)
        self.offset = nn.Parameter(torch.zeros(len(poses), 3))
        self.register_buffer("poses", poses.detach().to("cpu", copy=True))
        self.register_buffer("applied", torch.ones((), dtype=torch.bool))
        self.decided_at: int | None = None
        self._applies = True  # on the host, because a step on CUDA must not wait for the device

    @classmethod
    def restored(cls, state: Mapping[str, Tensor]) -> AffineExposure:
        """Returns the corrections of a state dict, on the CPU and without gradients."""
        exposure = cls(state["poses"])
        exposure.load_state_dict(state)
        return exposure.requires_grad_(False)

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self.exif = torch.zeros_like(self.log_gain[:, 0].detach()) if f"{prefix}exif" in state else None
        super()._load_from_state_dict(state, prefix, *args)
        self._applies = bool(self.applied)

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Decides whether exposures vary. The stage that begins then captures a CUDA graph of its own."""
        if not step or step != self.decided_at or not self._applies:
            return
        spread = float(self._centred()[0].square().mean().sqrt())
        self._applies = spread >= _VARIES
        self.applied.fill_(self._applies)
        logger.info(
            "exposures of photographs differ by %.1f %%: they are %s (trainer.exposure=auto)",
            *(100 * spread, "corrected" if self._applies else "not corrected"),
        )

    @torch.no_grad()
    def predict(self, poses: Tensor, exif: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Predicts gains and offsets of other views from those of training images nearby.

        A camera that measures its exposure sets it by what it sees, so photographs taken close to each other in similar
        directions have similar exposures. The prediction is a mean over the three nearest training images, weighted by
        the inverse cubes of distances (Shepard 1968). A distance consists of that of the places, in typical distances
        of neighbouring cameras, and of that of the directions, with the weight by which each training image is
        predicted best from the others. If no weight predicts these better than the mean of all does, then the
        prediction is that mean, the identity.

        Where EXIF states all exposures, corrections are proportional to their logarithms, with the slopes that fit the
        training images best, and only what remains, such as white balance, is predicted from images nearby.

        Args:
            poses: (V, 4, 4) camera to world, on any device.
            exif: (V,) logarithms of the views' exposures on the CPU, as for the class; None if they are not known.

        Returns:
            Gains (V, 3) and offsets (V, 3) on the device of the parameters, for colours in [0, 1].
        """
        known, values = self.poses.cpu().double(), torch.cat(self._centred(), dim=1).cpu().double()
        count = len(known)
        result = told = torch.zeros(len(poses), 6, dtype=torch.float64)
        if exif is not None and self.exif is not None:
            stated, wanted = (x.cpu().double()[:, None] - self.exif.mean().item() for x in (self.exif, exif))
            slopes = (stated * values).sum(dim=0) / stated.square().sum().clamp(min=_NEAREST)
            values, told = values - stated * slopes, wanted * slopes
        if count > _NEIGHBOURS:
            some = torch.arange(0, count, -(-count // _MAX_COMPARED))
            places, others = known[:, :3, 3], torch.arange(len(some))
            apart = torch.cdist(places[some], places)
            apart[others, some] = torch.inf
            unit = float(apart.amin(dim=1).median()) or 1.0

            def predicted(views: Tensor, turn: float, itself: bool) -> Tensor:
                distance = (torch.cdist(views[:, :3, 3], places) / unit).square()
                distance += (turn * torch.cdist(views[:, :3, 2], known[:, :3, 2])).square()
                if not itself:
                    distance[others, some] = torch.inf
                nearest = distance.sqrt().topk(_NEIGHBOURS, largest=False)
                weights = nearest.values.clamp(min=_NEAREST) ** -_POWER
                return (values[nearest.indices] * (weights / weights.sum(dim=1, keepdim=True))[..., None]).sum(dim=1)

            errors = [float((predicted(known[some], turn, False) - values[some]).square().sum()) for turn in _TURNS]
            if min(errors) < float((values[some] * count / (count - 1)).square().sum()):
                result = predicted(poses.cpu().double(), _TURNS[errors.index(min(errors))], True)
        log_gain, offset = (result + told).to(self.log_gain).split(3, dim=1)
        return log_gain.exp(), _OFFSET_UNIT * offset

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
        return self(rgb, opacity, batch.images) if self._applies else rgb

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the penalty, also without a weight once the correction is given up: parameters need a gradient."""
        return super().losses(outputs, batch) if self._applies else {self.name: self._weight * self.penalty()}

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
        saved, own = len(state["log_gain"]), len(self.log_gain)
        if saved != own:
            raise ValueError(f"scene must have {saved} training images, one for each saved exposure, got {own}")

    def _centred(self) -> tuple[Tensor, Tensor]:
        log_gain, offset = (values - values.mean(dim=0) for values in (self.log_gain, self.offset))
        return (log_gain, offset) if self._applies else (0 * log_gain, 0 * offset)


@dataclass(frozen=True)
class ToneSettings(ComponentSettings):
    """Settings of :class:`CameraTones`.

    Attributes:
        vignetting: Whether to learn how each camera darkens its images away from their middle
            (:class:`voxelfield.components.exposure.CameraTones`).
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
        views = torch.full_like(places[:, 0], index, dtype=torch.int64)
        return recolored(view, background, lambda rgb, opacity: self(rgb, opacity, places, views))

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


def recolored(view: View, background: Tensor | None, correct: Callable[[Tensor, Tensor], Tensor]) -> View:
    """Returns a view whose emitted colours are corrected.

    Args:
        view: The view.
        background: (3,) the colour behind it, which no camera has captured; None if all of it was captured, as with an
            environment.
        correct: Maps emitted colours (R, 3) and opacities (R,) to colours (R, 3).
    """
    opacity = torch.ones_like(view.opacity) if background is None else view.opacity
    behind = 0.0 if background is None else (1 - opacity)[..., None] * background
    rgb = correct((view.rgb - behind).view(-1, 3), opacity.flatten())
    return replace(view, rgb=rgb.view_as(view.rgb) + behind)


def distinct(cameras: Cameras) -> Tensor:
    """Returns the intrinsics and sizes (K, 6) of the different cameras that took photographs, in a fixed order."""
    return _traits(cameras).unique(dim=0)


def _traits(cameras: Cameras) -> Tensor:
    return torch.cat((cameras.intrinsics, cameras.all_sizes().to(cameras.intrinsics)), dim=1)
