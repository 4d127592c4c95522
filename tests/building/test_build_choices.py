"""Which halves are compiled, for which GPUs, and which binary is taken. Nothing is compiled here."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_testing import forge, needs_posix, path_without_nvcc
from torch.utils.cpp_extension import library_paths

from voxelfield import _library
from voxelfield._build import architectures, compiling, sources
from voxelfield._build.architectures import Architectures
from voxelfield._build.compiling import LONG, bundles, write_bundles
from voxelfield._library import KernelsUnavailableError
from voxelfield.cli.command import main

pytest_plugins = ["build_fixtures"]
pytestmark = [needs_posix, pytest.mark.sweep]


def reasons(name: str) -> list[str]:
    """Why modules do not fit."""
    return [misfit.reason for misfit in _library._find(name)[1]]


# --- which halves, and where the toolkit is -------------------------------------------------------------------------


@pytest.fixture
def no_toolkit(monkeypatch):
    for variable in ("CUDA_HOME", "CUDA_PATH", "VOXELFIELD_CUDA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", path_without_nvcc())


@pytest.fixture
def gpus(monkeypatch):
    """Sets the GPUs that torch seems to see, by compute capability."""

    def show(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(compiling, "visible_capabilities", lambda: capabilities)

    show()
    return show


def toolkit(root: Path, says: str = "") -> Path:
    """Makes a folder that looks like a CUDA toolkit's, as far as a search for one looks."""
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\n{says}\n")
    nvcc.chmod(0o755)
    return root


NO_GPU = ("no GPU is visible", "on first use on a machine with a GPU", "now with VOXELFIELD_CUDA=1")


@pytest.mark.usefixtures("no_toolkit")
@pytest.mark.parametrize(
    ("has_nvcc", "gpu", "demanded", "names", "note"),
    [
        (False, [(9, 0)], None, ["_C"], ("no nvcc", "only the CPU half")),
        (True, [(8, 6)], None, ["_C", "_C_cuda"], ()),
        (True, [(8, 6)], "0", ["_C"], ("VOXELFIELD_CUDA=0",)),
        (True, [], None, ["_C"], NO_GPU),
        (True, [], "1", ["_C", "_C_cuda"], ()),
    ],
)
def test_the_cuda_half_is_chosen_where_there_are_nvcc_and_a_gpu_or_as_demanded(
    monkeypatch, tmp_path, gpus, has_nvcc, gpu, demanded, names, note
):
    gpus(*gpu)
    if has_nvcc:
        monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "toolkit")))
    if demanded is not None:
        monkeypatch.setenv("VOXELFIELD_CUDA", demanded)
    chosen, told = compiling.choose_modules()
    assert chosen == names
    assert bool(told) == bool(note)
    assert all(words in told for words in note)


@pytest.mark.usefixtures("no_toolkit")
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("1", FileNotFoundError, "^VOXELFIELD_CUDA=1: compiling the CUDA half needs nvcc: put it on the PATH"),
        ("yes", ValueError, "must be 0, 1 or unset, got 'yes'"),
    ],
)
def test_cuda_demanded_in_vain_is_an_error(monkeypatch, value, error, message):
    monkeypatch.setenv("VOXELFIELD_CUDA", value)
    with pytest.raises(error, match=message):
        compiling.choose_modules()


