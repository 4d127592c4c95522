"""Another process that holds a run directory."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from warm_python import Running, warm_python

_HOLD = """
import sys
from pathlib import Path
from voxelfield.run_directory import RunDirectoryLock

lock = RunDirectoryLock(Path(sys.argv[1]))
"""

# Numbers of processes whose end has been seen, which cannot be waited for again.
_ended: set[int] = set()


@contextlib.contextmanager
def holder(directory: Path) -> Iterator[Running]:
    """Starts a process that holds a directory, and yields it once it does; it is killed in the end."""
    running = warm_python.start("-c", f"{_HOLD}\nimport time\ntime.sleep(600)", str(directory))
    try:
        while not ((directory / ".lock").is_file() and f" {running.pid} " in (directory / ".lock").read_text()):
            assert running.poll() is None, running.wait().stderr
            time.sleep(0.01)
        yield running
    finally:
        end(running)


def end(running: Running) -> None:
    """Kills a process and waits for its end; does nothing the second time."""
    if running.pid not in _ended:
        running.send_signal(signal.SIGKILL)
        running.wait()
        _ended.add(running.pid)


def is_free(directory: Path) -> bool:
    """Returns whether another process can lock a directory."""
    probe = warm_python.run("-c", _HOLD, str(directory))
    assert probe.returncode == 0 or "DirectoryInUseError: hydra.run.dir must be a folder that no other" in probe.stderr
    return probe.returncode == 0
