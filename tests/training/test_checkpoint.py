from __future__ import annotations

import errno
import os
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

import voxelfield.trained.checkpoint_file as checkpoint
from voxelfield.foundation.zero_packing import copy_without_zeros
from voxelfield.trained.checkpoint_file import (
    FORMAT,
    CheckpointError,
    CheckpointVersionError,
    checkpoint_path,
    load_checkpoint,
    load_newest,
    load_resolved,
    pack_checkpoint,
    resolve_checkpoint,
    write_checkpoint,
)


def test_what_is_wanted_is_loaded_to_the_device(tmp_path, device):
    state = {"grid": torch.zeros(100_000, device=device), "optimizer": torch.ones(3), "step": 3}
    write_checkpoint(tmp_path / "last.pt", pack_checkpoint(state))
    loaded = load_checkpoint(tmp_path / "last.pt", device, without=("optimizer",))
    assert loaded.keys() == {"format", "voxelfield", "grid", "step"}
    assert loaded["grid"].device.type == torch.device(device).type
    assert torch.equal(loaded["grid"], state["grid"])


def test_a_directory_means_its_newest_step(tmp_path):
    write_checkpoint(tmp_path / "last.pt", pack_checkpoint({"step": 4}))
    assert load_checkpoint(tmp_path)["step"] == 4, "without numbers, last.pt"
    for step in (500, 10_000_000, 9_000_000):
        write_checkpoint(checkpoint_path(tmp_path, step), pack_checkpoint({"step": step}))
    (tmp_path / "checkpoint_best.pt").write_bytes(b"not numbered")
    (tmp_path / "checkpoint_99999999.pt.bak").write_bytes(b"not a checkpoint's name")
    assert resolve_checkpoint(tmp_path) == checkpoint_path(tmp_path, 10_000_000)


class _FailingFile:
    """Passes on a number of writes, then fails as a full disk or an interrupt would."""

    def __init__(self, file, error, writes):
        self.file, self.error, self.writes = file, error, writes

    def write(self, data):
        self.writes -= 1
        if self.writes < 0:
            raise self.error
        return self.file.write(data)

    def flush(self):
        self.file.flush()


@pytest.mark.parametrize("writes", [0, 3, 8])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failure_keeps_the_previous_checkpoint(tmp_path, monkeypatch, error, writes):
    path = tmp_path / "last.pt"
    write_checkpoint(path, pack_checkpoint({"step": 1}))
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, file: save(state, _FailingFile(file, error, writes)))
    with pytest.raises(type(error)) as caught:
        write_checkpoint(path, pack_checkpoint({"step": 2, "grid": torch.zeros(100_000)}))
    assert caught.value is error
    assert list(tmp_path.iterdir()) == [path]
    assert load_checkpoint(path)["step"] == 1


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"config": {"root": Path("data")}}, r"state\['config'\]\['root'\]"),
        ({"loss": np.float64(0.5)}, r"state\['loss'\]"),
        ({"history": [1.0, np.zeros(3)]}, r"state\['history'\]\[1\]"),
        ({Path("x"): 1}, "a key of state"),
        ({"mine": nested(20_000)}, r"state\['mine'\]\[0\]\S+ is nested too deeply"),
    ],
)
def test_values_that_would_not_load_are_refused(tmp_path, value, name):
    with pytest.raises(CheckpointError, match=rf"last\.pt: {name}"):
        write_checkpoint(tmp_path / "last.pt", pack_checkpoint(value, tmp_path / "last.pt"))
    assert list(tmp_path.iterdir()) == []


def test_every_accepted_type_loads(tmp_path):
    state = {
        "plain": [None, True, 1, 0.5, 1j, "text", b"bytes", (1, 2), {3, 4}],
        "torch": [torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.nn.Parameter(torch.ones(1))],
        "ordered": OrderedDict(a=1),
    }
    write_checkpoint(tmp_path / "last.pt", pack_checkpoint(state))
    loaded = load_checkpoint(tmp_path / "last.pt")
    assert loaded["plain"] == state["plain"]
    assert loaded["torch"] == state["torch"]
    assert loaded["ordered"] == state["ordered"]


