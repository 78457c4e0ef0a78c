"""A worker for NVIDIA Dynamo: Dynamo's unified backend on one engine. Dynamo handles HTTP, tokenization and routing.

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

from outrider.cli.options.option_records import ServerOptions
from outrider.device import OutriderError
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.engine import Engine
from outrider.engine.guides.guides import ChoiceGuide, Ebnf, Guide, JsonSchema, Regex
from outrider.engine.requests.request import FinishReason, StepOutput
from outrider.engine.requests.sampling import SamplingParams
from outrider.serve.connection.kv_events import KvEventPublisher

_METRICS_PERIOD_S = 0.5
_GUIDES: dict[str, Callable[[Any], Guide]] = {"json": JsonSchema, "regex": Regex, "choice": ChoiceGuide, "grammar": Ebnf}
_OPTIONS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("model", "draft"), Path),
    **dict.fromkeys(("speculate", "backend", "dtype"), str),
    **dict.fromkeys(("draft_tokens", "max_requests", "max_context", "page_size"), int),
    "kv_memory": float,
}
"""The type of each option of :class:`ServerOptions` that a worker has."""
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "cancelled"}


@dataclass
class _DynamoRequest:
    """A request of Dynamo that hasn't ended."""

    id: int | None = None
    """The engine's request id; None before admission."""
    aborted: bool = False
    ending: asyncio.Future[None] | None = None
    """A reference to the task that aborts the request, so that the task isn't garbage-collected."""


