"""One optimization step, all on the device: pixels, rays, rendering, loss, gradients, update."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from voxelfield.evaluation.metrics import mse_to_psnr
from voxelfield.fields.field import RadianceField
from voxelfield.ops._internal.pixel_colors import pixel_colors
from voxelfield.rendering.march import Capacity, RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import render
from voxelfield.training.batches import PixelSampler, background_for
from voxelfield.training.cameras.camera_refinement import CameraRefinement
from voxelfield.training.cameras.exposure import AffineExposure
from voxelfield.training.config import TrainerConfig
from voxelfield.training.losses import RenderedBatch, backpropagate, rendering_terms
from voxelfield.training.optimizer import Optimizers
from voxelfield.training.schedules import exponential_decay


class StepTotals:
    """Sums over steps that stay on the device until they are read.

    Args:
        device: Device of the sums.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[tuple[str, ...], Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Adds values to the totals, which start at zero, in two kernel launches regardless of their number.

        Args:
            values: Scalars () by name, at least one, on the device and all of one dtype.
        """
        names = tuple(values)
        if names not in self._sums:
            self._sums[names] = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        self._sums[names] += torch.stack(list(values.values()))

    def read(self) -> dict[str, float]:
        """Returns all totals and sets them to zero; synchronises with the device."""
        totals: dict[str, float] = {}
        for names, sums in self._sums.items():
            for name, total in zip(names, sums.tolist(), strict=True):
                totals[name] = totals.get(name, 0.0) + total
            sums.zero_()
        return totals


def autocast(config: TrainerConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which a field is evaluated, in the configured precision."""
    if config.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, config.precision), cache_enabled=False)


