"""viser's server, with checks that viser has no place for.

viser 1.1 hands neither allowed origins nor hooks for requests to websockets, takes messages of all its types from every
client, sets whatever attribute of a control a client names, and prints tracebacks. Its constructor starts to serve, so
there is no later moment at which checks could be added. While it runs, two names in viser's own modules therefore stand
for others: websockets' ``serve``, which gets further arguments, and the thread pool of callbacks. All other uses of
both packages in this process stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from voxelfield.installed import MissingPackageError
from voxelfield.viewer.serving.admission import Admission
from voxelfield.viewer.serving.connections import Complaints, guarded

_replacing = threading.Lock()


def start_guarded_server(host: str, port: int, label: str, admission: Admission) -> Any:
    """Returns viser's server, which serves already.

    Args:
        host: Where to listen.
        port: Where to listen. viser takes the next one that is free.
        label: Title of the page's panel.
        admission: Decides which requests are answered.

    Raises:
        MissingPackageError: The installed viser cannot be given the checks.
    """
    import viser

    complaints = Complaints()
    server: Any = None
    guards = 0

    def control(uuid: str) -> Any:
        return None if server is None else server.gui._gui_input_handle_from_uuid.get(uuid)

    def serve(handler: Any, *place: Any, process_request: Callable[..., Any], **options: Any) -> Any:
        import websockets.asyncio.server

        nonlocal guards
        guards += 1
        options.update(guarded(admission, control, complaints, process_request))
        return websockets.asyncio.server.serve(handler, *place, **options)

    # What a client has asked for may come when it has left.
    warnings.filterwarnings("ignore", r"Queued a \w+ on a closed connection", UserWarning)
    with _replaced(serve, functools.partial(_Callbacks, complaints)):
        server = viser.ViserServer(host, port, label=label, verbose=False)
    if guards == 0:
        server.stop()
        raise MissingPackageError(
            f"viser must be version 1.1, got {viser.__version__}, which takes no checks of requests: "
            'pip install "viser==1.1.*"'
        )
    server.get_event_loop().set_exception_handler(
        lambda _, context: complaints.fail(context.get("exception") or context["message"])
    )
    return server


class _Callbacks(ThreadPoolExecutor):
    """Runs what browsers ask for, one after another, because all share the page; errors become lines in the log."""

    def __init__(self, complaints: Complaints, **_: Any) -> None:
        super().__init__(max_workers=1, thread_name_prefix="viewer callback")
        self._complaints = complaints

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        def told() -> Any:
            try:
                return function(*arguments, **named)
            except Exception as error:
                self._complaints.fail(error)

        return super().submit(told)


@contextlib.contextmanager
def _replaced(serve: Callable[..., Any], pool: Callable[..., Any]) -> Iterator[None]:
    """Has viser start its server, and its thread pool, by other functions."""
    from viser import _viser
    from viser.infra import _infra

    infra: Any = _infra
    server: Any = _viser
    with _replacing:
        websockets, thread_pool = infra.websockets, server.ThreadPoolExecutor
        infra.websockets = SimpleNamespace(
            asyncio=SimpleNamespace(server=SimpleNamespace(serve=serve)),
            datastructures=websockets.datastructures,
            exceptions=websockets.exceptions,
        )
        server.ThreadPoolExecutor = pool
        try:
            yield
        finally:
            infra.websockets, server.ThreadPoolExecutor = websockets, thread_pool
