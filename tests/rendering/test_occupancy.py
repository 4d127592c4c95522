"""OccupancyGrid: what it marks, and as a module."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from reference import sample_grid
from torch import nn

from voxelfield.ops import pack_occupancy
from voxelfield.rendering.occupancy import OccupancyGrid

BOX = torch.tensor([[-1.0, 0.5, -3.0], [2.0, 1.5, 1.0]])
STEP, THRESHOLD = 0.05, 0.2
DENSITY_AT_THRESHOLD = -math.log1p(-THRESHOLD) / STEP

# Cells of the occupancy grid, vertices of the field: coarser, finer, equal, odd, and axes without extent.
SHAPES = pytest.mark.parametrize(
    ("resolution", "vertices"),
    [
        ((1, 1, 1), (4, 5, 6)),
        ((3, 5, 7), (6, 10, 9)),
        ((9, 16, 11), (4, 3, 5)),
        ((4, 4, 4), (5, 5, 5)),
        ((2, 3, 4), (1, 2, 1)),
        ((8, 8, 8), (1, 1, 1)),
        ((7, 1, 13), (17, 9, 8)),
    ],
    ids=str,
)


def spiky_density(vertices):
    """Mostly far below the threshold, here and there far above."""
    spikes = torch.rand(vertices) < 0.15
    spikes.view(-1)[0] = True
    return torch.where(spikes, 30.0, 0.2) * torch.rand(vertices)


def expected_cells(density, resolution):
    """Brute force: a cell is occupied if any field cell overlapping its inside has a vertex above the threshold."""
    occupied = torch.zeros(resolution, dtype=torch.bool)
    sizes = [max(size - 1, 1) for size in density.shape]
    for cell in itertools.product(*(range(size) for size in resolution)):
        ranges = []
        for index, size, field_cells, field_vertices in zip(cell, resolution, sizes, density.shape, strict=True):
            # Field cell i spans [i, i + 1] / field_cells, the cell [index, index + 1] / size; in whole numbers.
            over = [
                i
                for i in range(field_cells)
                if i * size < (index + 1) * field_cells and (i + 1) * size > index * field_cells
            ]
            ranges.append(slice(over[0], min(over[-1] + 2, field_vertices)))
        occupied[cell] = density[tuple(ranges)].max() > DENSITY_AT_THRESHOLD
    return occupied


def filled(*cells, resolution=(4, 5, 2)):
    grid = OccupancyGrid(resolution, BOX)
    grid.occupied.zero_()
    for cell in cells:
        grid.occupied[cell] = True
    return grid


# --- construction


def test_everything_is_occupied_at_first(device):
    grid = OccupancyGrid((2, 3, 4), BOX).to(device)
    assert grid.occupied.shape == (2, 3, 4)
    assert grid.occupied.dtype == torch.bool
    assert grid.occupied.all()
    assert grid.occupied.device.type == grid.aabb.device.type == device.type
    assert grid.fraction() == 1.0
    assert torch.equal(grid.aabb.cpu(), BOX)
    assert set(grid.state_dict()) == {"occupied", "allowed", "density_ema_max", "aabb"}
    assert OccupancyGrid(3, BOX.tolist()).occupied.shape == (3, 3, 3)


def test_the_box_is_copied():
    box = BOX.clone()
    grid = OccupancyGrid(2, box)
    box.zero_()
    assert torch.equal(grid.aabb, BOX)
    box = BOX + 1
    grid.update_from_vertices(torch.ones(2, 2, 2), box, STEP, THRESHOLD)
    box.zero_()
    assert torch.equal(grid.aabb, BOX + 1)


@pytest.mark.parametrize("resolution", [0, (4, 4), (4, 0, 4), (4, 4, 4, 4)])
def test_wrong_resolutions_are_refused(resolution):
    with pytest.raises(ValueError, match=r"resolution must be (one int, or three|at least 1)"):
        OccupancyGrid(resolution, BOX)


@pytest.mark.parametrize("aabb", [BOX.flatten(), BOX.flip(0), BOX[[0, 0]], torch.full((2, 3), math.nan)])
def test_wrong_boxes_are_refused(aabb):
    with pytest.raises(ValueError, match=r"aabb must be (finite with low < high|two corners)"):
        OccupancyGrid(4, aabb)


# --- update


@SHAPES
def test_update_marks_exactly_the_cells_that_touch_matter(device, resolution, vertices):
    density = spiky_density(vertices)
    grid = OccupancyGrid(resolution, BOX).to(device)
    grid.update_from_vertices(density.to(device), BOX.to(device), STEP, THRESHOLD)
    assert grid.occupied.dtype == torch.bool
    assert torch.equal(grid.occupied.cpu(), expected_cells(density, resolution))


@SHAPES
def test_no_visible_point_lies_in_an_empty_cell(device, resolution, vertices):
    points = torch.rand(20_000, 3, dtype=torch.float64)
    cells = (points * torch.tensor(resolution)).long()
    seen = 0
    for _ in range(5):
        density = spiky_density(vertices)
        grid = OccupancyGrid(resolution, BOX).to(device)
        grid.update_from_vertices(density.to(device), BOX.to(device), STEP, THRESHOLD)
        opacity = 1 - torch.exp(-sample_grid(density[..., None].double(), points)[:, 0] * STEP)
        visible = opacity > THRESHOLD + 1e-6
        assert grid.occupied.cpu()[cells[visible].unbind(1)].all()
        seen += int(visible.sum())
    assert seen > 100


def test_the_densest_vertex_decides_at_the_threshold(device):
    for factor, occupied in ((0.999, False), (1.001, True)):
        grid = OccupancyGrid(1, BOX).to(device)
        density = torch.zeros(3, 3, 3, device=device)
        density[2, 0, 1] = factor * DENSITY_AT_THRESHOLD
        grid.update_from_vertices(density, BOX.to(device), STEP, THRESHOLD)
        assert bool(grid.occupied) is occupied


def test_huge_density_is_occupied_and_none_is_empty(device):
    grid = OccupancyGrid(2, BOX).to(device)
    for density, fraction in ((1e30, 1.0), (0.0, 0.0), (math.inf, 1.0)):
        grid.update_from_vertices(torch.full((3, 3, 3), density, device=device), BOX.to(device), STEP, THRESHOLD)
        assert grid.fraction() == fraction


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_density_that_is_not_finite_is_occupied_until_it_is_finite(device, value):
    grid = OccupancyGrid(4, BOX).to(device)
    density = torch.zeros(5, 5, 5, device=device)
    grid.update_from_vertices(density, BOX.to(device), STEP, THRESHOLD)
    assert grid.fraction() == 0
    density[1, 2, 3] = value
    grid.update_from_vertices(density, BOX.to(device), STEP, THRESHOLD)
    assert grid.occupied.nonzero().amin(0).tolist() == [0, 1, 2]
    assert grid.occupied.sum() == 8
    grid.update_from_vertices(torch.zeros_like(density), BOX.to(device), STEP, THRESHOLD)
    assert grid.fraction() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_observing_recovers_from_densities_that_are_not_finite(device, value):
    grid = OccupancyGrid(4, BOX).to(device)
    grid.update_from_samples(lambda x: torch.where(x[:, 0] < BOX[:, 0].mean().item(), value, 0.0), STEP, THRESHOLD)
    assert grid.occupied[:2].all()
    assert not grid.occupied[2:].any()
    grid.update_from_samples(lambda x: torch.zeros_like(x[:, 0]), STEP, THRESHOLD)
    assert grid.fraction() == 0


def test_update_needs_no_gradient(device):
    grid = OccupancyGrid(2, BOX).to(device)
    grid.update_from_vertices(torch.rand(3, 3, 3, device=device, requires_grad=True), BOX.to(device), STEP, THRESHOLD)
    assert not grid.occupied.requires_grad
    assert "occupied" in dict(grid.named_buffers())


@pytest.mark.parametrize("seen", ["vertices", "samples"])
def test_a_thin_mist_loses_the_cells_from_which_it_has_gone(device, seen):
    def occupied(mist, denser, share):
        """Updates 4^3 cells of a mist, of which the first layer is denser and the last one is nearly empty."""
        grid = OccupancyGrid(4, BOX).to(device)
        layers = DENSITY_AT_THRESHOLD * torch.tensor([denser, mist, mist, 0.1 * mist], device=device)
        if seen == "vertices":
            # A layer of cells also overlaps field cells between its vertices and those of its neighbours.
            density = layers.repeat_interleave(3)[:, None, None].expand(12, 12, 12).contiguous()
            grid.update_from_vertices(density, grid.aabb, STEP, THRESHOLD, share_of_mean=share)
        else:
            grid.update_from_samples(
                lambda points: layers[cells_of(points, (4, 4, 4))[:, 0]], STEP, THRESHOLD, share_of_mean=share
            )
        return grid.occupied.flatten(1).all(dim=1).tolist()

    last = seen == "vertices"  # whose cells touch the mist
    assert occupied(0.3, 0.3, None) == [False, False, False, False]
    assert occupied(0.3, 0.3, 0.5) == [True, True, True, last]
    assert occupied(0.3, 0.9, 0.5) == [True, True, True, last]
    # Matter raises the mean, so that the threshold counts again.
    assert occupied(0.3, 1000.0, 0.5)[2:] == [False, False] == occupied(0.3, 1000.0, None)[2:]
    assert occupied(0.005, 0.005, 0.5) == [False, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_densities_that_are_not_finite_do_not_count_in_the_mean(device, dtype):
    grid = OccupancyGrid(64, BOX).to(device)
    density = torch.full((65, 65, 65), 0.4 * DENSITY_AT_THRESHOLD, dtype=dtype, device=device)
    density[:33] = math.nan
    density[60:] = 0.3 * DENSITY_AT_THRESHOLD
    grid.update_from_vertices(density, BOX.to(device), STEP, THRESHOLD, share_of_mean=0.99)
    occupied = grid.occupied.flatten(1)
    assert occupied[:60].all()
    assert not occupied[60:].any(), "as they would be if the mean were 0.2 of the threshold"


def test_the_mean_is_that_of_the_cells_that_were_occupied(device):
    densities = DENSITY_AT_THRESHOLD * torch.tensor([0.9, 0.4, 0.1, 0.1], device=device)

    def layers(points):
        return densities[cells_of(points, (4, 1, 1))[:, 0]]

    grid = OccupancyGrid((4, 1, 1), BOX).to(device)
    found = []
    for _ in range(3):
        grid.update_from_samples(layers, STEP, THRESHOLD, share_of_mean=0.7)
        found.append(grid.occupied.flatten().tolist())
    # Limits of 0.26, 0.46 and 0.63 of the threshold.
    assert found == [[True, True, False, False], [True, False, False, False], [True, False, False, False]]


@pytest.mark.parametrize("drawn", [None, 64])
def test_excluded_cells_stay_empty_until_the_grid_is_restricted_again(device, drawn):
    grid = OccupancyGrid(4, BOX).to(device)
    grid.update_from_samples(constant(DENSITY_AT_THRESHOLD * 2), STEP, THRESHOLD)
    excluded = torch.rand(4, 4, 4, device=device) < 0.5
    bits, highest = grid.bits.words.clone(), grid.density_ema_max.clone()
    grid.exclude(excluded)
    assert torch.equal(grid.occupied, ~excluded)
    assert not torch.equal(grid.bits.words, bits)
    assert torch.equal(grid.density_ema_max, torch.where(excluded, 0, highest)), "other cells keep what was seen there"
    grid.update_from_samples(constant(DENSITY_AT_THRESHOLD * 2), STEP, THRESHOLD, decay=1.0, cells=drawn)
    assert torch.equal(grid.occupied, ~excluded)
    grid.update_from_vertices(torch.full((5, 5, 5), 1e9, device=device), BOX.to(device), STEP, THRESHOLD)
    assert torch.equal(grid.occupied, ~excluded)
    more = torch.rand(4, 4, 4, device=device) < 0.5
    grid.exclude(more)
    assert torch.equal(grid.allowed, ~(excluded | more))
    grid.restrict(torch.ones_like(more), BOX.to(device))
    assert grid.fraction() == 1


def test_exclusion_refuses_what_are_not_its_cells():
    grid = OccupancyGrid(4, BOX)
    with pytest.raises(TypeError, match="cells must be bool, got int32"):
        grid.exclude(torch.zeros(4, 4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cells must have shape \(4, 4, 4\).*, got \(4, 4, 5\)"):
        grid.exclude(torch.zeros(4, 4, 5, dtype=torch.bool))


def test_update_refuses_wrong_arguments():
    grid = OccupancyGrid(2, BOX)
    with pytest.raises(ValueError, match=r"density must have shape \(X, Y, Z\), got \(3, 3, 3, 1\)"):
        grid.update_from_vertices(torch.zeros(3, 3, 3, 1), BOX, STEP, THRESHOLD)
    for threshold in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"threshold must lie in \(0, 1\)"):
            grid.update_from_vertices(torch.zeros(3, 3, 3), BOX, STEP, threshold)
    for share in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="share_of_mean must be positive and finite, or None, got"):
            grid.update_from_vertices(torch.zeros(3, 3, 3), BOX, STEP, THRESHOLD, share_of_mean=share)
        with pytest.raises(ValueError, match="share_of_mean must be positive and finite, or None, got"):
            grid.update_from_samples(torch.zeros_like, STEP, THRESHOLD, share_of_mean=share)


# --- observe


def constant(value):
    return lambda points: torch.full(points.shape[:1], value, device=points.device)


def cells_of(points, resolution):
    low, high = BOX.to(points.device)
    return ((points - low) / (high - low) * torch.tensor(resolution, device=points.device)).long()


def test_observe_finds_a_blob(device):
    grid = OccupancyGrid((12, 10, 16), BOX).to(device)
    low, size = BOX[0].to(device), (BOX[1] - BOX[0]).to(device)

    def density(points):
        inside = ((points - low) / size - 0.5).norm(dim=-1) < 0.3
        return torch.where(inside, 2 * DENSITY_AT_THRESHOLD, 0.5 * DENSITY_AT_THRESHOLD)

    grid.update_from_samples(density, STEP, THRESHOLD)
    axes = [(torch.arange(n) + 0.5) / n - 0.5 for n in (12, 10, 16)]
    distance = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).norm(dim=-1)
    half_diagonal = 0.5 * math.hypot(1 / 12, 1 / 10, 1 / 16)
    assert grid.occupied.cpu()[distance < 0.3 - half_diagonal].all()
    assert not grid.occupied.cpu()[distance > 0.3 + half_diagonal].any()


def test_observe_looks_once_into_every_allowed_cell(device):
    grid = OccupancyGrid((6, 5, 7), BOX).to(device)
    allowed = torch.rand(6, 5, 7, device=device) < 0.6
    grid.restrict(allowed, BOX.to(device))
    looked = []

    def density(points):
        looked.append(points)
        return constant(100.0)(points)

    grid.update_from_samples(density, STEP, THRESHOLD, chunk=50)
    assert max(len(points) for points in looked) == 50
    cells = cells_of(torch.cat(looked), (6, 5, 7))
    assert torch.equal(cells, allowed.nonzero())
    assert torch.equal(grid.occupied, allowed)
    first = torch.cat(looked)
    looked.clear()
    grid.update_from_samples(density, STEP, THRESHOLD)
    assert not torch.isclose(torch.cat(looked), first).all(dim=-1).any(), "other points each time"


@pytest.mark.parametrize("count", [1, 201])
def test_observe_draws_half_of_the_cells_from_the_occupied_ones(device, count):
    shape = (6, 5, 7)
    grid = OccupancyGrid(shape, BOX).to(device)
    allowed = torch.rand(shape, device=device) < 0.6
    grid.restrict(allowed, BOX.to(device))
    for occupied in (torch.zeros_like(allowed), allowed & (torch.rand(shape, device=device) < 0.1)):
        looked = []

        def density(points, looked=looked):
            looked.append((cells_of(points, shape), torch.rand_like(points[:, 0])))
            return looked[-1][1]

        grid.occupied.copy_(occupied)
        grid.update_from_samples(density, STEP, THRESHOLD, cells=count, chunk=50, decay=0.0)
        cells, seen = (torch.cat(column).cpu() for column in zip(*looked, strict=True))
        assert len(cells) == count
        assert allowed.cpu()[tuple(cells.T)].all()
        eligible = occupied.cpu() if occupied.any() else allowed.cpu()
        drawn = cells[count - count // 2 :]
        assert eligible[tuple(drawn.T)].all()
        assert len(drawn.unique(dim=0)) >= min(len(drawn), int(eligible.sum())) / 2
        expected = torch.zeros(shape)
        for cell, value in zip(cells.tolist(), seen.tolist(), strict=True):  # several values of one cell: the highest
            expected[tuple(cell)] = max(expected[tuple(cell)], value)
        assert torch.equal(grid.density_ema_max.cpu(), expected)


def test_observe_finds_by_and_by_what_it_finds_at_once(device):
    """Warm-up, then a quarter of the cells at random and as many of the occupied ones, while the matter moves."""
    grid = OccupancyGrid(8, BOX).to(device)
    middle = BOX[:, 0].mean().item()

    def left(points):
        return torch.where(points[:, 0] < middle, 2 * DENSITY_AT_THRESHOLD, 0.0)

    grid.update_from_samples(lambda points: left(2 * middle - points), STEP, THRESHOLD)
    assert not grid.occupied[:4].any()
    for _ in range(60):
        grid.update_from_samples(left, STEP, THRESHOLD, cells=256, decay=0.9)
    assert grid.occupied[:4].float().mean() > 0.95
    assert not grid.occupied[4:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_drawn_cells_recover_from_densities_that_are_not_finite(device, value):
    grid = OccupancyGrid(2, BOX).to(device)
    grid.update_from_samples(constant(value), STEP, THRESHOLD, cells=100)
    assert grid.occupied.all()
    grid.update_from_samples(constant(0.0), STEP, THRESHOLD, cells=100)
    assert not grid.occupied.any()


def test_nothing_is_drawn_where_nothing_is_allowed(device):
    grid = OccupancyGrid(3, BOX).to(device)
    grid.restrict(torch.zeros(3, 3, 3, dtype=torch.bool, device=device), BOX.to(device))
    grid.update_from_samples(constant(100.0), STEP, THRESHOLD, cells=10)
    assert not grid.occupied.any()


def test_observe_forgets(device):
    grid = OccupancyGrid(3, BOX).to(device)
    grid.update_from_samples(constant(4.04 * DENSITY_AT_THRESHOLD), STEP, THRESHOLD, decay=0.5)
    fractions = []
    for _ in range(3):
        grid.update_from_samples(constant(0.0), STEP, THRESHOLD, decay=0.5)
        fractions.append(grid.fraction())
    assert fractions == [1.0, 1.0, 0.0]
    grid.update_from_samples(constant(1.1 * DENSITY_AT_THRESHOLD), STEP, THRESHOLD)
    grid.restrict(torch.ones(3, 3, 3, dtype=torch.bool, device=device), BOX.to(device))
    grid.update_from_samples(constant(0.0), STEP, THRESHOLD, decay=1.0)
    assert grid.fraction() == 0.0, "confining starts afresh"


def test_observations_follow_a_loaded_state(device):
    source, grid = OccupancyGrid(4, BOX).to(device), OccupancyGrid(4, BOX).to(device)
    source.restrict(torch.rand(4, 4, 4, device=device) < 0.5, BOX.to(device))
    for each in (source, grid):
        each.update_from_samples(constant(100.0), STEP, THRESHOLD)
    grid.load_state_dict(source.state_dict())
    grid.update_from_samples(constant(100.0), STEP, THRESHOLD)
    assert torch.equal(grid.occupied, source.allowed)


def test_observe_refuses_wrong_arguments():
    for changes, message in (
        ({"cells": 0}, "cells must be an int of at least 1, got 0"),
        ({"threshold": 1.0}, r"threshold must lie in \(0, 1\), got 1\.0"),
        ({"decay": 1.5}, r"decay must lie in \[0, 1\], got 1\.5"),
        ({"chunk": 0}, "chunk must be an int of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            OccupancyGrid(2, BOX).update_from_samples(
                constant(1.0), **{"step": STEP, "threshold": THRESHOLD, **changes}
            )


# --- reading it


def test_fraction():
    assert filled((0, 0, 0), (3, 4, 1), (1, 2, 0)).fraction() == pytest.approx(3 / 40)
    assert filled().fraction() == 0.0


def test_bounds_enclose_the_occupied_cells(device):
    bounds = filled((1, 3, 0), (2, 1, 0)).to(device).bounds()
    low, high = BOX
    size = high - low
    expected = torch.stack(
        (low + size * torch.tensor([1 / 4, 1 / 5, 0]), low + size * torch.tensor([3 / 4, 4 / 5, 1 / 2]))
    )
    torch.testing.assert_close(bounds.cpu(), expected)
    torch.testing.assert_close(OccupancyGrid((2, 3, 5), BOX).to(device).bounds().cpu(), BOX)


def test_bounds_of_nothing_are_an_error(device):
    with pytest.raises(RuntimeError, match="no cell is occupied"):
        filled().to(device).bounds()


# --- packed


def assert_bits_are_cells(grid):
    words, resolution = grid.bits
    expected = pack_occupancy(grid.occupied)
    assert resolution == expected.resolution == tuple(grid.occupied.shape)
    assert torch.equal(words, expected.words)


def test_bits_follow_every_change(device):
    grid = OccupancyGrid((5, 4, 9), BOX).to(device)
    assert_bits_are_cells(grid)
    grid.occupied[1:3, :, 5] = False
    assert_bits_are_cells(grid)
    grid.update_from_vertices(spiky_density((6, 7, 8)).to(device), BOX.to(device), STEP, THRESHOLD)
    assert_bits_are_cells(grid)
    grid.restrict(torch.rand(5, 4, 9, device=device) < 0.5, BOX.to(device))
    assert_bits_are_cells(grid)
    with torch.inference_mode():
        grid.occupied.fill_(False)
        assert_bits_are_cells(grid)
    grid.load_state_dict(filled((0, 1, 1)).state_dict())
    assert_bits_are_cells(grid)
    grid.occupied = torch.rand(4, 5, 2, device=device) < 0.5
    assert_bits_are_cells(grid)
    copied = copy.deepcopy(grid)
    copied.occupied.logical_not_()
    assert_bits_are_cells(copied)
    assert_bits_are_cells(grid)


def test_bits_made_in_inference_mode_serve_training(device):
    with torch.inference_mode():
        grid = OccupancyGrid(3, BOX).to(device)
        assert_bits_are_cells(grid)
        grid.occupied[0] = False
        assert_bits_are_cells(grid)
    grid = OccupancyGrid(3, BOX).to(device)
    with torch.inference_mode():
        assert_bits_are_cells(grid)
    grid.occupied[0] = False
    assert_bits_are_cells(grid)


def test_changes_arrive_in_the_same_memory(device):
    # A captured CUDA graph reads addresses.
    grid = OccupancyGrid(6, BOX).to(device)
    words, box = grid.bits.words, grid.aabb
    grid.update_from_vertices(spiky_density((6, 7, 8)).to(device), 2 * BOX.to(device), STEP, THRESHOLD)
    assert torch.equal(words, pack_occupancy(grid.occupied).words)
    assert torch.equal(box.cpu(), 2 * BOX)
    grid.restrict(torch.rand(6, 6, 6, device=device) < 0.5, BOX.to(device))
    assert torch.equal(words, pack_occupancy(grid.occupied).words)
    assert torch.equal(box.cpu(), BOX)
    grid.update_from_samples(lambda points: 200.0 * torch.rand_like(points[:, 0]).round(), STEP, THRESHOLD)
    assert torch.equal(words, pack_occupancy(grid.occupied).words)
    assert grid.bits.words is words


# --- as a module


def test_state_of_another_resolution_is_adopted(device):
    source = filled((0, 1, 1), resolution=(5, 2, 3))
    source.aabb.mul_(2)
    target = nn.ModuleDict({"occupancy": OccupancyGrid(2, BOX)}).to(device)
    target.load_state_dict({f"occupancy.{name}": value for name, value in source.state_dict().items()})
    grid = target["occupancy"]
    assert torch.equal(grid.occupied.cpu(), source.occupied)
    assert torch.equal(grid.aabb.cpu(), 2 * BOX)
    assert grid.occupied.device.type == device.type
    source.occupied.fill_(True)
    assert grid.fraction() == pytest.approx(1 / 30)


def test_broken_state_is_refused():
    with pytest.raises(RuntimeError, match="occupied"):
        OccupancyGrid(2, BOX).load_state_dict({"occupied": torch.ones(4, 4, dtype=torch.bool), "aabb": BOX})
    with pytest.raises(RuntimeError, match="occupied"):
        OccupancyGrid(2, BOX).load_state_dict({"aabb": BOX})


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float])
def test_conversions_leave_the_geometry_alone(device, convert):
    box = BOX + 0.1  # no 16-bit numbers
    grid = convert(nn.Sequential(OccupancyGrid(2, box)))[0].to(device)
    assert grid.aabb.dtype == grid.density_ema_max.dtype == torch.float32
    assert grid.occupied.dtype == torch.bool
    assert torch.equal(grid.aabb.cpu(), box)
