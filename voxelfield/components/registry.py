"""The registry of components, in which each stands with its settings, its checks and its construction.

A component is one file: a class of :class:`ComponentSettings`, and the :class:`voxelfield.models.component.Component`
that it builds. The files of this package are found by themselves, those of other packages by entry points::

    [project.entry-points."voxelfield.components"]
    NAME = "package.module:ClassName"

Such a module must not import :mod:`voxelfield.settings`, which imports it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import keyword
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from voxelfield.config import parse
from voxelfield.datasets.scene import Scene
from voxelfield.messages import error_in_words
from voxelfield.models.component import Component, find_component
from voxelfield.models.model import Model
from voxelfield.models.pixel_sampler import PixelSampler

logger = logging.getLogger(__name__)

ENTRY_POINTS = "voxelfield.components"
"""The entry point group in which other packages declare settings of components."""

Config = TypeVar("Config")
Kind = TypeVar("Kind")
Settings = TypeVar("Settings", bound="ComponentSettings")


@dataclass(frozen=True)
class Key:
    """What there is to know about a setting of a component, beside its type and its default.

    Attributes:
        path: The key in the settings of a run, such as ``trainer.loss.robust``. Mappings that do not exist yet, as in
            ``trainer.skylight.weight``, are created.
        mounted: Whether it is declared here, and not only read.
        off: The component is on if this setting, or another one with such a value, has another value.
        idle: Another value than the default is refused while the component is off, because it would be ignored.
        steps: A number of steps, which ``trainer.scaling=steps`` reduces; must be below ``trainer``.
        fixed: A run that is resumed must have the value of the checkpoint.
        after_training: Training does not depend on it.
    """

    path: str
    mounted: bool
    off: Any = ...
    idle: bool = False
    steps: bool = False
    fixed: bool = False
    after_training: bool = False


def key(path: str, default: Any = MISSING, *, factory: Any = MISSING, **flags: Any) -> Any:
    """Declares a field of :class:`ComponentSettings`.

    Args:
        path: The key in the settings of a run.
        default: The default. Without one, the key is declared elsewhere, and only read here.
        factory: Returns the default, if that is mutable.
        flags: Attributes of :class:`Key`.
    """
    mounted = not (default is MISSING and factory is MISSING)
    stated = {"key": Key(path, mounted, **flags)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=stated)
    return field(default=default if mounted else None, metadata=stated)


@dataclass(frozen=True, eq=False)
class Training:
    """The training for which components are built.

    Attributes:
        config: All settings of the run (:class:`voxelfield.settings.RunConfig`).
        scene: The scene.
        model: The model, at its initial resolution.
        pixels: The training images.
        components: The components that were built before.
    """

    config: Any
    scene: Scene
    model: Model
    pixels: PixelSampler
    components: list[Component] = field(default_factory=list)

    def component(self, kind: type[Kind]) -> Kind | None:
        """Returns what was built of a class before (:func:`voxelfield.models.component.find_component`), or None."""
        return find_component(self.components, kind)


class ComponentSettings:
    """Base class of the settings of components: dataclasses whose fields :func:`key` declares.

    Attributes:
        name: Name in :attr:`after`, :attr:`requires` and :attr:`excludes` of others; that of the component, if it has a
            state.
        after: Names of those that join a step earlier, if they are there. Otherwise the order is that of the names.
        requires: Names of those without which this component is off.
        excludes: Names of those with which this one does not work, and why, a relative clause such as ``which needs
            patches``.
        scene_options: Options of :func:`voxelfield.load_scene` with which a run loads its training images.
        results: Names of files that the component leaves in the folder of a finished run.
        feature_bytes: Bytes of device memory for each feature of the grids, while the component is on.
        pixel_bytes: Bytes for each pixel of the training images, where these are.
    """

    name: ClassVar[str]
    after: ClassVar[Sequence[str]] = ()
    requires: ClassVar[Sequence[str]] = ()
    excludes: ClassVar[Mapping[str, str]] = {}
    scene_options: ClassVar[Mapping[str, Any]] = {}
    results: ClassVar[Sequence[str]] = ()
    feature_bytes: ClassVar[int] = 0
    pixel_bytes: ClassVar[int] = 0

    @classmethod
    def of(cls: type[Settings], config: Any) -> Settings:
        """Returns the values in the settings of a run."""
        return cls(**{name: value_at(config, stated.path) for name, stated in keys_of(cls).items()})

    @classmethod
    def switches(cls) -> dict[str, Key]:
        """Returns the fields that turn the component on."""
        return {name: stated for name, stated in keys_of(cls).items() if stated.off is not ...}

    @property
    def is_on(self) -> bool:
        """Whether the settings ask for the component; those without a switch are always on."""
        switches = self.switches()
        return not switches or any(getattr(self, name) != stated.off for name, stated in switches.items())

    def check(self, config: Any, prefix: str = "") -> None:
        """Raises ValueError for settings that would be ignored, or contradict those of the run.

        Args:
            config: All settings of the run.
            prefix: Begins each key in messages.
        """
        if self.is_on:
            return
        switches = " and ".join(f"{prefix}{stated.path}" for stated in self.switches().values())
        off = f"{switches} {'is' if len(self.switches()) == 1 else 'are'} {type(self).in_words(False)[1]}"
        for name, stated in keys_of(type(self)).items():
            value, default = getattr(self, name), _defaults(type(self))[name]
            if stated.idle and value != default:
                raise ValueError(
                    f"{prefix}{stated.path} must be left at {_shown(default)} where {off}, got {_shown(value)}: it "
                    "would be ignored"
                )

    def check_resumed(self, saved: Any, model: Model) -> None:
        """Raises ValueError unless fixed settings are those of the checkpoint.

        Args:
            saved: The same settings in the checkpoint.
            model: The present model.
        """
        for name, stated in keys_of(type(self)).items():
            before, now = getattr(saved, name), getattr(self, name)
            if stated.fixed and before != now:
                raise ValueError(f"{stated.path} must be {_shown(before)}, as in the checkpoint, got {_shown(now)}")

    def adapt(self, trainer: Config) -> Config:
        """Returns the settings of the training loop, changed as the component needs them."""
        return trainer

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the components, of which there may be several or none.

        Raises:
            ValueError: The scene does not suit the settings; the message begins with a key.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build")

    @classmethod
    def in_words(cls, on: bool) -> tuple[str, str]:
        """Returns the key of the first switch, and the values with which it is on or off.

        Without a switch, the name stands for its key.
        """
        if not cls.switches():
            return cls.name, "on" if on else "off"
        name, stated = next(iter(cls.switches().items()))
        hint = get_type_hints(cls)[name]
        if not on:
            return stated.path, _shown(stated.off)
        if get_origin(hint) is Literal:
            return stated.path, " or ".join(str(value) for value in get_args(hint) if value != stated.off)
        return stated.path, "true" if hint is bool else "positive"


def keys_of(settings: type[ComponentSettings]) -> dict[str, Key]:
    """Returns the keys of settings, by the names of their fields."""
    return {each.name: each.metadata["key"] for each in dataclasses.fields(settings)}  # type: ignore[arg-type]


def _defaults(settings: type[ComponentSettings]) -> dict[str, Any]:
    """Returns the defaults of settings, by the names of their fields."""
    stated = dataclasses.fields(settings)  # type: ignore[arg-type]
    return {each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in stated}


def keys_with(flag: str, below: str = "") -> list[str]:
    """Returns the keys of all components with a flag of :func:`key`, without the prefix below which they are."""
    stated = [each for kind in registered() for each in keys_of(kind).values() if each.mounted and getattr(each, flag)]
    return [each.path.removeprefix(below) for each in stated if each.path.startswith(below)]


def value_at(config: Any, path: str) -> Any:
    """Returns the value of a key such as ``loss.robust``."""
    return functools.reduce(getattr, path.split("."), config)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns a dataclass with other values of keys such as ``loss.robust``."""
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    changes |= {head: with_values(getattr(config, head), rest) for head, rest in inner.items()}
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


