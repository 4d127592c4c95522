"""Validation of the messages of a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from voxelfield.datasets.poses import FARTHEST
from voxelfield.viewer.pictures import FIELDS_OF_VIEW

LARGEST_MESSAGE = 1 << 16
"""Bytes of a message."""

LARGEST_CANVAS = 8192
"""Pixels along a side of a browser's canvas."""

_SHORTEST = 1e-6
"""Relative length below which the direction of a vector is lost in rounding."""

# NaN fails these limits too.
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
Vector: TypeAlias = tuple[Number, Number, Number]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=255)]
Side: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class RefusedMessageError(ValueError):
    """A message that viser's client does not send for this page."""


class _Message(msgspec.Struct, tag=True, tag_field="type"):
    """A message of the protocol of viser's client; ``type`` is the name of the class."""


class ViewerCameraMessage(_Message):
    """The camera of a browser."""

    wxyz: tuple[Number, Number, Number, Number]
    position: Vector
    look_at: Vector
    up_direction: Vector
    fov: Number
    near: Number
    far: Number
    image_height: Side
    image_width: Side


class _Updates(msgspec.Struct, forbid_unknown_fields=True):
    value: bool | float | str | list[float]


class GuiUpdateMessage(_Message):
    """A new value of a control; viser would also set the control's other attributes."""

    uuid: Text
    updates: _Updates


class SceneNodeClickMessage(_Message):
    """A click at an object of the scene."""

    name: Annotated[str, msgspec.Meta(max_length=4096)]
    instance_index: int | None
    ray_origin: Vector
    ray_direction: Vector
    screen_pos: tuple[Number, Number]
    modifier: Text | None
    owner: Text = ""


_DECODER = msgspec.msgpack.Decoder(ViewerCameraMessage | GuiUpdateMessage | SceneNodeClickMessage)


def validated(data: bytes | str, control_of: Callable[[str], Any]) -> bytes | None:
    """Returns a message in the form in which viser may process it, or None if it is obsolete.

    Values beyond the range of a control, and cameras beyond the limits of rendering, are moved to the nearest valid
    ones. ``control_of`` returns viser's handle of a control of the page by its identifier, or None. Raises
    RefusedMessageError for a message that viser's client does not send for this page.
    """
    try:
        message = _DECODER.decode(data.encode() if isinstance(data, str) else data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RefusedMessageError(f"a message must be one of the page's: {error}") from error
    if isinstance(message, ViewerCameraMessage):
        if min(message.image_height, message.image_width) < 1:
            return None  # a window that is not shown
        _normalise(message)
    elif isinstance(message, GuiUpdateMessage):
        control = control_of(message.uuid)
        if control is None or control.disabled:
            return None  # since the user has seen it
        message.updates.value = control_value(control, message.updates.value)
    return msgspec.msgpack.encode(message)


def control_value(control: Any, value: object) -> Any:
    """Returns a value that a client has sent for a control, moved into its range.

    Raises RefusedMessageError for a value of the wrong type, or one that is not among the control's options.
    """
    present = control.value
    refusal = RefusedMessageError(f"a {type(control).__name__} cannot have such a value, got {value!r:.40}")
    if hasattr(control, "options") or isinstance(present, bool):
        if type(value) is not type(present) or value not in getattr(control, "options", (False, True)):
            raise refusal
        return value
    numbers = np.asarray(value)
    fits = numbers.dtype.kind in "if" and numbers.shape == np.shape(present) and bool(np.isfinite(numbers).all())
    if not fits or not hasattr(control, "min"):
        raise refusal
    nearest = np.clip(numbers.astype(np.float64), control.min, control.max)
    return round(float(nearest)) if isinstance(present, int) else nearest.tolist()


def _normalise(camera: ViewerCameraMessage) -> None:
    """Moves a camera within the limits of rendering, in place."""
    factor = min(1.0, LARGEST_CANVAS / max(camera.image_height, camera.image_width))
    camera.image_height, camera.image_width = (
        max(1, round(side * factor)) for side in (camera.image_height, camera.image_width)
    )
    camera.fov = float(np.clip(camera.fov, *FIELDS_OF_VIEW))
    position, look_at = (np.clip(point, -FARTHEST, FARTHEST) for point in (camera.position, camera.look_at))
    if np.linalg.norm(look_at - position) <= _SHORTEST * np.abs((position, look_at)).max():
        raise RefusedMessageError("look_at must be apart from position")
    camera.position, camera.look_at = tuple(position.tolist()), tuple(look_at.tolist())
    camera.wxyz, camera.up_direction = _unit("wxyz", camera.wxyz), _unit("up_direction", camera.up_direction)


def _unit(name: str, vector: tuple[float, ...]) -> Any:
    """Returns a vector or quaternion scaled to unit length."""
    length = float(np.linalg.norm(vector))
    if length < _SHORTEST:
        raise RefusedMessageError(f"{name} must have a direction, got a length of {length:g}")
    return tuple(component / length for component in vector)
