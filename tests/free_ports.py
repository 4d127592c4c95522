"""Ports for servers of tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Returns a port of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
