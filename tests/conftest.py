"""Fixtures that every test shares."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Generator, Iterator

import covering
import pytest
import torch

pytest_plugins = ["missing_packages"]

REQUIRE_CUDA = os.environ.get("VOXELFIELD_REQUIRE_CUDA", "") == "1"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny scenes, which gain nothing from threads: beside a busy process, their waiting costs tenfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the op has kernels for."""
    return torch.device(request.param)


def _share(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"--share must be K/N with 1 <= K <= N, got {text}")
    return number, count


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="run the tests marked sweep as well")
    parser.addoption(
        "--share", type=_share, metavar="K/N", help="run only the K-th of N shares of the tests, from 1 to N"
    )
    parser.addoption("--long", action="store_true", help="run the tests marked long as well")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Several processes (``-n``) take whole files, in order: else each would train what the tests of a file share."""
    if config.getoption("numprocesses", None) and config.option.dist == "no":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def pytest_configure() -> None:
    # Processes side by side share the cores. With as many threads each as there are cores, most of the time goes into
    # waiting for one another.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(torch.get_num_threads() // workers, 1)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares the thousands of tests that are found from being searched for garbage, then and in every later search."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    covering.mark_sweeps(items)
    if share := config.getoption("--share"):
        number, count = share
        shares = {item: zlib.crc32(item.nodeid.encode()) % count + 1 for item in items}
        config.hook.pytest_deselected(items=[item for item in items if shares[item] != number])
        items[:] = [item for item in items if shares[item] == number]
    for mark in ("sweep", "long"):
        if config.getoption(f"--{mark}"):
            continue
        left_out = [item for item in items if item.get_closest_marker(mark)]
        # Tests requested by name run: a file, a test or a marked case.
        if 0 < len(left_out) < len(items):
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if REQUIRE_CUDA:
        pytest.fail("VOXELFIELD_REQUIRE_CUDA=1 but torch finds no CUDA device")
    pytest.skip("needs a CUDA device")
