"""One optimization step, all on the device: pixels, rays, rendering, loss, gradients, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from voxelfield.evaluation.metrics import mse_to_psnr
from voxelfield.models.model import Model
from voxelfield.ops._internal.pixel_colors import pixel_colors
from voxelfield.rendering.march import Capacity, RenderSettings, Sampler, visible_samples
from voxelfield.training.batch import Batch, Outputs
from voxelfield.training.batches import PixelSampler
from voxelfield.training.config import TrainerConfig
from voxelfield.training.losses import backpropagate, rendering_terms
from voxelfield.training.optimizer import Optimizers
from voxelfield.training.part import Loss, Part
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


class TrainingStep:
    """Runs one step after another. On CUDA, a step neither synchronises with the device nor depends on the host.

    A step draws a batch, renders it, sums the loss terms, differentiates them, and updates all parameters. Whatever is
    not needed for every field joins as a :class:`voxelfield.training.part.Part`.

    On CUDA a fixed number of rays is drawn in each step, and as many of them are used as fit in
    ``config.visible_samples`` visible samples; on the CPU the number of rays is adapted to the samples instead.

    Args:
        model: The model to train.
        pixels: The training images; with ``config.loss.structure``, they carry its weights.
        optimizers: The optimizers of the field and of the parts' parameter groups; None where only parts learn.
        config: Settings of the training loop.
        parts: What joins the steps, in this order.
        losses: Further terms by name, each multiplied by its weight. A term of the name of another replaces it.
        sampler: Places samples on rays, as :func:`voxelfield.rendering.render.render` takes it.
        rays: Number of rays drawn in every step; None for the number that ``config`` suggests.

    Attributes:
        number: Number of steps done, int64, on the device.
        rays: Number of rays drawn in a step.
        error: Photometric loss of the last step, () float32 on the device.
        totals: Sums over the steps since the last read: the loss terms by name, ``rays``, ``samples``, ``steps`` and,
            if they are counted, ``candidates``. With ``config.not_finite="skip"`` also ``skipped``, the number of steps
            that changed nothing but Adam's moments; their losses count as zero.

    Raises:
        ValueError: Two parts have the same name.
    """

    def __init__(
        self,
        model: Model,
        pixels: PixelSampler,
        optimizers: Optimizers | None,
        config: TrainerConfig,
        *,
        parts: Sequence[Part] = (),
        losses: Mapping[str, Loss] | None = None,
        sampler: Sampler = visible_samples,
        rays: int | None = None,
    ) -> None:
        self.device = model.device
        self.number = torch.zeros((), dtype=torch.int64, device=self.device)
        self.totals = StepTotals(self.device)
        self.capacity = (
            Capacity(config.candidate_samples, config.visible_samples) if self.device.type == "cuda" else None
        )
        self._adapts = self.capacity is None and rays is None
        if rays is None:
            rays = config.max_rays if self.capacity else min(config.max_rays, max(1, config.visible_samples // 64))
        self.rays = rays
        self._model = model
        self._pixels = pixels
        self._optimizers = optimizers
        self._config = config
        self._parts = parts
        self._losses = losses or {}
        self._sampler = sampler
        self._loss_scale = torch.tensor(config.loss_scale, device=self.device)
        self.error = torch.zeros((), device=self.device)
        self._one = torch.ones((), dtype=torch.int64, device=self.device)
        self._batch: Batch | None = None

    @property
    def batch(self) -> Batch:
        """The batch of the last step. On CUDA, the next step overwrites it."""
        if self._batch is None:
            raise RuntimeError("there is no batch before the first step")
        return self._batch

    def run(self, settings: RenderSettings) -> None:
        """Takes one step.

        Args:
            settings: Sampling settings.
        """
        config = self._config
        if self._optimizers is not None:
            self._optimizers.scale(exponential_decay(self.number, config.steps, config.rates.final_factor))
        for part in self._parts:
            part.before_step(self.number)
        batch = self._batch = self._draw()
        for part in self._parts:
            part.prepare(batch)
        outputs = self._render(batch, settings)
        terms = self._terms(outputs, batch)
        backpropagate(list(terms.values()), self._loss_scale)
        if config.not_finite == "skip":
            terms = self._drop_unless_finite(terms)
        for part in self._parts:
            part.after_backward(self.number)
        if self._optimizers is not None:
            self._optimizers.step()
        for part in self._parts:
            part.after_step(self.number)
        self.number += 1
        self.error.copy_(terms["photometric"].detach())
        self.count(terms)
        rendering = outputs.rendering
        counts = {"steps": self._one, "rays": rendering.rays_kept, "samples": rendering.samples.ray_offsets[-1]}
        if rendering.candidates is not None:
            counts["candidates"] = rendering.candidates
        self.totals.add(counts)
        if self._adapts:
            # As space empties, rays have fewer samples, so more rays fit in the same number of samples.
            wanted = self.rays * config.visible_samples / max(len(rendering.samples.positions), 1)
            self.rays = int(min(config.max_rays, max(self.rays * 0.8, min(self.rays * 1.25, wanted)) + 1))

    def _draw(self) -> Batch:
        config = self._config
        count = max(1, config.pixels_in_patches, self.rays // config.supersampling**2)
        moved = [cameras for cameras in (part.cameras() for part in self._parts) if cameras is not None]
        batch = self._pixels.batch(count, self._model.field.aabb, config.background, moved[-1] if moved else None)
        names = {*getattr(self._model.field, "extra_inputs", ()), *getattr(self._model.field, "density_inputs", ())}
        if names:
            values = {name: batch.for_rays(batch.images if name == "image" else batch[name]) for name in names}
            batch.rays = replace(batch.rays, values=values)
        return batch

    def _render(self, batch: Batch, settings: RenderSettings) -> Outputs:
        config = self._config
        rendering = self._model.render(
            batch.rays,
            settings,
            jitter=True,
            capacity=self.capacity,
            distortion=config.loss.distortion > 0,
            sampler=self._sampler,
        )
        outputs = Outputs(rendering, rendering.rgb, rendering.rgb, batch.truth)
        for part in self._parts:
            part.adjust(outputs, batch)
        outputs.pixels = pixel_colors(
            outputs.rgb,
            rendering.opacity,
            batch.background,
            batch.rays_per_pixel,
            pixel_averaging=config.pixel_averaging,
        )
        return outputs

    def _terms(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Returns all weighted loss terms by name; later ones replace earlier ones of the same name."""
        terms = rendering_terms(self._config.loss, outputs, batch)
        for part in self._parts:
            terms.update(part.losses(outputs, batch))
        return terms | {name: loss(outputs, batch) for name, loss in self._losses.items()}

    def _drop_unless_finite(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Counts a step as skipped and zeroes its gradients and losses if any of them is not finite.

        Runs entirely on the device, and reads and writes every gradient once more.
        """
        parameters = [*self._model.field.parameters(), *(p for part in self._parts for p in part.parameters())]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # A sum may overflow although its terms are finite; such a gradient is not usable either.
        sums = [gradient.sum(dtype=torch.float32) for gradient in gradients]
        finite = torch.stack([value.detach().float() for value in (*terms.values(), *sums)]).isfinite().all()
        for gradient in gradients:
            gradient.masked_fill_(~finite, 0)
        self.totals.add({"skipped": (~finite).to(torch.int64)})
        return {name: torch.where(finite, term.detach(), 0.0) for name, term in terms.items()}

    def count(self, terms: dict[str, Tensor]) -> None:
        """Adds loss terms to the totals."""
        self.totals.add({f"loss/{name}": term.detach() for name, term in terms.items()})

    def psnr(self) -> float:
        """Returns the PSNR of the last step's pixels, dB; synchronises with the device."""
        return float(mse_to_psnr(self.error))

    def resume(self, number: int, rays: int) -> None:
        """Resumes after ``number`` steps; on the CPU, where the number of rays varies, with ``rays`` rays."""
        self.number.fill_(number)
        if self._adapts:
            self.rays = min(rays, self._config.max_rays)
