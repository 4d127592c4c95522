"""Threads that write files while the caller renders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class BackgroundWriter:
    """Runs functions in threads; a context manager whose exit waits for them and raises their first error.

    Args:
        workers: Number of threads.
        limit: Largest number of unfinished calls; :meth:`submit` waits for the oldest one beyond that.
    """

    def __init__(self, workers: int, limit: int) -> None:
        self.limit = limit
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="writer")
        self._waiting: deque[Future[Any]] = deque()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Queues a call.

        Args:
            function: The function.
            arguments: Its arguments, which must not change until the context exits.

        Raises:
            Exception: The error of an earlier call, so that rendering stops early, for example if the disk is full.
        """
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= self.limit):
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(function, *arguments))

    def close(self, cancel: bool = False) -> None:
        """Waits for all calls. After an error or Ctrl-C, calls that have not been started are skipped.

        Args:
            cancel: Skip them in any case, and ignore errors.

        Raises:
            Exception: The first error of a call.
        """
        try:
            while self._waiting and not cancel:
                self._waiting.popleft().result()
        finally:
            self._waiting.clear()
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)
