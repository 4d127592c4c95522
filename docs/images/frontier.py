"""Draws frontier.svg, PSNR and SSIM for bonsai against seconds of training and against frames per second.

Run it to draw it again. docs/presets.md shows the picture, with a table of most of its figures. gsplat 1.6.0 and
SVRaster were trained on the same images with their own settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import svg

SIZE = (880, 640)
WIDTH, HEIGHT = 340.0, 220.0


@dataclass(frozen=True)
class System:
    """What was measured: seconds of training, frames of 800 x 533 per second, and both qualities; None is not shown."""

    name: str
    seconds: float | None
    psnr: float
    ssim: float
    frames: float | None = None
    own: bool = True
    lift: float = 0.0  # of the name, in pixels, where another would overlap


@dataclass(frozen=True)
class Axis:
    """One axis of a diagram."""

    ticks: tuple[float, ...]
    form: str


SYSTEMS = (
    System("default", 35.3, 32.87, 0.937, 146.5),
    System("16,000 steps", 102.3, 33.18, 0.941, lift=4),
    System("best", 191.4, 33.34, 0.942),
    System("deferred, 24,000 steps", 150.2, 32.92, 0.938, lift=-10),
    System("deferred, 8000 steps", 57.9, 32.38, 0.932, 480),
    System("gsplat, H100", 202, 30.39, 0.923, 470, own=False),
    System("gsplat MCMC, H100", 256, 31.81, 0.939, 300, own=False),
    System("SVRaster", 219, 31.00, 0.940, 404, own=False, lift=8),
)
SECONDS, FRAMES = Axis((0, 60, 120, 180, 240, 300), "{:.0f}"), Axis((0, 100, 200, 300, 400, 500), "{:.0f}")
PSNR, SSIM = Axis((30, 31, 32, 33, 34), "{:.0f} dB"), Axis((0.92, 0.925, 0.93, 0.935, 0.94, 0.945), "{:.3f}")


def panel(left: float, top: float, across: Axis, up: Axis, points: list[tuple[float, float, System]]) -> list[str]:
    """Returns the elements of a diagram; ``points`` have x, y and what they stand for."""

    def at(x: float, y: float) -> svg.Point:
        right, high = (
            (value - axis.ticks[0]) / (axis.ticks[-1] - axis.ticks[0]) for value, axis in ((x, across), (y, up))
        )
        return left + right * WIDTH, top + (1 - high) * HEIGHT

    parts = []
    faint = f'stroke="{svg.INK}" stroke-opacity="0.3"'
    for y in up.ticks:
        parts += [svg.line(at(across.ticks[0], y), at(across.ticks[-1], y), faint)]
        parts += [svg.text((left - 8, at(0, y)[1] + 5), up.form.format(y), 'text-anchor="end" font-size="13"')]
    for x in across.ticks:
        parts += [svg.line(at(x, up.ticks[0]), at(x, up.ticks[-1]), faint)]
        parts += [svg.text((at(x, 0)[0], top + HEIGHT + 20), across.form.format(x), 'font-size="13"')]
    for x, value, system in points:
        color, (right, y) = (svg.BLUE if system.own else svg.ORANGE), at(x, value)
        last = right > left + 0.78 * WIDTH
        beside = (right - 9 if last else right + 9, y + 4 - system.lift)
        anchor = "end" if last else "start"
        parts += [svg.dot((right, y), 5, color)]
        parts += [svg.text(beside, system.name, f'text-anchor="{anchor}" font-size="13" fill="{color}"')]
    return parts


if __name__ == "__main__":
    parts = []
    for left, across, name in ((80, SECONDS, "seconds"), (510, FRAMES, "frames")):
        for top, up, quality in ((30, PSNR, "psnr"), (330, SSIM, "ssim")):
            places = [(getattr(system, name), getattr(system, quality), system) for system in SYSTEMS]
            parts += panel(left, top, across, up, [place for place in places if place[0] is not None])
    parts += [svg.text((250, SIZE[1] - 22.0), "seconds of training", 'font-weight="bold"')]
    parts += [svg.text((680, SIZE[1] - 22.0), "frames per second", 'font-weight="bold"')]
    label = "PSNR and SSIM on held-out views of bonsai against seconds of training and against frames per second"
    Path(__file__).with_name("frontier.svg").write_text(svg.drawing(SIZE, label, parts))
