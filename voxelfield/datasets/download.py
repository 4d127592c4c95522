"""Public scenes: ``voxelfield download lego [--root data] [--url URL ...]`` fetches one.

Every file is checked against a SHA-256 from the scene's manifest. Correct files that are already in place stay, and if
all are, nothing is fetched. The files that make a folder count as a scene are put in place last. Archives are not
trusted: their size is limited, and no more is unpacked than the scene has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_MANIFESTS = Path(__file__).parent / "manifests"
_CHUNK = 1 << 20
_MAX_ARCHIVE = 4 << 30  # bytes
_SHOWN = 3

logger = logging.getLogger(__name__)


class DownloadError(OSError):
    """No archive gave a complete and correct scene."""


@dataclass(frozen=True)
class Manifest:
    """The files of a scene and where they can be fetched.

    Args:
        name: The scene's name, and its folder's.
        licence: Licence of the data.
        credit: Whom to credit.
        archives: URLs of zip archives, in the order to try.
        files: Path inside the scene's folder -> SHA-256 in hexadecimal.
        size: Number of bytes of all files.
    """

    name: str
    licence: str
    credit: str
    archives: tuple[str, ...]
    files: Mapping[str, str]
    size: int


def manifest_path(name: str) -> Path:
    """Returns where the manifest of a scene is, if it has one."""
    return _MANIFESTS / f"{name}.json"


def downloadable_scenes() -> tuple[str, ...]:
    """Lists the scenes that can be fetched."""
    return tuple(sorted(path.stem for path in _MANIFESTS.glob("*.json")))


def load_manifest(name: str) -> Manifest:
    """Reads the manifest of a scene.

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
        manifest: Replaces the package's manifest for ``name``.

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
            problems = _extract(opened, scratch, folder, manifest, wanted)
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
        self._file, self._limit = file, limit

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._limit:
            raise ValueError(f"the archive must have at most {self._limit} bytes, but the server sends more")
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _extract(
    archive: zipfile.ZipFile, scratch: Path, folder: Path, manifest: Manifest, wanted: Sequence[str]
) -> list[str]:
    """Puts the wanted files in place that are correct in the archive; returns the problems of the others."""
    members = {member.filename: member for member in archive.infolist()}
    prefix = _prefix(members, manifest)
    found = {path: members[prefix + path] for path in wanted if prefix + path in members}
    total = sum(member.file_size for member in found.values())
    if total > manifest.size:
        raise ValueError(f"the scene's files must have at most {manifest.size} bytes, got {total} in the archive")
    problems = [f"{path}: not in the archive" for path in wanted if path not in found]
    # The json files make the folder count as a scene, so they are moved together after all else.
    index: list[tuple[Path, Path]] = []
    for path, member in found.items():
        part, target = scratch / path, folder / path
        if problem := _unpack(archive, member, part, manifest.files[path]):
            problems.append(f"{path}: {problem}")
        elif path.endswith(".json"):
            index.append((part, target))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
    for part, target in index if not problems else ():
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
    return problems


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, part: Path, expected: str) -> str:
    """Writes one member to a file; returns an error, or an empty string."""
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open(member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
        found = _sha256(part)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        found = f"unreadable data ({error})"
    return "" if found == expected else f"expected SHA-256 {expected}, found {found}"


def _prefix(members: Collection[str], manifest: Manifest) -> str:
    """Finds the folder inside the archive that holds the scene, preferring one of the scene's name."""
    for path in manifest.files:
        prefixes = [member.removesuffix(path) for member in members if f"/{member}".endswith(f"/{path}")]
        if prefixes:
            return max(prefixes, key=lambda prefix: (f"/{prefix}".endswith(f"/{manifest.name}/"), -len(prefix)))
    return ""


def _unverified(folder: Path, files: Mapping[str, str]) -> list[str]:
    return [path for path, expected in files.items() if _sha256(folder / path) != expected]


def _sha256(path: Path) -> str | None:
    """Returns the hash of a file, or None if there is no such file."""
    if not path.is_file():
        return None
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _summary(lines: Sequence[str]) -> tuple[int, str]:
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return len(lines), "; ".join(lines[:_SHOWN]) + more