# ------------------------------------------------------------------------------------------------ discovery


# Classes of settings with keys of components, by the prefix of these keys.
_groups: dict[str, type] = {}

# Settings of components of other packages, by name.
_foreign: dict[str, type[ComponentSettings]] = {}


def registered() -> tuple[type[ComponentSettings], ...]:
    """Returns the settings of all components, by name.

    Those of other packages are among them once :mod:`voxelfield.settings` is imported (:func:`with_foreign`).
    """
    found = {**_own(), **_foreign}
    return tuple(found[name] for name in sorted(found))


@functools.cache
def _own() -> dict[str, type[ComponentSettings]]:
    """Returns the settings of the components of this package, by name."""
    found: dict[str, type[ComponentSettings]] = {}
    package = importlib.import_module("voxelfield.components")
    for module in pkgutil.iter_modules(package.__path__, "voxelfield.components."):
        found |= _declared(importlib.import_module(module.name), found)
    return found


def _declared(declared: Any, found: Mapping[str, type[ComponentSettings]]) -> dict[str, type[ComponentSettings]]:
    """Returns the settings that a module declares, or a class of settings, by name.

    Raises:
        TypeError: A class is none of settings.
        ValueError: One of those that were found before has the same key or name.
    """
    added: dict[str, type[ComponentSettings]] = {}
    kinds = [declared] if isinstance(declared, type) else list(vars(declared).values())
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, ComponentSettings)) or kind is ComponentSettings:
            if kind is declared:
                raise TypeError(f"{kind.__name__} must be a class of ComponentSettings")
            continue
        if kind is not declared and kind.__module__ != declared.__name__:
            continue
        known = {**found, **added}
        taken = {each.path for other in known.values() for each in keys_of(other).values() if each.mounted}
        again = [each.path for each in keys_of(kind).values() if each.mounted and each.path in taken]
        if again or kind.name in known:
            raise ValueError(f"{kind.__name__} must have a key and a name of its own, got {(*again, kind.name)[0]}")
        added[kind.name] = kind
    return added


