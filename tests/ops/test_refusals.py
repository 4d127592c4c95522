"""What fuzzing found: arguments that were taken for something else, or not refused in one line that names them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from voxelfield import VoxelGrid, VoxelPyramid, ops
from voxelfield.foundation.errors import shown

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
GRID, POINTS = torch.rand(2, 3, 4, 5), torch.rand(6, 3)
MANY = torch.zeros(1, 3).expand(2**44, 3)  # their values need more memory than any machine has
SAMPLES = torch.rand(4), torch.rand(4), torch.tensor([0, 4])


def test_densities_without_lengths_are_not_taken_for_alphas():
    density, _, offsets = SAMPLES
    for op in (ops.ray_weights, ops.ray_transmittance):
        with pytest.raises(TypeError, match=r"^dt must be a torch\.Tensor, got NoneType$"):
            op(density, None, offsets)


def test_nothing_of_another_dtype_is_refused_too():
    with pytest.raises(TypeError, match=r"^feats must be float32 or .*, got int64$"):
        ops.trilinear_interpolate(torch.zeros(0, 8, 0, dtype=torch.int64), torch.zeros(0, 3))
    with pytest.raises(TypeError, match=r"^grid must be float32 or .*, got int64: convert it"):
        ops.sample_trilinear(torch.zeros(2, 2, 2, 0, dtype=torch.int64), POINTS)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.sample_trilinear(GRID, MANY),
        lambda: ops.sample_pyramid([GRID, GRID], MANY),
        lambda: VoxelGrid(2, 1, BOX)(MANY),
        lambda: ops.trilinear_interpolate(torch.zeros(1, 8, 1).expand(2**44, 8, 1), MANY),
        lambda: ops.ray_weights(MANY[:, 0], MANY[:, 0], torch.tensor([0, 1])),
    ],
    ids=["grid", "pyramid", "module", "cells", "rays"],
)
def test_what_runs_out_of_memory_is_not_tried_again(call):
    runs = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "voxelfield":
                runs.append(func)
            return func(*args, **(kwargs or {}))

    with pytest.raises(torch.OutOfMemoryError), Counting():
        call()
    assert len(runs) == 1


def march(**options):
    arguments = {"origins": POINTS, "directions": POINTS, "near": POINTS[:, 0], "far": POINTS[:, 1]}
    arguments |= {"occupied": torch.ones(2, 2, 2, dtype=torch.bool), "aabb": torch.tensor(BOX), "step": 0.1}
    return ops.march_rays(**arguments | options)


def render(**options):
    walk = POINTS, POINTS, POINTS[:, 0], POINTS[:, 1], torch.ones(2, 2, 2, dtype=torch.bool), torch.tensor(BOX)
    settings = {"step": 0.1, "degree": 0, "density_scale": 1.0, "density_shift": 0.0}
    return ops.render_grid(*walk, torch.rand(2, 2, 2, 4), torch.tensor(BOX), **settings | options)


def grid_of(**options):
    return VoxelGrid(**{"resolution": 2, "channels": 1, "aabb": BOX} | options)


def pyramid_of(**options):
    return VoxelPyramid(**{"resolutions": (2, 4), "channels": 1, "aabb": BOX} | options)


def weights(**options):
    return ops.ray_weights(*SAMPLES, **options)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda grid: ops.sample_trilinear(grid, POINTS), "grid", GRID.to_sparse()),
        (lambda mode: ops.sample_trilinear(GRID, POINTS, mode=mode), "mode", np.zeros((9, 9))),
        (lambda reduce: ops.sample_pyramid([GRID], POINTS, reduce=reduce), "reduce", np.zeros(3)),
        (lambda min_transmittance: weights(min_transmittance=min_transmittance), "min_transmittance", None),
        (lambda min_transmittance: weights(min_transmittance=min_transmittance), "min_transmittance", torch.zeros(2)),
        (lambda step: march(step=step), "step", "0.1"),
        (lambda capacity: march(capacity=capacity), "capacity", 10**400),
        (lambda degree: render(degree=degree), "degree", 10**400),
        (lambda density_shift: render(density_shift=density_shift), "density_shift", None),
        (lambda density_shift: render(density_shift=density_shift), "density_shift", float("nan")),
        (lambda fill: grid_of(fill=fill), "fill", None),
        (lambda init_std: grid_of(init_std=init_std), "init_std", 10**400),
        (lambda channels: grid_of(channels=channels), "channels", 10**400),
        (lambda aabb: grid_of(aabb=aabb), "aabb", torch.zeros(2, 2, 3)),
        (lambda resolutions: pyramid_of(resolutions=resolutions), "resolutions", ["2", "4"]),
        (lambda init_range: pyramid_of(init_range=init_range), "init_range", None),
    ],
)
def test_one_line_names_the_argument(call, name, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(value)
    assert str(caught.value).startswith(f"{name} must be ") or str(caught.value).startswith(f"{name} must lie ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_values_are_shown_in_one_short_line():
    assert shown("text") == "'text'"
    assert shown(np.zeros((2, 2))) == "array([[0., 0.], [0., 0.]])"
    assert len(shown(list(range(1000)))) <= 120
    assert shown(10**5000) == "a int"


def test_a_length_of_any_int_that_fits_a_float_is_one():
    density, _, offsets = SAMPLES
    for op in (ops.ray_weights, ops.ray_transmittance):
        assert torch.equal(op(density, 10**30, offsets), op(density, 1e30, offsets))
        with pytest.raises(TypeError, match=r"^dt must be a number, got 1000"):
            op(density, 10**400, offsets)
        with pytest.raises(TypeError, match=r"^min_transmittance must be a number, got 1000"):
            op(density, 0.1, offsets, min_transmittance=10**400)


@pytest.mark.parametrize("option", ["align_corners", "with_gradient"])
def test_options_that_are_neither_true_nor_false_are_named(option):
    for op, grid in ((ops.sample_trilinear, GRID), (ops.sample_pyramid, [GRID, GRID])):
        with pytest.raises(TypeError, match=rf"^{option} must be True or False, got tensor"):
            op(grid, POINTS, **{option: torch.zeros(2)})
    with pytest.raises(TypeError, match=r"^align_corners must be True or False, got tensor"):
        ops.grid_sample(GRID.movedim(-1, 0)[None], POINTS[None, None, None], align_corners=torch.zeros(2))
