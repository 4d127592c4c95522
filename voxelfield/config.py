"""Validated settings: dataclasses whose annotations define the allowed values, and their construction from mappings.

Errors are one line that names the key, the value and the allowed values.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import BooleanNode, FloatNode, IntegerNode, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from voxelfield.foundation.errors import shown
from voxelfield.messages import clipped

Config = TypeVar("Config")


@dataclass(frozen=True)
class Range:
    """The allowed range of a number, as metadata of an ``Annotated`` type; never includes NaN or infinity.

    Attributes:
        low: Lower bound.
        high: Upper bound.
        low_open: Whether the lower bound itself is excluded.
        high_open: Whether the upper bound itself is excluded.
    """

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def contains(self, value: float) -> bool:
        """Returns whether a value is allowed."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and (isinstance(value, int) or math.isfinite(value))

    def __str__(self) -> str:
        """Describes the allowed values, to follow "must"."""
        if self.high < math.inf:
            return f"lie in {'(' if self.low_open else '['}{self.low}, {self.high}{')' if self.high_open else ']'}"
        if self.low_open:
            return "be positive" if self.low == 0 else f"be above {self.low}"
        return f"be at least {self.low}"


@dataclass(frozen=True)
class Form:
    """The allowed form of a text, as metadata of an ``Annotated`` type.

    Attributes:
        pattern: Regular expression that the whole text must match.
        words: Description of the allowed texts, for messages.
    """

    pattern: str
    words: str

    def contains(self, value: str) -> bool:
        """Returns whether a text is allowed."""
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        """Describes the allowed texts, to follow "must"."""
        return f"be {self.words}"


Count: TypeAlias = Annotated[int, Range(1)]
"""An integer of at least 1."""

Natural: TypeAlias = Annotated[int, Range(0)]
"""An integer of at least 0."""

Resolution: TypeAlias = Annotated[int, Range(2)]
"""A number of vertices along an axis, at least 2."""

Positive: TypeAlias = Annotated[float, Range(0, low_open=True)]
"""A number above 0."""

NotNegative: TypeAlias = Annotated[float, Range(0)]
"""A number of at least 0."""

BelowOne: TypeAlias = Annotated[float, Range(0, 1, high_open=True)]
"""A number from 0, and below 1."""

# OmegaConf's nodes convert values as in every Hydra program: "3" from an environment variable is a number.
_SCALARS: dict[Any, tuple[Any, str, str]] = {
    int: (IntegerNode, "an integer", "integers"),
    float: (FloatNode, "a number", "numbers"),
    bool: (BooleanNode, "true or false", "truth values"),
    str: (StringNode, "text", "texts"),
}

# Of float32, the precision of all computations with settings.
_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127

# OmegaConf's marker for a missing value, which nodes of every type accept.
_MISSING = "???"


