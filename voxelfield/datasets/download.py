"""Fetches public scenes: ``voxelfield download lego [--root data] [--url URL ...]``.

Every file is checked against a SHA-256 from the scene's manifest. Files that are already there and right are kept, and
when all are, nothing is fetched. The files that make a folder count as a scene are put in place last. Archives are not
trusted: their size, and the size of what is taken from them, is limited.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from voxelfield.datasets.catalogue import downloadable_scenes, manifest_path

_CHUNK = 1 << 20
_SHOWN = 3

# Largest number of bytes of an archive, and of a scene whose manifest states no size.
_MAX_ARCHIVE = 4 << 30
_MAX_SCENE = 4 << 30

logger = logging.getLogger(__name__)


class DownloadError(OSError):
    """No archive gave a complete and correct scene."""


@dataclass(frozen=True)
class Manifest:
    """What a complete scene consists of and where it can be had.

    Args:
        name: The scene's name, and its folder's.
        licence: Licence of the data.
        credit: Whom to credit.
        archives: URLs of zip archives, in the order to try.
        files: Path inside the scene's folder -> SHA-256 in hexadecimal.
        size: Number of bytes of all files; None if it is not known.
    """

    name: str
    licence: str
    credit: str
    archives: tuple[str, ...]
    files: Mapping[str, str]
    size: int | None = None


def load_manifest(name: str) -> Manifest:
    """Reads the manifest of a scene that voxelfield can fetch.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    path = manifest_path(name)
    if not path.is_file():
        raise ValueError(f"scene must be one that has a download ({', '.join(downloadable_scenes())}), got {name!r}")
    content = json.loads(path.read_text(encoding="utf-8"))
    return Manifest(**{**content, "archives": tuple(content["archives"])})


def download(
    name: str,
    root: Path | str = "data",
    urls: Sequence[str] | None = None,
    *,
    manifest: Manifest | None = None,
) -> Path:
    """Completes the scene ``root/name`` from the first archive that answers and is right.

    Archives are zip files in which the scene may lie under any folder. Files in place whose hash is wrong are replaced.

    Args:
        name: The scene's name.
        root: Folder of scenes; created if missing.
        urls: Archives to try, in order, instead of the manifest's.
        manifest: What to fetch, instead of the manifest that voxelfield has for ``name``.

    Returns:
        The scene's folder, every file of the manifest verified.

    Raises:
        ValueError: The scene has no manifest.
        ModuleNotFoundError: pooch is not installed.
        DownloadError: No archive gave the scene; the message lists each with its reason.
    """
    manifest = manifest or load_manifest(name)
    root = Path(root)
    folder = root / manifest.name
    wanted = _unverified(folder, manifest.files)
    if not wanted:
        logger.info("%s: all %d files are present and verified, nothing to fetch", folder, len(manifest.files))
        return folder
    replaced = [path for path in wanted if (folder / path).exists()]
    if replaced:
        logger.warning("%s: replacing files that differ from the manifest (%d): %s", folder, *_summary(replaced))
    logger.info("%s: %s; licence %s", manifest.name, manifest.credit, manifest.licence)
    root.mkdir(parents=True, exist_ok=True)
    reasons = []
    for url in urls if urls is not None else manifest.archives:
        logger.info("fetching %s for %d of %d files", url, len(wanted), len(manifest.files))
        with tempfile.TemporaryDirectory(prefix=f".{manifest.name}-", dir=root) as scratch:
            reason = _complete_from(url, Path(scratch), folder, manifest, wanted)
        if not reason:
            logger.info("%s: all %d files verified", folder, len(manifest.files))
            return folder
        logger.warning("%s: %s", url, reason)
        reasons.append(f"{url}: {reason}")
        wanted = _unverified(folder, manifest.files)
    tried = "; ".join(reasons) or "no archive to try"
    raise DownloadError(f"scene '{manifest.name}' could not be fetched into {folder}: {tried}")


