"""The registry of components, in which each stands with its settings, its checks and its construction.

A component is one file: a class of :class:`ComponentSettings`, and the :class:`voxelfield.models.component.Component`
that it builds. The files of this package are found by themselves, those of other packages by entry points::

    [project.entry-points."voxelfield.components"]
    NAME = "package.module:ClassName"

Such a module must not import :mod:`voxelfield.settings`, which imports it.
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial
from importlib.metadata import entry_points
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from voxelfield.config import parse
from voxelfield.datasets.scene import Scene
from voxelfield.foundation.extensions import foreign_code, own_objects
from voxelfield.models.component import Component, find_component
from voxelfield.models.model import Model
from voxelfield.models.pixel_sampler import PixelSampler

logger = logging.getLogger(__name__)

ENTRY_POINTS = "voxelfield.components"
"""The entry point group in which other packages declare settings of components."""

Config = TypeVar("Config")
Kind = TypeVar("Kind")
Answer = TypeVar("Answer")
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
    return field(default=default if mounted else None, default_factory=factory, metadata=stated)


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
        excludes: Names of those with which this one does not work, and why, a relative clause such as ``which cannot
            be undone in photographs``.
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
        return cls(**{name: attrgetter(stated.path)(config) for name, stated in keys_of(cls).items()})

    @classmethod
    def switches(cls) -> dict[str, Key]:
        """Returns the fields that turn the component on."""
        return {name: stated for name, stated in keys_of(cls).items() if stated.off is not ...}

    def switched_on(self) -> dict[str, str]:
        """Returns the keys that turn the component on, with their values; without a switch, its name and ``on``."""
        if not self.switches():
            return {self.name: "on"}
        values = ((stated, getattr(self, name)) for name, stated in self.switches().items())
        return {stated.path: _shown(value) for stated, value in values if value != stated.off}

    @property
    def is_on(self) -> bool:
        """Whether the settings ask for the component; those without a switch are always on."""
        return bool(self.switched_on())

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
        defaults = type(self)()
        for name, stated in keys_of(type(self)).items():
            value, default = getattr(self, name), getattr(defaults, name)
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


def _mounted(settings: type[ComponentSettings]) -> dict[str, str]:
    """Returns the paths of the keys that settings declare, by the names of their fields."""
    return {name: stated.path for name, stated in keys_of(settings).items() if stated.mounted}


def keys_with(flag: str, below: str = "") -> list[str]:
    """Returns the keys of all components with a flag of :func:`key`, without the prefix below which they are."""
    stated = [each for kind in registered() for each in keys_of(kind).values() if each.mounted and getattr(each, flag)]
    return [each.path.removeprefix(below) for each in stated if each.path.startswith(below)]


def with_value(config: Config, path: str, value: Any) -> Config:
    """Returns a dataclass with another value of a key such as ``loss.robust``."""
    head, _, rest = path.partition(".")
    changed = with_value(getattr(config, head), rest, value) if rest else value
    return dataclasses.replace(config, **{head: changed})  # type: ignore[type-var]


# ------------------------------------------------------------------------------------------------ discovery


# Settings of the components of this package and of others, by name.
_own: dict[str, type[ComponentSettings]] = {}
_foreign: dict[str, type[ComponentSettings]] = {}


class Group:
    """Base class of dataclasses to which components add fields, of which a type checker does not know."""

    if TYPE_CHECKING:

        def __init__(self, *arguments: Any, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


def registered() -> tuple[type[ComponentSettings], ...]:
    """Returns the settings of all components, by name; there are none before :mod:`voxelfield.settings` is imported."""
    found = {**_own, **_foreign}
    return tuple(found[name] for name in sorted(found))


def with_components(cls: type[Config]) -> type[Config]:
    """Decorator of the dataclass of all settings: finds all components, and adds the fields that their keys name.

    Fields are added to that class, to those of its fields that are a :class:`Group`, and to groups that do not exist
    yet. What an entry point names is left out as a whole, with a warning, if any of it cannot be used.
    """
    own = (kind for kind in own_objects("voxelfield.components", type) if issubclass(kind, ComponentSettings))
    _own.update({kind.name: kind for kind in own if hasattr(kind, "name")})  # a base class has none
    _add_fields(cls, registered())
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            with foreign_code():
                kinds = _declared(entry.load())
                _check_foreign(kinds, cls())
        except ValueError as error:
            logger.warning(
                "component %s is not available, because %s cannot be used: %s", entry.name, entry.value, error
            )
            continue
        _foreign.update({kind.name: kind for kind in kinds})
        _add_fields(cls, kinds)
    return cls


def _declared(value: Any) -> list[type[ComponentSettings]]:
    """Returns the classes of settings that a module of another package declares, or such a class itself."""
    if isinstance(value, type):
        if not issubclass(value, ComponentSettings):
            raise TypeError(f"{value.__name__} must be a class of ComponentSettings")
        return [value]
    classes = (each for each in vars(value).values() if isinstance(each, type) and each.__module__ == value.__name__)
    return [each for each in classes if issubclass(each, ComponentSettings)]


def _check_foreign(kinds: Sequence[type[ComponentSettings]], config: Any) -> None:
    """Raises an error if settings of another package would make runs fail that do not use them.

    ``config`` has all settings of a run but these.
    """
    names = [kind.name for kind in (*registered(), *kinds)]
    mounted = [path for kind in kinds for path in _mounted(kind).values()]
    for kind in kinds:
        hints, defaults = get_type_hints(kind, include_extras=True), kind()
        for name, path in _mounted(kind).items():
            if not all(part.isidentifier() and not keyword.iskeyword(part) for part in path.split(".")):
                raise ValueError(f"{kind.__name__} must have keys of identifiers, got {path}")
            group, (first, *below) = _place(config, path)
            if hasattr(group, first) and below:
                above = path.removesuffix("." + ".".join(below))
                raise ValueError(f"{kind.__name__} must not have keys below {above}, got {path}")
            if hasattr(group, first) or sum(f"{other}.".startswith(f"{path}.") for other in mounted) > 1:
                raise ValueError(f"{kind.__name__} must have a key of its own, got {path}")
            prefix, _, last = path.rpartition(".")
            parse(dataclasses.make_dataclass("_", [(last, hints[name])]), {last: getattr(defaults, name)}, prefix)
        if names.count(kind.name) > 1:
            raise ValueError(f"{kind.__name__} must have a name of its own, got {kind.name}")
        for path in {stated.path for stated in keys_of(kind).values()}.difference(mounted):
            try:
                attrgetter(path)(config)
            except AttributeError:
                raise ValueError(f"{kind.__name__} must read a key that exists, got {path}") from None


def _place(config: Any, path: str) -> tuple[Any, list[str]]:
    """Returns the innermost existing group of settings that a key is in, and the parts of the key from there on."""
    group, parts = config, path.split(".")
    while len(parts) > 1 and isinstance(getattr(group, parts[0], None), Group):
        group = getattr(group, parts.pop(0))
    return group, parts


def _add_fields(cls: type, kinds: Iterable[type[ComponentSettings]]) -> None:
    """Adds the fields of components to the dataclass of all settings and its groups."""
    added = defaultdict[type, list[tuple[str, Any, Any]]](list)
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for name, path in _mounted(kind).items():
            config, parts = _place(cls(), path)
            group = type(config)
            while len(parts) > 1:
                group = _with_group(group, parts.pop(0))
            stated: Any = field(default=fields[name].default, default_factory=fields[name].default_factory)
            added[group].append((parts[0], hints[name], stated))
    for group, stated in added.items():
        _extend(group, stated)


def _with_group(cls: type, name: str) -> type:
    """Adds a field with a new group of settings to a dataclass; returns the class of the group."""
    title = name.title().replace("_", "")
    where = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.{title}"}
    group: type = dataclass(type(title, (Group,), where))
    setattr(cls, title, group)  # for pickle
    _extend(cls, [(name, group, field(default_factory=group))])
    return group


def _extend(cls: type, added: Sequence[tuple[str, Any, Any]]) -> None:
    """Adds fields to a dataclass, which has none of the methods that it generates in its own body."""
    extended = dataclasses.make_dataclass(cls.__name__, added, bases=(cls,))
    for name in ("__init__", "__repr__", "__eq__", "__match_args__", "__dataclass_fields__"):
        setattr(cls, name, vars(extended)[name])
    cls.__annotations__ = inspect.get_annotations(cls) | inspect.get_annotations(extended)


# ------------------------------------------------------------------------------------------------ settings of a run


def settings_of(config: Any) -> list[ComponentSettings]:
    """Returns the settings of all components in those of a run."""
    return [kind.of(config) for kind in registered()]


def _answer(settings: ComponentSettings, question: Callable[[], Answer], unused: Answer) -> Answer:
    """Returns an answer of settings. If those of another package fail, only runs that use them end."""
    if settings.name not in _foreign:
        return question()
    try:
        with foreign_code():
            return question()
    except ValueError as error:
        kind, defaults, cause = type(settings), type(settings)(), error.__cause__
        changed = any(getattr(settings, name) != getattr(defaults, name) for name in _mounted(kind))
        if not changed and not ComponentSettings.switched_on(settings):
            return unused
        if isinstance(cause, ValueError):
            raise cause from None
        package = kind.__module__.partition(".")[0]
        raise ValueError(f"component {settings.name} of the package {package} cannot be used: {error}") from cause


def _is_on(settings: ComponentSettings) -> bool:
    return _answer(settings, lambda: settings.is_on, False)


def recorded(config: Any) -> dict[str, Any]:
    """Returns the settings of a run as files record them, in nested dictionaries.

    Those of components of other packages that are off are left out, so that the files can be read without these.
    """
    values: dict[str, Any] = dataclasses.asdict(config)
    for kind in _foreign.values():
        if not _is_on(kind.of(config)):
            for path in _mounted(kind).values():
                _delete(values, *path.split("."))
    return values


def _delete(values: dict[str, Any], name: str, *inner: str) -> None:
    """Deletes an entry of nested dictionaries, and those that are then empty."""
    if inner:
        _delete(values[name], *inner)
    if not inner or not values[name]:
        del values[name]


def active(config: Any) -> list[ComponentSettings]:
    """Returns the settings of the components that a run has, in their order.

    Raises:
        ValueError: Some components must come after one another, or after one that does not exist.
    """
    names = [kind.name for kind in registered()]
    found = {each.name: each for each in settings_of(config) if _is_on(each)}
    while missing := [name for name, each in found.items() if any(other not in found for other in each.requires)]:
        del found[missing[0]]
    for each in found.values():
        for other in each.after:
            if other not in names:
                raise ValueError(f"{type(each).__name__}.after must name components, {', '.join(names)}, got {other!r}")
    ordered = []
    while found:
        ready = [name for name, each in found.items() if found.keys().isdisjoint(each.after)]
        if not ready:
            raise ValueError(f"components must have an order, got {', '.join(found)}, which come after one another")
        ordered.append(found.pop(ready[0]))
    return ordered


def check_settings(config: Any, prefix: str = "") -> None:
    """Raises ValueError if settings of components would be ignored, or contradict each other or those of the run.

    Args:
        config: All settings of the run.
        prefix: Begins each key in messages.
    """
    for each in settings_of(config):
        _answer(each, partial(each.check, config, prefix), None)
    present = {each.name: each for each in active(config)}
    for each in present.values():
        for name, reason in each.excludes.items():
            if name in present:
                # One without a switch is always on, so the other one must be off.
                one, other = (each, present[name]) if each.switches() else (present[name], each)
                (path, value), (its, its_value) = (next(iter(x.switched_on().items())) for x in (one, other))
                off = type(one).in_words(False)[1]
                raise ValueError(f"{prefix}{path} must be {off} with {prefix}{its}={its_value}, {reason}, got {value}")


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
