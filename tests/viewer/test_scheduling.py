"""The drawing thread, and training that runs at the same time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from viewer_scene import bricks, session, trained_run

from voxelfield.viewer import live as live_module
from voxelfield.viewer.display import MODES, Display, viewpoint_of
from voxelfield.viewer.live import LiveField
from voxelfield.viewer.painter import Painter
from voxelfield.viewer.worker import PictureRequest, RenderWorker, ResolutionControl

PATIENCE = 60


def test_pictures_become_as_large_as_time_allows():
    control = ResolutionControl()

    def settle(pixels_per_second: float) -> int:
        for _ in range(30):
            height, width = control.size(800, 1200)
            control.record(height * width, 0.01 + height * width / pixels_per_second, 800 * 1200, 0.1)
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

    def start(**options):
        receiver = Receiver()
        worker = RenderWorker(torch.device("cpu"), receiver, **{"run": trained_run(), **options})
        workers.append(worker)
        return worker, receiver

    yield start
    for worker in workers:
        worker.close()
        assert not worker._thread.is_alive()


def request_from(view: int, size: int = 32) -> PictureRequest:
    return PictureRequest(viewpoint_of(bricks().train.cameras, view), size, size)


def test_the_picture_sharpens_at_rest(working):
    worker, receiver = working()
    worker.request(1, request_from(2, 80))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert not frames[0].sharp
    assert frames[0].pixels.shape[0] < 80
    expected = Painter(trained_run()).picture(request_from(2).viewpoint, Display(), 80, 80, sharp=True)
    assert (frames[-1].pixels.int() - expected.int()).abs().max() <= 1


def test_what_is_wanted_last_is_what_is_seen_last(working):
    worker, receiver = working()
    for view in range(8):
        worker.request(1, request_from(view))
    worker.display = Display("depth")
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert frames[-1].request == request_from(7)
    expected = Painter(trained_run()).picture(request_from(7).viewpoint, Display("depth"), 32, 32, sharp=True)
    assert (frames[-1].pixels.int() - expected.int()).abs().max() <= 1
    assert sum(frame.sharp for frame in frames) == 1


def test_everybody_sees_a_view_of_their_own(working):
    worker, receiver = working()
    worker.request(1, request_from(1))
    worker.request(2, request_from(2))
    receiver.wait(lambda frames: sum(frame.sharp for frame in frames) == 2)
    last = {who: frame.request for who, frame in receiver.frames}
    assert last == {1: request_from(1), 2: request_from(2)}
    worker.disconnect(2)
    assert list(worker._clients) == [1]


def test_a_movement_ends_a_sharp_picture(working, monkeypatch):
    worker, receiver = working()
    original, reached, moved = Painter.picture, threading.Event(), threading.Event()

    def slow(self, *arguments, rows=None, **options):
        if rows is not None and rows[0] > 0 and not reached.is_set():
            reached.set()
            assert moved.wait(PATIENCE)
        return original(self, *arguments, rows=rows, **options)

    monkeypatch.setattr(Painter, "picture", slow)
    monkeypatch.setattr("voxelfield.viewer.worker._BAND_SECONDS", 0.0)
    worker.request(1, request_from(1, 64))
    assert reached.wait(PATIENCE)
    worker.request(1, request_from(2, 64))
    moved.set()
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert [frame.request for frame in frames if frame.sharp] == [request_from(2, 64)]


def test_a_screenshot_is_as_sharp_as_the_evaluation(working):
    worker, _ = working()
    picture = worker.screenshot(request_from(4, 48), lambda: True)
    expected = Painter(trained_run()).picture(request_from(4).viewpoint, Display(), 48, 48, sharp=True)
    assert (picture.int() - expected.int()).abs().max() <= 1
    assert worker.screenshot(request_from(4, 48), lambda: False) is None


def test_others_see_their_pictures_while_a_screenshot_is_drawn(working):
    worker, receiver = working()

    def is_wanted() -> bool:
        worker.request(2, request_from(5, 48))
        receiver.wait(lambda frames: frames and frames[-1].sharp)
        return True

    assert worker.screenshot(request_from(4, 64), is_wanted).shape == (64, 64, 3)


def test_what_cannot_be_drawn_for_one_is_drawn_for_others(working, monkeypatch, caplog):
    original = Painter.picture

    def picture(self, viewpoint, *arguments, **options):
        if viewpoint == request_from(1).viewpoint:
            raise RuntimeError("not from here")
        return original(self, viewpoint, *arguments, **options)

    monkeypatch.setattr(Painter, "picture", picture)
    worker, receiver = working()
    worker.request(1, request_from(1))
    worker.request(2, request_from(2))
    receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert {who for who, _ in receiver.frames} == {2}
    worker.request(1, request_from(3))
    receiver.wait(lambda frames: frames[-1].sharp and frames[-1].request == request_from(3))
    assert caplog.text.count("not from here") == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(2, 2), (2, 400), (400, 2)])
def test_the_narrowest_pictures_are_drawn(working, mode, size, caplog):
    worker, receiver = working()
    worker.display = Display(mode)
    worker.request(1, PictureRequest(request_from(1).viewpoint, *size))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert frames[-1].pixels.shape[:2] == size
    assert "cannot draw" not in caplog.text


def test_a_newer_field_replaces_the_picture_without_a_movement(working, monkeypatch):
    monkeypatch.setattr("voxelfield.viewer.worker._UPDATE_SHARE", 1.0)
    fields = [session().result()]
    worker, receiver = working(run=None, poll=lambda: fields.pop() if fields else None)
    worker.request(1, request_from(2))
    first = receiver.wait(lambda frames: frames and frames[-1].sharp)[-1]
    fields.append(trained_run())
    frames = receiver.wait(lambda frames: sum(frame.sharp for frame in frames) == 2)
    expected = Painter(trained_run()).picture(request_from(2).viewpoint, Display(), 32, 32, sharp=True)
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


def test_pausing_and_resuming():
    watched = session(on_step=lambda session: field.after_step(session))
    field = LiveField(watched, connected=lambda: 1)
    field.pause()
    training = threading.Thread(target=watched.fit)
    began = time.perf_counter()
    training.start()
    while watched.step < 1:
        assert time.perf_counter() - began < PATIENCE
        time.sleep(0.01)
    time.sleep(0.7)
    assert watched.step == 1
    assert field.paused
    assert field.poll().steps == 1
    assert field.poll() is None
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
    model = type(run.model)(run.field, run.occupancy, trainer.sampling)
    dark = replace(run, config=replace(run.config, trainer=trainer), model=model)
    worker, _ = working(run=dark)
    picture = worker.screenshot(request_from(0, 16), lambda: True)
    assert picture[0, 0].tolist() == [0, 0, 0]
