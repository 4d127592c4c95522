"""Strategies for what clients send to the viewer: messages of all kinds with sound, extreme and senseless values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from viewer_client import CAMERA

_EXTREMES: list[Any] = [0, -1, 1e300, -1e300, 1e-300, math.nan, math.inf, -math.inf, 2**63, -(2**63), 400_000, 0.5]

numbers = st.one_of(st.sampled_from(_EXTREMES), st.floats(), st.integers(-(2**63), 2**64 - 1))

_leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20), st.binary(max_size=20))

anything: st.SearchStrategy[Any] = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8) | numbers, inner, max_size=5),
    max_leaves=10,
)

# All kinds of messages that viser knows from browsers, and one that it does not.
KINDS = (
    "ViewerCameraMessage",
    "GuiUpdateMessage",
    "SceneNodeClickMessage",
    "FileTransferStartUpload",
    "FileTransferPart",
    "FileTransferPartAck",
    "GuiButtonHoldMessage",
    "GuiFormSubmitMessage",
    "GuiFormDirtyMessage",
    "ScenePointerMessage",
    "SceneNodeDragMessage",
    "TransformControlsUpdateMessage",
    "GetRenderResponseMessage",
    "LocalStorageGetItemResponseMessage",
    "CommandTriggerMessage",
    "ShareUrlRequest",
    "ShareUrlDisconnect",
    "RunJavascriptMessage",
    "Nothing",
)

_vectors = st.lists(numbers, min_size=3, max_size=4)

_CLICK = {
    "name": "/cameras/train/0",
    "instance_index": None,
    "ray_origin": [0.0, 0.0, 0.0],
    "ray_direction": [0.0, 0.0, 1.0],
    "screen_pos": [0.5, 0.5],
    "modifier": None,
    "owner": "",
}


@st.composite
def _changed(draw: st.DrawFn, sound: dict[str, Any]) -> dict[str, Any]:
    """The same message with a few fields that have another value, are missing, or are new."""
    message = dict(sound)
    for name in draw(st.lists(st.sampled_from(sorted(sound)), max_size=3)):
        if draw(st.integers(0, 7)) == 0:
            message.pop(name, None)
        else:
            message[name] = draw(st.one_of(numbers, _vectors, anything))
    if draw(st.integers(0, 7)) == 0:
        message[draw(st.text(max_size=8))] = draw(anything)
    return message


@st.composite
def _upload(draw: st.DrawFn, uuids: Sequence[str]) -> list[dict[str, Any]]:
    """A file in parts, mostly as announced."""
    content = draw(st.binary(max_size=40) | st.sampled_from([json.dumps({"keyframes": []}).encode()]))
    size = draw(st.sampled_from([4, 10, 100]))
    parts = [content[first : first + size] for first in range(0, len(content), size)]
    uuid = uuids[draw(st.integers(0, len(uuids) - 1))]
    names = {"source_component_uuid": uuid, "transfer_uuid": draw(st.sampled_from("ab"))}
    start = {
        "type": "FileTransferStartUpload",
        **names,
        "filename": draw(st.text(max_size=10)),
        "mime_type": "application/json",
        "part_count": len(parts),
        "size_bytes": len(content),
    }
    sent = [start] if draw(st.integers(0, 3)) else [draw(_changed(start))]
    for index, part in enumerate(parts):
        message = {"type": "FileTransferPart", **names, "part_index": index, "content": part}
        sent.append(message if draw(st.integers(0, 3)) else draw(_changed(message)))
    return sent


def value_for(control: Any) -> st.SearchStrategy[Any]:
    """Values of a control's type, mostly out of its range."""
    finite = st.sampled_from([number for number in _EXTREMES if math.isfinite(number)]) | st.floats(-1e4, 1e4)
    if hasattr(control, "options"):
        return st.sampled_from(control.options)
    if isinstance(control.value, tuple):
        return st.lists(finite, min_size=len(control.value), max_size=len(control.value))
    return finite if hasattr(control, "min") else st.just(True) | st.booleans()


@st.composite
def conversations(draw: st.DrawFn, controls: Mapping[str, Any]) -> list[bytes | str]:
    """What one client sends, one after another.

    Args:
        controls: viser's handles of the page's controls by their identifiers.
    """
    # Identifiers differ from run to run, and derandomised examples must not.
    uuids = sorted(controls, key=lambda uuid: controls[uuid].order)
    uploads = [uuid for uuid in uuids if hasattr(controls[uuid], "on_upload")]
    ways = ["camera"] * 4 + ["value"] * 6 + ["click", "file", "senseless", "other", "bytes"]
    sent: list[Any] = []
    for _ in range(draw(st.integers(1, 10))):
        way = draw(st.sampled_from(ways))
        if way == "camera":
            changed = draw(st.booleans())
            sent.append({"type": "ViewerCameraMessage", **(draw(_changed(CAMERA)) if changed else CAMERA)})
        elif way in ("value", "senseless"):
            uuid = uuids[draw(st.integers(0, len(uuids) - 1))]
            value = draw(value_for(controls[uuid]) if way == "value" else anything)
            sent.append({"type": "GuiUpdateMessage", "uuid": uuid, "updates": {"value": value}})
        elif way == "click":
            sent.append({"type": "SceneNodeClickMessage", **draw(_changed(_CLICK))})
        elif way == "file":
            sent += draw(_upload([*uploads, *uploads, *uploads, uuids[0]]))
        elif way == "other":
            fields = draw(st.dictionaries(st.text(max_size=8), anything, max_size=4))
            sent.append({**fields, "type": draw(st.sampled_from(KINDS) | anything)})
        else:
            sent.append(draw(st.binary(max_size=60) | st.text(max_size=20) | anything.map(msgspec.msgpack.encode)))
    return [each if isinstance(each, bytes | str) else msgspec.msgpack.encode(each) for each in sent]