def with_foreign(cls: type[Config]) -> type[Config]:
    """Decorator of the dataclass of all settings: adds the components of other packages, and their keys.

    What an entry point names is left out as a whole, with a warning, if any of it cannot be used.
    """
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            added = _declared(entry.load(), {**_own(), **_foreign})
            _check_foreign(list(added.values()), cls())
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            reason = error_in_words(error)
            logger.warning(
                "component %s is not available, because %s cannot be used: %s", entry.name, entry.value, reason
            )
            continue
        for prefix, group in list(_groups.items()):
            if _mount(group, prefix, list(added.values())):
                _renew(group)
        _foreign.update(added)
    return cls


def _check_foreign(kinds: Sequence[type[ComponentSettings]], config: Any) -> None:
    """Raises an error if settings of another package would make runs fail that do not use them.

    Args:
        kinds: The settings.
        config: All settings of a run, without these.
    """
    mounted = [stated.path for kind in kinds for stated in keys_of(kind).values() if stated.mounted]
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        for name, stated in keys_of(kind).items():
            group, _, last = stated.path.rpartition(".")
            if stated.mounted:
                _check_place(kind.__name__, stated.path, mounted)
                parse(dataclasses.make_dataclass("_", [(last, hints[name])]), {last: _defaults(kind)[name]}, group)
            elif stated.path not in mounted:
                try:
                    value_at(config, stated.path)
                except AttributeError:
                    raise ValueError(f"{kind.__name__} must read a key that exists, got {stated.path}") from None


def _check_place(name: str, path: str, mounted: Sequence[str]) -> None:
    """Raises ValueError unless a key of another package can be added to the settings of a run.

    Args:
        name: Name of the class of settings, for messages.
        path: The key.
        mounted: All keys of that package.
    """
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in path.split(".")):
        raise ValueError(f"{name} must have keys of identifiers, got {path}")
    below = {prefix: f"{prefix}." if prefix else "" for prefix in _groups}
    prefix = max((each for each in _groups if path.startswith(below[each])), key=len)
    head, _, rest = path.removeprefix(below[prefix]).partition(".")
    # A field without a default in the class is no attribute of it, and other attributes are methods.
    exists = hasattr(_groups[prefix], head) or head in {each.name for each in dataclasses.fields(_groups[prefix])}
    if exists and rest:
        raise ValueError(f"{name} must not have keys below {below[prefix]}{head}, got {path}")
    if exists or mounted.count(path) > 1 or any(other.startswith(f"{path}.") for other in mounted):
        raise ValueError(f"{name} must have a key of its own, got {path}")


def _renew(cls: type) -> None:
    """Makes a dataclass of one whose annotations have grown; it has no methods of those that dataclasses get."""
    for each in dataclasses.fields(cls):
        if each.name in inspect.get_annotations(cls) and each.default_factory is not MISSING:
            setattr(cls, each.name, field(default_factory=each.default_factory))
    for name in ("__init__", "__repr__", "__eq__", "__match_args__", "__replace__"):
        if name in vars(cls):
            delattr(cls, name)
    dataclass(cls)


# ------------------------------------------------------------------------------------------------ settings of a run


def mounts(prefix: str) -> Callable[[type[Config]], type[Config]]:
    """Decorator of a class that becomes a dataclass: adds the fields of all components whose keys are below a prefix.

    Their descriptions are added to its docstring. Keys further below, in a mapping that the class does not have, make
    a dataclass of that mapping.
    """

    def mount(cls: type[Config]) -> type[Config]:
        _mount(cls, prefix, registered())
        return cls

    return mount


