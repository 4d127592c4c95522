"""The materials of the model's parts: name, sRGB colour and finish."""

from __future__ import annotations

MATERIALS = {
    "sea": ("#1f6fb5", "gloss"),
    "sea_deep": ("#175a9c", "gloss"),
    "sea_light": ("#3f97cf", "gloss"),
    "foam": ("#e4eef0", "matt"),
    "rock": ("#8b9095", "matt"),
    "rock_dark": ("#63686e", "matt"),
    "rock_light": ("#b1b4b3", "matt"),
    "moss": ("#6f7f4f", "matt"),
    "sand": ("#d9c28c", "matt"),
    "grass": ("#4f9a3c", "gloss"),
    "grass_light": ("#7fb83f", "gloss"),
    "leaf": ("#1f7340", "matt"),
    "wood": ("#8f5a33", "matt"),
    "wood_light": ("#b98350", "matt"),
    "white": ("#eeebe2", "gloss"),
    "cream": ("#ecd9a8", "matt"),
    "red": ("#cc2a23", "gloss"),
    "red_dark": ("#92241f", "matt"),
    "orange": ("#ea7a1e", "gloss"),
    "yellow": ("#f3bf1b", "gloss"),
    "navy": ("#1d2f57", "gloss"),
    "teal": ("#1d8a86", "matt"),
    "pink": ("#e583a6", "matt"),
    "black": ("#24262a", "gloss"),
}
