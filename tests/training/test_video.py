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

from voxelfield.media import video
from voxelfield.media.video import CODECS, CONTAINERS, video_format, write_video

av = pytest.importorskip("av")


def images(count: int, height: int = 32, width: int = 64) -> list[torch.Tensor]:
    """Colours that change from left to right and from frame to frame."""
    across = torch.linspace(0, 1, width).expand(height, width)
    return [torch.stack((across, 1 - across, torch.full_like(across, i / count)), dim=-1) for i in range(count)]


def read(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def slow_down(monkeypatch, seconds: float, then=lambda: None) -> list[np.ndarray]:
    """Makes the encoder wait at each frame; returns the list that receives those that it has got."""
    encoded, append = [], video._Encoder.append

    def slow(self, frame):
        time.sleep(seconds)
        append(self, frame)
        encoded.append(frame)
        then()

    monkeypatch.setattr(video._Encoder, "append", slow)
    return encoded


@pytest.mark.parametrize(
    ("ending", "codec"), [(ending, codec) for ending in CONTAINERS for codec in CONTAINERS[ending]]
)
def test_every_container_supports_its_codecs(ending, codec, tmp_path):
    path = tmp_path / f"video{ending}"
    write_video(path, images(6, 31, 65), 10, video_format("path", path, codec))
    frames = read(path)
    assert frames.shape == (6, 32, 66, 3), "sides are even"
    expected = torch.stack(images(6, 31, 65)).mul(255).numpy()
    # Colours are shared between neighbouring pixels.
    assert np.abs(frames[:, :31, :65] - expected).mean() < 5
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


def test_an_unknown_container_and_an_unsupported_codec_are_refused():
    with pytest.raises(ValueError, match=r"--out must be a video, \*\.mp4, .*, got a\.avi"):
        video_format("--out", Path("a.avi"))
    with pytest.raises(ValueError, match=r"codec must be one of vp9, av1 in a \.webm file, got 'h264'"):
        video_format("--out", Path("a.webm"), "h264")
    assert video_format("--out", Path("A.MP4")) == CODECS["h264"]


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_takes_its_layouts_of_pixels(codec, tmp_path):
    path = tmp_path / ("video.mov" if codec == "prores" else "video.mkv")
    known = {layout.name for layout in av.Codec(CODECS[codec].encoder, "w").video_formats}
    for pixels in known & {"yuv420p", "yuv444p", "yuv420p10le", "yuv444p10le"}:
        chosen = video_format("path", path, codec, pixels=pixels)
        write_video(path, [torch.zeros(64, 64, 3)] * 2, encoding=chosen)
        with av.open(str(path)) as container:
            assert container.streams.video[0].pix_fmt == pixels


@pytest.mark.parametrize(
    ("path", "wanted", "message"),
    [
        ("a.mp4", {"crf": 52}, r"crf must lie in \[0, 51\] for h264, got 52"),
        ("a.webm", {"crf": -1}, r"crf must lie in \[0, 63\] for vp9, got -1"),
        ("a.mov", {"crf": 3}, "crf must be left out for prores, which has none, got 3"),
        ("a.mp4", {"pixels": "rgb24"}, "pixels must be one of yuv420p, .*yuv444p, .* for h264, got 'rgb24'"),
    ],
)
def test_unsupported_options_of_a_codec_are_refused(path, wanted, message):
    with pytest.raises(ValueError, match=message):
        video_format("--out", Path(path), **wanted)


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


def test_bad_arguments_are_refused(tmp_path):
    path = tmp_path / "video.mp4"
    with pytest.raises(ValueError, match="fps must be above 0, got 0"):
        write_video(path, images(1), fps=0)
    with pytest.raises(ValueError, match="images must be at least 64 pixels wide for hevc, got 48"):
        write_video(path, [torch.zeros(64, 48, 3)], encoding=CODECS["hevc"])
    with pytest.raises(OSError, match=r"video\.mp4 could not be written: FFmpeg stopped at frame 0 \("):
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


def test_a_missing_package_is_named_before_a_frame_is_drawn(tmp_path, monkeypatch):
    def never():
        raise AssertionError("a frame was drawn")
        yield

    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r'av must be installed to write a video: pip install "voxelfield\[train\]"'):
        write_video(tmp_path / "orbit.mp4", never())
    assert list(tmp_path.iterdir()) == []
