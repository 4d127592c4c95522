"""trilinear_interpolate: the order of the corners, and cells beside others; test_grid has values and derivatives."""

from __future__ import annotations

import pytest
import torch
from reference import CORNER_ORDERS, SIDES, interpolate_cells
from test_grid import make_cells
from tolerances import assert_matches

from voxelfield.ops import sample_trilinear, trilinear_interpolate


def test_far_beyond_the_cell_the_interpolant_is_continued(device):
    feats, _ = make_cells(device, channels=1, count=8)
    points = torch.eye(3, device=device, dtype=torch.float64).repeat(3, 1)[:8] * 1e6
    assert_matches(trilinear_interpolate(feats, points), interpolate_cells(feats, points))


# --- the order of the corners


def test_corner_order_is_binary(device):
    # Corner 4i + 2j + k holds its own number: at that corner, the number comes out.
    feats = torch.arange(8.0, device=device).view(1, 8, 1)
    for i, j, k in SIDES:
        point = torch.tensor([[2.0 * i - 1, 2.0 * j - 1, 2.0 * k - 1]], device=device)
        assert trilinear_interpolate(feats, point).item() == 4 * i + 2 * j + k


@pytest.mark.parametrize("order", CORNER_ORDERS)
def test_published_orders_differ_by_a_permutation(device, order):
    feats, points = make_cells(device)
    theirs = interpolate_cells(feats, points, order)
    # Ours[4i + 2j + k] is theirs[number(i, j, k)].
    permutation = {
        "4i+2j+k": [0, 1, 2, 3, 4, 5, 6, 7],
        "4i+j+2k": [0, 2, 1, 3, 4, 6, 5, 7],
        "i+2j+4k": [0, 4, 2, 6, 1, 5, 3, 7],
    }[order]
    assert permutation == [CORNER_ORDERS[order](i, j, k) for i, j, k in SIDES]
    assert_matches(trilinear_interpolate(feats[:, permutation], points), theirs)
    if order != "4i+2j+k":
        assert not torch.allclose(trilinear_interpolate(feats, points), theirs)


def test_corner_order_is_a_grid_s_memory_order(device):
    grid = torch.randn(2, 2, 2, 3, device=device, dtype=torch.float64)
    unit = torch.rand(10, 3, device=device, dtype=torch.float64)
    feats = grid.view(1, 8, 3).expand(10, 8, 3)
    assert_matches(trilinear_interpolate(feats, unit * 2 - 1), sample_trilinear(grid, unit))


def test_features_that_are_not_finite_leave_other_cells_and_channels_alone(device):
    feats, points = make_cells(device)
    expected = trilinear_interpolate(feats, points)
    feats[1::4, 3, 2] = float("nan")
    value = trilinear_interpolate(feats, points)
    assert value[1::4, 2].isnan().all()
    value[1::4, 2] = expected[1::4, 2]
    assert torch.equal(value, expected)
