"""The servers, their sockets and a client, all in one thread: who may speak, who fits, who goes and comes back."""

import json
import random
import signal
import socket
import time

import pytest

from disaggregation.test_sides import NEW, engine, prompts
from outrider import DecodeClient, SamplingParams
from outrider.cli.terminal.stopping import SignalStop
from outrider.device import ConfigError
from outrider.disaggregation.connections import (
    VERSION,
    ConnectionHub,
    MessageDecoder,
    PeerAddress,
    ProcessRole,
    WireError,
    WireMessage,
)
from outrider.disaggregation.server import DecodeServer, PrefillServer
from outrider.serve.roles import _ended_by_signals
from outrider.transports.link import LocalTransport
from outrider_proof import tiny

ANY = PeerAddress("127.0.0.1", 0)
LIMIT_S = 60
PARAMS = SamplingParams(max_tokens=NEW)


class House:
    """A prefill server, a decode server, a client."""

    def __init__(self, *, prefill="eagle", decode="eagle", secret=b"", client_secret=None):
        self.transport, self.said = LocalTransport(), []
        self._options = {"secret": secret, "say": self.said.append}
        self._engines = {"prefill": prefill, "decode": decode}
        self.prefill = self.start_prefill(ANY)
        self.decode = self.start_decode(ANY)
        self.client = DecodeClient([self.decode.address], secret=secret if client_secret is None else client_secret)
        self.outputs = {}

    def start_prefill(self, address):
        return PrefillServer(engine(self._engines["prefill"], overlap=True), self.transport, listen=address, **self._options)

    def start_decode(self, address):
        made = engine(self._engines["decode"], overlap=True)
        return DecodeServer(made, self.transport, listen=address, prefill=[self.prefill.address], **self._options)

    def run_once(self):
        for server in (self.prefill, self.decode):
            server.run_once(0.0)
        for output in self.client.poll(0.0):
            self.outputs.setdefault(output.request_id, []).append(output)

    def until(self, condition):
        end = time.monotonic() + LIMIT_S
        while not condition():
            self.run_once()
            assert time.monotonic() < end, "it didn't come"

    def ask(self, given):
        return [self.client.submit(prompt, PARAMS)[0] for prompt in given]

    def tokens(self, number):
        return tuple(token for output in self.outputs[number] for token in output.tokens)

    def is_linked(self):
        return self.client.num_servers and self.decode.worker.num_peers and self.prefill.worker.num_peers

    def close(self):
        self.client.close()
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def house():
    made = House(secret=b"0123456789abcdef")
    yield made
    made.close()


def test_requests_go_through_all_three(house):
    house.until(house.is_linked)
    given = prompts(1, 5)
    numbers = house.ask(given)
    house.until(lambda: not house.client.open_requests)
    assert [house.tokens(number) for number in numbers] == [tiny.plain(prompt, NEW) for prompt in given]
    assert house.decode.counts["arrived"] > 0 == house.decode.counts["prefilled_here"]
    assert json.dumps(house.decode.counts)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_server_ends_in_the_middle_and_comes_back(house, side):
    house.until(house.is_linked)
    given = prompts(2, 6)
    numbers = house.ask(given)
    house.until(lambda: house.outputs)
    ended = getattr(house, side)
    ended.close()
    setattr(house, side, getattr(house, f"start_{side}")(ended.address))
    house.until(lambda: not house.client.open_requests)
    assert [house.tokens(number) for number in numbers] == [tiny.plain(prompt, NEW) for prompt in given]
    house.until(house.is_linked)
    (number,) = house.ask(prompts(3, 1))
    house.until(lambda: not house.client.open_requests)
    assert house.tokens(number) == tiny.plain(prompts(3, 1)[0], NEW)


def test_a_client_that_leaves_ends_its_requests(house):
    house.until(house.is_linked)
    house.ask(prompts(4, 4))
    house.until(lambda: house.decode.worker.num_requests == 4)
    house.client.close()
    house.client = DecodeClient([])
    house.until(lambda: not (house.decode.worker.num_requests or house.prefill.worker.num_requests))


