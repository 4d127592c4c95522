"""benchmarks/scaling.py: the order of its trainings, and a timeline of two processes."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from short_runs import TINY
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("scaling")


@pytest.fixture
def timeline(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("_timeline")


def rows_of(text: str) -> dict[str, list[float]]:
    """Returns the numbers of a table by the first cell of their row."""
    rows = (line.split() for line in text.splitlines() if re.match(r"\d+ ", line))
    return {first: [float(cell.rstrip("x")) for cell in others] for first, *others in rows}


# ------------------------------------------------------------------------------------------------- measurements


def test_one_and_several_devices_take_turns_and_are_compared(scaling, monkeypatch, capsys):
    commands = []

    def trained(overrides):
        values = dict(text.partition("=")[::2] for text in overrides)
        commands.append(values)
        devices, seed, samples = (int(values[key]) for key in ("devices", "seed", "trainer.visible_samples"))
        # The second round is an outlier, which medians leave out.
        return {
            "rays_per_second": samples * devices * (10 if seed == 1 else 1),
            "seconds": 10 / devices,
            "psnr": 30.0 + (samples > 4096),
            "gib": 2.0,
        }

    monkeypatch.setattr(scaling, "trained", trained)
    rows = scaling.measure(TINY, "cpu", 2, 3)
    assert [(row["devices"], row["batch"], row["seed"]) for row in rows] == [
        case for seed in range(3) for case in ((1, "in all", seed), (2, "in all", seed), (2, "for each", seed))
    ]
    sizes = {(int(values["devices"]), int(values["trainer.visible_samples"])) for values in commands}
    assert sizes == {(1, 4096), (2, 4096), (2, 8192)}
    assert commands[2]["trainer.max_rays"] == str(2 * 4096)
    assert commands[2]["trainer.candidate_samples"] == str(2 * 131072)
    assert [" ".join(line.split()) for line in scaling.as_table(rows).splitlines()[2:]] == [
        "1 in all 4096 1.00x 10.0 1.00 30.00 +0.00 2.00 1.00",
        "2 in all 8192 2.00x 5.0 0.50 30.00 +0.00 2.00 1.00",
        "2 for each 16384 4.00x 5.0 0.50 31.00 +1.00 2.00 1.00",
    ]


@pytest.mark.slow
def test_the_figures_of_a_training_are_those_of_its_run(scaling):
    figures = scaling.trained([*TINY, "device=cpu", *scaling.WITHOUT_FILES])
    assert set(figures) == {"rays_per_second", "seconds", "psnr", "gib"}
    # Of 20 steps, each has at least one ray and as many as samples at most.
    assert 20 < figures["rays_per_second"] * figures["seconds"] < 10 * 20 * 4096
    assert 5 < figures["psnr"] < 40
    assert 0.1 < figures["gib"] < 10


@pytest.mark.slow
def test_a_training_that_fails_ends_the_measurement_with_its_message(scaling):
    with pytest.raises(
        RuntimeError, match=r"train trainer\.steps=0 .*ended with status 2: .*trainer\.steps must be at least 1"
    ):
        scaling.trained(["trainer.steps=0"])


# ------------------------------------------------------------------------------------------------- timelines


def kernel(name, begin, duration, stream=7):
    return {"name": name, "cat": "kernel", "ts": 1000.0 * begin, "dur": 1000.0 * duration, "args": {"stream": stream}}


def test_time_is_divided_into_computing_exchanging_both_and_neither(timeline):
    work = timeline.work_of(
        [
            kernel("ncclDevKernel_AllGather_RING_LL", 104, 4, stream=8),
            kernel("march", 100, 2),
            kernel("adam", 101, 4),
            kernel("march", 110, 2),
            {"name": "a step of the host", "cat": "cpu_op", "ts": 0.0, "dur": 1e6},
        ],
        "cuda",
    )
    assert [piece.name for piece in work] == ["march", "adam", "ncclDevKernel_AllGather_RING_LL", "march"]
    assert [piece.exchanges for piece in work] == [False, False, True, False]
    # Of 12 ms from the first to the last: 0 to 5 and 10 to 12, and 4 to 8.
    assert timeline.summary(work, 2) == {"step": 6, "computing": 3.5, "exchanging": 2, "both": 0.5, "idle": 1}


def test_exchanges_on_a_cpu_are_recognised(timeline):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        numbers = torch.ones(1000)
        work = timeline.record(lambda: distributed.all_reduce(numbers @ numbers), torch.device("cpu"))
    finally:
        distributed.destroy_process_group()
    assert [piece.name for piece in work if piece.exchanges] == ["gloo:all_reduce"]
    assert any(piece.name == "aten::dot" for piece in work)


@pytest.mark.sweep
def test_two_processes_are_drawn_next_to_each_other(tmp_path):
    out = tmp_path / "figures" / "timeline.svg"
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "benchmarks/scaling.py"]
    occupancy = ("trainer.occupancy.start=2", "trainer.occupancy.every=2")
    done = subprocess.run(
        [*program, "--timeline", *TINY, *occupancy, "--device", "cpu", "--steps", "2", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^link: [0-9.]+ GB/s, [0-9]+ microseconds", done.stdout, re.MULTILINE)
    rows = rows_of(done.stdout)
    assert list(rows) == ["0", "1"]
    for step, computing, exchanging, both, idle in rows.values():
        assert min(computing, exchanging) > 0
        assert step == pytest.approx(computing + exchanging - both + idle, abs=0.03)
    together = re.search(r"^together: ([0-9]+) rays a step, [0-9.]+ million a second$", done.stdout, re.MULTILINE)
    assert together is not None
    assert int(together[1]) > 0
    drawn = out.read_text()
    assert "process 0, stream" in drawn
    assert "process 1, stream" in drawn
