"""What clients send to the viewer: every message is taken with values in range, or ends its connection in one line."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fuzz_property import tally
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("viser")

from fuzz_messages import conversations
from viewer_client import Client
from viewer_scene import served_page

from voxelfield.viewer.server import LARGEST_CANVAS, RefusedMessageError, validated

# The page ignores it, and pytest restores the filters of warnings before each test.
pytestmark = pytest.mark.filterwarnings("ignore:Queued a")


class _Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with served_page() as served:
        yield served


@pytest.fixture(scope="module")
def logged() -> Iterator[list[str]]:
    records = _Records()
    logging.getLogger().addHandler(records)
    yield records.texts
    logging.getLogger().removeHandler(records)


def controls_of(page: Any) -> dict[str, Any]:
    return page.server.gui._gui_input_handle_from_uuid


def assert_in_range(message: Any, controls: dict[str, Any]) -> None:
    """Fails unless the values of a message that viser is given can be computed with."""
    kind = type(message).__name__
    if kind == "ViewerCameraMessage":
        assert 1 <= message.image_height <= LARGEST_CANVAS
        assert 1 <= message.image_width <= LARGEST_CANVAS
        assert 0 < message.fov < np.pi
        numbers = [*message.wxyz, *message.position, *message.look_at, *message.up_direction, message.near, message.far]
        assert np.isfinite(numbers).all()
        assert np.linalg.norm(message.wxyz) == pytest.approx(1)
    elif kind == "GuiUpdateMessage":
        control, value = controls[message.uuid], message.updates["value"]
        assert message.updates.keys() == {"value"}
        if hasattr(control, "min"):
            assert (np.asarray(value) >= control.min).all()
            assert (np.asarray(value) <= control.max).all()
        elif hasattr(control, "options"):
            assert value in control.options
        else:
            assert isinstance(value, bool)


@given(data=st.data())
def test_messages_are_taken_in_range_or_refused(page, data):
    from viser._messages import Message

    controls = controls_of(page)
    for sent in data.draw(conversations(controls)):
        try:
            accepted = validated(sent, controls.get)
        except RefusedMessageError as error:
            text = str(error)
            assert "\n" not in text
            assert len(text) < 300
            tally["viewer messages"]["refused"] += 1
            continue
        tally["viewer messages"]["taken" if accepted else "dropped"] += 1
        if accepted is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert_in_range(Message.deserialize(accepted), controls)


@given(data=st.data())
def test_the_page_survives_every_client(page, logged, data):
    import websockets

    logged.clear()
    sent = data.draw(conversations(controls_of(page)))
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        with contextlib.suppress(websockets.ConnectionClosed), Client(page.address.port) as client:
            client.look()
            for message in sent:
                client.socket.send(message)
        with Client(page.address.port) as other:
            other.look()
            other.receive("BackgroundImageMessage")
    assert errors.getvalue() == ""
    assert [text for text in logged if "failed" in text or "cannot draw" in text or "\n" in text] == []
    tally["viewer connections"]["survived"] += 1