def test_a_missing_file_lists_what_is_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoints in .*: none$"):
        load_checkpoint(tmp_path / "last.pt")
    with pytest.raises(FileNotFoundError, match=r"expected checkpoint_<step>\.pt or last\.pt"):
        load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_checkpoint(tmp_path / "nowhere" / "last.pt")
    for step in (9, 10):
        write_checkpoint(checkpoint_path(tmp_path, step), pack_checkpoint({}))
    write_checkpoint(tmp_path / "last.pt", pack_checkpoint({}))
    with pytest.raises(FileNotFoundError, match=r"last\.pt, checkpoint_0000009\.pt, checkpoint_0000010\.pt$"):
        load_checkpoint(tmp_path / "checkpoint_11.pt")


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99, -1])
def test_a_truncated_file_is_named_so(tmp_path, kept):
    path = tmp_path / "last.pt"
    write_checkpoint(path, pack_checkpoint({"grid": torch.zeros(10_000)}))
    size = int(kept * path.stat().st_size) if isinstance(kept, float) else kept % path.stat().st_size
    os.truncate(path, size)
    message = rf"truncated or damaged \({size} bytes\); resume=auto continues from the newest intact checkpoint$"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_no_changed_byte_is_loaded(tmp_path):
    path = tmp_path / "last.pt"
    write_checkpoint(path, pack_checkpoint({"grid": torch.arange(300.0), "step": 7}))
    whole = path.read_bytes()
    assert load_checkpoint(path)["step"] == 7
    for position in [*range(0, len(whole), 7), *range(len(whole) - 100, len(whole))]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
    for changed in (whole + b"\0", whole + b"more", whole + whole, whole[:-1], whole[:-25], b"\0" + whole):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            load_checkpoint(path)


def test_a_checkpoint_without_a_checksum_of_the_whole_is_compared_with_those_of_its_tensors(tmp_path):
    path = tmp_path / "last.pt"
    torch.save(pack_checkpoint({"grid": torch.arange(300.0)}), path)
    whole = path.read_bytes()
    assert load_checkpoint(path)["grid"][7] == 7
    begin = whole.index(torch.arange(300.0).numpy().tobytes())
    for changed in (whole + b"more", whole[: begin + 5] + b"\1" + whole[begin + 6 :]):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="truncated or damaged"):
            load_checkpoint(path)


class Made:
    """An object whose pickle calls a constructor with a size."""

    def __init__(self, constructor: type) -> None:
        self.constructor = constructor

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return self.constructor, (4,)


PLAIN_ONLY = r"it does not contain tensors and plain values only \(ValueError\)"
STORED_IN_FULL = r"must be a tensor that is stored in full, got \("
NOT_STORED = {
    "stride 0": (torch.zeros(1).expand(1 << 40), STORED_IN_FULL),
    "overlapping": (torch.zeros(9).as_strided((8, 8), (0, 1)), STORED_IN_FULL),
    "packed": ({"nonzero chunks": torch.zeros(1).expand(1 << 30)}, STORED_IN_FULL),
    "twice": ([torch.zeros(9)] * 2, STORED_IN_FULL),
    "packed twice": (list(map(dict, [copy_without_zeros(torch.zeros(1 << 20))] * 2)), STORED_IN_FULL),
    "meta": (torch.zeros(3, device="meta"), STORED_IN_FULL),
    "sparse": (torch.zeros(3).to_sparse(), STORED_IN_FULL),
    "list twice": ([[1.0]] * 2, r"state\['grid'\]\[1\] must not be in two places of a file"),
    "tensor made while loading": (Made(torch.FloatTensor), PLAIN_ONLY),
    "bytes made while loading": (Made(bytearray), PLAIN_ONLY),
    "more tuples than the stack holds": ([(i,) for i in range(60_000)], PLAIN_ONLY),
    "deep": (nested(20_000), r"state\['grid'\]\[0\]\S+ is nested too deeply"),
}


@pytest.mark.parametrize("kind", NOT_STORED)
def test_what_is_not_stored_in_the_file_is_refused(tmp_path, kind):
    value, reason = NOT_STORED[kind]
    pickle_depth = sys.getrecursionlimit()
    sys.setrecursionlimit(200_000)
    try:
        write_checkpoint(tmp_path / "last.pt", {"format": FORMAT, "voxelfield": "0", "grid": value})
    finally:
        sys.setrecursionlimit(pickle_depth)
    with pytest.raises(CheckpointError, match=rf"last\.pt is not a voxelfield checkpoint: .*{reason}"):
        load_checkpoint(tmp_path / "last.pt")


def test_a_long_version_is_clipped(tmp_path):
    write_checkpoint(tmp_path / "last.pt", {"format": FORMAT + 1, "voxelfield": "9" * 100_000})
    with pytest.raises(CheckpointVersionError, match=r"upgrade voxelfield$") as caught:
        load_checkpoint(tmp_path / "last.pt")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("damage", ["cut", "zeros", "empty"])
