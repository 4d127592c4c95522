"""Checkpoints that are intact, but from which this run, or any run, cannot resume."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_presets import preset
from short_runs import TINY

import voxelfield
from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.runs.train import train_as_configured
from voxelfield.trained.checkpoint_file import (
    FORMAT,
    CheckpointError,
    checkpoint_path,
    load_checkpoint,
    pack_checkpoint,
    write_checkpoint,
)
from voxelfield.training.checkpoints import changed_data, fingerprint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a checkpoint that a run has written."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder)
    return load_checkpoint(folder)


def train(folder: Path, *overrides: str) -> dict[str, Any] | None:
    config = preset(*TINY, "trainer.steps=2", "logger=none", *overrides, name="train_cpu")
    return train_as_configured(config, folder, ROOT)


def write(path: Path, state: dict[str, Any]) -> None:
    write_checkpoint(
        path, pack_checkpoint({key: value for key, value in state.items() if key not in ("format", "voxelfield")})
    )


def without(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {key: value for key, value in state.items() if key not in keys}


def with_other(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: state | values


def part_of(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in state["model"].items() if name.startswith(prefix)}


def with_field(change: Callable[[str, Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(state: dict[str, Any]) -> dict[str, Any]:
        field = {name: change(name, values) for name, values in part_of(state, "field.").items()}
        return state | {"model": state["model"] | field}

    return changed


WRONG = {
    "no configuration": without("config"),
    "no model": without("model"),
    "no occupancy": lambda state: state | {"model": part_of(state, "field.")},
    "no optimizer": without("optimizer"),
    "no step": without("step"),
    "no random numbers": without("rng"),
    "configuration that is a list": with_other(config=[1, 2]),
    "step that is a text": with_other(step="two"),
    "step below 0": with_other(step=-5),
    "step of 400 digits": with_other(step="9" * 400),
    "seconds that are a tensor": with_other(train_seconds=torch.ones(3)),
    "field of another shape": with_field(lambda name, values: values[..., :1]),
    "field without vertices along x": with_field(
        lambda name, values: values[:0] if name.endswith("features") else values
    ),
    "model that is no mapping": with_other(model=3),
    "field of lists": with_field(lambda name, values: [1.0]),
    "occupied cells that are numbers": lambda state: (
        state | {"model": state["model"] | {"occupancy.occupied": torch.ones(2)}}
    ),
    "moments of another shape": lambda state: state | {"optimizer": {name: {} for name in state["optimizer"]}},
    "random numbers that are floats": with_other(rng=torch.ones(5)),
    "average that is a text": with_other(average="none"),
    "data that is a number": with_other(data=1),
}


# One that fails in each place always runs.
ALWAYS = ("no configuration", "step of 400 digits", "field of another shape", "moments of another shape")


@pytest.mark.parametrize("case", [pytest.param(x, marks=[] if x in ALWAYS else pytest.mark.sweep) for x in WRONG])
def test_contents_that_no_run_saves_are_one_line(tmp_path, saved, case):
    path = checkpoint_path(tmp_path, 2)
    write(path, WRONG[case](dict(saved)))
    own = r"configuration|field\.\S+|trainer\.occupancy\.resolution"
    refusal = rf"^\S+/checkpoint_0000002\.pt( has wrong contents: |: ({own}) must be )"
    with pytest.raises(ValueError, match=refusal) as caught:
        train(tmp_path, f"resume={path}", "trainer.steps=4")
    assert isinstance(caught.value, CheckpointError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "case",
    [
        "no configuration",
        "no model",
        "field without vertices along x",
        pytest.param("field of lists", marks=pytest.mark.sweep),
        "configuration that is a list",
    ],
)
def test_loading_such_a_checkpoint_to_draw_it_is_one_line_too(tmp_path, saved, case):
    path = checkpoint_path(tmp_path, 2)
    write(path, WRONG[case](dict(saved)))
    with pytest.raises(CheckpointError, match=r"has wrong contents|configuration must be a mapping of") as caught:
        voxelfield.load(path, "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("step", [-5, 2.0, True])
def test_loading_a_checkpoint_of_no_whole_step_names_it(tmp_path, saved, step):
    write(checkpoint_path(tmp_path, 2), saved | {"step": step})
    with pytest.raises(CheckpointError, match=rf"2\.pt: step must be a whole number, not negative, got {step}$"):
        voxelfield.load(tmp_path, "cpu")


def test_a_checkpoint_of_a_grid_beyond_all_memory_is_named(tmp_path, saved):
    path, config = checkpoint_path(tmp_path, 2), saved["config"]
    stages = [{"step": 0, "resolution": 10**9, "crop": True}]
    write(path, saved | {"config": config | {"trainer": config["trainer"] | {"stages": stages}}})
    with pytest.raises(CheckpointError, match=r"checkpoint_0000002\.pt has wrong contents: .*overflowed"):
        voxelfield.load(path, "cpu")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "scene.aabb=[[-1,-1,-1],[1,1,1]]",
            r"scene\.aabb must be that of the checkpoint, \[\[-1\.5, .*\]\], got \[\[-1\.0, .*\]\]",
        ),
        (
            "trainer.occupancy.resolution=16",
            r"trainer\.occupancy\.resolution must be that of the checkpoint, 12, got 16",
        ),
        ("model=sh", r"resume must name a checkpoint of the configured model"),
        ("seed=7", r"seed must be that of the checkpoint, 0, because its random numbers continue, got 7"),
        (
            "trainer.stages=[{step: 0, resolution: 16}]",
            r"trainer\.stages must have reached the resolution of the checkpoint at step 2, 12, got 16",
        ),
    ],
)
def test_settings_that_the_field_does_not_have_are_refused(tmp_path, saved, override, message):
    path = checkpoint_path(tmp_path, 2)
    write(path, saved)
    with pytest.raises(ValueError, match=message) as caught:
        train(tmp_path / "another", f"resume={path}", "trainer.steps=4", override)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path], "a run that is refused leaves its directory behind"


def test_a_checkpoint_of_other_shading_is_refused(tmp_path):
    pyramid = ("model=pyramid", "model.resolutions=[4,8]", "model.width=16")
    train(tmp_path, *pyramid)
    with pytest.raises(ValueError, match="resume must name a checkpoint of the configured model"):
        train(tmp_path / "another", *pyramid, "model.shading=deferred", f"resume={tmp_path}", "trainer.steps=4")


def test_a_bomb_of_zeros_is_refused_before_it_takes_memory(tmp_path):
    path = checkpoint_path(tmp_path, 2)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w") as member:
            for _ in range(64):
                member.write(bytes(1 << 20))
        archive.writestr("archive/version", "3\n")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(CheckpointError, match="is not a voxelfield checkpoint: it is a compressed zip file"):
        load_checkpoint(path)


def test_members_that_share_their_bytes_are_refused(tmp_path):
    """A bomb without compression: each of many members is said to be the whole file."""
    path = checkpoint_path(tmp_path, 2)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(100_000))
        info = archive.infolist()[0]
        for number in range(50):
            twin = zipfile.ZipInfo(f"archive/data/{number}")
            for name in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
                setattr(twin, name, getattr(info, name))
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
    with pytest.raises(CheckpointError, match=r"is truncated or damaged \(\d+ bytes\)"):
        load_checkpoint(path)


@pytest.mark.parametrize("shape", [(1 << 40,), (-8,), (1 << 62, 1 << 62), "large"])
def test_a_tensor_of_zeros_must_be_told_of_bit_by_bit(tmp_path, shape):
    packed = {
        "nonzero chunks": torch.zeros(0, 4, dtype=torch.int64),
        "stored": torch.zeros(4, dtype=torch.uint8),
        "rest": torch.zeros(0, dtype=torch.uint8),
        "shape": shape,
        "dtype": torch.float32,
    }
    write_checkpoint(tmp_path / "last.pt", {"format": FORMAT, "voxelfield": "0", "grid": packed})
    with pytest.raises(CheckpointError, match="a tensor without its zeros must have chunks"):
        load_checkpoint(tmp_path / "last.pt")


@pytest.fixture
def scene() -> Scene:
    images = torch.randint(0, 255, (3, 4, 5, 4), dtype=torch.uint8)
    cameras = Cameras(torch.eye(4).repeat(3, 1, 1), torch.ones(3, 4), 5, 4)
    return Scene("toy", torch.tensor([[-1.0] * 3, [1.0] * 3]), {"train": Split(images, cameras, ("a", "b", "c"))})


def test_other_data_than_before_is_told_by_name(scene):
    before, split = fingerprint(scene.train), scene.train
    assert changed_data(before, fingerprint(split), split.names) == ""
    split.images[1, 2, 3, 0] ^= 1
    assert changed_data(before, fingerprint(split), split.names) == (
        "has different training images from the checkpoint (1 of 3, the first is b)"
    )
    split.images[1, 2, 3, 0] ^= 1
    split.cameras.c2w[2, 0, 3] += 1e-6
    assert changed_data(before, fingerprint(split), split.names) == (
        "has different training cameras from the checkpoint (1 of 3, the first is c)"
    )
    fewer = Split(split.images[:2], split.cameras[:2], ("a", "b"))
    expected = "has 2 training images, but the checkpoint was trained on 3"
    assert changed_data(before, fingerprint(fewer), fewer.names) == expected
    masked = Split(split.images, split.cameras, split.names, torch.ones(3, 4, 5, dtype=torch.bool))
    assert "training images" in changed_data(before, fingerprint(masked), masked.names)


def test_a_run_that_goes_on_with_other_images_warns(tmp_path, saved, caplog):
    write(checkpoint_path(tmp_path, 2), saved | {"data": saved["data"] | {"images": saved["data"]["images"] + 1}})
    assert train(tmp_path, "resume=auto", "trainer.steps=3")
    assert "scene has different training images from the checkpoint (24 of 24, the first is r_0)" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("trainer.rates.grid=0.5",),
            "settings differ from those of the checkpoint: trainer.rates.grid is 0.5 instead of",
        ),
        (("trainer.stages=[{step: 0, resolution: 12}, {step: 2, resolution: 14}]",), "trainer.stages is [{"),
        (("trainer.evaluation.views=2", "trainer.log_every=1", "data.holdout=4"), None),
    ],
)
def test_other_settings_than_before_are_told(tmp_path, saved, caplog, overrides, told):
    write(checkpoint_path(tmp_path, 2), saved)
    assert train(tmp_path, "resume=auto", "trainer.steps=3", *overrides)
    assert (told or "settings differ") in caplog.text or told is None
    assert ("settings differ" in caplog.text) == (told is not None)


def test_the_update_of_matrices_is_that_of_the_checkpoint(tmp_path):
    train(tmp_path, "optimizer.matrices=adamw")
    resume = (f"resume={tmp_path}", "trainer.steps=3")
    with pytest.raises(ValueError, match=r": optimizer\.matrices must be adamw, as in the checkpoint, got muon$"):
        train(tmp_path / "again", *resume, "optimizer.matrices=muon")
    assert train(tmp_path / "once more", *resume, "optimizer.matrices=adamw")


def test_a_field_without_networks_resumes_with_either_update(tmp_path):
    options = ("model=sh", "trainer=smoke", "model.resolutions=[8,16]")
    train(tmp_path, *options, "optimizer.matrices=adamw")
    assert train(tmp_path / "again", *options, f"resume={tmp_path}", "trainer.steps=3", "optimizer.matrices=muon")
