"""What the tests of compiling, finding and packaging the extension share: compilers, processes, forged modules."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from voxelfield._build import sources

REPO = Path(__file__).resolve().parents[1]
NO_COMPILER = "/bin/false"
TIMEOUT = 1200  # seconds; a busy machine takes ten times what an idle one does

USE = """
import torch
from voxelfield import _library
from voxelfield.ops import sample_trilinear
grid = torch.arange(8.0).reshape(2, 2, 2, 1)
print("centre", sample_trilinear(grid, torch.full((1, 3), 0.5)).item())
print("loaded", _library.loaded_modules()["_C"])
"""

needs_posix = pytest.mark.skipif(os.name == "nt", reason="drives a POSIX shell as the compiler")


def without_binaries(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith((".so", ".pyd", ".digest")) or name == "__pycache__"]


def environment(path: Path, cache: Path, **changes: str) -> dict[str, str]:
    """An environment for a process of its own. Its compilers do not optimise: nothing here is about speed.

    No ccache stands between torch and the compilers, because tests look at the commands.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VOXELFIELD_")}
    quick = {"CXX": hasty_compiler(), "NVCC_APPEND_FLAGS": "-Xcicc -O0 -Xptxas -O0", "TORCH_NO_COMPILER_WRAPPER": "1"}
    return kept | quick | {"PYTHONPATH": str(path), "TORCH_EXTENSIONS_DIR": str(cache)} | changes


@functools.cache
def hasty_compiler() -> str:
    return compiler(Path(tempfile.mkdtemp(prefix="hasty-compiler-")) / "bin", ":")


def run_python(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # A session of its own has no terminal to write to.
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        start_new_session=True,
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def assert_nothing_was_built(done: subprocess.CompletedProcess[str]) -> None:
    for word in ("compiling", "compiled", "ignoring"):
        assert word not in done.stderr, done.stderr


def loaded_from(done: subprocess.CompletedProcess[str]) -> Path:
    """Returns the module that a run of USE loaded, having checked what it computed."""
    assert "centre 3.5" in succeeded(done).stdout
    return Path(re.search(r"^loaded (.+)$", done.stdout, re.MULTILINE)[1])


def compiler(folder: Path, body: str) -> str:
    """Returns a compiler, not optimising, that does ``body`` before each source and notes it in compiled.txt."""
    folder.mkdir()
    script = folder / "g++"
    script.write_text(
        f"""#!/bin/sh
case " $* " in
*" -c "*)
  echo "$*" >> '{folder}/compiled.txt'
  {body}
  ;;
esac
exec '{shutil.which("g++") or shutil.which("c++")}' "$@" -O0
"""
    )
    script.chmod(0o755)
    return str(script)


def reuse(objects: Path) -> str:
    """Returns a body for ``compiler`` that takes the objects of an earlier build of the same sources."""
    return f"""
for word; do
  case "$before" in
  -o) target=$word ;;
  -MF) dependencies=$word ;;
  esac
  before=$word
done
cp "$(find '{objects}' -name "$(basename "$target")")" "$target" || exit 1
echo "$target:" > "$dependencies"
exit 0
"""


def times_compiled(folder: Path, source: str) -> int:
    notes = folder / "compiled.txt"
    return notes.read_text().count(f"{source} -o ") if notes.is_file() else 0


def path_without_nvcc() -> str:
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not Path(folder, "nvcc").exists())


def forge(path: Path, digest: str, cuda: int = 0, sm: str = "", ptx: str = "", variant: str = "") -> Path:
    """Writes a file that has a module's stamp and nothing else, and its digest."""
    stamp = f"voxelfield-source-digest:{digest};sm:{sm};ptx:{ptx};variant:{variant};cuda:{cuda};"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF" + stamp.encode() + b"\0")
    sources.write_digest(path)
    return path


def digest_of(sources: Path) -> str:
    """Returns the digest that any copy of the sources must have: of names in order, each followed by its content."""
    digest = hashlib.sha256()
    for path in sorted(p for p in sources.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}):
        digest.update(path.relative_to(sources).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
