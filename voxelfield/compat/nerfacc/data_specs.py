"""Edges and samples of rays, as nerfacc's functions pass them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Distances:
    vals: Tensor
    packed_info: Tensor | None = None
    ray_indices: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of ``vals``."""
        return self.vals.device


@dataclass
class RaySamples(_Distances):
    """Distances of samples along rays.

    Attributes:
        vals: (n_rays, n_samples), or (all_samples,) packed by ray.
        packed_info: (n_rays, 2) int64, first sample and number of samples of each ray; None if not packed.
        ray_indices: (all_samples,) int64; None if not packed.
        is_valid: (all_samples,) bool, which entries are samples; None if not packed.
    """

    is_valid: Tensor | None = None


@dataclass
class RayIntervals(_Distances):
    """Edges of intervals along rays. Adjacent intervals share an edge.

    Attributes:
        vals: (n_rays, n_edges), or (all_edges,) packed by ray.
        packed_info: (n_rays, 2) int64, first edge and number of edges of each ray; None if not packed.
        ray_indices: (all_edges,) int64; None if not packed.
        is_left: (all_edges,) bool, which edges begin an interval; None if not packed.
        is_right: (all_edges,) bool, which edges end an interval; None if not packed.
    """

    is_left: Tensor | None = None
    is_right: Tensor | None = None