@pytest.mark.usefixtures("no_toolkit")
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_that_names_no_toolkit_is_passed_over(monkeypatch, tmp_path, caplog, variable, gpus):
    gone = tmp_path / "gone"
    gpus((9, 0))
    monkeypatch.setenv(variable, str(gone))
    with caplog.at_level(logging.WARNING, logger="voxelfield.build"):
        assert compiling.choose_modules()[0] == ["_C"]
    assert f"ignoring {variable}={gone}: there is no bin/nvcc in it" in caplog.text
    # One on the PATH is found all the same.
    there = toolkit(tmp_path / "toolkit", f"echo '#$ TOP={tmp_path}/toolkit' >&2")
    monkeypatch.setenv("PATH", f"{there / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert architectures.find_cuda_home() == there
    assert compiling.choose_modules()[0] == ["_C", "_C_cuda"]


@pytest.mark.usefixtures("no_toolkit")
def test_the_toolkit_is_where_nvcc_says_even_if_nvcc_is_a_wrapper(monkeypatch, tmp_path):
    assert architectures.find_cuda_home() is None
    own = toolkit(tmp_path / "toolkit")
    wrapper = toolkit(tmp_path / "tools", f"echo '#$ _SPACE_= ' >&2\necho '#$ TOP={own}/bin/..' >&2")
    monkeypatch.setenv("PATH", f"{wrapper / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert architectures.find_cuda_home() == own
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.setenv(variable, str(toolkit(tmp_path / variable)))
        assert architectures.find_cuda_home() == tmp_path / variable


# --- stamps ---------------------------------------------------------------------------------------------------------


def test_the_digest_follows_the_sources_and_nothing_else(clone, tmp_path, monkeypatch):
    shutil.copytree(clone / "extension", tmp_path / "extension")
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / "voxelfield")
    before = sources.source_digest()
    (tmp_path / "extension" / "notes.txt").write_text("no source")
    assert sources.source_digest() == before
    header = tmp_path / "extension" / "stencil" / "trilinear.h"
    header.write_text(header.read_text() + "\n")
    assert sources.source_digest() != before


def test_a_wheel_of_compiled_kernels_has_nothing_to_compile(tmp_path, monkeypatch, caplog):
    package = tmp_path / "site" / "voxelfield"
    monkeypatch.setattr(sources, "_PACKAGE", package)
    assert not sources.has_sources()
    assert main(["build", "--only", "cpu"]) == 2
    assert "was installed from a wheel of compiled kernels" in caplog.text


def test_a_stamp_is_read_without_loading(tmp_path):
    module = forge(tmp_path / "_C_cuda.abi3.so", "0123456789abcdef", 13, "75,90a", "120", "VOXELFIELD_X=1")
    chosen = Architectures(("75", "90a"), ("120",))
    assert sources.read_stamp(module) == ("0123456789abcdef", chosen, "VOXELFIELD_X=1", 13)
    plain = forge(tmp_path / "_C.abi3.so", "0123456789abcdef")
    assert sources.read_stamp(plain) == ("0123456789abcdef", Architectures(), "", 0)
    (tmp_path / "other.so").write_bytes(b"\x7fELF" + bytes(64))
    assert sources.read_stamp(tmp_path / "other.so") is None


@pytest.mark.parametrize(
    ("variables", "variant"),
    [
        ({}, ""),
        ({"NVCC_APPEND_FLAGS": "-lineinfo -DOTHER -O1"}, ""),
        (
            {"NVCC_APPEND_FLAGS": "-DVOXELFIELD_B=2 -lineinfo", "NVCC_PREPEND_FLAGS": "-DVOXELFIELD_A"},
            "VOXELFIELD_A,VOXELFIELD_B=2",
        ),
    ],
)
def test_a_variant_is_the_macros_of_voxelfield_that_the_environment_defines(monkeypatch, variables, variant):
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert sources.requested_variant() == variant


@pytest.mark.usefixtures("packaged")
def test_stale_and_foreign_modules_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = compiling.module_directory("_C")
    forge(folder / "_C.abi3.so", "0123456789abcdef")
    (folder / "_C.so").write_bytes(b"\x7fELF" + bytes(64))
    assert _library._find("_C")[0] is None
    for misfit, name in zip(reasons("_C"), ("_C.abi3.so", "_C.so"), strict=True):
        assert misfit.startswith(f"{folder / name} was compiled from other sources than ")
    fitting = forge(folder / "_C.abi3.so", sources.source_digest())
    assert _library._find("_C")[0] == fitting


@pytest.mark.usefixtures("packaged")
@pytest.mark.parametrize("editable", [True, False])
def test_the_tree_of_an_editable_install_is_searched_and_that_of_a_copy_is_not(tmp_path, monkeypatch, editable):
    site, tree = tmp_path / "site", tmp_path / "a tree"
    information = site / "voxelfield-0.1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: voxelfield\nVersion: 0.1.0\n")
    record = {"url": tree.as_uri(), "dir_info": {"editable": True} if editable else {}}
    (information / "direct_url.json").write_text(json.dumps(record))
    discover = importlib.metadata.Distribution.discover
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: discover(name=name, path=[str(site)]))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    module = forge(tree / "voxelfield" / "_C.abi3.so", sources.source_digest())
    assert _library._find("_C")[0] == (module if editable else None)
    if editable:
        forge(module, "0123456789abcdef")
        assert _library._find("_C")[0] is None, "its sources are others by now"


