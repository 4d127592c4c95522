"""Compiling and loading the extension on first use and ahead of time, in processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from build_testing import (
    NO_COMPILER,
    USE,
    assert_nothing_was_built,
    compiler,
    digest_of,
    environment,
    loaded_from,
    needs_posix,
    path_without_nvcc,
    reuse,
    run_python,
    succeeded,
    times_compiled,
)

from voxelfield._build import architectures, sources

pytest_plugins = ["build_fixtures"]
pytestmark = [needs_posix, pytest.mark.sweep]


# --- importing ------------------------------------------------------------------------------------------------------


def test_importing_neither_compiles_nor_loads(installed, tmp_path):
    code = """
import torch, voxelfield, voxelfield.ops, voxelfield.grids.voxel_grid
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


def test_the_first_use_compiles_says_so_and_the_next_process_reuses_it(installed, kept_objects, tmp_path):
    empty, cache = tmp_path / "empty", tmp_path / "cache"
    empty.mkdir()
    reusing = compiler(tmp_path / "tools", reuse(kept_objects))
    first = run_python("-c", USE, cwd=empty, env=environment(installed, cache, CXX=reusing))
    module = loaded_from(first)
    assert module.is_relative_to(cache)
    assert f"no compiled CPU kernels fit; compiling them once into {module.parent}" in first.stderr
    assert "a minute or two" in first.stderr
    assert re.search(r"compiled the CPU kernels in \d+ s", first.stderr)
    assert sorted(path.name for path in module.parent.iterdir() if path.name != "_C.lock") == [
        module.name,
        f"{module.name}.digest",
    ]
    assert not list(installed.rglob("*.so"))

    second = run_python("-c", USE, cwd=empty, env=environment(installed, cache, CXX=NO_COMPILER))
    assert loaded_from(second) == module
    assert_nothing_was_built(second)


def test_two_processes_that_start_together_compile_once(clone, kept_objects, tmp_path):
    tools = tmp_path / "tools"
    env = environment(clone, tmp_path / "cache", CXX=compiler(tools, reuse(kept_objects)))
    with ThreadPoolExecutor() as pool:
        done = [*pool.map(lambda _: run_python("-c", USE, cwd=tmp_path, env=env), range(2))]
    assert loaded_from(done[0]) == loaded_from(done[1])
    assert times_compiled(tools, "library.cpp") == 1
    assert sum("compiling them once" in run.stderr for run in done) == 1


