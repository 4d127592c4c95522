"""Work for a browser that takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

logger = logging.getLogger(__name__)


def in_thread(work: Callable[[], None], client: Any = None) -> None:
    """Does work in a thread of its own, so that the one in which viser answers all browsers stays free.

    Args:
        work: The work. CancelledError ends it without a message.
        client: viser's handle of the browser that shows the message of a ValueError; None: the log does.
    """

    def run() -> None:
        try:
            work()
        except CancelledError:
            pass
        except Exception as error:
            if client is not None and isinstance(error, ValueError):
                client.add_notification("This is not possible", str(error), color="red")
            else:  # such as one about a server that has been closed meanwhile
                logger.error("viewer: a browser's request failed: %s: %s", type(error).__name__, error)

    threading.Thread(target=run, name="viewer job", daemon=True).start()


def job(work: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a callback for a control that does work in a thread of its own, once at a time for each browser.

    Args:
        work: Is called with viser's handle of the client.
    """
    busy: set[int] = set()
    lock = threading.Lock()

    def start(event: Any) -> None:
        client = event.client

        def run() -> None:
            try:
                work(client)
            finally:
                with lock:
                    busy.discard(client.client_id)

        with lock:
            if client is None or client.client_id in busy:
                return
            busy.add(client.client_id)
        in_thread(run, client)

    return start


def latest(work: Callable[[], None]) -> Callable[[], None]:
    """Returns what has work done in a thread of its own: once for all requests that come before it begins."""
    working, lock = threading.Lock(), threading.Lock()
    waiting = False

    def run() -> None:
        nonlocal waiting
        with working:
            with lock:
                waiting = False
            work()

    def start() -> None:
        nonlocal waiting
        with lock:
            if waiting:
                return
            waiting = True
        in_thread(run)

    return start
