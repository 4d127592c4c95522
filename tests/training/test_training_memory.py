"""What a run will need of a GPU, and that too much is refused before anything is allocated."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quick_presets import preset

from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.scene import Split
from voxelfield.models.model import Model
from voxelfield.models.training import MemoryEstimate
from voxelfield.rendering.march import MAX_VISIBLE_PER_RAY
from voxelfield.runs import train as run_training
from voxelfield.runs.train import load_configured_scene, train_as_configured
from voxelfield.settings import RunConfig
from voxelfield.trained.trained_model import untrained_model
from voxelfield.training import session
from voxelfield.training.memory import check_memory, estimate_memory, place_of_images

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
SMALL = ("scene=lego", "data.root=tests/fixtures", "trainer=smoke")


def estimated(*overrides) -> MemoryEstimate:
    settings = preset(*SMALL, *overrides, name="train")
    scene = load_configured_scene(settings, ROOT)
    return estimate_memory(untrained_model(settings, "meta"), settings, scene.train)


def small() -> tuple[RunConfig, Split, Model]:
    """The settings of a small run, its training images and its model without memory."""
    settings = preset(*SMALL, name="train")
    return settings, load_configured_scene(settings, ROOT).train, untrained_model(settings, "meta")


def say_free(monkeypatch, free: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)


def test_parts_of_a_pyramid():
    estimate = estimated("model=pyramid", "model.resolutions=[4,8,12]", "trainer.precision=float16")
    values = 4 * (4**3 + 8**3 + 12**3)
    assert estimate.parameters == estimate.gradients == 4 * values
    assert estimate.optimizer == 4 * values  # two moments in bfloat16
    assert estimate.copies == 2 * values
    assert estimate.average == 0
    assert estimated("model=pyramid", "model.resolutions=[4,8,12]", "trainer.average_steps=5").average == 4 * values
    assert estimate.sparse == 0
    images = load_blender(ROOT / "tests" / "fixtures" / "lego").train.images
    assert estimate.images == images.numel()


def test_sparse_levels_count_with_all_the_blocks_that_they_may_have():
    options = ("model=pyramid", "model.resolutions=[4,8,12]", "trainer.precision=float16", "model.max_blocks=1000")
    sparse = "trainer.sparse_resolutions=[56,112]"
    stages = ("trainer.stages=[{step: 0, resolution: 12},{step: 2, resolution: 112}]", sparse)
    dense, both = estimated(*options), estimated(*options, *stages)
    values = 4 * 8**3 * (1000 + 250)
    assert both.parameters - dense.parameters == 4 * values
    assert both.sparse == 14 * values
    averaged = estimated(*options, *stages, "trainer.average_steps=5")
    assert averaged.sparse == 18 * values
    assert both.total - dense.total >= both.sparse


def test_masks_cost_a_number_for_each_pixel_that_counts():
    settings, train, model = small()
    masks = torch.rand(train.images.shape[:3]) < 0.5
    estimate = estimate_memory(model, settings, replace(train, masks=masks))
    assert estimate.images == train.images.numel() + 4 * int(masks.sum())


def test_structure_costs_a_byte_for_each_pixel():
    without, weighted = (estimated("model=dense", f"trainer.loss.structure={weight}") for weight in (0, 1e-3))
    assert weighted == replace(without, images=without.images * 5 // 4)


def test_data_of_pixels_counts_as_much_as_it_takes():
    settings, train, model = small()
    pixels = train.images.shape[:3]
    carried = {
        "depth": torch.zeros(pixels),
        "depth_weight": torch.zeros(pixels).half(),
        "time": torch.zeros(len(train)),
    }
    without, with_depths = (estimate_memory(model, settings, replace(train, extras=extras)) for extras in ({}, carried))
    assert with_depths == replace(without, images=without.images * 10 // 4)


def test_a_single_grid_counts_at_its_last_resolution():
    stages = "trainer.stages=[{step: 0, resolution: 8}, {step: 5, resolution: 20}]"
    estimate = estimated("model=dense", "model.features=5", stages)
    assert estimate.parameters == 4 * 20**3 * 6
    assert estimate.copies == 0, "float32 is read in place"


def test_levels_that_are_added_up_need_all_their_memory_but_samples_of_one_level():
    one, two = (estimated("model=sh", "model.degree=1", f"model.resolutions={levels}") for levels in ("[8]", "[8,16]"))
    assert one.parameters == 4 * 9**3 * 13
    assert two.parameters == 4 * (9**3 + 17**3) * 13
    assert two.samples == one.samples
    narrow = estimated("model=sh", "model.degree=1", "model.resolutions=[8,16]", "model.view_resolution=8")
    assert narrow.parameters == 4 * (9**3 * 13 + 17**3 * 4)


def test_images_on_the_host_take_no_memory_of_the_device():
    settings, train, model = small()
    here, there = (estimate_memory(model, settings, train, images=place) for place in ("device", "host"))
    assert here.images == train.images.numel()
    assert there == replace(here, images=0)
    weighted = preset(*SMALL, "trainer.loss.structure=1e-3", name="train")
    assert estimate_memory(model, weighted, train, images="host") == there


@pytest.mark.parametrize(
    ("requested", "divided", "free", "place"),
    [
        ("auto", False, 3, "device"),
        ("auto", False, 2, "host"),
        ("device", False, 2, "device"),
        ("host", False, 9, "host"),
        ("auto", True, 3, "device"),
        ("auto", True, 2, "local"),
        ("auto", True, 1, "host"),
        ("device", True, 3, "device"),
        ("device", True, 1, "local"),
        ("host", True, 9, "host"),
    ],
)
def test_images_are_where_they_fit(monkeypatch, requested, divided, free, place):
    say_free(monkeypatch, free * GIB)
    images = {"device": 2 * GIB, "local": GIB, "host": 0}

    def estimate(where):
        return MemoryEstimate(GIB, 0, 0, 0, 0, images[where], 0)

    assert place_of_images(estimate, requested, torch.device("cuda"), divided) == place
    assert place_of_images(estimate, requested, torch.device("cpu"), divided) == "local"


@pytest.mark.parametrize("name", ["visible_samples", "candidate_samples"])
def test_samples_grow_with_their_number(name):
    few, many = (estimated("model=dense", f"trainer.{name}={count}") for count in (10**6, 3 * 10**6))
    # position, t, dt and ray index of each are 28 bytes
    assert many.samples - few.samples >= 2 * 10**6 * 28
    assert many.total - few.total == many.samples - few.samples


def test_a_pyramid_marched_in_one_kernel_notes_distances_by_ray():
    options = ("model=pyramid", "model.resolutions=[4,8]", "trainer.precision=float16", "trainer.max_rays=1000")
    few, many = (estimated(*options, f"trainer.candidate_samples={count}") for count in (10**6, 3 * 10**6))
    assert few.samples == many.samples
    more = estimated(*options[:-1], "trainer.max_rays=2000")
    assert more.samples - few.samples >= 1000 * MAX_VISIBLE_PER_RAY * 4


def test_what_fits_passes(monkeypatch):
    estimate = MemoryEstimate(GIB, GIB, 0, 0, 0, 0, 0)
    say_free(monkeypatch, 2 * GIB)
    check_memory(estimate, torch.device("cuda"))
    say_free(monkeypatch, GIB)
    # what torch holds without using it is free, too
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    check_memory(estimate, torch.device("cuda"))


@pytest.mark.parametrize(
    ("estimate", "advice"),
    [
        (MemoryEstimate(GIB, GIB, 2 * GIB, 0, 0, 0, GIB), "lower trainer.finest_resolution (in Python, the last"),
        (MemoryEstimate(GIB, GIB, 2 * GIB, 0, 0, 0, GIB, sparse=3 * GIB), "lower model.max_blocks, "),
        (MemoryEstimate(GIB, 0, 0, 0, 0, 0, 4 * GIB), "lower trainer.visible_samples (and candidate_samples), "),
    ],
)
def test_what_does_not_fit_is_refused_with_advice(monkeypatch, estimate, advice):
    say_free(monkeypatch, 3 * GIB)
    expected = rf"needs about 5\.00 GiB \(.*\) of GPU memory, but 3\.00 GiB are free on cuda:1: .*{re.escape(advice)}"
    with pytest.raises(ValueError, match=expected) as caught:
        check_memory(estimate, torch.device("cuda", 1))
    assert "\n" not in str(caught.value)


def test_a_run_is_refused_before_it_touches_the_gpu(monkeypatch, tmp_path, caplog):
    for module in (run_training, session):
        monkeypatch.setattr(module, "choose_device", lambda requested: torch.device("cuda"))
        monkeypatch.setattr(module._library, "ensure_loaded", lambda device_type: True)
    monkeypatch.setattr(run_training, "_warm_up", lambda *_: None)
    say_free(monkeypatch, GIB // 2)
    caplog.set_level("INFO")
    stages = "trainer.stages=[{step: 0, resolution: 400}]"
    config = preset(*SMALL, "model=pyramid", "model.resolutions=[16,400]", stages, name="train")
    with pytest.raises(ValueError, match=r"but 0\.50 GiB are free on cuda: lower trainer\.finest_resolution"):
        train_as_configured(config, tmp_path, ROOT)
    assert "training needs about 3." in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
@pytest.mark.parametrize("kept", [False, True])
def test_memory_freed_on_a_cpu_stays_with_a_program_that_trains(kept):
    code = f"""
import os, torch
from voxelfield.devices import keep_freed_memory
if {kept}:
    keep_freed_memory()
torch.ones(1 << 26)
print(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 1.5 * 2**28) == kept, done.stdout
