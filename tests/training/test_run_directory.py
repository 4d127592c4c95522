"""One run at a time in a directory, and the files that tell of an earlier one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lock_holder import end, holder
from warm_python import Running

from voxelfield import run_directory
from voxelfield.run_directory import RESULTS, DirectoryInUseError, RunDirectoryLock, check_ended
from voxelfield.runs.train import check_results, earlier_run


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Running]:
    """Another process, which holds the directory ``run``."""
    with holder(tmp_path / "run") as process:
        yield process


def test_a_directory_is_for_one_process_until_that_ends_however_it_does(tmp_path, other):
    directory = tmp_path / "run"
    with pytest.raises(
        DirectoryInUseError, match=rf"^hydra.run.dir .* process {other.pid} on .* is using {directory}$"
    ):
        RunDirectoryLock(directory)
    with pytest.raises(DirectoryInUseError, match=rf"^resume .* process {other.pid} on .* is using {directory}$"):
        check_ended(directory)
    end(other)
    check_ended(directory)
    with RunDirectoryLock(directory):
        assert (directory / ".lock").is_file()
    assert list(directory.iterdir()) == []


def write_as_hydra_does(directory: Path) -> None:
    (directory / ".hydra").mkdir()
    (directory / ".hydra" / "config.yaml").touch()
    (directory / "train.log").touch()


def test_a_directory_made_for_a_run_that_never_began_goes_again(tmp_path):
    with RunDirectoryLock(tmp_path / "refused"):
        write_as_hydra_does(tmp_path / "refused")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("why", ["training began", "something is there", "it was there before"])
def test_other_directories_stay(tmp_path, why):
    directory = tmp_path / "run"
    if why == "it was there before":
        directory.mkdir()
    with RunDirectoryLock(directory) as lock:
        write_as_hydra_does(directory)
        if why == "training began":
            lock.created = False
        if why == "something is there":
            (directory / "notes.txt").touch()
    assert (directory / ".hydra" / "config.yaml").is_file()
    assert (directory / "train.log").is_file()
    assert not (directory / ".lock").exists()


def test_a_directory_is_locked_once_and_released_once(tmp_path):
    lock = RunDirectoryLock(tmp_path / "run")
    with pytest.raises(DirectoryInUseError, match=rf"process {os.getpid()} on .* is using {tmp_path / 'run'}$"):
        RunDirectoryLock(tmp_path / "run")
    lock.release()
    assert not (tmp_path / "run").exists()
    with RunDirectoryLock(tmp_path / "run"):
        lock.release()
        lock.renew()
        assert (tmp_path / "run" / ".lock").is_file(), "a lock that has ended changes nothing"


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)
    with RunDirectoryLock(tmp_path / "run"):
        check_ended(tmp_path / "run")
    assert "cannot be locked (Operation not supported)" in caplog.text


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / ".checkpoint_0000003.0123abcd.tmp.pt").touch()
    with RunDirectoryLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_what_an_earlier_run_left_is_listed(tmp_path):
    assert earlier_run(tmp_path / "nowhere") == []
    for name in (".lock", "train.log", "notes.txt"):
        (tmp_path / name).touch()
    assert earlier_run(tmp_path) == []
    for name in ("checkpoint_0000003.pt", "checkpoint_0000009.pt", "metrics.json", "events.out.tfevents.1.a"):
        (tmp_path / name).touch()
    assert earlier_run(tmp_path) == ["checkpoint_0000009.pt", "metrics.json", "events.out.tfevents.1.a"]


def test_a_directory_that_goes_away_is_made_and_locked_again(tmp_path, caplog):
    directory = tmp_path / "run"
    with RunDirectoryLock(directory) as lock:
        shutil.rmtree(directory)
        lock.renew()
        assert [path.name for path in directory.iterdir()] == [".lock"]
        assert f"{directory} was deleted, with everything that this run had written there, or moved away" in caplog.text
        lock.renew()
    assert caplog.text.count("created again") == 1


def test_files_of_another_run_in_the_place_of_a_moved_directory_stay(tmp_path):
    directory = tmp_path / "run"
    with RunDirectoryLock(directory) as lock:
        directory.rename(tmp_path / "elsewhere")
        with holder(directory) as process:
            with pytest.raises(DirectoryInUseError, match=f"process {process.pid} on .* is using {directory}$"):
                lock.renew()
            lock.release()
            assert (directory / ".lock").is_file()


def test_a_lock_that_is_a_link_overwrites_nothing(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        RunDirectoryLock(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / "run" / ".lock").unlink()
    with RunDirectoryLock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("name", [*RESULTS, "IMG_0815.JPG"])
def test_results_of_something_else_are_not_replaced(tmp_path, name):
    check_results(tmp_path / "new")
    check_results(tmp_path)
    (tmp_path / "notes.txt").touch()
    check_results(tmp_path)
    (tmp_path / name).mkdir() if name in ("train", "val", "test") else (tmp_path / name).touch()
    with pytest.raises(
        ValueError, match=rf"must be a new folder or .*, got {tmp_path}, which contains {re.escape(name)} of"
    ):
        check_results(tmp_path)
    (tmp_path / ".hydra").mkdir()
    check_results(tmp_path)
    (tmp_path / ".hydra").rmdir()
    (tmp_path / "checkpoint_0000003.pt").touch()
    check_results(tmp_path)
