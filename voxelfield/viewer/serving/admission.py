"""Decides which requests the page answers, by their headers and the token in their address."""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

TOKEN_KEY = "token"

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_LONGEST_TOKEN = 200


def new_token() -> str:
    """Returns a token that nobody can guess."""
    return secrets.token_urlsafe(16)


@dataclass(frozen=True)
class Refusal:
    """Why a request gets no answer but this one.

    Attributes:
        status: HTTP status.
        text: One line for whoever asked.
        kind: One line for the log, equal for all requests that are refused for the same reason.
    """

    status: int
    text: str
    kind: str


@dataclass(frozen=True)
class Admission:
    """Tells the page's own browsers from others.

    A web page of somebody else can make a browser connect to this machine. The browser then sends that page's address
    as ``Origin``, or, if a name of the attacker's has been made to point here, that name as ``Host``.

    Attributes:
        local: Whether the page listens on this machine's loopback addresses alone. If so, a request for one of them
            needs no token.
        port: Where the page listens.
        token: What the address must contain otherwise.
    """

    local: bool
    port: int
    token: str

    def refusal(
        self, target: str, hosts: Sequence[str], origins: Sequence[str], cookies: Sequence[str]
    ) -> Refusal | None:
        """Returns why a request is refused, or None if it is admitted.

        Args:
            target: The path and query that are requested.
            hosts: Values of the request's ``Host`` headers.
            origins: Values of its ``Origin`` headers.
            cookies: Values of its ``Cookie`` headers.
        """
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is None:
            text = "The request must have one Host header with the name of a machine."
            return Refusal(400, text, "a request without a valid Host header")
        if len(origins) > 1 or any(not _same_place(origin, hosts[0]) for origin in origins):
            text = "Pages of another origin may not use this viewer."
            return Refusal(403, text, "a request by a page of another origin")
        if self.local and _is_loopback(found["name"]):
            return None
        if self.has_token(target) or self._is_known(cookies):
            return None
        text = "Open this page at the address that voxelfield has printed, with its ?token=..."
        return Refusal(403, text, "a request without the token that is in the page's address")

    def has_token(self, target: str) -> bool:
        """Tells whether a requested path and query contain the token."""
        try:
            given = parse_qs(urlsplit(target).query, max_num_fields=20).get(TOKEN_KEY, [])
        except ValueError:
            return False
        return len(given) == 1 and self._is_token(given[0])

    def _is_known(self, cookies: Sequence[str]) -> bool:
        pairs = (pair.strip().partition("=") for header in cookies for pair in header.split(";"))
        return any(name == self._cookie_name and self._is_token(value) for name, _, value in pairs)

    def _is_token(self, given: str) -> bool:
        return len(given) <= _LONGEST_TOKEN and hmac.compare_digest(given.encode(), self.token.encode())

    @property
    def _cookie_name(self) -> str:
        # Cookies of one machine are shared by all of its ports.
        return f"voxelfield_{self.port}"

    def headers(self, target: str, host: str) -> dict[str, str]:
        """Returns what to add to the answer to a request that has been admitted.

        A browser keeps the token as a cookie, because viser's client opens its socket without the address's query.
        The policy keeps the page from connecting to other servers, whose messages could run scripts in it, and other
        pages from framing it.

        Args:
            target: The path and query that are requested.
            host: Its ``Host``.
        """
        sources = f"'self' 'unsafe-inline' 'unsafe-eval' data: blob: ws://{host} wss://{host}"
        policy = f"default-src {sources}; frame-ancestors 'self'; form-action 'none'; base-uri 'none'"
        headers = {
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        if self.has_token(target):
            headers["Set-Cookie"] = f"{self._cookie_name}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        return headers


def _same_place(origin: str, host: str) -> bool:
    scheme, separator, place = origin.partition("://")
    return scheme in ("http", "https") and separator != "" and place.lower() == host.lower()


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