class OutriderEngine(LLMEngine):
    """An :class:`~outrider.AsyncEngine` with the interface of Dynamo's unified backend."""

    def __init__(self, make: Callable[[], Engine], *, model: Path, name: str) -> None:
        """Create Dynamo's view of an engine.

        ``make`` creates the engine, in :meth:`start`. ``model`` is the checkpoint directory, whose tokenizer Dynamo uses.
        ``name`` is the model name for clients.
        """
        self._make_engine, self._model, self._name = make, model, name
        self._engine: AsyncEngine | None = None
        self._events: KvEventPublisher | None = None
        self._events_dir: tempfile.TemporaryDirectory[str] | None = None
        self._open_requests: dict[str, _DynamoRequest] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._metrics_task: Future[None] | None = None
        self.lost: BaseException | None = None
        """The error that stopped the engine; None while the engine works."""

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[OutriderEngine, WorkerConfig]:
        """Return the engine and the worker config of a command line. Exits like argparse for invalid options."""
        args = parser().parse_args(argv)
        runtime = DynamoRuntimeConfig.from_cli_args(args)
        runtime.validate()
        options = ServerOptions(**{name: getattr(args, name) for name in _OPTIONS})
        speculation = options.speculation()
        model = speculation.model
        name = args.served_model_name or model.name
        address = runtime.endpoint or f"dyn://{runtime.namespace}.backend.generate"
        namespace, component, endpoint = parse_endpoint(address)
        address_parts: dict[str, Any] = {"namespace": namespace, "component": component, "endpoint": endpoint}
        config = WorkerConfig.from_runtime_config(runtime, model_name=str(model), served_model_name=name, **address_parts)
        return cls(options.loader(speculation, max_requests=None), model=model, name=name), config

    async def start(self, worker_id: int) -> EngineConfig:  # noqa: ARG002
        """Load the model and return Dynamo's registration. The engine accepts requests afterwards."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine = AsyncEngine(self._make_engine)
        await engine.start()
        config = engine.engine.config
        if config.prefix_cache:
            self._events_dir = tempfile.TemporaryDirectory(prefix="outrider-dynamo-")
            self._events_address = f"ipc://{self._events_dir.name}/kv-events"
            self._events = events = KvEventPublisher(self._events_address, page_size=config.page_size)
            await engine.call(lambda inner: inner.watch_prefix_cache(events.publish))
        registration = LlmRegistration(
            context_length=config.max_context,
            kv_cache_block_size=config.page_size,
            total_kv_blocks=config.num_pages - 1,  # page 0 is reserved
            max_num_seqs=config.max_requests,
            max_num_batched_tokens=config.prefill_chunk,
        )
        return EngineConfig(model=str(self._model), served_model_name=self._name, llm=registration)

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[GenerateChunk, None]:
        """Stream the tokens of one request. Raises Dynamo's exceptions.

        ``InvalidArgument``: the engine rejects the request. ``Unknown``: the request failed. ``EngineShutdown``: the engine
        has stopped.
        """
        engine = self._engine
        if engine is None:
            raise EngineShutdown("this worker hasn't started, or has ended")
        normalize_request_token_ids(request)
        params = sampling_params(request, engine.engine.max_context)
        opened = self._open_requests[context.id()] = _DynamoRequest()
        prompt, num_generated = request["token_ids"], 0

        def admitted(ids: range) -> None:
            opened.id = ids.start
            if opened.aborted:
                opened.ending = asyncio.ensure_future(self._end(opened.id))

        stream = engine.stream(prompt, params, admitted=admitted)
        try:
            async for output in stream:
                if output.finish_reason is FinishReason.ERROR:
                    raise Unknown(output.error or "the request ended with an error")
                num_generated += len(output.tokens)
                yield _chunk(output, len(prompt), num_generated)
        except OutriderError as error:
            if engine.error is None:
                raise InvalidArgument(str(error)) from error
            self._end_worker(error)
            raise EngineShutdown(str(error)) from error
        finally:
            self._open_requests.pop(context.id(), None)
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator

    async def abort(self, context: Any) -> None:
        """Abort a request. Its stream ends with the finish reason ``cancelled``."""
        opened = self._open_requests.get(context.id(), _DynamoRequest())
        opened.aborted = True
        if opened.id is not None:
            await self._end(opened.id)

    async def cleanup(self) -> None:
        """Close the engine and the publishers. A second call does nothing; after a failed start, it closes what
        was created.
        """
        metrics_task, self._metrics_task = self._metrics_task, None
        engine, self._engine = self._engine, None
        events, self._events = self._events, None
        directory, self._events_dir = self._events_dir, None
        if metrics_task is not None:
            metrics_task.cancel()
        if engine is not None:
            await engine.close()
        if events is not None:
            events.close()
        if directory is not None:
            directory.cleanup()

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return the address of the prefix cache's events; empty without a prefix cache."""
        return [] if self._events is None else [ZmqSource(endpoint=self._events_address)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return rank 0, the only data-parallel rank."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Start to report the number of used KV pages to ``publisher``, every 0.5 seconds."""
        assert self._loop is not None  # Dynamo calls this on another thread, after start()
        self._metrics_task = asyncio.run_coroutine_threadsafe(self._report(publisher), self._loop)

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return a request with a prompt of one token for one output token."""
        return dict(build_health_check_payload(bos_token_id=1))

    async def _end(self, request: int) -> None:
        if self._engine is not None:
            with suppress(OutriderError):  # the request may have ended already
                await self._engine.abort(request)

    def _end_worker(self, error: BaseException) -> None:
        """End this worker after the loss of its engine, so that its supervisor starts another worker."""
        if self.lost is None:
            self.lost = error
            os.kill(os.getpid(), signal.SIGTERM)

    async def _report(self, publisher: Any) -> None:
        while self._engine is not None and self._engine.error is None:
            with suppress(OutriderError):
                total = self._engine.engine.config.num_pages - 1
                used = total - await self._engine.call(lambda inner: inner.free_pages)
                publisher.publish(0, ComponentSnapshot(used, total, used / total, dp_rank=0))
            await asyncio.sleep(_METRICS_PERIOD_S)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser with Dynamo's worker options and the engine's options."""
    argument_parser = argparse.ArgumentParser(prog="python -m outrider.integrations.dynamo", allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(argument_parser)
    group = argument_parser.add_argument_group("Outrider's options, as for `outrider serve`")
    group.add_argument("--served-model-name")
    for name, kind in _OPTIONS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)
    group.set_defaults(draft_tokens=4, max_requests=64)
    return argument_parser


def sampling_params(request: GenerateRequest, max_context: int) -> SamplingParams:
    """Convert the sampling options of Dynamo's request. Raises ``InvalidArgument`` for unsupported options."""
    sampling, stops = _given_options(request, "sampling_options"), _given_options(request, "stop_conditions")
    for name in ("multi_modal_data", "prefill_result", "encoder_result"):
        if request.get(name):
            raise InvalidArgument(f"{name}: this worker takes text alone, and both prefills and decodes it")
    if sampling.get("use_beam_search") or sampling.get("n", 1) != 1:
        raise InvalidArgument("n and use_beam_search: a stream of Dynamo's ends with its first sample; ask n times")
    logprobs, prompt_logprobs = parse_logprob_options(request.get("output_options") or {})
    if prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs: this worker has log-probabilities of the output alone")
    fields: dict[str, Any] = {
        "max_tokens": stops.get("max_tokens", max(1, max_context - len(request["token_ids"]))),
        "min_tokens": stops.get("min_tokens", 0),
        "ignore_eos": bool(stops.get("ignore_eos")),
        "stop": tuple(stops.get("stop", ())),
        "stop_token_ids": (*stops.get("stop_token_ids", ()), *stops.get("stop_token_ids_hidden", ())),
        "temperature": sampling.get("temperature", 1.0),
        "top_k": max(0, sampling.get("top_k", 0)),
        "seed": sampling.get("seed", random.getrandbits(63)),
        "logprobs": logprobs,
        "logit_bias": {int(token): bias for token, bias in sampling.get("logit_bias", {}).items()},
    }
    numbers = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    fields |= {name: float(sampling[name]) for name in numbers if name in sampling}
    try:
        return SamplingParams(guide=_guide(sampling.get("guided_decoding", {})), **fields)
    except OutriderError as error:
        raise InvalidArgument(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until Dynamo ends it. Return 1 if the worker ended because its engine was lost, else 0."""
    engines: list[OutriderEngine] = []

    async def make(arguments: list[str] | None) -> tuple[OutriderEngine, WorkerConfig]:
        engine, config = await OutriderEngine.from_args(arguments)
        engines.append(engine)
        return engine, config

    run(OutriderEngine, None if argv is None else list(argv), make)
    return int(any(engine.lost is not None for engine in engines))


def _guide(guided_decoding: dict[str, Any]) -> Guide | None:
    options = {name: value for name, value in guided_decoding.items() if value}
    if not options:
        return None
    if len(options) > 1 or not options.keys() <= _GUIDES.keys():
        raise InvalidArgument(f"guided_decoding: {', '.join(options)}; this worker takes one of {', '.join(_GUIDES)}")
    ((name, value),) = options.items()
    return _GUIDES[name](value)


def _given_options(request: Any, part: str) -> dict[str, Any]:
    options: dict[str, Any] = request.get(part) or {}
    return {name: value for name, value in options.items() if value is not None}


def _chunk(output: StepOutput, num_prompt: int, num_generated: int) -> GenerateChunk:
    chunk: GenerateChunk = {"token_ids": list(output.tokens), "index": 0}
    if output.logprobs:
        chunk["log_probs"] = [each.logprob for each in output.logprobs]
        # Dynamo replaces "token_id:N" by the token's text.
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": f"token_id:{token}", "logprob": logprob}
                for rank, (token, logprob) in enumerate(each.top, 1)
            ]
            for each in output.logprobs
        ]
    if output.finish_reason is not None:
        chunk["finish_reason"] = _FINISH_REASONS[output.finish_reason]
        chunk["completion_usage"] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }
    return chunk


if __name__ == "__main__":
    raise SystemExit(main())
