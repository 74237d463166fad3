"""What is refused before a route sees it: names, origins, tokens, sizes and slow clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_server import COMMAND, Raw, Server, environment, serving, until

BODY = '{"code": "6 * 7"}'


def ask(server: Server, **headers: str) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/run", json={"code": "6 * 7"}, headers=headers)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:80", "localhost", "LOCALHOST:1234", "localhost.", "a.localhost:1",
        "[::1]", "[::1]:8765", "192.0.2.7:80",
    ],
)  # fmt: skip
def test_a_host_that_no_page_can_own_is_accepted(server: Server, host: str) -> None:
    assert ask(server, Host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example",
        "127.0.0.1:8765@evil.example", "localhost:80:80", "[::1", "[::1]x", "", "a b", "0x7f.1",
        "127.1", "localhost:port", "evil.example\\localhost",
    ],
)  # fmt: skip
def test_a_host_that_is_not_ours_is_misdirected(server: Server, host: str) -> None:
    answer = ask(server, Host=host)
    assert answer.status_code == 421
    assert answer.json()["code"] == "host_refused"


def test_a_request_needs_exactly_one_host(server: Server) -> None:
    for hosts in ("", "Host: localhost\r\nHost: localhost\r\n"):
        with Raw(server) as raw:
            raw.send(f"GET /healthz HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n")
            assert raw.read()[9:12] in (b"400", b"421")


def test_the_host_is_checked_where_no_token_is_needed(server: Server) -> None:
    for path in ("/healthz", "/docs", "/openapi.json", "/"):
        assert httpx.get(server.url + path).status_code == 200
        assert httpx.get(server.url + path, headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:1", "file://", "https://[", "", "127.0.0.1"],
)
def test_a_page_of_another_origin_is_refused(server: Server, origin: str) -> None:
    answer = ask(server, Origin=origin)
    assert answer.status_code == 403
    assert answer.json()["code"] == "origin_refused"


def test_a_page_of_the_server_itself_is_accepted(server: Server) -> None:
    assert ask(server, Origin=server.url).status_code == 200


def test_the_operator_can_name_hosts_and_origins(tmp_path: Path) -> None:
    words = ("--allow-host", "Jar.example", "--allow-origin", "https://tools.example")
    with serving(tmp_path, *words) as server:
        assert ask(server, Host="jar.example:443").status_code == 200
        assert ask(server, Host="evil.example").status_code == 421
        assert ask(server, Origin="https://tools.example").status_code == 200
        assert ask(server, Origin="https://tools.example.evil.example").status_code == 403


@pytest.mark.parametrize("path", ["/v1/run", "/v1/backends", "/metrics", "/nothing", "/docs/x"])
def test_every_other_path_needs_the_token(server: Server, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="belljar"'
    with server.client() as client:
        assert client.get(path).status_code in (200, 404, 405)


@pytest.mark.parametrize(
    "header", ["Bearer", "bearer x", "Basic eDp5", "Token x", "x", "Bearer \xff"]
)
def test_what_is_no_token_is_401(server: Server, header: str) -> None:
    headers = {"Authorization": header.encode("latin-1")}
    answer = httpx.get(f"{server.url}/metrics", headers=headers)
    assert answer.status_code == 401


def test_two_authorizations_are_none(server: Server) -> None:
    with Raw(server) as raw:
        twice = f"Authorization: Bearer {server.token}\r\n" * 2
        raw.send(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{twice}Connection: close\r\n\r\n")
        assert b" 401 " in raw.read().partition(b"\r\n")[0]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ("--max-body", "10K", "--header-time", "700ms", "--body-time", "700ms")
    more = ("--connections", "20")
    with serving(tmp_path_factory.mktemp("narrow"), *words, *more) as server:
        yield server


def test_a_body_that_is_announced_as_too_large_is_413_before_it_is_read(narrow: Server) -> None:
    for length in ("10241", "9" * 30):
        with Raw(narrow) as raw:
            raw.send(raw.head(Content_Length=length))
            answer = raw.read()
        assert b" 413 " in answer.partition(b"\r\n")[0] or b" 400 " in answer.partition(b"\r\n")[0]


def test_a_body_that_turns_out_too_large_is_413(narrow: Server) -> None:
    with Raw(narrow) as raw:
        raw.send(raw.head(Transfer_Encoding="chunked"))
        raw.send(f"{10241:x}\r\n".encode() + b"x" * 10241 + b"\r\n")
        assert b" 413 " in raw.read().partition(b"\r\n")[0]


def test_a_body_at_the_limit_is_read(narrow: Server) -> None:
    code = "#" + "x" * (10240 - len('{"code": ""}') - 1)
    with Raw(narrow) as raw:
        raw.post(code, Connection="close")
        assert b" 200 " in raw.read().partition(b"\r\n")[0]


def test_a_slow_head_is_cut_off(narrow: Server) -> None:
    with Raw(narrow) as raw:
        raw.send("POST /v1/run HTTP/1.1\r\nHost: loc")
        assert raw.read() == b""


def test_an_idle_connection_is_cut_off(narrow: Server) -> None:
    with Raw(narrow) as raw:
        assert raw.read() == b""


def test_a_slow_head_of_a_later_request_is_cut_off(narrow: Server) -> None:
    with Raw(narrow) as raw:
        raw.post("6 * 7")
        raw.read_until(b'"warnings"')
        raw.send("POST")
        began = time.monotonic()
        raw.read()
        assert time.monotonic() - began < 60


def test_a_slow_body_is_408(narrow: Server) -> None:
    with Raw(narrow) as raw:
        raw.send(raw.head(Content_Length="100") + "{")
        assert b" 408 " in raw.read().partition(b"\r\n")[0]


def test_empty_lines_do_not_keep_an_idle_connection(narrow: Server) -> None:
    """No token is needed for this request, so none would be to hold every connection."""
    with Raw(narrow) as raw:
        raw.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw.read_until(b"ok")
        raw.send("\r\n")
        assert raw.read() == b""


@pytest.mark.parametrize("path", ["/healthz", "/v1/backends", "/nothing"])
def test_a_body_that_no_route_reads_ends_too(narrow: Server, path: str) -> None:
    with Raw(narrow) as raw:
        raw.send(raw.head(path=path, Transfer_Encoding="chunked") + "1\r\nx\r\n")
        answer = raw.read()  # until the server closes the connection
    assert answer.startswith(b"HTTP/1.1 40")


BODY_IN_CHUNKS = "11\r\n" + '{"code": "6 * 7"}' + "\r\n0\r\n"


@pytest.mark.parametrize("before", [BODY_IN_CHUNKS + "X: ", BODY_IN_CHUNKS, "1;"])
def test_trailers_and_extensions_of_chunks_without_end_are_cut_off(
    server: Server, before: str
) -> None:
    piece = ("x" * 9000 if before != BODY_IN_CHUNKS else f"X: {'x' * 90}\r\n" * 90).encode()
    with Raw(server) as raw:
        raw.send(raw.head(Transfer_Encoding="chunked") + before)
        with pytest.raises(OSError):
            for _ in range(10_000):  # 90 megabytes
                raw.send(piece)


def test_a_trailer_is_allowed_and_is_no_header(server: Server) -> None:
    with Raw(server) as raw:
        raw.send(raw.head(Transfer_Encoding="chunked", Connection="close"))
        raw.send(BODY_IN_CHUNKS + "Accept: text/event-stream\r\nHost: evil.example\r\n\r\n")
        answer = raw.read()
    assert answer.startswith(b"HTTP/1.1 200") and b"application/json" in answer


def test_a_request_to_upgrade_is_told_what_to_send_instead(server: Server) -> None:
    """Java's HttpClient sends these headers unless it is told not to."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMA"}
    with server.client() as client:
        answer = client.post("/v1/run", json={"code": "6 * 7"}, headers=upgrade)
        assert (answer.status_code, answer.json()["code"]) == (400, "upgrade_unsupported")
        assert "HTTP_1_1" in answer.json()["fix"]
        assert client.get("/v1/backends", headers=upgrade).status_code == 200


