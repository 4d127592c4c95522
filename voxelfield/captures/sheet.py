"""The image sheet: thumbnails with names, and with what was found about them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from voxelfield.captures.capture import Capture
from voxelfield.captures.checks import Finding
from voxelfield.captures.palette import MUTED, WARNING, split_color

SHOWN = 80
"""Most thumbnails on a sheet."""

_GAP = 10
_LINE = 18
_MARGIN = 30
_NARROWEST = 120  # for names below narrow images


def shown_views(count: int, flagged: Sequence[int], max_views: int = SHOWN) -> list[int]:
    """Chooses views for a sheet: those that something was found about, and others spread evenly, in their order.

    Args:
        count: Number of views.
        flagged: Indices of those that something was found about.
        max_views: Number of views to choose; all if there are fewer.
    """
    if count <= max_views:
        return list(range(count))
    kept = sorted(set(flagged))[: max_views // 2]
    others = [index for index in range(count) if index not in set(kept)]
    room = max_views - len(kept)
    return sorted({*kept, *(others[index * len(others) // room] for index in range(room))})


def draw_sheet(capture: Capture, findings: Sequence[Finding], width: int) -> Image.Image:
    """Draws thumbnails in rows, with names in the colour of their split.

    Args:
        capture: The views.
        findings: Thumbnails that they are about have a frame, and the finding's title below the name.
        width: Width of the sheet, in pixels.

    Returns:
        An RGB image of that width, as high as it needs to be.
    """
    titles: dict[int, list[str]] = {}
    for finding in findings:
        # A finding about most views does not distinguish any of them.
        for index in finding.views if len(finding.views) <= len(capture) // 2 else ():
            titles.setdefault(index, []).append(finding.title)
    views = shown_views(len(capture), list(titles))
    widest = max(_NARROWEST, *(capture.thumbnails[index].width for index in views))
    columns = max(1, (width - 2 * _MARGIN + _GAP) // (widest + _GAP))
    cell = (width - 2 * _MARGIN + _GAP) // columns
    height = max(capture.thumbnails[index].height for index in views)
    lines = 1 + max((len(titles.get(index, ())) for index in views), default=0)
    row = height + lines * _LINE + _GAP
    rows = -(-len(views) // columns)
    sheet = Image.new("RGB", (width, 50 + rows * row + _MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    path = font_manager.findfont("DejaVu Sans")
    small, large = ImageFont.truetype(path, 13), ImageFont.truetype(path, 19)
    heading = "Images" if len(views) == len(capture) else f"{len(views)} of {len(capture)} images"
    draw.text((_MARGIN, 12), heading, fill="black", font=large)
    for place, index in enumerate(views):
        thumbnail = capture.thumbnails[index]
        x, y = _MARGIN + place % columns * cell, 50 + place // columns * row
        # Names stand right below their images, which are of different heights.
        top = y + height - thumbnail.height
        sheet.paste(thumbnail, (x, top))
        frame = (x - 1, top - 1, x + thumbnail.width, top + thumbnail.height)
        draw.rectangle(frame, outline=WARNING if index in titles else MUTED, width=3 if index in titles else 1)
        texts = [(capture.names[index], split_color(capture.splits[index]))]
        texts += [(title, WARNING) for title in titles.get(index, ())]
        for number, (text, color) in enumerate(texts):
            place_at = (x, y + height + 3 + number * _LINE)
            draw.text(place_at, shortened(text, small, cell - _GAP), fill=color, font=small)
    return sheet


def shortened(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Returns a text, without its middle if it is wider than a number of pixels."""
    kept = len(text)
    shown = text
    while font.getlength(shown) > width and kept > 2:
        kept -= 1
        shown = f"{text[: (kept + 1) // 2]}…{text[-(kept // 2) :]}"
    return shown
