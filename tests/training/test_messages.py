"""What a run says, in one line, of a checkpoint of another run and of room for no pixel."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from quick_presets import preset

from voxelfield.runs import train as run_training
from voxelfield.training.state import rates_of_steps


@pytest.mark.parametrize(
    ("saved_model", "scene", "message"),
    [
        (
            "model=sh",
            "bricks",
            r"resume must name a checkpoint of the configured model \{.*'dense'.*\}, got one of \{.*\}",
        ),
        ("model=dense", "lego", "resume must name a checkpoint of scene=bricks, got one of scene=lego"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(monkeypatch, saved_model, scene, message):
    saved = {"config": {"model": asdict(preset(saved_model).model), "scene": {"name": scene}, "seed": 0}}
    monkeypatch.setattr(run_training, "resolve_checkpoint", Path)
    monkeypatch.setattr(run_training, "load_resolved", lambda path: (path, saved))
    monkeypatch.setattr(run_training, "load_newest", lambda directory: (directory / "checkpoint_0000003.pt", saved))
    for resume in ("run", "auto"):
        with pytest.raises(ValueError, match=rf"\A{message}\Z"):
            run_training.load_to_resume(replace(preset("model=dense"), resume=resume), Path("here"), Path())


@pytest.mark.parametrize(
    ("totals", "names", "room"),
    [
        ({}, "trainer.visible_samples", "32"),
        ({"candidates": 9.0}, "trainer.candidate_samples and trainer.visible_samples", "64 and 32"),
    ],
)
def test_room_for_no_pixel_is_named(totals, names, room):
    config = preset("trainer.visible_samples=32", "trainer.candidate_samples=64").trainer
    message = f"{names} must have room for one pixel's samples, got {room}: raise it"
    with pytest.raises(ValueError, match=re.escape(message)):
        rates_of_steps({"steps": 2.0, "rays": 0.0, **totals}, config, 1.0)
