"""The checks of requests and messages, as websockets' server takes them."""

from __future__ import annotations

import asyncio
import http
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from voxelfield.messages import clipped
from voxelfield.viewer.serving.admission import Admission
from voxelfield.viewer.serving.controls import RefusedMessageError
from voxelfield.viewer.serving.inbox import LARGEST_MESSAGE, Inbox

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

logger = logging.getLogger(__name__)

_MOST_KINDS = 100

_MOST_PER_SECOND = 300
"""Messages of one connection; a browser sends up to 120 cameras a second."""

_POLICY_VIOLATION = 1008


class Complaints:
    """Logs in one line what was refused or went wrong, each kind of it once, so that nobody can fill the log."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, trouble: str) -> None:
        """Logs a trouble unless one has been that differs in the value alone, after ``, got``."""
        trouble = clipped(" ".join(trouble.split()))
        kind = trouble.partition(", got ")[0]
        with self._lock:
            if kind in self._told or len(self._told) >= _MOST_KINDS:
                return
            self._told.add(kind)
        logger.warning("viewer: %s (told once)", trouble)

    def fail(self, error: object) -> None:
        """Logs an error of the page's own."""
        self.tell(f"a browser's request failed: {type(error).__name__}: {error}")
        logger.debug("viewer: a browser's request failed", exc_info=error if isinstance(error, Exception) else None)


class _OneLine(logging.Filter):
    """Passes errors of websockets to complaints, without their tracebacks, and drops the rest."""

    def __init__(self, complaints: Complaints) -> None:
        super().__init__()
        self._complaints = complaints

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            error = record.exc_info[1] if record.exc_info else None
            self._complaints.tell(f"{record.getMessage()} ({error})" if error else record.getMessage())
        return False


def guarded(
    admission: Admission, control: Callable[[str], Any], complaints: Complaints, serve_file: Callable[..., Any]
) -> Mapping[str, Any]:
    """Returns arguments of :class:`websockets.asyncio.server.serve` that refuse what the page's own browsers never ask.

    Args:
        admission: Decides on requests.
        control: As for :class:`Inbox`.
        complaints: Receives what is refused.
        serve_file: Answers an admitted request; returns None for one that opens a socket.
    """
    from websockets.asyncio.server import ServerConnection

    class Connection(ServerConnection):
        """A connection whose messages are checked before viser sees them."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._inbox = Inbox(control)
            self._second, self._count = 0.0, 0

        async def recv(self, decode: bool | None = None) -> Any:
            while True:
                data = await super().recv(decode)
                await self._slow_down()
                try:
                    accepted = self._inbox.accept(data)
                except RefusedMessageError as error:
                    complaints.tell(f"a browser was disconnected: {error}")
                    await self.close(_POLICY_VIOLATION, clipped(str(error)))
                    raise self.protocol.close_exc from error
                if accepted is not None:
                    return accepted

        async def _slow_down(self) -> None:
            """Leaves further messages in the network where there are too many."""
            now = time.monotonic()
            if now - self._second >= 1:
                self._second, self._count = now, 0
            self._count += 1
            if self._count > _MOST_PER_SECOND:
                await asyncio.sleep(self._second + 1 - now)

    def process_request(connection: ServerConnection, request: Request) -> Response | None:
        values = [request.headers.get_all(name) for name in ("Host", "Origin", "Cookie")]
        refusal = admission.refusal(request.path, *values)
        if refusal is not None:
            complaints.tell(f"refused {refusal.kind}")
            return connection.respond(refusal.status, refusal.text + "\n")
        try:
            answer: Response | None = serve_file(connection, request)
        except Exception:  # such as a path of which the file system knows nothing
            return connection.respond(http.HTTPStatus.BAD_REQUEST, "The request makes no sense.\n")
        return answer

    def process_response(_: ServerConnection, request: Request, response: Response) -> None:
        if response.status_code == http.HTTPStatus.OK:
            for name, value in admission.headers(request.path, request.headers["Host"]).items():
                response.headers[name] = value

    # One of its own for each server, because a logger keeps its filters.
    quiet = logging.Logger(f"{__name__}.websockets", logging.WARNING)
    quiet.addFilter(_OneLine(complaints))
    return {
        "process_request": process_request,
        "process_response": process_response,
        "create_connection": Connection,
        "logger": quiet,
        "max_size": LARGEST_MESSAGE,
    }
