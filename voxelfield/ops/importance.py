"""New samples along rays, drawn where the weights of earlier ones are large."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.foundation.autograd import hold_constant
from voxelfield.foundation.checks import FLOATING, check_field, check_ray_offsets, check_tensor
from voxelfield.ops._packing import check_count, pack_equal_rays, ray_index_from_offsets
from voxelfield.ops.ray_sums import INCLUSIVE, scan


def importance_sample(
    t_starts: Tensor,
    t_ends: Tensor,
    weights: Tensor,
    count: int,
    ray_offsets: Tensor | None = None,
    *,
    offset: Tensor | None = None,
) -> Tensor:
    r"""Draws distances along each ray from the distribution of its weights, by inverse transform sampling.

    The density of the distribution is constant in each interval, with the interval's weight as its integral (Mildenhall
    et al. 2020, section 5.2; Barron et al. 2022, "Mip-NeRF 360", section 3). Its cumulative distribution is inverted at
    :math:`u_k = (k + offset) / N` for :math:`k < N`, so there is one distance in each of N shares of equal weight.
    Nothing is drawn between intervals. For the intervals of a next round, draw one distance more than intervals are
    wanted, and take each two neighbours.

    The weights of a ray are used as they are: add a constant to have some samples everywhere, or blur them as Mip-NeRF
    does. If no weight is positive, distances are distributed uniformly over the ray's intervals. Does not
    synchronise with the device. Not differentiable.

    Args:
        t_starts: (M,) float32 or float64, distances at which the intervals of all rays begin, packed by ray, near to
            far, without overlap; (R, S) without ``ray_offsets``. Of samples ``t - dt / 2``, of (R, S + 1) edges
            ``edges[:, :-1]``.
        t_ends: The shape and dtype of ``t_starts``, distances at which the intervals end.
        weights: The shape of ``t_starts``, float32, float64, float16 or bfloat16; need not sum to 1. A weight that is
            not positive and finite counts as zero.
        count: Number N of distances to draw on each ray, at least 0.
        ray_offsets: As for :func:`composite`; None: the intervals of ray r are row r of (R, S).
        offset: (R,), one for all of a ray's distances, or (R, N), one for each, float32 or float64 in [0, 1): where in
            its share of the weight a distance lies. ``torch.rand`` gives stratified samples; 0.5 (the middle) if None.

    Returns:
        (R, N) distances of the dtype of ``t_starts``, rising along each ray. A ray without intervals gets zeros.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape or device, or ``count`` is negative; or, on the CPU,
            ``ray_offsets`` fall or leave 0..M.
        NotImplementedError: An argument carries a tangent of forward-mode differentiation, or is mapped by
            ``torch.vmap``.
    """
    if ray_offsets is None:
        starts, ends, masses, offsets = pack_equal_rays("t_starts", t_starts, t_ends=t_ends, weights=weights)
        return importance_sample(starts, ends, masses, count, offsets, offset=offset)
    check_field("t_starts", t_starts, ("M",), (torch.float32, torch.float64))
    samples = t_starts.shape[0]
    for name, x, dtypes in (("t_ends", t_ends, (t_starts.dtype,)), ("weights", weights, FLOATING)):
        check_tensor(name, x, (samples,), " as t_starts has")
        check_field(name, x, (samples,), dtypes, "t_starts", t_starts)
    check_count("count", count, "distances")
    ray_offsets = check_ray_offsets(ray_offsets, samples, "t_starts", t_starts).clamp(0, samples)
    rays = ray_offsets.shape[0] - 1
    if offset is None:
        offset = t_starts.new_full((rays,), 0.5)
    one_each = isinstance(offset, Tensor) and offset.dim() == 2
    shape = (rays, count) if one_each else (rays,)
    check_field("offset", offset, shape, (torch.float32, torch.float64), "t_starts", t_starts)
    tensors = {"t_starts": t_starts, "t_ends": t_ends, "weights": weights, "offset": offset}
    t_starts, t_ends, weights, offset = hold_constant("importance_sample", **tensors)
    _library.ensure_loaded(t_starts.device.type)
    if samples == 0 or rays == 0:
        return t_starts.new_zeros(rays, count)
    first, last = ray_offsets[:-1], ray_offsets[1:] - 1
    ray_index = ray_index_from_offsets(ray_offsets, samples)

    def distribution(masses: Tensor) -> tuple[Tensor, Tensor]:
        sums = scan(masses[:, None], None, ray_offsets, INCLUSIVE)[:, 0]
        return sums, sums[last.clamp(min=0)][ray_index]

    # All in float64, because the positions of all rays are searched at once: their integer part is the ray.
    masses = torch.where((weights > 0) & (weights < torch.inf), weights, 0).double()
    _, total = distribution(masses)
    lengths = (t_ends - t_starts).double().clamp(min=torch.finfo(torch.float64).tiny)
    masses = torch.where(total > 0, masses, lengths)
    sums, total = distribution(masses)
    rows = torch.arange(samples, device=t_starts.device)
    # A ray that is not finite must not put the positions of others out of order.
    positions = ray_index + (sums / total).nan_to_num(1.0)
    positions = torch.where(rows < ray_offsets[0], -1, torch.where(rows < ray_offsets[-1], positions, rays + 1))
    shares = torch.arange(count, device=t_starts.device) + offset.double().view(rays, -1)
    # Below 1 also after the ray's number is added, so that no ray takes its last distance from the next one.
    wanted = (shares / max(count, 1)).clamp(0, 1 - 2**-24)
    found = torch.searchsorted(positions, wanted + torch.arange(rays, device=t_starts.device)[:, None], right=True)
    found = torch.minimum(torch.maximum(found, first[:, None]), last.clamp(min=0)[:, None])
    fraction = (wanted * total[found] - (sums - masses)[found]) / masses[found]
    start, end = t_starts.double()[found], t_ends.double()[found]
    drawn = torch.lerp(start, end, fraction.clamp(0, 1)).to(t_starts.dtype)
    return drawn.masked_fill((last < first)[:, None], 0)
