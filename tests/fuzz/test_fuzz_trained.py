"""Model files, checkpoints and settings: damaged or contradictory ones are refused in one line."""

from __future__ import annotations

import copy
from pathlib import Path

import fuzz_trained
import pytest
import torch
from fuzz_damage import damaged_bytes, damaged_value
from fuzz_property import attempt, tally
from fuzz_scenes import SCENES, write_files
from hypothesis import given
from hypothesis import strategies as st

import voxelfield


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
    options = {"recipe": "mlp", "trainer": "smoke", "optimizer": "adamw", "device": "cpu", "seed": 0}
    name = data.draw(st.sampled_from([*options, "camera", "scene", "output"]))
    others = [None, "", "text", "../up", 0, -1, 1.5, float("nan"), [], {}, {"steps": -1}, object(), True, 2**70]
    arguments = {"scene": scene, **options, name: data.draw(st.sampled_from(others))}
    attempt("Session", lambda: voxelfield.Session(arguments.pop("scene"), **arguments), (*arguments, "scene", "model"))
    tally["Session"]["tried"] += 1
