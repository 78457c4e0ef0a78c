"""One server over the bundled model with speculation, for all tests of the API."""

import functools
import time
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from outrider import Engine, EngineConfig
from outrider.model import Tokenizer, load_decoder, load_eagle, open_head
from outrider.speculative.eagle import EagleProposer
from outrider_cpu.backend import CpuBackend

MISSING = [
    name for name in ("fastapi", "uvicorn", "prometheus_client", "openai", "anthropic", "httpx") if find_spec(name) is None
]
if MISSING:
    collect_ignore_glob = ["test_*.py"]

BUNDLED = Path(str(files("outrider"))) / "bundled"
TEMPLATE = (
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('no such talk') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


def pytest_report_header():
    return f"tests/serve: not run, {', '.join(MISSING)} not installed" if MISSING else None


@functools.cache
def weights():
    """The bundled model on cpu in float32, and its EAGLE head."""
    backend = CpuBackend()
    target = load_decoder(BUNDLED / "target", backend=backend, dtype=torch.float32)
    return backend, target, load_eagle(open_head(BUNDLED / "eagle", target=target, backend=backend, dtype=torch.float32))


def bundled_engine(**config):
    """An engine over them."""
    backend, target, head = weights()
    given = {"max_requests": 4, "max_context": 256, "page_size": 16, "dtype": "float32", **config}
    tokenizer = Tokenizer.from_checkpoint(BUNDLED / "target")
    proposer = EagleProposer(head, draft_tokens=4)
    return Engine(target, backend, proposer=proposer, config=EngineConfig(**given), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def bundled_target():
    return BUNDLED / "target"


@pytest.fixture(scope="session")
def server(bundled_target):
    """With a chat template, and vLLM's names of metrics."""
    from serve.running import running

    engine = bundled_engine()
    with running(engine, bundled_target, chat_template=TEMPLATE, max_queued=60) as found:
        yield found


@pytest.fixture
def slow_steps(server, monkeypatch):
    """Each iteration takes at least 20 ms: on a fast machine too, a long request outlives what its test does meanwhile."""
    step = server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: time.sleep(0.02) or step())


@pytest.fixture(scope="session")
def reference():
    """The same model without a server, by an engine of its own."""
    return bundled_engine()


@pytest.fixture
def client(server):
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture
def http(server):
    import httpx

    # Reading certificates takes longer than most tests, and the server speaks plain HTTP.
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as found:
        yield found
