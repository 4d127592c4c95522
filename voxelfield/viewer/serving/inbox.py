"""The messages of one connected browser: which the page takes, and with what values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from voxelfield.datasets.poses import FARTHEST
from voxelfield.viewer.drawing.viewpoint import FIELDS_OF_VIEW
from voxelfield.viewer.scheduling.resolution import SMALLEST_SIDE
from voxelfield.viewer.serving.controls import RefusedMessageError, control_value, number, numbers, text

LARGEST_MESSAGE = 1 << 20
"""Bytes of a message; viser's client divides files into parts of half as many."""

LARGEST_FILE = 1 << 24
"""Bytes of a file that is uploaded."""

_MOST_PARTS = 64

LARGEST_CANVAS = 8192
"""Pixels along a side of a browser's canvas."""

_LARGEST_NUMBER = 1e9
# Relative to the size of the numbers: where less is left of a direction, float64 has no digits for it.
_SHORTEST = 1e-6


class Inbox:
    """Checks the messages of one connection.

    Only the kinds of messages that the page's controls, its cameras and uploads send are taken. Numbers out of range
    are moved into it; everything else that viser's client would not send is refused.

    Args:
        control: Returns viser's handle of a control of the page by its identifier, or None.
    """

    def __init__(self, control: Callable[[str], Any]) -> None:
        self._control = control
        self._kinds: Mapping[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            "ViewerCameraMessage": _camera,
            "GuiUpdateMessage": self._update,
            "SceneNodeClickMessage": _click,
            "FileTransferStartUpload": self._start_of_upload,
            "FileTransferPart": self._part_of_upload,
        }
        self._upload: dict[str, Any] | None = None
        self._missing: set[int] = set()
        self._bytes_left = 0

    def accept(self, data: bytes | str) -> bytes | None:
        """Returns a message as viser may take it, or None if it has become meaningless, and is to be dropped.

        Args:
            data: What has been received.

        Raises:
            RefusedMessageError: No browser sends this by means of the page.
        """
        import msgspec

        if isinstance(data, str):
            raise RefusedMessageError("a message must be binary, got text")
        try:
            message = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
            raise RefusedMessageError("a message must be in the format MessagePack") from error
        kind = message.get("type") if isinstance(message, dict) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise RefusedMessageError("a message must be of a type that the page uses")
        accepted = self._kinds[kind](message)
        return None if accepted is None else bytes(msgspec.msgpack.encode({"type": kind, **accepted}))

    def _update(self, message: dict[str, Any]) -> dict[str, Any] | None:
        uuid, updates = text("uuid", message.get("uuid")), message.get("updates")
        if not isinstance(updates, dict) or updates.keys() != {"value"}:
            raise RefusedMessageError("a control's update must hold its value alone")
        control = self._control(uuid)
        if control is None or control.disabled:
            return None  # since the user has seen it
        return {"uuid": uuid, "updates": {"value": control_value(control, updates["value"])}}

    def _start_of_upload(self, message: dict[str, Any]) -> dict[str, Any] | None:
        names = ("source_component_uuid", "transfer_uuid", "filename", "mime_type")
        start: dict[str, Any] = {name: text(name, message.get(name)) for name in names}
        control = self._control(start["source_component_uuid"])
        if control is None or control.disabled:
            return None
        if not hasattr(control, "on_upload"):
            raise RefusedMessageError("a file must be for a control that takes one")
        if self._upload is not None:
            raise RefusedMessageError("one file must have arrived before the next is sent")
        parts, size = message.get("part_count"), message.get("size_bytes")
        if type(size) is not int or not 0 <= size <= LARGEST_FILE:
            raise RefusedMessageError(f"a file must have at most {LARGEST_FILE} bytes")
        if type(parts) is not int or not (0 < parts <= min(size, _MOST_PARTS) or parts == size == 0):
            raise RefusedMessageError(f"a file must come in at most {_MOST_PARTS} parts, of which none is empty")
        if parts > 0:
            self._upload, self._bytes_left, self._missing = start, size, set(range(parts))
        return {**start, "part_count": parts, "size_bytes": size}

    def _part_of_upload(self, message: dict[str, Any]) -> dict[str, Any] | None:
        names = ("source_component_uuid", "transfer_uuid")
        index, content = message.get("part_index"), message.get("content")
        if self._upload is None or any(message.get(name) != self._upload[name] for name in names):
            raise RefusedMessageError("a part of a file must follow the file's announcement")
        if type(index) is not int or index not in self._missing or not isinstance(content, bytes):
            raise RefusedMessageError("a part of a file must be one that is missing")
        self._bytes_left -= len(content)
        self._missing.remove(index)
        if self._bytes_left < 0 or (not self._missing and self._bytes_left > 0):
            raise RefusedMessageError("a file's parts must be as large as announced")
        part = {**{name: self._upload[name] for name in names}, "part_index": index, "content": content}
        if not self._missing:
            self._upload = None
        return part


def _camera(message: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a camera that can be computed with."""
    sides = [number(name, message.get(name), 0, _LARGEST_NUMBER) for name in ("image_height", "image_width")]
    if min(sides) < 1:
        return None  # a window that is not shown
    factor = min(1.0, LARGEST_CANVAS / max(sides))
    height, width = (max(SMALLEST_SIDE, round(side * factor)) for side in sides)
    position, target = (_vector(message, name, FARTHEST) for name in ("position", "look_at"))
    if math.dist(position, target) <= _SHORTEST * max(map(abs, (*position, *target))):
        raise RefusedMessageError("look_at must be apart from position")
    return {
        "wxyz": _direction("wxyz", message.get("wxyz"), 4),
        "position": position,
        "look_at": target,
        "up_direction": _direction("up_direction", message.get("up_direction"), 3),
        "fov": number("fov", message.get("fov"), *FIELDS_OF_VIEW),
        "near": number("near", message.get("near"), 0.0, _LARGEST_NUMBER),
        "far": number("far", message.get("far"), 0.0, _LARGEST_NUMBER),
        "image_height": height,
        "image_width": width,
    }


def _click(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a click at an object of the scene, of which the page's have no instances."""
    modifier = message.get("modifier")
    return {
        "name": text("name", message.get("name"), 4096),
        "instance_index": None,
        "ray_origin": _vector(message, "ray_origin", _LARGEST_NUMBER),
        "ray_direction": _vector(message, "ray_direction", _LARGEST_NUMBER),
        "screen_pos": numbers("screen_pos", message.get("screen_pos"), (-1.0,) * 2, (2.0,) * 2),
        "modifier": None if modifier is None else text("modifier", modifier),
        "owner": text("owner", message.get("owner", "")),
    }


def _vector(message: dict[str, Any], name: str, largest: float) -> list[float]:
    return numbers(name, message.get(name), (-largest,) * 3, (largest,) * 3)


def _direction(name: str, value: object, length: int) -> list[float]:
    """Returns a vector or quaternion of unit length.

    Raises:
        RefusedMessageError: It is too short to have a direction.
    """
    vector = np.array(numbers(name, value, (-_LARGEST_NUMBER,) * length, (_LARGEST_NUMBER,) * length))
    norm = float(np.linalg.norm(vector))
    if norm < _SHORTEST:
        raise RefusedMessageError(f"{name} must have a direction, got a length of {norm:g}")
    unit: list[float] = (vector / norm).tolist()
    return unit
