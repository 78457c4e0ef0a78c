"""Ranks and servers on two hosts that two network namespaces emulate; only their own two addresses join them."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from namespaces import INTERFACE, two_hosts
from torchrun import PROMPT, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.needs_namespaces]

MODEL = ["--backend", "cpu", "--dtype", "float32"]
GENERATE = ["generate", "--prompt", PROMPT, "--max-tokens", "16", *MODEL]
CLIENT = """
import json, sys
from pathlib import Path
from outrider import DecodeClient, SamplingParams
from outrider.disaggregation.connections import PeerAddress

address, secret, *prompt = sys.argv[1:]
client = DecodeClient([PeerAddress.parse(address)], secret=Path(secret).read_bytes(), patience_s=300)
tokens = []
while not any(status.get("prefill_peers") for status in client.status()):
    client.poll(0.1)
client.submit([int(each) for each in prompt], SamplingParams(max_tokens=16))
while client.open_requests:
    for output in client.poll(0.1):
        tokens += output.tokens
print(json.dumps([tokens, client.status()[0]["counts"]]))
"""


@pytest.fixture
def hosts():
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def alone():
    command = [sys.executable, "-m", "outrider.cli.main", *GENERATE, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["token_ids"]


def test_a_host_reaches_the_other_one_and_nothing_else(hosts):
    """Each namespace has its own loopback, so that an address that works is one of the two."""
    listen = "import socket; s = socket.create_server((%r, 4711)); print(flush=True); s.accept()"
    first, second = hosts
    for address, reached in (("127.0.0.1", False), (first.address, True)):
        server = subprocess.Popen(first.command(sys.executable, "-c", listen % address), stdout=subprocess.PIPE)
        try:
            assert server.stdout.readline() == b"\n"
            connect = f"import socket; socket.create_connection(({address!r}, 4711), 10)"
            tried = subprocess.run(second.command(sys.executable, "-c", connect), capture_output=True, text=True)
            assert (tried.returncode == 0) is reached, tried.stderr
        finally:
            server.kill()
            server.wait()
            server.stdout.close()


@pytest.mark.parametrize("layout", [("--tensor-parallel", "2"), ("--data-parallel", "2")], ids=["tensor", "data"])
def test_ranks_of_two_hosts_give_the_tokens_of_one_process(tmp_path, hosts, alone, layout):
    with torchrun(tmp_path, 2, 1, *GENERATE, *layout, "--json", emulated=hosts) as agents:
        assert agents.wait() == [0, 0], agents.text(agents.errors)
        assert json.loads(agents.text(agents.said))["token_ids"] == alone


@contextmanager
def serving(host, directory, role, port, *options):
    """A prefill or decode server on a host."""
    command = [sys.executable, "-m", "outrider.cli.main", "serve", "--role", role, "--host", host.address]
    command += ["--port", str(port), "--api-key-file", str(directory / "secret"), *options, *MODEL]
    with (directory / role).open("w") as said:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(host.command(*command), stdout=said, stderr=said, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "transport", ["torch", pytest.param(f"nixl:devices={INTERFACE}", marks=pytest.mark.needs_nixl)], ids=["torch", "nixl"]
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_pages_go_from_host_to_host(tmp_path, hosts, alone, transport, tensor):
    """Prefill on one host, decode on one or two ranks of the other one, and a client on the first."""
    from outrider.bundled import bundled
    from outrider.model import Tokenizer

    (tmp_path / "secret").write_text("0123456789abcdef")
    first, second = hosts
    prompt = map(str, Tokenizer.from_checkpoint(bundled("target")).encode(PROMPT))
    peer = ["--prefill-server", f"{first.address}:9500", "--tensor-parallel", str(tensor)]
    with (
        serving(first, tmp_path, "prefill", 9500, "--transport", transport),
        serving(second, tmp_path, "decode", 9600, "--transport", transport, *peer) as decode,
    ):
        client = [sys.executable, "-c", CLIENT, f"{second.address}:9600", str(tmp_path / "secret"), *prompt]
        asked = subprocess.run(first.command(*client), capture_output=True, text=True, timeout=300)
        said = (tmp_path / "decode").read_text() + (tmp_path / "prefill").read_text()
        assert asked.returncode == 0, asked.stderr + said
        tokens, counts = json.loads(asked.stdout)
        assert tokens == alone, said
        assert (counts["arrived"], counts["prefilled_here"]) == (1, 0), said
        assert decode.poll() is None
