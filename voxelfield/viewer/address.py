"""The address of the page, and who may open it."""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
import socket
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from voxelfield.installed import import_optional

if TYPE_CHECKING:
    from websockets.datastructures import Headers

logger = logging.getLogger(__name__)

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Address:
    """Where the page is served, and the rules by which requests are admitted.

    A web page of another origin can make a browser connect to this machine. The browser then sends that page's address
    as ``Origin`` or, if the attacker's domain resolves to this machine, that domain as ``Host``.

    Attributes:
        host: Address or name of this machine.
        port: 1 to 65535.
        names: Names of the options for host and port, for messages.
        token: Admits browsers that address this machine by anything but a loopback address.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    names: tuple[str, str] = ("--host", "--port")
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))

    def check(self) -> None:
        """Raises MissingPackageError without viser, and ValueError unless the page can be served here."""
        import_optional("viser", "view fields in a browser", "viewer")
        host_name, port_name = self.names
        if not 1 <= self.port <= 65535:
            raise ValueError(f"{port_name} must be 1 to 65535, got {self.port}")
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            raise ValueError(
                f"{host_name} and {port_name} must be an address of this machine and a free port, "
                f"got {self.host} and {self.port} ({error.strerror})"
            ) from error

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return _is_loopback(self.host)

    @property
    def reached_at(self) -> str:
        """Address or name at which programs on this machine reach the page."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        """URL for a browser on this machine."""
        return self._url(self.reached_at)

    def _url(self, host: str) -> str:
        url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        return url if self.is_local else f"{url}/?token={self.token}"

    def log_urls(self) -> None:
        """Logs how to reach the page."""
        logger.info("viewer: open %s", self.url)
        machine = socket.gethostname()
        if self.is_local:
            logger.info(
                "viewer: from another machine: ssh -L %d:%s:%d %s, then open the same address there",
                *(self.port, self.host, self.port, machine),
            )
            logger.info("viewer: through a proxy: add ?token=%s to the page's address there", self.token)
        else:
            logger.info("viewer: from another machine: open %s", self._url(machine))
            logger.warning(
                "viewer: anyone who has this address and can reach port %d of %s can use the page; it is not encrypted",
                *(self.port, machine),
            )

    def refusal(self, path: str, headers: Headers) -> tuple[HTTPStatus, str] | None:
        """Returns status and text of the response to a request that is refused, or None if it is admitted.

        ``path`` contains the query.
        """
        hosts = headers.get_all("Host")
        host = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if host is None:
            return HTTPStatus.BAD_REQUEST, "a request must have one Host header with the name of a machine"
        own_origins = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
        if any(origin.lower() not in own_origins for origin in headers.get_all("Origin")):
            return HTTPStatus.FORBIDDEN, "pages of another origin may not use this viewer"
        if self.is_local and _is_loopback(host["name"].strip("[]")):
            return None
        cookies = (cookie.strip() for header in headers.get_all("Cookie") for cookie in header.split(";"))
        if self._has_token(path) or any(_same(cookie, self._cookie) for cookie in cookies):
            return None
        return HTTPStatus.FORBIDDEN, "open this page at the address that voxelfield has printed, with its ?token=..."

    def response_headers(self, path: str, host: str) -> dict[str, str]:
        """Returns headers to add to the response to an admitted request.

        The token becomes a cookie, because viser's client opens its socket without the query of the address. The policy
        prevents the page from connecting to other servers, whose messages could run scripts in it, and other pages from
        framing it.
        """
        sources = f"'self' 'unsafe-inline' 'unsafe-eval' data: blob: ws://{host} wss://{host}"
        headers = {
            "Content-Security-Policy": f"default-src {sources}; frame-ancestors 'self'; form-action 'none'; "
            "base-uri 'none'",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if self._has_token(path):
            headers["Set-Cookie"] = f"{self._cookie}; Path=/; HttpOnly; SameSite=Strict"
        return headers

    def _has_token(self, path: str) -> bool:
        given = [item for item in path.partition("?")[2].split("&") if item.startswith("token=")]
        return len(given) == 1 and _same(given[0], f"token={self.token}")

    @property
    def _cookie(self) -> str:
        # All ports of a machine share their cookies.
        return f"voxelfield_{self.port}={self.token}"


def _same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