def test_engines_that_do_not_fit_say_what_differs():
    house = House(decode="mtp")
    with pytest.raises(ConfigError, match=r"doesn't fit this one's: .*proposer: eagle there, mtp here"):
        house.until(lambda: False)
    house.close()


def test_who_does_not_know_the_secret_is_not_heard():
    house = House(secret=b"0123456789abcdef", client_secret=b"another secret...")
    house.until(lambda: house.decode.worker.num_peers)
    for _ in range(50):
        house.run_once()
    assert not house.client.num_servers
    house.close()


def test_an_address_for_all_needs_a_secret():
    with pytest.raises(ConfigError, match="--api-key-file"):
        ConnectionHub(ProcessRole.PREFILL, listen=PeerAddress("0.0.0.0", 0))


@pytest.mark.parametrize("seed", range(6))
def test_what_is_no_message_ends_the_connection_and_nothing_else(house, seed):
    rng = random.Random(seed)
    frame = WireMessage("hello", {"version": VERSION, "role": "client", "nonce": "00" * 32}).encode()
    broken = [
        rng.randbytes(200),
        frame[:20] + rng.randbytes(30) + frame[50:],
        b"ORPD" + b"\xff" * 12,
        WireMessage("submit", {"id": 1}).encode(),
        WireMessage("hello", {"version": 99}).encode(),
        frame + WireMessage("proof", {"proof": [1]}).encode(),
    ][seed]
    house.until(house.is_linked)
    for server in (house.prefill, house.decode):
        with socket.create_connection((server.address.host, server.address.port)) as sock:
            sock.sendall(broken)
            sock.setblocking(False)

            def closed(sock=sock):
                try:
                    return sock.recv(1 << 16) == b""
                except BlockingIOError:
                    return False
                except ConnectionError:
                    return True

            house.until(closed)
    (number,) = house.ask(prompts(5, 1))
    house.until(lambda: not house.client.open_requests)
    assert house.tokens(number) == tiny.plain(prompts(5, 1)[0], NEW)


@pytest.mark.parametrize(
    "message",
    [
        WireMessage("submit", {"id": 1}),
        WireMessage("submit", {"id": 1, "state": {"prompt": [1.5]}}),
        WireMessage("submit", {"id": 1, "state": {}}),
        WireMessage("abort", {}),
        WireMessage("abort", {"id": "x"}),
        WireMessage("ready", {"ticket": 1}),
        WireMessage("submit", {"id": 1, "state": None}, (b"x",)),
    ],
)
def test_a_client_that_speaks_nonsense_is_dropped_alone(house, message):
    house.until(house.is_linked)
    other = DecodeClient([house.decode.address], secret=b"0123456789abcdef")
    house.until(lambda: other.poll(0.0) or other.num_servers)
    (peer,) = other._samples_of_peer
    other._hub._reconnect_at.clear()
    other._hub.send(peer, message)
    house.until(lambda: other.poll(0.0) or not other.num_servers)
    other.close()
    assert house.client.num_servers == 1


def test_frames_in_any_pieces():
    sent = [
        WireMessage("a", {"x": [1, 2]}, (b"", b"123")),
        WireMessage("b", {}, ()),
        WireMessage("c", {"y": "ü"}, (b"\0" * 999,)),
    ]
    whole = b"".join(message.encode() for message in sent)
    for size in (1, 7, 100, len(whole)):
        decoder, got = MessageDecoder(1 << 16), []
        for start in range(0, len(whole), size):
            got.extend(decoder.feed(whole[start : start + size]))
        assert got == sent
    with pytest.raises(WireError, match="too long"):
        list(MessageDecoder(100).feed(whole))


def test_a_signal_that_a_server_takes_ends_no_process_while_requests_run():
    """The command's own watch ends a process whose Python doesn't get to handle a signal within seconds."""
    stop, ended = SignalStop(), []
    # The state of a background job of a shell without job control.
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, stop.handle)
    try:
        with _ended_by_signals(lambda: ended.append(True)):
            began = time.monotonic()
            signal.raise_signal(signal.SIGINT)
            assert ended == []
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == stop.handle
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == [True]
    assert stop.signal is None
    assert stop.handled_at >= began
