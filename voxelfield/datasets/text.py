"""Text and JSON files of scenes."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

from voxelfield.files import read_regular

# That of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_text(file: Path) -> str:
    """Reads a text file: UTF-8, or what a byte order mark says, as Windows editors write it.

    Raises:
        ValueError: It is neither, or no regular file.
    """
    content = read_regular(file)
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: must be UTF-8 text, or UTF-16 with a byte order mark ({error})") from error


def json_object(name: str, content: str | bytes) -> dict[str, Any]:
    """Returns the JSON object that a file consists of.

    Args:
        name: Name of the file, for messages.
        content: Content of the file.

    Raises:
        ValueError: It is not a JSON object.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name}: must hold a JSON object, got a {type(found).__name__}")
    return found
