"""SVG elements shared by the drawings in this folder."""

from __future__ import annotations

from collections.abc import Sequence

# Mid-tones, of similar contrast against white and against near-black.
INK, BLUE, ORANGE = "#7d8590", "#3b82f6", "#e0701a"

Point = tuple[float, float]


def line(start: Point, end: Point, style: str = "") -> str:
    """Returns a line."""
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" {style}/>'


def text(at: Point, words: str, style: str = "") -> str:
    """Returns a text, centred unless its style says otherwise; ``words`` may hold tspans."""
    return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" {style}>{words}</text>'


def sub(letter: str, index: str) -> str:
    """Returns a letter with a subscript, to be followed by more text on the line."""
    return f'{letter}<tspan dy="4" font-size="11">{index}</tspan><tspan dy="-4">&#8203;</tspan>'


def dot(at: Point, radius: float, color: str) -> str:
    """Returns a filled circle."""
    return f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}" fill="{color}"/>'


def rectangle(corner: Point, size: Point, style: str) -> str:
    """Returns a rectangle, given its upper left corner."""
    return f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}" {style}/>'


def curve(points: Sequence[Point], style: str) -> str:
    """Returns straight lines from each point to the next."""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" {style}/>'


def polygon(points: Sequence[Point], style: str) -> str:
    """Returns a closed outline."""
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" {style}/>'


def drawing(size: tuple[int, int], label: str, parts: Sequence[str]) -> str:
    """Returns the text of an SVG file.

    Args:
        size: Width and height.
        label: What the drawing shows, for those who cannot see it.
        parts: What it consists of; those that come later lie above.
    """
    width, height = size
    arrow = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="{INK}" text-anchor="middle">'
    )
    return "\n".join([head, arrow, *parts, "</svg>"]) + "\n"
