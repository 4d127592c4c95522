"""Rays to march along, and comparing the samples of two marches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def slanted_rays(box: Tensor, count: int, reach: float) -> tuple[Tensor, Tensor]:
    """Oblique, axis-parallel and plane-parallel rays: from up to ``reach`` before a box, from inside, and past it."""
    low, high = box
    inside = low + (high - low) * torch.rand(count, 3)
    directions = torch.randn(count, 3)
    directions[::5, 0] = 0.0
    directions[::3, 2] = -0.0
    directions[::15, 1] = 1.0 - 2.0 * (torch.arange(0, count, 15) % 2)
    directions = F.normalize(directions, dim=-1)
    back = reach * torch.rand(count, 1)
    back[::4] = 0.0  # start inside
    origins = inside - back * directions
    origins[::7] += 5 * reach  # miss
    return origins, directions


# A float32 position may fall into the neighbouring cell, or on the other side of `far`, this close to the border.
CELL_TOLERANCE = 1e-4
FAR_TOLERANCE = 1e-5


def lattice_keys(samples, scene, offset, step):
    """(ray, k) of every sample; k is the number of its lattice position."""
    t, ray_index = samples.t.cpu(), samples.ray_index.cpu()
    k = (t.double() - scene["near"][ray_index].double()) / step - offset[ray_index].double()
    assert bool(((k - k.round()).abs() < 1e-3).all())
    return set(zip(ray_index.tolist(), k.round().long().tolist(), strict=True))


def is_borderline(scene, offset, step, ray, k):
    t = scene["near"][ray].double() + (k + offset[ray].double()) * step
    low, high = scene["aabb"].double()
    position = scene["origins"][ray].double() + t * scene["directions"][ray].double()
    cell = (position - low) / (high - low) * torch.tensor(scene["occupied"].shape)
    at_face = (cell - cell.round()).abs().min() < CELL_TOLERANCE
    return bool(at_face) or abs(t - scene["far"][ray].double()) < FAR_TOLERANCE


def assert_same_samples(one, two, scene, offset, step):
    """Fails if two marches differ by more than a few positions on the border of a cell or of a ray."""
    keys, other_keys = (lattice_keys(samples, scene, offset, step) for samples in (one, two))
    differing = keys ^ other_keys
    assert len(differing) <= 0.01 * len(other_keys) + 1
    assert all(is_borderline(scene, offset, step, ray, k) for ray, k in differing)
