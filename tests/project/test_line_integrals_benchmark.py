"""benchmarks/line_integrals.py: what it compares and prints, with a small volume; values that differ end the run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark with short measurements and no measurement of the bandwidth."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("line_integrals")
    harness = importlib.import_module("_harness")
    monkeypatch.setattr(harness, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(harness, "effort", lambda device, quick: harness.Effort(seconds=0.0, min_repeats=1))
    radiograph_case = module.radiograph_case
    monkeypatch.setattr(module, "radiograph_case", lambda size, side, *rest: radiograph_case(32, 48, *rest))
    return module


@pytest.mark.slow
def test_it_compares_values_and_gradients_with_sums_at_samples(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "installed", lambda module: False)
    path = tmp_path / "figures.json"
    benchmark.main(["--device", "cpu", "--json", str(path)])
    forward, backward = json.loads(path.read_text())["rows"]
    for row in (forward, backward):
        assert list(row["ms"]) == ["voxelfield", "grid_sample"]
        assert row["difference_from_float64"] < 1e-4
        assert 0 < row["difference_from_ours"]["grid_sample"] < benchmark.TOLERANCE
    printed = capsys.readouterr().out
    assert "radiographs, ms" in printed
    for package in benchmark.PACKAGES.values():
        assert printed.count(f"not compared, because it is not installed: {package}") == 1


def test_the_sectors_of_rays_are_counted(benchmark):
    """One warp of rays per image row: at least the volume's vertices that they touch, at most eight for each cell."""
    device = torch.device("cpu")
    pixels, inputs = benchmark.pixels_of(32, device), benchmark.radiograph_inputs(16, 32, 1, device)
    touched = benchmark.touched_bytes(pixels, inputs)
    granule = importlib.import_module("_harness").granule(device)
    assert inputs.sources[0].nbytes < touched < 8 * 3 * 16 * len(pixels) * granule
