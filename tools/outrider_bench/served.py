"""Servers to be measured, over random weights: this one, vLLM's, and the engine without a server."""

from __future__ import annotations

import functools
import json
import socket
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import urlopen

from outrider.registry.children import started
from outrider_bench.child import ChildFailed
from outrider_bench.environment import with_variables
from outrider_bench.http_load import HttpLoad, Streamed
from outrider_bench.random_model import RandomModel

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

MODEL = "measured"
_SPELLED = 5  # characters of a token


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The same for all: weights, how they decode, and what runs at a time."""

    shape: str
    speculate: str
    draft_tokens: int
    accept_length: float | None
    dtype: str | None
    backend: str | None
    max_requests: int
    max_context: int

    def engine(self) -> Engine:
        """An engine of this project, with all of it."""
        from outrider.cli.models import Running

        weights = RandomModel(
            shape=self.shape,
            speculate=self.speculate,
            draft_tokens=self.draft_tokens,
            accept_length=self.accept_length,
        )
        return weights.load(
            self.backend,
            running=Running(),
            max_requests=self.max_requests,
            dtype=self.dtype,
            max_context=self.max_context,
            cached_tokens=self.max_requests * self.max_context,
        )


def make_engine(given: Mapping[str, Any]) -> Engine:
    """The engine of a setup, as a child process gets it."""
    return Setup(**given).engine()


def run_bare(engine: Engine, load: HttpLoad) -> list[Streamed]:
    """The same load on an engine without a server, in its own thread."""
    from outrider.engine.requests.sampling import SamplingParams

    params = SamplingParams(max_tokens=load.new_tokens, ignore_eos=True)
    answers: list[Streamed] = []
    open_: dict[int, tuple[int, int, float, list[float], list[int]]] = {}

    def ask(client: int, round_: int) -> None:
        began = time.time()
        prompt = load.prompt(client, round_, min(400, engine.model.config.vocab_size))
        open_[engine.add_request(prompt, params)] = (client, round_, began, [], [])

    for client in range(load.clients):
        ask(client, 0)
    while open_:
        outputs = engine.step()
        now = time.time()
        for output in outputs:
            client, round_, began, times, counts = open_[output.request_id]
            if output.tokens:
                times.append(now)
                counts.append(len(output.tokens))
            if output.finish_reason is not None:
                del open_[output.request_id]
                answers.append(Streamed(began=began, times=tuple(times), tokens=tuple(counts)))
                if round_ + 1 < load.rounds:
                    ask(client, round_ + 1)
    return answers


# -- servers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A server that runs: its URL, and the directory of its tokenizer."""

    url: str
    tokenizer: Path


@contextmanager
def served(engine: str, setup: Setup, *, directory: Path, limit_s: float) -> Generator[Served]:
    """A server of ``engine`` in a process of its own, as long as the scope lasts. What it says goes to a file in
    ``directory``. Raises :class:`ChildFailed` where it doesn't start.
    """
    port = _free_port()
    log = directory / f"{engine}.log"
    with TemporaryDirectory(prefix="outrider-served-") as root, log.open("wb") as said:
        model = write_model(setup, Path(root))
        command = _commands()[engine](setup, model, port)
        with started(command, environment=with_variables({}), stdout=said, stderr=said) as child:
            url = f"http://127.0.0.1:{port}"
            _wait(url, child, log, limit_s)
            yield Served(url=url, tokenizer=model / "target")


def _commands() -> Mapping[str, Any]:
    return {"outrider": _ours, "vllm": _vllm}


def _ours(setup: Setup, model: Path, port: int) -> list[str]:
    given = {"setup": asdict(setup), "model": str(model / "target"), "port": port}
    return [sys.executable, "-m", "outrider_bench.served_child", json.dumps(given)]


def _vllm(setup: Setup, model: Path, port: int) -> list[str]:
    from outrider_bench.synthetic import rates_of_length

    options: dict[str, object] = {
        "model": model / "target",
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": port,
        "load-format": "dummy",
        "dtype": setup.dtype or "bfloat16",
        "max-model-len": setup.max_context,
        "max-num-seqs": setup.max_requests,
        "gpu-memory-utilization": 0.85,
    }
    if setup.speculate == "eagle":
        rates = None if setup.accept_length is None else rates_of_length(setup.accept_length, setup.draft_tokens)
        synthetic = {} if rates is None else {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        drafts = {"method": "eagle", "model": str(model / "draft"), "num_speculative_tokens": setup.draft_tokens}
        options["speculative-config"] = json.dumps({**drafts, **synthetic})
    given = [item for name, value in options.items() for item in (f"--{name}", str(value))]
    flags = ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given, *flags]


def write_model(setup: Setup, root: Path) -> Path:
    """``target`` and ``draft`` below ``root``: configs without weights, and a tokenizer in which every token has a text."""
    from dataclasses import replace

    from outrider_bench.peers.work import checkpoint_config
    from outrider_bench.random_weights import shape_config

    shape = shape_config(setup.shape)
    head = replace(shape, family="llama", qk_norm=False, attention_bias=False, tie_embeddings=False)
    for name, config, layers in (("target", shape, None), ("draft", head, 1)):
        directory = root / name
        directory.mkdir()
        content = checkpoint_config(config, dtype=setup.dtype or "bfloat16", layers=layers)
        (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    target = root / "target"
    (target / "tokenizer.json").write_text(tokenizer_of(shape.vocab_size), encoding="utf-8")
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_context}
    (target / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return root


def tokenizer_of(size: int) -> str:
    """A byte-level tokenizer of so many tokens; each but the bytes is a word of some letters behind a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spelled = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number in range(size - len(spelled)):
        word = ""
        for _ in range(_SPELLED):
            number, place = divmod(number, len(letters))
            word += letters[place]
        spelled.append("Ġ" + word)
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(spelled[:size])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(url: str, child: Popen[bytes], log: Path, limit_s: float) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            with urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            pass
        if child.poll() is not None or time.monotonic() > deadline:
            last = " | ".join(log.read_text(errors="replace").strip().splitlines()[-6:])
            how = "ended" if child.poll() is not None else f"wasn't ready within {limit_s:g} s"
            raise ChildFailed(f"the server {how}: {last or 'it said nothing'}")
        time.sleep(0.25)


def partial_engine(setup: Setup) -> functools.partial[Engine]:
    """What makes the engine of a setup; it can be pickled."""
    return functools.partial(make_engine, asdict(setup))
