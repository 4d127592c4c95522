"""What goes wrong during training: full disks, loggers that fail, numbers that are not finite, want of memory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import short_runs
import torch
from file_limits import files_at_most
from quick_presets import preset
from small_sessions import LEGO, Recorder, fitted, restored

from voxelfield.components.exposure import AffineExposure
from voxelfield.components.logger import FailsafeLogger, NullLogger, SeveralLoggers
from voxelfield.components.muon import network_matrices
from voxelfield.components.refinement import CameraRefinement
from voxelfield.components.tensorboard import TensorBoardLogger
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene
from voxelfield.media import png
from voxelfield.media.png import BackgroundWriter
from voxelfield.media.video import write_video
from voxelfield.models.training import MemoryEstimate
from voxelfield.report import page
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.runs import results
from voxelfield.runs.train import build_logger, train_as_configured
from voxelfield.settings import RunConfig
from voxelfield.settings.schema import LoggerConfig
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.training import checkpoints as checkpoint_module
from voxelfield.training.memory import explain_shortage
from voxelfield.training.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *short_runs.TINY,
    "trainer.steps=12",
    "trainer.log_every=2",
    "trainer.checkpoint_every=4",
    "trainer.evaluation.report=true",
    "logger=none",
)


@pytest.fixture
def make_session(scene: Scene, tmp_path: Path) -> Callable[..., Session]:
    def make(*overrides: str, **options: Any) -> Session:
        settings = preset(*TINY, *overrides, device="cpu", name="train_cpu")
        return Session(scene, settings, **{"output": tmp_path / "run", **options})

    return make


def fail_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Fills the disk while the checkpoints of some steps are written."""
    write = checkpoint_module.write_checkpoint

    def write_some(path: Path, packed: dict[str, Any]) -> None:
        if packed["step"] in steps:
            raise OSError(28, "No space left on device", "/somewhere/.tmp")
        write(path, packed)

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", write_some)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


# ------------------------------------------------------------------------------------------------------ full disks


def test_images_below_the_window_of_ssim_are_refused_before_training(tmp_path):
    settings = preset(*TINY, "trainer.image_size=10", device="cpu", name="train_cpu")
    with pytest.raises(ValueError, match=r"r_0.png: images .* must be at least 11x11 pixels, .* SSIM, got 10x10"):
        train_as_configured(settings, tmp_path / "run", ROOT)
    assert not list((tmp_path / "run").glob("checkpoint*"))


def test_training_goes_on_where_a_checkpoint_cannot_be_written(make_session, monkeypatch, caplog):
    session = make_session()
    fail_at(monkeypatch, 8)
    assert session.fit()
    folder = session.output
    assert [path.name for path in folder.iterdir()] == ["checkpoint_0000012.pt"]
    assert errors(caplog) == [
        f"{folder}/checkpoint_0000008.pt could not be written: No space left on device; training continues, and the "
        f"last checkpoint is {folder}/checkpoint_0000004.pt"
    ]


def test_training_stops_at_a_checkpoint_that_cannot_be_written_if_it_is_told_to(make_session, monkeypatch):
    session = make_session("trainer.checkpoint_errors=stop", "trainer.steps=4000")
    fail_at(monkeypatch, *range(8, 4000))
    with pytest.raises(OSError, match=r"checkpoint_0000008.pt could not be written: No space left on device$"):
        session.fit()
    assert session.step < 4000
    assert session.checkpoint == session.output / "checkpoint_0000004.pt"
    assert load_checkpoint(session.output)["step"] == 4


def test_the_last_checkpoint_is_not_optional(make_session, monkeypatch):
    session = make_session()
    fail_at(monkeypatch, 12)
    with pytest.raises(OSError, match=r"checkpoint_0000012.pt could not be written"):
        session.fit()
    assert session.checkpoint == session.output / "checkpoint_0000008.pt"
    assert load_checkpoint(session.output)["step"] == 8