def test_the_newest_sound_checkpoint_is_found_with_a_warning_for_each_damaged_one(tmp_path, caplog, damage):
    assert load_newest(tmp_path / "nowhere") is None
    assert load_newest(tmp_path) is None
    for step in (1, 2, 3):
        write_checkpoint(checkpoint_path(tmp_path, step), pack_checkpoint({"step": step, "grid": torch.ones(100)}))
    newest = checkpoint_path(tmp_path, 3)
    size = newest.stat().st_size
    newest.write_bytes({"cut": newest.read_bytes()[:-40], "zeros": bytes(size), "empty": b""}[damage])
    path, state = load_newest(tmp_path)
    assert (path, state["step"]) == (checkpoint_path(tmp_path, 2), 2)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{newest} is truncated or damaged ({newest.stat().st_size} bytes)")
    os.truncate(checkpoint_path(tmp_path, 1), 10)
    os.truncate(path, 10)
    assert load_newest(tmp_path) is None


@pytest.mark.parametrize(
    ("format_", "remedy"), [(FORMAT + 1, "upgrade voxelfield"), (FORMAT - 1, "train again, or continue with")]
)
def test_another_format_is_refused_and_not_skipped(tmp_path, monkeypatch, format_, remedy):
    write_checkpoint(checkpoint_path(tmp_path, 1), pack_checkpoint({"step": 1}))
    monkeypatch.setattr(checkpoint, "FORMAT", format_)
    write_checkpoint(checkpoint_path(tmp_path, 2), pack_checkpoint({"step": 2}))
    monkeypatch.undo()
    message = rf"0000002\.pt has format {format_}, written by .* reads format {FORMAT}: {remedy}"
    for load in (load_checkpoint, load_newest):
        with pytest.raises(CheckpointVersionError, match=message):
            load(tmp_path)


class _Foreign:
    """Something that only an unsafe load could restore."""


@pytest.mark.parametrize("kind", ["text", "zip", "tensor", "dict", "object", "future-like"])
def test_foreign_files_are_named_so(tmp_path, kind):
    path = tmp_path / "foreign.pt"
    if kind == "text":
        path.write_text("hello")
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")
    else:
        torch.save(
            {
                "tensor": torch.ones(1),
                "dict": {"state_dict": {}},
                "object": {"format": 1, "voxelfield": _Foreign()},
                "future-like": {"format": "1", "voxelfield": "0"},
            }[kind],
            path,
        )
    with pytest.raises(CheckpointError, match="not a voxelfield checkpoint") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_device_is_not_taken_for_damage(tmp_path):
    write_checkpoint(tmp_path / "last.pt", pack_checkpoint({"grid": torch.ones(1)}))
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
        load_checkpoint(tmp_path / "last.pt", "cuda")


def test_a_pickle_that_ends_early_is_refused_by_name(tmp_path):
    """Its checksum is right, so that only unpickling can fail."""
    write_checkpoint(tmp_path / "last.pt", pack_checkpoint({"step": 1}))
    with zipfile.ZipFile(tmp_path / "last.pt") as whole, zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut:
        for entry in whole.infolist():
            content = whole.read(entry)
            cut.writestr(entry.filename, content[:-1] if entry.filename.endswith("data.pkl") else content)
    with pytest.raises(CheckpointError, match=r"cut\.pt is not a voxelfield checkpoint: it does not contain tensors"):
        load_checkpoint(tmp_path / "cut.pt")


@pytest.mark.parametrize("when", ["archive", "contents"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_gives_way_to_the_newer_one(tmp_path, monkeypatch, when):
    older, newer = checkpoint_path(tmp_path, 1), checkpoint_path(tmp_path, 2)
    write_checkpoint(older, pack_checkpoint({"step": 1}))

    def replace() -> None:
        if older.exists():
            write_checkpoint(newer, pack_checkpoint({"step": 2}))
            older.unlink()

    def replace_first(function):
        return lambda *arguments, **options: (replace(), function(*arguments, **options))[1]

    if when == "archive":
        monkeypatch.setattr(checkpoint, "check_whole", replace_first(checkpoint.check_whole))
    else:
        monkeypatch.setattr(torch, "load", replace_first(torch.load))
    assert load_resolved(tmp_path)[0] == newer
    write_checkpoint(older, pack_checkpoint({"step": 1}))
    newer.unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint_0000001\.pt"):
        load_checkpoint(older)  # a file that was asked for by its name
