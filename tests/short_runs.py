"""Short trainings in processes of their own, which may be killed: what tests of faults share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TINY = (
    "scene=lego",
    f"data.root={ROOT / 'tests' / 'fixtures'}",
    "model=mlp",
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

# Forks a process for each line on standard input, a command line in JSON; the forks need not import anything again.
_NURSERY = """
import json, os, signal, sys
import torch, hydra, PIL.Image, safetensors.torch, imageio_ffmpeg, torch.utils.tensorboard
from voxelfield.cli.train import main
from voxelfield.training import configured, video

print("ready", os.getpid(), flush=True)
for line in sys.stdin:
    given = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        output = os.open(given["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 70
        try:
            status = main(given["arguments"])
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print("started", child, flush=True)
    _, ended = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(ended), flush=True)
"""


def environment(gpu: bool = False) -> dict[str, str]:
    """The environment of a run: one thread, no GPU unless wished, this tree."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **hidden}


def start(*overrides: str, program: tuple[str, ...] = ("train.py",), **options: object) -> subprocess.Popen[str]:
    """Starts ``train.py`` with :data:`TINY` and overrides."""
    return subprocess.Popen(
        [sys.executable, *program, *TINY, *overrides],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests may run under nohup, whose children ignore a hangup.
        **{"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)} | options,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Returns exit status, standard output and standard error; there must be no traceback."""
    with process:
        output, complaints = process.communicate(timeout=300)
    assert "Traceback" not in output + complaints, output + complaints
    return process.returncode, output, complaints


class Nursery:
    """Runs ``voxelfield train`` many times in forks of one process that has imported everything already.

    Args:
        output: File that receives what a run prints.
        gpu: Whether runs may use a GPU.
    """

    def __init__(self, output: Path, gpu: bool = False) -> None:
        self.output = output
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            cwd=ROOT,
            env=environment(gpu),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer("ready")

    def start(self, *overrides: str) -> int:
        """Starts a run of :data:`TINY` with overrides; returns its process."""
        assert self._process.stdin is not None
        given = {"arguments": [*TINY, *overrides], "output": str(self.output)}
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        return self._answer("started")

    def finish(self) -> tuple[int, str]:
        """Returns the exit status of the run, negative if a signal ended it, and all that it printed."""
        status = self._answer("ended")
        text = self.output.read_text(errors="replace")
        assert "Traceback" not in text, text
        return status, text

    def close(self) -> None:
        """Ends the process that forks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self, word: str) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith(word), f"expected {word}, got {line!r}"
        return int(line.split()[1])
