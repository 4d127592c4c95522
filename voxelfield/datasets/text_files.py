"""Text files of cameras as other programs write them: XML, numbers in them and in JSON, and keys without effect."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from voxelfield.files import json_number, open_regular, read_regular
from voxelfield.foundation.errors import shown

logger = logging.getLogger(__name__)

_HEAD = 4096  # bytes of a file by which its format is recognised


def files_with(folder: Path, pattern: str, words: Sequence[bytes]) -> list[Path]:
    """Lists the files of a folder, sorted, that match a pattern and have all of some words at their beginning."""
    found = []
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
            head = file.read(_HEAD)
            found += [path] if all(word in head for word in words) else []
    return found


def read_xml(file: Path) -> ElementTree.Element:
    """Returns the root of an XML file. Raises ValueError if it is none, or defines entities, which may be endless."""
    content = read_regular(file)
    try:
        if b"<!ENTITY" in content:
            raise ValueError("it defines entities")
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ValueError(f"{file}: not valid XML ({error})") from error


def numbers_in(name: str, text: str | None, counts: Collection[int], wanted: str) -> list[float]:
    """Returns the finite numbers in a text, which must have one of some counts; ``wanted`` describes them."""
    try:
        numbers = [float(word) for word in (text or "").split()]
    except ValueError as error:
        raise ValueError(f"{name}: must hold numbers only ({error})") from error
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name}: must hold finite numbers only, got infinity or NaN")
    if len(numbers) not in counts:
        raise ValueError(f"{name}: must hold {wanted}, got {len(numbers)} numbers")
    return numbers


def json_numbers(file: Path, key: str, values: Any, count: int) -> list[float]:
    """Returns a list of finite numbers that a JSON file has under a key."""
    numbers = [json_number(value) for value in values] if isinstance(values, list) else []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{file}: '{key}' must be a list of {count} numbers, got {shown(values)}")
    return numbers


def warn_of_unused(file: Path, keys: Iterable[str], known: Collection[str]) -> None:
    """Names keys of a file that no reader knows in the log."""
    if unused := sorted({*keys} - {*known}):
        logger.warning("%s: these keys have no effect: %s", file, ", ".join(map(shown, unused)))
