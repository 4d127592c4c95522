"""Texts within the page's Markdown, which viser's client renders with the HTML and the scripts that it contains."""

from __future__ import annotations

import re


def code(text: str) -> str:
    """Returns a text as Markdown that shows it letter by letter, whatever it contains, in the font of code.

    Args:
        text: The text. Line breaks and other control characters are shown as question marks.
    """
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", "?", text)
    # A span of code ends at as many backticks as it begins with, and loses a space from either end.
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}"
