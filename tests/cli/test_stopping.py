"""Ctrl-C on the command line while modules are imported, which may catch the exception that it raises."""

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
    if argv[0] == "train.py":
        pytest.importorskip("hydra")
    assert run(WHILE_IMPORTING.format(argv=argv, run=start)) == (130, "", "stopped\n")
