"""Compiling, finding and loading the extension, end to end: every build here runs in processes of its own.

They work on a copy of the project whose sources carry a mark, so that no binary of the tree under test, and no
installed voxelfield, can stand in for what a test asks to be built.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch

from voxelfield import _build, _library

REPO = Path(__file__).resolve().parents[1]
NO_COMPILER = "/bin/false"
TIMEOUT = 300

USE = """
import torch
from voxelfield import _library
from voxelfield.ops import sample_trilinear
grid = torch.arange(8.0).reshape(2, 2, 2, 1)
print("centre", sample_trilinear(grid, torch.full((1, 3), 0.5)).item())
print("loaded", _library.loaded_modules()["_C"])
"""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="drives a POSIX shell as the compiler")
needs_nvcc = pytest.mark.skipif(_build.find_cuda_home() is None, reason="needs nvcc")


# --- copies and processes -------------------------------------------------------------------------------------------


def without_binaries(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith((".so", ".pyd")) or name == "__pycache__"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A marked clone of the project without binaries. Nothing may be written to it."""
    root = tmp_path_factory.mktemp("clone")
    for folder in ("voxelfield", "extension"):
        shutil.copytree(REPO / folder, root / folder, ignore=without_binaries)
    with (root / "extension" / "module" / "library.cpp").open("a") as source:
        source.write(f"// A copy for tests: {root}\n")
    return root


@pytest.fixture
def installed(clone, tmp_path):
    """The folder that a sources-only install leaves on the path: the extension's sources lie within the package."""
    site = tmp_path / "site"
    shutil.copytree(clone / "voxelfield", site / "voxelfield")
    shutil.copytree(clone / "extension", site / "voxelfield" / "extension")
    return site


@pytest.fixture
def packaged(clone, monkeypatch):
    """Points this process's builder and loader at the clone, with nothing loaded."""
    monkeypatch.setattr(_build, "PACKAGE", clone / "voxelfield")
    monkeypatch.setattr(_library, "_loaded", {})
    monkeypatch.setattr(_library, "_failed", {})


def environment(path: Path, cache: Path, **changes: str) -> dict[str, str]:
    """An environment for a process of its own. Its compilers do not optimise: nothing here is about speed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VOXELFIELD_")}
    quick = {"CXX": hasty_compiler(), "NVCC_APPEND_FLAGS": "-Xcicc -O0 -Xptxas -O0"}
    return kept | quick | {"PYTHONPATH": str(path), "TORCH_EXTENSIONS_DIR": str(cache)} | changes


@functools.cache
def hasty_compiler() -> str:
    return compiler(Path(tempfile.mkdtemp(prefix="hasty-compiler-")) / "bin", ":")


def run_python(*arguments: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT
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


def times_compiled(folder: Path, source: str) -> int:
    notes = folder / "compiled.txt"
    return notes.read_text().count(f"{source} -o ") if notes.is_file() else 0


def path_without_nvcc() -> str:
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not Path(folder, "nvcc").exists())


def forge(path: Path, digest: str, cuda: int) -> Path:
    """Writes a file that bears a module's stamp and nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF" + f"voxelfield-source-digest:{digest};cuda:{cuda};".encode() + b"\0")
    return path


# --- which halves, and where the toolkit is -------------------------------------------------------------------------


@pytest.fixture
def no_toolkit(monkeypatch):
    for variable in ("CUDA_HOME", "CUDA_PATH", "VOXELFIELD_CUDA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", path_without_nvcc())


@pytest.mark.usefixtures("no_toolkit")
def test_without_nvcc_the_cpu_half_is_named_and_the_log_says_why(caplog):
    with caplog.at_level(logging.WARNING, logger="voxelfield.build"):
        assert _build.module_names() == ["_C"]
    assert "no nvcc" in caplog.text
    assert "CPU half only" in caplog.text


def toolkit(root: Path, says: str = "") -> Path:
    """Makes a folder that looks like a CUDA toolkit's, as far as a search for one looks."""
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\n{says}\n")
    nvcc.chmod(0o755)
    return root


@pytest.mark.usefixtures("no_toolkit")
def test_with_a_toolkit_both_halves_are_named_unless_cuda_is_forbidden(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "toolkit")))
    assert _build.module_names() == ["_C", "_C_cuda"]
    monkeypatch.setenv("VOXELFIELD_CUDA", "1")
    assert _build.module_names() == ["_C", "_C_cuda"]
    monkeypatch.setenv("VOXELFIELD_CUDA", "0")
    assert _build.module_names() == ["_C"]
    assert not caplog.records