def test_a_builder_killed_in_mid_build_does_not_block_the_next(clone, kept_objects, tmp_path):
    cache, tools = tmp_path / "cache", tmp_path / "tools"
    # The first compiler that runs hangs; later ones find that the folder exists, and work.
    hang = f"mkdir '{tools}/hung' 2>/dev/null && echo $$ > '{tools}/hung/pid' && exec sleep 600"
    env = environment(clone, cache, CXX=compiler(tools, hang + reuse(kept_objects)))
    killed = subprocess.Popen([sys.executable, "-c", USE], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    hung = None
    try:
        hung = wait_for_number(tools / "hung" / "pid", killed)
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        assert len(list(cache.glob("*/cpu/_C.lock"))) == 1
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


def test_a_binary_of_other_sources_is_ignored_and_built_anew(installed, cpu_half, kept_objects, clone, tmp_path):
    digest = digest_of(clone / "extension").encode()
    content = cpu_half.read_bytes()
    assert content.count(digest) == 1
    stale = installed / "voxelfield" / cpu_half.name
    stale.write_bytes(content.replace(digest, b"0123456789abcdef"))
    env = environment(installed, tmp_path / "cache", CXX=compiler(tmp_path / "tools", reuse(kept_objects)))
    done = run_python("-c", USE, cwd=tmp_path, env=env)
    assert loaded_from(done).is_relative_to(tmp_path / "cache")
    assert f"ignoring {stale} was compiled from other sources" in done.stderr
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
    assert "-m voxelfield build` shows the whole build" in first


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


def test_the_command_line_builds_one_half_into_a_folder(cpu_half, clone):
    assert sources.read_stamp(cpu_half) == (digest_of(clone / "extension"), architectures.Architectures(), "", 0)


def test_with_kept_objects_a_build_compiles_what_changed_and_the_stamp(cpu_half, clone, tmp_path):
    project, tools = tmp_path / "project", tmp_path / "tools"
    shutil.copytree(clone, project)
    command = ["-m", "voxelfield", "build", "--only", "cpu", "--out", str(tmp_path / "out"), "--objects", "objects"]
    env = environment(project, tmp_path / "cache", CXX=compiler(tools, ":"))
    succeeded(run_python(*command, cwd=tmp_path, env=env))
    compiled = tools / "compiled.txt"
    assert len(compiled.read_text().splitlines()) == len(list((project / "extension").rglob("*.cpp"))) + 1
    for changed, expected in (("volume/volume.cpp", 2), ("volume/select_ops.h", 2), ("mlp/forward.cu", 1)):
        compiled.unlink()
        assert (project / "extension" / changed).is_file()
        with (project / "extension" / changed).open("a") as source:
            source.write("// changed\n")
        succeeded(run_python(*command, cwd=tmp_path, env=env))
        assert len(compiled.read_text().splitlines()) == expected, changed
        assert times_compiled(tools, "stamp.cpp") == 1
    assert sources.read_stamp(tmp_path / "out" / cpu_half.name).digest == digest_of(project / "extension")


def test_the_command_line_without_nvcc_builds_the_cpu_half_for_first_use(clone, kept_objects, tmp_path):
    reusing = compiler(tmp_path / "tools", reuse(kept_objects))
    env = environment(clone, tmp_path / "cache", PATH=path_without_nvcc(), CXX=reusing)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        env.pop(variable, None)
    if shutil.which("ninja", path=env["PATH"]) is None or shutil.which("c++", path=env["PATH"]) is None:
        pytest.skip("ninja or the compiler lives beside nvcc")
    done = succeeded(run_python("-m", "voxelfield", "build", cwd=tmp_path, env=env))
    assert "only the CPU half is compiled" in done.stderr
    assert "compiling the CPU half: " in done.stderr
    used = run_python("-c", USE, cwd=tmp_path, env={**env, "CXX": NO_COMPILER})
    assert f"built {loaded_from(used)}" in done.stderr
    assert_nothing_was_built(used)


def test_a_clone_without_binaries_uses_those_of_an_install_with_the_same_sources(installed, cpu_half, clone, tmp_path):
    for file in (cpu_half, sources.digest_path(cpu_half)):
        shutil.copy(file, installed / "voxelfield")
    information = installed / "voxelfield-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: voxelfield\nVersion: 0.1.0\n")
    cache = tmp_path / "cache"
    code = USE + "import voxelfield\nprint('file', voxelfield.__file__)\n"
    done = run_python("-c", code, cwd=clone, env=environment(installed, cache, CXX=NO_COMPILER))
    assert loaded_from(done) == installed / "voxelfield" / cpu_half.name
    assert f"file {clone}" in done.stdout, "the clone does not come first: the test shows nothing"
    assert_nothing_was_built(done)


def test_a_clone_and_any_other_folder_use_the_binaries_of_an_editable_install(project, kept_objects, clone, tmp_path):
    prefix, cache = tmp_path / "prefix", tmp_path / "cache"
    reusing = compiler(tmp_path / "tools", reuse(kept_objects))
    env = environment(tmp_path, cache, CXX=reusing, VOXELFIELD_CUDA="0")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--prefix", str(prefix)]
    succeeded(run_python("-m", "pip", "install", *options, "--editable", str(project), cwd=tmp_path, env=env))
    module = project / "voxelfield" / "_C.abi3.so"
    (site,) = prefix.glob("lib*/python*/site-packages")
    env = environment(site, cache, CXX=NO_COMPILER)
    # Only site.addsitedir reads the file with which pip makes a tree importable. The finder that this appends must come
    # before a voxelfield that is installed beside torch, as it is in .ci/run.
    added = f"import site, sys; site.addsitedir({str(site)!r})\n"
    preferred = added + "sys.meta_path.insert(0, sys.meta_path.pop())\n"
    shown = f"{USE}import voxelfield\nprint('file', voxelfield.__file__)\n"
    for folder, origin, path in ((tmp_path, project, preferred), (clone, clone, added)):
        done = run_python("-c", path + shown, cwd=folder, env=env)
        assert loaded_from(done) == module
        assert f"file {origin}{os.sep}" in done.stdout, "another copy was imported: the test shows nothing"
        assert_nothing_was_built(done)
