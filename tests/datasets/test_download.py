"""Downloads, from archives served by a local HTTP server."""

from __future__ import annotations

import hashlib
import http.server
import io
import logging
import re
import threading
import zipfile
from dataclasses import replace
from unittest import mock

import pytest

from voxelfield.cli.command import main
from voxelfield.datasets import download as module
from voxelfield.datasets.download import DownloadError, Manifest, download, load_manifest
from voxelfield.datasets.loading import SceneNotFoundError, find_scene
from voxelfield.installed import MissingPackageError

FILES = {
    "train/r_0.png": b"first" * 1000,
    "train/r_1.png": b"second" * 1000,
    "test/r_0.png": b"third" * 1000,
    "test/r_1.png": b"fourth" * 1000,
    "transforms_test.json": b'{"frames": []}',
    "transforms_train.json": b'{"frames": [1]}',
}
WRONG = b"wrong"


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def zipped(files, prefix=""):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in files.items():
            archive.writestr(prefix + path, content)
    return buffer.getvalue()


def manifest(*archives):
    hashes = {path: sha256(content) for path, content in FILES.items()}
    return Manifest("toy", "CC0", "nobody", archives, hashes, sum(map(len, FILES.values())))


def fetch(root, plan, urls=None):
    """Downloads the toy scene as if a manifest were the package's."""
    with mock.patch.object(module, "load_manifest", return_value=plan):
        return download("toy", root, urls)


class Server:
    """Serves ``pages`` and records which ones were requested."""

    def __init__(self):
        self.pages = {}
        self.requests = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.lstrip("/")
                outer.requests.append(name)
                if name not in outer.pages:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(outer.pages[name])))
                self.end_headers()
                self.wfile.write(outer.pages[name])

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server.server_port}/{name}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(variable, "127.0.0.1")
    running = Server()
    yield running
    running.close()


def offered(server, content):
    """Returns the manifest of an archive that the server has."""
    server.pages["toy.zip"] = content
    return manifest(server.url("toy.zip"))


