from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from voxelfield import files
from voxelfield.files import MARK, atomic_path, atomic_write, is_replaceable, open_regular, read_regular


def test_content_replaces_the_previous_file(tmp_path):
    path = tmp_path / "folder" / "file.json"
    for content in (b"first, longer", b"second"):
        with atomic_write(path) as file:
            file.write(content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failure_keeps_the_previous_file_and_leaves_nothing(tmp_path, error):
    path = tmp_path / "file.json"
    path.write_bytes(b"previous")

    def write_half():
        with atomic_write(path) as file:
            file.write(b"half")
            file.flush()
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_bytes() == b"previous"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_visible_before_the_end(tmp_path):
    path = tmp_path / "file.json"
    with atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        assert all(other.name.startswith(".") for other in tmp_path.iterdir())
    assert path.read_bytes() == b"half"


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_permissions_follow_the_umask(tmp_path):
    previous = os.umask(0o022)
    try:
        with atomic_write(tmp_path / "file") as file:
            file.write(b"x")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_a_relative_path_without_folder_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with atomic_write("file") as file:
        file.write(b"x")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_atomic_path_keeps_the_suffix_and_wants_a_file(tmp_path):
    path = tmp_path / "video.mp4"
    with atomic_path(path) as temporary:
        assert temporary.parent == path.parent
        assert temporary.suffix == ".mp4"
        temporary.write_bytes(b"x")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError), atomic_path(path):
        pass
    assert path.read_bytes() == b"x"


@pytest.mark.skipif(os.name != "posix", reason="POSIX system calls")
def test_data_is_on_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    events = []
    sync, replace = files._sync, type(tmp_path).replace

    def note_replace(path, target):
        events.append("renamed")
        return replace(path, target)

    monkeypatch.setattr(files, "_sync", lambda path: (events.append(path.suffix or "folder"), sync(path)))
    monkeypatch.setattr(type(tmp_path), "replace", note_replace)
    (tmp_path / "run").mkdir()
    with atomic_write(tmp_path / "run" / "file.json") as file:
        file.write(b"x")
    assert events == [".json", "renamed", "folder"]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    kept = [".hidden", ".lock", "file.tmp", ".file.tmp", "notes.12345678.tmp.pt"]
    with atomic_path(tmp_path / "checkpoint.pt") as first, atomic_path(tmp_path / "bare") as second:
        names = [first.name, second.name]
        first.touch()
        second.touch()
    for name in (*kept, *names):
        (tmp_path / name).touch()
    for path in (tmp_path / "checkpoint.pt", tmp_path / "bare"):
        path.unlink()
    files.remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_regular_files_are_read_and_links_to_them(tmp_path):
    (tmp_path / "file").write_bytes(b"content\r\n")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        assert read_regular(tmp_path / name) == b"content\r\n"
    with pytest.raises(FileNotFoundError, match="nothing"):
        open_regular(tmp_path / "nothing")


@pytest.mark.skipif(os.name != "posix", reason="named pipes and device files")
def test_what_may_never_end_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path, kind in (("pipe", "a named pipe"), ("link", "a named pipe"), ("", "a folder"), ("/dev/zero", "a device")):
        with pytest.raises(ValueError, match=f"must be a file, got {kind}"):
            read_regular(tmp_path / path)


def fail_to_sync(monkeypatch: pytest.MonkeyPatch, number: int, *, folders: bool) -> None:
    sync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == folders:
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.skipif(os.name != "posix", reason="POSIX system calls")
@pytest.mark.parametrize("folders", [True, False])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_that_cannot_flush_is_written_to_all_the_same(tmp_path, monkeypatch, number, folders):
    fail_to_sync(monkeypatch, number, folders=folders)
    with atomic_write(tmp_path / "file.json") as file:
        file.write(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX system calls")
def test_a_disk_that_fails_to_flush_is_an_error(tmp_path, monkeypatch):
    fail_to_sync(monkeypatch, errno.EIO, folders=False)
    lost = pytest.raises(OSError, match=r"Input/output error: .*file\.json")
    with lost, atomic_write(tmp_path / "file.json") as file:
        file.write(b"lost")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 251 + ".png", "\N{SNOWMAN}" * 85, "a." + "y" * 250])
def test_any_name_that_the_file_system_takes_can_be_written(tmp_path, name):
    with atomic_write(tmp_path / name) as file:
        file.write(b"x")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with atomic_path(tmp_path / name) as temporary:
        temporary.touch()
        files.remove_temporaries(tmp_path)
        assert not temporary.exists(), "a killed process would leave it"
        temporary.touch()


def test_an_error_that_names_no_file_gets_the_name(tmp_path):
    def write(error: OSError) -> None:
        with atomic_path(tmp_path / "file.json"):
            raise error

    with pytest.raises(OSError, match=r"No space left on device: '.*/file\.json'"):
        write(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(FileNotFoundError, match=r"'other\.json'"):
        write(FileNotFoundError(errno.ENOENT, "No such file or directory", "other.json"))
    with pytest.raises(OSError, match=r"^ffmpeg stopped$"):
        write(OSError("ffmpeg stopped"))


def test_only_what_voxelfield_has_written_may_be_replaced(tmp_path):
    path = tmp_path / "view.png"
    assert is_replaceable(path)
    for content, expected in ((b"", False), (b"a photograph", False), (100 * b"x" + MARK.encode(), True)):
        path.write_bytes(content)
        assert is_replaceable(path) == expected
    assert not is_replaceable(tmp_path)
    assert not is_replaceable(path / "below.png"), "a file in the place of its folder"
    (tmp_path / "link.png").symlink_to(path)
    assert not is_replaceable(tmp_path / "link.png")
    os.mkfifo(tmp_path / "pipe.png")
    assert not is_replaceable(Path(tmp_path / "pipe.png")), "reading a pipe would wait forever"
    with pytest.raises(OSError, match="File name too long"):
        is_replaceable(tmp_path / ("x" * 256))
