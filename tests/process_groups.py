"""Runs of several processes on CPUs, in fresh interpreters, because their command line is repeated in each process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from missing_packages import check_packages
from short_runs import ROOT, TINY

TRAIN = (sys.executable, "train.py")


class Group:
    """A run that has been started. As a context manager, it kills whatever is left of it at the end of the block.

    Args:
        directory: The run directory.
        overrides: Overrides of the command line.
        command: What the run directory and the overrides are appended to.
        environment: Variables to set.
    """

    def __init__(
        self, directory: Path, *overrides: str, command: Sequence[str] = (*TRAIN, *TINY), **environment: str
    ) -> None:
        # Beside the repository there may be a folder of packages.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.launcher = subprocess.Popen(
            [*command, f"hydra.run.dir={directory}", "device=cpu", *overrides],
            cwd=ROOT,
            env={**os.environ, **alone, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.workers():
            os.kill(pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.communicate()

    def finish(self, within: float = 300) -> tuple[int, str, str]:
        """Returns exit status, standard output and standard error stream."""
        out, err = self.launcher.communicate(timeout=within)
        check_packages(subprocess.CompletedProcess(self.launcher.args, self.launcher.returncode, out, err))
        return self.launcher.returncode, out, err

    def workers(self) -> list[int]:
        """Returns the numbers of the processes that the launcher has started, in this order."""
        found = subprocess.run(["pgrep", "-P", str(self.launcher.pid)], capture_output=True, text=True, check=False)
        return sorted(map(int, found.stdout.split()))

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Waits for a condition while the run goes on."""
        deadline = time.monotonic() + 300
        while not condition():
            assert self.launcher.poll() is None, self.finish()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_checkpoint(self, directory: Path) -> None:
        """Waits for the first checkpoint in the run directory."""
        self.wait_until(lambda: list(directory.glob("checkpoint_*.pt")))