def _complete_from(url: str, scratch: Path, folder: Path, manifest: Manifest, wanted: Sequence[str]) -> str:
    """Fetches one archive and takes the wanted files from it; returns why that failed, or an empty string."""
    try:
        archive = _fetch(url, scratch)
        with zipfile.ZipFile(archive) as opened:
            problems = _extract(opened, folder, manifest, wanted)
    except zipfile.BadZipFile as error:
        return f"not a zip archive ({error})"
    except (OSError, ValueError, NotImplementedError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    if not problems:
        return ""
    count, listed = _summary(problems)
    return f"wrong or missing files ({count}): {listed}"


def _fetch(url: str, scratch: Path) -> Path:
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('downloads need pooch: pip install "voxelfield[train]"') from error
    # Its info line advises to paste a hash of the archive into the code; here every file has one.
    pooch.get_logger().setLevel(logging.WARNING)

    path = scratch / "archive.zip"
    with path.open("wb") as file:
        # Its downloader alone, because the hash of the archive is of no use.
        limited = _LimitedFile(file, _MAX_ARCHIVE)
        pooch.downloaders.choose_downloader(url, progressbar=True)(url, limited, None)
    return path


class _LimitedFile:
    """A file that refuses to grow beyond a size, however much a server sends."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file, self._limit, self._size = file, limit, 0

    def write(self, data: bytes) -> int:
        self._size += len(data)
        if self._size > self._limit:
            raise ValueError(f"the archive must have at most {self._limit} bytes, but the server sends more")
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _extract(archive: zipfile.ZipFile, folder: Path, manifest: Manifest, wanted: Sequence[str]) -> list[str]:
    """Puts the wanted files in place that the archive has right; returns what is wrong with the others."""
    members = set(archive.namelist())
    prefix = _prefix(members, manifest)
    images = [path for path in wanted if not path.endswith(".json")]
    index = [path for path in wanted if path.endswith(".json")]
    problems: list[str] = []
    _check_size(archive, [prefix + path for path in wanted if prefix + path in members], manifest)
    # Image by image, but the json files, which make the folder count as a scene, together and after all else.
    for group in [*([path] for path in images), index]:
        if group is index and problems:
            break
        staged: list[tuple[Path, Path]] = []
        try:
            for path in group:
                target = folder / path
                part = target.with_name(f".{target.name}.{os.getpid()}.part")
                staged.append((part, target))
                if problem := _stage(archive, prefix + path, members, part, manifest.files[path]):
                    problems.append(f"{path}: {problem}")
            if not (group is index and problems):
                for part, target in staged:
                    if part.exists():
                        part.replace(target)
        finally:
            for part, _ in staged:
                part.unlink(missing_ok=True)
    return problems


def _check_size(archive: zipfile.ZipFile, members: Sequence[str], manifest: Manifest) -> None:
    """Raises ValueError if members are larger than the scene; no more than their stated size is ever read."""
    allowed = _MAX_SCENE if manifest.size is None else manifest.size
    total = sum(archive.getinfo(member).file_size for member in members)
    if total > allowed:
        raise ValueError(f"the scene's files must have at most {allowed} bytes in total, got {total} in the archive")


def _stage(archive: zipfile.ZipFile, member: str, members: set[str], part: Path, expected: str) -> str:
    """Writes one member to ``part`` if its hash is right; returns what is wrong, or an empty string."""
    if member not in members:
        return "not in the archive"
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open(member) as source, part.open("wb") as sink:
            found = _sha256(source, sink)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        found = f"unreadable data ({error})"
    if found == expected:
        return ""
    part.unlink()
    return f"expected SHA-256 {expected}, found {found}"


def _prefix(members: set[str], manifest: Manifest) -> str:
    """Finds the folder inside the archive that holds most of the scene, preferring one of the scene's name."""
    counts: dict[str, int] = {}
    deepest = max((path.count("/") for path in manifest.files), default=0)
    for member in members:
        # From the end, because a name may have tens of thousands of folders.
        parts = member.rsplit("/", deepest + 1)
        for index in range(len(parts)):
            path = "/".join(parts[index:])
            if path in manifest.files:
                prefix = member[: len(member) - len(path)]
                counts[prefix] = counts.get(prefix, 0) + 1
    named = f"/{manifest.name}/"
    return max(counts, key=lambda prefix: (f"/{prefix}".endswith(named), counts[prefix], prefix), default="")


def _unverified(folder: Path, files: Mapping[str, str]) -> list[str]:
    return [path for path, expected in files.items() if not _matches(folder / path, expected)]


def _matches(path: Path, expected: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as source:
        return _sha256(source) == expected


def _sha256(source: IO[bytes], sink: IO[bytes] | None = None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if sink is not None:
            sink.write(chunk)
    return digest.hexdigest()


def _summary(lines: Sequence[str]) -> tuple[int, str]:
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return len(lines), "; ".join(lines[:_SHOWN]) + more
