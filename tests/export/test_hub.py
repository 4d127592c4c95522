"""The Hugging Face Hub: uploads and downloads, against a server of this process that speaks the Hub's endpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from quick_presets import preset

import voxelfield
from voxelfield.export import save_model
from voxelfield.hub import fetch, push
from voxelfield.installed import MissingPackageError
from voxelfield.trained.trained_model import TrainedModel, untrained_model

METRICS = {
    "scene": "lego",
    "psnr": 31.25,
    "ssim": 0.9375,
    "train_seconds": 12.3,
    "train_views": 100,
    "steps": 20,
    "split": "test",
    "views": 2,
    "image_size": [8, 6],
    "resolution": [16, 16, 16],
    "device": "cpu",
    "settings": {"data": {"root": "/home/somebody"}},
    "psnr_per_view": {},
    "per_view": [],
    "environment": {"voxelfield": "0.1.0"},
}


class Hub(BaseHTTPRequestHandler):
    """The Hub's endpoints for creating a repository, a commit with a large file, and downloads, with one account."""

    files: dict[str, bytes]
    stored: dict[str, bytes]
    creations: list[dict]

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        repository, _, file = self.path.partition("/resolve/main/")
        if repository != "/me/field" or self.headers["Authorization"] != "Bearer hf_mine":
            self.answer({}, 404, X_Error_Code="RepoNotFound")
        elif file not in self.files:
            self.answer({}, 404, X_Error_Code="EntryNotFound")
        else:
            self.answer(self.files[file], ETag='"tag"', X_Repo_Commit="c" * 40)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/me/field/revision/main"):  # which huggingface_hub 0.34 asks for
            self.answer({"id": "me/field", "sha": "c" * 40, "xetEnabled": False})
        else:
            self.do_HEAD()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        host, path = f"http://{self.headers['Host']}", self.path
        if self.headers["Authorization"] != "Bearer hf_mine":
            self.answer({"error": "no token"}, 401)
        elif path == "/api/repos/create":
            self.creations.append(json.loads(body))
            self.answer({"url": f"{host}/me/field"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == "/api/models/me/field/preupload/main":
            kinds = {True: "lfs", False: "regular"}
            names = [each["path"] for each in json.loads(body)["files"]]
            found = [
                {"path": name, "uploadMode": kinds[name.endswith("tensors")], "shouldIgnore": False} for name in names
            ]
            self.answer({"files": found})
        elif path == "/me/field.git/info/lfs/objects/batch":
            objects = [
                {**each, "actions": {"upload": {"href": f"{host}/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif path == "/api/models/me/field/commit/main":
            for value in (json.loads(line)["value"] for line in body.splitlines()):
                if "oid" in value:
                    self.files[value["path"]] = self.stored[value["oid"]]
                elif "content" in value:
                    self.files[value["path"]] = b64decode(value["content"])
            self.answer({"commitUrl": f"{host}/me/field/commit/1", "commitOid": "c" * 40, "success": True})
        else:
            self.answer({"error": f"unknown: {path}"}, 400)

    def do_PUT(self) -> None:
        self.stored[self.path[1:]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})


@pytest.fixture
def hub():
    """The handler of a server, with its files, and the server's address."""
    handler = type("Handler", (Hub,), {"files": {}, "stored": {}, "creations": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a finished run of a field with 16 vertices along each axis."""
    folder = tmp_path / "run"
    (folder / "test").mkdir(parents=True)
    settings = preset("scene=lego", "model=dense", "trainer=smoke", "trainer.stages=[{step: 0, resolution: 16}]")
    save_model(folder / "model.safetensors", TrainedModel(untrained_model(settings, "cpu"), settings, 20))
    (folder / "metrics.json").write_text(json.dumps(METRICS))
    Image.new("RGB", (8, 6)).save(folder / "test" / "r_0.png")
    return folder


@pytest.mark.slow
def test_a_run_is_uploaded_with_a_card_and_loaded_by_its_address(run, hub, tmp_path):
    pytest.importorskip("huggingface_hub")
    handler, address = hub
    program = f"""
import voxelfield
from voxelfield.cli.command import main

assert main(["push", {str(run)!r}, "me/field", "--licence", "cc-by-4.0", "--private"]) == 0
print(voxelfield.load("hf://me/field", "cpu").steps)
assert main(["eval", "hf://me/absent"]) == 2
"""
    settings = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_mine", "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | settings, capture_output=True, text=True, check=True
    )
    assert done.stdout == "20\n"
    uploaded, refused = done.stderr.splitlines()[-2:]
    assert uploaded == f"uploaded to {address}/me/field: voxelfield.load('hf://me/field') reads it"
    assert refused.startswith("hf://me/absent must be a repository of the Hugging Face Hub; this one does not exist")
    (created,) = handler.creations
    assert (created["name"], created["organization"]) == ("field", "me")
    assert created.get("private", created.get("visibility")) in (True, "private")
    assert handler.files.keys() == {"README.md", "model.safetensors", "view.png"}
    assert handler.files["model.safetensors"] == (run / "model.safetensors").read_bytes()
    card = handler.files["README.md"].decode()
    assert card.startswith("---\n")
    for line in (
        "license: cc-by-4.0",
        "library_name: voxelfield",
        "      value: 31.25",
        "![A view of the field](view.png)",
        "| PSNR | 31.25 dB |\n| SSIM | 0.9375 |\n| evaluated on | 2 test views of 8 x 6 pixels |",
        'run = voxelfield.load("hf://me/field")',
        "`cc-by-4.0`",
    ):
        assert f"\n{line}\n" in f"{card}\n", line
    assert "somebody" not in card


def test_other_paths_are_left_as_they_are(tmp_path):
    assert fetch("runs/hf/latest") == Path("runs/hf/latest")
    assert fetch(tmp_path) == tmp_path


def test_the_extra_is_named_where_the_library_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    wanted = r'huggingface_hub must be installed to use hf://me/field: pip install "voxelfield\[hub\]"'
    for use in (lambda: voxelfield.load("hf://me/field"), lambda: push(run, "me/field")):
        with pytest.raises(MissingPackageError, match=wanted):
            use()


def test_only_a_finished_run_with_a_model_file_is_uploaded(run):
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"RUN must have a model\.safetensors, got .*run: "):
        push(run, "me/field")
    (run / "metrics.json").unlink()
    with pytest.raises(ValueError, match="RUN must be the directory of a finished run, got"):
        push(run, "me/field")
