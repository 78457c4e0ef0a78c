"""Replicas of the server behind one address, on Ray Serve: ``serve run outrider.integrations.ray:app replicas=2``.

Needs the extras ``ray`` and ``serve``. A replica is an actor with an engine in a process of its own. The ingress hands each
request to a replica. Where that replica dies before the answer has begun, the request goes to another one: no client sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.util.metrics import Gauge
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outrider.cli.models import Sizes, Speculation, load
from outrider.device import ConfigError
from outrider.serve.app import create_app
from outrider.serve.config import ServeConfig
from outrider.serve.engine_ranks import engine_process
from outrider.serve.errors import SERVER, ApiError
from outrider.serve.prompts import Prompter, Wording

_LOG = logging.getLogger("outrider.ray")
_LOAD = "outrider_load"
_REPORT_S = 1.0
_PAUSE_S = 0.2
_GONE = (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError)
_GONE_CODES = ("engine_lost", "draining")
"""Codes of a 503 by which a replica says that it can't serve any more."""


class RaySettings(BaseModel):
    """What ``serve run`` is given, as ``name=value``, or the ``args`` of a Serve config file.

    ``replicas``: so many, or with ``max_replicas`` between both, by load. A replica's load is the larger of two shares: of
    its requests in those that it runs at a time, and of the KV pages in use. ``target_load``: what scaling aims at. ``cpus``
    and ``gpus``: what Ray keeps for a replica. ``resend_s``: how long a request is sent again while replicas die.

    The others are options of ``outrider serve``.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    replicas: int = Field(1, ge=1)
    max_replicas: int | None = Field(None, ge=1)
    target_load: float = Field(0.8, gt=0, le=10)
    upscale_delay_s: float = Field(30.0, ge=0)
    downscale_delay_s: float = Field(600.0, ge=0)
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    resend_s: float = Field(120.0, ge=0)

    model: Path | None = None
    draft: Path | None = None
    speculate: str | None = None
    draft_tokens: int = 4
    tensor_parallel: int = Field(1, ge=1)
    data_parallel: int = Field(1, ge=1)
    backend: str | None = None
    dtype: str | None = None
    quantized: str = "kernels"
    draft_output_head: str | None = None
    draft_vocabulary: str | int | None = None
    max_requests: int | None = None
    max_context: int | None = None
    kv_memory: float | None = None
    page_size: int | None = None
    served_model_name: str | None = None
    chat_template: Path | None = None
    api_key_file: Path | None = None
    max_queued: int = 256

    @model_validator(mode="after")
    def _check(self) -> RaySettings:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, less than replicas ({self.replicas})")
        return self


class Replica:
    """One server without a port of its own: it answers what the ingress hands it."""

    async def __init__(self, settings: RaySettings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = settings
        speculation = Speculation.choose(
            settings.speculate,
            model=settings.model,
            draft=settings.draft,
            draft_tokens=settings.draft_tokens,
            quantized=settings.quantized,
            draft_output_head=settings.draft_output_head,
            draft_vocabulary=settings.draft_vocabulary,
        )
        sizes = Sizes(
            max_context=settings.max_context,
            kv_memory=settings.kv_memory,
            page_size=settings.page_size,
            max_requests=settings.max_requests,
        )
        make = functools.partial(
            load, settings.backend, speculation, max_requests=None, dtype=settings.dtype, sizes=sizes, say=True
        )
        template = None if settings.chat_template is None else settings.chat_template.read_text("utf-8")
        # What can be wrong without the model is said before minutes of loading it.
        wording = await asyncio.to_thread(Wording, speculation.model, chat_template=template)
        keys = () if settings.api_key_file is None else tuple(settings.api_key_file.read_text("utf-8").split())
        name = settings.served_model_name or ("outrider-bundled" if settings.model is None else settings.model.resolve().name)
        config = ServeConfig(names=(name,), max_queued=settings.max_queued, api_keys=keys)
        self._engine = engine_process(make, tensor=settings.tensor_parallel, data=settings.data_parallel)
        info = await self._engine.start()
        prompter = await asyncio.to_thread(Prompter, speculation.model, info, wording)
        self._app = create_app(self._engine, prompter, config)
        self._rows = info.max_requests
        tags = {"replica": serve.get_replica_context().replica_id.unique_id}
        self._running, self._waiting, self._pages = (
            _gauge(name, text, tags)
            for name, text in (
                ("outrider_requests_running", "Samples that the engine runs."),
                ("outrider_requests_waiting", "Samples that wait for room."),
                ("outrider_kv_cache_usage", "Share of the KV pages that requests hold, 0 to 1."),
            )
        )
        self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The messages of ASGI that answer a request. Closing the iterator is what a client does that goes away."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=16)
        given = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if given:
                return given.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            await messages.put(dict(message))

        async def run() -> None:
            try:
                await self._app({**scope, "state": {}}, receive, send)
            finally:
                await messages.put(None)

        working = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await working
        finally:
            left.set()
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await working

    def check_health(self) -> None:
        """Raises where the engine is gone; Serve then makes another replica."""
        if self._engine.error is not None:
            raise self._engine.error

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load, in parts of what scaling aims at."""
        return {_LOAD: self._load() / self._settings.target_load}

    async def __del__(self) -> None:
        """Serve awaits it when a replica is to end, after its requests have, and where one couldn't be made."""
        held = vars(self)
        if "_reporting" in held:
            self._reporting.cancel()
            self._app.state.service.close()
        if "_engine" in held:
            await self._engine.close()

    def _load(self) -> float:
        snapshot = self._engine.snapshot
        if snapshot is None:
            return 0.0
        held = snapshot.load
        return max((held.running + held.waiting) / self._rows, 1 - held.free_pages / held.pages)

    async def _report(self) -> None:
        while True:
            snapshot = self._engine.snapshot
            if snapshot is not None:
                self._running.set(snapshot.load.running)
                self._waiting.set(snapshot.load.waiting)
                self._pages.set(1 - snapshot.load.free_pages / snapshot.load.pages)
            await asyncio.sleep(_REPORT_S)


