"""One optimization step, all on the device: pixels, rays, rendering, loss, gradients, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import processes
from voxelfield.distributed.reduction import SharedSampler, sum_gradients_later
from voxelfield.evaluation.metrics import mse_to_psnr
from voxelfield.foundation.errors import shown
from voxelfield.foundation.optimizers import exponential_decay
from voxelfield.models.batch import Batch
from voxelfield.models.component import Component
from voxelfield.models.losses import check_term
from voxelfield.models.model import Model
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.rendering.march import Capacity, RenderSettings, Sampler
from voxelfield.settings import TrainerConfig
from voxelfield.training.optimizer import Optimizers


class _ScaledGradients(torch.autograd.Function):
    """Stands in for the sum of several losses; its gradient with respect to each of them is the given factor."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, *losses: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        ctx.count = len(losses)
        return losses[0].view_as(losses[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (factor,) = ctx.saved_tensors
        return None, *[factor] * ctx.count


def backpropagate(losses: Sequence[Tensor], factor: Tensor) -> None:
    """Accumulates the gradients of the losses' sum, multiplied by a factor () on their device.

    Equivalent to ``torch.autograd.backward`` with ``grad_tensors``, which would import sympy and take seconds.
    """
    _ScaledGradients.apply(factor, *losses).backward()


class StepTotals:
    """Sums over steps and over the processes, which stay on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[tuple[str, ...], Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Adds scalars () of one dtype to the totals, in two kernel launches regardless of their number."""
        names = tuple(values)
        if names not in self._sums:
            self._sums[names] = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        self._sums[names] += torch.stack(list(values.values()))

    def read(self) -> dict[str, float]:
        """Returns all totals and sets them to zero; synchronises with the device; a collective call."""
        totals: dict[str, float] = {}
        for names, sums in self._sums.items():
            for name, total in zip(names, processes.sum_of(sums).tolist(), strict=True):
                totals[name] = totals.get(name, 0.0) + total
            sums.zero_()
        return totals


class TrainingStep:
    """Runs one step after another. On CUDA, a step neither synchronises with the device nor depends on the host.

    A step draws a batch, renders it, sums the loss terms of all components, differentiates them, reduces the gradients,
    and updates all parameters. Processes that train together take steps together, each with a part of the batch.

    On CUDA a fixed number of rays is drawn in each step, and as many of them are used as fit in
    ``config.visible_samples`` visible samples; on the CPU the number of rays is adapted to the samples instead. Early
    batches are smaller (:meth:`size_batch`). The components, of which the model is one, join a step in the given order.

    Attributes:
        batch: The batch of the last step, from the first one on. On CUDA, the next step overwrites it.
        number: Number of steps done, int64, on the device.
        rays: Number of rays drawn in a step.
        error: Photometric loss of the last step over the pixels of this process, () float32 on the device.
        share_of_error: The summand of this process in the photometric loss over the pixels of all processes.
        totals: Sums over the steps since the last read: the loss terms by name, ``rays``, ``samples``, ``steps`` and,
            if they are counted, ``candidates``. With ``config.not_finite="skip"`` also ``skipped``, the number of steps
            that changed nothing but the optimizers' moments; their losses count as zero.
    """

    batch: Batch

    def __init__(
        self,
        model: Model,
        pixels: PixelSampler,
        optimizers: Optimizers,
        config: TrainerConfig,
        components: Sequence[Component],
        sampler: Sampler,
    ) -> None:
        self.device = model.device
        self.number = torch.zeros((), dtype=torch.int64, device=self.device)
        self._shared_by = shared_by = processes.count()
        self._shared = shared_by > 1
        self.totals = StepTotals(self.device)
        if config.patches % shared_by > 0:
            raise ValueError(f"trainer.patches must be a multiple of {shared_by} devices, got {config.patches}")
        self.capacity: Capacity | None = None
        self.rays = max(1, config.visible_samples // 64)
        self._model, self._pixels, self._components = model, pixels, components
        self._optimizers, self._config = optimizers, config
        self._share = 1.0
        self.size_batch(config.batch_share(0))
        self._reads_gradients = any(
            getattr(component.after_backward, "__func__", None) is not Component.after_backward
            for component in components
        )
        self._sampler = sampler
        self._shared_sampler = SharedSampler(sampler) if self._shared else None
        self._loss_scale = torch.tensor(config.loss_scale, device=self.device)
        self.error, self.share_of_error = torch.zeros(2, device=self.device).unbind()
        # Steps are counted by one process alone.
        self._one = torch.full((), int(processes.is_first()), dtype=torch.int64, device=self.device)

    def size_batch(self, share: float) -> bool:
        """Sets the size of the batch, as a share of the configured one; returns whether it has changed."""
        before, self._share, config = self._share, share, self._config
        if self.device.type == "cuda":
            # Kernels of one size in all processes, which exchange samples and draw random numbers in a captured graph.
            candidates, visible = (
                max(1, int(share * number) // self._shared_by)
                for number in (config.candidate_samples, config.visible_samples)
            )
            self.capacity = Capacity(candidates, visible)
        self._most = max(int(share * config.max_rays), config.supersampling**2)
        self.rays = self._most if self.capacity is not None else min(self.rays, self._most)
        return share != before

    def run(self, settings: RenderSettings) -> None:
        """Takes one step."""
        config = self._config
        rates = config.rates
        self._optimizers.scale(exponential_decay(self.number, config.steps, rates.final_factor, rates.cooldown))
        batch = self.batch = self._draw()
        outputs = self._model.render_batch(
            batch,
            self._components,
            settings,
            pixel_averaging=config.pixel_averaging,
            capacity=self.capacity,
            distortion=config.loss.distortion > 0,
            sampler=self._shared_sampler or self._sampler,
        )
        terms: dict[str, Tensor] = {}
        for component in self._components:
            found = component.losses(outputs, batch)
            if not isinstance(found, Mapping):
                raise ValueError(f"losses of {component.name} must be a mapping of names to terms, got {shown(found)}")
            terms.update(found)
        if "photometric" not in terms:
            raise KeyError(f"losses must contain 'photometric', by which divergence is detected, got {list(terms)}")
        for name, term in terms.items():
            check_term(name, term, self._loss_scale.device)
        share = None
        if self._shared_sampler is not None:
            share = self._shared_sampler.share_of_rays(outputs.rendering.rays_kept)
        backpropagate(list(terms.values()), self._loss_scale if share is None else self._loss_scale * share)
        # The batch outlives the step, and with its graph the node that adds up gradients, on the stream of this step.
        batch.background = batch.background.detach()
        terms = {name: term.detach() if share is None else term.detach() * share for name, term in terms.items()}
        parameters = [parameter for component in self._components for parameter in component.parameters()]
        shards = self._optimizers.local_shards(parameters)
        arrive: Callable[[], None] | None = None
        if self._shared:
            arrive = sum_gradients_later([own for own, given in zip(shards, parameters, strict=True) if own is given])
            # Unless something reads the sums before the optimizers do, they arrive while the divided grids are updated.
            if config.not_finite == "skip" or self._reads_gradients:
                arrive()
                arrive = None
        if config.not_finite == "skip":
            terms = self._drop_unless_finite(terms, shards)
        for component in self._components:
            component.after_backward(self.number)
        self._optimizers.step(arrive)
        for component in self._components:
            component.after_step(self.number)
        self.number += 1
        self.share_of_error.copy_(terms["photometric"])
        self.error.copy_(terms["photometric"] if share is None else terms["photometric"] / share.clamp(min=1e-6))
        self.totals.add({f"loss/{name}": term for name, term in terms.items()})
        rendering = outputs.rendering
        counts = {"steps": self._one, "rays": rendering.rays_kept, "samples": rendering.samples.ray_offsets[-1]}
        if rendering.candidates is not None:
            counts["candidates"] = rendering.candidates
        self.totals.add(counts)
        if self.capacity is None:
            # As space empties, rays have fewer samples, so more rays fit in the same number of samples.
            samples = sum(processes.gather_counts(len(rendering.samples.positions)))
            wanted = self.rays * self._share * config.visible_samples / max(samples, 1)
            self.rays = int(min(self._most, max(self.rays * 0.8, min(self.rays * 1.25, wanted)) + 1))
        if self._shared and self.device.type != "cuda":
            # On CUDA, the same kernels of the same sizes draw the same random numbers in each process.
            torch.set_rng_state(processes.broadcast(torch.get_rng_state()))

    def _draw(self) -> Batch:
        config = self._config
        moved = [cameras for cameras in (component.cameras() for component in self._components) if cameras is not None]
        count = max(1, self.rays // config.supersampling**2)
        if self.capacity is not None:
            count = -(-count // self._shared_by) * self._shared_by
        cameras = moved[-1] if moved else None
        batch = self._pixels.batch(count, self._model.field.aabb, config.background, cameras, shared=self._shared)
        batch.rays = self._model.rays_of(batch)
        return batch

    def _drop_unless_finite(self, terms: dict[str, Tensor], parameters: Sequence[nn.Parameter]) -> dict[str, Tensor]:
        """Counts a step as skipped and zeroes its gradients and losses if any of them is not finite.

        Runs entirely on the device, and reads and writes every gradient once more.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # A sum may overflow although its terms are finite; such a gradient is not usable either.
        sums = [gradient.sum(dtype=torch.float32) for gradient in gradients]
        finite = torch.stack([value.float() for value in (*terms.values(), *sums)]).isfinite().all()
        if self._shared:
            finite = processes.sum_of((~finite).to(torch.int32)) == 0
        for gradient in gradients:
            gradient.masked_fill_(~finite, 0)
        if self._optimizers.division is not None:
            self._optimizers.division.discard(~finite)
        self.totals.add({"skipped": (~finite).to(torch.int64) * self._one})
        return {name: torch.where(finite, term, 0.0) for name, term in terms.items()}

    def psnr(self) -> float:
        """Returns the PSNR of the last step's pixels, dB; synchronises with the device."""
        return float(mse_to_psnr(self.error))

    def resume(self, number: int, rays: int) -> None:
        """Resumes after ``number`` steps; on the CPU, where the number of rays varies, with ``rays`` rays."""
        self.number.fill_(number)
        if self.capacity is None:
            self.rays = min(rays, self._config.max_rays)
