"""A worker of NVIDIA Dynamo: its unified backend over one engine. Dynamo has the HTTP, tokenises and routes.

Needs the extra ``dynamo``. ``python -m outrider.integrations.dynamo --model DIR`` runs a worker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.logprobs import parse_logprob_options
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from outrider.cli.models import Sizes, Speculation, load
from outrider.device import OutriderError
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.engine import Engine
from outrider.engine.requests.guides import Choice, Ebnf, Guide, JsonSchema, Regex
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.sampling import SamplingParams
from outrider.serve.kv_events import KvEventPublisher

_SNAPSHOT_S = 0.5
_GUIDES: dict[str, Callable[[Any], Guide]] = {"json": JsonSchema, "regex": Regex, "choice": Choice, "grammar": Ebnf}
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "cancelled"}


@dataclass
class _Open:
    """A request of Dynamo's: its id here once it's admitted, and whether it was aborted."""

    id: int | None = None
    aborted: bool = False
    ending: asyncio.Future[None] | None = None


class OutriderEngine(LLMEngine):
    """Dynamo's view of an :class:`~outrider.AsyncEngine`, made by ``make`` in :meth:`start`. ``model``: the checkpoint's
    directory, which has the tokenizer that Dynamo uses; ``name``: that which clients call it by.
    """

    def __init__(self, make: Callable[[], Engine], *, model: Path, name: str) -> None:
        self._make, self._model, self._name = make, model, name
        self._engine: AsyncEngine | None = None
        self._events: KvEventPublisher | None = None
        self._events_dir: tempfile.TemporaryDirectory[str] | None = None
        self._open: dict[str, _Open] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reporting: Future[None] | None = None
        self.lost: BaseException | None = None
        """Why the engine can't go on; None while it can."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[OutriderEngine, WorkerConfig]:
        """The engine that a command line asks for. Ends the process, as argparse does, for options that don't exist."""
        given = parser().parse_args(argv)
        runtime = DynamoRuntimeConfig.from_cli_args(given)
        runtime.validate()
        model = Speculation.choose(given.speculate, model=given.model, draft=given.draft, draft_tokens=given.draft_tokens)
        sizes = Sizes(max_context=given.max_context, kv_memory=given.kv_memory, page_size=given.page_size)
        make = partial(load, given.backend, model, max_requests=given.max_requests, dtype=given.dtype, sizes=sizes)
        name = given.served_model_name or model.model.name
        where = runtime.endpoint or f"dyn://{runtime.namespace}.backend.generate"
        namespace, component, endpoint = parse_endpoint(where)
        places: dict[str, Any] = {"namespace": namespace, "component": component, "endpoint": endpoint}
        config = WorkerConfig.from_runtime_config(runtime, model_name=str(model.model), served_model_name=name, **places)
        return cls(make, model=model.model, name=name), config

    async def start(self, worker_id: int) -> EngineConfig:  # noqa: ARG002
        """Load the model. Afterwards requests are taken."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine = AsyncEngine(self._make)
        await engine.start()
        config = engine.engine.config
        if config.prefix_cache:
            self._events_dir = tempfile.TemporaryDirectory(prefix="outrider-dynamo-")
            self._events = events = KvEventPublisher(self._events_address, page_size=config.page_size)
            await engine.call(lambda inner: inner.watch_prefix_cache(events.tell))
        registration = LlmRegistration(
            context_length=config.max_context,
            kv_cache_block_size=config.page_size,
            total_kv_blocks=config.num_pages - 1,  # page 0 is reserved
            max_num_seqs=config.max_requests,
            max_num_batched_tokens=config.prefill_chunk,
        )
        return EngineConfig(model=str(self._model), served_model_name=self._name, llm=registration)

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[GenerateChunk, None]:
        """Stream the tokens of one request."""
        engine = self._engine
        if engine is None:
            raise EngineShutdown("this worker hasn't started, or has ended")
        normalize_request_token_ids(request)
        params = sampling_params(request, engine.engine.max_context)
        opened = self._open[context.id()] = _Open()
        prompt, given = request["token_ids"], 0

        def admitted(ids: range) -> None:
            opened.id = ids.start
            if opened.aborted:
                opened.ending = asyncio.ensure_future(self._end(opened.id))

        stream = engine.stream(prompt, params, admitted=admitted)
        try:
            async for output in stream:
                if output.finish_reason is FinishReason.ERROR:
                    raise Unknown(output.error or "the request ended with an error")
                given += len(output.tokens)
                yield _chunk(output, len(prompt), given)
        except OutriderError as error:
            if engine.error is None:
                raise InvalidArgument(str(error)) from error
            self._give_up(error)
            raise EngineShutdown(str(error)) from error
        finally:
            self._open.pop(context.id(), None)
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator

    async def abort(self, context: Any) -> None:
        """End a request; its stream ends with ``cancelled``."""
        opened = self._open.get(context.id(), _Open())
        opened.aborted = True
        if opened.id is not None:
            await self._end(opened.id)

    async def cleanup(self) -> None:
        """End the engine and what it tells. Allowed twice, and after a start that failed."""
        reporting, self._reporting = self._reporting, None
        engine, self._engine = self._engine, None
        events, self._events = self._events, None
        directory, self._events_dir = self._events_dir, None
        if reporting is not None:
            reporting.cancel()
        if engine is not None:
            await engine.close()
        if events is not None:
            events.close()
        if directory is not None:
            directory.cleanup()

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Where the worker hears of the prefix cache; nothing without one."""
        return [] if self._events is None else [ZmqSource(endpoint=self._events_address)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """One rank."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Report the use of KV pages to ``publisher``, twice a second."""
        assert self._loop is not None  # the worker calls this after start(), from a thread of its own
        self._reporting = asyncio.run_coroutine_threadsafe(self._report(publisher), self._loop)

    async def health_check_payload(self) -> dict[str, Any] | None:
        """One token behind one token."""
        return dict(build_health_check_payload(bos_token_id=1))

    @property
    def _events_address(self) -> str:
        assert self._events_dir is not None
        return f"ipc://{self._events_dir.name}/kv-events"

    async def _end(self, request: int) -> None:
        if self._engine is not None:
            with suppress(OutriderError):  # it has ended meanwhile
                await self._engine.abort(request)

    def _give_up(self, error: BaseException) -> None:
        """Let the worker end whose engine can't go on, so that its supervisor starts another."""
        if self.lost is None:
            self.lost = error
            os.kill(os.getpid(), signal.SIGTERM)

    async def _report(self, publisher: Any) -> None:
        while self._engine is not None and self._engine.error is None:
            with suppress(OutriderError):
                total = self._engine.engine.config.num_pages - 1
                used = total - await self._engine.call(lambda inner: inner.free_pages)
                publisher.publish(0, ComponentSnapshot(used, total, used / total, dp_rank=0))
            await asyncio.sleep(_SNAPSHOT_S)


def parser() -> argparse.ArgumentParser:
    """Dynamo's options for a worker, and those of the engine."""
    made = argparse.ArgumentParser(prog="python -m outrider.integrations.dynamo", allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(made)
    group = made.add_argument_group("Outrider's options, as for `outrider serve`")
    kinds: dict[Callable[[str], object], tuple[str, ...]] = {
        Path: ("--model", "--draft"),
        str: ("--speculate", "--served-model-name", "--backend", "--dtype"),
        int: ("--max-context", "--page-size"),
        float: ("--kv-memory",),
    }
    for kind, names in kinds.items():
        for name in names:
            group.add_argument(name, type=kind)
    group.add_argument("--draft-tokens", type=int, default=4)
    group.add_argument("--max-requests", type=int, default=64)
    return made


def sampling_params(request: GenerateRequest, max_context: int) -> SamplingParams:
    """What Dynamo's request asks for. Raises ``InvalidArgument`` for what this worker can't do."""
    sampling, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    for name in ("multi_modal_data", "prefill_result", "encoder_result"):
        if request.get(name):
            raise InvalidArgument(f"{name}: this worker takes text alone, and both prefills and decodes it")
    if sampling.get("use_beam_search") or _given(sampling, "n", 1) != 1:
        raise InvalidArgument("n and use_beam_search: a stream of Dynamo's ends with its first sample; ask n times")
    logprobs, prompt_logprobs = parse_logprob_options(request.get("output_options") or {})
    if prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs: this worker has log-probabilities of the output alone")
    given: dict[str, Any] = {
        "max_tokens": _given(stops, "max_tokens", max(1, max_context - len(request["token_ids"]))),
        "min_tokens": stops.get("min_tokens") or 0,
        "ignore_eos": bool(stops.get("ignore_eos")),
        "stop": tuple(stops.get("stop") or ()),
        "stop_token_ids": (*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_hidden") or ())),
        "temperature": _given(sampling, "temperature", 1.0),
        "top_k": max(0, _given(sampling, "top_k", 0)),
        "seed": _given(sampling, "seed", random.getrandbits(63)),
        "logprobs": logprobs,
        "logit_bias": {int(token): bias for token, bias in (sampling.get("logit_bias") or {}).items()},
    }
    for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if sampling.get(name) is not None:
            given[name] = float(sampling[name])
    try:
        return SamplingParams(guide=_guide(sampling.get("guided_decoding") or {}), **given)
    except OutriderError as error:
        raise InvalidArgument(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it's told to end; returns 1 where it ended because its engine couldn't go on."""
    made: list[OutriderEngine] = []

    async def make(arguments: list[str] | None) -> tuple[OutriderEngine, WorkerConfig]:
        both = await OutriderEngine.from_args(arguments)
        made.append(both[0])
        return both

    run(OutriderEngine, None if argv is None else list(argv), make)
    return int(any(engine.lost is not None for engine in made))


def _guide(asked: dict[str, Any]) -> Guide | None:
    given = {name: value for name, value in asked.items() if value}
    if not given:
        return None
    if len(given) > 1 or not given.keys() <= _GUIDES.keys():
        raise InvalidArgument(f"guided_decoding: {', '.join(given)}; this worker takes one of {', '.join(_GUIDES)}")
    ((name, value),) = given.items()
    return _GUIDES[name](value)


def _given(options: dict[str, Any], name: str, default: Any) -> Any:
    return default if options.get(name) is None else options[name]


def _chunk(output: StepOutput, prompt: int, given: int) -> GenerateChunk:
    chunk: GenerateChunk = {"token_ids": list(output.tokens), "index": 0}
    if output.logprobs:
        chunk["log_probs"] = [each.logprob for each in output.logprobs]
        # The text of each is made by Dynamo, from its id.
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": f"token_id:{token}", "logprob": logprob}
                for rank, (token, logprob) in enumerate(each.top, 1)
            ]
            for each in output.logprobs
        ]
    if output.finish_reason is not None:
        chunk["finish_reason"] = _FINISH[output.finish_reason]
        chunk["completion_usage"] = {"prompt_tokens": prompt, "completion_tokens": given, "total_tokens": prompt + given}
    return chunk


if __name__ == "__main__":
    raise SystemExit(main())