class Ingress:
    """What has the address. It sends a request again whose replica died before a byte of the answer had come."""

    def __init__(self, replicas: DeploymentHandle[Any], resend_s: float) -> None:
        self._replicas = replicas.options(stream=True)
        self._resend_s = resend_s

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        body = await request.body()
        request_id = request.headers.get("x-request-id") or f"req-{secrets.token_hex(12)}"
        scope = _scope(request, request_id)
        deadline = time.monotonic() + self._resend_s
        while True:
            stream: Any = self._replicas.answer.remote(scope, body)
            try:
                status, headers, first = await _beginning(stream)
                why = _gone(status, first)
            except _GONE as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
            except BaseException:
                stream.cancel()
                raise
            if why is None:
                return _Relayed(_rest(stream, first), status, headers)
            if time.monotonic() >= deadline:
                text = f"no replica could answer within {self._resend_s:g} s: {why}"
                told = ApiError(503, text, kind=SERVER, code="no_replica")
                return Response(told.encoded(), 503, told.headers, "application/json")
            _LOG.warning("request %s is sent again: %s", request_id, why)
            await asyncio.sleep(_PAUSE_S)


class _Relayed(StreamingResponse):
    """An answer with the headers that the replica gave it."""

    def __init__(self, body: AsyncIterator[bytes], status: int, headers: list[tuple[bytes, bytes]]) -> None:
        super().__init__(body, status)
        self.raw_headers = headers


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """How many replicas there should be: so many that each has the load that is aimed at. For Serve's autoscaler, which keeps
    within the bounds and adds its delays.
    """
    loads = (context.aggregated_metrics or {}).get(_LOAD)
    if not loads:
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(loads.values()) - 1e-6)), {}


def app(given: Mapping[str, Any] | None = None) -> serve.Application:
    """The application, as ``serve run`` and ``serve deploy`` build it. ``given``: fields of :class:`RaySettings`.

    Raises :class:`ConfigError` for settings that don't exist or don't fit.
    """
    try:
        settings = RaySettings(**dict(given or {}))
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{said}; the settings are {', '.join(RaySettings.model_fields)}") from None
    count: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=settings.replicas,
                max_replicas=settings.max_replicas,
                upscale_delay_s=settings.upscale_delay_s,
                downscale_delay_s=settings.downscale_delay_s,
                policy=AutoscalingPolicy(policy_function="outrider.integrations.ray:scale"),
            )
        }
    replica = serve.deployment(
        name="OutriderReplica",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        max_ongoing_requests=100_000,  # the server has its own limit, and says so with status 429
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=30.0,
        **count,
    )(Replica)
    ingress = serve.deployment(name="OutriderIngress", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100_000)(
        Ingress
    )
    return ingress.bind(replica.bind(settings), settings.resend_s)


def _gauge(name: str, text: str, tags: dict[str, str]) -> Gauge:
    made = Gauge(name, text, ("replica",))
    made.set_default_tags(tags)
    return made


def _scope(request: Request, request_id: str) -> dict[str, Any]:
    """What of a request's scope can travel."""
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"x-request-id"]
    kept = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
    scope = {name: request.scope[name] for name in kept if name in request.scope}
    return {
        **scope,
        "asgi": {"version": "3.0"},
        "root_path": "",
        "headers": [*headers, (b"x-request-id", request_id.encode())],
    }


async def _beginning(stream: Any) -> tuple[int, list[tuple[bytes, bytes]], dict[str, Any]]:
    """Status, headers and the first piece of an answer: nothing is sent to the client before that piece is here."""
    head = await anext(stream)
    headers = [(name, value) for name, value in head.get("headers", ()) if name.lower() != b"x-request-id"]  # Serve has it
    return head["status"], headers, await anext(stream)


def _gone(status: int, first: Mapping[str, Any]) -> str | None:
    """Why the replica can't serve any more, where that is what its answer says."""
    if status != 503:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(first["body"])["error"]
        if error["code"] in _GONE_CODES:
            return str(error["message"])
    return None


async def _rest(stream: Any, first: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """The pieces of an answer. Where the replica dies in the middle, the last is an error: tokens can't be taken back."""
    try:
        yield first.get("body", b"")
        async for message in stream:
            yield message.get("body", b"")
    except _GONE:
        error = ApiError(503, "the replica died in the middle of its answer", kind=SERVER, code="engine_lost")
        yield b"data: " + error.encoded() + b"\n\n"
    finally:
        stream.cancel()
