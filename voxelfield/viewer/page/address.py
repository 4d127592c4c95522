"""Where the page is served, and how to reach it."""

from __future__ import annotations

import contextlib
import errno
import importlib
import ipaddress
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from voxelfield.installed import MissingPackageError
from voxelfield.viewer.serving.admission import TOKEN_KEY, Admission, new_token

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where a page is served.

    Attributes:
        host: Address or name of this machine.
        port: 1 to 65535.
        names: What host and port are called in messages.
        token: Admits browsers of other machines, or by another name than this machine's loopback addresses.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    names: tuple[str, str] = ("--host", "--port")
    token: str = field(default_factory=new_token)

    def check(self) -> None:
        """Raises ValueError unless the port can be listened on, and names what is wrong."""
        host_name, port_name = self.names
        if not 1 <= self.port <= 65535:
            raise ValueError(f"{port_name} must be 1 to 65535, got {self.port}")
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ValueError(f"{host_name} must be an address of this machine, got {self.host} ({error})") from error
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                # As the server does: a port whose last connections are still being closed is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._bind(probe, address)

    def _bind(self, probe: socket.socket, address: Any) -> None:
        host_name, port_name = self.names
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                message = f"{host_name} must be an address of this machine, got {self.host}"
            elif isinstance(error, PermissionError):
                message = f"{port_name} must be a port that you may listen on, got {self.port}: choose one above 1023"
            else:
                message = f"{port_name} must be a free port, got {self.port}, which another program is using"
            raise ValueError(message) from error

    @property
    def is_local(self) -> bool:
        """Whether this machine alone can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def admission(self) -> Admission:
        """Decides which requests are answered there."""
        return Admission(self.is_local, self.port, self.token)

    @property
    def url(self) -> str:
        """What to open in a browser on this machine."""
        everywhere = self.host in ("0.0.0.0", "::")
        return self._url("127.0.0.1" if everywhere else self.host)

    def _url(self, host: str) -> str:
        url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        return url if self.is_local else f"{url}/{self._query}"

    @property
    def _query(self) -> str:
        return f"?{TOKEN_KEY}={self.token}"

    def tell(self) -> None:
        """Logs how to reach the page."""
        logger.info("viewer: open %s", self.url)
        name = socket.gethostname()
        if self.is_local:
            logger.info(
                "viewer: from another machine: ssh -L %d:%s:%d %s, then open the same address there",
                *(self.port, self.host, self.port, name),
            )
            logger.info("viewer: through a proxy: add %s to the page's address there", self._query)
        else:
            logger.info("viewer: from another machine: open %s", self._url(name))
            logger.warning(
                "viewer: whoever has this address and can reach port %d of %s can use the page; it is not encrypted",
                *(self.port, name),
            )


def import_viser() -> Any:
    """Imports viser.

    Raises:
        MissingPackageError: It is not installed.
    """
    try:
        return importlib.import_module("viser")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "viser":
            raise
        raise MissingPackageError(
            'viser must be installed to view fields in a browser: pip install "voxelfield[viewer]"'
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps viser from printing banners of its own."""
    from rich import get_console

    console = get_console()
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before
