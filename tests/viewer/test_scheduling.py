"""The drawing thread, and training that runs at the same time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from viewer_scene import bricks, session, trained_run

from voxelfield.viewer.drawing.look import MODES, Look
from voxelfield.viewer.drawing.painter import Painter
from voxelfield.viewer.drawing.viewpoint import Viewpoint, viewpoint_of
from voxelfield.viewer.scheduling import live as live_module
from voxelfield.viewer.scheduling.live import LiveField
from voxelfield.viewer.scheduling.resolution import ResolutionControl
from voxelfield.viewer.scheduling.source import FinishedRun
from voxelfield.viewer.scheduling.worker import RenderWorker, Request

PATIENCE = 60


def test_pictures_become_as_large_as_time_allows():
    control = ResolutionControl(0.1)

    def settle(pixels_per_second: float) -> int:
        for _ in range(30):
            height, width = control.size(800, 1200)
            control.record(height * width, 0.01 + height * width / pixels_per_second, 800 * 1200)
        return height * width

    slow = settle(5e5)
    assert 0.07 < 0.01 + slow / 5e5 < 0.13
    assert settle(1e9) == 800 * 1200
    assert 0.07 < 0.01 + settle(5e5) / 5e5 < 0.13
    height, width = control.size(800, 1200)
    assert width / height == pytest.approx(1.5, rel=0.02)


class Receiver:
    """Gathers what a worker delivers."""

    def __init__(self) -> None:
        self.frames = []
        self._came = threading.Condition()

    def __call__(self, who, frame):
        with self._came:
            self.frames.append((who, frame))
            self._came.notify_all()

    def wait(self, condition):
        with self._came:
            assert self._came.wait_for(lambda: condition([frame for _, frame in self.frames]), PATIENCE)
            return [frame for _, frame in self.frames]


@pytest.fixture
def working():
    workers = []

    def start(source=None, **options):
        receiver = Receiver()
        worker = RenderWorker(source or FinishedRun(trained_run()), receiver, **options)
        workers.append(worker)
        return worker, receiver

    yield start
    for worker in workers:
        worker.close()
        assert not worker._thread.is_alive()


def request_from(view: int, size: int = 32) -> Request:
    return Request(viewpoint_of(bricks().train.cameras, view), size, size)


def test_the_picture_sharpens_at_rest(working):
    worker, receiver = working()
    worker.ask(1, request_from(2, 80))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert not frames[0].sharp
    assert frames[0].pixels.shape[0] < 80
    expected = Painter(trained_run()).picture(request_from(2).viewpoint, Look(), 80, 80, sharp=True)
    assert (frames[-1].pixels.int() - expected.int()).abs().max() <= 1


def test_a_sharp_picture_of_nothing_has_its_reason_with_it(working):
    worker, receiver = working()
    there = request_from(2, 16)
    away = there.viewpoint.matrix @ torch.diag(torch.tensor([-1.0, 1.0, -1.0, 1.0]))
    worker.ask(1, replace(there, viewpoint=Viewpoint.of(away, there.viewpoint.fov)))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert frames[-1].absence == "no part of the field is visible from here"
    worker.ask(1, there)
    frames = receiver.wait(lambda frames: frames[-1].sharp and frames[-1].request == there)
    assert frames[-1].absence == ""


def test_what_is_wanted_last_is_what_is_seen_last(working):
    worker, receiver = working()
    for view in range(8):
        worker.ask(1, request_from(view))
    worker.look = Look("depth")
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert frames[-1].request == request_from(7)
    expected = Painter(trained_run()).picture(request_from(7).viewpoint, Look("depth"), 32, 32, sharp=True)
    assert (frames[-1].pixels.int() - expected.int()).abs().max() <= 1
    assert sum(frame.sharp for frame in frames) == 1


def test_everybody_sees_a_view_of_their_own(working):
    worker, receiver = working()
    worker.ask(1, request_from(1))
    worker.ask(2, request_from(2))
    receiver.wait(lambda frames: sum(frame.sharp for frame in frames) == 2)
    last = {who: frame.request for who, frame in receiver.frames}
    assert last == {1: request_from(1), 2: request_from(2)}
    worker.forget(2)
    assert worker.request_of(2) is None


def test_a_movement_ends_a_sharp_picture(working, monkeypatch):
    worker, receiver = working()
    original, reached, moved = Painter.picture, threading.Event(), threading.Event()

    def slow(self, *arguments, rows=None, **options):
        if rows is not None and rows[0] > 0 and not reached.is_set():
            reached.set()
            assert moved.wait(PATIENCE)
        return original(self, *arguments, rows=rows, **options)

    monkeypatch.setattr(Painter, "picture", slow)
    monkeypatch.setattr("voxelfield.viewer.scheduling.worker._BAND_SECONDS", 0.0)
    worker.ask(1, request_from(1, 64))
    assert reached.wait(PATIENCE)
    worker.ask(1, request_from(2, 64))
    moved.set()
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert [frame.request for frame in frames if frame.sharp] == [request_from(2, 64)]


def test_a_long_wait_for_the_sharp_picture_is_shortened_by_one_between(working, monkeypatch):
    monkeypatch.setattr("voxelfield.viewer.scheduling.worker._MEDIUM_SECONDS", 1e-3)
    worker, receiver = working(frames_per_second=1000.0)
    worker.ask(1, request_from(1, 200))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert [frame.sharp for frame in frames] == [False, False, True]


def test_a_still_is_as_sharp_as_the_evaluation(working):
    worker, _ = working()
    still = worker.still(1, request_from(4, 48)).result(PATIENCE)
    expected = Painter(trained_run()).picture(request_from(4).viewpoint, Look(), 48, 48, sharp=True)
    assert (still.int() - expected.int()).abs().max() <= 1


def test_others_see_their_pictures_while_a_still_is_drawn(working, monkeypatch):
    original, asked, seen = Painter.picture, threading.Event(), threading.Event()

    def slow(self, *arguments, rows=None, **options):
        if rows is not None and arguments[2] == 64:
            assert (asked if rows[0] < 48 else seen).wait(PATIENCE)
        return original(self, *arguments, rows=rows, **options)

    monkeypatch.setattr(Painter, "picture", slow)
    monkeypatch.setattr("voxelfield.viewer.scheduling.worker._BAND_SECONDS", 0.0)
    monkeypatch.setattr("voxelfield.viewer.scheduling.worker._REST_SECONDS", 0.0)
    worker, receiver = working()
    still = worker.still(1, request_from(4, 64))
    worker.ask(2, request_from(5, 48))
    asked.set()
    receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert not still.done()
    seen.set()
    expected = Painter(trained_run()).picture(request_from(4).viewpoint, Look(), 64, 64, sharp=True)
    assert (still.result(PATIENCE).int() - expected.int()).abs().max() <= 1


def test_a_still_is_drawn_though_somebody_always_moves(working):
    worker, _ = working()
    still = worker.still(1, request_from(4, 64))
    view = 0
    while not still.done():
        view += 1
        worker.ask(2, request_from(view % 20))
    assert still.result().shape == (64, 64, 3)


def test_a_still_ends_with_its_client_and_with_its_next_one(working, monkeypatch):
    original, go_on = Painter.picture, threading.Event()

    def slow(self, *arguments, **options):
        assert go_on.wait(PATIENCE)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Painter, "picture", slow)
    worker, _ = working()
    first, second = (worker.still(1, request_from(view, 64)) for view in (4, 5))
    other = worker.still(2, request_from(6))
    assert first.cancelled()
    worker.forget(2)
    assert other.cancelled()
    go_on.set()
    assert second.result(PATIENCE).shape == (64, 64, 3)


def test_what_cannot_be_drawn_for_one_is_drawn_for_others(working, monkeypatch, caplog):
    original = Painter.picture

    def picture(self, viewpoint, *arguments, **options):
        if viewpoint == request_from(1).viewpoint:
            raise RuntimeError("not from here")
        return original(self, viewpoint, *arguments, **options)

    monkeypatch.setattr(Painter, "picture", picture)
    worker, receiver = working()
    worker.ask(1, request_from(1))
    worker.ask(2, request_from(2))
    receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert {who for who, _ in receiver.frames} == {2}
    assert caplog.text.count("not from here") == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(2, 2), (2, 400), (400, 2)])
def test_the_narrowest_pictures_are_drawn(working, mode, size, caplog):
    worker, receiver = working()
    worker.look = Look(mode)
    worker.ask(1, Request(request_from(1).viewpoint, *size))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert frames[-1].pixels.shape[:2] == size
    assert "cannot draw" not in caplog.text


def test_a_field_that_cannot_be_drawn_is_told_once_and_survived(working, monkeypatch, caplog):
    worker, receiver = working()
    original = Painter.picture
    broken = threading.Event()
    broken.set()

    def picture(self, *arguments, **options):
        if broken.is_set():
            raise RuntimeError("no such voxel")
        return original(self, *arguments, **options)

    monkeypatch.setattr(Painter, "picture", picture)
    for view in range(3):
        worker.ask(1, request_from(view))
        time.sleep(0.1)
    broken.clear()
    worker.ask(1, request_from(3))
    receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert [record.getMessage() for record in caplog.records if "no such voxel" in record.message] == [
        "the viewer cannot draw: no such voxel"
    ]


class Growing:
    """A field that is another one from some moment on."""

    def __init__(self, first):
        self.device = first.field.aabb.device
        self.newest = first

    def poll(self):
        run, self.newest = self.newest, None
        return run


def test_a_newer_field_replaces_the_picture_without_a_movement(working, monkeypatch):
    monkeypatch.setattr("voxelfield.viewer.scheduling.worker._SHARE_FOR_UPDATES", 1.0)
    source = Growing(session().result())
    worker, receiver = working(source)
    worker.ask(1, request_from(2))
    first = receiver.wait(lambda frames: frames and frames[-1].sharp)[-1]
    source.newest = trained_run()
    frames = receiver.wait(lambda frames: sum(frame.sharp for frame in frames) == 2)
    expected = Painter(trained_run()).picture(request_from(2).viewpoint, Look(), 32, 32, sharp=True)
    assert (frames[-1].pixels.int() - expected.int()).abs().max() <= 1
    assert (frames[-1].pixels.int() - first.pixels.int()).abs().max() > 20


def weights(run) -> list[torch.Tensor]:
    return [value for value in run.field.state_dict().values() if isinstance(value, torch.Tensor)]


def test_training_is_the_same_whether_or_not_somebody_looks():
    given = []
    watched = session(on_step=lambda session: (field.after_step(session), given.append(field.poll())))
    field = LiveField(watched, connected=lambda: 1)
    watched.fit()
    assert [run.steps for run in given if run is not None] == list(range(1, 41))
    for mine, theirs in zip(weights(watched.result()), weights(trained_run()), strict=True):
        assert torch.equal(mine, theirs)
    # The last copy, which is not shared, is the field.
    for mine, theirs in zip(weights(given[-1]), weights(watched.result()), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    assert not any(parameter.requires_grad for parameter in given[-1].field.parameters())


def test_no_copy_is_made_unless_it_is_wanted():
    watched = session(on_step=lambda session: field.after_step(session))
    field = LiveField(watched, connected=lambda: 1)
    watched.fit()
    assert field.poll().steps == 1
    assert field.poll() is None


def test_pause_steps_and_going_on():
    watched = session(on_step=lambda session: field.after_step(session))
    field = LiveField(watched, connected=lambda: 1)
    field.pause()
    training = threading.Thread(target=watched.fit)
    began = time.perf_counter()
    training.start()

    def reaches(step):
        deadline = time.monotonic() + PATIENCE
        while watched.step < step:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        return watched.step

    assert reaches(1) == 1
    assert field.paused
    field.allow(3)
    assert reaches(4) == 4
    field.poll()
    time.sleep(0.2)
    assert field.poll().steps == 4, "what is shown is where training waits"
    field.resume()
    training.join(PATIENCE)
    assert watched.step == 40
    waited = time.perf_counter() - began
    assert watched.train_seconds < waited - 0.5, "waiting counts as training"
    for mine, theirs in zip(weights(watched.result()), weights(trained_run()), strict=True):
        assert torch.equal(mine, theirs)


def test_training_that_everybody_has_left_goes_on(monkeypatch):
    monkeypatch.setattr(live_module, "_ALONE_SECONDS", 0.1)
    watched = session(steps=3, on_step=lambda session: field.after_step(session))
    field = LiveField(watched, connected=lambda: 0)
    field.pause()
    assert watched.fit()
    assert not field.paused


def test_a_run_with_other_settings_keeps_them(working):
    run = trained_run()
    trainer = replace(run.trainer, evaluation_background="black")
    model = replace(run.model, sampling=trainer.sampling)
    dark = replace(run, config=replace(run.config, trainer=trainer), model=model)
    worker, _ = working(FinishedRun(dark))
    still = worker.still(1, request_from(0, 16)).result(PATIENCE)
    assert still[0, 0].tolist() == [0, 0, 0]
