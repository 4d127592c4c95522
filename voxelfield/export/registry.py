"""The formats that :func:`export` and ``voxelfield export`` write, each declared in one file.

Formats are the objects of :class:`ExportFormat` in the modules of this package, and those that other packages declare
as entry points::

    [project.entry-points."voxelfield.exports"]
    NAME = "package.module:FORMAT"
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from voxelfield.datasets.scene import Scene
from voxelfield.files import check_suffix
from voxelfield.foundation.extensions import announced_objects, own_objects
from voxelfield.models.model import Model
from voxelfield.progress import size_in_words
from voxelfield.rendering.cameras import Cameras
from voxelfield.trained.trained_model import TrainedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Options of the command that no format may have.
_RESERVED = ("help", "run", "files", "root", "data_root", "device", "missing_images")


@dataclass(frozen=True)
class Option:
    """A keyword argument of a format's ``write``, and an option of ``voxelfield export``.

    Attributes:
        name: Name of the argument. The option is named alike, such as ``--fit-steps`` for ``fit_steps``.
        help: What it means, and its default.
        kind: Type of its values: bool for a flag, ``int``, ``float``, ``str``, one of the ranges of
            :mod:`voxelfield.config`, such as ``Count``, or a ``Literal`` of texts.
        metavar: Stands for the value in the help.
    """

    name: str
    help: str
    kind: Any = bool
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(eq=False)
class ExportSource:
    """What formats write: a trained run, whose scene is loaded only if a format needs it.

    Attributes:
        run: The run.
        files: All files that are written together, by the names of their formats.
        root: Folder of scenes; None for that of the run.
        missing_images: How to handle missing images of the scene; None: as in the run.
    """

    run: TrainedModel
    files: Mapping[str, Path]
    root: Path | str | None = None
    missing_images: str | None = None
    _results: dict[object, Any] = field(default_factory=dict, init=False)

    @property
    def model(self) -> Model:
        """The trained model: the field with its occupied cells and its sampling."""
        return self.run.model

    @property
    def folder(self) -> Path:
        """Folder of the scene."""
        return self.run.scene_folder(self.root)

    def scene(self, splits: Sequence[str] | None = None, **changes: Any) -> Scene:
        """Loads splits of the scene, see :meth:`voxelfield.trained.trained_model.TrainedModel.load_scene`."""
        return self.run.load_scene(splits, root=self.root, missing_images=self.missing_images, **changes)

    def training_cameras(self) -> Cameras:
        """Returns the cameras of the training images, refined if the run has refined them."""
        return self.scene(("train",)).train.cameras if self.run.cameras is None else self.run.cameras.refined

    def once(self, function: Callable[..., T], **settings: Any) -> T:
        """Returns ``function(self, **settings)``, which formats that are written together compute only once."""
        key = (function, *sorted(settings.items()))
        if key not in self._results:
            self._results[key] = function(self, **settings)
        return cast(T, self._results[key])


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One format.

    Attributes:
        name: Its name, an identifier, which is also its option on the command line: ``mesh`` for ``--mesh``.
        help: What is written, for the help of the command.
        write: Called with the path, the source and the options that were given, by name; writes the file, and returns
            what it has written, for the log, such as ``"9 cameras"``.
        suffixes: Suffixes of its files; none for a folder.
        opens: What opens its files, for the log, such as ``Blender``.
        options: Its options. Several formats may have an option of the same name, if it takes the same values.
        check: Called with the path and the given options, by name, before the run is loaded; raises ValueError if they
            do not fit together.
        check_source: Called before any file is written; raises ValueError if the run is not one that the format can be
            written of.
    """

    name: str
    help: str
    write: Callable[..., str]
    suffixes: Sequence[str] = ()
    opens: str = ""
    options: Sequence[Option] = ()
    check: Callable[[Path, Mapping[str, Any]], None] = lambda path, given: None
    check_source: Callable[[ExportSource], None] = lambda source: None


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """One of the kinds of files of an export format that has several; each is declared in a module of this package.

    Attributes:
        of: Name of the export format, such as ``volume``.
        suffixes: Endings of its names.
        write: Called with the path of a new file and what the export format passes; writes the file.
        read: Called with a path; returns what the export format reads; None if it reads none.
        up_axis: Axis that points up by its specification; None: as in the poses.
        require: Imports its library before anything is computed; raises MissingPackageError without it.
    """

    of: str
    suffixes: Sequence[str]
    write: Callable[..., object]
    read: Callable[[Path], Any] | None = None
    up_axis: Literal["y"] | None = None
    require: Callable[[], Any] = lambda: None


