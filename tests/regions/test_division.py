"""The division of captures by the positions of their cameras."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from voxelfield.regions.division import FILE, Cut, Division, divide
from voxelfield.runs.configured import train_as_configured
from voxelfield.training.config import preset


def poses(positions: torch.Tensor) -> torch.Tensor:
    c2w = torch.eye(4, dtype=torch.float64).repeat(len(positions), 1, 1)
    c2w[:, :3, 3] = positions
    return c2w


def scattered(count: int) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.tensor(
        [5, 2, 1]
    )


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_regions_have_equally_many_cameras_of_their_own_and_share_some_with_neighbours(count):
    positions = scattered(70)
    division = divide(poses(positions), count, overlap=0.2)
    weights = division.weights(positions)
    assert weights.shape == (70, count)
    nearest = weights.argmax(dim=1).bincount(minlength=count)
    assert nearest.min() >= 70 // count - 3
    assert nearest.max() <= 70 // count + 4
    inside = torch.stack([within for _, within in division.cut.regions(positions)], dim=1)
    assert bool((inside | (weights == 0)).all()), "a region draws pictures from where it has no photographs"
    assert 70 < int(inside.sum()) <= 2.5 * 70
    for box, within in zip(division.boxes, inside.T, strict=True):
        low, high = torch.tensor(box, dtype=torch.float64)
        in_box = ((positions >= low) & (positions <= high)).all(dim=1)
        torch.testing.assert_close(in_box, within)


def test_weights_are_shares_everywhere_and_change_smoothly():
    division = divide(poses(scattered(60)), 5, overlap=0.3)
    across = torch.linspace(-40, 40, 20001, dtype=torch.float64)
    for direction in torch.eye(3, dtype=torch.float64):
        weights = division.weights(across[:, None] * direction)
        torch.testing.assert_close(weights.sum(dim=1), torch.ones_like(across))
        assert bool(((weights >= 0) & (weights <= 1)).all())
        assert float(weights.diff(dim=0).abs().max()) < 0.05


def test_the_cut_is_across_the_longest_extent_without_cameras_astray():
    positions = torch.zeros(20, 3, dtype=torch.float64)
    positions[:, 1] = torch.arange(20)
    positions[3, 2] = 1e4
    division = divide(poses(positions), 2, overlap=0.2)
    assert division.cut == Cut(axis=1, low=8, high=11)
    assert division.boxes[1] == ((0, 8, 0), (0, 19, 0))
    middle = torch.tensor([[0, 9.5, 0], [7, 8, 7], [0, -100, 0]])
    torch.testing.assert_close(division.weights(middle), torch.tensor([[0.5, 0.5], [1, 0], [1, 0]]))


def test_cameras_on_the_cut_belong_to_both_regions():
    positions = torch.zeros(12, 3, dtype=torch.float64)
    positions[0, 0], positions[-1, 0] = -1, 1
    division = divide(poses(positions), 2, overlap=0.1)
    inside = torch.stack([within for _, within in division.cut.regions(positions)])
    assert inside.sum(dim=1).tolist() == [11, 11]
    weights = division.weights(torch.tensor([[-0.5, 0, 0], [0, 0, 0], [0.5, 0, 0]]))
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0], [1, 0], [0, 1]]))


@pytest.mark.parametrize(
    ("positions", "count", "message"),
    [
        (torch.zeros(10, 3), 2, r"^regions must be fewer, or 1, because 10 photographs, .* 2 regions, .* one position"),
        (torch.eye(3).repeat(3, 1)[:7], 4, r"^regions must be at most 3 for 7 photographs, got 4$"),
        (torch.tensor([0.0, 1]).repeat_interleave(8)[:, None] * torch.ones(3), 5, "were taken from one position"),
    ],
)
def test_captures_that_cannot_be_divided(positions, count, message):
    with pytest.raises(ValueError, match=message):
        divide(poses(positions), count, overlap=0.2)


def test_the_record_is_read_as_it_was_written(tmp_path):
    division = divide(poses(scattered(40)), 3, overlap=0.2)
    division.write(tmp_path)
    assert Division.read(tmp_path) == division
    with pytest.raises(FileNotFoundError):
        Division.read(tmp_path / "elsewhere")


@pytest.mark.parametrize("damage", [lambda record: record["boxes"].pop(), lambda record: record["cut"].update(axis=3)])
def test_a_damaged_record_is_named(tmp_path, damage):
    divide(poses(scattered(40)), 3, overlap=0.2).write(tmp_path)
    record = json.loads((tmp_path / FILE).read_text())
    damage(record)
    (tmp_path / FILE).write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"^{tmp_path / FILE} must be the record of a division into regions \("):
        Division.read(tmp_path)
    (tmp_path / FILE).write_text("[")
    with pytest.raises(ValueError, match=str(tmp_path / FILE)):
        Division.read(tmp_path)


def test_an_ordinary_run_leaves_a_directory_with_regions_alone(tmp_path):
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(ValueError, match=r"hydra\.run\.dir must not be that of a run with regions, got "):
        train_as_configured(preset(device="cpu"), tmp_path, Path.cwd())
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