def test_a_file_that_does_not_fit_leaves_nothing_but_the_one_before(make_session):
    session = make_session()
    path = session.save()
    session._state.steps = 1
    refused = pytest.raises(OSError, match=r"checkpoint_0000001.pt could not be written: File too large")
    with files_at_most(path.stat().st_size // 2), refused:
        session.save()
    assert list(session.output.iterdir()) == [path]
    assert load_checkpoint(path)["step"] == 0


def write_picture(path: Path) -> None:
    with BackgroundWriter() as writer:
        writer.save(path, torch.rand(64, 64, 3))


def test_a_picture_appears_whole_or_the_one_before_stays(tmp_path):
    path = tmp_path / "view.png"
    write_picture(path)
    before = path.read_bytes()
    with files_at_most(1000), pytest.raises(OSError, match="File too large"):
        write_picture(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_video_appears_whole_or_not_at_all(tmp_path):
    pytest.importorskip("av")
    frames = torch.rand(40, 64, 64, 3)
    write_video(tmp_path / "whole.mp4", frames)
    size = (tmp_path / "whole.mp4").stat().st_size
    for limit in (1000, size - 100):
        with files_at_most(limit), pytest.raises(OSError, match=r"File too large: .*cut\.mp4"):
            write_video(tmp_path / "cut.mp4", frames)
        assert [path.name for path in tmp_path.iterdir()] == ["whole.mp4"]


@pytest.mark.parametrize(
    ("module", "name", "missing"),
    [
        (png, "write_png", "test"),
        (results, "write_metrics", "metrics.json"),
        (results, "save_model", "model.safetensors"),
        (page, "atomic_write", "report.html"),
    ],
)
def test_one_result_that_cannot_be_written_keeps_no_other_from_it(tmp_path, monkeypatch, caplog, module, name, missing):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, name, refuse)
    config = preset(*TINY, "trainer.steps=4", device="cpu", name="train_cpu")
    command = f"voxelfield train resume={tmp_path}/checkpoint_0000004.pt"
    message = f"{missing} could not be written in {tmp_path}; continue with: {command}"
    with pytest.raises(OSError, match=f"^{re.escape(message)}$"):
        train_as_configured(config, tmp_path, ROOT)
    assert errors(caplog) == [f"{tmp_path / missing}: No space left on device"]
    expected = {"checkpoint_0000004.pt", "test", "metrics.json", "per_view.csv", "model.safetensors", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == expected - {missing}
    if missing != "metrics.json":
        assert json.loads((tmp_path / "metrics.json").read_text())["psnr"] > 3


def test_a_report_appears_whole_or_the_one_before_stays(tmp_path, monkeypatch):
    config = preset(*TINY, "trainer.steps=4", device="cpu", name="train_cpu")
    metrics = train_as_configured(config, tmp_path, ROOT)
    path = tmp_path / "report.html"
    before = path.read_bytes()
    assert len(before) > 10_000
    settings = preset(*TINY, "trainer.steps=4", device="cpu", name="train_cpu")
    with files_at_most(5000), pytest.raises(OSError, match="File too large"):
        page.write_report(tmp_path, metrics, settings, Thumbnails(1))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if ".tmp" in file.name] == []


def test_a_run_that_wants_no_report_has_none(tmp_path):
    config = preset(*TINY, "trainer.steps=4", "trainer.evaluation.report=false", device="cpu", name="train_cpu")
    (tmp_path / "report.html").write_text("of an earlier run")
    assert train_as_configured(config, tmp_path, ROOT)["steps"] == 4
    assert not (tmp_path / "report.html").exists()


# --------------------------------------------------------------------------------------------------------- loggers


class Failing(NullLogger):
    """Fails from a step on."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.calls: list[int] = []

    def scalars(self, step, values) -> None:
        self.calls.append(step)
        if step >= self.step:
            raise ConnectionError("nobody listens")

    def close(self) -> None:
        raise ConnectionError("closed")


def test_a_logger_that_fails_is_told_of_once_and_training_goes_on(make_session, caplog):
    failing = Failing(6)
    session = make_session(logger=failing)
    assert session.log is failing
    assert session.fit()
    assert failing.calls == [0, 2, 4, 6]
    assert errors(caplog) == ["Failing failed (nobody listens): nothing more is recorded, and training continues"]


def test_one_of_several_loggers_that_fails_does_not_stop_the_others(caplog):
    failing, other = Failing(2), Failing(100)
    several = SeveralLoggers([failing, other])
    for step in (0, 2, 4):
        several.scalars(step, {})
    several.close()
    assert (failing.calls, other.calls) == ([0, 2], [0, 2, 4])
    assert [line.partition(" (")[0] for line in errors(caplog)] == ["Failing failed"] * 2, "one when it is closed"


def test_a_logger_that_replaces_one_that_has_failed_is_used(make_session, caplog):
    session = make_session(logger=Failing(0))
    session.records.scalars(0, {})
    session.records.scalars(0, {})
    assert session.log.calls == [0]
    session.log = Failing(1)
    session.records.scalars(0, {})
    session.records.scalars(1, {})
    assert session.log.calls == [0, 1]
    assert len(errors(caplog)) == 2, "once for each of them"


def test_a_failsafe_logger_closes_what_is_behind_it(caplog):
    failing = Failing(0)
    FailsafeLogger(lambda: failing).close()
    assert "Failing failed (closed)" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_does_not_end_training(make_session, tmp_path, caplog):
    log = TensorBoardLogger(tmp_path / "events")
    log._writer.flush()
    (events,) = (tmp_path / "events").iterdir()
    session = make_session(logger=log, output=None)  # so that only TensorBoard's file grows
    with files_at_most(events.stat().st_size + 100):
        log.scalars(0, {f"many/{number}": 0.0 for number in range(5)})
        with contextlib.suppress(OSError):
            log._writer.flush()
        assert session.fit()
    assert [line.partition(" (")[0] for line in errors(caplog)] == ["TensorBoardLogger failed"]
    FailsafeLogger(lambda: log).close()


def test_a_tensorboard_that_cannot_begin_does_not_end_training(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    log = build_logger(RunConfig(logger=LoggerConfig(tensorboard=True)), tmp_path / "file", 0)
    log.scalars(1, {"loss/rgb": 1.0})
    assert [line.partition(" (")[0] for line in errors(caplog)] == ["logger=tensorboard failed"]


# -------------------------------------------------------------------------------------------- numbers gone astray


def poison(session: Session, steps: set[int]) -> None:
    """Makes the loss of some steps, counted from 0, not finite."""
    read = session._state.training_step._pixels._read

    def read_some(*arguments: Any) -> Any:
        rays, rgba = read(*arguments)
        return rays, torch.full_like(rgba, math.nan) if session.step in steps else rgba

    session._state.training_step._pixels._read = read_some


def test_a_loss_that_is_not_finite_stops_with_the_state_written_out(make_session):
    session = make_session()
    poison(session, {8})
    with pytest.raises(FloatingPointError) as caught:
        session.fit()
    state, sound = (session.output / name for name in ("not_finite_0000010.pt", "checkpoint_0000008.pt"))
    message = str(caught.value)
    assert message.endswith(f"; the state is in {state}, and the last valid checkpoint is {sound}")
    assert "\n" not in message
    assert load_checkpoint(state)["step"] == 10
    assert load_checkpoint(session.output)["step"] == 8, "what is not finite is not continued from"


@pytest.mark.parametrize(
    "learned",
    [
        "trainer.exposure=none",
        "trainer.exposure=affine",
        "trainer.vignetting=true",
        "camera=refine",
    ],
)
def test_steps_that_are_not_finite_are_skipped_if_training_is_told_to(make_session, learned):
    features, matrices = {}, {}

    def note(session: Session) -> None:
        features[session.step] = session.field.grid.features.detach().clone()
        matrices[session.step] = network_matrices(session.field)[0].detach().clone()

    session = make_session(
        *(learned, "trainer.not_finite=skip", "optimizer.skip_untouched=true", "optimizer.matrices=muon"),
        logger=Recorder(),
        on_step=note,
    )
    poison(session, {4, 8, 9})
    with pytest.raises(FloatingPointError, match="step 10: "):
        session.fit()  # of steps 8 and 9 there is no loss to record
    records = dict(session.log.records)
    assert [records[step]["train/skipped_steps"] for step in (2, 4, 6, 8)] == [0, 0, 1, 0]
    assert all(math.isfinite(value) for value in records[6].values())
    assert torch.equal(features[4], features[5]), "the poisoned step"
    assert not torch.equal(features[5], features[6])
    assert torch.equal(matrices[4], matrices[5])
    assert not torch.equal(matrices[5], matrices[6])
    # The mean is over the step that counts, not half of it.
    assert records[6]["loss/photometric"] > 0.6 * records[4]["loss/photometric"]


def test_a_skipped_step_leaves_exposures_and_cameras_finite(make_session):
    session = make_session("trainer.not_finite=skip", "trainer.exposure=affine", "camera=refine")
    poison(session, {4})
    session.fit()
    assert session.component(AffineExposure).log_gain.isfinite().all()
    assert session.component(AffineExposure).log_gain.any()
    assert session.component(CameraRefinement).twists.isfinite().all()
    assert session.component(CameraRefinement).twists.any()


def test_training_that_diverges_is_said_to(make_session, caplog):
    sound = fitted(make_session("trainer.steps=30"))
    assert not sound.diverged
    assert "diverges" not in caplog.text
    session = fitted(make_session("trainer.steps=30", "trainer.rates.grid=1e6"))
    assert session.diverged
    assert caplog.text.count("training diverges, with training pixels at") == 1
    # A run that resumes from its checkpoint knows it, too.
    again = fitted(restored(make_session("trainer.steps=30", "trainer.rates.grid=1e6"), session.output))
    assert again.diverged


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: ..."),
        RuntimeError('torch_call_dispatcher( "aten::contiguous", "", ...) API call failed at ops.h, line 99'),
    ],
)
def test_want_of_memory_is_one_line_with_the_settings_that_help_most(error):
    estimate = MemoryEstimate(*(size * 2**30 for size in (1, 1, 2, 0, 0, 9, 3)))
    with pytest.raises(torch.OutOfMemoryError) as caught, explain_shortage(lambda: estimate, torch.device("cpu")):
        raise error
    assert str(caught.value) == (
        "not enough memory on cpu: training needs about 16.00 GiB (parameters 1.00, gradients 1.00, optimizer 2.00, "
        "copies 0.00, average 0.00, images 9.00, samples 3.00); lower trainer.image_size (in Python, that of "
        "load_scene), trainer.finest_resolution (in Python, the last of trainer.stages), trainer.visible_samples"
    )


def test_other_errors_are_not_taken_for_want_of_memory():
    def unasked() -> MemoryEstimate:
        raise AssertionError("estimated though memory is not the reason")

    with pytest.raises(RuntimeError, match=r"^other$"), explain_shortage(unasked, torch.device("cpu")):
        raise RuntimeError("other")


@pytest.mark.parametrize("where", ["building", "training"])
def test_a_session_explains_want_of_memory(make_session, monkeypatch, where):
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    def run() -> None:
        session = make_session()
        session._state.training_step.run = fail
        session.fit()

    if where == "building":
        monkeypatch.setattr("voxelfield.training.state.Optimizers", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^not enough memory on cpu: .*\(parameters 0\.00, .*; lower "):
        run()


# -------------------------------------------------------------------------------------- what goes away under way


def test_a_run_directory_that_goes_away_is_made_anew_with_a_warning(make_session, caplog):
    def remove(session: Session) -> None:
        if session.step == 6:
            # Otherwise a checkpoint that is still being written in the background could fail.
            session.wait()
            shutil.rmtree(session.output)

    session = fitted(make_session(on_step=remove))
    assert f"{session.output} was deleted, with everything that this run had written there" in caplog.text
    assert load_checkpoint(session.output)["step"] == 12


def test_a_scene_that_goes_away_after_it_was_read_changes_nothing(tmp_path, make_session, scene):
    session = fitted(make_session())
    expected = load_checkpoint(session.output)["model"]
    folder = tmp_path / "lego"
    shutil.copytree(LEGO, folder)
    settings = preset(*TINY, device="cpu", name="train_cpu")
    session = Session(
        load_blender(folder, LoadOptions(downscale=4, aabb=scene.aabb)),
        settings,
        output=tmp_path / "other",
        on_step=lambda session: session.step == 3 and shutil.rmtree(folder),
    )
    assert session.fit()
    assert not folder.exists()
    found = load_checkpoint(tmp_path / "other")["model"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_logged_is_written_out_before_a_checkpoint_is(make_session, tmp_path):
    """A run that is killed resumes from its checkpoint, and does not log again what came before that."""
    flushed = []

    class Flushed(NullLogger):
        def flush(self) -> None:
            flushed.append(sorted(path.name for path in (tmp_path / "run").glob("checkpoint_*")))

    assert make_session(logger=Flushed()).fit()
    assert flushed == [[], ["checkpoint_0000004.pt"], ["checkpoint_0000008.pt"]]