# --- GPU architectures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sm", "ptx", "runs", "fails"),
    [
        (("86",), (), [(8, 6), (8, 9)], [(7, 5), (8, 0), (9, 0), (12, 0)]),
        (("80", "90"), ("90",), [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], [(7, 5)]),
        ((), ("75",), [(7, 5), (8, 6), (12, 1)], [(7, 0)]),
        (("120",), (), [(12, 0), (12, 1)], [(10, 0)]),
        (("90a",), ("90a",), [(9, 0)], [(8, 9), (10, 0)]),
        ((), (), [], [(9, 0)]),
    ],
)
def test_a_binary_runs_on_the_gpus_that_cuda_promises(sm, ptx, runs, fails):
    chosen = Architectures(sm, ptx)
    assert all(chosen.run_on(capability) for capability in runs)
    assert not any(chosen.run_on(capability) for capability in fails)


def test_machine_code_for_hopper_has_its_own_instructions():
    flags = Architectures(("80", "90", "90a"), ("90",)).nvcc_flags()
    kinds = [flag.removeprefix("-gencode=arch=compute_") for flag in flags]
    assert kinds == ["80,code=sm_80", "90a,code=sm_90a", "90,code=compute_90"]


@pytest.mark.parametrize(
    ("text", "sm", "ptx"),
    [
        ("9.0", ("90",), ()),
        ("7.5;8.6+PTX", ("75", "86"), ("86",)),
        ("12.0+PTX 8.0", ("80", "120"), ("120",)),
        ("8.0, 9.0a", ("80", "90a"), ()),
    ],
)
def test_torchs_list_is_parsed_and_written(monkeypatch, text, sm, ptx):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    chosen = architectures.architectures_for([(7, 5)], set())
    assert chosen == Architectures(sm, ptx)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen.torch_list())
    assert architectures.architectures_for([], set()) == chosen


