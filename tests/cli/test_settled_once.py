"""A run answers every question once: its settings, their files, its lock, the format of its scene, its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from place_capture import write_capture
from short_runs import finish
from test_resumed_defaults import SMALL, SMALL_PYRAMID
from warm_python import warm_python

# Runs train.py as often as it is told, and prints what has been done how often. The model is counted up to the first
# gradient, because rendering makes copies of it, and not on ``meta``, where only its memory is estimated.
COUNTED = """
import functools, json, sys
from collections import Counter
from dataclasses import replace

import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from voxelfield import config, run_directory
from voxelfield.cli.train import main
from voxelfield.datasets import registry
from voxelfield.models.model import Model
from voxelfield.settings import RunConfig

counts, formats, training = Counter(), Counter(), []

def watch(owner, name, count):
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*arguments, **named):
        result = original(*arguments, **named)
        count(*arguments, **named)
        return result

    setattr(owner, name, watched)

def watched_format(known):
    def recognises(folder):
        formats[known.name, folder.name] += 1
        return known.recognises(folder)

    return replace(known, recognises=recognises)

def count_parsed(value, schema, key):
    counts["parsed"] += schema is RunConfig

def count_model(model, *_, **__):
    counts["models"] += not training and model.device.type != "meta"

watch(config, "_convert_dataclass", count_parsed)
watch(ConfigLoaderImpl, "load_configuration", lambda *_, **__: counts.update(["composed"]))
watch(run_directory, "_lock", lambda *_: counts.update(["locked"]))
watch(Model, "__init__", count_model)
watch(torch.Tensor, "backward", lambda *_, **__: training.append(1))
watched_formats = tuple(map(watched_format, registry.formats()))
registry.formats = lambda: watched_formats
for run in range({runs}):
    training.clear()
    assert main([*sys.argv[1:], f"hydra.run.dir={directory}/{{run}}"]) == 0
counts["recognised"] = max(formats.values())
print(json.dumps(counts))
"""

BRICKS = ("scene=bricks", "trainer=smoke")
FEW_RESULTS = ("trainer.steps=3", "trainer.evaluation.views=1", "trainer.evaluation.video_frames=0", "logger=none")


def counts(directory: Path, *overrides: str, runs: int = 1) -> tuple[dict[str, int], str]:
    """Returns how often a run does what, and its output."""
    program = COUNTED.format(runs=runs, directory=directory)
    code, output, err = finish(warm_python.start("-c", program, *overrides, *SMALL, *FEW_RESULTS, "device=cpu"))
    assert code == 0, output + err
    return json.loads(output.splitlines()[-1]), output


def once(times: int) -> dict[str, int]:
    return dict.fromkeys(("parsed", "composed", "locked", "models", "recognised"), times)


@pytest.mark.parametrize("runs", [1, 2])
def test_a_run_settles_everything_once(tmp_path, runs):
    found, _ = counts(tmp_path, *BRICKS, runs=runs)
    assert found == once(runs)


def test_photographs_choose_their_trainer_without_starting_anew(tmp_path):
    write_capture(tmp_path / "room")
    found, output = counts(tmp_path / "runs", f"scene={tmp_path / 'room'}", *SMALL_PYRAMID)
    assert "trainer=few_photographs is the default" in output
    assert found == once(1)
