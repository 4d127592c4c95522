"""Fixtures that every test shares."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

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


@pytest.fixture
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files that are begun in one second, TensorBoard reads the tenth of a process before the ninth."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))


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
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--sweep", action="store_true", help="run the tests marked sweep as well")
    parser.addoption(
        "--share", type=_share, metavar="K/N", help="of the tests marked sweep, run only the K-th of N shares"
    )
    parser.addoption("--long", action="store_true", help="run the tests marked long as well")


def _marks_left_out(config: pytest.Config) -> list[str]:
    """Returns the marks of tests that do not run unless they are asked for."""
    without_gpu = [] if REQUIRE_CUDA or torch.cuda.is_available() else ["cuda"]
    return without_gpu + [mark for mark in ("sweep", "slow", "long") if not config.getoption(f"--{mark}")]


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


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Makes no tests of cases that would be left out, which are most, unless the command line names their file."""
    result = yield
    covering.mark_sweeps(metafunc)
    named = {Path(argument.partition("::")[0]).absolute() for argument in metafunc.config.args}
    if metafunc.definition.path not in named:
        left_out = set(_marks_left_out(metafunc.config))
        kept = [call for call in metafunc._calls if left_out.isdisjoint(mark.name for mark in call.marks)]
        # Without any case, pytest would call the test without its parameters.
        metafunc._calls = kept or metafunc._calls
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def deselect(left_out: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]

    if share := config.getoption("--share"):
        number, count = share
        sweeps = [item for item in items if item.get_closest_marker("sweep")]
        deselect([item for item in sweeps if zlib.crc32(item.nodeid.encode()) % count + 1 != number])
    for mark in _marks_left_out(config):
        left_out = [item for item in items if item.get_closest_marker(mark)]
        # Tests requested by name run: a file, a test or a marked case.
        if len(left_out) < len(items):
            deselect(left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if REQUIRE_CUDA:
        pytest.fail("VOXELFIELD_REQUIRE_CUDA=1 but torch finds no CUDA device")
    pytest.skip("needs a CUDA device")