def test_another_list_is_an_error_that_shows_one(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;Hopper")
    with pytest.raises(ValueError, match=r"must list compute capabilities such as '8.6;9.0\+PTX', got 'Hopper'"):
        architectures.architectures_for([], {"80"})


NVCC_13 = {"75", "80", "86", "87", "88", "89", "90", "100", "103", "110", "120", "121"}


@pytest.mark.parametrize(
    ("capabilities", "known", "sm", "ptx"),
    [
        ([], NVCC_13, ("75", "80", "86", "90", "100", "120"), ("90",)),
        ([], {"75", "80", "86", "87", "89"}, ("75", "80", "86"), ("86",)),
        ([], {"70", "75", "80", "86", "89", "90"}, ("75", "80", "86", "90"), ("90",)),
        ([(8, 9)], NVCC_13, ("89",), ("89",)),
        ([(9, 0), (8, 6), (9, 0)], NVCC_13, ("86", "90"), ("90",)),
        ([(12, 0)], {"80", "90"}, (), ("90",)),  # newer than nvcc: the driver compiles the newest PTX
        ([(6, 1), (8, 6)], NVCC_13, ("86",), ("86",)),  # an old card beside one that serves
    ],
)
def test_without_a_list_the_gpus_decide_and_without_gpus_the_common_ones(monkeypatch, capabilities, known, sm, ptx):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    chosen = architectures.architectures_for(capabilities, known)
    assert chosen == Architectures(sm, ptx)
    assert all(chosen.run_on(capability) for capability in capabilities if capability >= architectures.OLDEST)


def test_a_gpu_too_old_for_voxelfield_is_an_error(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with pytest.raises(ValueError, match=r"compute capability 7.5 or later, got 6.1"):
        architectures.architectures_for([(6, 1)], NVCC_13)


# --- which CUDA module is taken -------------------------------------------------------------------------------------


@pytest.fixture
def machine(packaged, tmp_path, monkeypatch):
    """A machine with a driver for CUDA 13 and an nvcc that compiles nothing; returns a function that sets its GPUs."""
    nvcc = """case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
--list-gpu-arch) echo compute_80; echo compute_86; echo compute_90 ;;
*) exit 1 ;;
esac"""
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "toolkit", nvcc)))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    for name in ("TORCH_CUDA_ARCH_LIST", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(architectures, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(_library, "_loaded", {"_C": Path("already")})

    def show(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(architectures, "visible_capabilities", lambda: capabilities)
        monkeypatch.setattr(compiling, "visible_capabilities", lambda: capabilities)

    return show


def test_two_machines_on_one_home_each_take_and_build_their_own(machine):
    digest = sources.source_digest()
    machine((8, 6))
    first = compiling.module_directory("_C_cuda")
    ada = forge(first / "_C_cuda.abi3.so", digest, 13, "86", "86")
    assert _library._find("_C_cuda")[0] == ada
    machine((8, 0))
    assert _library._find("_C_cuda")[0] is None
    (misfit,) = reasons("_C_cuda")
    assert misfit == (
        f"{ada} was compiled for compute capability 8.6 and PTX of 8.6, but a GPU here has compute capability 8.0"
    )
    second = compiling.module_directory("_C_cuda")
    assert second != first
    ampere = forge(second / "_C_cuda.abi3.so", digest, 13, "80", "80")
    assert _library._find("_C_cuda")[0] == ampere
    machine((8, 6), (8, 0))
    assert _library._find("_C_cuda")[0] == ampere, "machine code for 8.0 runs on 8.6"
    machine((8, 0), (7, 5))
    assert _library._find("_C_cuda")[0] is None, "a module must serve every GPU"


@pytest.mark.parametrize(
    ("stamp", "reason"),
    [
        (
            {"cuda": 14, "sm": "90"},
            r"needs a driver for CUDA 14 .*, but this machine's driver serves CUDA 13.0 at most",
        ),
        ({"cuda": 13, "sm": "80,86"}, "compute capability 8.0, 8.6, but a GPU here has compute capability 9.0"),
        (
            {"cuda": 13, "sm": "90", "variant": "VOXELFIELD_SCALAR_ATOMICS"},
            "was compiled with VOXELFIELD_SCALAR_ATOMICS, but NVCC_APPEND_FLAGS asks for none",
        ),
    ],
)
def test_a_prebuilt_module_that_fits_not_is_rebuilt_or_the_error_says_why(
    machine, clone, installed, monkeypatch, caplog, stamp, reason
):
    machine((9, 0))
    monkeypatch.setattr(sources, "_PACKAGE", installed / "voxelfield")
    wheel = forge(installed / "voxelfield" / "_C_cuda.abi3.so", sources.source_digest(), **stamp)
    for _ in range(2):  # nothing is compiled a second time
        with (
            caplog.at_level(logging.WARNING, logger="voxelfield"),
            pytest.raises(RuntimeError, match="could not compile its CUDA kernels") as caught,
        ):
            _library.ensure_loaded("cuda")
        assert str(wheel) in str(caught.value)
        assert re.search(reason, str(caught.value))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert warnings[0].startswith(f"voxelfield: ignoring {wheel} ")
    assert "compiling them once for compute capability 9.0 and PTX of 9.0 into " in warnings[1]
    assert "_C_cuda" not in _library.loaded_modules()


def test_without_nvcc_the_error_names_it_and_the_prebuilt_module_that_lacks_the_gpu(machine, monkeypatch, installed):
    machine((9, 0))
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", path_without_nvcc())
    monkeypatch.setattr(sources, "_PACKAGE", installed / "voxelfield")
    wheel = forge(installed / "voxelfield" / "_C_cuda.abi3.so", sources.source_digest(), 13, "80")
    with pytest.raises(RuntimeError, match="needs nvcc: put it on the PATH or set CUDA_HOME") as caught:
        _library.ensure_loaded("cuda")
    assert f"{wheel} was compiled for compute capability 8.0, but a GPU here" in str(caught.value)


def test_nothing_is_compiled_by_an_nvcc_that_is_newer_than_the_driver(machine, monkeypatch, caplog):
    machine((9, 0))
    monkeypatch.setattr(architectures, "driver_cuda", lambda: (12, 8))
    expected = (
        r"nvcc needs a driver for CUDA 13 \(version 580 or later\), but this machine's driver "
        r"serves CUDA 12\.8 at most: update the driver, or set CUDA_HOME"
    )
    with pytest.raises(KernelsUnavailableError, match=expected):
        _library.ensure_loaded("cuda")
    assert not caplog.records


def test_a_list_that_leaves_out_a_gpu_is_an_error_before_anything_is_compiled(machine, monkeypatch, caplog):
    machine((9, 0))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;8.6")
    with pytest.raises(RuntimeError, match=r"must include this machine's GPUs, got '8.0;8.6' and .*; add 9.0"):
        _library.ensure_loaded("cuda")
    assert not caplog.records


def test_without_a_visible_gpu_fake_cuda_tensors_need_the_schemas_only(machine):
    machine()
    assert _library.ensure_loaded("cuda")
    assert "_C_cuda" not in _library.loaded_modules()


# --- wheels of compiled kernels, which have no sources --------------------------------------------------------------


@pytest.fixture
def wheel(machine, tmp_path, monkeypatch):
    """The folder of a package without sources, on a machine that has an nvcc and must not call it."""
    package = tmp_path / "site" / "voxelfield"
    package.mkdir(parents=True)
    monkeypatch.setattr(sources, "_PACKAGE", package)
    monkeypatch.setattr(_library.subprocess, "run", lambda *_, **__: pytest.fail("a wheel started a process"))
    return package


def test_a_wheel_serves_every_torch_without_its_sources(wheel, machine):
    machine((8, 9), (12, 1), (13, 0))
    module = forge(wheel / "_C_cuda.abi3.so", "0123ab", 13, "86,120", "90")
    assert _library._find("_C_cuda")[0] == module


def refusal(half: str) -> str:
    """Returns the line with which loading is refused, the second time too."""
    told = []
    for _ in range(2):
        with pytest.raises(KernelsUnavailableError) as caught:
            _library.ensure_loaded(half)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == 1
    return told[0]


@pytest.mark.parametrize(("half", "module"), [("cuda", "_C_cuda"), ("cpu", "_C")])
def test_a_wheel_without_a_half_says_so_in_one_line_and_compiles_nothing(wheel, machine, monkeypatch, half, module):
    machine((9, 0))
    if half == "cpu":
        monkeypatch.setattr(_library, "_loaded", {})
    expected = f"the wheel in {wheel} has no {module}: install voxelfield from its sources, which"
    assert refusal(half).startswith(expected)


OLD_DRIVER = "needs a driver for CUDA 13 (version 580 or later), but this machine"
OLD_GPU = "was compiled for compute capability 7.5, 8.6 and PTX of 9.0, but a GPU here has compute capability 6.1"


@pytest.mark.parametrize(
    ("stamp", "gpu", "driver", "reason"),
    [
        ({"sm": "90"}, (9, 0), (12, 8), f"{OLD_DRIVER}'s driver serves CUDA 12.8 at most: update the driver"),
        ({"sm": "90"}, (9, 0), (0, 0), f"{OLD_DRIVER} has none: update"),
        ({"sm": "75,86", "ptx": "90"}, (6, 1), (13, 0), f"{OLD_GPU}: use tensors on the CPU"),
        (
            {"sm": "90", "variant": "VOXELFIELD_X"},
            *((9, 0), (13, 0)),
            "was compiled with VOXELFIELD_X, but NVCC_APPEND_FLAGS asks for none: change that",
        ),
    ],
)
def test_a_wheel_that_does_not_fit_says_so_in_one_line_and_compiles_nothing(
    wheel, machine, monkeypatch, stamp, gpu, driver, reason
):
    machine(gpu)
    monkeypatch.setattr(architectures, "driver_cuda", lambda: driver)
    module = forge(wheel / "_C_cuda.abi3.so", "0123ab", cuda=13, **stamp)
    assert refusal("cuda").startswith(f"{module} {reason}")


def test_a_damaged_module_of_a_wheel_asks_for_another_installation(wheel, monkeypatch):
    monkeypatch.setattr(_library, "_loaded", {})
    module = forge(wheel / "_C.abi3.so", "0123ab")
    module.write_bytes(module.read_bytes() + b"\0")
    with pytest.raises(KernelsUnavailableError, match=r"is damaged, or was changed: .*: reinstall voxelfield$"):
        _library.ensure_loaded("cpu")


def test_a_torch_that_is_too_old_is_named_before_anything_is_loaded(wheel, monkeypatch):
    monkeypatch.setattr(_library, "_loaded", {})
    forge(wheel / "_C.abi3.so", "0123ab")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(KernelsUnavailableError, match=r"needs torch 2.10 or later, got 2.9.1\+cu128: pip install"):
        _library.ensure_loaded("cpu")


# --- loading --------------------------------------------------------------------------------------------------------


def test_a_device_without_kernels_is_named():
    with pytest.raises(NotImplementedError, match="kernels for cpu and cuda tensors, got a tensor on 'xpu'"):
        _library.ensure_loaded("xpu")


@pytest.mark.skipif(sys.platform != "linux", reason="needs the linker of Linux")
def test_a_static_standard_library_stays_within_the_module(tmp_path):
    # Of two copies in a process, one would format numbers with the locales of the other.
    source, module = tmp_path / "number.cpp", tmp_path / "number.so"
    source.write_text(
        "#include <sstream>\n"
        'extern "C" int digits(int value) { std::ostringstream s; s << value; return s.str().size(); }\n'
    )
    (described,) = compiling.extensions([compiling.CPU_MODULE])
    folders = [f"-L{folder}" for folder in library_paths()]
    command = ["c++", "-shared", "-fPIC", "-static-libstdc++", str(source), "-o", str(module), *folders]
    subprocess.run([*command, *described.extra_link_args], check=True)
    exported = subprocess.run(["nm", "-DC", "--defined-only", str(module)], check=True, capture_output=True, text=True)
    assert "digits" in exported.stdout
    assert "std::ostream" not in exported.stdout
    assert "std::locale" not in exported.stdout


def test_every_cuda_source_is_compiled_once(tmp_path):
    root = sources.source_root()
    found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.cu"))
    assert set(LONG) <= set(found)
    units = bundles(root)
    assert sorted(source for unit in units.values() for source in unit) == found
    assert len(units) < len(found)
    written = write_bundles(root, tmp_path)
    assert [path.stem.partition("_")[2] for path in written] == list(units)
    assert written == sorted(written), "setuptools sorts sources"
    times = [path.stat().st_mtime_ns for path in written]
    assert [path.stat().st_mtime_ns for path in write_bundles(root, tmp_path)] == times, "written again"


# --- damage, and folders that cannot be written to ------------------------------------------------------------------


@pytest.mark.usefixtures("packaged")
def test_a_module_that_differs_from_its_digest_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    module = forge(compiling.module_directory("_C") / "_C.abi3.so", sources.source_digest())
    assert _library._find("_C")[0] == module
    content = module.read_bytes()
    module.write_bytes(content + b"\0")
    assert _library._find("_C")[0] is None
    digest = f"{module.name}.digest"
    assert reasons("_C") == [f"{module} is damaged, or was changed: {digest} does not match"]
    module.write_bytes(content)
    sources.digest_path(module).unlink()
    assert reasons("_C") == [f"{module} has no digest beside it ({digest}) to be checked against"]


@pytest.mark.usefixtures("packaged")
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")])
def test_a_cache_in_which_nothing_can_be_locked_is_named(tmp_path, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(_library.FileLock, "acquire", refuse)
    with pytest.raises(KernelsUnavailableError, match=rf"{error.strerror}.*; set TORCH_EXTENSIONS_DIR to a"):
        _library.ensure_loaded("cpu")
