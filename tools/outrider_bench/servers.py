"""Servers that are measured over random weights: the project's, vLLM's, and the engine without a server."""

from __future__ import annotations

import functools
import json
import os
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

from outrider.device.errors import OutriderError
from outrider.registry.children import child_session
from outrider_bench.child import BenchFailed
from outrider_bench.http_load import HttpLoad
from outrider_bench.load import Requests, StreamedAnswer, serve_clients, summarize
from outrider_bench.random_checkpoint import write_configs, write_tokenizer
from outrider_bench.random_model import RandomModel

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

MODEL_NAME = "measured"
_POLL_S = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSetup:
    """The weights, drafts and sizes that each measured server gets."""

    model: RandomModel
    dtype: str | None
    backend: str | None
    max_requests: int
    max_context: int


def make_engine(setup: Mapping[str, Any]) -> Engine:
    """Return the engine that ``setup``, the fields of a :class:`ServerSetup`, describes."""
    given = ServerSetup(**{**setup, "model": RandomModel(**setup["model"])})
    return given.model.load_engine(
        given.backend,
        max_requests=given.max_requests,
        dtype=given.dtype,
        max_context=given.max_context,
        cached_tokens=given.max_requests * given.max_context,
    )


# -- the engine without a server ---------------------------------------------------------------------------------------


def measure_bare_engine(work: Mapping[str, Any]) -> dict[str, object]:
    """Run the load on an engine for each number of clients; called in a child process."""
    engine = make_engine(work["setup"])
    results = []
    for number, clients in enumerate(work["sizes"], 1):
        load = HttpLoad(**work["load"]).with_clients(clients, number=number)
        run_on_engine(engine, load.warm_up)
        results.append({"concurrency": clients, **summarize(run_on_engine(engine, load))})
    return {"results": results}


def run_on_engine(engine: Engine, load: HttpLoad) -> list[StreamedAnswer]:
    """Run the load on an engine in its own thread and return the answers."""
    vocabulary = min(400, engine.model.config.vocab_size)

    def requests_of(client: int) -> Requests:
        return ((load.prompt(client, round_, vocabulary), load.new_tokens) for round_ in range(load.rounds))

    return serve_clients(engine, map(requests_of, range(load.clients)))


# -- servers -----------------------------------------------------------------------------------------------------------


@contextmanager
def start_server(engine: str, setup: ServerSetup, *, directory: Path, limit_s: float) -> Generator[str]:
    """Run a server of ``engine`` in a process of its own until the scope ends. Yields its URL.

    The server's output goes to a file in ``directory``. Raises :class:`BenchFailed` if the server doesn't start.
    """
    from outrider.model.config.shapes import shape_config

    port = _free_port()
    log = directory / f"{engine}.log"
    with TemporaryDirectory(prefix="outrider-served-") as root, log.open("wb") as output:
        target, draft = write_configs(setup.model.shape, Path(root), dtype=setup.dtype or "bfloat16")
        config = shape_config(setup.model.shape)
        write_tokenizer(target, size=config.vocab_size, max_context=config.max_context)
        command = _own_command(setup, target, port) if engine == "outrider" else _vllm_command(setup, target, draft, port)
        with child_session(command, environment=os.environ.copy(), stdout=output, stderr=output) as child:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, child, log, limit_s)
            yield url


def serve_random_weights(work: Mapping[str, Any]) -> None:
    """Run the project's server until the process is ended, as ``outrider serve`` does; called in a child process.

    If the engine can't be made, the reason is the last line of the output.
    """
    from outrider.serve.api.prompt_builder import PromptBuilder
    from outrider.serve.command import run_loop
    from outrider.serve.config import ServeConfig
    from outrider.serve.connection.engine_process import EngineProcess
    from outrider.serve.http.request_middleware import log_to_stderr
    from outrider.serve.http.server import serve_http

    log_to_stderr("json")
    model = Path(work["model"])
    config = ServeConfig(names=(MODEL_NAME,))
    engine = EngineProcess(functools.partial(make_engine, work["setup"]))
    try:
        run_loop(serve_http(engine, lambda info: PromptBuilder(model, info), config, port=work["port"]))
    except OutriderError as error:
        sys.exit(str(error))


def _own_command(setup: ServerSetup, target: Path, port: int) -> list[str]:
    work = {"setup": asdict(setup), "model": str(target), "port": port}
    function = f"{__name__}:{serve_random_weights.__name__}"
    return [sys.executable, "-m", "outrider_bench.child", function, json.dumps(work)]


def _vllm_command(setup: ServerSetup, target: Path, draft: Path, port: int) -> list[str]:
    from outrider_bench.acceptance import acceptance_rates

    options: dict[str, object] = {
        "model": target,
        "served-model-name": MODEL_NAME,
        "host": "127.0.0.1",
        "port": port,
        "load-format": "dummy",
        "dtype": setup.dtype or "bfloat16",
        "max-model-len": setup.max_context,
        "max-num-seqs": setup.max_requests,
        "gpu-memory-utilization": 0.85,
    }
    model = setup.model
    if model.speculate == "eagle":
        rates = None if model.accept_length is None else acceptance_rates(model.accept_length, model.draft_tokens)
        synthetic = {} if rates is None else {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        drafts = {"method": "eagle", "model": str(draft), "num_speculative_tokens": model.draft_tokens}
        options["speculative-config"] = json.dumps({**drafts, **synthetic})
    given = [item for name, value in options.items() for item in (f"--{name}", str(value))]
    flags = ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given, *flags]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_until_ready(url: str, child: Popen[bytes], log: Path, limit_s: float) -> None:
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
            raise BenchFailed(f"the server {how}: {last or 'it said nothing'}")
        time.sleep(_POLL_S)
