"""The page of a capture: one HTML file that needs no other."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from voxelfield.captures.checks import Finding

BOX, MUTED, WARNING = "#202124", "#9aa0a6", "#c5221f"
"""Colours of the page and the picture: of the scene's box, secondary elements and warnings."""

SPLITS = {"train": "#1f6fb4", "val": "#2e8b57", "test": "#d9660a"}
"""Colours of the splits' cameras and names; those of other splits are muted."""

_STYLE = f"""
body {{ font: 16px/1.5 system-ui, sans-serif; color: {BOX}; max-width: 1240px; margin: 2em auto; padding: 0 1em }}
h1 {{ font-size: 1.5em }}
h2 {{ font-size: 1.15em; margin-top: 1.6em }}
li b {{ color: {WARNING} }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: 0.2em 1.5em 0.2em 0; border-bottom: 1px solid #e8eaed; vertical-align: top }}
th {{ font-weight: normal; color: #5f6368; white-space: nowrap }}
img {{ max-width: 100%; margin-top: 1em }}
"""


def make_page(name: str, rows: Sequence[tuple[str, str]], findings: Sequence[Finding], picture: bytes) -> str:
    """Returns the HTML of a page with warnings, a table of figures and a picture.

    Args:
        name: The scene's name.
        rows: Labels and texts of the table.
        findings: The warnings.
        picture: A PNG file, which becomes part of the page.
    """
    if findings:
        items = "\n".join(f"<li><b>{escape(finding.title)}</b>: {escape(finding.message)}</li>" for finding in findings)
        warnings = f"<ul>\n{items}\n</ul>"
    else:
        warnings = "<p>Nothing unusual was found.</p>"
    table = "\n".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows)
    title, data = escape(name), base64.b64encode(picture).decode()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<h2>Warnings</h2>
{warnings}
<h2>Figures</h2>
<table>
{table}
</table>
<h2>Cameras and images</h2>
<img alt="Cameras, box, points and images of {title}" src="data:image/png;base64,{data}">
</body>
</html>
"""