def _mount(cls: type, prefix: str, kinds: Sequence[type[ComponentSettings]]) -> bool:
    """Adds the fields of components as :func:`mounts` does; returns whether there are any."""
    own = {name for each in cls.__mro__ for name in inspect.get_annotations(each)}
    _groups[prefix] = cls
    added: dict[str, Any] = {}
    described: dict[str, str] = {}
    for kind in kinds:
        hints, texts = get_type_hints(kind, include_extras=True), _descriptions(kind.__doc__ or "")
        for each in dataclasses.fields(kind):  # type: ignore[arg-type]
            stated = each.metadata["key"]
            group, _, name = stated.path.rpartition(".")
            if not stated.mounted or not f"{group}.".startswith(f"{prefix}." if prefix else ""):
                continue
            if group == prefix:
                if name in own:
                    raise ValueError(f"{kind.__name__} must have a key of its own, got {stated.path}")
                added[name], described[name] = hints[each.name], texts.get(each.name, "")
                setattr(cls, name, field(default=each.default, default_factory=each.default_factory))
                continue
            head = group.removeprefix(f"{prefix}." if prefix else "").partition(".")[0]
            if head in own or head in added:
                continue
            title = head.title().replace("_", "")
            members = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.{title}"}
            path = f"{prefix}.{head}" if prefix else head
            inner: Any = type(title, (), {"__doc__": f"Settings below ``{path}``.", **members})
            _mount(inner, path, kinds)
            dataclass(inner)
            setattr(cls, title, inner)
            added[head], described[head] = inner, f"Settings of {kind.name}."
            setattr(cls, head, field(default_factory=inner))
    cls.__annotations__ = {**inspect.get_annotations(cls), **added}
    text = inspect.cleandoc(cls.__doc__ or "")
    text += "" if "\nAttributes:\n" in text or not described else "\n\nAttributes:"
    cls.__doc__ = "\n".join((text, *(f"    {name}: {words}" for name, words in described.items()))) + "\n"
    return bool(added)


def _descriptions(text: str) -> dict[str, str]:
    """Returns the descriptions of attributes in a docstring, by name."""
    _, _, attributes = inspect.cleandoc(text).partition("\nAttributes:\n")
    return dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE))


def settings_of(config: Any) -> list[ComponentSettings]:
    """Returns the settings of all components in those of a run."""
    return [kind.of(config) for kind in registered()]


def recorded(config: Any) -> dict[str, Any]:
    """Returns the settings of a run as files record them, in nested dictionaries.

    Those of components of other packages that are off are left out, so that the files can be read without these.
    """
    values: dict[str, Any] = dataclasses.asdict(config)
    for kind in _foreign.values():
        if kind.of(config).is_on:
            continue
        for stated in keys_of(kind).values():
            if stated.mounted:
                *groups, last = stated.path.split(".")
                inside = list(itertools.accumulate(groups, dict.__getitem__, initial=values))
                del inside[-1][last]
                for outer, name, inner in reversed([*zip(inside, groups, inside[1:], strict=False)]):
                    if not inner:
                        del outer[name]
    return values


def active(config: Any) -> list[ComponentSettings]:
    """Returns the settings of the components that a run has, in their order.

    Raises:
        ValueError: Some components must come after one another, or after one that does not exist.
    """
    found = {each.name: each for each in settings_of(config) if each.is_on}
    while missing := [name for name, each in found.items() if any(other not in found for other in each.requires)]:
        del found[missing[0]]
    names, ordered = [kind.name for kind in registered()], list[ComponentSettings]()
    while len(ordered) < len(found):
        waiting = {name: each for name, each in found.items() if each not in ordered}
        for kind, other in ((type(each), other) for each in waiting.values() for other in each.after):
            if other not in names:
                raise ValueError(f"{kind.__name__}.after must name components, {', '.join(names)}, got {other!r}")
        ready = [each for each in waiting.values() if not any(other in waiting for other in each.after)]
        if not ready:
            raise ValueError(f"components must have an order, got {', '.join(waiting)}, which come after one another")
        ordered.append(ready[0])
    return ordered


def check_settings(config: Any, prefix: str = "") -> None:
    """Raises ValueError if settings of components would be ignored, or contradict each other or those of the run.

    Args:
        config: All settings of the run.
        prefix: Begins each key in messages.
    """
    for each in settings_of(config):
        each.check(config, prefix)
    present = {each.name: each for each in active(config)}
    for each in present.values():
        for name, reason in each.excludes.items():
            if name in present:
                # One without a switch is always on, so the other one must be off.
                one, other = (each, present[name]) if each.switches() else (present[name], each)
                (path, value), (its, its_value) = _switch(one), _switch(other)
                raise ValueError(
                    f"{prefix}{path} must be {type(one).in_words(False)[1]} with {prefix}{its}={its_value}, "
                    f"{reason}, got {value}"
                )


def _switch(settings: ComponentSettings) -> tuple[str, str]:
    """Returns the key and the value by which a component is on."""
    for name, stated in settings.switches().items():
        if getattr(settings, name) != stated.off:
            return stated.path, _shown(getattr(settings, name))
    return settings.name, "on"


def build_components(training: Training) -> list[Component]:
    """Builds the components of a run, in the order in which they join a step."""
    for settings in active(training.config):
        training.components.extend(settings.build(training))
    return training.components


def _shown(value: Any) -> str:
    """Formats a value as the command line takes it."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
