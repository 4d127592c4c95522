"""An export format, a dataset format and a decoder that wants the time of each ray, in one file of a package each."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from installed_package import install
from short_runs import TINY
from warm_python import warm_python

import voxelfield
from voxelfield.cli.trained import add_export_arguments
from voxelfield.config import Count
from voxelfield.datasets import registry as datasets
from voxelfield.export import registry as exports
from voxelfield.export.registry import ExportFormat, Option
from voxelfield.foundation import extensions

LEGO = Path(__file__).parents[1] / "fixtures" / "lego"

DEPTH_MAPS = """
import numpy as np

from voxelfield.config import Count
from voxelfield.export.registry import ExportFormat, Option


def write(path, source, views=2):
    cameras = source.training_cameras()
    np.save(path, [source.run.render(cameras, index).depth.cpu().numpy() for index in range(views)])
    return f"{views} depth maps"


FORMAT = ExportFormat(
    name="depths",
    help="depth maps of the training cameras: npy",
    write=write,
    suffixes=(".npy",),
    options=(Option("views", "number of depth maps (default: 2)", Count, "N"),),
)
"""

MOMENTS = """
from dataclasses import replace
from pathlib import Path

import torch

from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.registry import Format, contains


def load(folder, options):
    scene = load_blender(Path((folder / "moments.txt").read_text()), options)
    splits = {
        name: replace(split, extras={"time": torch.linspace(0, 1, len(split))}) for name, split in scene.splits.items()
    }
    return replace(scene, name=folder.name, splits=splits)


FORMAT = Format("moments", "moments.txt", contains(["moments.txt"]), load)
"""

TIMED = """
from dataclasses import dataclass
from typing import Literal

import torch

from voxelfield import Decoder, RadianceField, VoxelGrid
from voxelfield.grids.voxel_grid import cubic_voxels
from voxelfield.models import ModelConfig


class TimedDecoder(Decoder):
    channels = 7
    density_is_monotonic = True
    extra_inputs = ("time",)

    def density(self, features):
        return 100 * torch.nn.functional.softplus(features[:, 0].float() - 5)

    def forward(self, features, directions, ray_index, *, time):
        first, change = features[:, 1:4].float(), features[:, 4:].float()
        return self.density(features), torch.sigmoid(first + time[ray_index, None] * change)


@dataclass
class TimedConfig(ModelConfig):
    kind: Literal["timed"] = "timed"

    def build(self, aabb, resolutions, device):
        grid = VoxelGrid(cubic_voxels(aabb, resolutions[0]), TimedDecoder.channels, aabb, device=device)
        return RadianceField(grid, TimedDecoder()).to(device)
"""

GONE = "there_is_no_such_module:FORMAT"
LEFT_OUT = (
    ("mesh", "mesh is taken"),
    ("a", "device is taken"),
    ("b", "count is taken"),
    ("depth-maps", "its name must be an identifier"),
    ("_d", "its name must be an identifier"),
    ("own", "own is taken"),
    ("again", "times is taken"),
    ("dashed", "its option max-faces must be an identifier"),
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One package with the three files, and another whose entry points cannot be imported."""
    folder = tmp_path_factory.mktemp("installed")
    groups = {
        "voxelfield.exports": {"depths": "depth_maps:FORMAT"},
        "voxelfield.datasets": {"moments": "moments:FORMAT"},
        "voxelfield.models": {"timed": "timed_field:TimedConfig"},
    }
    install(folder, "extras", groups, {"depth_maps": DEPTH_MAPS, "moments": MOMENTS, "timed_field": TIMED})
    install(folder, "broken", {group: {"gone": GONE} for group in groups})
    return folder


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "moving"
    folder.mkdir()
    (folder / "moments.txt").write_text(str(LEGO))
    return folder


@pytest.fixture(scope="module")
def trained(package: Path, scene: Path) -> Path:
    """A run on the command line of the package's scene and model."""
    folder = scene.parent / "run"
    own = (f"scene={scene}", "model=timed", "device=cpu", f"hydra.run.dir={folder}")
    done = command(package, "train", *TINY, *own)
    assert done.returncode == 0, done.stderr[-3000:]
    assert left_out(done, "voxelfield.datasets")
    assert "model=gone is not available, because its model cannot be used" in done.stderr
    return folder


