"""Runs programs in processes forked from one that has imported torch and voxelfield, which takes most of a short run.

Each is a process of its own, with its own environment, exit status and output. What depends on a fresh interpreter,
such as which modules are imported, must be tested with :mod:`subprocess` instead.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Those that import the others.
PRELOADED = ("voxelfield.cli.command", "voxelfield.cli.train", "torch.utils.tensorboard")


class WarmPython:
    """Processes with one thread and without a GPU, because torch takes these settings when it is imported.

    The server that they are forked from is started at the first call, and ends with this process.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        *arguments: str,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        merged: bool = False,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end.

        Args:
            arguments: What follows ``python`` on a command line: ``-m MODULE ...`` or ``FILE ...``.
            cwd: Folder to run it in.
            env: Its environment; None: that of this process.
            merged: Whether the standard error stream goes to ``stdout`` too.
            timeout: Seconds after which it is killed.

        Returns:
            As :func:`subprocess.run` does, with the output captured.
        """
        if self._server is None:
            self._server = self._start()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {
                "arguments": arguments,
                "cwd": str(cwd),
                "env": dict(os.environ if env is None else env),
                "out": str(out),
                "err": None if merged else str(err),
                "timeout": timeout,
            }
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            status = int(self._server.stdout.readline())
            stdout, stderr = (path.read_text() if path.exists() else "" for path in (out, err))
        return subprocess.CompletedProcess(arguments, status, stdout, stderr)

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # Its input closes with this process.
        return subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )


warm_python = WarmPython()
"""The one of this test process."""


def _serve() -> None:
    """Forks for each request on the standard input, and answers with the exit status."""
    for name in PRELOADED:
        importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(request)
        print(_wait(child, request["timeout"]), flush=True)


def _wait(child: int, timeout: float) -> int:
    """Returns the exit status of a process, as :mod:`subprocess` counts it."""
    deadline = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def _run(request: dict[str, Any]) -> None:
    """Turns this process into the one that is asked for."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    writing = os.O_WRONLY | os.O_CREAT
    streams = (os.open(os.devnull, os.O_RDONLY), os.open(request["out"], writing))
    for stream, number in zip(streams, (0, 1), strict=True):
        os.dup2(stream, number)
    os.dup2(1 if request["err"] is None else os.open(request["err"], writing), 2)
    module = request["arguments"][0] == "-m"
    program, *arguments = request["arguments"][1 if module else 0 :]
    sys.argv = [program, *arguments]
    sys.path[0] = request["cwd"] if module else str(Path(program).resolve().parent)
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    _serve()
