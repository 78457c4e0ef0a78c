"""Limits of headers: size, count and time, before the API key is read."""

import json
import socket
import struct
import time

import pytest

from outrider.serve.http.server import LimitedHttpProtocol
from serve.test_api import ASKED, everything_is_back, metrics

MIB = 1 << 20


@pytest.fixture
def connection(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as found:
        yield found


def answered(connection):
    """The status and the body of what the server says before it closes the connection."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("line", [b"x-a: " + b"a" * 65531, b"x-a: a\r\n" * 8192], ids=["one header", "many headers"])
def test_unfinished_headers_are_limited(connection, line):
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n")
    sent = 0
    try:
        while sent < 48 * MIB:
            sent += connection.send(line)
    except OSError:
        pass
    assert sent < 8 * MIB  # what the sockets of both sides hold


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /v1/models HTTP/1.1\r\n" + b"x: y\r\n" * 257 + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 65_000 + b"\r\nx: " + b"y" * 600 + b"\r\n\r\n",
        b"GET /v1/models?" + b"y" * 66_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 257 + b"\r\n",
    ],
    ids=["count", "size", "path", "trailers"],
)
def test_headers_are_limited(connection, request_head):
    connection.sendall(request_head)
    assert answered(connection) == (431, "headers_too_large")


@pytest.mark.parametrize("start", [b"", b"GET /v1/models HTTP/1.1\r\nhost", b"\r\n"], ids=["nothing", "half", "empty line"])
def test_headers_must_arrive_in_time(server, monkeypatch, start):
    monkeypatch.setattr(LimitedHttpProtocol, "header_timeout_s", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(start)
        assert answered(connection) == (408, "header_timeout")


def test_a_second_request_of_a_connection_has_the_limits_too(connection, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "header_timeout_s", 0.2)
    connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.sendall(b"GET /version HTT")
    assert answered(connection) == (408, "header_timeout")


@pytest.mark.usefixtures("slow_steps")
def test_a_stray_byte_does_not_end_a_stream(server, monkeypatch):
    body = json.dumps({**ASKED, "max_tokens": 40, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head % len(body) + body)
        received = connection.recv(65536)
        monkeypatch.setattr(LimitedHttpProtocol, "header_timeout_s", 0.01)
        connection.sendall(b"\r\n")
        while b"[DONE]" not in received:
            piece = connection.recv(65536)
            assert piece
            received += piece


def test_a_body_without_a_route_is_not_read(server, http):
    answer = http.post("/health", content=b"x" * (33 * MIB))
    assert answer.status_code == 405


def test_what_is_no_http_is_an_error_of_openais_form(connection):
    connection.sendall(b"nonsense\r\n\r\n")
    assert answered(connection) == (400, "invalid_http")


@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_goes_away_after_a_pipelined_request_ends_the_running_one(server, http, connection):
    """The reset is seen when the stream is written: reading waits for the end of the running request."""
    body = json.dumps({**ASKED, "stream": True, "max_tokens": 200, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    aborted = metrics(http)['outrider_aborted_total{model_name="m"}']
    connection.sendall((head + body) * 2)
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert everything_is_back(server)
    assert metrics(http)['outrider_aborted_total{model_name="m"}'] == aborted + 1


@pytest.mark.usefixtures("slow_steps")
def test_a_refusal_after_a_pipelined_request_is_not_written_into_the_running_stream(connection):
    body = json.dumps({**ASKED, "stream": True, "max_tokens": 40, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    connection.sendall(head + body)
    received = connection.recv(65536)
    connection.sendall(head + body + b"nonsense\r\n\r\n")
    while piece := connection.recv(65536):
        received += piece
    assert received.count(b"HTTP/1.1 ") == 1


def test_a_client_of_http_1_0_gets_a_stream_up_to_the_end_of_the_connection(connection):
    body = json.dumps({**ASKED, "stream": True, "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection.sendall(head + body)
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, text = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert text.startswith(b"data: {")
    assert text.endswith(b"data: [DONE]\n\n")
    assert all(json.loads(event[6:]) for event in text.split(b"\n\n")[:-2])


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n", "request_too_large"),
        (b"POST /v1/completions HTTP/1.0\r\ncontent-length: 99999999\r\n\r\n", "request_too_large"),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5f5e100\r\n", "request_too_large"),
        (b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", "headers_too_large"),
    ],
    ids=["length", "HTTP/1.0", "chunks", "headers"],
)
def test_a_client_that_sends_on_after_a_refusal_gets_the_refusal(connection, head, code):
    connection.sendall(head)
    for _ in range(10 if code == "headers_too_large" else 600):
        connection.sendall(b"," * 65536)
    assert answered(connection)[1] == code


def test_a_refused_client_cannot_send_forever(connection, monkeypatch):
    monkeypatch.setattr(LimitedHttpProtocol, "linger_s", 0.2)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n")
    assert answered(connection) == (413, "request_too_large")
    time.sleep(1)
    with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
        connection.sendall(b"x" * 50 * MIB)


def test_a_refused_client_does_not_delay_the_end(server, monkeypatch):
    made, protocols = LimitedHttpProtocol.connection_made, []
    monkeypatch.setattr(LimitedHttpProtocol, "connection_made", lambda self, at: protocols.append(self) or made(self, at))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n")
        assert answered(connection) == (400, "invalid_http")
        assert not server.call(lambda _: protocols[0].transport.is_closing())
        server.call(lambda _: protocols[0].shutdown())
        assert server.call(lambda _: protocols[0].transport.is_closing())


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"foo/1"])
@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("cut", [0, 30, 200, -1], ids=["whole", "in the headers", "in the body", "before the last byte"])
def test_a_request_for_another_protocol_is_answered_in_http_1_1(connection, protocol, framing, cut):
    body = json.dumps({**ASKED, "max_tokens": 3}).encode()
    framed = (b"content-length: %d\r\n\r\n" % len(body)) + body
    if framing == "chunks":
        framed = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMAAABk\r\nupgrade: %s\r\n" % protocol
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head + upgrade + framed
    for piece in (request[:cut], request[cut:]):
        connection.sendall(piece)
        time.sleep(0.01)
    connection.sendall(head + b"connection: close\r\n" + framed)
    received = b""
    while piece := connection.recv(65536):
        received += piece
    assert received.count(b"HTTP/1.1 200 ") == 2
    assert received.count(b'"completion_tokens": 3') == 2


def test_a_tunnel_is_refused(connection):
    connection.sendall(b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n")
    assert answered(connection) == (400, "invalid_http")
