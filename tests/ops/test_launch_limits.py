"""Shared memory: every launch fits every GPU, and the ops stay right on GPUs that allow less than the one at hand."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from voxelfield._build.sources import source_root
from voxelfield.ops import mlp

TESTS = Path(__file__).parents[1]
# What a block may have by opting in, by compute capability (CUDA C++ Programming Guide, "Technical Specifications").
LIMITS = {"7.5": 65536, "8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "12.0": 101376}
SIZES = (1, 17, 33, 64, 100, 128)
FIXED = ("gather", "splat_tiled", "render_grid")


@pytest.fixture(scope="module")
def launch_bytes(tmp_path_factory):
    """Computes a launch's bytes by the headers that the launch itself goes by, which are plain C++."""
    library = tmp_path_factory.mktemp("launch_bytes") / "launch_bytes.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", f"-I{source_root()}"]
    subprocess.run([*command, str(TESTS / "launch_bytes.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).launch_shared_bytes
    function.restype = ctypes.c_int64

    def call(launch, sizes, limit):
        return function(launch.encode(), (ctypes.c_int * len(sizes))(*sizes), len(sizes), limit)

    return call


@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("launch", ["mlp", "mlp_backward"])
def test_a_network_of_any_shape_fits_every_gpu(launch_bytes, launch, arch):
    for layers in range(2, 17):
        for width in SIZES:
            for into in SIZES:
                for out in (1, 9, 128):
                    taken = launch_bytes(launch, (into, *[width] * (layers - 1), out), LIMITS[arch])
                    assert 0 <= taken <= LIMITS[arch]


@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("launch", ["march_visible", "render_pyramid_image"])
@pytest.mark.parametrize("width", [64, 128])
def test_a_field_of_any_shape_fits_every_gpu(launch_bytes, launch, arch, width):
    for layers in (2, 3, 4):
        assert 0 < launch_bytes(launch, (width, layers), LIMITS[arch]) <= LIMITS[arch]


@pytest.mark.parametrize("launch", FIXED)
def test_launches_of_a_fixed_size_fit_every_gpu(launch_bytes, launch):
    assert 0 < launch_bytes(launch, (), 0) <= min(LIMITS.values())


def test_shared_memory_does_not_grow_with_depth(launch_bytes):
    for launch in ("mlp", "mlp_backward"):
        bytes_by_depth = {launch_bytes(launch, (32, *[128] * layers, 3), 65536) for layers in range(3, 16)}
        assert len(bytes_by_depth) == 1


def test_too_little_for_a_warp_is_told(launch_bytes):
    assert launch_bytes("mlp_backward", (32, 128, 3), 4096) == -1
    assert launch_bytes("render_pyramid_image", (128, 4), 16384) == -1


# --- on a GPU that is told to allow less


def run_capped(limit, *command):
    # The clone's package, not one that may be installed.
    path = os.pathsep.join(filter(None, (str(TESTS.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "VOXELFIELD_SHARED_MEMORY_LIMIT": str(limit)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=TESTS, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("limit", [LIMITS["7.5"], LIMITS["8.6"], LIMITS["8.0"]])
@pytest.mark.parametrize("ops", ["ops/test_mlp.py", "ops/test_march_visible.py", "ops/test_render_pyramid.py"])
def test_ops_are_right_under_a_limit(limit, ops):
    status, output = run_capped(limit, "-m", "pytest", "-q", "-x", "-m", "cuda", ops)
    assert status == 0, output[-3000:]


NETWORK = """
import torch
from voxelfield.ops import mlp
weights = [torch.randn(o, i, device="cuda") for i, o in ((32, 128), (128, 128), (128, 128), (128, 3))]
input = torch.randn(100, 32, device="cuda", dtype=torch.float16, requires_grad=True)
for _ in range(3):
    mlp(input, weights).sum().backward()
"""


@pytest.mark.cuda
def test_a_slower_path_is_said_once():
    status, output = run_capped(LIMITS["7.5"], "-c", NETWORK)
    assert status == 0, output
    assert output.count("mlp: 84224 bytes do not fit") == 1
    assert output.count("mlp_backward: 205056 bytes do not fit") == 1


@pytest.mark.cuda
@pytest.mark.parametrize("limit", ["0", "-5", "many", "64K", "99999999999"])
def test_a_wrong_limit_is_named(limit):
    status, output = run_capped(limit, "-c", NETWORK)
    assert status != 0
    assert f"VOXELFIELD_SHARED_MEMORY_LIMIT must be a positive number of bytes, got '{limit}'" in output


@pytest.mark.cuda
def test_render_view_takes_over_where_nothing_fits():
    script = """
import warnings
import torch
from rendering.test_renderer import BACKGROUND, SETTINGS, make_occupancy, pyramid
from voxelfield import FieldRenderer
field = pyramid().cuda()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    renderer = FieldRenderer(field, make_occupancy("cuda"), SETTINGS, torch.tensor(BACKGROUND, device="cuda"))
print(renderer.backend, *(w.message for w in said))
"""
    status, output = run_capped(8192, "-c", script)
    assert status == 0, output
    assert "render_view render_pyramid_image does not fit the shared memory of cuda" in output


@pytest.mark.cuda
def test_threads_with_different_networks_do_not_disturb_one_another():
    generator = torch.Generator("cuda").manual_seed(1)

    def network(*sizes):
        weights = [
            torch.randn(out, into, device="cuda", generator=generator) * (2 / into) ** 0.5
            for into, out in pairwise(sizes)
        ]
        input = torch.randn(3000, sizes[0], device="cuda", dtype=torch.float16, generator=generator)
        return input, weights

    def gradients(input, weights):
        leaves = [x.detach().requires_grad_() for x in (input, *weights)]
        value = mlp(leaves[0], leaves[1:])
        return [value.detach(), *torch.autograd.grad(value.float().square().sum(), leaves)]

    networks = [
        network(32, 128, 16),
        network(32, 128, 128, 128, 3),
        network(16, *[128] * 5, 3),
        network(24, 128, 128, 9),
    ]
    expected = [gradients(*own) for own in networks]
    failed = []

    def work(index):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    torch.testing.assert_close(gradients(*networks[index]), expected[index], rtol=0, atol=0)
        except BaseException as error:
            failed.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(networks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
