"""Evaluations, videos and results that several devices or processes share: all is as if one had done it."""

from __future__ import annotations

import json
from pathlib import Path

import av
import pytest
import torch
import two_evaluators
from warm_python import warm_python

import voxelfield
from voxelfield.devices import in_order, several_devices
from voxelfield.training.config import preset
from voxelfield.training.session import Session
from voxelfield.training.trained_model import TrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = (
    "scene=lego",
    "model=dense",
    "trainer=smoke",
    "trainer.steps=10",
    "trainer.image_size=25",
    "trainer.visible_samples=4096",
    "trainer.stages=[{step: 0, resolution: 12}]",
    "trainer.occupancy.resolution=12",
    "trainer.preview_every=0",
    "trainer.evaluation.video_frames=5",
    "logger=none",
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small trained run."""
    folder = tmp_path_factory.mktemp("shared")
    scene = voxelfield.load_scene("lego", image_size=25, root=two_evaluators.FIXTURES)
    Session(scene, preset(*TINY, device="cpu"), output=folder / "run").fit()
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> TrainedModel:
    return voxelfield.load(folder / "run", "cpu")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.png")}


def frames(video: Path) -> torch.Tensor:
    """The frames (N, H, W, 3) of a video, 0 to 255."""
    with av.open(str(video)) as file:
        return torch.stack(
            [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in file.decode(video=0)]
        ).float()


@pytest.mark.slow
def test_two_processes_give_the_results_of_one(folder, run, tmp_path):
    program = Path(two_evaluators.__file__)
    both = [warm_python.start(str(program), str(rank), str(tmp_path / "store"), str(folder)) for rank in range(2)]
    expected = two_evaluators.evaluate(run, tmp_path / "views")
    metrics = two_evaluators.finish_run(folder / "run", tmp_path / "results")
    for process in both:
        done = process.wait(120)
        assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((folder / str(rank)).read_text())
        assert found["evaluation"] == expected.per_view()
        assert found["metrics"] == metrics["psnr_per_view"]
        assert "has 625 pixels that are NaN or infinite" in found["nan"]
        assert found["devices"].startswith("devices must be 1 in processes that train together")
    assert len(contents(tmp_path / "views")) == 3
    assert contents(folder / "views") == contents(tmp_path / "views")
    ours, alone = folder / "results", tmp_path / "results"
    assert contents(ours) == contents(alone)
    assert {path.name for path in ours.iterdir()} == {path.name for path in alone.iterdir()}
    # The encoder's threads may divide a video differently each time, which changes less than the next frame does.
    shared, whole = frames(ours / "orbit.mp4"), frames(alone / "orbit.mp4")
    assert shared.shape == whole.shape
    assert (shared - whole).abs().mean() < (whole[1:] - whole[:-1]).abs().mean() / 2
    pictures = [(path / "report.html").read_text().count("data:image/jpeg") for path in (ours, alone)]
    assert pictures[0] == pictures[1] > 4


def test_two_devices_give_the_evaluation_and_the_path_of_one(run, tmp_path):
    scene = voxelfield.load_scene("lego", image_size=25, root=two_evaluators.FIXTURES)
    seen = []
    found = run.evaluate(
        scene.test,
        images=tmp_path / "two",
        on_view=lambda name, *_: seen.append(name),
        progress=False,
        devices=2,
    )
    assert found == run.evaluate(scene.test, images=tmp_path / "one", progress=False)
    assert seen == list(found.names) == list(scene.test.names)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    cameras = scene.train.cameras
    shared = run.render_path(cameras, *(copy.renderer() for copy in run.copies(3)))
    for view, expected in zip(shared, run.render_path(cameras), strict=True):
        assert torch.equal(view.rgb, expected.rgb)


@pytest.mark.cuda
def test_a_copy_on_another_gpu_renders_the_same(folder):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    run = voxelfield.load(folder / "run", "cuda:1")
    scene = voxelfield.load_scene("lego", image_size=25, root=two_evaluators.FIXTURES)
    assert [copy.model.device.index for copy in run.copies("all")][:2] == [1, (2 % torch.cuda.device_count())]
    assert run.evaluate(scene.test, progress=False, devices=2) == run.evaluate(scene.test, progress=False)


def test_results_are_in_order_and_an_error_ends_the_work():
    assert list(in_order([lambda item: 2 * item, lambda item: 2 * item], range(9))) == list(range(0, 18, 2))
    assert list(in_order([abs, abs], [])) == []
    done = []

    def work(item: int) -> int:
        done.append(item)
        return 1 // (item - 3)

    with pytest.raises(ZeroDivisionError):
        list(in_order([work, work], range(1000)))
    assert max(done) < 20


@pytest.mark.parametrize("count", [0, 1.5, "two", None])
def test_a_number_of_devices_is_refused(count):
    with pytest.raises(ValueError, match="devices must be an int of at least 1 or 'all', got"):
        several_devices(CPU, count)


def test_devices_of_a_cpu_are_threads_and_those_of_cuda_gpus(monkeypatch):
    assert several_devices(CPU, "all") == [CPU]
    assert several_devices(CPU, 3) == [CPU] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert [str(device) for device in several_devices(torch.device("cuda"), 2)] == ["cuda:0", "cuda:1"]
    assert [str(device) for device in several_devices(torch.device("cuda:1"), "all")] == ["cuda:1", "cuda:2", "cuda:0"]
    with pytest.raises(ValueError, match="devices must be an int from 1 to 3, the number of CUDA devices, or 'all'"):
        several_devices(torch.device("cuda"), 4)