@pytest.mark.usefixtures("no_toolkit")
def test_cuda_demanded_without_a_toolkit_is_an_error(monkeypatch):
    monkeypatch.setenv("VOXELFIELD_CUDA", "1")
    with pytest.raises(FileNotFoundError, match=r"VOXELFIELD_CUDA=1 but no nvcc.*PATH.*CUDA_HOME"):
        _build.module_names()


@pytest.mark.usefixtures("no_toolkit")
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_that_names_no_toolkit_is_passed_over(monkeypatch, tmp_path, caplog, variable):
    gone = tmp_path / "gone"
    monkeypatch.setenv(variable, str(gone))
    with caplog.at_level(logging.WARNING, logger="voxelfield.build"):
        assert _build.module_names() == ["_C"]
    assert f"ignoring {variable}={gone}: there is no bin/nvcc in it" in caplog.text
    assert "CPU half only" in caplog.text
    # One on the PATH is found all the same.
    there = toolkit(tmp_path / "toolkit", f"echo '#$ TOP={tmp_path}/toolkit' >&2")
    monkeypatch.setenv("PATH", f"{there / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert _build.find_cuda_home() == there
    assert _build.module_names() == ["_C", "_C_cuda"]


def test_another_wish_than_0_or_1_is_an_error(monkeypatch):
    monkeypatch.setenv("VOXELFIELD_CUDA", "yes")
    with pytest.raises(ValueError, match="must be 0, 1 or unset, got 'yes'"):
        _build.module_names()


@pytest.mark.usefixtures("no_toolkit")
def test_the_toolkit_is_where_nvcc_says_even_if_nvcc_is_a_wrapper(monkeypatch, tmp_path):
    assert _build.find_cuda_home() is None
    own = toolkit(tmp_path / "toolkit")
    wrapper = toolkit(tmp_path / "tools", f"echo '#$ _SPACE_= ' >&2\necho '#$ TOP={own}/bin/..' >&2")
    monkeypatch.setenv("PATH", f"{wrapper / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert _build.find_cuda_home() == own
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.setenv(variable, str(toolkit(tmp_path / variable)))
        assert _build.find_cuda_home() == tmp_path / variable


@needs_nvcc
def test_the_toolkit_found_holds_nvcc_and_its_headers():
    home = _build.find_cuda_home()
    assert (home / "bin" / "nvcc").is_file()
    assert (home / "include" / "cuda_runtime.h").is_file()


# --- stamps ---------------------------------------------------------------------------------------------------------


def test_the_digest_follows_the_sources_and_nothing_else(clone, tmp_path, monkeypatch):
    shutil.copytree(clone / "extension", tmp_path / "extension")
    monkeypatch.setattr(_build, "PACKAGE", tmp_path / "voxelfield")
    before = _build.source_digest()
    (tmp_path / "extension" / "notes.txt").write_text("no source")
    assert _build.source_digest() == before
    header = tmp_path / "extension" / "trilinear.h"
    header.write_text(header.read_text() + "\n")
    assert _build.source_digest() != before


def test_missing_sources_are_an_error_that_names_both_places(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "PACKAGE", tmp_path / "site" / "voxelfield")
    with pytest.raises(FileNotFoundError, match="reinstall voxelfield") as caught:
        _build.source_root()
    assert str(tmp_path / "site" / "voxelfield" / "extension") in str(caught.value)
    assert str(tmp_path / "site" / "extension") in str(caught.value)


def test_a_stamp_is_read_without_loading(tmp_path):
    assert _build.read_stamp(forge(tmp_path / "_C_cuda.abi3.so", "0123456789abcdef", 13)) == (
        "0123456789abcdef",
        13,
    )
    (tmp_path / "other.so").write_bytes(b"\x7fELF" + bytes(64))
    assert _build.read_stamp(tmp_path / "other.so") is None


@pytest.mark.usefixtures("packaged")
def test_stale_and_foreign_modules_are_passed_over_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    cache = _build.cache_directory()
    forge(cache / "_C.abi3.so", "0123456789abcdef", 0)
    (cache / "_C.so").write_bytes(b"\x7fELF" + bytes(64))
    with caplog.at_level(logging.WARNING, logger="voxelfield"):
        assert _library._find("_C") is None
        assert not caplog.text, "nothing is said while another module may still fit"
        _library._warn_of_unfit("_C")
    for name in ("_C.abi3.so", "_C.so"):
        assert f"ignoring {cache / name}: it was built from other sources" in caplog.text
    fitting = forge(cache / "_C.abi3.so", _build.source_digest(), 0)
    assert _library._find("_C") == fitting


@pytest.mark.usefixtures("packaged")
@pytest.mark.parametrize(("torch_cuda", "runs"), [("13.0", "runs CUDA 13"), (None, "runs CUDA not at all")])
def test_a_cuda_module_of_another_cuda_is_refused_unloaded(tmp_path, monkeypatch, torch_cuda, runs):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(_library, "_loaded", {"_C": Path("already")})
    module = forge(_build.cache_directory() / "_C_cuda.abi3.so", _build.source_digest(), 12)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"was compiled by CUDA 12, but .*{runs}") as caught:
            _library.ensure_loaded("cuda")
        assert str(module) in str(caught.value)
        # A module in the way of the build cache can only be replaced where it lies.
        assert f"python -m voxelfield.build --only cuda --out {module.parent}" in str(caught.value)
    assert "_C_cuda" not in _library.loaded_modules()


def test_a_device_without_kernels_is_named():
    with pytest.raises(NotImplementedError, match="kernels for cpu and cuda tensors, got a tensor on 'xpu'"):
        _library.ensure_loaded("xpu")


# --- importing ------------------------------------------------------------------------------------------------------


def test_importing_neither_compiles_nor_loads(installed, tmp_path):
    code = """
import torch, voxelfield, voxelfield.ops, voxelfield.grids
from voxelfield import _library
assert _library.loaded_modules() == {}, _library.loaded_modules()
assert not hasattr(torch.ops.voxelfield, "sample_trilinear")
print("file", voxelfield.__file__)
"""
    cache = tmp_path / "cache"
    done = run_python("-c", code, cwd=tmp_path, env=environment(installed, cache, CXX=NO_COMPILER))
    assert f"file {installed}" in succeeded(done).stdout
    assert_nothing_was_built(done)
    assert not cache.exists()


# --- just in time ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_use_compiles_says_so_and_the_next_process_reuses_it(installed, tmp_path):
    empty, cache = tmp_path / "empty", tmp_path / "cache"
    empty.mkdir()
    first = run_python("-c", USE, cwd=empty, env=environment(installed, cache))
    module = loaded_from(first)
    assert module.is_relative_to(cache)
    assert f"no prebuilt CPU kernels fit; compiling them once into {module.parent}" in first.stderr
    assert "a minute or two" in first.stderr
    assert re.search(r"compiled the CPU kernels in \d+ s", first.stderr)
    assert sorted(path.name for path in module.parent.iterdir() if path.name != "_C.lock") == [module.name]
    assert not list(installed.rglob("*.so"))

    second = run_python("-c", USE, cwd=empty, env=environment(installed, cache, CXX=NO_COMPILER))
    assert loaded_from(second) == module
    assert_nothing_was_built(second)


@pytest.mark.slow
def test_two_processes_that_start_together_compile_once(clone, tmp_path):
    tools = tmp_path / "tools"
    env = environment(clone, tmp_path / "cache", CXX=compiler(tools, ":"))
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", USE],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=TIMEOUT) for process in pair]
    done = [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(pair, outputs, strict=True)
    ]
    assert loaded_from(done[0]) == loaded_from(done[1])
    assert times_compiled(tools, "library.cpp") == 1
    assert sum("compiling them once" in run.stderr for run in done) == 1


@pytest.mark.slow
def test_a_builder_killed_in_mid_build_does_not_block_the_next(clone, tmp_path):
    cache, tools = tmp_path / "cache", tmp_path / "tools"
    # The first compiler that runs hangs; whoever comes later finds the folder made and works.
    hang = f"mkdir '{tools}/hung' 2>/dev/null && echo $$ > '{tools}/hung/pid' && exec sleep 600"
    env = environment(clone, cache, CXX=compiler(tools, hang))
    killed = subprocess.Popen([sys.executable, "-c", USE], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    hung = None
    try:
        hung = wait_for_number(tools / "hung" / "pid", killed)
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        assert len(list(cache.rglob("_C.lock"))) == 1
        # Its compiler still runs: neither that nor the lock may hold up the next process.
        after = run_python("-c", USE, cwd=tmp_path, env=env)
        assert loaded_from(after).is_relative_to(cache)
        assert "compiling them once" in after.stderr
        os.kill(hung, 0)
    finally:
        killed.kill()
        if hung is not None:
            os.kill(hung, signal.SIGKILL)


def wait_for_number(file: Path, writer: subprocess.Popen) -> int:
    deadline = time.monotonic() + 120
    while not (file.is_file() and file.read_text().endswith("\n")):
        assert writer.poll() is None, "the process ended first"
        assert time.monotonic() < deadline, f"{file} was never written"
        time.sleep(0.05)
    return int(file.read_text())


@pytest.mark.slow
def test_a_binary_of_other_sources_is_ignored_and_built_anew(installed, cpu_half, clone, tmp_path):
    digest = digest_of(clone / "extension").encode()
    content = cpu_half.read_bytes()
    assert content.count(digest) == 1
    stale = installed / "voxelfield" / cpu_half.name
    stale.write_bytes(content.replace(digest, b"0123456789abcdef"))
    done = run_python("-c", USE, cwd=tmp_path, env=environment(installed, tmp_path / "cache"))
    assert loaded_from(done).is_relative_to(tmp_path / "cache")
    assert f"ignoring {stale}: it was built from other sources" in done.stderr
    assert "compiling them once" in done.stderr


@pytest.mark.parametrize("says", ["", "the reason why it fails"])
def test_a_failing_compiler_is_an_error_that_names_the_fix_and_is_not_tried_again(installed, tmp_path, says):
    code = """
import os, torch, voxelfield
from voxelfield.ops import sample_trilinear
print("imported")
for _ in range(2):
    try:
        sample_trilinear(torch.ones(2, 2, 2, 1), torch.ones(1, 3))
    except RuntimeError as error:
        print("<<", error, ">>", sep="")
    os.environ["CXX"] = "c++"  # a second attempt would now succeed
"""
    broken = compiler(tmp_path / "tools", f"echo '{says}' >&2; exit 1") if says else NO_COMPILER
    env = environment(installed, tmp_path / "cache", CXX=broken)
    done = succeeded(run_python("-c", code, cwd=tmp_path, env=env))
    assert done.stdout.startswith("imported")
    first, second = re.findall(r"<<(.*?)>>", done.stdout, re.DOTALL)
    assert first == second
    assert "could not compile its CPU kernels" in first
    assert broken in first, "the command that failed is missing"
    assert says in first, "the compiler's own words are missing"
    assert "Needed: a C++17 compiler (CXX) and ninja" in first
    assert "-m voxelfield.build` shows the whole build" in first


def test_a_build_compiles_its_own_sources_wherever_the_process_stands(installed, clone, tmp_path):
    # A script elsewhere uses the installed package while the working directory holds another voxelfield.
    decoy, scripts, tools = tmp_path / "decoy", tmp_path / "scripts", tmp_path / "tools"
    (decoy / "voxelfield").mkdir(parents=True)
    (decoy / "voxelfield" / "__init__.py").write_text("raise ImportError('the decoy was imported')\n")
    scripts.mkdir()
    (scripts / "use.py").write_text(USE)
    env = environment(installed, tmp_path / "cache", CXX=compiler(tools, "exit 1"))
    done = run_python(str(scripts / "use.py"), cwd=decoy, env=env)
    assert done.returncode != 0
    assert "the decoy was imported" not in done.stderr
    assert f"-c {installed}/voxelfield/extension/" in (tools / "compiled.txt").read_text()


# --- ahead of time --------------------------------------------------------------------------------------------------


def digest_of(sources: Path) -> str:
    """The digest, as any copy of the sources must have it: names in order, each followed by its content."""
    digest = hashlib.sha256()
    for path in sorted(p for p in sources.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}):
        digest.update(path.relative_to(sources).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="module")
def cpu_half(clone, tmp_path_factory):
    """The CPU half of the marked clone, by the command line."""
    out = tmp_path_factory.mktemp("built") / "modules"
    env = environment(clone, out.parent / "cache")
    done = run_python("-m", "voxelfield.build", "--only", "cpu", "--out", str(out), cwd=out.parent, env=env)
    module = out / "_C.abi3.so"
    assert f"built {module}" in succeeded(done).stderr
    assert list(out.iterdir()) == [module], "something else was left in the folder"
    assert not (out.parent / "cache").exists()
    return module


@pytest.mark.slow
def test_the_command_line_builds_one_half_into_a_folder(cpu_half, clone):
    assert _build.read_stamp(cpu_half) == (digest_of(clone / "extension"), 0)


@pytest.mark.slow
def test_the_command_line_without_nvcc_builds_the_cpu_half_for_first_use(clone, tmp_path):
    env = environment(clone, tmp_path / "cache", PATH=path_without_nvcc())
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        env.pop(variable, None)
    if shutil.which("ninja", path=env["PATH"]) is None or shutil.which("c++", path=env["PATH"]) is None:
        pytest.skip("ninja or the compiler lives beside nvcc")
    done = succeeded(run_python("-m", "voxelfield.build", cwd=tmp_path, env=env))
    assert "building the CPU half only" in done.stderr
    used = run_python("-c", USE, cwd=tmp_path, env={**env, "CXX": NO_COMPILER})
    assert f"built {loaded_from(used)}" in done.stderr
    assert_nothing_was_built(used)


@pytest.mark.slow
def test_a_clone_without_binaries_uses_those_of_an_install_with_the_same_sources(installed, cpu_half, clone, tmp_path):
    shutil.copy(cpu_half, installed / "voxelfield")
    information = installed / "voxelfield-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: voxelfield\nVersion: 0.1.0\n")
    cache = tmp_path / "cache"
    code = USE + "import voxelfield\nprint('file', voxelfield.__file__)\n"
    done = run_python("-c", code, cwd=clone, env=environment(installed, cache, CXX=NO_COMPILER))
    assert loaded_from(done) == installed / "voxelfield" / cpu_half.name
    assert f"file {clone}" in done.stdout, "the clone does not come first: the test shows nothing"
    assert_nothing_was_built(done)


