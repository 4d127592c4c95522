"""The unit and the origin of a capture's poses do not matter."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from quick_presets import preset
from small_sessions import LEGO, Recorder

import voxelfield
from voxelfield.components.refinement import CameraRefinement, write_cameras
from voxelfield.datasets.camera_path import camera_path_file, read_camera_path
from voxelfield.export.camera_file import save_cameras
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.training.session import Session

EASTING = (530000.0, 180000.0, 40.0)
TINY = (
    *("trainer=smoke", "trainer.steps=20", "trainer.image_size=25", "trainer.visible_samples=2048"),
    *("trainer.stages=[{step: 0, resolution: 12}]", "trainer.occupancy.resolution=12", "trainer.occupancy.start=10"),
    *("trainer.log_every=2", "trainer.preview_every=0", "trainer.checkpoint_every=0", "trainer.loss.distortion=0.02"),
)


def capture(folder: Path, factor: float = 1.0, origin=(0.0, 0.0, 0.0)) -> Path:
    """Writes the fixture with poses in another unit and from another origin."""
    folder.mkdir()
    for source in LEGO.iterdir():
        if source.suffix != ".json":
            (folder / source.name).symlink_to(source)
            continue
        content = json.loads(source.read_text())
        for frame in content["frames"]:
            for row, shift in zip(frame["transform_matrix"], origin, strict=False):
                row[3] = factor * row[3] + shift
        (folder / source.name).write_text(json.dumps(content))
    return folder


def session(
    folder: Path, model: str, *overrides: str, log: Recorder | None = None, output: Path | None = None
) -> Session:
    settings = preset(*TINY, f"model={model}", *overrides, device="cpu")
    scene = voxelfield.load_scene(folder, image_size=25)
    return Session(scene, settings, logger=log, output=output)


def curve(folder: Path, model: str, *overrides: str) -> torch.Tensor:
    log = Recorder()
    session(folder, model, *overrides, log=log).fit()
    losses = ([value for tag, value in values.items() if tag.startswith("loss/")] for _, values in log.records)
    return torch.tensor(list(itertools.chain.from_iterable(losses)))


@pytest.mark.parametrize("model", ["dense", "sh", "pyramid"])
def test_the_losses_depend_neither_on_the_unit_of_the_poses_nor_on_their_origin(model, tmp_path):
    sparse = "trainer.loss.sparsity=1e-3"
    wanted = curve(capture(tmp_path / "1"), model, sparse)
    for factor, origin in ((1000.0, (0, 0, 0)), (0.001, (0, 0, 0)), (1.0, EASTING)):
        found = curve(capture(tmp_path / f"{factor}{origin[0]}", factor, origin), model, sparse)
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.01)


def test_refined_poses_move_in_the_unit_of_the_box(tmp_path):
    wanted, found = (
        session(capture(tmp_path / f"{factor}", factor), "dense", "camera=refine").component(CameraRefinement)
        for factor in (1.0, 1024.0)
    )
    assert found._unit == 1024 * wanted._unit


def test_files_of_cameras_and_paths_are_in_the_coordinates_of_the_capture(tmp_path):
    folder = capture(tmp_path / "far", origin=EASTING)
    given = json.loads((folder / "transforms_train.json").read_text())["frames"]
    wanted = torch.tensor([frame["transform_matrix"] for frame in given], dtype=torch.float64)
    scene = voxelfield.load_scene(folder)
    assert scene.train.cameras.c2w[:, :3, 3].norm(dim=1).max() < 20
    save_cameras(tmp_path / "saved.json", scene, folder)
    write_cameras(tmp_path / "refined.json", scene.train, scene.train.cameras, scene.origin)
    for name in ("saved.json", "refined.json"):
        written = json.loads((tmp_path / name).read_text())["frames"][: len(wanted)]
        found = torch.tensor([frame["transform_matrix"] for frame in written], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    (tmp_path / "path.json").write_bytes(camera_path_file(scene.train.cameras, 24, scene.origin))
    again = read_camera_path(tmp_path / "path.json", scene.origin).cameras
    torch.testing.assert_close(again.c2w, scene.train.cameras.c2w)


def test_a_box_is_given_in_the_coordinates_of_the_capture_and_a_trained_scene_is_loaded_again_alike(tmp_path):
    folder = capture(tmp_path / "far", origin=EASTING)
    box = torch.tensor([EASTING, EASTING], dtype=torch.float64) + torch.tensor([[-1.5], [1.5]])
    scene = voxelfield.load_scene(folder, aabb=box.tolist())
    centre = scene.aabb.mean(dim=0).double() + torch.tensor(scene.origin, dtype=torch.float64)
    torch.testing.assert_close(centre, torch.tensor(EASTING, dtype=torch.float64), rtol=0, atol=1e-5)
    trained = session(folder, "dense", f"data.root={tmp_path}").result()
    again = trained.load_scene(("train",))
    assert again.origin == scene.origin
    assert torch.equal(again.train.cameras.c2w, scene.train.cameras.c2w)
    assert torch.equal(again.aabb, torch.tensor(trained.config.scene.aabb))


def test_a_checkpoint_of_an_earlier_version_has_world_units(tmp_path):
    run = session(capture(tmp_path / "mm", 1000.0), "dense", "scene.unit=1", output=tmp_path / "run")
    checkpoint = load_checkpoint(run.save())
    del checkpoint["config"]["scene"]["unit"], checkpoint["config"]["scene"]["origin"]
    session(tmp_path / "mm", "dense", "scene.unit=1").restore(checkpoint)
    with pytest.raises(ValueError, match=r"scene\.unit must be that of the checkpoint: set scene\.unit=1, got 1024"):
        session(tmp_path / "mm", "dense").restore(checkpoint)
