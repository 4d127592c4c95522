"""Every warning is given for its own fault, names the images, and is not given for a good capture."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.captures import checks
from voxelfield.captures.capture import Capture
from voxelfield.datasets.measures import BLURRED
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.paths import orbit

COUNT = 24


@pytest.fixture
def good() -> Capture:
    """A ring of cameras, 4 units from the middle of a box of 2 units."""
    start = torch.eye(4)
    start[:3] = torch.tensor([[0.0, 0.0, 1.0, 3.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 2.5]])  # z is up
    intrinsics = torch.tensor([[100.0, 100.0, 60.0, 40.0]])
    cameras = orbit(Cameras(start[None], intrinsics, 120, 80), torch.zeros(3), COUNT)
    return Capture(
        name="good",
        format="blender",
        names=tuple(f"view_{index}" for index in range(COUNT)),
        splits=("train",) * 20 + ("test",) * 4,
        c2w=cameras.c2w.double(),
        intrinsics=intrinsics.double().repeat(COUNT, 1),
        sizes=((120, 80),) * COUNT,
        aabb=torch.tensor([[-1.0, -1, -1], [1, 1, 1]]).double(),
        points=torch.zeros(0, 3).double(),
        sharpness=tuple(100.0 + index for index in range(COUNT)),
        fingerprints=np.random.default_rng(0).uniform(0, 255, (COUNT, 32, 32)).astype(np.float32),
        thumbnails=(Image.new("RGB", (120, 80)),) * COUNT,
    )


def spoilt(capture: Capture, name: str, index: int, value: object) -> Capture:
    """The capture with another value of a tensor or tuple for one view."""
    old = getattr(capture, name)
    if isinstance(old, tuple):
        return replace(capture, **{name: (*old[:index], value, *old[index + 1 :])})
    new = old.clone() if isinstance(old, torch.Tensor) else old.copy()
    new[index] = value
    return replace(capture, **{name: new})


def turned(pose: torch.Tensor, *signs: float) -> torch.Tensor:
    """A pose with some of its axes reversed."""
    return pose @ torch.diag(torch.tensor([*signs, 1.0], dtype=torch.float64))


def moved(capture: Capture, scale: float) -> Capture:
    c2w = capture.c2w.clone()
    c2w[:, :3, 3] *= scale
    return replace(capture, c2w=c2w, aabb=capture.aabb * scale)


def test_nothing_is_found_about_a_good_capture(good):
    assert checks.check_capture(good) == []


def test_every_check_is_run(good):
    public = {name: each for name, each in vars(checks).items() if inspect.isfunction(each) and name[0] != "_"}
    returned = {each for each in public.values() if each.__annotations__.get("return") == "Finding | None"}
    assert set(checks.CHECKS) == returned
    bad = spoilt(replace(good, aabb=good.aabb * 1000), "sharpness", 3, 1.0)
    assert {finding.title for finding in checks.check_capture(bad)} == {"large box", "blurred images"}


def test_few_views(good):
    per_view = ("names", "splits", "c2w", "intrinsics", "sizes")
    few = replace(good, **{name: getattr(good, name)[:19] for name in per_view})
    assert checks.few_views(few).message.startswith("19 views, but at least 20")
    assert checks.few_views(good) is None


def test_a_box_that_some_cameras_do_not_see(good):
    found = checks.box_out_of_sight(spoilt(good, "c2w", 5, turned(good.c2w[5], -1, 1, -1)))
    assert found.views == (5,)
    assert found.message.startswith("view_5 of 24 cannot see the box: choose another scene.aabb")


def test_a_box_that_no_camera_sees(good):
    found = checks.box_out_of_sight(replace(good, aabb=good.aabb + torch.tensor([0.0, 0.0, 50.0]).double()))
    assert found.views == tuple(range(COUNT))
    assert "view_0, view_1, view_2 and 21 more of 24" in found.message
    assert "check that poses are camera to world" in found.message


def test_poses_with_the_axes_of_opencv(good):
    found = checks.box_out_of_sight(replace(good, c2w=turned(good.c2w, 1, -1, -1)))
    assert len(found.views) == COUNT
    assert "OpenCV's axes (y down, looking along z): negate the second and the third column" in found.message


def test_a_camera_within_the_box_sees_it(good):
    assert checks.box_out_of_sight(replace(good, aabb=good.aabb * 10)) is None


def test_cameras_that_look_away_from_one_another(good):
    found = checks.doubtful_poses(replace(good, c2w=turned(good.c2w, -1, 1, -1)))
    assert "most cameras look away from one another" in found.message
    pose = good.c2w[:1].repeat(COUNT, 1, 1)
    pose[:, :3, 3] += torch.linspace(-1, 1, COUNT, dtype=torch.float64)[:, None] * pose[:, :3, 0]
    assert checks.doubtful_poses(replace(good, c2w=pose)) is None, "side by side they look neither way"


def test_the_axes_of_a_colmap_model_are_not_advised_to_be_negated(good):
    model = replace(good, format="COLMAP")
    away = replace(model, c2w=turned(good.c2w, -1, 1, -1))
    assert checks.doubtful_poses(away) is None, "cameras in a corridor may look away from one another"
    opencv = replace(model, c2w=turned(good.c2w, 1, -1, -1))
    found = checks.box_out_of_sight(opencv)
    assert "those of a COLMAP model are OpenCV's: write the model again" in found.message
    for wrong in (good.c2w, opencv.c2w):
        told = checks.doubtful_poses(replace(model, c2w=torch.linalg.inv(wrong))).message
        assert told == "the matrices seem to be world to camera, but must be camera to world: invert each"


def test_images_of_other_times_are_no_duplicates(good):
    twins = spoilt(spoilt(good, "fingerprints", 20, good.fingerprints[3]), "c2w", 20, good.c2w[3])
    assert checks.duplicate_poses(twins).views == checks.duplicate_images(twins).views == (3, 20)
    dynamic = replace(twins, times=torch.arange(COUNT))
    assert checks.duplicate_poses(dynamic) is checks.duplicate_images(dynamic) is None


def test_matrices_that_are_world_to_camera(good):
    found = checks.doubtful_poses(replace(good, c2w=torch.linalg.inv(good.c2w)))
    assert found.message == "the matrices seem to be world to camera, but must be camera to world: invert each"


def test_cameras_far_from_all_others_are_named(good):
    lost = good.c2w[5].clone()
    lost[:3, 3] *= 10
    found = checks.cameras_astray(spoilt(good, "c2w", 5, lost))
    assert found.views == (5,)
    assert found.message.startswith("view_5 is up to ")
    assert "and the 23 others within 3" in found.message
    assert checks.cameras_astray(good) is None


@pytest.mark.parametrize(("scale", "is_absurd"), [(1e-5, True), (1e-4, False), (100.0, False), (1e4, True)])
def test_scenes_that_are_tiny_or_huge(good, scale, is_absurd):
    found = checks.absurd_scale(moved(good, scale))
    assert (found is not None) == is_absurd
    if is_absurd:
        assert f"are {6.3 * scale:.1g}"[:5] in found.message
        assert "scale the poses" in found.message


@pytest.mark.parametrize(
    ("factor", "title"), [(0.02, "small box"), (0.2, None), (5.0, None), (30.0, None), (60.0, "large box")]
)
def test_boxes_that_are_much_larger_or_smaller_than_the_cameras_distance(good, factor, title):
    found = checks.box_unlike_cameras(replace(good, aabb=good.aabb * factor))
    assert (found and found.title) == title
    if title is not None:
        assert f"half of its diagonal is {factor * math.sqrt(3):.3g} units, and the cameras are 3.91" in found.message


def test_portrait_images_among_landscape_ones(good):
    found = checks.mixed_orientation(spoilt(spoilt(good, "sizes", 2, (80, 120)), "sizes", 9, (80, 120)))
    assert found.views == (2, 9)
    assert found.message.startswith("view_2, view_9 are portrait among 22 that are not: fine if")
    assert "rotate the files" not in found.message
    assert checks.mixed_orientation(replace(good, sizes=((80, 120),) * COUNT)) is None
    assert checks.mixed_orientation(spoilt(good, "sizes", 2, (80, 80))) is None


@pytest.mark.parametrize("degrees", [180, 90, -90])
def test_a_camera_that_is_rolled(good, degrees):
    angle = math.radians(degrees)
    roll = torch.eye(4, dtype=torch.float64)
    roll[:2, :2] = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    found = checks.cameras_rolled(spoilt(good, "c2w", 7, good.c2w[7] @ roll))
    assert found.views == (7,)
    assert found.message.startswith("view_7 is upside down or sideways")


def test_a_camera_that_looks_straight_down_is_not_rolled(good):
    down = torch.eye(4, dtype=torch.float64)
    down[2, 3] = 4.0
    assert checks.cameras_rolled(spoilt(good, "c2w", 0, down)) is None


@pytest.mark.parametrize("focal", [0.0, 5.0, 1e5])
def test_focal_lengths_that_are_hardly_those_of_a_camera(good, focal):
    found = checks.odd_field_of_view(spoilt(good, "intrinsics", 4, torch.tensor([focal, focal, 60.0, 40.0]).double()))
    assert found.views == (4,)
    assert found.message.startswith("view_4 has less than 2 or more than 150 degrees")
    assert f"{focal:.4g} pixels" in found.message


@pytest.mark.parametrize(("ratio", "k1", "model"), [(943 / 320, 0.0, "perspective"), (1.0, 1.09, "perspective")])
def test_calibrations_that_failed(good, ratio, k1, model):
    def of(ratio: float, k1: float, model: str) -> Capture:
        intrinsics = good.intrinsics.clone()
        intrinsics[3, 1] *= ratio
        terms = torch.zeros(COUNT, 8 if model == "rational" else 6)
        terms[3, 0] = k1
        return replace(good, intrinsics=intrinsics, lens=Lens(model, terms))

    found = checks.odd_lens(of(ratio, k1, model))
    assert found.views == (3,)
    assert f"the first fx 100, fy {100 * ratio:.4g} and k1 {k1:.3g}: find the poses again" in found.message
    assert checks.odd_lens(of(1.33, -0.3, model)) is None, "pixels of some videos, and the lens of an action camera"
    assert checks.odd_lens(of(1.0, 9.0, "rational")) is None


def test_blurred_images(good):
    median = float(np.median(good.sharpness))
    found = checks.blurred_images(spoilt(good, "sharpness", 11, 0.9 * BLURRED * median))
    assert found.views == (11,)
    remedies = "leave them out, or count them less with trainer.loss.sharpness=1"
    assert found.message == f"view_11 has less than 0.2 of the median sharpness: {remedies}"
    assert checks.blurred_images(spoilt(good, "sharpness", 11, 1.1 * BLURRED * median)) is None


def test_images_that_are_nearly_the_same(good):
    noise = np.random.default_rng(1).uniform(-1, 1, (32, 32))
    twins = spoilt(good, "fingerprints", 20, good.fingerprints[3] + noise)
    found = checks.duplicate_images(twins)
    assert found.views == (3, 20)
    assert found.message == "view_3 and view_20 are nearly identical: leave out one of each pair"
    other = good.fingerprints[3].copy()
    other[10, 10] += 20  # something small has moved
    assert checks.duplicate_images(spoilt(good, "fingerprints", 20, other)) is None


def test_cameras_in_the_same_place_that_look_the_same_way(good):
    # In float32, as most files have them, rotations are not quite orthonormal.
    rounded = good.c2w[3].clone()
    rounded[:3, :3] *= 1 - 1e-6
    assert checks.duplicate_poses(spoilt(good, "c2w", 20, rounded)).views == (3, 20)
    beside = good.c2w[3].clone()
    beside[0, 3] += 1e-3
    assert checks.duplicate_poses(spoilt(good, "c2w", 20, beside)) is None
    elsewhere = good.c2w[8].clone()
    elsewhere[:3, 3] = good.c2w[3, :3, 3]
    assert checks.duplicate_poses(spoilt(good, "c2w", 20, elsewhere)) is None


def test_a_warning_is_one_line_that_names_three_images_at_most(good):
    bad = replace(good, sizes=((80, 120),) * 5 + ((120, 80),) * 19, sharpness=(1.0,) * 6 + (100.0,) * 18)
    findings = checks.check_capture(bad)
    assert [finding.title for finding in findings] == ["mixed orientation", "blurred images"]
    for finding, more in zip(findings, (2, 3), strict=True):
        assert f"view_0, view_1, view_2 and {more} more" in finding.message
        assert "\n" not in finding.message


def test_images_that_look_past_the_box(good):
    assert checks.box_cuts_images(replace(good, beyond_box=(0.0,) * 23 + (0.1,))) is None, "a few pixels do no harm"
    found = checks.box_cuts_images(replace(good, beyond_box=(0.0,) * 12 + (0.3,) * 11 + (0.9,)))
    assert found.views == tuple(range(12, COUNT))
    assert found.message.startswith("18 % of the opaque pixels look past the box, most of them in view_23, view_12, ")


def test_images_that_are_transparent_throughout(good):
    found = checks.transparent_images(replace(good, transparency=(0.7,) * 23 + (1.0,)))
    assert found.views == (23,)
    assert found.message.startswith("view_23 is transparent throughout, which training refuses")
    assert checks.transparent_images(replace(good, transparency=(0.9999,) * COUNT)) is None


def test_a_sky_behind_the_boxes(good):
    assert checks.sky_beyond_boxes(replace(good, sky=0.02)) is None
    found = checks.sky_beyond_boxes(replace(good, sky=0.6))
    assert found.message.startswith(
        "60 % of all pixels look alike from all places, as a sky does: model=pyramid learns them"
    )
