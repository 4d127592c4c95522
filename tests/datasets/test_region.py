"""A part of a capture: the photographs that were taken within a box."""

from __future__ import annotations

import pytest
import torch
from place_capture import write_capture

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo
from voxelfield.datasets.scene import Scene


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[Photo]:
    """On a line along x, at 0 to 11."""
    folder = tmp_path_factory.mktemp("capture")
    write_capture(folder)
    found = []
    for number, path in enumerate(sorted((folder / "images").iterdir())):
        c2w = torch.eye(4, dtype=torch.float64)
        c2w[0, 3] = number
        found.append(Photo(path, c2w, lambda width, height: (30.0, 30.0, width / 2, height / 2)))
    return found


def load(photos: list[Photo], region: list[list[float]] | None, **options) -> Scene:
    folder = photos[0].path.parents[1]
    points = torch.stack([photo.c2w[:3, 3] for photo in photos]).repeat(2, 1) + torch.tensor([0.3, 0, -5])
    return load_capture(folder, folder, photos, LoadOptions(region=region, holdout=4, **options), points=points)


def test_views_within_the_box_keep_their_split_and_the_points_close_to_them(photos):
    whole, part = load(photos, None), load(photos, [[3, 0, 0], [8, 0, 0]])
    assert part.test.names == ("view_04", "view_08")
    assert part.train.names == ("view_03", "view_05", "view_06", "view_07")
    assert set(part.test.names) < set(whole.test.names)
    assert part.poses()[:, 0, 3].tolist() == [3, 4, 5, 6, 7, 8]
    assert sorted(part.points[:, 0].tolist()) == pytest.approx([x + 0.3 for x in (3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8)])
    assert len(part.border_rays()[0]) == 6


def test_a_region_without_test_views_evaluates_its_training_views(photos):
    assert list(load(photos, [[1, 0, 0], [3, 0, 0]]).splits) == ["train"]


def test_a_region_without_photographs_is_refused(photos):
    with pytest.raises(
        ValueError, match=r"region must contain cameras of photographs, got \[\[1, 1, 0\], \[3, 1, 0\]\] with none"
    ):
        load(photos, [[1, 1, 0], [3, 1, 0]])
