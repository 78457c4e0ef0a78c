"""The bundled model on the reference backend, loaded once, and plain greedy decoding as the oracle."""

import json
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from outrider import Engine, SamplingParams
from outrider.engine import prefill
from outrider.model import load_decoder, load_eagle, open_head
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider.speculative.tree import DynamicTree
from outrider_cpu.backend import CpuBackend
from outrider_proof import proposers, tiny
from outrider_proof.tiny import plain_config

BUNDLED = Path(str(files("outrider"))) / "bundled"
PROMPTS = Path(__file__).parents[1] / "data" / "heldout_prompts.json"


class Bundle:
    """A backend with the bundled target and head loaded in one dtype; makes engines."""

    def __init__(self, backend, dtype):
        self.backend, self.dtype = backend, dtype
        torch_dtype = getattr(torch, dtype)
        self.target = load_decoder(BUNDLED / "target", backend=backend, dtype=torch_dtype)
        self.head = load_eagle(open_head(BUNDLED / "eagle", target=self.target, backend=backend, dtype=torch_dtype))
        self._plain = {}

    def engine(self, *, speculate="eagle", **config):
        config = plain_config(dtype=self.dtype, **config)
        if speculate == "tree":
            proposer = EagleTreeProposer(self.head, DynamicTree(topk=2, depth=config.draft_tokens))
        else:
            proposer = (
                EagleProposer(self.head, draft_tokens=config.draft_tokens)
                if speculate == "eagle"
                else NonSpeculativeProposer()
            )
        return Engine(self.target, self.backend, proposer=proposer, config=config)

    def plain(self, prompt, max_tokens):
        """What plain greedy decoding gives, alone in an engine of its own."""
        key = (tuple(prompt), max_tokens)
        if key not in self._plain:
            engine = self.engine(speculate="none", max_requests=1, max_context=len(prompt) + max_tokens)
            (self._plain[key],) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))
        return self._plain[key]


class Tiny(Bundle):
    """The same over a tiny target and its head, in float64: for what doesn't depend on which model it is.

    No token ends a request, so that it has the length that it asks for.
    """

    def __init__(self, backend=tiny.BACKEND):
        self.backend, self.dtype = backend, "float64"
        loading = backend.create_stream("load")
        with backend.on(loading):
            self.target = proposers.decoder(tiny.decoder(eos_token_ids=()), backend)
            self.head = proposers.head_for(tiny.eagle_head(), self.target)
        loading.synchronize()
        self._plain = {}


@contextmanager
def replayed_prefill(tokens):
    """Let engines that are built in this scope replay chunks of prompts of up to ``tokens`` tokens, also on the host."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefill, "max_graph_tokens", lambda _: tokens)
        yield


@pytest.fixture(scope="session")
def tiny64():
    return Tiny()


@pytest.fixture(scope="session")
def tiny_tokens(prompt_tokens):
    """The held-out prompts in the tiny models' vocabulary."""
    return [[token % tiny.VOCABULARY for token in tokens] for tokens in prompt_tokens]


@pytest.fixture(scope="session")
def bundled_dir():
    return BUNDLED


@pytest.fixture(scope="session")
def bundle64():
    """In float64, where rounding doesn't decide between tokens."""
    return Bundle(CpuBackend(), "float64")


@pytest.fixture(scope="session")
def bundle32():
    return Bundle(CpuBackend(), "float32")


@pytest.fixture(scope="session")
def prompts():
    """Held-out prompts as text."""
    return [entry["text"] for entry in json.loads(PROMPTS.read_text())["prompts"]]


@pytest.fixture(scope="session")
def prompt_tokens(prompts):
    from outrider.model import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(BUNDLED / "target")
    return [tokenizer.encode(text) for text in prompts]


@pytest.fixture(autouse=True)
def accounted(monkeypatch):
    """After every test: an engine without requests holds no page and no row, and one with some holds theirs alone."""
    made = []
    init = Engine.__init__

    def noted(self, *arguments, **named):
        init(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", noted)
    yield
    for engine in made:
        if engine._failure_recovery.stopped is not None:
            continue
        engine.adopt()  # some were used by a thread that is over
        engine.drain()
        running = engine._scheduler.running
        held = {page for request in running for page in request.pages}
        assert engine.free_rows == engine.config.max_requests - len(running)
        assert engine.free_pages == engine._scheduler.pages.count - 1 - len(held)
        assert all(not request.finished for request in running), "a request that is over holds a row"
