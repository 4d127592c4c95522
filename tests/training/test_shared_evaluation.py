"""Evaluations, videos and results that several processes share: all is as if one had done it."""

from __future__ import annotations

import json
from pathlib import Path

import av
import pytest
import torch
import two_evaluators
from warm_python import warm_python

import voxelfield
from voxelfield.settings import preset
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.session import Session

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