# --- packaging ------------------------------------------------------------------------------------------------------


def packed_sources(project: Path) -> set[str]:
    """Every file of the package as an install must hold it, binaries aside."""
    package = {
        path.relative_to(project).as_posix()
        for path in (project / "voxelfield").rglob("*")
        if path.suffix in {".py", ".json", ".typed"}
    }
    sources = {
        f"voxelfield/{path.relative_to(project).as_posix()}"
        for path in (project / "extension").rglob("*")
        if path.is_file()
    }
    assert {"voxelfield/py.typed", "voxelfield/datasets/manifests/lego.json"} <= package
    return package | sources


def content_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}


@pytest.fixture
def project(clone, tmp_path):
    """The marked clone with all that packaging needs, to be written to."""
    root = tmp_path / "project"
    shutil.copytree(clone, root)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, root)
    return root


@pytest.fixture
def isolated(tmp_path):
    """An environment in which setuptools can be imported and torch cannot, as under build isolation."""
    library = tmp_path / "isolated"
    library.mkdir()
    packages = Path(setuptools.__file__).parents[1]
    metadata = packages / f"setuptools-{importlib.metadata.version('setuptools')}.dist-info"
    for entry in (packages / "setuptools", packages / "_distutils_hack", metadata):
        (library / entry.name).symlink_to(entry)
    return {**environment(library, tmp_path / "cache"), "PYTHONNOUSERSITE": "1"}


