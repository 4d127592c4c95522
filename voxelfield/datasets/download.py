"""Public scenes: ``voxelfield download lego [--root data] [--url URL ...]`` fetches one with pooch.

Every file is checked against a SHA-256 from the scene's manifest. Correct files that are already in place stay, and if
all are, nothing is fetched. An archive counts only if all other files are in it and correct; those that make a folder
count as a scene are put in place last. Archives are not trusted: their size is limited, and no more is unpacked than
the scene has.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxelfield.installed import import_optional

_MANIFESTS = Path(__file__).parent / "manifests"
_MAX_ARCHIVE = 4 << 30  # bytes
_SHOWN = 3

logger = logging.getLogger(__name__)


class DownloadError(OSError):
    """No archive gave a complete and correct scene."""


@dataclass(frozen=True)
class Manifest:
    """The files of a scene, with the SHA-256 of each, and the URLs of zip archives from which they can be fetched.

    Its ``size`` is the number of bytes of all files.
    """

    name: str
    licence: str
    credit: str
    archives: Sequence[str]
    files: Mapping[str, str]
    size: int


def downloadable_scenes() -> tuple[str, ...]:
    """Lists the scenes that can be fetched."""
    return tuple(sorted(path.stem for path in _MANIFESTS.glob("*.json")))


def load_manifest(name: str) -> Manifest:
    """Reads the manifest of a scene; raises ValueError, which lists those there are, if there is none."""
    if name not in downloadable_scenes():
        raise ValueError(f"scene must be one that has a download ({', '.join(downloadable_scenes())}), got {name!r}")
    return Manifest(**json.loads((_MANIFESTS / f"{name}.json").read_text(encoding="utf-8")))


def download(name: str, root: Path | str = "data", urls: Sequence[str] | None = None) -> Path:
    """Completes the scene ``root/name`` from the first archive that answers and is right.

    Archives are zip files in which the scene may lie under any folder; ``urls`` replace those of the manifest. Files in
    place whose hash is wrong are replaced. The folder ``root`` is created if missing.

    Returns:
        The scene's folder, every file of the manifest verified.

    Raises:
        ValueError: The scene has no manifest.
        MissingPackageError: pooch is not installed.
        DownloadError: No archive gave the scene; the message lists each with its reason.
    """
    manifest = load_manifest(name)
    folder = Path(root) / manifest.name
    wanted = _unverified(folder, manifest.files)
    if not wanted:
        logger.info("%s: all %d files are present and verified, nothing to fetch", folder, len(manifest.files))
        return folder
    replaced = [path for path in wanted if (folder / path).exists()]
    if replaced:
        logger.warning("%s: replacing files that differ from the manifest %s", folder, _summary(replaced))
    logger.info("%s: %s; licence %s", manifest.name, manifest.credit, manifest.licence)
    folder.parent.mkdir(parents=True, exist_ok=True)
    reasons = []
    for url in urls if urls is not None else manifest.archives:
        logger.info("fetching %s for %d of %d files", url, len(wanted), len(manifest.files))
        try:
            with tempfile.TemporaryDirectory(prefix=f".{manifest.name}-", dir=folder.parent) as scratch:
                _fetch(url, Path(scratch) / "archive.zip")
                _unpack(Path(scratch) / "archive.zip", Path(scratch) / "scene", manifest, wanted)
                # The json files make the folder count as a scene.
                for path in sorted(wanted, key=lambda path: path.endswith(".json")):
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (Path(scratch) / "scene" / path).replace(folder / path)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            reasons.append(f"{url}: not a zip archive, or damaged ({error})")
        except (OSError, ValueError) as error:
            reasons.append(f"{url}: {' '.join(str(error).split()) or type(error).__name__}")
        else:
            logger.info("%s: all %d files verified", folder, len(manifest.files))
            return folder
        logger.warning("%s", reasons[-1])
    tried = "; ".join(reasons) or "no archive to try"
    raise DownloadError(f"scene '{manifest.name}' could not be fetched into {folder}: {tried}")


def _fetch(url: str, path: Path) -> None:
    # pooch.retrieve has no limit, and compares a hash of the archive, while several archives may have the same files.
    with _LimitedFile(io.FileIO(path, "w")) as file:
        import_optional("pooch", "download scenes").downloaders.choose_downloader(url, progressbar=True)(
            url, file, None
        )


class _LimitedFile(io.BufferedWriter):
    """A file that refuses to grow beyond the largest size of an archive, however much a server sends."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MAX_ARCHIVE:
            raise ValueError(f"the archive must have at most {_MAX_ARCHIVE} bytes, but the server sends more")
        return super().write(data)


def _unpack(file: Path, folder: Path, manifest: Manifest, wanted: Sequence[str]) -> None:
    """Unpacks the wanted files of an archive and checks them; pooch.Unzip knows no sizes, and no enclosing folder."""
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
        prefix = _prefix(members, manifest)
        found = {path: members[prefix + path] for path in wanted if prefix + path in members}
        total = sum(member.file_size for member in found.values())
        if total > manifest.size:
            raise ValueError(f"the scene's files must have at most {manifest.size} bytes, got {total} in the archive")
        for path, member in found.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, (folder / path).open("wb") as sink:
                shutil.copyfileobj(source, sink)
    problems = [
        f"{path}: expected SHA-256 {manifest.files[path]}, found {_sha256(folder / path) or 'no such file'}"
        for path in _unverified(folder, {path: manifest.files[path] for path in wanted})
    ]
    if problems:
        raise ValueError(f"wrong or missing files {_summary(problems)}")


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
    return import_optional("pooch", "download scenes").file_hash(path) if path.is_file() else None


def _summary(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"({len(lines)}): {'; '.join(lines[:_SHOWN])}{more}"
