"""Videos: formats, sizes, and frames that are encoded while others are rendered."""

from __future__ import annotations

import _thread
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from voxelfield.media import video
from voxelfield.media.video import CODECS, CONTAINERS, Pace, video_format, write_video, write_views

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


HELD = [(ending, codec) for ending, codecs in CONTAINERS.items() for codec in codecs]


@pytest.mark.parametrize(("ending", "codec"), HELD)
def test_every_container_holds_its_codecs(ending, codec, tmp_path):
    path = tmp_path / f"video{ending}"
    pace = write_views(path, images(6), 10, codec)
    frames = read(path)
    assert frames.shape == (6, 32, 64, 3)
    expected = torch.stack(images(6)).mul(255).numpy()
    # Colours are shared between neighbouring pixels.
    assert np.abs(frames - expected).mean() < 5
    assert pace.frames == 6
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


def test_a_container_that_is_none_and_a_codec_that_it_cannot_hold_are_refused():
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
        write_video(path, [np.zeros((64, 64, 3), np.uint8)] * 2, codec=chosen)
        with av.open(str(path)) as container:
            assert container.streams.video[0].pix_fmt == pixels


def test_a_higher_rate_factor_makes_a_smaller_file(tmp_path):
    noise = [(255 * image).byte().numpy() for image in images(4)]
    sizes = []
    for crf in (0, 45):
        write_video(tmp_path / "a.mp4", noise, codec=video_format("path", Path("a.mp4"), crf=crf))
        sizes.append((tmp_path / "a.mp4").stat().st_size)
    assert sizes[1] < 0.7 * sizes[0]


@pytest.mark.parametrize(
    ("path", "wanted", "message"),
    [
        ("a.mp4", {"crf": 52}, r"crf must lie in \[0, 51\] for h264, got 52"),
        ("a.webm", {"crf": -1}, r"crf must lie in \[0, 63\] for vp9, got -1"),
        ("a.mov", {"crf": 3}, "crf must be left out for prores, which has none, got 3"),
        ("a.mp4", {"pixels": "rgb24"}, "pixels must be one of yuv420p, .*yuv444p, .* for h264, got 'rgb24'"),
    ],
)
def test_what_a_codec_cannot_be_told_is_refused(path, wanted, message):
    with pytest.raises(ValueError, match=message):
        video_format("--out", Path(path), **wanted)


def test_frames_are_encoded_while_others_are_rendered(tmp_path):
    threads = set()

    def render():
        for image in images(20):
            threads.add(threading.current_thread().name)
            time.sleep(0.01)
            yield image

    pace = write_views(tmp_path / "video.mp4", render())
    assert threads == {"MainThread"}
    assert pace.frames == 20
    assert pace.encoding > 0


def test_a_slow_encoder_is_waited_for_and_said_to_be(tmp_path, monkeypatch):
    slow_down(monkeypatch, 0.02)
    pace = write_views(tmp_path / "video.mp4", images(20), room=0)
    assert pace.waited > 0
    assert str(Pace(10, rendering=1.0, encoding=4.0, waited=3.0)) == (
        "10 frames rendered and 2.5 encoded per second; rendering waited for the encoder 75 % of the time"
    )


def test_frames_arrive_in_order_and_whole(tmp_path, monkeypatch):
    found = slow_down(monkeypatch, 0)
    given = [torch.full((4, 6, 3), index / 255) for index in range(30)]
    pace = write_views(tmp_path / "video.mp4", given)
    assert [int(frame[0, 0, 0]) for frame in found] == list(range(30))
    assert pace.frames == 30


@pytest.mark.cuda
def test_a_slow_device_is_not_taken_for_a_slow_encoder(tmp_path):
    def render():
        for _ in range(40):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
            yield torch.zeros(64, 64, 3, device="cuda")

    pace = write_views(tmp_path / "video.mp4", render())
    assert pace.rendering > 0.2
    assert pace.waited < 0.1 * pace.rendering


def test_what_stops_rendering_stops_the_video(tmp_path):
    def fail():
        yield from images(3)
        raise RuntimeError("no light")

    with pytest.raises(RuntimeError, match="no light"):
        write_views(tmp_path / "video.mp4", fail())
    assert list(tmp_path.iterdir()) == []


def test_frames_that_wait_are_dropped_if_rendering_fails(tmp_path, monkeypatch):
    started = threading.Event()
    encoded = slow_down(monkeypatch, 0.02, started.set)

    def fail():
        yield from images(40)
        started.wait()
        raise RuntimeError("no light")

    with pytest.raises(RuntimeError, match="no light"):
        write_views(tmp_path / "video.mp4", fail())
    assert 0 < len(encoded) < 40
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_the_encoder_is_waited_for_ends_it(tmp_path, monkeypatch):
    encoded = slow_down(monkeypatch, 0.05, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        write_views(tmp_path / "video.mp4", images(8))
    assert len(encoded) < 8
    assert list(tmp_path.iterdir()) == []


def test_what_stops_the_encoder_stops_rendering(tmp_path):
    rendered = []

    def render():
        for index in range(10_000):
            rendered.append(index)
            time.sleep(0.001)
            yield torch.zeros(32, 64 if index < 3 else 32, 3)

    with pytest.raises(ValueError, match=r"frames\[3\] must have shape"):
        write_views(tmp_path / "video.mp4", render())
    assert len(rendered) < 10_000
    assert list(tmp_path.iterdir()) == []


def test_a_pace_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="fps must be above 0, got 0"):
        write_video(tmp_path / "video.mp4", [np.zeros((4, 4, 3), np.uint8)], fps=0)


def test_an_hevc_frame_that_x265_cannot_take_is_refused(tmp_path):
    with pytest.raises(ValueError, match="frames must be at least 64 pixels wide for hevc, got 48"):
        write_video(tmp_path / "video.mp4", [np.zeros((64, 48, 3), np.uint8)], codec="hevc")
    assert list(tmp_path.iterdir()) == []


def test_what_an_encoder_refuses_is_told(tmp_path):
    with pytest.raises(OSError, match=r"video\.mp4 could not be written: FFmpeg stopped at frame 0 \("):
        write_video(tmp_path / "video.mp4", [np.zeros((2, 20000, 3), np.uint8)])
    assert list(tmp_path.iterdir()) == []
