"""Dense volumes, and cameras that can be loaded again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from balls import BOX, CENTRE, ball_field, expected_colors
from camera_poses import random_rotations
from PIL import Image

import voxelfield
from voxelfield.datasets.lenses import share_camera_model, transforms_camera
from voxelfield.datasets.scene import Scene, Split
from voxelfield.export.camera_file import save_cameras
from voxelfield.export.volume import save_volume
from voxelfield.models import Model
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import LENS_TERMS, Lens
from voxelfield.rendering.rigid import pose_matrices
from voxelfield.warps.nested_boxes import NestedBoxes


def places(volume) -> torch.Tensor:
    low, high = volume["aabb"]
    axes = [torch.linspace(a, b, n) for a, b, n in zip(low, high, volume["density"].shape, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


@pytest.mark.parametrize("boxes", [None, NestedBoxes(BOX, 2)], ids=["one", "nested"])
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_a_volume_has_the_fields_values(tmp_path, monkeypatch, boxes, chunk):
    monkeypatch.setattr("voxelfield.export.lattice.CHUNK", chunk)
    field, occupancy = ball_field(boxes)
    occupancy.occupied[:, :, :8] = False
    save_volume(tmp_path / "ball.npz", Model(field, occupancy), resolution=10)
    with np.load(tmp_path / "ball.npz", allow_pickle=False) as volume:
        assert np.array_equal(volume["aabb"], np.array(BOX, np.float32))
        assert volume["density"].shape == (9, 11, 9)
        points = places(volume)
        density, rgb = torch.from_numpy(volume["density"]), torch.from_numpy(volume["rgb"])
    # The occupied half: by less than rounding, points on the border may belong to either.
    inside, outside = points[..., 2] > CENTRE[2] + 0.1, points[..., 2] < CENTRE[2] - 0.1
    expected = field.density(points.view(-1, 3)).view(density.shape)
    assert torch.allclose(density[inside], expected[inside], rtol=1e-3, atol=1e-5)
    assert float(density[inside].max()) > 10
    assert (rgb[inside].float() / 255 - expected_colors(points[inside])).abs().max() < 0.01
    assert not density[outside].any()
    assert not rgb[outside].any()


def test_wrong_volumes_are_named(tmp_path):
    for options, message in (
        ({"resolution": 0}, "resolution must be an int of at least 1, got 0"),
        ({"box": 2}, "box must be 1 to 1, as many as the field has, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            save_volume(tmp_path / "ball.npz", Model(*ball_field()), **options)
    with pytest.raises(ValueError, match=r"path must be a file \*.npz, \*.nii, \*.nii.gz, \*.nvdb, got"):
        save_volume(tmp_path / "ball.vdb", Model(*ball_field()))
    assert not list(tmp_path.iterdir())


def test_a_volume_without_visible_density_is_reported(tmp_path, caplog):
    model = Model(*ball_field())
    save_volume(tmp_path / "ball.npz", model, resolution=10)
    assert "no visible density" not in caplog.text
    model.occupancy.occupied.zero_()
    save_volume(tmp_path / "ball.npz", model, resolution=10)
    assert "contains no visible density: its box is empty at this resolution, or the whole field is" in caplog.text


def test_a_volume_of_a_field_that_is_not_finite_is_not_written(tmp_path):
    field, occupancy = ball_field()
    with torch.no_grad():
        for level in field.grid.levels:
            level.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="densities of the field must be finite, got NaN or infinity"):
        save_volume(tmp_path / "ball.npz", Model(field, occupancy), resolution=10)
    assert not list(tmp_path.iterdir())


def write_images(folder: Path, names: tuple[str, ...], size: tuple[int, int]) -> tuple[Path, ...]:
    paths = tuple(folder / "images" / name for name in names)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    return paths


def split_of(paths: tuple[Path, ...], lens: Lens | None) -> Split:
    """Cameras of half of the images' size."""
    count = len(paths)
    c2w = pose_matrices(random_rotations(count), 100 * torch.randn(count, 3))
    intrinsics = torch.tensor([[20.0, 21.0, 9.0, 6.5]]) + torch.arange(count)[:, None]
    cameras = Cameras(c2w, intrinsics, 20, 15, lens and lens[:count])
    names = tuple(path.stem for path in paths)
    return Split(torch.zeros(count, 15, 20, 4, dtype=torch.uint8), cameras, names, paths=paths)


