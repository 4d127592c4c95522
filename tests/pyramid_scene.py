"""What the tests of ops that march through a field share: rays, a scene, and a pyramid's field in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import reference
import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.ops._internal.rays import empty_distance
from voxelfield.rendering.cameras import Cameras

OCCUPANCY_BOX = torch.tensor([[-1.0, -0.8, -1.2], [1.0, 1.1, 0.9]])
PYRAMID_BOX = torch.tensor([[-0.9, -0.8, -1.0], [1.0, 0.9, 0.9]])  # not the same: samples outside see its faces
STEP = 0.06
WIDTH, HEIGHT = 45, 26

CELLS = {
    "bits": ops.pack_occupancy,
    "empty distances to 2": lambda cells: empty_distance(cells, 2),
    "empty distances to 255": lambda cells: empty_distance(cells, 255),
}

# Of weights, relative. A raw density of a few units, rounded to 11 bits after each layer, is off by a few thousandths;
# so is, relatively, the density that is its exponential, and an optical depth of up to -log(1e-3) multiplies that.
WEIGHT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1}

# CUDA has tensor cores for float16 only.
pyramid_dtypes = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (torch.device("cpu"), torch.float32),
        (torch.device("cpu"), torch.float16),
        pytest.param(torch.device("cuda"), torch.float16, marks=pytest.mark.cuda),
    ],
    ids=["cpu-float32", "cpu-float16", "cuda-float16"],
)


def make_rays(count: int) -> dict[str, Tensor]:
    """Rays through, from inside and past the box."""
    low, high = OCCUPANCY_BOX
    inside = low + (high - low) * torch.rand(count, 3)
    directions = F.normalize(torch.randn(count, 3), dim=-1)
    directions[::9] = torch.tensor([0.0, 0.0, -1.0])
    origins = inside - 2.0 * torch.rand(count, 1) * directions
    origins[::7] += 10.0
    near = 0.2 * torch.rand(count)
    far = near + 3.0
    far[::11] = near[::11]
    return {"origins": origins, "directions": directions, "near": near, "far": far}


def make_levels(count: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(5 + 4 * level, 4 + 3 * level, 6 + 5 * level, 4).to(dtype) for level in range(count)]


def make_camera(device: torch.device | str = "cpu") -> Cameras:
    """A camera, turned about all axes, that sees the box and what is beside it."""
    c2w = torch.tensor([[0.8, -0.36, 0.48, 1.6], [0.6, 0.48, -0.64, -2.1], [0.0, 0.8, 0.6, 2.0], [0.0, 0.0, 0.0, 1.0]])
    return Cameras(c2w[None], torch.tensor([[40.0, 42.0, 21.0, 14.0]]), WIDTH, HEIGHT).to(device)


def make_weights(*widths: int) -> list[Tensor]:
    """Layers whose outputs are about as large as their inputs, exactly representable in float16."""
    return [
        (torch.randn(fan_out, fan_in) * math.sqrt(2 / fan_in)).half().float() for fan_in, fan_out in pairwise(widths)
    ]


def on(device, scene):
    """The scene's tensors, single and in lists, on a device."""
    return {
        name: [x.to(device) for x in value] if isinstance(value, list) else value.to(device)
        for name, value in scene.items()
    }


def exact_network(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights[:-1]:
        inputs = torch.relu(inputs @ weight.double().T)
    return inputs @ weights[-1].double().T


def exact_geometry(scene, positions: Tensor) -> Tensor:
    low, high = scene["aabb"].double()
    unit = (positions.double() - low) / (high - low)
    features = [reference.sample_grid(level.double(), unit) for level in scene["levels"]]
    return exact_network(torch.cat(features, dim=1), scene["density_weights"])


def of_dense_levels(scene):
    """The scene's values as raw ops take them: after the levels a table of blocks for each, which dense ones lack."""
    values, index = list(scene.values()), list(scene).index("levels") + 1
    return [*values[:index], [None] * len(scene["levels"]), *values[index:]]
