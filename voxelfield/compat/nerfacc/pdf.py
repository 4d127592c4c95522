"""Search in the edges of intervals, and sampling by inverting their distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.compat.nerfacc.data_specs import RayIntervals, RaySamples
from voxelfield.foundation.checks import check_at_least_one, check_tensor


@torch.no_grad()
def searchsorted(
    sorted_sequence: RayIntervals | RaySamples, values: RayIntervals | RaySamples
) -> tuple[Tensor, Tensor]:
    """Finds the neighbours of values among the sorted values of the same ray.

    Args:
        sorted_sequence: (n_rays, n_edges) rising along each ray.
        values: (n_rays, n_values).

    Returns:
        The indices (n_rays, n_values) int64 of the last edge that is not greater, and of the one after it. A value
        below all edges has index 0 twice, and one above all edges has the last two indices.

    Raises:
        NotImplementedError: Samples are packed.
        ValueError: There are other numbers of rays, or no edges.
    """
    edges, wanted = _batched("sorted_sequence", sorted_sequence.vals), _batched("values", values.vals)
    if edges.shape[0] != wanted.shape[0]:
        raise ValueError(f"values must have {edges.shape[0]} rays, as sorted_sequence has, got {wanted.shape[0]}")
    after = torch.searchsorted(edges[:, :-1].contiguous(), wanted.contiguous(), right=True)
    return (after - 1).clamp_(min=0), after


@torch.no_grad()
def importance_sampling(
    intervals: RayIntervals, cdfs: Tensor, n_intervals_per_ray: Tensor | int, stratified: bool = False
) -> tuple[RayIntervals, RaySamples]:
    """Draws samples by inverting a piecewise linear cumulative distribution (Mildenhall et al. 2020, section 5.2).

    Args:
        intervals: (n_rays, n_edges) edges of intervals.
        cdfs: (n_rays, n_edges) the distribution at the edges, rising along each ray.
        n_intervals_per_ray: Number of samples of each ray.
        stratified: Shift the samples of each ray by a random fraction of their distance in the distribution, from
            torch's global generator; otherwise by half of it.

    Returns:
        Edges (n_rays, n + 1) halfway between the samples, within those of ``intervals``, and the samples (n_rays, n).

    Raises:
        NotImplementedError: Samples are packed, or rays have different numbers of them.
        ValueError: ``cdfs`` has another shape than the edges, or the number of samples is below 1.
    """
    edges = _batched("intervals", intervals.vals)
    if isinstance(n_intervals_per_ray, Tensor):
        raise NotImplementedError("n_intervals_per_ray must be an int: other numbers for each ray are not offered")
    count = n_intervals_per_ray
    check_at_least_one("n_intervals_per_ray", count)
    check_tensor("cdfs", cdfs, tuple(edges.shape), " as intervals has")
    shift = torch.rand(len(edges), device=edges.device) if stratified else None
    samples = ops.importance_sample(edges[:, :-1], edges[:, 1:], cdfs.diff(dim=1), count, offset=shift)
    first, last = edges[:, :1], edges[:, -1:]
    if count > 1:
        middles = (samples[:, 1:] + samples[:, :-1]) / 2
        first = torch.maximum(2 * samples[:, :1] - middles[:, :1], first)
        last = torch.minimum(2 * samples[:, -1:] - middles[:, -1:], last)
        return RayIntervals(torch.cat((first, middles, last), dim=1)), RaySamples(samples)
    return RayIntervals(torch.cat((first, last), dim=1)), RaySamples(samples)


def _batched(name: str, vals: Tensor) -> Tensor:
    if vals.dim() == 1:
        raise NotImplementedError(f"{name} must have shape (n_rays, n_edges): packed edges are not offered")
    if vals.dim() != 2 or vals.shape[1] == 0:
        raise ValueError(f"{name} must have shape (n_rays, n_edges), with at least one edge, got {tuple(vals.shape)}")
    return vals