def test_a_large_head_is_431(narrow: Server) -> None:
    with Raw(narrow) as raw:
        raw.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        answer = b""
        try:
            for number in range(1000):
                raw.send(f"X-{number}: {'x' * 1000}\r\n")
            answer = raw.read()
        except OSError:  # closed while we wrote
            answer = b"HTTP/1.1 431"
        assert b"431" in answer[:20]


def test_more_connections_than_allowed_are_told_to_come_back(narrow: Server) -> None:
    held = [Raw(narrow) for _ in range(20)]
    try:
        for raw in held:
            raw.send("GET /healthz HTTP/1.1\r\n")
        answers = []
        for _ in range(3):
            with Raw(narrow) as late:
                answers.append(late.read())
    finally:
        for raw in held:
            raw.close()
    assert any(b" 503 " in answer and b"retry-after: 1" in answer for answer in answers)
    until(lambda: httpx.get(f"{narrow.url}/healthz").status_code == 200)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_of_another_kind_is_415(server: Server, kind: str) -> None:
    with server.client() as client:
        answer = client.post("/v1/run", content=BODY, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["code"]) == (415, "media_type_unsupported")
        packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert client.post("/v1/run", content=BODY, headers=packed).status_code == 415
        plain = {"Content-Type": "application/json; charset=utf-8"}
        assert client.post("/v1/run", content=BODY, headers=plain).status_code == 200


def test_what_the_router_refuses_is_problem_json(server: Server) -> None:
    with server.client() as client:
        for answer, status in (
            (client.get("/nothing"), 404),
            (client.get("/v1/run"), 405),
            (client.put("/metrics"), 405),
        ):
            assert answer.status_code == status
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json()["status"] == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "belljar.example"])
def test_an_address_that_others_reach_needs_a_flag(tmp_path: Path, host: str) -> None:
    import subprocess

    done = subprocess.run(
        [*COMMAND, "serve", "--port", "0", "--host", host],
        capture_output=True, text=True, timeout=60, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 125
    assert "--expose" in done.stderr
    assert list(tmp_path.iterdir()) == [], "no token is made for a server that does not start"


def test_an_exposed_server_warns_and_still_checks_names(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0", "--expose") as server:
        until(lambda: "unencrypted" in server.log.read_text())
        local = f"http://127.0.0.1:{server.port}/healthz"
        assert httpx.get(local).status_code == 200
        assert httpx.get(local, headers={"Host": "evil.example"}).status_code == 421
