"""Checks one wheel of compiled kernels beside one release of torch, in an empty environment without compilers.

    python packaging/check_wheel.py dist/voxelfield-*.whl torch==2.10.0 [--train] [--work DIR]

It installs torch and the wheel, runs tests of the ops from a folder outside of the clone, and inspects the CUDA half,
which needs no GPU: all its symbols must come from torch and the system, and where torch is built for CUDA, loading it
must register a CUDA kernel for each op that has a CPU kernel. Needs `nm` and `readelf`, outside of the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
# Tests that need nothing but torch and pytest.
OP_TESTS = (
    "test_contracts.py",
    "test_grid_sample.py",
    "test_cells.py",
    "test_transforms.py",
    "test_refusals.py",
    "test_compositing.py",
    "test_marching.py",
    "test_mlp.py",
    "test_sample_pyramid.py",
)

# What the CUDA half takes from torch's CUDA libraries, which a torch for the CPU lacks.
TORCH_CUDA_SYMBOLS = {
    "aoti_torch_get_current_cuda_stream",
    "torch_c10_cuda_check_msg",
    "torch_c10_cuda_free_error_msg",
}

INSPECT = """
import json, torch, voxelfield
from voxelfield import _build, _library
_library.ensure_loaded("cpu")
package = _build.sources.package_directory()
cuda = _library.modules_in(package, _build.sources.CUDA_MODULE)
loads = bool(cuda) and torch.version.cuda is not None
if loads:
    torch.ops.load_library(cuda[0])
own = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("voxelfield::")]
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
registered = {key: [name for name in own if has_kernel(name, key)] for key in ("CPU", "CUDA")}
print(json.dumps({
    "torch": torch.__version__, "torch_cuda": torch.version.cuda, "package": str(package), "loads": loads,
    "libraries": torch.__path__[0] + "/lib", "cpu": str(_library.loaded_modules()["_C"]),
    "cuda": str(cuda[0]) if cuda else "", "ops": own, "registered": registered,
}))
"""


def main() -> int:
    """Runs all checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("torch", help="what pip installs, such as torch==2.10.0")
    parser.add_argument("--train", action="store_true", help="also time installing wheel[train] and a short training")
    parser.add_argument("--work", type=Path, help="folder for the environment, which is kept (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return check(options.wheel.resolve(), options.torch, options.train, options.work or Path(temporary))


def check(wheel: Path, torch: str, train: bool, work: Path) -> int:
    """Checks the wheel beside a torch, in a folder."""
    environment = work / "venv"
    if not environment.exists():
        run([sys.executable, "-m", "venv", environment])
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    # No compiler is on this PATH, and no variable points to one.
    hidden = ("PYTHONPATH", "CXX", "CC", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "NVCC_APPEND_FLAGS")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PATH": str(programs), "TORCH_EXTENSIONS_DIR": str(work / "cache")}
    python = [str(programs / "python")]

    def timed(name: str, command: list[str | Path]) -> float:
        started = time.monotonic()
        run(command, cwd=work, env=env)
        seconds = time.monotonic() - started
        print(f"{name}: {seconds:.0f} s", flush=True)
        return seconds

    install = [*python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    timed(f"pip install {torch}", [*install, torch])
    timed("pip install of the wheel", [*install, "--force-reinstall", "--no-deps", wheel])
    timed("pip install of its dependencies, pytest and numpy", [*install, wheel, "pytest", "numpy"])
    inspect(json.loads(run([*python, "-c", INSPECT], cwd=work, env=env)))

    tests = work / "tests"
    shutil.rmtree(tests, ignore_errors=True)
    shutil.copytree(REPO / "tests", tests, ignore=shutil.ignore_patterns("__pycache__", "fixtures"))
    shutil.copy(REPO / "pyproject.toml", work)  # pytest's settings
    timed("op tests", [*python, "-m", "pytest", "-q", *(f"tests/ops/{name}" for name in OP_TESTS)])
    if train:
        seconds = timed("pip install wheel[train]", [*install, f"{wheel}[train]"])
        seconds += timed(
            "train trainer=smoke", [programs / "voxelfield", "train", "trainer=smoke", "hydra.run.dir=run"]
        )
        print(f"from pip install wheel[train] to a trained field: {seconds:.0f} s")
    if (work / "cache").exists():
        print("FAILED: something was compiled", *(work / "cache").iterdir())
        return 1
    print(f"passed: {wheel.name} beside {torch}")
    return 0


def run(command: list[str | Path], **options: object) -> str:
    """Runs a command, shows its output if it fails or is a test run, and returns it."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{done.stdout}\nFAILED ({done.returncode}): {' '.join(map(str, command))}")
    if "pytest" in command and done.stdout:
        print(done.stdout.strip().splitlines()[-1], flush=True)
    return done.stdout


def inspect(found: dict) -> None:
    """Checks the modules that an environment loaded."""
    print(f"torch {found['torch']}, CUDA {found['torch_cuda']}; {len(found['ops'])} ops; loaded {found['cpu']}")
    if not found["cpu"].startswith(found["package"]):
        sys.exit(f"FAILED: the CPU half was not taken from {found['package']}")
    if not found["cuda"]:
        print("the wheel has no CUDA half")
        return
    unresolved = undefined(found["cuda"]) - provided(found["cuda"], Path(found["libraries"]))
    print(f"CUDA half: {len(undefined(found['cuda']))} undefined symbols, unresolved: {sorted(unresolved) or 'none'}")
    if not found["loads"]:
        print("CUDA half: not loaded beside a torch without CUDA, which lacks torch's CUDA symbols")
        if not unresolved <= TORCH_CUDA_SYMBOLS:
            sys.exit("FAILED: symbols other than those of torch's CUDA library are unresolved")
        return
    cpu, cuda = (set(found["registered"][key]) for key in ("CPU", "CUDA"))
    print(f"CUDA half: loaded, {len(cuda)} CUDA kernels registered, missing: {sorted(cpu - cuda) or 'none'}")
    if unresolved or cpu - cuda:
        sys.exit("FAILED: the CUDA half does not fit this torch")


def undefined(module: str | Path) -> set[str]:
    """Returns the names of the symbols that a module takes from other libraries."""
    lines = run(["nm", "-D", "--undefined-only", module]).splitlines()
    # Weak symbols (w) need not exist.
    return {line.split()[-1].partition("@")[0] for line in lines if line.split()[0] == "U"}


def provided(module: str, libraries: Path) -> set[str]:
    """Returns the names of all symbols of torch's libraries and of the system's that the module needs."""
    lines = run(["readelf", "-d", module]).splitlines()
    needed = [line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line]
    print(f"CUDA half: needs {' '.join(needed)}")
    files = [*libraries.glob("libtorch*.so"), *libraries.glob("libc10*.so")]
    listed = run(["ldconfig", "-p"]) if shutil.which("ldconfig") else run(["/sbin/ldconfig", "-p"])
    for line in listed.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.split(" ")[0] in needed and "x86-64" in name:
            files.append(Path(path))
    symbols: set[str] = set()
    for file in files:
        symbols |= {
            line.split()[-1].partition("@")[0] for line in run(["nm", "-D", "--defined-only", file]).splitlines()
        }
    return symbols


if __name__ == "__main__":
    sys.exit(main())
