"""Supported video formats: containers, codecs, and the encoder's options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class VideoFormat:
    """Encoding options for ffmpeg.

    Attributes:
        encoder: ffmpeg's name of the encoder.
        pixels: ffmpeg's name of the pixel format.
        options: Further arguments.
        other_pixels: Further pixel formats that the encoder supports.
        crf: Constant rate factor: higher values give smaller files of lower quality. The defaults are nearly visually
            lossless. None if the encoder has no such option.
        max_crf: Largest constant rate factor.
    """

    encoder: str
    pixels: str
    options: tuple[str, ...] = ()
    other_pixels: tuple[str, ...] = ()
    crf: int | None = None
    max_crf: int = 51


_SUBSAMPLED_10 = ("yuv420p10le",)
_ALL = ("yuv444p", "yuv420p10le", "yuv444p10le")
CODECS = {
    "h264": VideoFormat("libx264", "yuv420p", ("-preset", "veryfast"), _ALL, 16),
    "hevc": VideoFormat("libx265", "yuv420p", ("-tag:v", "hvc1", "-x265-params", "log-level=error"), _ALL, 18),
    "av1": VideoFormat("libsvtav1", "yuv420p", ("-preset", "8"), _SUBSAMPLED_10, 24, 63),
    "vp9": VideoFormat("libvpx-vp9", "yuv420p", ("-b:v", "0", "-row-mt", "1", "-cpu-used", "4"), _ALL, 20, 63),
    "prores": VideoFormat("prores_ks", "yuv422p10le", ("-profile:v", "hq")),
}
"""Codecs by name. ProRes keeps 10 bits and is meant for editing."""

CONTAINERS = {
    ".mp4": ("h264", "hevc", "av1"),
    ".mkv": ("h264", "hevc", "av1", "vp9"),
    ".webm": ("vp9", "av1"),
    ".mov": ("prores", "h264", "hevc"),
}
"""Supported codecs by file suffix; the first of each is the default."""


def video_format(
    name: str, path: Path, codec: str | None = None, *, crf: int | None = None, pixels: str | None = None
) -> VideoFormat:
    """Returns the encoding options for a file.

    Args:
        name: Name of the argument, for messages.
        path: The file.
        codec: One of :data:`CODECS`; None for the container's default.
        crf: Constant rate factor; None for the codec's default.
        pixels: ffmpeg's name of the pixel format, such as ``yuv444p`` for colours at full resolution; None for the
            codec's default, which most players support.

    Raises:
        ValueError: The suffix is not that of a container, the container does not support the codec, or the codec does
            not support an option.
    """
    held = CONTAINERS.get(path.suffix.lower())
    if held is None:
        raise ValueError(f"{name} must be a video, *{', *'.join(CONTAINERS)}, got {path}")
    if codec is not None and codec not in held:
        raise ValueError(f"codec must be one of {', '.join(held)} in a {path.suffix.lower()} file, got {codec!r}")
    chosen_codec = held[0] if codec is None else codec
    chosen = CODECS[chosen_codec]
    if crf is not None:
        if chosen.crf is None:
            raise ValueError(f"crf must be left out for {chosen_codec}, which has none, got {crf}")
        if not 0 <= crf <= chosen.max_crf:
            raise ValueError(f"crf must lie in [0, {chosen.max_crf}] for {chosen_codec}, got {crf}")
        chosen = replace(chosen, crf=crf)
    if pixels is not None:
        layouts = (chosen.pixels, *chosen.other_pixels)
        if pixels not in layouts:
            raise ValueError(f"pixels must be one of {', '.join(layouts)} for {chosen_codec}, got {pixels!r}")
        chosen = replace(chosen, pixels=pixels)
    return chosen
