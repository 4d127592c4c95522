"""Who may open the page: its own browsers, and those that have the token of its address."""

from __future__ import annotations

import http.client
from types import SimpleNamespace

import pytest
from viewer_scene import served_page, session

from voxelfield.installed import MissingPackageError
from voxelfield.viewer.address import Address
from voxelfield.viewer.live import LiveField

pytest.importorskip("viser")

LOCAL, OPEN = (Address(host, 8080, token="secret") for host in ("127.0.0.1", "0.0.0.0"))


def refusal(address: Address, path: str = "/", **headers: str | None):
    from websockets.datastructures import Headers

    return address.refusal(path, Headers({name: value for name, value in headers.items() if value is not None}))


def asked(port: int, path: str = "/", **headers: str) -> http.client.HTTPResponse:
    """What a page answers to a request with these headers and no others."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


@pytest.mark.parametrize(
    ("host", "origin", "admitted"),
    [
        ("127.0.0.1:8080", None, True),
        ("127.0.0.1:8080", "http://127.0.0.1:8080", True),
        ("LOCALHOST:9000", "http://localhost:9000", True),  # through a tunnel
        ("[::1]:8080", "http://[::1]:8080", True),
        ("127.0.0.1:8080", "http://evil.example", False),
        ("127.0.0.1:8080", "http://127.0.0.1:8081", False),
        ("127.0.0.1:8080", "http://localhost:8080", False),
        ("127.0.0.1:8080", "null", False),
        ("127.0.0.1:8080", "file://127.0.0.1:8080", False),
        ("evil.example:8080", "http://evil.example:8080", False),  # a name that points here
        ("evil.example:8080", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("192.168.1.7:8080", None, False),
        ("127.0.0.1@evil.example", None, False),
        ("", None, False),
    ],
)
def test_a_local_page_is_for_this_machines_own_pages(host, origin, admitted):
    refused = refusal(LOCAL, Host=host, Origin=origin)
    assert (refused is None) == admitted
    assert refused is None or "\n" not in refused[1]


def test_a_request_has_one_host():
    from websockets.datastructures import Headers

    assert refusal(LOCAL)[0] == 400
    assert LOCAL.refusal("/", Headers([("Host", "127.0.0.1"), ("Host", "127.0.0.1")]))[0] == 400


@pytest.mark.parametrize("address", [LOCAL, OPEN])
@pytest.mark.parametrize(
    ("target", "cookie", "admitted"),
    [
        ("/", "", False),
        ("/?token=secret", "", True),
        ("/?other=1&token=secret", "", True),
        ("/?token=wrong", "", False),
        ("/?token=secret&token=wrong", "", False),
        ("/?token=", "", False),
        ("/?token=\u00e9", "", False),
        ("/?" + "a=1&" * 100, "", False),
        ("/", "voxelfield_8080=secret", True),
        ("/", "theme=dark; voxelfield_8080=secret; a", True),
        ("/", "voxelfield_8081=secret", False),
        ("/", "voxelfield_8080=wrong", False),
    ],
)
def test_other_machines_want_the_token(address, target, cookie, admitted):
    assert (refusal(address, target, Host="box.example:8080", Cookie=cookie) is None) == admitted
    # A page for other machines cannot tell who says that this is 127.0.0.1.
    local = refusal(address, target, Host="127.0.0.1", Cookie=cookie) is None
    assert local == (address is LOCAL or admitted)


def test_foreign_pages_steer_nothing(caplog):
    from viewer_client import Client
    from websockets.exceptions import InvalidStatus

    live = LiveField(session(), connected=lambda: 1)
    with served_page(live=live) as page:
        port, pause = page.address.port, page.training.pause
        for options in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            with pytest.raises(InvalidStatus, match="403"), Client(port, **options):
                pass
            assert asked(port, Host=f"{options.get('host', '127.0.0.1')}:{port}", Origin="http://x").status == 403
        for origin in (None, f"http://127.0.0.1:{port}"):
            paused = live.paused
            with Client(port, origin=origin) as client:
                client.look()
                client.set(pause, True)
                while live.paused == paused:
                    client.receive("GuiUpdateMessage")
    refused = [message for message in caplog.messages if "refused" in message]
    assert len(refused) == 2, "one line for each kind of refusal"


def test_a_page_for_other_machines_is_opened_by_its_address():
    from viewer_client import Client
    from websockets.exceptions import InvalidStatus

    with served_page(host="0.0.0.0") as page:
        address = page.address
        assert address.url == f"http://127.0.0.1:{address.port}/?token={address.token}"
        query, host = address.url.partition("/?")[2], f"127.0.0.1:{address.port}"
        assert asked(address.port, Host=host).status == 403
        opened = asked(address.port, f"/?{query}", Host=host)
        assert opened.status == 200
        cookie = opened.headers["Set-Cookie"].partition(";")[0]
        assert "HttpOnly" in opened.headers["Set-Cookie"]
        assert "SameSite=Strict" in opened.headers["Set-Cookie"]
        with pytest.raises(InvalidStatus, match="403"), Client(address.port):
            pass
        # As viser's client does, which leaves out the query.
        with Client(address.port, additional_headers={"Cookie": cookie}, origin=f"http://{host}") as client:
            client.look()
            client.receive("BackgroundImageMessage")


def test_the_page_may_connect_to_its_own_server_alone():
    with served_page() as page:
        answer = asked(page.address.port, Host="localhost:9")
    policy = answer.headers["Content-Security-Policy"]
    assert "ws://localhost:9 " in policy
    assert "frame-ancestors 'self'" in policy
    assert "Set-Cookie" not in answer.headers


def test_a_page_is_not_served_without_its_checks(monkeypatch):
    import websockets.asyncio.server
    from viser.infra import _infra

    # As if viser started its server by another function.
    server = SimpleNamespace(serve=websockets.asyncio.server.serve, ServerConnection=object)
    replaced = SimpleNamespace(**vars(_infra.websockets) | {"asyncio": SimpleNamespace(server=server)})
    monkeypatch.setattr(_infra, "websockets", replaced)
    with pytest.raises(MissingPackageError, match=r"^viser must be version 1\.1, got"), served_page():
        pass


def test_tokens_differ():
    assert Address().token != Address().token
    assert len(Address().token) >= 20