class TrainingStep:
    """Runs one step after another. On CUDA, a step neither synchronises with the device nor depends on the host.

    On CUDA a fixed number of rays is drawn in each step, and as many of them are used as fit in
    ``config.visible_samples`` visible samples; on the CPU the number of rays is adapted to the samples instead.

    Args:
        field: The field to train.
        occupancy: The occupied cells.
        pixels: The training images, with structure weights if ``config.loss.structure`` is positive.
        optimizers: The optimizers of the field.
        config: Settings of the training loop.
        refinement: Updates the cameras and provides those from which rays are cast; None keeps those of ``pixels``.
        exposure: Corrects the colours of the training images; None for no correction.

    Attributes:
        number: Number of steps done, int64, on the device.
        rays: Number of rays drawn in a step.
        error: Photometric loss of the last step, () float32 on the device.
        totals: Sums over the steps since the last read: the loss terms by name, ``rays``, ``samples``, ``steps`` and,
            if they are counted, ``candidates``. With ``config.not_finite="skip"`` also ``skipped``, the number of steps
            that changed nothing but Adam's moments; their losses count as zero.

    Raises:
        ValueError: ``pixels`` has no structure weights, but ``config.loss.structure`` is positive.
    """

    def __init__(
        self,
        field: RadianceField,
        occupancy: OccupancyGrid,
        pixels: PixelSampler,
        optimizers: Optimizers,
        config: TrainerConfig,
        refinement: CameraRefinement | None = None,
        exposure: AffineExposure | None = None,
    ) -> None:
        if config.loss.structure > 0 and not pixels.has_structure:
            raise ValueError(
                "pixels must be a PixelSampler with structure=True where trainer.loss.structure is positive, "
                f"got structure=False and {config.loss.structure}"
            )
        self.device = field.aabb.device
        self.number = torch.zeros((), dtype=torch.int64, device=self.device)
        self.totals = StepTotals(self.device)
        self.capacity = (
            Capacity(config.candidate_samples, config.visible_samples) if self.device.type == "cuda" else None
        )
        self.rays = config.max_rays if self.capacity else min(config.max_rays, max(1, config.visible_samples // 64))
        self._field = field
        self._occupancy = occupancy
        self._pixels = pixels
        self._optimizers = optimizers
        self._config = config
        self._refinement = refinement
        self._exposure = exposure
        self._loss_scale = torch.tensor(config.loss_scale, device=self.device)
        self.error = torch.zeros((), device=self.device)
        self._one = torch.ones((), dtype=torch.int64, device=self.device)

    def run(self, settings: RenderSettings) -> None:
        """Takes one step.

        Args:
            settings: Sampling settings.
        """
        config = self._config
        self._optimizers.scale(exponential_decay(self.number, config.steps, config.rates.final_factor))
        rays_per_pixel = config.supersampling**2
        pixels = max(1, config.pixels_in_patches, self.rays // rays_per_pixel)
        cameras = None if self._refinement is None else self._refinement()
        rays, rgba, numbers = self._pixels.draw(pixels, self._field.aabb, cameras)
        rgb, alpha = rgba[:, :3], rgba[:, 3:]
        background = background_for(config.background, pixels, self.device)
        truth = _over(rgb, alpha, background)
        with self.autocast():
            rendering = render(
                self._field,
                rays,
                self._occupancy,
                settings,
                jitter=True,
                capacity=self.capacity,
                distortion=config.loss.distortion > 0,
            )
        emitted, field_truth = rendering.rgb, None
        if self._exposure is not None:
            images = self._pixels.images_of(numbers)
            emitted = self._exposure(emitted, rendering.opacity, images)
            field_truth = _over(self._exposure.undo(rgb, images), alpha, background)
        predicted = pixel_colors(
            emitted, rendering.opacity, background, rays_per_pixel, pixel_averaging=config.pixel_averaging
        )
        batch = RenderedBatch(
            rendering,
            predicted,
            truth,
            config.patches,
            config.patch_size,
            field_truth=field_truth,
            structure_weights=self._pixels.structure_weights_of(numbers) if config.loss.structure > 0 else None,
        )
        terms = rendering_terms(config.loss, batch)
        if self._exposure is not None and config.loss.exposure > 0:
            terms["exposure"] = config.loss.exposure * self._exposure.penalty()
        backpropagate(list(terms.values()), self._loss_scale)
        if config.not_finite == "skip":
            terms = self._drop_unless_finite(terms)
        self._optimizers.step()
        if self._refinement is not None:
            self._refinement.step(self.number)
        self.number += 1
        self.error.copy_(terms["photometric"].detach())
        self.count(terms)
        counts = {"steps": self._one, "rays": rendering.rays_kept, "samples": rendering.samples.ray_offsets[-1]}
        if rendering.candidates is not None:
            counts["candidates"] = rendering.candidates
        self.totals.add(counts)
        if self.capacity is None:
            # As space empties, rays have fewer samples, so more rays fit in the same number of samples.
            wanted = self.rays * config.visible_samples / max(len(rendering.samples.positions), 1)
            self.rays = int(min(config.max_rays, max(self.rays * 0.8, min(self.rays * 1.25, wanted)) + 1))

    def _drop_unless_finite(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Counts a step as skipped and zeroes its gradients and losses if any of them is not finite.

        Runs entirely on the device, and reads and writes every gradient once more.
        """
        learners = [module for module in (self._field, self._exposure, self._refinement) if module is not None]
        parameters = [parameter for module in learners for parameter in module.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # A sum may overflow although its terms are finite; such a gradient is not usable either.
        sums = [gradient.sum(dtype=torch.float32) for gradient in gradients]
        finite = torch.stack([value.detach().float() for value in (*terms.values(), *sums)]).isfinite().all()
        for gradient in gradients:
            gradient.masked_fill_(~finite, 0)
        self.totals.add({"skipped": (~finite).to(torch.int64)})
        return {name: torch.where(finite, term.detach(), 0.0) for name, term in terms.items()}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which the field is evaluated, in the configured precision."""
        return autocast(self._config, self.device)

    def count(self, terms: dict[str, Tensor]) -> None:
        """Adds loss terms to the totals."""
        self.totals.add({f"loss/{name}": term.detach() for name, term in terms.items()})

    def psnr(self) -> float:
        """Returns the PSNR of the last step's pixels, dB; synchronises with the device."""
        return float(mse_to_psnr(self.error))

    def resume(self, number: int, rays: int) -> None:
        """Resumes after ``number`` steps; on the CPU, where the number of rays varies, with ``rays`` rays."""
        self.number.fill_(number)
        if self.capacity is None:
            self.rays = min(rays, self._config.max_rays)


def _over(rgb: Tensor, alpha: Tensor, background: Tensor) -> Tensor:
    """Composites straight-alpha colours (P, 3) with opacities (P, 1) over backgrounds (P, 3)."""
    return rgb * alpha + background * (1 - alpha)
