"""Draws frontier.svg, seconds of training and frames per second against PSNR for bonsai: run it to draw it again.

The figures are those of docs/training.md. gsplat 1.6.0 and SVRaster were trained on the same images with their own
settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import svg

SIZE = (880, 340)
TOP, BOTTOM = 40.0, 270.0
PSNR = (30.0, 33.5)


@dataclass(frozen=True)
class System:
    """What was measured: seconds of training, frames of 800 x 533 per second where measured, and PSNR of both."""

    name: str
    seconds: float
    psnr: float
    frames: float | None = None
    drawn_psnr: float | None = None
    own: bool = True


SYSTEMS = (
    System("default", 58.4, 32.74),
    System("14,000 steps", 119.6, 32.76, 136, 32.7),
    System("best", 120.4, 33.14),
    System("deferred, 8000 steps", 57.9, 32.38, 480, 32.38),
    System("gsplat, H100", 202, 30.39, 470, 30.39, own=False),
    System("gsplat MCMC, H100", 256, 31.81, 300, 31.81, own=False),
    System("SVRaster", 219, 31.00, 404, 31.00, own=False),
)


def panel(left: float, title: str, ticks: tuple[int, ...], points: list[tuple[float, float, System]]) -> list[str]:
    """Returns the elements of a diagram with PSNR upwards; ``points`` have x, PSNR and what they stand for."""
    width = 340.0

    def at(x: float, psnr: float) -> svg.Point:
        return left + x / ticks[-1] * width, BOTTOM - (psnr - PSNR[0]) / (PSNR[1] - PSNR[0]) * (BOTTOM - TOP)

    parts = [svg.text((left + width / 2, SIZE[1] - 22.0), title, 'font-weight="bold"')]
    faint = f'stroke="{svg.INK}" stroke-opacity="0.3"'
    for psnr in range(int(PSNR[0]), int(PSNR[1]) + 1):
        parts += [svg.line(at(0, psnr), at(ticks[-1], psnr), faint)]
        parts += [svg.text((left - 8, at(0, psnr)[1] + 5), f"{psnr} dB", 'text-anchor="end" font-size="13"')]
    for tick in ticks:
        parts += [svg.line(at(tick, PSNR[0]), at(tick, PSNR[1]), faint)]
        parts += [svg.text((at(tick, PSNR[0])[0], BOTTOM + 20), str(tick), 'font-size="13"')]
    for x, psnr, system in points:
        color, (right, y) = (svg.BLUE if system.own else svg.ORANGE), at(x, psnr)
        last = x > 0.7 * ticks[-1]
        beside = (right - 9, y + 4) if last else (right + 9, y + 4)
        anchor = "end" if last else "start"
        parts += [svg.dot((right, y), 5, color)]
        parts += [svg.text(beside, system.name, f'text-anchor="{anchor}" font-size="13" fill="{color}"')]
    return parts


if __name__ == "__main__":
    trained = [(system.seconds, system.psnr, system) for system in SYSTEMS]
    drawn = [(s.frames, s.drawn_psnr, s) for s in SYSTEMS if s.frames is not None and s.drawn_psnr is not None]
    parts = panel(80, "seconds of training", (0, 60, 120, 180, 240, 300), trained)
    parts += panel(510, "frames per second", (0, 100, 200, 300, 400, 500), drawn)
    label = "PSNR on held-out views of bonsai against seconds of training and against frames per second"
    Path(__file__).with_name("frontier.svg").write_text(svg.drawing(SIZE, label, parts))
