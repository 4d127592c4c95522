"""The sets of points at which grids are sampled: along camera rays, and at random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLES_PER_RAY = 256


def random_points(count: int, device: torch.device) -> Tensor:
    """Returns uniformly distributed points in the unit cube, (count, 3)."""
    return torch.rand(count, 3, device=device)


def camera_points(count: int, device: torch.device) -> Tensor:
    """Returns samples along rays from a sphere around the unit cube, ray by ray, from near to far: (count, 3).

    Each ray has 256 samples, evenly spaced between entry and exit. The ray origins lie on a sphere of radius 2 about
    the cube's centre, and the rays aim at uniformly distributed points inside the cube. If 256 does not divide the
    count, the last ray is truncated.
    """
    rays = -(-count // SAMPLES_PER_RAY)
    eyes = 0.5 + 2 * F.normalize(torch.randn(rays, 3, device=device, dtype=torch.float64), dim=1)
    directions = F.normalize(torch.rand(rays, 3, device=device, dtype=torch.float64) - eyes, dim=1)
    faces = torch.stack((-eyes / directions, (1 - eyes) / directions))
    near, far = faces.amin(0).amax(1, keepdim=True), faces.amax(0).amin(1, keepdim=True)
    steps = (torch.arange(SAMPLES_PER_RAY, device=device, dtype=torch.float64) + 0.5) / SAMPLES_PER_RAY
    t = near + (far - near) * steps
    points = (eyes[:, None] + t[:, :, None] * directions[:, None]).float().clamp_(0, 1)
    return points.reshape(-1, 3)[:count].contiguous()


POINT_SETS = {"camera": camera_points, "random": random_points}
