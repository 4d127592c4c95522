"""Image files that a file of a scene names, wherever the names were written.

Names may be those of Windows, absolute ones of another machine, or relative to a folder around the scene. A file is
always looked for within the scene's folder.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from voxelfield.datasets.images import IMAGE_SUFFIXES
from voxelfield.ops._errors import shown

logger = logging.getLogger(__name__)

# Of any file system in use, in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_DRIVE = re.compile("[A-Za-z]:")
# In "view_0.5" the ".5" belongs to the name.
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}")


class ImagePaths:
    """Finds images by the names that a file has for them.

    Args:
        file: The file. It lies in the scene's folder.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._folder = os.path.abspath(file.parent)  # noqa: PTH100 - links stay as they are, unlike with resolve

    def find(self, names: Iterable[str], key: str) -> dict[str, Path]:
        """Returns the path of each image.

        A name is a path relative to the scene's folder. If there is no such file, it is looked for by the last parts of
        the name (as many as possible), with any suffix and in upper or lower case; if several names would then mean the
        same file, none of them does.

        Args:
            names: As the file has them.
            key: What the file calls them, for messages.

        Returns:
            The paths by name. A path within the folder stands for a file that is found nowhere.

        Raises:
            ValueError: A name cannot be that of a file.
        """
        names = list(dict.fromkeys(names))
        found: dict[str, str] = {}
        for name in names:
            inside = self._inside(name, key)
            exact = next((path for path in _with_suffixes(inside) if self._is_file(path)), None) if inside else None
            if exact is not None:
                found[name] = exact
        taken = set(found.values())
        elsewhere = {name: path for name in names if name not in found and (path := self._like(name)) is not None}
        count = Counter(elsewhere.values())
        elsewhere = {name: path for name, path in elsewhere.items() if path not in taken and count[path] == 1}
        if elsewhere:
            name, path = next(iter(elsewhere.items()))
            logger.info(
                "%s: there is no file of %d of %d names in its folder; %s, for example, is read from %s",
                *(self._file, len(elsewhere), len(names), shown(name), path),
            )
        found |= elsewhere
        return {name: self._file.parent / found.get(name, "/".join(_parts(name))) for name in names}

    def _inside(self, name: str, key: str) -> str | None:
        """Returns a name relative to the folder, or None if it leaves the folder.

        Raises:
            ValueError: No file can have the name.
        """
        # By its words, as links within the folder may well lead out of it.
        inside = os.path.relpath(os.path.join(self._folder, name), self._folder)  # noqa: PTH118 - Path would clean
        encoded = os.path.join(self._folder, inside).encode(errors="surrogatepass")  # noqa: PTH118
        longest = max(map(len, encoded.split(os.sep.encode())))
        if longest > _LONGEST_NAME or len(encoded) > _LONGEST_PATH or b"\0" in encoded:
            raise ValueError(f"{self._file}: '{key}' must be a valid file path, got {shown(name)}")
        return None if inside.split(os.sep, 1)[0] == os.pardir else inside

    def _is_file(self, path: str) -> bool:
        return (self._file.parent / path).is_file()

    def _like(self, name: str) -> str | None:
        """Returns the file within the folder that shares the most last parts with a name, if it is only one."""
        parts = _parts(name)
        tails = ["/".join(parts[first:]) for first in range(len(parts))]
        for tail in tails:
            exact = next((path for path in _with_suffixes(tail) if self._is_file(path)), None)
            if exact is not None:
                return exact
        for tail in tails:
            for form, files in self._files.items():
                alike = files.get(form(tail), [])
                if len(alike) == 1:
                    return alike[0]
        return None

    @cached_property
    def _files(self) -> Mapping[Callable[[str], str], dict[str, list[str]]]:
        """The images in the folder by their paths, first with suffixes and then without, in lower case."""
        files: dict[Callable[[str], str], dict[str, list[str]]] = {str.casefold: {}, _bare: {}}
        for path in images_within(Path(self._folder)):
            for form, known in files.items():
                known.setdefault(form(path), []).append(path)
        return files


def images_within(folder: Path) -> Iterator[str]:
    """Yields the image files in a folder and its folders, by suffix, relative to it and with slashes.

    Links to folders are not followed, and what begins with a dot is left out.
    """
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."):
                yield Path(place, name).relative_to(folder).as_posix()


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


def mask_path(masks: Path, image: Path) -> Path:
    """Returns the file of an image's mask, which need not exist.

    Args:
        masks: The folder of masks.
        image: The image, relative to the folder of images.
    """
    as_colmap_names_it = masks / image.with_name(f"{image.name}.png")
    by_stem = masks / image.with_suffix(".png")
    return by_stem if by_stem.exists() and not as_colmap_names_it.exists() else as_colmap_names_it
