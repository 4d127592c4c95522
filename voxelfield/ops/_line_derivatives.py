r"""Second derivatives of integrals along rays, for which the kernels have no formula.

At each face between two cells the gradient of the interpolant jumps, and the place at which a ray crosses the face
moves with the ray: a second derivative has a term for every face. Here the integral is written as the sum over two
Gauss-Legendre nodes in each cell, which is exact, with crossings and nodes as functions of the ray. The derivatives
that torch finds of this sum have all of these terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield.foundation.autograd import MaybeTensor
from voxelfield.ops.grid import sample_trilinear

# The numbers that the samples of a block of rays hold, which bound the memory beside the grid.
_SAMPLES = 1 << 21
# A direction whose part along an axis is a smaller share of its length is taken as parallel to the faces: it crosses
# none of them within the cube, and the cube of its inverse, which second derivatives have, must not overflow.
_PARALLEL = 1e-12

RAYS = ("origins", "directions", "near", "far")
"""Names of the arguments that describe rays."""


def second_derivatives(
    grad: Tensor,
    values: Tensor,
    grid: Tensor,
    origins: Tensor,
    directions: Tensor,
    near: MaybeTensor,
    far: MaybeTensor,
    labels: MaybeTensor,
    label_count: int,
    needs: set[str],
) -> dict[str, Any]:
    """Differentiates what the raw op ``line_gradient`` returns of its arguments; ``grad`` (..., 8) is what arrives."""
    rays, grads = {}, {}
    for name, x, arriving in zip(RAYS, (origins, directions, near, far), grad.split((3, 3, 1, 1), dim=-1), strict=True):
        if x is not None:
            rays[name], grads[name] = x, arriving.view_as(x)
    batched = grid.dim() == 5
    step = max(1, _SAMPLES // (2 * sum(grid.shape[-4:-1]) * max(grid.shape[-1], 1) * label_count))

    def total(rays: dict[str, Tensor], values: Tensor, grid: Tensor) -> Tensor:
        return _integral(values, grid, [rays.get(name) for name in RAYS], labels, label_count)

    found: dict[str, list[Tensor]] = {name: [] for name in ("values", "grid", *rays)}
    for element, one in enumerate(grid if batched else [grid]):
        in_grid = []
        # One block without rays has the right shapes too.
        for start in range(0, max(origins.shape[-2], 1), step):
            block = slice(start, start + step)
            at = (element, block) if batched else (block,)
            some = {name: x[at] for name, x in rays.items()}
            pull = torch.func.vjp(torch.func.grad(total), some, values[at], one)[1]
            of_rays, of_values, of_grid = pull({name: x[at] for name, x in grads.items()})
            in_grid.append(of_grid)
            for name, x in (*of_rays.items(), ("values", of_values)):
                found[name].append(x)
        found["grid"].append(sum(in_grid[1:], in_grid[0]))
    wanted = {name: x for name, x in {"values": values, "grid": grid, **rays}.items() if name in needs}
    if not found["grid"]:  # a batch of no grids
        return {name: torch.zeros_like(x) for name, x in wanted.items()}
    return {name: torch.cat(found[name]).view(x.shape) for name, x in wanted.items()}


def _integral(values: Tensor, grid: Tensor, rays: Sequence[Any], labels: MaybeTensor, label_count: int) -> Tensor:
    """Returns the sum of the products of values (N, C), or (N, L, C) with labels, with integrals along N rays."""
    with torch.no_grad():
        _, begin, end = _cuts(grid, *rays)
        length = rays[1].norm(dim=-1)
        crosses = (begin < end) & end.isfinite() & (length > 0) & length.isfinite() & rays[0].isfinite().all(dim=-1)
    # Where a ray misses the cube, or is not finite, another one is differentiated and counts nothing.
    kept: list[Any] = [None if x is None else torch.where(crosses.view(-1, *[1] * (x.dim() - 1)), x, 0.5) for x in rays]
    cuts, begin, end = _cuts(grid, *kept)
    # Crossings before the first or after the last point of the ray make empty parts there.
    low, high = begin[:, None], end[:, None]
    inside = torch.where(cuts > low, torch.where(cuts < high, cuts, high), low)
    ordered = torch.cat((low, inside.sort(dim=-1).values, high), dim=-1)
    half, middle = 0.5 * ordered.diff(dim=-1), 0.5 * (ordered[:, 1:] + ordered[:, :-1])
    origins, directions, *_ = kept
    weights = half * directions.norm(dim=-1, keepdim=True) * crosses[:, None]
    total = values.new_zeros(())
    for label in range(label_count):
        part, some = grid, values
        if labels is not None:
            part, some = grid * (labels == label).unsqueeze(-1), values[:, label]
        for node in (-math.sqrt(1 / 3), math.sqrt(1 / 3)):
            points = origins[:, None] + (middle + node * half)[..., None] * directions[:, None]
            sampled = (weights[..., None] * sample_trilinear(part, points)).sum(1)
            total = total + torch.where(crosses[:, None], some * sampled, 0.0).sum()
    return total


def _cuts(
    grid: Tensor, origins: Tensor, directions: Tensor, near: MaybeTensor, far: MaybeTensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where rays cross planes of vertices (N, P), and where they begin and end in the unit cube (N,)."""
    begin = origins.new_zeros(len(origins)) if near is None else near
    end = origins.new_full((len(origins),), math.inf) if far is None else far
    flat = directions.abs() < _PARALLEL * directions.norm(dim=-1, keepdim=True)
    found = []
    for axis, size in enumerate(grid.shape[:3]):
        parallel, origin = flat[:, axis], origins[:, axis]
        planes = torch.linspace(0, 1, max(size, 2), dtype=origins.dtype, device=origins.device)
        crossed = (planes - origin[:, None]) / torch.where(parallel, 1.0, directions[:, axis])[:, None]
        first, last = crossed[:, [0, -1]].sort(dim=-1).values.unbind(-1)
        begin = torch.where(~parallel & (first > begin), first, begin)
        end = torch.where(~parallel & (last < end), last, end)
        misses = parallel & ((origin < 0) | (origin > 1))
        end = torch.where(misses, -math.inf, end)
        found.append(torch.where(parallel[:, None], -math.inf, crossed))
    return torch.cat(found, dim=-1), begin, end
