"""``voxelfield render``: what is refused before anything is loaded, and what paths, frames and videos come of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import short_runs
import torch
from PIL import Image

import voxelfield
from voxelfield.cli.command import main
from voxelfield.cli.render import add_render_arguments, path_of
from voxelfield.components.refinement import RefinedCameras
from voxelfield.datasets.scene import Scene
from voxelfield.export import save_model
from voxelfield.media.frame_folder import FrameFolder
from voxelfield.progress import size_in_words
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import orbit
from voxelfield.rendering.view_pictures import depth_range
from voxelfield.settings import preset
from voxelfield.training.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TINY = (
    *short_runs.TINY,
    *("trainer.steps=60", "trainer.log_every=60", "trainer.visible_samples=8192", "logger=none"),
    *("trainer.stages=[{step: 0, resolution: 16}]", "trainer.occupancy.resolution=16"),
)


def scene() -> Scene:
    return voxelfield.load_scene("lego", image_size=25, root=FIXTURES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the small scene in tests/fixtures, of a few steps."""
    folder = tmp_path_factory.mktemp("render") / "run"
    settings = preset(*TINY, device="cpu")
    Session(scene(), settings, output=folder).fit()
    return folder


def render(run: Path, *options: object) -> int:
    return main(["render", str(run), "--data-root", str(FIXTURES), "--device", "cpu", *map(str, options)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--devices 2", "unrecognized arguments: --devices 2"),
        ("--frames 0", "--frames must lie in [1, 1000000], got 0"),
        ("--supersampling 0", "--supersampling must lie in [1, 64], got 0"),
        ("--fps 0.0001", "--fps must lie in [0.001, 1000], got 0.0001"),
        ("--fps nan", "--fps must lie in [0.001, 1000], got nan"),
        (
            "--frames 999999999999999999999999999999",
            "--frames must lie in [1, 1000000], got 999999999999999999999999999999",
        ),
        ("--size 20000x10", "--size must be at most 16384x16384 pixels, got 20000x10"),
        ("--size 800", "--size must be WIDTHxHEIGHT in pixels, such as 1920x1080, got 800"),
        ("--background pink", "--background must be white, black or three numbers R,G,B in [0, 1], got pink"),
        ("--background 0,0,2", "--background must be white, black or three numbers R,G,B in [0, 1], got 0,0,2"),
        ("--path loop", "--path must be orbit, spiral, interpolate or a camera path *.json, got loop"),
        ("--path no.json --frames 3", "--frames must be left out with no.json, which has its own cameras"),
        ("--path no.json --split test", "--split must be left out with no.json, which has its own cameras"),
        (
            "--out a.webm",
            "--out must be a video *.mp4, got a.webm: write one, or a folder of images, and convert it with ffmpeg",
        ),
        ("--codec hevc", "unrecognized arguments: --codec hevc"),
        ("--out a.mp4 --depth", "--depth is for images: --out must be a folder, got a.mp4"),
        ("--out a.mp4 --format exr", "--format is for images: --out must be a folder, got a.mp4"),
        ("--out a.mp4 --range 0:3", "--range is for images: --out must be a folder, got a.mp4"),
        ("--out a --show depth", "--show is for videos: --out must be a video, got a"),
        ("--out a --format exr --depth", "--depth is for PNGs: EXR files contain the depth as channel Z"),
        ("--out a --range 3:3", "--range must be A:B with A below B, such as 0:60, got 3:3"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(options, message, caplog):
    assert main(["render", "nowhere", *options.split()]) == 2
    assert caplog.messages == [message]


def test_frames_are_numbered_continued_and_divided(run, tmp_path, caplog):
    caplog.set_level("INFO")
    out = tmp_path / "frames"
    common = ("--frames", 4, "--out", out, "--size", "32x20", "--background", "0,1,0", "--supersampling", 1)
    assert render(run, *common, "--range", "1:3") == 0
    assert sorted(path.name for path in out.iterdir()) == ["0001.png", "0002.png", "frames.json"]
    before = (out / "0001.png").stat().st_mtime_ns
    assert render(run, *common, "--range", "0:9") == 2
    assert "--range must end at or below 4, the number of frames, got 0:9" in caplog.messages
    assert render(run, *common) == 0
    assert f"wrote 2 frames of 32x20 to {out}, which already had 2" in caplog.messages
    assert (out / "0001.png").stat().st_mtime_ns == before
    with Image.open(out / "0000.png") as image:
        assert image.size == (32, 20)
        assert image.getpixel((0, 0)) == (0, 255, 0), "nothing is in the corner but the background"
    assert render(run, *common[:-1], 2) == 2
    assert f"{out} contains frames of another run, path or size; see its frames.json" in caplog.messages


def test_frames_of_a_run_that_was_trained_again_are_not_kept(run, tmp_path, caplog):
    out = tmp_path / "frames"
    common = ("--frames", 2, "--out", out, "--size", "16x12", "--supersampling", 1)
    shutil.copytree(run, tmp_path / "run")
    assert render(tmp_path / "run", *common) == 0
    assert render(tmp_path / "run", *common) == 0
    before = (out / "0000.png").read_bytes()
    settings = preset(*TINY, "seed=1", device="cpu")
    Session(scene(), settings, output=tmp_path / "run").fit()
    assert render(tmp_path / "run", *common) == 2
    assert caplog.messages[-1] == f"{out} contains frames of another run, path or size; see its frames.json"
    assert (out / "0000.png").read_bytes() == before
    assert render(tmp_path / "run", *common, "--overwrite") == 0
    assert (out / "0000.png").read_bytes() != before


def test_a_folder_of_others_is_refused_in_one_line(run, tmp_path, caplog):
    (tmp_path / "0001.png").write_text("mine")
    for options in ((), ("--overwrite",)):
        assert render(run, "--frames", 2, "--out", tmp_path, "--size", "16x12", *options) == 2
        assert caplog.messages[-1].startswith(
            f"the folder of frames must be empty or have a frames.json, got {tmp_path}"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["0001.png"]
    assert (tmp_path / "0001.png").read_text() == "mine"


def test_a_camera_path_is_followed(run, tmp_path, caplog):
    caplog.set_level("INFO")
    pose = np.eye(4)
    pose[2, 3] = 4.0
    frames = [{"camera_to_world": pose.flatten().tolist(), "fov": 40.0, "aspect": 1.5}] * 3
    path = tmp_path / "path.json"
    content = {"camera_path": frames, "fps": 12, "render_height": 20, "render_width": 30}
    path.write_text(json.dumps(content))
    assert render(run, "--path", path, "--out", tmp_path / "a.mp4") == 0
    size = size_in_words(tmp_path / "a.mp4")
    assert f"wrote 3 frames of 30x20 to {tmp_path / 'a.mp4'} ({size})" in caplog.messages
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.streams.video[0].average_rate == 12
        assert sum(1 for _ in container.decode(video=0)) == 3


def test_frames_of_a_field_that_depends_on_time_show_theirs(run, tmp_path, caplog, monkeypatch):
    trained = voxelfield.load(run, "cpu")
    frames = [{"camera_to_world": np.eye(4).flatten().tolist(), "fov": 40.0}] * 3
    path = tmp_path / "path.json"
    content = {"fps": 12, "render_height": 20, "render_width": 30}

    def times(frames: list[dict[str, object]], **given: object) -> list[float]:
        path.write_text(json.dumps(content | {"camera_path": frames}))
        options = argparse.Namespace(path=path, time=None, size=None, fps=None)
        vars(options).update(given)
        return path_of(trained, options)[0].values["time"].tolist()

    with pytest.raises(ValueError, match=r"^--time must be left out, because the field does not depend on time$"):
        times(frames, time=0.5)
    monkeypatch.setattr(trained.field, "density_inputs", ("time",))
    assert times([frame | {"render_time": 0.25 * index} for index, frame in enumerate(frames)]) == [0, 0.25, 0.5]
    assert times(frames, time=0.5) == 3 * [0.5]
    assert times(frames, time=0.0) == 3 * [0.0]
    with pytest.raises(ValueError, match=r"^--time must be given, because the field depends on it and the path has no"):
        times(frames)


def test_frames_of_other_times_are_other_frames(tmp_path):
    cameras = Cameras(torch.eye(4)[None], torch.tensor([[9.0, 9, 8, 6]]), 16, 12)
    FrameFolder(tmp_path, cameras.with_values(time=0.5), "png", False, 1.0, {})
    with pytest.raises(ValueError, match="contains frames of another run, path or size"):
        FrameFolder(tmp_path, cameras.with_values(time=0.75), "png", False, 1.0, {})


def test_whole_spheres_are_rendered_along_a_path(run, tmp_path, caplog):
    caplog.set_level("INFO")
    frame = {"camera_to_world": [1, 0, 0, 0, 0, 0, -1, 0, 0, 1, 0, 0.2, 0, 0, 0, 1]}
    content = {"camera_type": "equirectangular", "render_width": 40, "render_height": 20, "fps": 5}
    path = tmp_path / "spheres.json"
    path.write_text(json.dumps(content | {"camera_path": [frame]}))
    assert render(run, "--path", path, "--out", tmp_path / "frames", "--format", "png") == 0
    assert f"wrote 1 frames of 40x20, equirectangular, to {tmp_path / 'frames'}, which already had 0" in caplog.messages
    shown = np.asarray(Image.open(tmp_path / "frames" / "0000.png")).astype(int)
    pinhole = Cameras(torch.tensor(frame["camera_to_world"]).view(1, 4, 4), torch.tensor([[9.0, 9.0, 0.5, 0.5]]), 1, 1)
    found = voxelfield.load(run, device="cpu").renderer().view(pinhole, 0).rgb
    # The middle of four pixels of the sphere.
    assert np.abs(shown[9:11, 19:21].mean(axis=(0, 1)) - 255 * found[0, 0].numpy()).max() < 40
    assert render(run, "--path", path, "--size", "50x20") == 2
    assert "width and height must be in proportion to 40x20 for panoramas, got 50x20" in caplog.text


@pytest.mark.parametrize("path", ["orbit", "interpolate"])
def test_paths_of_the_scene_show_it(run, tmp_path, path):
    assert render(run, "--path", path, "--frames", 2, "--out", tmp_path, "--depth", "--supersampling", 1) == 0
    for name in ("0000", "0001"):
        with Image.open(tmp_path / f"{name}_depth.png") as depth:
            assert (np.asarray(depth) > 0).mean() > 0.05, "something is met"


def test_a_spiral_around_an_object_is_refused(run, tmp_path, caplog):
    assert render(run, "--path", "spiral", "--out", tmp_path / "a.mp4") == 2
    assert "look in all directions" in caplog.messages[-1]
    assert list(tmp_path.iterdir()) == []


def test_paths_follow_cameras_that_were_refined(run):
    trained = voxelfield.load(run, "cpu")
    given = scene().train.cameras
    moved = Cameras(given.c2w.clone(), given.intrinsics, given.width, given.height)
    moved.c2w[:, 2, 3] += 5.0
    refined = dataclasses.replace(trained, cameras=RefinedCameras(given, moved))
    parser = argparse.ArgumentParser()
    add_render_arguments(parser)
    options = [str(run), "--data-root", str(FIXTURES), "--path", "interpolate", "--frames", "9"]
    (before, _), (after, _) = (path_of(of, parser.parse_args(options)) for of in (trained, refined))
    lift = torch.tensor([0.0, 0.0, 5.0]).expand(9, 3)
    torch.testing.assert_close(after.c2w[:, :3, 3] - before.c2w[:, :3, 3], lift)


def test_frames_that_show_nothing_are_told(run, tmp_path, caplog):
    around = ("--frames", 2, "--size", "8x8", "--out")
    assert render(run, *around, tmp_path / "sees.mp4") == 0
    assert "nothing but the background" not in caplog.text
    empty = voxelfield.load(run, device="cpu")
    empty.occupancy.occupied.zero_()
    save_model(tmp_path / "empty.safetensors", empty)
    assert render(tmp_path / "empty.safetensors", *around, tmp_path / "empty.mp4") == 0
    assert "all 2 frames show nothing but the background: the field is empty where the cameras look" in caplog.text


def test_frames_that_are_not_finite_are_not_written(run, tmp_path, caplog):
    broken = voxelfield.load(run, device="cpu")
    broken.field.grid.features.fill_(torch.nan)
    save_model(tmp_path / "broken.safetensors", broken)
    for out in ("path.mp4", "frames"):
        assert render(tmp_path / "broken.safetensors", "--frames", 2, "--size", "8x8", "--out", tmp_path / out) == 1
        told = caplog.records[-1].message
        assert told.startswith("rendered frames must be finite, got NaN or infinity in frame 1 of 2")
        assert not (tmp_path / "path.mp4").exists()
    assert not list((tmp_path / "frames").glob("*.png"))


def test_an_image_for_which_memory_does_not_suffice_is_one_line(run, tmp_path, caplog, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory:\n you tried to allocate 1e12 bytes")

    monkeypatch.setattr("voxelfield.rendering.renderer.FieldRenderer.view", fail)
    assert render(run, "--frames", 2, "--out", tmp_path / "path.mp4") == 1
    assert caplog.records[-1].message.startswith("DefaultCPUAllocator: can't allocate memory: you tried")


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_a_path_that_is_no_file_is_refused_without_waiting(run, tmp_path, caplog):
    os.mkfifo(tmp_path / "path.json")
    assert render(run, "--path", tmp_path / "path.json") == 2
    assert "path.json must be a file, got a named pipe" in caplog.text


def test_a_renderer_with_settings_of_its_own_serves_python_too(run):
    trained = voxelfield.load(run, "cpu")
    around = orbit(scene().train.cameras, torch.zeros(3), 2)
    blue = torch.tensor([0.0, 0.0, 1.0])
    over = [trained.renderer(supersampling=1, background=colour) for colour in (torch.zeros(3), blue)]
    for black_view, blue_view in zip(*(trained.render_path(around, renderer) for renderer in over), strict=True):
        behind = (1 - black_view.opacity)[..., None] * blue
        assert behind.max() > 0.5
        torch.testing.assert_close(blue_view.rgb, black_view.rgb + behind)


def test_the_colours_of_depths_span_what_a_path_shows(run):
    trained = voxelfield.load(run, "cpu")
    around = orbit(scene().train.cameras, torch.zeros(3), 3)
    renderer = trained.renderer(supersampling=1)
    near, far = depth_range(renderer, around)
    depths = torch.cat([view.depth[view.opacity > 0.5] for view in trained.render_path(around, renderer)])
    assert depths.min() <= near < far <= depths.max()
    assert ((depths >= near) & (depths <= far)).float().mean() > 0.95
