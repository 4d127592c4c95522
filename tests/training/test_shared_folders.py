"""Folders that are shared with other processes and with files of others: sessions lock theirs, and pictures stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lock_holder import holder, is_free
from PIL import Image
from quick_presets import preset
from short_runs import ROOT, TINY
from small_sessions import LEGO, fitted, restored

from voxelfield.datasets.scene import Scene, Split
from voxelfield.evaluation.evaluation import check_pictures, evaluate_split, save_images
from voxelfield.media.png import BackgroundWriter
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import View
from voxelfield.run_directory import DirectoryInUseError
from voxelfield.runs.train import train_as_configured
from voxelfield.training.session import Session


@pytest.fixture
def make_session(scene: Scene, tmp_path: Path) -> Callable[..., Session]:
    def make(*overrides: str, **options: Any) -> Session:
        settings = preset(*TINY, "trainer.steps=4", "trainer.checkpoint_every=2", *overrides, device="cpu")
        return Session(scene, settings, output=tmp_path / "run", **options)

    return make


def test_a_session_does_not_write_where_another_process_does(make_session):
    session = make_session()
    with holder(session.output) as other:
        for act in (session.fit, session.save):
            with pytest.raises(DirectoryInUseError, match=rf"^output must be a folder .* but process {other.pid} on"):
                act()
        assert session.step == 0
        assert not list(session.output.glob("*.pt"))
    assert session.fit()
    assert [path.name for path in session.output.iterdir()] == ["checkpoint_0000004.pt"]


def test_a_session_holds_its_folder_until_its_files_are_written(make_session):
    free = []
    session = make_session(on_step=lambda session: session.step == 2 and free.append(is_free(session.output)))
    assert session.fit(wait=False)
    assert free == [False]
    assert not is_free(session.output), "the last checkpoint may still be on its way"
    session.wait()
    assert is_free(session.output)
    session.save()
    assert is_free(session.output)


def test_two_sessions_of_one_process_do_not_write_to_one_folder(make_session):
    first, second = make_session(), make_session()
    first.train_step()
    first.save()
    for act in (second.save, second.fit):
        with pytest.raises(DirectoryInUseError, match=r"^output must be a folder .* another session of this process"):
            act()
    assert second.step == 0
    later = restored(make_session(), first.output)
    assert later.fit()
    with pytest.raises(DirectoryInUseError, match=r"^output must be"):
        first.save()
    assert [path.name for path in first.output.glob("*.pt") if path.name > "checkpoint_0000001.pt"] == [
        "checkpoint_0000004.pt"
    ]


def test_a_session_whose_folder_is_moved_creates_it_again(make_session, tmp_path, caplog):
    free = []

    def move(session: Session) -> None:
        if session.step == 3:
            session.wait()
            session.output.rename(tmp_path / "moved")
            free.append(is_free(session.output))

    session = fitted(make_session(on_step=move))
    assert free == [True]
    assert "or moved away; it is created again for the remaining results" in caplog.text
    assert [path.name for path in session.output.iterdir()] == ["checkpoint_0000004.pt"]
    assert (tmp_path / "moved" / "checkpoint_0000002.pt").is_file()


def photograph(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (25, 25), "green").save(path)
    return path.read_bytes()


@pytest.mark.parametrize("save_images", [True, False])
def test_a_run_does_not_replace_photographs_by_renderings(tmp_path, save_images):
    before = photograph(tmp_path / "test" / "r_0.png")
    config = preset(
        *TINY, "trainer.steps=2", f"trainer.evaluation.save_images={str(save_images).lower()}", device="cpu"
    )
    if save_images:
        with pytest.raises(FileExistsError, match=rf"^hydra\.run\.dir must be .*, got {tmp_path}/test: .* r_0\.png"):
            train_as_configured(config, tmp_path, ROOT)
        assert not list(tmp_path.glob("*.pt")), "it is refused before it trains"
    else:
        train_as_configured(config, tmp_path, ROOT)
    assert (tmp_path / "test" / "r_0.png").read_bytes() == before


def test_a_run_replaces_its_own_renderings(tmp_path):
    config = preset(*TINY, "trainer.steps=2", "trainer.evaluation.views=2", device="cpu")
    train_as_configured(config, tmp_path, ROOT)
    pictures = sorted((tmp_path / "test").iterdir())
    assert len(pictures) == 2
    shutil.copy(pictures[0], pictures[0].with_name("r_150.png"))  # of an earlier evaluation of more views
    config = preset(*TINY, "trainer.steps=4", "trainer.evaluation.views=2", "seed=3", device="cpu")
    before = pictures[0].read_bytes()
    train_as_configured(config, tmp_path, ROOT)
    assert sorted((tmp_path / "test").iterdir()) == pictures
    assert pictures[0].read_bytes() != before


def split_of(*names: str) -> Split:
    cameras = Cameras(torch.eye(4).repeat(len(names), 1, 1), torch.ones(len(names), 4), 12, 12)
    return Split(torch.full((len(names), 12, 12, 4), 200, dtype=torch.uint8), cameras, names)


def grey(cameras: Cameras, index: int) -> View:
    return View(torch.full((12, 12, 3), 0.5), torch.ones(12, 12), torch.ones(12, 12))


def evaluate(split: Split, folder: Path, views: tuple[str, ...], render=grey) -> None:
    check_pictures("images", folder, views)
    with BackgroundWriter() as writer:
        indices = [split.names.index(name) for name in views]
        evaluate_split(
            render, split, torch.ones(3), views=indices, on_view=[save_images(folder, writer)], progress=False
        )


def test_evaluated_views_replace_no_files_of_others(tmp_path):
    before = photograph(tmp_path / "b.png")
    with pytest.raises(
        FileExistsError, match=rf"^images must be .*, got {tmp_path}: voxelfield has not written b\.png"
    ):
        evaluate(split_of("a", "b"), tmp_path, ("a", "b"))
    assert (tmp_path / "b.png").read_bytes() == before
    assert not (tmp_path / "a.png").exists()
    evaluate(split_of("a", "b"), tmp_path, ("a",))
    assert (tmp_path / "b.png").read_bytes() == before


@pytest.mark.parametrize(("length", "works"), [(230, True), (251, True), (252, False)])
def test_long_names_of_views_are_written_or_refused_at_once(tmp_path, length, works):
    split = split_of("x" * length)
    if works:
        evaluate(split, tmp_path, split.names)
        assert [path.stem for path in tmp_path.iterdir()] == ["x" * length]
        return
    with pytest.raises(OSError, match="File name too long"):
        evaluate(split, tmp_path, split.names, lambda *_: pytest.fail("rendered"))


def write_scene(folder: Path, name: str) -> None:
    """Writes a scene of the small one's photographs with one test view, under another name."""
    for split in ("train", "test"):
        content = json.loads((LEGO / f"transforms_{split}.json").read_text())
        frames = content["frames"][:6] if split == "train" else content["frames"][:1]
        (folder / split).mkdir(parents=True)
        for frame in frames:
            target = name if split == "test" else Path(frame["file_path"]).name
            shutil.copy(LEGO / f"{frame['file_path']}.png", folder / split / f"{target}.png")
            frame["file_path"] = f"./{split}/{target}"
        (folder / f"transforms_{split}.json").write_text(json.dumps(content | {"frames": frames}))


def test_a_long_name_does_not_lose_a_run_its_results(tmp_path):
    write_scene(tmp_path / "scenes" / "lego", "x" * 245)
    config = preset(*TINY, "trainer.steps=2", f"data.root={tmp_path / 'scenes'}", device="cpu")
    assert train_as_configured(config, tmp_path / "run", ROOT)["steps"] == 2
    assert [path.stem for path in (tmp_path / "run" / "test").iterdir()] == ["x" * 245]
