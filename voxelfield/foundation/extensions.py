"""What other packages add: entry points that registries find, and objects without all members of a base class."""

from __future__ import annotations

import contextlib
import importlib
import logging
import pkgutil
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from voxelfield.interrupt import Interrupt
from voxelfield.messages import error_in_words

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GROUPS = tuple(f"voxelfield.{what}" for what in ("components", "models", "datasets", "export"))


def complete(name: str, given: Any, base: type, required: Sequence[str]) -> None:
    """Gives the class of an object, which need not derive from a base class, the base's defaults for what it lacks.

    The class gets them, not the object, so that the object can be copied and pickled as before.

    Raises TypeError if the object lacks one of the members that are ``required``, because they have no default, or if
    its class cannot be given attributes.
    """
    if isinstance(given, base):
        return
    kind = type(given)
    missing = [member for member in required if not hasattr(given, member)]
    if missing:
        raise TypeError(f"{name} must be a {base.__name__}, got {kind.__name__} without {', '.join(missing)}")
    for member, default in vars(base).items():
        if not member.startswith("_") and not hasattr(given, member):
            try:
                setattr(kind, member, default)
            except TypeError as error:
                raise TypeError(
                    f"{name} must be a {base.__name__}, got {kind.__name__}, whose class cannot have the attribute "
                    f"{member!r}: derive it from voxelfield.{base.__name__}"
                ) from error


def own_objects(package: str, kind: type[T]) -> list[T]:
    """Imports all modules of a package; returns the objects of a kind that they define, in the order of modules."""
    names = sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    values = (value for module in modules for value in vars(module).values())
    return list({id(value): value for value in values if isinstance(value, kind)}.values())


def announced_objects(group: str, kind: type[T]) -> list[T]:
    """Returns the objects of a kind that other packages declare as entry points, in the order of their names.

    An entry point that cannot be imported, or is something else, is left out with a warning of one line.
    """
    found = []
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        name = f"the entry point {entry.name} = {entry.value} of {group}"
        try:
            value = load_entry(entry)
        except ValueError as error:
            logger.warning("%s is left out, because it cannot be imported: %s", name, error)
            continue
        if isinstance(value, kind):
            found.append(value)
        else:
            logger.warning("%s is left out, because it is no %s but a %s", name, kind.__name__, type(value).__name__)
    return found


def load_entry(entry: EntryPoint) -> object:
    """Imports what an entry point names; raises ValueError, whose text is the reason, if that fails."""
    with foreign_code():
        return entry.load()


@contextlib.contextmanager
def foreign_code() -> Iterator[None]:
    """Raises ValueError, whose text is the reason, for what code of other packages raises, except Ctrl-C."""
    with Interrupt() as interrupt:
        try:
            with interrupt.at_once():
                yield
        except BaseException as error:  # also SystemExit and KeyboardInterrupt, which would end the program
            if interrupt.requested:
                raise
            raise ValueError(error_in_words(error)) from error


def raised_by(error: BaseException, losses: Sequence[str] = ()) -> str | None:
    """Returns the entry point or loss, in words, whose package raised an error, or called what did; None without."""
    if isinstance(error.__cause__, StopIteration):  # which a generator turns into a RuntimeError without its frames
        error = error.__cause__
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [entry for group in _GROUPS for entry in entry_points(group=group)]
    entries = [(entry.module, f"the entry point {entry.name} = {entry.value} of {entry.group}") for entry in found]
    entries += [(loss.partition(":")[0], f"losses={loss}") for loss in losses]
    for module in [] if modules[-1:] == [Interrupt.__module__] else reversed(modules):  # where Ctrl-C is raised
        for named, words in sorted(entries, key=lambda entry: entry[0] != module):
            if named.partition(".")[0] == module.partition(".")[0]:
                return words
    return None
