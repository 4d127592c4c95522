"""The drawing thread, and training that runs at the same time."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from free_ports import free_port
from viewer_scene import bricks, session, trained_run

from voxelfield.rendering.view_pictures import PICTURES
from voxelfield.rendering.viewpoints import viewpoint_of
from voxelfield.runs.watching import TrainingViewer
from voxelfield.settings import LoggerConfig
from voxelfield.viewer.pictures import Painter, PictureRequest, RenderWorker, _Client

PATIENCE = 60


def test_pictures_become_as_large_as_time_allows():
    request = PictureRequest(viewpoint_of(bricks().train.cameras, 0), "rgb", 800, 1200)
    client = _Client(1, request)

    def settle(pixels_per_second: float) -> int:
        for _ in range(30):
            reduced = client.reduced(request, 0.1)
            pixels = reduced.height * reduced.width
            client.record(pixels, 0.01 + pixels / pixels_per_second)
        return pixels

    slow = settle(5e5)
    assert 0.07 < 0.01 + slow / 5e5 < 0.13
    assert settle(1e9) == 800 * 1200
    assert 0.07 < 0.01 + settle(5e5) / 5e5 < 0.13
    reduced = client.reduced(request, 0.1)
    assert reduced.width / reduced.height == pytest.approx(1.5, rel=0.02)


class Receiver:
    """Gathers what a worker delivers."""

    def __init__(self) -> None:
        self.frames = []
        self._came = threading.Condition()

    def __call__(self, who, pixels, sharp, seconds):
        with self._came:
            self.frames.append((who, SimpleNamespace(pixels=pixels, sharp=sharp)))
            self._came.notify_all()

    def wait(self, condition):
        with self._came:
            assert self._came.wait_for(lambda: condition([frame for _, frame in self.frames]), PATIENCE)
            return [frame for _, frame in self.frames]


def poll_once(run):
    return partial(next, iter([run]), None)


@pytest.fixture
def working():
    workers = []

    def start(poll=None):
        receiver = Receiver()
        worker = RenderWorker(torch.device("cpu"), receiver, 20.0, poll or poll_once(trained_run()))
        workers.append(worker)
        return worker, receiver

    yield start
    for worker in workers:
        worker.close()
        assert not worker._thread.is_alive()


def request_from(view: int, size: int = 32, mode: str = "rgb") -> PictureRequest:
    return PictureRequest(viewpoint_of(bricks().train.cameras, view), mode, size, size)


def assert_shows(pixels: torch.Tensor, request: PictureRequest) -> None:
    """Whether a picture is the sharp one of a request."""
    expected = Painter(trained_run()).picture(request, sharp=True)
    assert (pixels.int() - expected.int()).abs().max() <= 1


def test_the_picture_sharpens_at_rest(working):
    worker, receiver = working()
    worker.request(1, request_from(2, 80))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert not frames[0].sharp
    assert frames[0].pixels.shape[0] < 80
    assert_shows(frames[-1].pixels, request_from(2, 80))


def test_what_is_wanted_last_is_what_is_seen_last(working):
    worker, receiver = working()
    for view in range(8):
        worker.request(1, request_from(view))
    worker.request(1, request_from(7, mode="depth"))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert_shows(frames[-1].pixels, request_from(7, mode="depth"))
    assert sum(frame.sharp for frame in frames) == 1


def test_everybody_sees_a_view_of_their_own(working):
    worker, receiver = working()
    worker.request(1, request_from(1))
    worker.request(2, request_from(2))
    receiver.wait(lambda frames: sum(frame.sharp for frame in frames) == 2)
    last = {who: frame.pixels for who, frame in receiver.frames}
    for who in (1, 2):
        assert_shows(last[who], request_from(who))
    worker.disconnect(2)
    assert list(worker._clients) == [1]


def test_a_movement_ends_a_sharp_picture(working, monkeypatch):
    worker, receiver = working()
    original, reached, moved = Painter.picture, threading.Event(), threading.Event()

    def slow(self, request, rows=None, **options):
        if rows is not None and rows[0] > 0 and not reached.is_set():
            reached.set()
            assert moved.wait(PATIENCE)
        return original(self, request, rows, **options)

    monkeypatch.setattr(Painter, "picture", slow)
    monkeypatch.setattr("voxelfield.viewer.pictures._BAND_SECONDS", 0.0)
    worker.request(1, request_from(1, 64))
    assert reached.wait(PATIENCE)
    worker.request(1, request_from(2, 64))
    moved.set()
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    (sharp,) = (frame for frame in frames if frame.sharp)
    assert_shows(sharp.pixels, request_from(2, 64))


def test_what_cannot_be_drawn_for_one_is_drawn_for_others(working, monkeypatch, caplog):
    original, failed = Painter.picture, []

    def picture(self, request, *arguments, **options):
        if request.viewpoint == request_from(1).viewpoint:
            failed.append(request)
            raise RuntimeError("not from here")
        return original(self, request, *arguments, **options)

    monkeypatch.setattr(Painter, "picture", picture)
    worker, receiver = working()
    worker.request(1, request_from(1))
    worker.request(2, request_from(2))
    receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert {who for who, _ in receiver.frames} == {2}
    worker.request(1, request_from(3))
    frames = receiver.wait(lambda frames: frames[-1].sharp and {who for who, _ in receiver.frames} == {1, 2})
    assert_shows(frames[-1].pixels, request_from(3))
    assert caplog.text.count("not from here") == 1
    assert len(failed) == 1


@pytest.mark.parametrize("mode", PICTURES)
@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1)])
def test_the_narrowest_pictures_are_drawn(working, mode, size, caplog):
    worker, receiver = working()
    worker.request(1, PictureRequest(request_from(1).viewpoint, mode, *size))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert frames[-1].pixels.shape[:2] == size
    assert "cannot draw" not in caplog.text


@pytest.mark.parametrize("hurried", [False, True])
def test_a_newer_field_replaces_the_picture_without_a_movement(working, monkeypatch, hurried):
    monkeypatch.setattr("voxelfield.viewer.pictures._UPDATE_FRACTION", 1e-9 if hurried else 1.0)
    fields = [session().result()]
    worker, receiver = working(lambda: fields.pop() if fields else None)
    worker.request(1, request_from(2))
    first = receiver.wait(lambda frames: frames and frames[-1].sharp)[-1]
    fields.append(trained_run())
    if hurried:
        worker.hurry()
    frames = receiver.wait(lambda frames: sum(frame.sharp for frame in frames) == 2)
    assert_shows(frames[-1].pixels, request_from(2))
    assert (frames[-1].pixels.int() - first.pixels.int()).abs().max() > 20


def weights(run) -> list[torch.Tensor]:
    return [value for value in run.field.state_dict().values() if isinstance(value, torch.Tensor)]


@pytest.fixture
def watching():
    """A viewer, and a session that it watches."""
    pytest.importorskip("viser")
    viewer = TrainingViewer(LoggerConfig(viewer_port=free_port()))
    # Only the test polls.
    given = []

    def after_step(watched):
        viewer.after_step(watched)
        given.append(viewer.poll() if viewer.polled else None)

    watched = session(on_step=after_step)
    viewer.begin(watched)
    viewer.page.worker.close()
    viewer.poll()
    yield viewer, watched, given
    viewer.end()


def test_training_is_the_same_whether_or_not_somebody_looks(watching):
    viewer, watched, given = watching
    viewer.polled = True
    watched.fit()
    assert [run.steps for run in given if run is not None] == list(range(1, 41))
    for mine, theirs in zip(weights(watched.result()), weights(trained_run()), strict=True):
        assert torch.equal(mine, theirs)
    # The last copy, which is not shared, is the field.
    for mine, theirs in zip(weights(given[-1]), weights(watched.result()), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    assert not any(parameter.requires_grad for parameter in given[-1].field.parameters())


def test_no_copy_is_made_unless_it_is_wanted(watching):
    viewer, watched, _ = watching
    viewer.polled = False
    watched.fit()
    assert viewer.poll().steps == 1
    assert viewer.poll() is None


def test_a_run_with_other_settings_keeps_them(working):
    run = trained_run()
    trainer = replace(run.trainer, evaluation_background="black")
    model = type(run.model)(run.field, run.occupancy, trainer.sampling)
    dark = replace(run, config=replace(run.config, trainer=trainer), model=model)
    worker, receiver = working(poll_once(dark))
    worker.request(1, request_from(0, 16))
    frames = receiver.wait(lambda frames: frames and frames[-1].sharp)
    assert frames[-1].pixels[0, 0].tolist() == [0, 0, 0]
