"""The pictures printed on the model's panels, as sRGB arrays (H, W, 3)."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from make_bricks.arrays import Pixels


def lettering(draw: ImageDraw.ImageDraw, centre: tuple[float, float], text: str, size: int, fill: str) -> None:
    """Writes a bold line of text centred on a point."""
    font = ImageFont.load_default(size)
    draw.text(centre, text, fill=fill, font=font, anchor="mm", stroke_width=size // 22, stroke_fill=fill)


def checker(columns: int, rows: int, cell: int, dark: str, light: str) -> Image.Image:
    """Draws a chequered field."""
    odd = np.add.outer(np.arange(rows), np.arange(columns)) % 2 == 1
    pixels = np.where(odd[..., None], ImageColor.getrgb(dark), ImageColor.getrgb(light)).astype(np.uint8)
    return Image.fromarray(pixels.repeat(cell, 0).repeat(cell, 1))


def billboard_picture() -> Pixels:
    """Draws the harbour's name over a brick wall, with a chequered frame."""
    image = checker(36, 18, 32, "#1d2f57", "#f4f1e8")
    draw = ImageDraw.Draw(image)
    draw.rectangle((64, 64, 1087, 511), fill="#e9dfc6")
    for row in range(7):
        for column in range(-1, 9):
            x, y = 64 + column * 128 + 64 * (row % 2), 64 + row * 64
            box = (max(x + 5, 64), y + 5, min(x + 123, 1087), y + 59)
            if box[2] > box[0]:
                draw.rectangle(box, fill=("#cf5a3c", "#b9472f", "#de7650")[(row * 5 + column * 3) % 3])
    draw.rounded_rectangle((120, 120, 1031, 455), 40, fill="#f3bf1b", outline="#24262a", width=14)
    lettering(draw, (576, 225), "VOXEL", 170, "#24262a")
    lettering(draw, (576, 370), "HARBOUR", 130, "#92241f")
    return np.array(image)


def mural_picture() -> Pixels:
    """Draws a sail over waves, beside a test chart of stripes that grow finer."""
    image = Image.new("RGB", (640, 640), "#f4f1e8")
    draw = ImageDraw.Draw(image)
    for k, fill in enumerate(("#fbe3a6", "#f8cf7a", "#f3b45a")):
        draw.rectangle((0, 80 + k * 80, 640, 160 + k * 80), fill=fill)
    draw.rectangle((0, 0, 640, 80), fill="#f4f1e8")
    draw.ellipse((400, 110, 570, 280), fill="#cc2a23")
    draw.polygon([(240, 60), (240, 350), (60, 350)], fill="#ffffff")
    draw.polygon([(265, 100), (265, 350), (390, 350)], fill="#1d8a86")
    draw.polygon([(40, 365), (410, 365), (350, 430), (100, 430)], fill="#1d2f57")
    for row, fill in enumerate(("#3f97cf", "#1f6fb5", "#175a9c")):
        for x in range(-80 + 40 * (row % 2), 640, 80):
            draw.pieslice((x, 400 + row * 38, x + 80, 480 + row * 38), 180, 360, fill=fill)
        draw.rectangle((0, 440 + row * 38, 640, 640), fill=fill)
    draw.rectangle((0, 540, 640, 640), fill="#ffffff")
    x, width = 10, 40
    while x + width < 640 and width >= 8:
        draw.rectangle((x, 550, x + width // 2, 630), fill="#24262a")
        x, width = x + width, width - 1
    draw.rectangle((0, 0, 639, 639), outline="#1d2f57", width=12)
    return np.array(image)


def clock_picture() -> Pixels:
    """Draws a clock face that shows ten past ten."""
    image = Image.new("RGB", (256, 256), "#1d2f57")
    draw = ImageDraw.Draw(image)
    draw.ellipse((12, 12, 243, 243), fill="#f4f1e8", outline="#f3bf1b", width=12)
    for hour in range(12):
        x, y = np.cos(hour * np.pi / 6), np.sin(hour * np.pi / 6)
        draw.line((128 + 75 * x, 128 + 75 * y, 128 + 95 * x, 128 + 95 * y), fill="#24262a", width=12)
    draw.line((128, 128, 80, 98), fill="#24262a", width=16)
    draw.line((128, 128, 196, 84), fill="#cc2a23", width=12)
    return np.array(image)


def number_picture() -> Pixels:
    """Draws the tug's number between hazard stripes."""
    image = Image.new("RGB", (512, 256), "#f3bf1b")
    draw = ImageDraw.Draw(image)
    for x in range(-256, 512, 96):
        draw.polygon([(x, 256), (x + 48, 256), (x + 304, 0), (x + 256, 0)], fill="#24262a")
    draw.rectangle((110, 28, 401, 227), fill="#f4f1e8")
    lettering(draw, (256, 128), "No 7", 130, "#92241f")
    return np.array(image)
