"""Work for a browser in threads of its own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from voxelfield.viewer.page.jobs import job, latest

PATIENCE = 60


class Browser:
    """As much of viser's client as a job needs."""

    def __init__(self, number: int = 1) -> None:
        self.client_id = number
        self.told: list[str] = []

    def add_notification(self, title: str, body: str, color: str) -> None:
        self.told.append(body)


def eventually(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_browser_has_one_job_at_a_time():
    done, go_on = [], threading.Event()

    def work(client):
        assert go_on.wait(PATIENCE)
        done.append(client.client_id)

    start = job(work)
    first, second = (SimpleNamespace(client=Browser(number)) for number in (1, 2))
    for event in (first, first, second, first):
        start(event)
    start(SimpleNamespace(client=None))
    go_on.set()
    eventually(lambda: sorted(done) == [1, 2])

    def again() -> bool:
        start(first)
        return len(done) > 2

    eventually(again)


@pytest.mark.parametrize(
    ("error", "told", "logged"),
    [
        (ValueError("too long"), ["too long"], []),
        (CancelledError(), [], []),
        (RuntimeError("closed"), [], ["viewer: a browser's request failed: RuntimeError: closed"]),
    ],
)
def test_a_job_that_fails_says_so(caplog, error, told, logged):
    browser, ended = Browser(), threading.Event()

    def work(_):
        if ended.is_set():
            return
        ended.set()
        raise error

    start = job(work)
    start(SimpleNamespace(client=browser))
    assert ended.wait(PATIENCE)
    eventually(lambda: (browser.told, caplog.messages) == (told, logged))


def test_requests_that_come_together_are_worked_on_once():
    began, go_on, seen, value = threading.Event(), threading.Event(), [], [0]

    def work():
        seen.append(value[0])
        began.set()
        assert go_on.wait(PATIENCE)

    start = latest(work)
    start()
    assert began.wait(PATIENCE)
    for value[0] in range(1, 10):
        start()
    go_on.set()
    eventually(lambda: len(seen) == 2)
    assert seen == [0, 9]
