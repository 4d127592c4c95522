from __future__ import annotations

import os
import stat

import pytest

from voxelfield import files
from voxelfield.files import atomic_path, atomic_write, open_regular, read_regular, remove_temporaries


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
    names = []
    with atomic_path(tmp_path / "checkpoint.pt") as first, atomic_path(tmp_path / "bare") as second:
        names = [first.name, second.name]
        first.touch()
        second.touch()
    for name in (*kept, *names):
        (tmp_path / name).touch()
    for path in (tmp_path / "checkpoint.pt", tmp_path / "bare"):
        path.unlink()
    remove_temporaries(tmp_path)
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
