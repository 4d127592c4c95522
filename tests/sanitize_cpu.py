"""Runs tests of the ops against CPU kernels compiled with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/sanitize_cpu.py [FOLDER] [PYTEST_ARGUMENT ...]

Needs Linux and GCC. A copy of the repository's files goes into FOLDER (build/sanitized), where the kernels are compiled
in some minutes, and where pytest runs: the tests of ops and grids and the fuzzing of ops, unless told otherwise. The
first error of either sanitizer ends it with a report and a status other than 0. A later call compiles what has changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["tests/ops", "tests/grids", "tests/fuzz/test_fuzz_ops.py", "-m", "not cuda", "-p", "no:cacheprovider", "-q"]
FLAGS = "-fsanitize=address,undefined -fno-omit-frame-pointer"


def copy_repository(folder: Path) -> None:
    """Copies the files that git tracks, or would; times stay, so that ninja compiles what has changed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def runtime(name: str) -> str:
    """Returns the path of a library of the compiler's."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main(arguments: list[str]) -> int:
    """Compiles, and runs pytest; returns its exit status."""
    folder = Path(arguments[0] if arguments else ROOT / "build" / "sanitized").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    copy_repository(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    build = [
        sys.executable,
        "-m",
        "voxelfield",
        "build",
        "--only",
        "cpu",
        "--out",
        "voxelfield",
        "--objects",
        "objects",
    ]
    flags = {"CFLAGS": FLAGS, "CXXFLAGS": FLAGS, "LDFLAGS": FLAGS}
    subprocess.run(build, cwd=folder, env=environment | flags, check=True)
    sanitizers = {
        # Python itself is not instrumented, so that the sanitizers' runtime must be there before it starts.
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        # Python leaks by design; tests that ask for too much memory must see the allocation fail.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:log_path=stderr",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    # pytest would keep the report that precedes an abort to itself.
    test = [sys.executable, "-m", "pytest", "--capture=sys", *(arguments[1:] or TESTS)]
    return subprocess.run(test, cwd=folder, env=environment | sanitizers, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
