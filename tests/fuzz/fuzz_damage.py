"""Damage to files: bytes, JSON values, words of text and arrays, changed as accidents and mischief change them."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

_WORDS = [*b"nan inf -1 0 1e308 1e-320 text 0x10 1_000 #".split(), b"9" * 400, b"", b"\xff\xfe"]
_BYTES = [
    *(b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f\0\0\0\0", b"\0\0\0\0\0\0\0\x10", b"\0\0\0\0\0\0\xf0\x7f"),
    *(b"\n", b"{}"),
]
_VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e-300, 1e308, 10**400, math.nan, math.inf),
    *("", "text", "../up", "/etc/passwd", "\0", "a" * 5000, "v0.png", "images/v0.png", "OPENCV_FISHEYE"),
    *([], {}, [[]], [1, 2, 3], {"a": 1}, [[0.0] * 4] * 4, [[1e30] * 4] * 4),
]


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The same bytes with a few changed, lost, repeated or put in between."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        way = draw(st.sampled_from(["cut", "flip", "put", "overwrite", "lose", "repeat"]))
        if way == "cut":
            del data[at:]
        elif way == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif way == "put":
            data[at:at] = draw(st.sampled_from(_BYTES))
        elif way == "overwrite":
            new = draw(st.sampled_from(_BYTES))
            data[at : at + len(new)] = new
        else:
            size = draw(st.sampled_from([1, 4, 8, 24, 60]))
            data[at : at + size] = data[at : at + size] * (0 if way == "lose" else 2)
    return bytes(data)


@st.composite
def damaged_words(draw: st.DrawFn, content: bytes) -> bytes:
    """The same text with a word replaced, lost or repeated, or a line lost."""
    lines = content.split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    words = lines[at].split(b" ")
    which = draw(st.integers(0, len(words) - 1))
    way = draw(st.sampled_from(["replace", "replace", "lose", "repeat", "line"]))
    if way == "replace":
        words[which] = draw(st.sampled_from(_WORDS))
    elif way == "repeat":
        words[which:which] = words[which : which + 1]
    else:
        del words[which]
    lines[at : at + 1] = [] if way == "line" else [b" ".join(words)]
    return b"\n".join(lines)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in _places(item, (*path, key)))]


@st.composite
def damaged_value(draw: st.DrawFn, value: Any) -> Any:
    """The same value, of which a part is another, or gone, or there twice."""
    *path, last = draw(st.sampled_from(_places(value)[1:]))
    parent = value = json.loads(json.dumps(value))
    for key in path:
        parent = parent[key]
    way = draw(st.sampled_from(["replace", "replace", "replace", "lose", "number"]))
    if way == "lose":
        del parent[last]
    elif way == "number" and isinstance(parent[last], (int, float)):
        parent[last] = parent[last] * draw(st.sampled_from([-1, 0, 1.0005, 1.5, 1e20, 1e200]))
    else:
        parent[last] = draw(st.sampled_from(_VALUES))
    return value


@st.composite
def damaged_json(draw: st.DrawFn, content: bytes) -> bytes:
    """A JSON file with another value somewhere."""
    return json.dumps(draw(damaged_value(json.loads(content)))).encode()


@st.composite
def damaged_array(draw: st.DrawFn, content: bytes) -> bytes:
    """A NumPy file with an array of another shape, dtype, order or content."""
    array = np.load(io.BytesIO(content))
    way = draw(st.sampled_from(["dtype", "shape", "order", "content", "content", "content", "object"]))
    if way == "dtype":
        kinds = ["f2", "f4", ">f8", "i4", "u1", "c16", "S4", "U3", "?", "M8[s]", "f16"]
        with np.errstate(all="ignore"):
            array = array.astype(draw(st.sampled_from(kinds)))
    elif way == "shape":
        array = draw(
            st.sampled_from([array[:0], array[0], array[:, :16], array[None], array[:-1], array.sum(), array[::-1]])
        )
    elif way == "order":
        array = np.asfortranarray(array)
    elif way == "object":
        array = array.astype(object)
    else:
        row, column = draw(st.integers(0, array.shape[0] - 1)), draw(st.integers(0, array.shape[1] - 1))
        array[row, column] = draw(
            st.sampled_from([math.nan, math.inf, 0.0, -1.0, 1e-320, 1e30, 1e300, array[row, column] * 1.01])
        )
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@st.composite
def damaged_file(draw: st.DrawFn, name: str, content: bytes) -> bytes:
    """The same file damaged somehow, mostly so that its kind can still be read."""
    ways = {".json": damaged_json, ".npy": damaged_array, ".txt": damaged_words}
    suffix = name[name.rindex(".") :]
    if suffix in ways and draw(st.integers(0, 3)) > 0:
        return draw(ways[suffix](content))
    return draw(damaged_bytes(content))
