"""benchmarks/callbacks.py: its three variants render the same samples; its output."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def callbacks_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("callbacks")


@pytest.mark.slow
@pytest.mark.parametrize("room", ["waited for", "fixed"])
def test_it_compares_and_times_the_ways(callbacks_benchmark, room, tmp_path, capsys):
    path = tmp_path / "figures.json"
    callbacks_benchmark.main(["--device", "cpu", "--quick", "--only", f"dense, {room}", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert 0 < row["visible"] < row["candidates"]
    for way in ("field", "class", "functions"):
        assert row[way]["samples"] == row["visible"]
        assert row[way]["ms"]["median"] > 0
    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0].split()[-2:] == ["class", "functions"]
    assert table[2].startswith(f"dense, {room}")


@pytest.mark.slow
def test_another_picture_ends_the_run(callbacks_benchmark, monkeypatch):
    def darker(self, samples, directions):
        density, rgb = self._field.sample(samples, directions)
        return density, 0.9 * rgb

    monkeypatch.setattr(callbacks_benchmark.Members, "sample", darker)
    with pytest.raises(SystemExit, match=r"^dense, waited for, class: rgb is off by"):
        callbacks_benchmark.main(["--device", "cpu", "--quick", "--only", "dense, waited for"])
