"""A session on two and three processes computes what one process computes, but for rounding; on CPUs, by gloo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_session import CAPTURES, ON_GPUS, OTHERWISE, PAUSED, PLACES, REFUSED, STOPS, kinds_of, make_captures

PROGRAM = Path(__file__).resolve().parents[1] / "divided_session.py"
SEVERAL = (2, 3)
# Rounding errors of directions are 256 times as large in columns of a panorama. With exposures, those of rendered
# colours are in the colours towards which samples move. Opaque samples have large gradients of density.
_TOLERANCES = {"halves": 5e-2, "environment": 1e-4, "pyramid": 1e-4, "orthogonal": 1e-3, "hidden": 1e-4}


def run_processes(folder: Path, numbers: Sequence[int], device: str) -> dict[int, dict[str, Any]]:
    """Returns what each of some numbers of processes computed, by their number."""
    for processes in numbers:
        arguments = [str(processes), str(folder / f"store_{processes}"), str(folder), device]
        command = [sys.executable, str(PROGRAM)]
        running = [subprocess.Popen([*command, str(rank), *arguments]) for rank in range(processes)]
        assert [process.wait(timeout=300) for process in running] == [0] * processes
    return {processes: torch.load(folder / f"{processes}.pt") for processes in numbers}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict[str, Any]]:
    """What one, two and three processes computed on the CPU."""
    folder = tmp_path_factory.mktemp("divided")
    make_captures(folder)
    return run_processes(folder, (1, *SEVERAL), "cpu")


def check_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, weights in wanted.items():
        error = float((found[name] - weights).norm() / weights.norm().clamp(min=1e-12))
        assert error <= tolerance, f"{name} differs by {error:.1e} of its norm"


@pytest.mark.slow
@pytest.mark.parametrize("processes", SEVERAL)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("capture", CAPTURES)
def test_processes_draw_what_one_draws_from_shares_of_the_images(results, capture, place, processes):
    found, wanted = results[processes][capture, place], results[1][capture, "local"]
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert values.unique().numel() > 1, f"{name} would be right by chance"
        if "directions" in name or name in ("origins", "far"):
            torch.testing.assert_close(found[name], values, atol=1e-6, rtol=1e-6, msg=name)
        else:
            assert torch.equal(found[name], values), name


@pytest.mark.slow
@pytest.mark.parametrize("processes", SEVERAL)
def test_all_processes_refuse_what_one_of_them_reads(results, processes):
    assert "images/6.png: " in results[1][REFUSED][0]
    assert results[processes][REFUSED] == processes * results[1][REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes"),
    [(kind, processes) for processes in SEVERAL for kind in kinds_of(processes) if kind not in OTHERWISE],
)
def test_processes_train_what_one_trains(results, kind, processes):
    weights, occupied, records = results[processes][kind]
    wanted, occupied_by_one, records_of_one = results[1][kind]
    check_same(weights, wanted, tolerance=_TOLERANCES.get(kind, 1e-5))
    if kind == "halves":
        return
    assert torch.equal(occupied, occupied_by_one)
    assert records.keys() == records_of_one.keys()
    for step, values in records_of_one.items():
        for tag, value in values.items():
            if tag not in ("train/seconds", "train/rays_per_second"):
                assert records[step][tag] == pytest.approx(value, rel=1e-4, abs=1e-7), f"{tag} at step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("processes", SEVERAL)
@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_how_processes_exchange_changes_nothing(results, processes, otherwise):
    # A direct exchange adds the gradients of the own samples before those of the others, and copies round to 16 bits.
    tolerance = 1e-3 if otherwise == "direct" else 0.0
    check_same(results[processes][otherwise][0], results[processes]["halves"][0], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("processes", SEVERAL)
@pytest.mark.parametrize("stop", STOPS)
def test_a_resumed_run_continues_bit_by_bit_on_as_many_processes(results, processes, stop):
    weights, occupied, _ = results[processes][f"resumed from {processes} at {stop}"]
    wanted, occupied_before, _ = results[processes][PAUSED]
    assert torch.equal(occupied, occupied_before)
    for name, tensor in wanted.items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("processes", SEVERAL)
@pytest.mark.parametrize("stop", STOPS)
def test_a_run_of_one_process_resumes_on_several(results, processes, stop):
    check_same(results[processes][f"resumed from 1 at {stop}"][0], results[1][PAUSED][0])


@pytest.mark.cuda
def test_two_gpus_train_what_one_trains(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    one, two = run_processes(tmp_path, (1, 2), "cuda").values()
    for kind in ON_GPUS:
        (weights, occupied, records), (wanted, occupied_by_one, records_of_one) = two[kind], one[kind]
        assert (occupied != occupied_by_one).float().mean() < 1e-2
        assert "loss/photometric" in records_of_one[24]
        for step, values in records_of_one.items():
            for tag in values.keys() & {"train/rays_per_step", "train/samples_per_ray", "loss/photometric"}:
                # Atomic additions and 16-bit copies round differently in each run.
                assert records[step][tag] == pytest.approx(values[tag], rel=1e-2), f"{kind}: {tag} at step {step}"
        for name, value in wanted.items():
            assert float((weights[name] - value).norm() / value.norm().clamp(min=1e-12)) < 0.3, f"{kind}: {name}"
