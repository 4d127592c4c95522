"""A disk that is full, so that each file of a run in turn is the one that cannot be written."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from short_runs import finish, run, start, wait_for_checkpoint
from test_kills import tensors
from warm_python import warm_python

from voxelfield.run_directory import checkpoints
from voxelfield.trained.checkpoint_file import load_checkpoint

pytestmark = pytest.mark.sweep

COMMAND = ("resume=auto", "trainer.evaluation.video_frames=2", "trainer.evaluation.views=2")
RESULTS = {"metrics.json", "per_view.csv", "model.safetensors", "orbit.mp4", "test"}
PAGE = 4096


@contextlib.contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """Mounts a file system in memory of a size in bytes, where that is allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def enlarge(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def check_what_is_there(directory: Path) -> set[str]:
    """Opens every file of a run; none may be broken. Returns which results there are."""
    left = [path.name for path in directory.rglob("*") if ".tmp" in path.name or path.name == ".lock"]
    assert not left, f"left behind: {left}"
    for path in checkpoints(directory):
        load_checkpoint(path)
    for path in (directory / "test").glob("*.png"):
        with Image.open(path) as image:
            image.load()
    found = {name for name in RESULTS if (directory / name).exists()}
    if "metrics.json" in found:
        assert json.loads((directory / "metrics.json").read_text())["steps"] == 20
    if "per_view.csv" in found:
        assert len((directory / "per_view.csv").read_text().splitlines()) == 3
    if "model.safetensors" in found:
        assert load_file(directory / "model.safetensors")
    if "orbit.mp4" in found:
        with av.open(str(directory / "orbit.mp4")) as container:
            assert len(list(container.decode(video=0))) == 2
    return found


def fill_up(folder: Path, sizes: list[int], whole: Path) -> Counter[str]:
    """Runs on a disk of each size, then resumes with more room; returns what was lost, and how often.

    It ends once everything has had room twice.
    """
    expected = tensors({part: load_checkpoint(whole)[part] for part in ("model", "optimizer", "rng")})
    lost: Counter[str] = Counter()
    for size in sizes:
        if lost["nothing"] == 2:
            break
        lost["runs"] += 1
        with disk(folder / "disk", size) as there:
            directory = there / "run"
            status, text = run(*COMMAND, f"hydra.run.dir={directory}")
            found = check_what_is_there(directory) if directory.is_dir() else set()
            saved = checkpoints(directory) if directory.is_dir() else []
            complete = found == RESULTS and len(list((directory / "test").glob("*.png"))) == 2
            last = [path for path in saved if path.name == "checkpoint_0000020.pt"]
            # True: 0 only where all is there. What TensorBoard lacks is told, and is no failure.
            assert (status == 0) == (complete and bool(last)), f"{size} bytes: {status}, {sorted(found)}\n{text}"
            assert status in (0, 1, 2), text
            lost["nothing"] += status == 0
            if status:
                assert "No space left on device" in text or "full disk" in text, f"{size} bytes:\n{text}"
                lost.update(RESULTS - found or {"pictures"} if not complete else ())
                lost["the last checkpoint"] += not last
                lost["every file"] += not found and not saved
            enlarge(there, 64 << 20)
            status, text = run(*COMMAND, f"hydra.run.dir={directory}")
            assert status == 0, text
            assert check_what_is_there(directory) == RESULTS
            if not last and complete:  # all results were there, so that nothing was trained again
                assert "there is no checkpoint of its last step" in text
                continue
            again = tensors({part: load_checkpoint(directory)[part] for part in ("model", "optimizer", "rng")})
            assert all(np.array_equal(again[name], expected[name]) for name in expected), f"{size} bytes"
    return lost


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that had room for everything."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    status, text = run(*COMMAND, f"hydra.run.dir={directory}")
    assert status == 0, text
    assert check_what_is_there(directory) == RESULTS
    return directory


def pages(directory: Path) -> int:
    """Returns the bytes that a directory takes on a file system in memory, at the most."""
    return sum(-(-path.stat().st_size // PAGE) + 1 for path in directory.rglob("*")) * PAGE


def test_a_full_disk_breaks_nothing(tmp_path, whole):
    size = pages(whole)
    assert fill_up(tmp_path, [size // 2], whole)["runs"] == 1


def command(verb: str, run_directory: Path, *options: object) -> tuple[int, list[str]]:
    """Runs a verb on a run; returns the exit status and the lines that it printed."""
    given = (str(run_directory), "--device", "cpu", *map(str, options))
    done = warm_python.run("-m", "voxelfield", verb, *given)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_frames_continue_once_a_full_disk_has_room_again(tmp_path, whole):
    exr = pytest.importorskip("OpenEXR")
    with disk(tmp_path / "disk", 64 * PAGE) as there:
        frames = there / "frames"
        options = ("--format", "exr", "--frames", 6, "--size", "64x64", "--supersampling", 1, "--out", frames)
        status, lines = command("render", whole, *options)
        assert status == 1, lines
        assert "could not be written" in lines[-1]
        assert str(frames) in lines[-1]
        written = sorted(frames.glob("*.exr"))
        assert 0 < len(written) < 6
        for path in written:
            assert exr.File(str(path)).channels()["Z"].pixels.shape == (64, 64)
        assert not [path.name for path in frames.iterdir() if ".tmp" in path.name]
        enlarge(there, 16 << 20)
        status, lines = command("render", whole, *options)
        assert status == 0, lines
        assert any(f"which already had {len(written)}" in line for line in lines)
        assert len(list(frames.glob("*.exr"))) == 6


def test_a_mesh_on_a_full_disk_appears_with_its_material_or_not_at_all(tmp_path, whole):
    pytest.importorskip("xatlas")
    options = ("--texture", 64, "--max-faces", 400, "--resolution", 16, "--level", 0.1, "--mesh")
    status, lines = command("export", whole, *options, tmp_path / "mesh.obj")
    assert status == 0, lines
    needed = [-(-(tmp_path / f"mesh{suffix}").stat().st_size // PAGE) for suffix in (".obj", ".mtl", ".png")]
    # Besides the files, the file system's root takes a page.
    for size in (needed[0], sum(needed) - 1):
        with disk(tmp_path / "disk", size * PAGE) as there:
            status, lines = command("export", whole, *options, there / "mesh.obj")
            assert status == 1, lines
            assert "No space left on device" in lines[-1]
            assert f"{there}/mesh." in lines[-1]
            assert list(there.iterdir()) == []


WITHOUT_FLUSHING = """
import errno, os, stat, sys
from voxelfield.cli.train import main

flush = os.fsync

def fail_for_folders(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    flush(descriptor)

os.fsync = fail_for_folders
main(sys.argv[1:])
"""


def test_a_file_system_that_cannot_flush_folders_takes_a_whole_run(tmp_path):
    directory = tmp_path / "run"
    for expected in ("training starts from scratch", "is finished: PSNR"):
        program = ("-c", WITHOUT_FLUSHING)
        status, text, _ = finish(start(*COMMAND, f"hydra.run.dir={directory}", program=program, merged=True))
        assert status == 0, text
        assert expected in text
        assert "could not be written" not in text
    assert check_what_is_there(directory) == RESULTS


@pytest.mark.long
def test_a_disk_that_is_full_at_every_write_breaks_nothing(tmp_path, whole, capsys):
    # While a checkpoint is written, the one before it is there too.
    sizes = list(range(2 * PAGE, 4 * pages(whole), 2 * PAGE))
    lost = fill_up(tmp_path, sizes, whole)
    with capsys.disabled():
        print(f"\n{dict(lost)}")
    assert all(lost[name] > 0 for name in (*RESULTS, "the last checkpoint", "every file"))
    assert lost["nothing"] == 2


def test_a_directory_that_becomes_read_only_keeps_what_it_has(tmp_path):
    directory = tmp_path / "run"
    running = start(*COMMAND, "trainer.steps=1000000", f"hydra.run.dir={directory}", merged=True)
    wait_for_checkpoint(running, directory)
    # What is open already, as the log is, would keep the file system itself from becoming read-only.
    mounted = subprocess.run(["mount", "--bind", str(directory), str(directory)], capture_output=True, check=False)
    try:
        if mounted.returncode == 0:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
            kept = checkpoints(directory)
        running.send_signal(signal.SIGTERM)
        status, text, _ = finish(running)
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(directory)], check=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    assert status == 1, text
    assert "could not be written: Read-only file system" in text
    assert text.splitlines()[-1].endswith(f"continue with: voxelfield train resume={kept[-1]}")
    assert checkpoints(directory) == kept
    load_checkpoint(kept[-1])