def test_a_wheel_built_in_isolation_holds_the_sources_and_no_binary(project, isolated, tmp_path):
    code = f"from setuptools import build_meta; print('wheel', build_meta.build_wheel({str(tmp_path)!r}))"
    done = succeeded(run_python("-S", "-c", code, cwd=project, env=isolated))
    assert "torch is not importable in this build" in done.stderr
    assert "on first use" in done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert content_of(wheel) == packed_sources(project)


def test_a_source_archive_holds_all_that_a_build_needs(project, isolated, tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    succeeded(run_python("-S", "-c", code, cwd=project, env=isolated))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    packed = {name.replace("voxelfield/extension/", "extension/") for name in packed_sources(project)}
    assert packed | {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.slow
def test_a_wheel_built_beside_torch_carries_every_half_that_can_be_compiled(project, tmp_path):
    env = environment(tmp_path, tmp_path / "cache", TORCH_CUDA_ARCH_LIST="9.0")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    succeeded(run_python("-m", "pip", "wheel", *options, str(project), cwd=tmp_path, env=env))
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-cp310-abi3-\w+\.whl$", wheel.name)
    halves = {f"voxelfield/{name}.abi3.so" for name in _build.module_names()}
    assert content_of(wheel) == packed_sources(project) | halves

    site = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert digest_of(site / "voxelfield" / "extension") == digest_of(project / "extension")
    done = run_python("-c", USE, cwd=tmp_path, env=environment(site, tmp_path / "cache", CXX=NO_COMPILER))
    assert loaded_from(done) == site / "voxelfield" / "_C.abi3.so"
    assert_nothing_was_built(done)

    cuda = site / "voxelfield" / "_C_cuda.abi3.so"
    if cuda.is_file():
        digest, major = _build.read_stamp(cuda)
        assert digest == digest_of(project / "extension")
        assert major >= 12
        needed = subprocess.run(["readelf", "-d", str(cuda)], capture_output=True, text=True, check=True)
        # libtorch brings libtorch_cuda along, which holds the stream symbol; the linker must not drop it.
        assert "Shared library: [libtorch.so]" in needed.stdout
        assert "libtorch_python" not in needed.stdout
