from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
from quick_presets import preset

from voxelfield.training import scaling
from voxelfield.training.scaling import NVLINK, Link, StepWork, devices_that_pay, estimate_work, worthwhile_devices

WORK = StepWork(samples=100, channels=4, levels=2, features=1000, rays=8.0, update=4.0, undivided=1.0)


def test_one_device_exchanges_nothing():
    step = WORK.on(1, Link(1.0, 1.0))
    assert (step.samples, step.copies, step.latency) == (0, 0, 0)
    assert step.total == 13


@pytest.mark.parametrize(("devices", "received", "rounds"), [(2, 1 / 2, 1), (4, 3 / 4, 2), (64, 63 / 64, 6)])
def test_several_divide_what_can_be_divided_and_receive_what_the_others_have(devices, received, rounds):
    step = WORK.on(devices, Link(bandwidth=1000.0, latency=0.5))
    assert (step.rays, step.update, step.undivided) == (8 / devices, 4 / devices, 1)
    # 12 bytes of a position and 4 features in 16 bits; 3 in 10 features in 16 bits. Reading them takes no time here.
    assert step.samples == pytest.approx(received * 100 * 20 / 1000)
    assert step.copies == pytest.approx(received * 300 * 2 / 1000)
    assert step.latency == 6 * 0.5 * rounds
    assert step.total == pytest.approx(1 + 12 / devices + received * 2.6 + 3 * rounds)


@pytest.mark.parametrize(("devices", "copies", "exchanges"), [(2, 0, 4), (4, 0, 4), (8, 0.025, 4), (16, 0.5625, 6)])
def test_devices_that_write_into_each_others_memory_do_so_while_they_update(devices, copies, exchanges):
    # Seven eighths of 600 bytes take 0.025 seconds longer to arrive than an eighth of the update.
    step = WORK.on(devices, Link(1000.0, 0.5, direct=True))
    assert step.copies == pytest.approx(copies)
    assert step.latency == exchanges * 0.5 * math.log2(devices)


def test_every_device_looks_through_all_samples_in_each_level():
    alike = replace(WORK, samples=10**9, channels=0)
    fewer, more = (replace(alike, levels=levels).on(2, Link(1e18)).samples for levels in (1, 5))
    assert more == pytest.approx(5 * fewer, rel=1e-3)


# Seconds of whole trainings in README.md and docs/training.md, divided by the steps that they took.
@pytest.mark.parametrize(
    ("trainer", "measured"),
    [
        ("default", 18.8 / 8000),
        ("many_photographs_best", 194.8 / 30000),
        ("many_photographs", 58.3 / 9200),
    ],
)
def test_the_steps_of_presets_are_estimated_as_measured_on_one_device(trainer, measured):
    work = estimate_work(preset(f"trainer={trainer}", name="train"))
    assert work.on(1, NVLINK).total == pytest.approx(measured, rel=0.1)


def test_what_is_exchanged_follows_from_the_settings():
    work = estimate_work(preset("trainer=many_photographs", name="train"))
    assert (work.samples, work.channels, work.levels) == (2**20, 28, 7)
    assert work.sample_bytes == 2**20 * (12 + 2 * 28)
    blocks = 163840 + 163840 // 4
    dense = sum(side**3 for side in (16, 32, 64, 128, 256))
    assert work.features == pytest.approx(4 * (512 * blocks + 0.1 * dense), rel=0.01)
    assert work.copy_bytes == pytest.approx(0.3 * 2 * work.features)


def test_a_scene_whose_box_is_not_known_yet_is_estimated_too():
    known = preset("trainer=unbounded", name="train")
    unknown = replace(known, scene=replace(known.scene, aabb=None))
    assert estimate_work(unknown) == estimate_work(known)


@pytest.mark.parametrize(
    ("steps", "available", "link", "expected"),
    [
        (1000, 1, Link(1e9, 0.0), 1),
        (1000, 2, Link(1e9, 0.0), 2),
        (1000, 3, Link(1e9, 0.0), 2),
        (1000, 8, Link(1e9, 0.0), 8),
        # Of the 1.4 seconds of a step on 32 devices, one is not divided: 64 devices take 1.2.
        (1000, 64, Link(1e9, 0.0), 32),
        # The start of processes takes longer than all steps.
        (1, 8, Link(1e9, 0.0), 1),
        # Receiving half of the copies alone takes ten seconds.
        (1000, 8, Link(100.0, 0.0), 1),
        (1000, 8, Link(1e9, 2.0), 1),
    ],
)
def test_devices_are_doubled_while_this_saves_a_fifth_of_the_time(steps, available, link, expected):
    assert worthwhile_devices(WORK, steps, available, link)[0] == expected


def test_the_reason_states_the_estimates_that_were_compared():
    assert worthwhile_devices(WORK, 1000, 2, Link(20e9, 1.0)) == (
        1,
        "training is estimated to take 13000 s on 1, 13008 s on 2, 20 GB/s apart",
    )


def test_the_link_is_measured_only_where_a_fast_one_would_pay(caplog):
    caplog.set_level(logging.INFO)
    measured = []

    def measure(devices: int) -> Link:
        measured.append(devices)
        return Link(10e9)

    short, long = preset("trainer=fast", name="train"), preset("trainer=unbounded", name="train")
    assert devices_that_pay(short, 4, measure) == 1
    assert measured == []
    assert "devices=auto: 1 of 4, because training is estimated to take 2 s on 1, 10 s on 2, 300 GB/s" in caplog.text
    assert devices_that_pay(long, 4, measure) == 1
    assert measured == [4]
    assert "s on 2, 10 GB/s apart" in caplog.text
    assert devices_that_pay(long, 4, lambda _: NVLINK) == 4


@pytest.mark.cuda
def test_the_link_between_two_devices_is_measured():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    # More than a network's, less than memory's of any device.
    assert 1e9 < scaling.measured_link(2).bandwidth < 1e13
