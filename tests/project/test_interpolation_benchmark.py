"""benchmarks/interpolation.py: what it compares and prints, with small grids; values that differ end the run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = {1: (64,), 2: (16, 16), 3: (9, 10, 11)}


@pytest.fixture
def benchmark(monkeypatch):
    """The benchmark with small inputs, short measurements and no measurement of the bandwidth."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("interpolation")
    harness = importlib.import_module("_harness")
    monkeypatch.setitem(module.LEAST_COUNT, "cpu", 500)
    monkeypatch.setattr(harness, "copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(harness, "effort", lambda device, quick: harness.Effort(seconds=0.0, min_repeats=1))
    for name in ("sample_case", "splat_case"):
        case = getattr(module, name)
        small = lambda resolution, *rest, case=case, **options: case(SMALL[len(resolution)], *rest, **options)  # noqa: E731
        monkeypatch.setattr(module, name, small)
    image_case = module.image_case
    monkeypatch.setattr(module, "image_case", lambda batch, channels, side, *rest: image_case(2, channels, 16, *rest))
    return module


@pytest.mark.slow
def test_it_compares_and_times_every_row(benchmark, tmp_path, capsys):
    path = tmp_path / "figures.json"
    benchmark.main(["--device", "cpu", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert {row["op"] for row in rows} == set(benchmark.RATIOS)
    for row in rows:
        assert row["difference_from_float64"] < 1e-4
        assert row["difference_from_ours"].keys() == row["ms"].keys()
    alone = [row for row in rows if len(row["ms"]) == 1]
    assert all(row["ratio"] is None for row in alone)
    printed = capsys.readouterr().out
    for module, package in benchmark.PACKAGES.items():
        assert (f"not installed: {package}" in printed) == (not benchmark.installed(module))


def test_packages_that_are_missing_are_named_and_left_out(benchmark, monkeypatch, tmp_path, capsys):
    for module in (benchmark, importlib.import_module("_compare")):
        monkeypatch.setattr(module, "installed", lambda module: False)
    path = tmp_path / "figures.json"
    benchmark.main(["--device", "cpu", "--only", "sample 9^3 x 1 linear warp", "--json", str(path)])
    forward, backward = json.loads(path.read_text())["rows"]
    assert list(forward["ms"]) == list(backward["ms"]) == ["voxelfield", "grid_sample"]
    printed = capsys.readouterr().out
    for package in benchmark.PACKAGES.values():
        assert printed.count(f"not compared, because it is not installed: {package}") == 2


def test_scipy_has_no_backward_pass(benchmark, tmp_path, capsys):
    pytest.importorskip("scipy")
    path = tmp_path / "figures.json"
    benchmark.main(["--device", "cpu", "--only", "sample 9^3 x 1 linear warp", "--json", str(path)])
    forward, backward = json.loads(path.read_text())["rows"]
    assert "scipy" in forward["ms"]
    assert "scipy" not in backward["ms"]
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("9^3 x 1 linear warp backward"))
    assert line.split()[7] == "-"  # after the six words of the row's name and our time


def test_another_result_ends_the_run(benchmark, monkeypatch):
    right = benchmark.prepare_grid_sample

    def wrong(inputs):
        return right(inputs._replace(sources=(1.001 * inputs.sources[0],)))

    monkeypatch.setattr(benchmark, "prepare_grid_sample", wrong)
    with pytest.raises(SystemExit, match=r"forward of grid_sample against ours is off by"):
        benchmark.main(["--device", "cpu", "--only", "sample 9^3 x 1 linear warp"])


def test_a_stencil_is_the_weights_of_a_partition_of_unity(benchmark):
    points = torch.rand(50, 3, dtype=torch.float64) * 0.4 + 0.3
    for cubic, vertices in ((False, 8), (True, 64)):
        index, weight = benchmark.stencil(points, (9, 10, 11), cubic)
        assert index.shape == weight.shape == (50, vertices)
        torch.testing.assert_close(weight.sum(1), torch.ones(50, dtype=torch.float64))
        x = index // 110 / 8  # of each vertex; both kernels reproduce linear functions
        torch.testing.assert_close((weight * x).sum(1), points[:, 0])
