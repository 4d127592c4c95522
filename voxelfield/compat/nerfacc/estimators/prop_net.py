"""Sampling from the distributions of proposal networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from voxelfield.compat.nerfacc.data_specs import RayIntervals
from voxelfield.compat.nerfacc.pdf import importance_sampling, searchsorted
from voxelfield.compat.nerfacc.volrend import render_transmittance_from_density


class PropNetEstimator(nn.Module):
    """Draws samples from the distributions of proposal networks, and trains these (Barron et al. 2022, "Mip-NeRF 360").

    Args:
        optimizer: Optimizer of the proposal networks; needed by :meth:`update_every_n_steps`.
        scheduler: Its learning rate schedule.

    Attributes:
        prop_cache: The edges and distributions of the last :meth:`sampling` with ``requires_grad``, until the loss of
            the networks is computed.
    """

    _dummy: Tensor

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("_dummy", torch.empty(0), persistent=False)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.prop_cache: list[tuple[RayIntervals, Tensor | None]] = []

    @property
    def device(self) -> torch.device:
        """The device on which samples are drawn."""
        return self._dummy.device

    @torch.no_grad()
    def sampling(
        self,
        prop_sigma_fns: Sequence[Callable[[Tensor, Tensor], Tensor]],
        prop_samples: Sequence[int],
        num_samples: int,
        n_rays: int,
        near_plane: float,
        far_plane: float,
        sampling_type: Literal["uniform", "lindisp"] = "lindisp",
        stratified: bool = False,
        requires_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Draws samples from each network's distribution in turn. Samples are not differentiable.

        Args:
            prop_sigma_fns: Networks: map where samples begin and end, (n_rays, n_samples) each, to densities.
            prop_samples: Number of samples that each network gets.
            num_samples: Number of samples to return.
            n_rays: Number of rays.
            near_plane: Distance at which rays begin, world units; above 0 for ``"lindisp"``.
            far_plane: Distance at which they end.
            sampling_type: Whether the first samples are spread evenly over distances or over their inverses.
            stratified: Shift samples at random, as :func:`importance_sampling` does.
            requires_grad: Compute densities with gradients, and store them for :meth:`compute_loss`.

        Returns:
            Where samples begin and end, (n_rays, num_samples) each.

        Raises:
            ValueError: There are other numbers of networks than of samples, ``sampling_type`` is unknown, or a network
                returns another shape.
        """
        if len(prop_sigma_fns) != len(prop_samples):
            raise ValueError(f"prop_samples must have {len(prop_sigma_fns)} numbers, got {len(prop_samples)}")
        if sampling_type not in ("uniform", "lindisp"):
            raise ValueError(f"sampling_type must be 'uniform' or 'lindisp', got {sampling_type!r}")

        def distances(edges: RayIntervals) -> tuple[Tensor, Tensor]:
            if sampling_type == "uniform":
                t = torch.lerp(edges.vals.new_tensor(near_plane), edges.vals.new_tensor(far_plane), edges.vals)
            else:
                t = 1 / (edges.vals / far_plane + (1 - edges.vals) / near_plane)
            return t[:, :-1], t[:, 1:]

        cdfs = torch.tensor([0.0, 1.0], device=self.device).expand(n_rays, 2)
        intervals = RayIntervals(cdfs)
        for evaluate, count in zip(prop_sigma_fns, prop_samples, strict=True):
            intervals, _ = importance_sampling(intervals, cdfs, count, stratified)
            t_starts, t_ends = distances(intervals)
            with torch.set_grad_enabled(requires_grad):
                trans, _ = render_transmittance_from_density(t_starts, t_ends, evaluate(t_starts, t_ends))
                cdfs = _distribution(trans)
            if requires_grad:
                self.prop_cache.append((intervals, cdfs))
        intervals, _ = importance_sampling(intervals, cdfs, num_samples, stratified)
        if requires_grad:
            self.prop_cache.append((intervals, None))
        return distances(intervals)

    @torch.enable_grad()
    def compute_loss(self, trans: Tensor, loss_scaler: float = 1.0) -> Tensor:
        """Returns how far the networks' distributions fall below the final samples' distribution; empties the cache.

        Args:
            trans: (n_rays, num_samples) transmittance in front of the samples of the last :meth:`sampling`; no gradient
                reaches it.
            loss_scaler: Factor of the loss.

        Returns:
            (), differentiable with respect to the networks; 0 if there is nothing in the cache.
        """
        loss = torch.zeros((), device=self.device)
        if not self.prop_cache:
            return loss
        intervals, _ = self.prop_cache.pop()
        cdfs = _distribution(trans).detach()
        weights = cdfs.diff(dim=1)
        while self.prop_cache:
            proposed, bounds = self.prop_cache.pop()
            assert bounds is not None
            left, right = searchsorted(proposed, intervals)
            bound = bounds.gather(1, right[:, 1:]) - bounds.gather(1, left[:, :-1])
            loss = loss + ((weights - bound).clamp(min=0) ** 2 / (weights + 1e-7)).mean()
        return loss * loss_scaler

    @torch.enable_grad()
    def update_every_n_steps(self, trans: Tensor, requires_grad: bool = False, loss_scaler: float = 1.0) -> float:
        """Makes a step of the networks' optimizer, if ``requires_grad``, and one of its schedule.

        Args:
            trans: As for :meth:`compute_loss`.
            requires_grad: As it was for :meth:`sampling`.
            loss_scaler: As for :meth:`compute_loss`.

        Returns:
            The loss; 0 without ``requires_grad``. Synchronises with the device.

        Raises:
            RuntimeError: There is no optimizer, or :meth:`sampling` was not called with ``requires_grad``.
        """
        loss = 0.0
        if requires_grad:
            if self.optimizer is None:
                raise RuntimeError("update_every_n_steps needs an optimizer: pass one to PropNetEstimator")
            if not self.prop_cache:
                raise RuntimeError("update_every_n_steps must follow sampling(..., requires_grad=True)")
            of_networks = self.compute_loss(trans, loss_scaler)
            self.optimizer.zero_grad()
            of_networks.backward()
            self.optimizer.step()
            loss = of_networks.item()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss


def get_proposal_requires_grad_fn(target: float = 5.0, num_steps: int = 1000) -> Callable[[int], bool]:
    """Returns a function of the step: whether the networks are trained in it.

    From step ``num_steps`` on, ``target`` steps without training lie between two with training; before, this number
    grows linearly.
    """
    steps_since_last = 0

    def requires_grad(step: int) -> bool:
        nonlocal steps_since_last
        due = steps_since_last > min(step / num_steps, 1.0) * target
        steps_since_last = 1 if due else steps_since_last + 1
        return due

    return requires_grad


def _distribution(trans: Tensor) -> Tensor:
    """Returns the opacity accumulated at the edges (n_rays, n + 1), which is 1 at the last one."""
    return 1 - torch.cat((trans, torch.zeros_like(trans[:, :1])), dim=1)