def command(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run("-m", "voxelfield", *arguments, env={**os.environ, "PYTHONPATH": str(package)})


def left_out(done: subprocess.CompletedProcess[str], group: str) -> bool:
    """Whether one line says which entry point of a group cannot be imported."""
    reason = "cannot be imported: ModuleNotFoundError: No module named 'there_is_no_such_module'"
    line = f"the entry point gone = {GONE} of {group} is left out, because it {reason}"
    return sum(line in printed for printed in done.stderr.splitlines()) == 1


@pytest.fixture
def importable(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package in this process."""
    monkeypatch.syspath_prepend(package)
    for registry in (datasets, exports):
        registry.formats.cache_clear()
    yield
    for registry in (datasets, exports):
        registry.formats.cache_clear()
    for name in ("depth_maps", "moments", "timed_field"):
        sys.modules.pop(name, None)


def test_a_foreign_export_format_is_an_option_of_the_command(package: Path, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "depths.npy"
    file.parent.mkdir()
    done = command(package, "export", str(trained), "--depths", str(file), "--views", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"wrote 3 depth maps to {file}" in done.stderr
    assert left_out(done, "voxelfield.exports")
    assert np.load(file).shape == (3, 25, 25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--depths", "a.npz"), "--depths must be a file *.npy, got a.npz"),
        (("--depths", "a.npy", "--views", "0"), "--views must be at least 1, got 0"),
        (("--mesh", "a.ply", "--views", "2"), "--views must come with --depths, got 2 without it"),
    ],
)
def test_wrong_options_of_a_foreign_format_are_refused(package: Path, arguments: tuple[str, ...], message: str) -> None:
    done = command(package, "export", "nowhere", *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == message


@pytest.mark.usefixtures("importable")
def test_foreign_formats_and_decoders_work_in_python(scene: Path, tmp_path: Path) -> None:
    loaded = voxelfield.load_scene(scene, image_size=25)
    assert (loaded.name, loaded.format) == ("moving", "moments")
    model = __import__("timed_field").TimedConfig()
    session = voxelfield.Session(loaded, model, trainer="smoke", device="cpu")
    assert session.field.extra_inputs == ("time",)
    run = session.result()
    camera = loaded.train.cameras[[0]]
    with torch.no_grad():
        run.field.grid.features.fill_(5.0)
        run.occupancy.occupied.fill_(True)
    dark, light = (run.render(camera.with_values(time=time)).rgb for time in (-3.0, 3.0))
    assert light.mean() > dark.mean() + 0.3
    exports.export(run, {"depths": tmp_path / "d.npy"}, root=scene.parent, views=1)
    assert np.load(tmp_path / "d.npy").shape[0] == 1
    with pytest.raises(ValueError, match=r"files must be of .*, web, depths, got 'depth'"):
        exports.export(run, {"depth": tmp_path / "d.npy"})


def test_a_foreign_export_format_cannot_take_a_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def foreign(name: str, *options: Option) -> ExportFormat:
        return ExportFormat(name=name, help="", write=lambda path, source: "nothing", options=options)

    unusable = [
        foreign("mesh"),
        foreign("a", Option("device", "")),
        foreign("b", Option("count", "", str)),
        foreign("depth-maps"),
        foreign("_d"),
        foreign("own", Option("own", "")),
        foreign("again", Option("times", ""), Option("times", "")),
        foreign("dashed", Option("max-faces", "")),
    ]
    fitting = foreign("c", Option("count", "number of spheres, 100% round", Count))
    monkeypatch.setattr(exports, "announced_objects", lambda *_: [*unusable, fitting])
    exports.formats.cache_clear()
    parser = argparse.ArgumentParser()
    try:
        assert list(exports.formats())[-2:] == ["web", "c"]
        assert exports.formats()["mesh"].help
        add_export_arguments(parser)
    finally:
        exports.formats.cache_clear()
    assert "--c: number of spheres, 100% round" in " ".join(parser.format_help().split())
    assert caplog.messages == [
        f"export format {name} of another package is left out: {reason}" for name, reason in LEFT_OUT
    ]


@pytest.mark.parametrize("kind", [KeyError, SystemExit, KeyboardInterrupt])
def test_a_foreign_format_that_cannot_recognise_a_folder_harms_no_scene(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def recognises(folder: Path) -> bool:
        raise kind(f"no table\nof {folder.name}")

    broken = datasets.Format("tables", "tables.txt", recognises, lambda folder, options: None, order=0)
    monkeypatch.setattr(datasets, "announced_objects", lambda *_: [broken])
    monkeypatch.setattr(datasets, "_failed", set())
    datasets.formats.cache_clear()
    try:
        assert [voxelfield.load_scene(LEGO, image_size=25).format for _ in range(2)] == ["blender"] * 2
    finally:
        datasets.formats.cache_clear()
    line = r"scene format tables of another package does not recognise .*lego, because it failed: "
    line += kind.__name__ + ": .*of lego'?"
    assert sum(re.fullmatch(line, message) is not None for message in caplog.messages) == 1
    assert sum("tables" in message for message in caplog.messages) == 1


def test_an_object_that_is_no_format_is_left_out_without_its_own_words(monkeypatch, caplog):
    class Mute:
        def __repr__(self) -> str:
            raise KeyboardInterrupt

    entry = SimpleNamespace(name="mute", value="mute:FORMAT", load=Mute)
    monkeypatch.setattr(extensions, "entry_points", lambda group: [entry])
    assert extensions.announced_objects("voxelfield.datasets", datasets.Format) == []
    reason = "is left out, because it is no Format but a Mute"
    assert caplog.messages == [f"the entry point mute = mute:FORMAT of voxelfield.datasets {reason}"]