def file_format(of: str, path: Path | str) -> FileFormat:
    """Returns the kind of a file of the export format ``of``; raises ValueError if its suffix is that of no kind."""
    kinds = [each for each in _file_formats() if each.of == of]
    check_suffix("path", path, [suffix for each in kinds for suffix in each.suffixes])
    return next(each for each in kinds if Path(path).name.lower().endswith(tuple(each.suffixes)))


@functools.cache
def _file_formats() -> list[FileFormat]:
    return own_objects(__package__, FileFormat)


@functools.cache
def formats() -> dict[str, ExportFormat]:
    """Returns all formats by name: those of this package, then those of other packages.

    One of another package is left out with a warning if its names are no identifiers, or are those of others.
    """
    found = {each.name: each for each in sorted(own_objects(__package__, ExportFormat), key=lambda each: each.name)}
    for each in announced_objects("voxelfield.exports", ExportFormat):
        wrong = _wrong_name(each, found)
        if wrong is None:
            found[each.name] = each
        else:
            logger.warning("export format %s of another package is left out: %s", each.name, wrong)
    return found


def _wrong_name(format: ExportFormat, others: Mapping[str, ExportFormat]) -> str | None:
    """Says which name of a format is no identifier, or is taken by another format; None if all of them fit."""
    kinds = {option.name: option.kind for other in others.values() for option in other.options}
    taken = {*_RESERVED, *others, *kinds}
    if not _is_name(format.name):
        return "its name must be an identifier"
    if format.name in taken:
        return f"{format.name} is taken"
    own = {format.name}
    for option in format.options:
        if not _is_name(option.name):
            return f"its option {option.name} must be an identifier"
        if option.name in own or (option.name in taken and kinds.get(option.name) != option.kind):
            return f"{option.name} is taken"
        own.add(option.name)
    return None


def _is_name(name: str) -> bool:
    """Whether a name can be an argument of a function, and an option of the command, which drops first underscores."""
    return name.isidentifier() and not name.startswith("_")


def options() -> dict[str, dict[str, Option]]:
    """Returns all options: for each name, the options by the formats that have one of that name."""
    found: dict[str, dict[str, Option]] = {}
    for each in formats().values():
        for option in each.options:
            found.setdefault(option.name, {})[each.name] = option
    return found


def check_files(files: Mapping[str, Path], given: Mapping[str, Any]) -> None:
    """Raises ValueError, for a command line, unless files and options fit the formats and each other.

    Args:
        files: The files, by the names of formats.
        given: The options, by name.
    """
    if not files:
        *names, last = (f"--{name}" for name in formats())
        raise ValueError(f"export must be given at least one of {', '.join(names)} and {last}, got none")
    for name, value in given.items():
        users = options()[name]
        if not files.keys() & users.keys():
            wanted = " or ".join(f"--{user}" for user in users)
            raise ValueError(f"{next(iter(users.values())).flag} must come with {wanted}, got {value} without it")
    for name, path in files.items():
        if formats()[name].suffixes:
            check_suffix(f"--{name}", path, formats()[name].suffixes)
        formats()[name].check(path, given)


def export(
    run: TrainedModel,
    files: Mapping[str, Path | str],
    *,
    root: Path | str | None = None,
    missing_images: str | None = None,
    **given: Any,
) -> None:
    """Writes a trained run in some formats, as ``voxelfield export`` does.

    Args:
        run: The run.
        files: The files, by the names of their formats, such as ``{"mesh": "scene.glb"}``.
        root: Folder of scenes; None for that of the run.
        missing_images: How to handle missing images, for formats that need the scene; None: as in the run.
        given: Options of the formats.

    Raises:
        ValueError: There is no such format or option, or a format cannot be written of this run.
        FloatingPointError: A value of the field is not finite.
        OSError: A file cannot be written, or the scene is not there.
    """
    for wanted, names, known in (("files", files, formats()), ("options", given, options())):
        for name in names:
            if name not in known:
                raise ValueError(f"{wanted} must be of {', '.join(known)}, got {name!r}")
    paths = {name: Path(path) for name, path in files.items()}
    check_files(paths, given)
    source = ExportSource(run, paths, root, missing_images)
    chosen = {name: each for name, each in formats().items() if name in paths}
    for each in chosen.values():
        each.check_source(source)
    for name, each in chosen.items():
        own = {option.name: given[option.name] for option in each.options if option.name in given}
        written, path = each.write(paths[name], source, **own), paths[name]
        size, opens = size_in_words(path), each.opens and f", opens in {each.opens}"
        logger.info("wrote %s to %s (%s%s)", written, path, size, opens)
    if any(run.config.scene.origin or ()):
        logger.info("positions in files but those of cameras are relative to %s", run.config.scene.origin)
