"""Images with transparent pixels: which of them show an object, and the box around it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from camera_poses import looking_at
from composed_run import settings_of_run
from PIL import Image
from quick_presets import preset

import voxelfield
from voxelfield.datasets.poses import turned_about
from voxelfield.datasets.scene import Split
from voxelfield.datasets.silhouettes import Silhouette, box_of_silhouettes
from voxelfield.grids.boxes import parse_box
from voxelfield.rendering.cameras import Cameras, sees_box
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.paths import axes_looking
from voxelfield.warps.choice import WarpConfig, choose_warp

CENTRE, RADIUS = torch.tensor([0.3, -0.2, 0.4]), 0.5
BALL = torch.stack((CENTRE - RADIUS, CENTRE + RADIUS))


def around(count: int, distance: float = 4.0, target: torch.Tensor = CENTRE) -> torch.Tensor:
    """Poses of cameras at several heights around a point that they look at."""
    angle = torch.arange(count) * 2.4
    height = 0.9 * torch.linspace(-0.5, 1, count)
    level = (1 - height**2).sqrt()
    position = distance * torch.stack((level * angle.cos(), level * angle.sin(), height), dim=-1) + target
    return looking_at(target, position)


def around_beside(most: float) -> torch.Tensor:
    """Poses of 60 cameras around the ball that look at points beside its centre, by at most so many radii an axis."""
    targets = CENTRE + most * RADIUS * (2 * torch.rand(60, 3, generator=torch.Generator().manual_seed(0)) - 1)
    return looking_at(targets, around(60)[:, :3, 3])


def ball_split(
    c2w: torch.Tensor, width: int = 80, height: int = 60, focal: float = 90.0, lens: Lens | None = None
) -> Split:
    """Images of a ball before a transparent background."""
    intrinsics = torch.tensor([focal, focal, width / 2, height / 2]).repeat(len(c2w), 1)
    cameras = Cameras(c2w, intrinsics, width, height, lens)
    images = torch.zeros(len(c2w), height, width, 4, dtype=torch.uint8)
    for index in range(len(c2w)):
        rays = cameras.image_rays(index, BALL)
        towards = CENTRE - rays.origins
        along = (towards * rays.directions).sum(dim=-1)
        hit = (along > 0) & (towards.square().sum(dim=-1) - along**2 < RADIUS**2)
        images[index, ..., 3] = torch.where(hit, 255, 0).view(height, width)
    return Split(images, cameras, tuple(f"view_{index:02d}" for index in range(len(c2w))))


def box_of(split: Split) -> torch.Tensor | None:
    return box_of_silhouettes([Silhouette.of(image[..., 3]) for image in split.images], split.cameras)


def assert_fits(box: torch.Tensor | None, slack: float = 0.35) -> None:
    """The box holds the ball, and reaches beyond it by at most a share of its radius."""
    assert box is not None
    box = box.float()
    assert (box[0] <= BALL[0]).all()
    assert (box[1] >= BALL[1]).all()
    assert (BALL[0] - box[0]).max() < slack * RADIUS
    assert (box[1] - BALL[1]).max() < slack * RADIUS


@pytest.mark.parametrize("count", [8, 40])
def test_the_box_is_that_of_the_silhouettes(count):
    assert_fits(box_of(ball_split(around(count))), slack=0.5)


def test_the_box_is_that_of_whole_spheres():
    c2w = around(40)
    heading = 2 * math.pi * torch.rand(40, generator=torch.Generator().manual_seed(0))
    for pose, angle in zip(c2w, heading, strict=True):
        level = torch.tensor([angle.cos(), angle.sin(), 0.0])
        pose[:3, :3] = axes_looking(level, torch.tensor([0.0, 0.0, 1.0]))
    lens = Lens("equirectangular", torch.zeros(40, 0))
    split = ball_split(c2w, 480, 240, 480 / (2 * math.pi), lens)
    assert_fits(box_of(split), slack=0.5)
    assert sees_box(split.cameras, BALL).all()
    assert not sees_box(replace(split.cameras, lens=None), BALL).all()


def test_the_box_is_that_of_crops_of_spheres():
    lens = Lens("equirectangular", torch.zeros(40, 0))
    assert_fits(box_of(ball_split(around(40), lens=lens)), slack=0.5)


def test_images_that_show_parts_of_the_object_cut_nothing():
    split = ball_split(around(40), focal=300.0)
    assert not any(Silhouette.of(image[..., 3]).whole for image in split.images)
    assert_fits(box_of(split), slack=1.3)


def test_images_that_the_object_overflows_cut_nothing():
    assert_fits(box_of(ball_split(around_beside(0.6), focal=700.0)), slack=0.8)


def test_images_without_the_object_widen_no_box():
    split = ball_split(around_beside(1.2), focal=250.0)
    split.images[::3, ..., 3] = 0
    assert Silhouette.of(split.images[0, ..., 3]).touched is None
    assert_fits(box_of(split), slack=1.0)


def test_images_of_details_cut_nothing_from_an_object_that_others_show_whole():
    split = ball_split(around(40))
    details = ball_split(around(60, target=CENTRE + torch.tensor([0.0, 0.0, 0.5])), focal=500.0)
    views = [
        (Silhouette.of(image[..., 3]), each.cameras[[index]])
        for each in (split, details)
        for index, image in enumerate(each.images)
    ]
    cameras = Cameras(
        *(torch.cat([getattr(each, name) for _, each in views]) for name in ("c2w", "intrinsics")), 80, 60
    )
    assert_fits(box_of_silhouettes([silhouette for silhouette, _ in views], cameras), slack=0.6)


def test_masks_with_holes_and_a_few_wrong_poses_cut_nothing():
    split = ball_split(around(40))
    split.images[:4, :, 40:, 3] = 0
    split.cameras.c2w[7, :3, 3] += torch.tensor([3.0, 0, 0])
    split.cameras.c2w[20, :3, 3] *= 20
    split.cameras.c2w[30] = turned_about(split.cameras.c2w[30])
    assert_fits(box_of(split))


def test_stray_pixels_do_not_widen_the_box():
    split = ball_split(around(40))
    generator = torch.Generator().manual_seed(0)
    for image in split.images:
        image[torch.randint(60, (3,), generator=generator), torch.randint(80, (3,), generator=generator), 3] = 255
        image[0, 5, 3] = 3  # noise of a matte
    assert_fits(box_of(split))


@pytest.mark.parametrize("model", ["perspective", "fisheye"])
def test_lenses_are_followed(model):
    lens = Lens(model, torch.tensor([[-0.1, 0.02, 0, 0, 0, 0]]).repeat(20, 1))
    assert_fits(box_of(ball_split(around(20), lens=lens)), slack=0.6)


def test_silhouettes_that_contradict_one_another_have_no_box():
    split = ball_split(around(20))
    split.cameras.c2w[:] = split.cameras.c2w[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    split.cameras.c2w[::2, :3, 3] += 3.0
    assert box_of(split) is None


# Files.


def write_frames(folder: Path, file: str, split: Split, c2w: torch.Tensor | None = None, suffix: str = ".png") -> Path:
    """Writes a split as a ``transforms.json`` or a file of the Blender layout."""
    images = folder / Path(file).stem
    images.mkdir(parents=True)
    frames = []
    for name, image, pose in zip(split.names, split.images, split.cameras.c2w if c2w is None else c2w, strict=True):
        picture = Image.fromarray(image.numpy())
        (picture if suffix == ".png" else picture.convert("RGB")).save(images / f"{name}{suffix}")
        frames.append({"file_path": f"{images.name}/{name}{suffix}", "transform_matrix": pose.tolist()})
    fx, fy, cx, cy = split.cameras.intrinsics[0].tolist()
    size = {"w": split.cameras.width, "h": split.cameras.height}
    (folder / file).write_text(json.dumps({**size, "fl_x": fx, "fl_y": fy, "cx": cx, "cy": cy, "frames": frames}))
    return folder


LAYOUTS = ["transforms.json", "transforms_train.json"]


def opaque(split: Split) -> Split:
    """The same views as photographs of a place, with some detail."""
    split.images.copy_(torch.randint(0, 256, split.images.shape, generator=torch.Generator().manual_seed(0)).byte())
    split.images[..., 3] = 255
    return split


def load(folder: Path, **options: object) -> voxelfield.Scene:
    return voxelfield.load_scene(folder, splits=None, holdout=0, **options)


@pytest.mark.parametrize("file", LAYOUTS)
def test_an_object_ends_at_the_box_of_its_silhouettes(tmp_path, file):
    scene = load(write_frames(tmp_path, file, ball_split(around(24))))
    assert (scene.bounded, scene.estimated) == (True, False)
    assert_fits(scene.aabb)
    inside = choose_warp(scene, WarpConfig(boxes=3))
    assert inside == replace(inside, aabb=parse_box(scene.aabb), count=3)


@pytest.mark.parametrize("file", LAYOUTS)
def test_the_box_of_an_object_does_not_depend_on_what_is_loaded(tmp_path, file):
    write_frames(tmp_path, file, ball_split(around(24)))
    whole = voxelfield.load_scene(tmp_path)
    for options in ({"image_size": 7}, {"downscale": 3}, {"splits": ("train",)}, {"splits": None}):
        assert torch.equal(voxelfield.load_scene(tmp_path, **options).aabb, whole.aabb), options


@pytest.mark.parametrize("file", LAYOUTS)
def test_photographs_have_nested_boxes_in_any_layout(tmp_path, file):
    scene = load(write_frames(tmp_path, file, opaque(ball_split(around(24)))))
    warp = choose_warp(scene, WarpConfig())
    assert warp.count == 7
    assert 0.1 < warp.near < 1.1
    low, high = torch.tensor(warp.aabb)
    assert ((low + high) / 2 - CENTRE).abs().max() < 0.01
    assert 1.9 < float((high - low).max()) < 2.1


def test_photographs_from_one_place_are_said_to_show_no_distances(tmp_path, caplog):
    split = opaque(ball_split(around(24)))
    load(write_frames(tmp_path / "around", "transforms.json", split))
    assert "turn on the spot" not in caplog.text
    split.cameras.c2w[:, :3, 3] = 0
    load(write_frames(tmp_path / "still", "transforms.json", split))
    assert "transforms.json: the cameras turn on the spot, so the photographs show directions and" in caplog.text


@pytest.mark.parametrize("file", LAYOUTS)
def test_photographs_have_their_trainer_in_any_layout_and_objects_the_default(tmp_path, monkeypatch, file):
    place = write_frames(tmp_path / "place", file, opaque(ball_split(around(24))))
    thing = write_frames(tmp_path / "thing", file, ball_split(around(24)))
    for folder, expected in ((place, "few_photographs"), (thing, "default")):
        settings = settings_of_run(monkeypatch, tmp_path / "run", f"scene={folder}")
        assert settings.trainer == preset(f"trainer={expected}", name="train").trainer


def test_the_warp_of_the_blender_layout_does_not_depend_on_what_is_loaded(tmp_path):
    write_frames(tmp_path, "transforms_train.json", opaque(ball_split(around(24))))
    write_frames(tmp_path, "transforms_test.json", opaque(ball_split(around(5, 6.0))))
    scenes = [voxelfield.load_scene(tmp_path, splits=splits) for splits in (("train",), ("test",), (), None)]
    warps = [choose_warp(scene, WarpConfig()) for scene in scenes]
    assert warps[0] is not None
    assert all(warp == warps[0] for warp in warps)


@pytest.mark.parametrize("file", LAYOUTS)
def test_single_transparent_pixels_make_no_object(tmp_path, file, caplog):
    split = opaque(ball_split(around(24)))
    split.images[:6, 0, 0, 3] = 0
    scene = load(write_frames(tmp_path, file, split))
    assert not scene.bounded
    assert bool((scene.train.images[..., 3] == 255).all())
    assert (~scene.train.masks).nonzero().tolist() == [[index, 0, 0] for index in range(6)]
    (record,) = caplog.records
    assert f"{file}: 0.0052 % of all pixels are transparent, in 6 of 24 images: they count as" in record.getMessage()
    assert torch.equal(load(tmp_path, aabb=BALL.tolist()).train.masks, scene.train.masks), "also in a box that is given"


def test_a_transparent_pixel_does_not_rule_out_images_without_alpha(tmp_path):
    split = opaque(ball_split(around(24)))
    split.images[3, 0, 0, 3] = 0
    folder = write_frames(tmp_path, "transforms.json", split)
    picture = folder / "transforms" / "view_05.png"
    Image.open(picture).convert("RGB").save(picture)
    scene = load(folder)
    assert (~scene.train.masks).nonzero().tolist() == [[3, 0, 0]]


@pytest.mark.parametrize(("blank", "told"), [(24, ", like 23 others of 24: "), (1, ": save it")])
def test_images_that_are_transparent_throughout_are_refused_before_training(tmp_path, blank, told):
    split = ball_split(around(24))
    split.images[:blank, ..., 3] = 0
    scene = load(write_frames(tmp_path, "transforms.json", split))
    with pytest.raises(ValueError, match=f"view_00.png: must have opaque pixels, got .* transparent throughout{told}"):
        voxelfield.Session(scene, "dense", trainer="smoke", device="cpu")


@pytest.mark.parametrize("file", LAYOUTS)
@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (turned_about, "got none that do: the poses seem to have OpenCV's axes"),
        (torch.linalg.inv, "got none that do: the matrices seem to be world to camera, but must be camera to world"),
        (lambda c2w: torch.linalg.inv(turned_about(c2w)), "invert each, then negate the second and the third column"),
    ],
)
def test_silhouettes_show_in_which_convention_poses_are(tmp_path, file, mistake: Callable, told):
    split = ball_split(around(24))
    write_frames(tmp_path, file, split, mistake(split.cameras.c2w))
    with pytest.raises(ValueError, match=rf"{file}: silhouettes must agree on where the object is, .*{told}"):
        load(tmp_path)


def test_silhouettes_that_tell_nothing_leave_the_box_to_the_cameras(tmp_path, caplog):
    split = ball_split(around(24))
    poses = split.cameras.c2w[torch.randperm(24, generator=torch.Generator().manual_seed(0))]
    poses[::2, :3, 3] += 3.0
    scene = load(write_frames(tmp_path, "transforms.json", split, poses))
    assert scene.bounded
    assert "the silhouettes do not tell where the object is" in caplog.text
