"""Image files that a file of a scene names, wherever the names were written.

Names may be Windows paths, absolute paths of another machine, or relative to a parent of the scene's folder. Files are
only looked for within the scene's folder.
"""

from __future__ import annotations

import glob
import logging
import os
import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from voxelfield.datasets.images import image_files
from voxelfield.files import IMAGE_SUFFIXES
from voxelfield.foundation.errors import shown

logger = logging.getLogger(__name__)

# Of any file system in use, in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_DRIVE = re.compile("[A-Za-z]:")
# In "view_0.5" the ".5" belongs to the name.
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}")


def find_images(file: Path, names: Iterable[str], key: str, folder: Path | None = None) -> dict[str, Path]:
    """Returns the path of each image that a file names.

    A name is a path relative to a folder, by default that of the file. If there is no such file, it is looked for by
    the last parts of the name (as many as possible), with any suffix and in upper or lower case; if several names would
    then mean the same file, none of them does. ``key`` is that of the names in the file, for messages.

    Returns:
        The paths by name, all within the folder; if a file is not found, its path does not exist.

    Raises:
        ValueError: A name is not a valid path; or names lead out of the folder, and no file within it resembles one of
            them.
    """
    folder, names = folder or file.parent, list(dict.fromkeys(names))
    inside = {name: _inside(file, folder, name, key) for name in names}
    found = {name: path for name in names if (path := _existing(folder, inside[name])) is not None}
    lost = [name for name in names if name not in found]
    if lost:
        index: dict[str, set[str]] = {}
        for path in images_within(folder):
            for form in (path.casefold(), _bare(path)):
                index.setdefault(form, set()).add(path)
        like = {name: path for name in lost if (path := _like(folder, index, name)) is not None}
        count = Counter([*like.values(), *found.values()])
        like = {name: path for name, path in like.items() if count[path] == 1}
        if like:
            name, path = next(iter(like.items()))
            logger.info(
                "%s: there is no file of %d of %d names in its folder; %s, for example, is read from %s",
                *(file, len(like), len(names), shown(name), path),
            )
        slashed = {name: _inside(file, folder, name.replace("\\", "/"), key) for name in lost}
        outside = [name for name, path in slashed.items() if _leaves(path) or _DRIVE.match(name)]
        if outside and like.keys().isdisjoint(outside):
            raise ValueError(f"{file}: '{key}' must be inside the scene's folder, got {shown(outside[0])}")
        found |= like
    return {name: folder / (found.get(name) or _with_suffixes("/".join(_parts(name)))[0]) for name in names}


def _inside(file: Path, folder: Path, name: str, key: str) -> str:
    """Returns a name in a file relative to a folder."""
    # Of the text alone: links stay as they are, because links within the folder may lead out of it.
    root = os.path.abspath(folder)  # noqa: PTH100
    inside = os.path.relpath(os.path.join(root, name), root)  # noqa: PTH118
    encoded = os.path.join(root, inside).encode(errors="surrogatepass")  # noqa: PTH118
    longest = max(map(len, encoded.split(os.sep.encode())))
    if longest > _LONGEST_NAME or len(encoded) > _LONGEST_PATH or re.search(rb"[\0\r\n]", encoded):
        raise ValueError(f"{file}: '{key}' must be a valid file path, got {shown(name)}")
    return inside


def _existing(folder: Path, path: str) -> str | None:
    """Returns the file within a folder that a relative path stands for, if there is one."""
    if _leaves(path):
        return None
    found = next((path for path in map(on_disk, map(folder.joinpath, _with_suffixes(path))) if path.is_file()), None)
    return None if found is None else found.relative_to(folder).as_posix()


def on_disk(path: Path) -> Path:
    """Returns a path, or the existing one that differs from it in Unicode's form only, where a Mac had "é" as two."""
    if str(path).isascii() or path.exists():
        return path
    folder, name = on_disk(path.parent), unicodedata.normalize("NFC", path.name)
    there = folder.iterdir() if folder.is_dir() else ()
    return next((each for each in there if unicodedata.normalize("NFC", each.name) == name), path)


def _leaves(path: str) -> bool:
    """Returns whether a relative path leads out of its folder."""
    return path.split(os.sep, 1)[0] == os.pardir


def _like(folder: Path, index: Mapping[str, set[str]], name: str) -> str | None:
    """Returns the file within a folder that shares the most last parts with a name, if it is only one."""
    parts = _parts(name)
    for first in range(len(parts)):
        tail = "/".join(parts[first:])
        exact = _existing(folder, tail)
        if exact is not None:
            return exact
        for form in (tail.casefold(), _bare(tail)):
            if len(alike := index.get(form, ())) == 1:
                return next(iter(alike))
    return None


def images_within(folder: Path) -> list[str]:
    """Lists the image files in a folder and its subfolders, with masks, relative to it and with slashes."""
    paths = image_files(folder, "**/*", masks=True)
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def why_missing(folder: Path, wanted: Path) -> str:
    """Returns, for a message, where the images of a scene's folder may be if all are missing, as ``wanted`` is."""
    there = sorted(images_within(folder))
    alike = [path for path in there if _bare(Path(path).name) == _bare(wanted.name)]
    if alike:
        return f"; there is {folder / alike[0]}: were the images moved or renamed?"
    unread = sorted(path.name for path in wanted.parent.glob(f"{glob.escape(wanted.stem)}.*") if path.is_file())
    if unread:
        return f"; there is {wanted.with_name(unread[0])}: convert such files to one of {', '.join(IMAGE_SUFFIXES)}"
    if not there:
        return f"; {folder} contains no images at all: were they copied along?"
    return f"; {folder} contains {len(there)} images of other names, such as {there[0]}"


def _parts(name: str) -> list[str]:
    """Returns the parts of a path of any system, without a drive and without dots."""
    parts = [part for part in posixpath.normpath(name.replace("\\", "/")).split("/") if part not in ("", ".", "..")]
    return parts[1:] if parts and _DRIVE.fullmatch(parts[0]) else parts


def _with_suffixes(path: str) -> list[str]:
    """Returns the paths that a name in a file stands for: itself and, if it has no suffix, with each that is read."""
    if path.lower().endswith(IMAGE_SUFFIXES):
        return [path]
    completed = [path + suffix for suffix in IMAGE_SUFFIXES]
    return [path, *completed] if _SUFFIX.fullmatch(posixpath.splitext(path)[1]) else completed


def _bare(path: str) -> str:
    """Returns a path in lower case and without the suffix of a file."""
    stem, suffix = posixpath.splitext(path.casefold())
    return stem if _SUFFIX.fullmatch(suffix) else stem + suffix