def files_below(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("prefix", ["", "toy/", "nerf_synthetic/toy/", "./", "a b/c/"])
def test_the_scene_may_lie_anywhere_in_the_archive(server, tmp_path, prefix):
    folder = fetch(tmp_path, offered(server, zipped(FILES, prefix)))
    assert folder == tmp_path / "toy"
    assert files_below(tmp_path) == {f"toy/{path}": content for path, content in FILES.items()}


def test_the_right_one_of_several_scenes_is_taken(server, tmp_path):
    paths = [*FILES, "__MACOSX/._r_0.png"]
    decoys = {f"all/{name}/{path}": WRONG for name in ("chair", "zoo") for path in paths}
    right = {f"all/toy/{path}": content for path, content in FILES.items()}
    fetch(tmp_path, offered(server, zipped({**decoys, **right})))
    assert files_below(tmp_path / "toy") == FILES


def test_a_second_call_fetches_nothing(server, tmp_path, caplog):
    plan = offered(server, zipped(FILES))
    fetch(tmp_path, plan)
    with caplog.at_level(logging.INFO):
        assert fetch(tmp_path, plan) == tmp_path / "toy"
    assert server.requests == ["toy.zip"]
    assert "all 6 files are present and verified, nothing to fetch" in caplog.text


def test_files_in_place_are_kept_and_wrong_ones_replaced(server, tmp_path, caplog):
    server.pages["toy.zip"] = zipped(FILES)
    (tmp_path / "toy" / "train").mkdir(parents=True)
    kept, wrong = tmp_path / "toy" / "train" / "r_0.png", tmp_path / "toy" / "train" / "r_1.png"
    kept.write_bytes(FILES["train/r_0.png"])
    wrong.write_bytes(WRONG)
    own = tmp_path / "toy" / "notes.txt"
    own.write_text("mine")
    before = kept.stat()
    with caplog.at_level(logging.INFO):
        fetch(tmp_path, manifest(server.url("toy.zip")))
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert files_below(tmp_path / "toy") == {**FILES, "notes.txt": b"mine"}
    assert "replacing files that differ from the manifest (1): train/r_1.png" in caplog.text
    assert "for 5 of 6 files" in caplog.text


def test_the_first_archive_that_answers_is_taken(server, tmp_path, caplog):
    server.pages["good.zip"] = zipped(FILES)
    plan = manifest(server.url("gone.zip"), server.url("good.zip"), server.url("never.zip"))
    fetch(tmp_path, plan)
    assert server.requests == ["gone.zip", "good.zip"]
    assert files_below(tmp_path / "toy") == FILES
    assert "404" in caplog.text


def test_a_wrong_file_is_named_and_the_next_archive_taken(server, tmp_path, caplog):
    server.pages["bad.zip"] = zipped({**FILES, "train/r_1.png": WRONG})
    server.pages["good.zip"] = zipped(FILES)
    plan = manifest(*(server.url(f"{name}.zip") for name in ("bad", "good")))
    with caplog.at_level(logging.INFO):
        fetch(tmp_path, plan)
    assert files_below(tmp_path) == {f"toy/{path}": content for path, content in FILES.items()}
    expected, found = sha256(FILES["train/r_1.png"]), sha256(WRONG)
    assert f"train/r_1.png: expected SHA-256 {expected}, found {found}" in caplog.text
    assert server.requests == ["bad.zip", "good.zip"]


@pytest.mark.parametrize("path", list(FILES))
@pytest.mark.parametrize("fault", ["wrong", "missing", "damaged"])
def test_an_archive_with_one_bad_file_leaves_nothing(server, tmp_path, path, fault):
    files = {**FILES, path: WRONG}
    if fault == "missing":
        del files[path]
    content = zipped({**FILES, path: FILES[path]} if fault == "damaged" else files)
    if fault == "damaged":
        at = content.index(FILES[path])
        content = content[:at] + b"#" + content[at + 1 :]
    with pytest.raises(DownloadError) as error:
        fetch(tmp_path, offered(server, content))
    reasons = {
        "wrong": sha256(WRONG),
        "missing": "found no such file",
        "damaged": "not a zip archive, or damaged (Bad CRC-32",
    }
    assert path in str(error.value)
    assert reasons[fault] in str(error.value)
    if fault != "damaged":
        assert f"{path}: expected SHA-256 {sha256(FILES[path])}, found " in str(error.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SceneNotFoundError):
        find_scene("toy", tmp_path)


def test_the_last_error_lists_every_archive_with_its_reason(server, tmp_path):
    server.pages["text.zip"] = b"<html>no zip</html>"
    server.pages["cut.zip"] = zipped(FILES)[:-30]
    server.pages["empty.zip"] = zipped({})
    names = ["gone.zip", "text.zip", "cut.zip", "empty.zip"]
    closed = "http://127.0.0.1:9/closed.zip"
    with pytest.raises(DownloadError) as error:
        fetch(tmp_path, manifest(*map(server.url, names), closed))
    urls = [*map(server.url, names), closed]
    each = "; ".join(f"{re.escape(url)}: (.*)" for url in urls)
    found = re.fullmatch(
        f"scene 'toy' could not be fetched into {re.escape(str(tmp_path / 'toy'))}: {each}", str(error.value)
    )
    assert found, f"not one line with each archive's reason: {error.value}"
    reasons = dict(zip(urls, found.groups(), strict=True))
    assert "404" in reasons[server.url("gone.zip")]
    assert "not a zip archive" in reasons[server.url("text.zip")]
    assert "not a zip archive" in reasons[server.url("cut.zip")]
    assert "wrong or missing files (6): train/r_0.png: expected SHA-256 " in reasons[server.url("empty.zip")]
    assert "and 3 more" in reasons[server.url("empty.zip")]
    assert "refused" in reasons[closed]
    assert files_below(tmp_path) == {}


def interrupt_call(monkeypatch, owner, name, number):
    """Makes one call of a function, numbered from 1, do its work and raise KeyboardInterrupt."""
    function, calls = getattr(owner, name), []

    def interrupted(*arguments):
        calls.append(function(*arguments))
        if len(calls) == number:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("number", [1, 3, 6])
def test_an_interruption_while_unpacking_leaves_nothing(server, tmp_path, monkeypatch, number):
    plan = offered(server, zipped(FILES))
    with monkeypatch.context() as patched:
        interrupt_call(patched, module.shutil, "copyfileobj", number)
        with pytest.raises(KeyboardInterrupt):
            fetch(tmp_path, plan)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", range(1, 6))
def test_an_interruption_while_files_are_put_in_place_leaves_whole_ones_the_json_last(
    server, tmp_path, monkeypatch, number
):
    plan = offered(server, zipped(FILES))
    plan = replace(plan, files=dict(reversed(plan.files.items())))  # begins with what makes a folder a scene
    with monkeypatch.context() as patched:
        interrupt_call(patched, module.Path, "replace", number)
        with pytest.raises(KeyboardInterrupt):
            fetch(tmp_path, plan)
    left = files_below(tmp_path)
    assert len(left) == number
    assert all(content == FILES[name.removeprefix("toy/")] for name, content in left.items())
    assert sum(name.endswith(".json") for name in left) == max(0, number - 4)
    fetch(tmp_path, plan)
    assert files_below(tmp_path / "toy") == FILES


def test_an_endless_archive_ends(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ARCHIVE", 5000)
    with pytest.raises(DownloadError, match=r"the archive must have at most 5000 bytes, but the server sends more"):
        fetch(tmp_path, offered(server, bytes(2_000_000)))
    assert files_below(tmp_path) == {}


@pytest.mark.parametrize("prefix", ["../", "../../toy/", "/", "train/../../", "/tmp/../"])
def test_no_archive_writes_outside_of_the_folder(server, tmp_path, prefix):
    files = {**FILES, "../escaped.txt": b"out", "transforms_val.json": b"more"}
    fetch(tmp_path / "scenes", offered(server, zipped(files, prefix)))
    assert files_below(tmp_path) == {f"scenes/toy/{path}": content for path, content in FILES.items()}


def test_files_that_unpack_to_more_than_the_scene_are_not_unpacked(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "copyfileobj", lambda *_: pytest.fail("unpacked"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in FILES:
            archive.writestr(path, bytes(6_000_000))
    plan = offered(server, buffer.getvalue())
    expected = f"the scene's files must have at most {plan.size} bytes, got 36000000 in the archive"
    with pytest.raises(DownloadError, match=expected):
        fetch(tmp_path, plan)
    assert files_below(tmp_path) == {}


def test_unknown_scene(tmp_path):
    with pytest.raises(ValueError, match=r"scene must be one that has a download \(lego\), got 'chair'"):
        download("chair", tmp_path)
    assert not list(tmp_path.iterdir())


def test_pooch_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pooch", None)
    with pytest.raises(MissingPackageError, match=r"pooch must be .* pip install \"voxelfield\[train\]\""):
        fetch(tmp_path, manifest(), ["http://127.0.0.1:9/toy.zip"])


def test_lego_manifest():
    lego = load_manifest("lego")
    assert lego.archives == [
        "https://cseweb.ucsd.edu/~viscomp/projects/LF/papers/ECCV20/nerf/nerf_example_data.zip",
        "https://huggingface.co/datasets/jkulhanek/nerfbaselines-data/resolve/main/blender/lego.zip",
    ]
    train = {f"train/r_{index}.png" for index in range(100)}
    test = {f"test/r_{index}.png" for index in range(200)}
    assert set(lego.files) == train | test | {"transforms_train.json", "transforms_test.json"}
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in lego.files.values())
    assert len(set(lego.files.values())) == len(lego.files)
    assert (lego.licence, lego.size) == ("CC-BY-NC", 127_443_100)
    assert "Heinzelnisse" in lego.credit


def test_command_line(server, tmp_path, monkeypatch, caplog):
    server.pages["toy.zip"] = zipped(FILES)
    monkeypatch.setattr(module, "load_manifest", lambda name: manifest(server.url("public.zip")))
    caplog.set_level(logging.INFO)
    assert main(["download", "toy", "--root", str(tmp_path)]) == 1
    assert "could not be fetched" in caplog.text
    urls = ["--url", server.url("gone.zip"), "--url", server.url("toy.zip")]
    assert main(["download", "toy", "--root", str(tmp_path), *urls]) == 0
    assert server.requests == ["public.zip", "gone.zip", "toy.zip"]
    assert files_below(tmp_path / "toy") == FILES
    assert "all 6 files verified" in caplog.text