def parse(schema: type[Config], values: Any, name: str = "") -> Config:
    """Validates values against a dataclass whose annotations define the allowed values.

    Annotations may be ``int``, ``float``, ``bool``, ``str``, ``Literal`` of texts, another dataclass, ``list``, a
    ``tuple`` of fixed length, or the union of any of these with None; each may be ``Annotated`` with a :class:`Range`
    or a :class:`Form`. A single text is a list of texts too. A dataclass that stands for its subclasses has a class
    method ``choose(values, name)``, which returns the subclass that the values select. Constraints between fields are
    checked by the dataclass's method ``check(name)``, if it has one. Missing keys get the dataclass's defaults.

    Interpolations such as ``${oc.env:HOME}`` are resolved only in Hydra's composed configurations: in a mapping,
    which may come from a stranger's file, they are plain text.

    Args:
        schema: The dataclass.
        values: A mapping, a part of a composed configuration, or an instance of ``schema``.
        name: Key of the values in the whole configuration, for messages; empty for the whole configuration.

    Returns:
        A new instance of ``schema``.

    Raises:
        ValueError: A key is unknown, missing, or has the wrong type or value.
    """
    if OmegaConf.is_config(values):
        try:
            values = OmegaConf.to_container(values, resolve=True)
        except OmegaConfBaseException as error:
            key = ".".join(part for part in (name, error.full_key) if part)
            raise ValueError(f"{key} cannot be resolved: {str(error).splitlines()[0]}") from error
    parsed: Config = _convert(values, schema, name)
    return parsed


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Returns the message for an unknown key, with dots; ``known`` are the valid alternatives for its last part."""
    key = clipped(key if key.isprintable() else repr(key))
    group, _, last = key.rpartition(".")
    similar = difflib.get_close_matches(last, known, n=1)
    if similar:
        return f"configuration has no key {key}; did you mean {'.'.join(filter(None, (group, similar[0])))}?"
    return f"configuration has no key {key}; {group or 'it'} has {', '.join(known)}"


def _convert(value: Any, hint: Any, key: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        converted = _convert(value, arguments[0], key)
        for limit in arguments[1:]:
            if not limit.contains(converted):
                finite = " and finite" if isinstance(converted, float) and not math.isfinite(converted) else ""
                raise ValueError(f"{key} must {limit}{finite}, got {_shown(converted)}")
        return converted
    if origin in (Union, UnionType):
        (other,) = (argument for argument in arguments if argument is not NoneType)
        try:
            return None if value is None else _convert(value, other, key)
        except ValueError as error:
            reason, _, got = str(error).rpartition(", got ")
            if not reason.startswith(f"{key} must "):  # of a key within
                raise
            raise ValueError(f"{reason}, or null, got {got}") from error
    if dataclasses.is_dataclass(hint):
        return _convert_dataclass(value, hint, key)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{key} must be one of {', '.join(arguments)}, got {_shown(value)}")
        return value
    if origin in (list, tuple):
        return _convert_sequence(value, hint, key)
    if isinstance(value, str):
        # A node would parse text that looks like an interpolation, which can take minutes, and reject it if malformed.
        if value == _MISSING or (hint is not str and "${" in value):
            raise _wrong_type(key, hint, value)
        if hint is str:
            return value
    node = _SCALARS[hint][0]
    try:
        converted = node(value, is_optional=False)._value()
    except (OmegaConfBaseException, OverflowError) as error:
        raise _wrong_type(key, hint, value) from error
    if not isinstance(converted, hint):
        raise _wrong_type(key, hint, value)
    # Larger integers fit neither in tensors nor in float.
    if hint is int and not -(2**63) <= converted < 2**64:
        raise ValueError(f"{key} must be an integer of at most 64 bits, got {shown(value)}")
    if hint is float and _LARGEST_FLOAT < abs(converted) < math.inf:
        raise ValueError(f"{key} must be a number of at most {_LARGEST_FLOAT:.3g}, got {converted!r}")
    return converted


def _convert_dataclass(value: Any, schema: Any, key: str) -> Any:
    if hasattr(schema, "choose"):
        schema = schema.choose(value, key)
    if isinstance(value, schema):
        value = vars(value)
    if not isinstance(value, Mapping):
        raise _wrong_type(key, schema, value)
    hints = get_type_hints(schema, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    converted = {}
    for name, item in value.items():
        inner = f"{key}.{name}" if key else str(name)
        if name not in fields:
            raise ValueError(unknown_key(inner, list(fields)))
        converted[name] = _convert(item, hints[name], inner)
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in converted and not has_default:
            raise ValueError(f"configuration lacks {key}.{name}")
    config = schema(**converted)
    if hasattr(config, "check"):
        config.check(key)
    return config


def _convert_sequence(value: Any, hint: Any, key: str) -> Any:
    if isinstance(value, str) and _words(hint) == "a list of texts":
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(key, hint, value)
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is list:
        arguments *= len(value)
    if len(value) != len(arguments):
        raise _wrong_type(key, hint, value)
    pairs = enumerate(zip(value, arguments, strict=True))
    return kind(_convert(item, argument, f"{key}[{index}]") for index, (item, argument) in pairs)


def _wrong_type(key: str, hint: Any, value: Any) -> ValueError:
    return ValueError(f"{key or 'configuration'} must be {_words(hint)}, got {_shown(value)}")


def _words(hint: Any, plural: bool = False) -> str:
    """Describes the type that a value must have."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(arguments[0], plural)
    if origin in (list, tuple):
        count = "" if origin is list else f"{len(arguments)} "
        return f"{'lists' if plural else 'a list'} of {count}{_words(arguments[0], plural=True)}"
    if dataclasses.is_dataclass(hint):
        return "mappings" if plural else f"a mapping of {', '.join(field.name for field in dataclasses.fields(hint))}"
    return str(_SCALARS[hint][2 if plural else 1])


def _shown(value: Any) -> str:
    """Formats a value for messages, None as YAML's null."""
    return "null" if value is None else shown(value)
