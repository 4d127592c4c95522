"""Passers-by in training photographs are found and ignored, what stays is not, and masks of them are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from passers_by import with_passers_by
from PIL import Image
from quick_presets import preset
from short_runs import run
from small_sessions import fitted, restored

from voxelfield import Scene, Session, load_scene
from voxelfield.components.robust import RobustWeights, moving_cells
from voxelfield.models.pixel_sampler import pixels_that_count
from voxelfield.trained.checkpoint_file import load_checkpoint

STEPS = 250
ROBUST = ("trainer.loss.robust=3", "trainer.loss.robust_every=20", "trainer.loss.robust_cells=25")


def settings(*overrides: str, device: str = "cpu"):
    few = (f"trainer.steps={STEPS}", "trainer.visible_samples=8192", "trainer.preview_every=0")
    few += ("trainer.rates.grid=1.5", "trainer.rates.network=3")
    return preset("model=dense", "trainer=smoke", *few, *overrides, device=device)


@pytest.fixture(scope="module")
def clean() -> Scene:
    scene = load_scene("bricks", image_size=50)
    return replace(scene, splits=scene.splits | {"train": scene.train[::3]})


def robust_of(session: Session) -> RobustWeights:
    return next(part for part in session.components if isinstance(part, RobustWeights))


def test_cells_move_if_they_and_their_neighbours_are_unlike_the_field():
    drawn = torch.full((3, 9, 9), 20.0)
    unlike = torch.zeros(3, 9, 9)
    unlike[0, 4, 1:8] = 20  # a thin line, which may be an edge
    unlike[1, 2:5, 3:6] = 20  # a person
    unlike[1, 5, 4] = 5  # and the edge of one
    unlike[1, 8, 8] = 20
    unlike[2, 2:] = 20  # another exposure
    moves = moving_cells(drawn, unlike)
    expected = torch.zeros_like(moves)
    expected[1, 2:5, 3:6] = expected[1, 5, 4] = True
    assert torch.equal(moves, expected)
    assert not moving_cells(drawn / 80, unlike / 80).any(), "hardly any pixel was drawn"


@pytest.mark.slow
def test_passers_by_are_found_and_leave_no_ghosts(clean, device):
    crowded, people = with_passers_by(clean, every=2)
    psnr = {}
    for kind, overrides in {"plain": (), "robust": ROBUST}.items():
        session = fitted(Session(crowded, settings(*overrides, device=str(device))))
        psnr[kind] = session.evaluate(views=8, progress=False).psnr
    assert psnr["robust"] > psnr["plain"] + 0.4
    robust = robust_of(session)
    found = ~torch.stack([robust.mask(index) for index in range(len(people))])
    assert float((found & people).sum() / people.sum()) > 0.7
    assert float((found & people).sum() / (found | people).sum()) > 0.6
    batch = session._state.training_step.batch
    ignored = batch.weights == 0
    assert torch.equal(ignored, found.view(-1).to(device)[batch.pixels])
    assert float(batch.weights.mean()) == pytest.approx(1, abs=0.05)
    assert robust.scalars()["robust/ignored"] == float(robust.moves.float().mean())


@pytest.mark.slow
def test_photographs_without_passers_by_are_kept(clean):
    session = fitted(Session(clean, settings(*ROBUST)))
    assert float(robust_of(session).moves.float().mean()) < 0.01


def test_a_resumed_run_ignores_the_same_to_the_bit(clean, tmp_path):
    scene, _ = with_passers_by(clean, every=2)
    chosen = settings(*ROBUST, "trainer.steps=90")
    whole = fitted(Session(scene, chosen))
    first = Session(scene, chosen, output=tmp_path)
    while first.step < 70:  # between two decisions
        first.train_step()
    first.save()
    second = fitted(restored(Session(scene, chosen), tmp_path))
    assert torch.equal(robust_of(second).moves, robust_of(whole).moves)
    assert torch.equal(second.field.grid.features, whole.field.grid.features)
    for other, message in {
        (): r"trainer\.loss\.robust must be positive, as in the checkpoint, got 0",
        (*ROBUST, "trainer.loss.robust_cells=5"): r"trainer\.loss\.robust_cells, .* must be those .* got \(34, 5, 5\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            Session(scene, settings(*other)).restore(load_checkpoint(tmp_path))


def write_capture(folder: Path, folders: int, with_masks: bool = False) -> None:
    """Photographs of two sizes in one or two folders; one has a mask if they have none of their own."""
    frames = []
    for index in range(6):
        width, height = (40, 32) if index % 2 else (32, 40)
        name = f"camera_{index * folders // 6}/{index % (6 // folders)}.png"
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (width, height), (40 * index, 90, 120)).save(path)
        pose = torch.eye(4)
        pose[2, 3] = 3.0 + 0.1 * index
        frame = {"file_path": str(path.relative_to(folder)), "transform_matrix": pose.tolist(), "w": width, "h": height}
        frame |= {"fl_x": 40.0, "fl_y": 40.0, "cx": width / 2, "cy": height / 2}
        if with_masks:
            frame["mask_path"] = f"masks/{name}.png"
        elif index == 4:
            mask = Image.new("L", (width, height), 255)
            mask.paste(0, (0, 0, width, 6))
            mask.save(folder / "given.png")
            frame["mask_path"] = "given.png"
        frames.append(frame)
    (folder / "transforms.json").write_text(json.dumps({"frames": frames}))


@pytest.mark.parametrize("folders", [1, 2])
def test_masks_of_what_moves_can_be_read_by_loaders(tmp_path, folders, caplog):
    write_capture(tmp_path, folders)
    scene = load_scene(tmp_path, holdout=0, image_size=20)  # half of each side
    session = Session(scene, settings(*ROBUST, "trainer.loss.robust_cells=5"))
    robust = robust_of(session)
    assert robust.cell == 4
    robust.moves[0, 1, 2] = robust.moves[4, 0, 0] = robust.moves[4, 2, 1] = True
    robust.write_results(tmp_path)
    write_capture(tmp_path, folders, with_masks=True)
    split, full = (load_scene(tmp_path, holdout=0, image_size=size).train for size in (20, None))
    expected = torch.ones(6, *split.masks.shape[1:], dtype=torch.bool)
    for index in range(6):
        width, height = split.cameras.size(index)
        expected[index, height:] = expected[index, :, width:] = False
    counted = split.masks & expected
    expected[0, 4:8, 8:12] = False
    expected[4, :3] = expected[4, :4, :4] = expected[4, 8:12, 4:8] = False
    assert torch.equal(counted, expected)
    assert torch.equal(full.mask(0)[8:16, 16:24], torch.zeros(8, 8, dtype=torch.bool))
    assert int((~full.mask(0)).sum()) == 64
    robust.write_results(tmp_path)  # replaces its own
    robust._rescale()
    drawn = pixels_that_count(scene.train).sum()
    share = float(1 - counted.sum() / drawn)
    assert robust.scalars()["robust/ignored"] == pytest.approx(share)
    assert float(robust._scale) * (1 - share) == pytest.approx(1), "the mean weight"
    edited = tmp_path / "masks" / f"camera_{folders - 1}" / "2.png.png"
    Image.new("L", (40, 32), 255).save(edited)
    before = edited.read_bytes()
    robust.moves[:] = False
    robust.write_results(tmp_path)
    assert f"1 masks that were edited are kept, the first is {edited}" in caplog.text
    assert edited.read_bytes() == before
    with Image.open(tmp_path / "masks" / "camera_0" / "0.png.png") as other:
        assert other.getextrema() == (255, 255), "the others are written"


def test_a_run_writes_masks(tmp_path):
    status, text = run(f"hydra.run.dir={tmp_path}", "trainer.loss.robust=4")
    assert status == 0, text
    lego = Path(__file__).parents[1] / "fixtures" / "lego"
    for photograph in (*lego.glob("train/*.png"), *lego.glob("test/*.png")):
        mask = tmp_path / "masks" / photograph.parent.name / f"{photograph.name}.png"
        with Image.open(mask) as image:
            assert (image.mode, image.size) == ("1", (100, 100))


def test_views_without_files_get_masks_of_their_names(clean, tmp_path):
    scene = replace(clean, splits={"train": replace(clean.train[:2], paths=None)})
    robust_of(Session(scene, settings(*ROBUST))).write_results(tmp_path)
    assert sorted(path.name for path in (tmp_path / "masks").iterdir()) == [f"{name}.png" for name in scene.train.names]
