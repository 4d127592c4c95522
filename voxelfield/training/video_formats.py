"""Which videos can be written: containers, codecs, and what the encoder is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class VideoFormat:
    """How ffmpeg encodes.

    Attributes:
        encoder: Its name for the encoder.
        pixels: Its name for the pixels' layout.
        options: Further arguments; qualities at which eyes hardly see a loss.
    """

    encoder: str
    pixels: str
    options: tuple[str, ...] = ()


CODECS = {
    "h264": VideoFormat("libx264", "yuv420p", ("-crf", "16", "-preset", "medium")),
    "hevc": VideoFormat("libx265", "yuv420p", ("-crf", "18", "-tag:v", "hvc1", "-x265-params", "log-level=error")),
    "av1": VideoFormat("libsvtav1", "yuv420p", ("-crf", "24", "-preset", "8")),
    "vp9": VideoFormat("libvpx-vp9", "yuv420p", ("-crf", "20", "-b:v", "0", "-row-mt", "1", "-cpu-used", "4")),
    "prores": VideoFormat("prores_ks", "yuv422p10le", ("-profile:v", "hq")),
}
"""Codecs by name. ProRes keeps 10 bits and is meant for editing."""

CONTAINERS = {
    ".mp4": ("h264", "hevc", "av1"),
    ".mkv": ("h264", "hevc", "av1", "vp9"),
    ".webm": ("vp9", "av1"),
    ".mov": ("prores", "h264", "hevc"),
}
"""Endings of files, and the codecs that each may have; the first is its default."""


def video_format(name: str, path: Path, codec: str | None = None) -> VideoFormat:
    """Returns how a file is encoded.

    Args:
        name: The argument, for messages.
        path: The file.
        codec: One of :data:`CODECS`; None: the container's default.

    Raises:
        ValueError: The ending is no container, or the container cannot hold the codec.
    """
    held = CONTAINERS.get(path.suffix.lower())
    if held is None:
        raise ValueError(f"{name} must be a video, *{', *'.join(CONTAINERS)}, got {path}")
    if codec is not None and codec not in held:
        raise ValueError(f"codec must be one of {', '.join(held)} in a {path.suffix.lower()} file, got {codec!r}")
    return CODECS[held[0] if codec is None else codec]
