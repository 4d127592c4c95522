"""Ctrl-C on the command line, at the moments at which Python turns it into a traceback or does not see it at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Runs a program in which Ctrl-C arrives when torch is imported.
WHILE_IMPORTING = """
import os, runpy, signal, sys

class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Importing())
sys.argv = {argv}
runpy.{run}
"""

# Ctrl-C arrives in a call of a second thread's making, while the main thread is in compiled code for hours.
IN_COMPILED_CODE = """
import hashlib, os, signal, threading
from voxelfield.cli import stopping

stopping._PATIENCE = 0.2
with stopping.when_possible():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 2**31 - 1)
"""

# It arrives while the main thread runs Python, whose cleaning up takes longer than compiled code is waited for.
IN_PYTHON = """
import os, signal, sys, time
from voxelfield.cli import stopping

stopping._PATIENCE = 0.1
try:
    with stopping.when_possible():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            time.sleep(0.4)
            print("cleaned up")
except KeyboardInterrupt:
    sys.exit(7)
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def run(program: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        (["train.py", "scene=bricks"], "run_path('train.py', run_name='__main__')"),
        (["voxelfield", "render", "run"], "run_module('voxelfield', run_name='__main__')"),
    ],
)
def test_while_modules_are_imported(argv, start):
    assert run(WHILE_IMPORTING.format(argv=argv, run=start)) == (130, "", "stopped\n")


def test_while_compiled_code_does_not_return():
    assert run(IN_COMPILED_CODE) == (130, "", "stopped\n")


def test_python_is_given_time_to_clean_up():
    assert run(IN_PYTHON) == (7, "cleaned up\n", "")