@pytest.mark.parametrize("model", [None, *LENS_TERMS, ("fisheye", "rational", "pinhole")])
def test_cameras_are_loaded_again_as_they_were(tmp_path, model):
    columns = 0 if model is None or "pinhole" in model else len(LENS_TERMS[model])
    lens = None if model is None else Lens(model, 0.01 + 0.1 * torch.rand(3, columns))
    train = split_of(write_images(tmp_path, ("a.png", "b.jpg", "deep/c.png"), (40, 30)), lens)
    moving = torch.cat((0.01 * torch.randn(3, 6), torch.full((3, 1), 7.5)), dim=1)
    train = replace(train, cameras=replace(train.cameras, rolling=moving))
    test = split_of(write_images(tmp_path, ("d.png",), (40, 30)), lens)
    scene = Scene("capture", torch.tensor(BOX), {"train": train, "test": test})
    save_cameras(tmp_path / "transforms.json", scene, tmp_path)
    found = voxelfield.load_scene(tmp_path, splits=None, downscale=2)
    assert set(found.splits) == {"train", "test"}
    for name, split in scene.splits.items():
        again = found.split(name)
        assert again.paths == split.paths
        assert torch.allclose(again.cameras.c2w, split.cameras.c2w, atol=1e-6)
        assert torch.allclose(again.cameras.intrinsics, split.cameras.intrinsics)
        assert (again.cameras.width, again.cameras.height) == (20, 15)
        assert (again.cameras.lens is None) == (model in (None, "pinhole"))
        assert (again.cameras.rolling is None) == (name == "test")
        if name == "train":
            torch.testing.assert_close(again.cameras.rolling, moving)
        if again.cameras.lens is not None:
            assert torch.equal(again.cameras.lens.rows, split.cameras.lens.rows)


def test_masks_depths_and_times_are_loaded_again(tmp_path):
    capture = tmp_path / "capture"
    train = split_of(write_images(capture, [f"{index}.png" for index in range(4)], (8, 6)), None)
    content = share_camera_model([transforms_camera(train.cameras, 0, (8, 6)) for _ in range(4)])
    for index, frame in enumerate(content["frames"]):
        frame |= {"file_path": f"images/{index}.png", "time": 0.1 * index}
        frame |= {"mask_path": f"masks/{index}.png", "depth_file_path": f"depths/{index}.npy"}
        for folder in ("masks", "depths"):
            (capture / folder).mkdir(exist_ok=True)
        Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8) % 2 * 255).save(capture / frame["mask_path"])
        np.save(capture / frame["depth_file_path"], np.full((6, 8), 2.0 + index, np.float32))
    content["depth_unit_scale_factor"] = 0.5
    content["aabb_scale"] = 1
    (capture / "transforms.json").write_text(json.dumps(content))
    options = {"splits": None, "depth": True, "aabb": BOX}
    whole = voxelfield.load_scene(capture, **options)
    save_cameras(capture / "transforms.json", whole, capture)
    again = voxelfield.load_scene(capture, **options)
    for name, split in whole.splits.items():
        assert split.masks is not None
        assert torch.equal(again.split(name).masks, split.masks)
        for key in ("time", "depth"):
            assert torch.equal(again.split(name).extras[key], split.extras[key])
        assert split[[0]].files["time"] == [split.files["time"][0]]


def test_cameras_of_no_files_are_named(tmp_path):
    paths = write_images(tmp_path, ("a.png",), (40, 30))
    split = split_of(paths, None)
    scene = Scene("capture", torch.tensor(BOX), {"train": split})
    with pytest.raises(ValueError, match="folder must contain the images of the scene"):
        save_cameras(tmp_path / "t.json", scene, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"path must be a file \*.json, got"):
        save_cameras(tmp_path / "t.txt", scene, tmp_path)
    nowhere = Split(split.images, split.cameras, split.names)
    with pytest.raises(ValueError, match="scene must be one whose images are files"):
        save_cameras(tmp_path / "t.json", Scene("capture", torch.tensor(BOX), {"train": nowhere}), tmp_path)
