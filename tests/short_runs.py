"""Short trainings in processes of their own, which may be killed: what tests of faults share."""

from __future__ import annotations

import time
from pathlib import Path

from warm_python import Running, WarmPython, warm_python

ROOT = Path(__file__).resolve().parents[1]

TINY = (
    "scene=lego",
    f"data.root={ROOT / 'tests' / 'fixtures'}",
    "model=dense",
    "trainer=smoke",
    "trainer.steps=20",
    "trainer.image_size=25",
    "trainer.visible_samples=4096",
    "trainer.stages=[{step: 0, resolution: 12}]",
    "trainer.occupancy.resolution=12",
    "trainer.log_every=5",
    "trainer.preview_every=0",
    "trainer.checkpoint_every=10",
    "trainer.evaluation.views=1",
    "trainer.evaluation.video_frames=0",
    "trainer.evaluation.report=false",
)
"""Overrides of a run of a second or two on a CPU."""


def start(
    *overrides: str, program: tuple[str, ...] = ("train.py",), merged: bool = False, python: WarmPython = warm_python
) -> Running:
    """Starts ``train.py`` with :data:`TINY` and overrides.

    Args:
        overrides: Overrides of the command line.
        program: What runs instead of ``train.py``.
        merged: Whether the standard error stream goes to the standard output too.
        python: What starts it.
    """
    return python.start(*program, *TINY, *overrides, merged=merged)


def finish(running: Running) -> tuple[int, str, str]:
    """Returns exit status, standard output and standard error stream; there must be no traceback."""
    done = running.wait()
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def wait_for_checkpoint(running: Running, directory: Path, within: float = 300) -> None:
    """Waits until there is a checkpoint in a run directory; the run must not end before."""
    deadline = time.monotonic() + within
    while not list(directory.glob("checkpoint_*.pt")):
        assert running.poll() is None, finish(running)
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)


def run(*overrides: str) -> tuple[int, str]:
    """Runs ``train.py`` with :data:`TINY` and overrides to its end; returns exit status and all that it printed."""
    status, text, _ = finish(start(*overrides, merged=True))
    return status, text
