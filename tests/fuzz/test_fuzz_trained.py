"""Model files, checkpoints, settings and camera paths: what is damaged, contradictory or crafted is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import fuzz_trained
import pytest
import torch
from fuzz_damage import damaged_bytes, damaged_json, damaged_value
from fuzz_property import attempt, tally
from fuzz_scenes import SCENES, write_files
from hypothesis import given
from hypothesis import strategies as st

import voxelfield
from voxelfield.datasets.camera_path import read_camera_path
from voxelfield.export import save_model
from voxelfield.media.video import LARGEST_SIDE
from voxelfield.rendering.paths import overview
from voxelfield.rendering.render import View


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trained")


def load_or_refuse(path: Path) -> None:
    """Fails unless a file is refused in one line that names it, or is a run whose field can be evaluated."""
    name = f"load {path.name}"
    # The configuration in a file is refused as any other, by its keys.
    names = (path.name, "scene", "trainer", "model", "optimizer", "configuration", "camera", "logger", "data")
    run = attempt(name, lambda: voxelfield.load(path, "cpu"), names)
    if run is not None:
        density = run.density(torch.zeros(1, 3))
        assert density.shape == (1,)
        tally[name]["loaded"] += 1


@given(data=st.data())
def test_damaged_model_files_are_refused(folder, data):
    path = folder / "model.safetensors"
    content = fuzz_trained.model_bytes(data.draw(st.sampled_from(["standard", "exact"])))
    damaged = data.draw(damaged_bytes(content))
    path.write_bytes(damaged)
    if damaged == content:
        return
    run = attempt("damaged model file", lambda: voxelfield.load(path, "cpu"), (path.name,))
    assert run is None, "damage was not noticed"


@given(data=st.data())
def test_contradictory_model_files_are_refused(folder, data):
    """Of which every checksum is right."""
    path = folder / "described.safetensors"
    description = fuzz_trained.model_description(fuzz_trained.model_bytes())
    path.write_bytes(fuzz_trained.model_with(data.draw(damaged_value(description))))
    load_or_refuse(path)


def draw_or_refuse(path: Path) -> None:
    """Fails unless a file is refused in one line, or is a run that draws an image and can be saved again."""
    name = f"draw {path.name}"
    names = (path.name, "scene", "trainer", "model", "supersampling", "memory")

    def draw() -> View:
        run = voxelfield.load(path, "cpu")
        view = run.render(overview(run.field.aabb, 5, 4))
        save_model(path.with_name("again.safetensors"), run)
        return view

    view = attempt(name, draw, names)
    if view is not None:
        assert view.rgb.shape == (4, 5, 3)
        tally[name]["drawn"] += 1


@given(data=st.data())
def test_crafted_settings_are_refused_or_drawn_with(folder, data):
    path = folder / "settings.safetensors"
    description = fuzz_trained.model_description(fuzz_trained.model_bytes())
    crafted = data.draw(fuzz_trained.crafted_settings(description["config"]))
    path.write_bytes(fuzz_trained.model_with(description | {"config": crafted}))
    draw_or_refuse(path)


@given(data=st.data())
def test_crafted_tensors_are_refused_or_drawn(folder, data):
    path = folder / "tensors.safetensors"
    quality = data.draw(st.sampled_from(["standard", "exact"]))
    description = fuzz_trained.model_description(fuzz_trained.model_bytes(quality))
    tensors = data.draw(fuzz_trained.crafted_tensors(fuzz_trained.model_tensors(quality)))
    path.write_bytes(fuzz_trained.model_with(description, tensors))
    draw_or_refuse(path)


@given(data=st.data())
def test_damaged_camera_paths_are_refused(folder, data):
    path = folder / "path.json"
    whole = json.dumps(fuzz_trained.path_content()).encode()
    content = data.draw(st.one_of(damaged_json(whole), damaged_bytes(whole)))
    path.write_bytes(content)
    found = attempt("camera path", lambda: read_camera_path(path), (path.name,))
    if found is not None:
        cameras = found.cameras
        assert max(cameras.width, cameras.height) <= LARGEST_SIDE
        corners = torch.tensor([[0.0, 0.0], [cameras.width, cameras.height]])
        rays = cameras.rays(torch.zeros(2, dtype=torch.int64), corners, torch.tensor([[-1.0] * 3, [1.0] * 3]))
        torch.testing.assert_close(rays.directions.norm(dim=-1), torch.ones(2))


@given(data=st.data())
def test_damaged_checkpoints_are_refused(folder, data):
    path = folder / "last.pt"
    content = fuzz_trained.checkpoint_bytes(fuzz_trained.checkpoint_state())
    damaged = data.draw(damaged_bytes(content))
    path.write_bytes(damaged)
    attempt("damaged checkpoint", lambda: voxelfield.load(path, "cpu"), (path.name,))


@given(data=st.data())
def test_contradictory_checkpoints_are_refused(folder, data):
    """Of which every checksum is right."""
    path = folder / "contradictory.pt"
    state = copy.deepcopy(fuzz_trained.checkpoint_state())
    part = data.draw(st.sampled_from([*state, "config", "config"]))
    if part == "config":
        state["config"] = data.draw(damaged_value(state["config"]))
    elif isinstance(state[part], dict) and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(state[part])))
        others = [None, 1, "text", torch.zeros(0), torch.zeros(2, 2, 2), torch.full((2, 3), float("nan")), [], {}]
        state[part][key] = data.draw(st.sampled_from(others))
    elif data.draw(st.booleans()):
        del state[part]
    else:
        state[part] = data.draw(st.sampled_from([None, 1, "text", torch.zeros(3), [], {}]))
    path.write_bytes(fuzz_trained.checkpoint_bytes(state))
    load_or_refuse(path)


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> voxelfield.Scene:
    place = tmp_path_factory.mktemp("scene")
    write_files(place, SCENES["blender"][1]())
    return voxelfield.load_scene(place, splits=None)


@given(data=st.data())
def test_settings_of_a_session_are_refused_by_name(scene, data):
    """Whatever is given for one of them; what is accepted is built, but not trained."""
    options = {"model": "dense", "trainer": "smoke", "optimizer": "adamw", "device": "cpu", "seed": 0}
    name = data.draw(st.sampled_from([*options, "camera", "scene", "output"]))
    others = [None, "", "text", "../up", 0, -1, 1.5, float("nan"), [], {}, {"steps": -1}, object(), True, 2**70]
    arguments = {"scene": scene, **options, name: data.draw(st.sampled_from(others))}
    attempt("Session", lambda: voxelfield.Session(arguments.pop("scene"), **arguments), (*arguments, "scene", "model"))
    tally["Session"]["tried"] += 1
