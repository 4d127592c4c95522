"""Who may open the page: its own browsers, and those that have the token of its address."""

from __future__ import annotations

import http.client
from types import SimpleNamespace

import pytest
from chromium import eventually
from free_ports import free_port
from viewer_scene import served_page

from voxelfield.installed import MissingPackageError
from voxelfield.viewer.address import Address

pytest.importorskip("viser")

from voxelfield.viewer.server import start_server

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

    with served_page() as page:
        port, rate = page.address.port, page.view.rate
        assert caplog.messages == [], "the checks at the start are not logged"
        for options in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            with pytest.raises(InvalidStatus, match="403"), Client(port, **options):
                pass
            assert asked(port, Host=f"{options.get('host', '127.0.0.1')}:{port}", Origin="http://x").status == 403
        for value, origin in enumerate((None, f"http://127.0.0.1:{port}"), 20):
            with Client(port, origin=origin) as client:
                client.look()
                client.set(rate, value)
                eventually(lambda value=value: rate.value == value, "the rate")
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


def refused_for(what: str) -> None:
    """Fails unless a page is refused because of one check, and its port is free again."""
    message = rf'^viser must be a version of which voxelfield can check {what}, got \S+: pip install "viser==[0-9.]+"$'
    address = Address(port=free_port())
    with pytest.raises(MissingPackageError, match=message):
        start_server(address, "")
    address.check()


def test_a_viser_that_serves_by_another_function_is_refused(monkeypatch):
    import websockets.asyncio.server
    from viser.infra import _infra

    other = SimpleNamespace(serve=websockets.asyncio.server.serve, ServerConnection=object)
    replaced = SimpleNamespace(**vars(_infra.websockets) | {"asyncio": SimpleNamespace(server=other)})
    monkeypatch.setattr(_infra, "websockets", replaced)
    refused_for("requests")


@pytest.mark.parametrize(("option", "what"), [("process_request", "requests"), ("create_connection", "messages")])
def test_a_viser_that_loses_an_option_of_the_server_is_refused(monkeypatch, option, what):
    """As if websockets had no such option any more, or viser replaced it: it admits requests, or makes connections."""
    import websockets.asyncio.server

    original = websockets.asyncio.server.serve

    def serve(*arguments, **options):
        return original(*arguments, **{name: value for name, value in options.items() if name != option})

    monkeypatch.setattr(websockets.asyncio.server, "serve", serve)
    monkeypatch.setattr("voxelfield.viewer.server._PROBE_SECONDS", 0.5)
    refused_for(what)


def test_a_viser_that_reads_messages_in_another_way_is_refused(monkeypatch):
    from viser.infra import _infra

    async def consume(connection, *_):
        while True:
            await connection.recv_messages.get()

    monkeypatch.setattr(_infra, "_message_consumer", consume)
    monkeypatch.setattr("voxelfield.viewer.server._PROBE_SECONDS", 0.5)
    refused_for("messages")


def without_table(self, name):
    if name == "_gui_input_handle_from_uuid":
        raise AttributeError(name)
    return object.__getattribute__(self, name)


def test_a_viser_without_its_table_of_controls_is_refused(monkeypatch):
    from viser._gui_api import GuiApi

    # As if the table of this name had no controls, or did not exist.
    monkeypatch.setattr(GuiApi, "add_checkbox", lambda *_: SimpleNamespace(remove=list))
    refused_for("controls")
    monkeypatch.setattr(GuiApi, "__getattribute__", without_table)
    refused_for("controls")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "localhost"])
def test_every_address_passes_the_checks_at_the_start(host):
    start_server(Address(host, free_port()), "").stop()


def test_tokens_differ():
    assert Address().token != Address().token
    assert len(Address().token) >= 20
