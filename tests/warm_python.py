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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Those that import the others, and what only parts of a run would import.
PRELOADED = (
    "voxelfield.cli.command",
    "voxelfield.cli.train",
    "torch.utils.tensorboard",
    "PIL.Image",
    "safetensors.torch",
    "av",
)
# What the server decides for all of its processes, because torch reads it once.
DECIDED = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Running:
    """A process that has been started.

    Attributes:
        pid: Its number.
        arguments: Its command line, without ``python``.
        out: File that receives its standard output.
        err: File that receives its standard error stream; None: so does ``out``.
        server: What has forked it.
    """

    pid: int
    arguments: tuple[str, ...]
    out: Path
    err: Path | None
    server: WarmPython

    def poll(self) -> int | None:
        """Returns the exit status as :mod:`subprocess` counts it, or None as long as there is none."""
        return self.server.ask({"poll": self.pid})

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing if the process has ended already."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Waits for the end.

        Args:
            timeout: Seconds after which it is killed.

        Raises:
            subprocess.CalledProcessError: It lacked a package, because of which the test is skipped.
        """
        from missing_packages import check_packages  # imports pytest, which programs of the server do not

        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
            time.sleep(0.005)
        stdout, stderr = (
            path.read_text(errors="replace") if path is not None and path.exists() else ""
            for path in (self.out, self.err)
        )
        return check_packages(subprocess.CompletedProcess(self.arguments, status, stdout, stderr))


class WarmPython:
    """Starts processes with one thread.

    The server that they are forked from is started at the first call, and ends with this process.

    Args:
        gpu: Whether they see the GPUs.
    """

    def __init__(self, gpu: bool = False) -> None:
        self._gpu = gpu
        self._server: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0

    def start(
        self, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None, merged: bool = False
    ) -> Running:
        """Starts a program.

        Args:
            arguments: What follows ``python`` on a command line: ``-m MODULE ...``, ``-c PROGRAM ...`` or ``FILE ...``.
            cwd: Folder to run it in.
            env: Its environment; None: that of this process.
            merged: Whether the standard error stream goes to the standard output too.
        """
        self._count += 1
        out, err = (Path(self._folder.name, f"{self._count}.{stream}") for stream in ("out", "err"))
        request = {
            "arguments": arguments,
            "cwd": str(cwd),
            "env": dict(os.environ if env is None else env),
            "out": str(out),
            "err": None if merged else str(err),
        }
        return Running(self.ask(request), arguments, out, None if merged else err, self)

    def run(self, *arguments: str, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end.

        Args:
            arguments: As for :meth:`start`.
            timeout: Seconds after which it is killed.
            options: As for :meth:`start`.

        Returns:
            As :func:`subprocess.run` does, with the output captured.
        """
        return self.start(*arguments, **options).wait(timeout)

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Returns the server's answer."""
        if self._server is None:
            self._server = self._serve()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def _serve(self) -> subprocess.Popen[str]:
        # Beside the repository there may be a folder of packages.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        hidden = {} if self._gpu else {"CUDA_VISIBLE_DEVICES": ""}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **hidden}
        # Its input closes with this process.
        return subprocess.Popen(
            [sys.executable, __file__], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )


warm_python = WarmPython()
"""The one of this test process, without GPUs."""


def _main() -> None:
    """Answers requests on the standard input: forks and says the process, or says its exit status."""
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    statuses: dict[int, int] = {}  # the system tells each only once
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            number = request["poll"]
            if number not in statuses and (ended := os.waitpid(number, os.WNOHANG))[0]:
                statuses[number] = os.waitstatus_to_exitcode(ended[1])
            print(json.dumps(statuses.get(number)), flush=True)
            continue
        child = os.fork()
        if child == 0:
            _run(request)
        statuses.pop(child, None)  # of an earlier process with this number
        print(child, flush=True)


def _run(request: dict[str, Any]) -> None:
    """Turns this process into the requested one."""
    # Tests may run under nohup, whose children ignore a hangup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    decided = {name: os.environ[name] for name in DECIDED if name in os.environ}
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"] | decided)
    writing = os.O_WRONLY | os.O_CREAT
    streams = (os.open(os.devnull, os.O_RDONLY), os.open(request["out"], writing))
    for stream, number in zip(streams, (0, 1), strict=True):
        os.dup2(stream, number)
    os.dup2(1 if request["err"] is None else os.open(request["err"], writing), 2)
    program, *arguments = request["arguments"]
    if program in ("-m", "-c"):
        name, *arguments = arguments
        sys.argv = [program, *arguments]
        sys.path[0] = request["cwd"]
    else:
        sys.argv = [program, *arguments]
        sys.path[0] = str(Path(program).resolve().parent)
    # Other packages than the server has; what is imported already stays what it is.
    asked_for = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [folder for folder in asked_for if folder not in sys.path]
    if program == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif program == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(program, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    _main()
