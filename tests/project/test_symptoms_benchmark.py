"""benchmarks/symptoms.py, which trains on photographs with a trouble, without and with its remedy."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from short_runs import TINY

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def symptoms(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("symptoms")


@pytest.mark.sweep
def test_every_trouble_is_trained_without_and_with_its_remedy(symptoms, tmp_path, capsys):
    out = tmp_path / "figures" / "symptoms.json"
    symptoms.main([*TINY, "trainer.steps=3", "--device", "cpu", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    trainings = {}
    for row in rows:
        trainings.setdefault(row["trouble"], []).append((row["photographs"], row["setting"]))
        assert row["mean"] == row["psnr"][0] > 3
    assert list(trainings) == list(symptoms.MAKERS)
    assert trainings["people"] == [
        (photographs, setting)
        for photographs in ("passers-by", "clean")
        for setting in ("none", "trainer.loss.robust=4")
    ]
    counts = {name: len(found) for name, found in trainings.items()}
    remedied = dict.fromkeys(("people", "exposure", "corners", "responses", "blur"), 4)
    assert counts == {**remedied, "shutter": 3, "spheres": 2}
    printed = capsys.readouterr().out
    assert printed.count("trainer.vignetting=true") == 4  # as it is trained, and in the table


@pytest.mark.slow
def test_troubles_are_chosen_and_seeds_are_trained_each(symptoms, capsys):
    symptoms.main([*TINY, "trainer.steps=3", "--only", "blur", "--seeds", "2", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines[lines.index("") + 3 :]]
    assert [row[:2] for row in table] == [
        ["blurred", "none"],
        ["blurred", "trainer.loss.sharpness=1"],
        ["clean", "none"],
        ["clean", "trainer.loss.sharpness=1"],
    ]
    for *_, first, second, mean in table:
        assert float(mean) == pytest.approx((float(first) + float(second)) / 2, abs=0.011)
    with pytest.raises(SystemExit):
        symptoms.main(["--only", "fog"])
    assert "invalid choice: 'fog'" in capsys.readouterr().err
