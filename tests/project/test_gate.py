"""The gate tells slower ops from faster alternatives; no test measures a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield pytest.importorskip("gate")
    for name in ("gate", "_harness"):
        sys.modules.pop(name, None)


def row(op="grid", ratio=4.0, share=0.5):
    return {"op": op, "size": "128^3 x 4", "points": "random", "pass": "forward"} | {
        "ratio": ratio,
        "fraction_of_floor": share,
    }


NAME = "grid 128^3 x 4 random forward"


@pytest.mark.parametrize(
    ("ratio", "share", "expected"),
    [
        (4.0, 0.5, None),
        (3.6, 0.45, None),  # within the tolerance below the range
        (2.0, 0.25, "slower"),
        (2.0, 0.5, "the alternative is faster"),
        (8.0, 1.0, "faster"),
        (8.0, 0.5, "the alternative is slower"),
        (4.0, 0.25, None),  # the whole machine is slower, and the alternative with it
    ],
)
def test_a_verdict_names_who_has_moved(gate, ratio, share, expected):
    before = gate.figures([[row(ratio=3.8)], [row(ratio=4.2)]])[NAME]
    assert before.ratio == gate.Range(3.8, 4.0, 4.2)
    now = gate.figures([[row(ratio=ratio, share=share)]])[NAME]
    assert gate.verdict(now, before, 0.15) == expected


def test_a_machine_without_a_baseline_is_told_how_to_make_one(gate, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gate, "BASELINES", tmp_path)
    monkeypatch.setattr(gate, "measure", lambda *_: ({"gpu": None, "threads": 1}, [[row()]]))
    assert gate.main([]) == 2
    assert "write one with --store" in capsys.readouterr().err
    assert gate.main(["--store"]) == 0
    keys = {"torch": "1", "cuda": None, "driver": None, "cpu": "c"}
    monkeypatch.setattr(gate, "measure", lambda *_: ({"gpu": None, "threads": 1} | keys, [[row()]]))
    assert gate.main(["--store"]) == 0
    assert gate.main([]) == 0
    monkeypatch.setattr(gate, "measure", lambda *_: ({"gpu": None, "threads": 1} | keys, [[row(ratio=1, share=0.1)]]))
    assert gate.main([]) == 1
