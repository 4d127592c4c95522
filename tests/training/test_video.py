"""Videos: formats, sizes, and frames that are encoded while others are rendered."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from voxelfield.media.video import write_video
from voxelfield.rendering.cameras import Cameras
from voxelfield.runs.results import at_video_size

av = pytest.importorskip("av")
pyav = pytest.importorskip("imageio.plugins.pyav")


def images(count: int, height: int = 32, width: int = 64) -> list[torch.Tensor]:
    """Colours that change from left to right and from frame to frame."""
    across = torch.linspace(0, 1, width).expand(height, width)
    return [torch.stack((across, 1 - across, torch.full_like(across, i / count)), dim=-1) for i in range(count)]


def read(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def slow_down(monkeypatch, seconds: float, then=lambda: None) -> list[np.ndarray]:
    """Makes the encoder wait at each frame; returns the list that receives those that it has got."""
    encoded, write_frame = [], pyav.PyAVPlugin.write_frame

    def slow(self, frame):
        time.sleep(seconds)
        write_frame(self, frame)
        encoded.append(frame)
        then()

    monkeypatch.setattr(pyav.PyAVPlugin, "write_frame", slow)
    return encoded


def test_a_video_has_the_size_the_speed_and_the_colours_of_its_images(tmp_path):
    path = tmp_path / "video.MP4"
    write_video(path, images(6, 31, 65), 10)
    frames = read(path)
    assert frames.shape == (6, 32, 66, 3), "sides are even"
    expected = torch.stack(images(6, 31, 65)).mul(255).numpy()
    # Colours are shared between neighbouring pixels.
    assert np.abs(frames[:, :31, :65] - expected).mean() < 5
    assert [path.name for path in tmp_path.iterdir()] == [path.name]
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 10)


def test_a_video_states_its_colours(tmp_path):
    """Chromium would guess the matrix of BT.709 for one with 720 rows or more, and show an orange for a red."""
    write_video(tmp_path / "a.mp4", [torch.zeros(16, 16, 3)])
    with av.open(tmp_path / "a.mp4") as video:
        stated, values = video.streams.video[0].codec_context, av.video.reformatter
    assert stated.colorspace == values.Colorspace.ITU601
    assert stated.color_range == values.ColorRange.MPEG
    assert stated.color_primaries == values.ColorPrimaries.BT709
    assert stated.color_trc == values.ColorTrc.IEC61966_2_1


@pytest.mark.parametrize(("size", "drawn"), [((4000, 3000), (1067, 800)), ((200, 160), (200, 160))])
def test_the_video_of_a_run_has_800_rows_or_those_of_smaller_images(size, drawn):
    path = at_video_size(Cameras(torch.eye(4)[None], torch.full((1, 4), float(size[1])), *size))
    assert (path.width, path.height) == drawn
    assert float(path.intrinsics[0, 1]) == pytest.approx(drawn[1]), "the field of view stays"


def test_images_are_rendered_in_the_callers_thread_while_frames_wait(tmp_path, monkeypatch):
    encoded = slow_down(monkeypatch, 0.02)
    threads, ahead = set(), []

    def render():
        for image in images(20):
            threads.add(threading.current_thread())
            ahead.append(len(ahead) - len(encoded))
            yield image

    write_video(tmp_path / "video.mp4", render(), room=0)
    assert threads == {threading.main_thread()}
    assert 2 < max(ahead) < 16, "at least eight frames may wait, and no more without room"


def test_frames_that_wait_are_dropped_if_rendering_fails(tmp_path, monkeypatch):
    started = threading.Event()
    encoded = slow_down(monkeypatch, 0.02, started.set)

    def fail():
        yield from images(40)
        started.wait()
        raise RuntimeError("no light")

    with pytest.raises(RuntimeError, match="no light"):
        write_video(tmp_path / "video.mp4", fail())
    assert 0 < len(encoded) < 40
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also in tests that run in the background of a shell, which ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_the_encoder_is_waited_for_ends_it(tmp_path, monkeypatch):
    encoded = slow_down(monkeypatch, 0.05, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        write_video(tmp_path / "video.mp4", images(8))
    assert len(encoded) < 8
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_encoder_stops_rendering(tmp_path):
    rendered = []

    def render():
        for index in range(10_000):
            rendered.append(index)
            time.sleep(0.001)
            yield torch.zeros(32, 64 if index < 3 else 32, 3)

    with pytest.raises(ValueError, match=r"images\[3\] must have shape"):
        write_video(tmp_path / "video.mp4", render())
    assert len(rendered) < 10_000
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_raised_also_where_no_frame_that_waits_was_encoded(tmp_path, monkeypatch):
    def render():
        yield from images(8)
        raise RuntimeError("the renderer failed")

    monkeypatch.setattr("voxelfield.media.video.BackgroundWriter.submit", lambda *_: None)
    with pytest.raises(RuntimeError, match="the renderer failed"):
        write_video(tmp_path / "video.mp4", render())
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_refused(tmp_path):
    path = tmp_path / "video.mp4"
    with pytest.raises(ValueError, match=r"fps must lie in \[0.001, 1000\], got 0"):
        write_video(path, images(1), fps=0)
    with pytest.raises(ValueError, match=r"path must be a video \*\.mp4, got .*video\.mkv: write one, or a folder of "):
        write_video(path.with_suffix(".mkv"), images(1))
    with pytest.raises(ValueError, match="images must have 1 to 16384 pixels along each side, got 20000x2"):
        write_video(path, [torch.zeros(2, 20000, 3)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("frames", "error", "message"),
    [
        ([], ValueError, "at least one image"),
        ([torch.zeros(48, 64)], ValueError, r"images\[0\] must have shape \(H, W, 3\)"),
        (
            [torch.zeros(48, 64, 3), torch.zeros(48, 64, 3).byte()],
            TypeError,
            "rgb must be floating point, got torch.ui",
        ),
        ([torch.zeros(48, 64, 3), torch.zeros(48, 32, 3)], ValueError, r"\[1\] must have shape \(48, 64, 3\), got"),
    ],
)
def test_a_video_that_fails_leaves_the_previous_file(tmp_path, frames, error, message):
    path = tmp_path / "orbit.mp4"
    path.write_bytes(b"previous")
    with pytest.raises(error, match=message):
        write_video(path, frames)
    assert path.read_bytes() == b"previous"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("package", ["av", "imageio", "imageio.v3"])
def test_a_missing_package_is_named_before_a_frame_is_drawn(tmp_path, monkeypatch, package):
    def never():
        raise AssertionError("a frame was drawn")
        yield

    monkeypatch.setitem(sys.modules, package, None)
    install = r'pip install "voxelfield\[train\]"'
    with pytest.raises(
        ImportError, match=f"^{package.removesuffix('.v3')} must be installed to write a video: {install}"
    ):
        write_video(tmp_path / "orbit.mp4", never())
    assert list(tmp_path.iterdir()) == []
