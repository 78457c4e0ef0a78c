"""Replicas of the server with one address, on Ray Serve: ``serve run outrider.integrations.ray:app replicas=2``.

Needs the extras ``ray`` and ``serve``. A replica is an actor whose engine runs in a separate process. The ingress passes
each request to a replica. If the replica dies before the response has begun, the ingress sends the request to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, MutableMapping
from dataclasses import fields
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

from outrider.cli.options.option_records import ServerOptions, read_template
from outrider.device import ConfigError
from outrider.serve.api.prompt_builder import PromptBuilder, PromptResources
from outrider.serve.api.responses import SERVER, ApiError
from outrider.serve.command import read_api_keys
from outrider.serve.config import ServeConfig
from outrider.serve.connection.engine_process import EngineProcess
from outrider.serve.http.app import create_app

_LOG = logging.getLogger("outrider.ray")
_LOAD = "outrider_load"
_METRICS_PERIOD_S = 1.0
_RESEND_DELAY_S = 0.2
_REPLICA_LOST = (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError)
_REPLICA_LOST_CODES = ("engine_lost", "draining")
"""Error codes of status 503 from a replica that can't serve any more."""


class RaySettings(BaseModel):
    """The settings of ``serve run``, as ``name=value``, or of the ``args`` in a Serve config file.

    The fields from ``model`` on are options of ``outrider serve``.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    replicas: int = Field(1, ge=1)
    """Number of replicas; the minimum if ``max_replicas`` is set."""
    max_replicas: int | None = Field(None, ge=1)
    """Maximum number of replicas, for scaling by load."""
    target_load: float = Field(0.8, gt=0, le=10)
    """The load of each replica that scaling aims at.

    A load is the larger of two ratios: requests to the maximum number of running requests, and used to all KV pages.
    """
    upscale_delay_s: float = Field(30.0, ge=0)
    downscale_delay_s: float = Field(600.0, ge=0)
    cpus: float = Field(1.0, ge=0)
    """CPU cores that Ray reserves for a replica."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for a replica."""
    resend_s: float = Field(120.0, ge=0)
    """Seconds during which the ingress sends a request again while replicas die."""

    model: Path | None = None
    draft: Path | None = None
    speculate: str | None = None
    draft_tokens: int = 4
    tensor_parallel: int = Field(1, ge=1)
    data_parallel: int = Field(1, ge=1)
    expert_parallel: bool = False
    backend: str | None = None
    dtype: str | None = None
    quantized: str = "kernels"
    draft_weights: str | None = None
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
    """A server without a port, which receives its requests from the ingress."""

    async def __init__(self, settings: RaySettings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = settings
        options = ServerOptions(**settings.model_dump(include={each.name for each in fields(ServerOptions)}))
        speculation = options.speculation()
        make = options.loader(speculation, max_requests=None)
        template = None if settings.chat_template is None else read_template(settings.chat_template)
        # Wording() raises for invalid templates, before the model is loaded for minutes.
        wording = await asyncio.to_thread(PromptResources, speculation.model, chat_template=template)
        name = settings.served_model_name or ("outrider-bundled" if settings.model is None else settings.model.resolve().name)
        config = ServeConfig(names=(name,), max_queued=settings.max_queued, api_keys=read_api_keys(settings.api_key_file))
        self._engine = EngineProcess(
            make, tensor=settings.tensor_parallel, data=settings.data_parallel, expert=settings.expert_parallel
        )
        info = await self._engine.start()
        prompter = await asyncio.to_thread(PromptBuilder, speculation.model, info, wording)
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
        self._metrics_task = asyncio.get_running_loop().create_task(self._report())

    async def answer(self, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Yield the ASGI messages of the response to a request. Closing the iterator acts like a client's disconnect."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=16)
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        disconnected = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            await messages.put(dict(message))

        async def run() -> None:
            try:
                await self._app({**scope, "state": {}}, receive, send)
            finally:
                await messages.put(None)

        app_task = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await app_task
        finally:
            disconnected.set()
            app_task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await app_task

    def check_health(self) -> None:
        """Raise the engine's error if the engine has stopped. Serve then starts another replica."""
        if self._engine.error is not None:
            raise self._engine.error

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's load divided by its target load, for Ray's autoscaler."""
        return {_LOAD: self._load() / self._settings.target_load}

    async def __del__(self) -> None:
        """Close the engine. Serve awaits this method after the last request, and after a failed ``__init__``."""
        attributes = vars(self)
        if "_metrics_task" in attributes:
            self._metrics_task.cancel()
            self._app.state.service.close()
        if "_engine" in attributes:
            await self._engine.close()

    def _load(self) -> float:
        snapshot = self._engine.snapshot
        if snapshot is None:
            return 0.0
        load = snapshot.load
        return max((load.running + load.waiting) / self._rows, 1 - load.free_pages / load.pages)

    async def _report(self) -> None:
        while True:
            snapshot = self._engine.snapshot
            if snapshot is not None:
                self._running.set(snapshot.load.running)
                self._waiting.set(snapshot.load.waiting)
                self._pages.set(1 - snapshot.load.free_pages / snapshot.load.pages)
            await asyncio.sleep(_METRICS_PERIOD_S)


class Ingress:
    """The deployment with the address. It sends a request again if its replica died before the response began."""

    def __init__(self, replicas: DeploymentHandle[Any], resend_s: float) -> None:
        self._replicas = replicas.options(stream=True)
        self._resend_s = resend_s

    async def __call__(self, request: Request) -> Response:
        """Pass an HTTP request to a replica and return the replica's response."""
        body = await request.body()
        request_id = request.headers.get("x-request-id") or f"req-{secrets.token_hex(12)}"
        scope = _scope(request, request_id)
        deadline = time.monotonic() + self._resend_s
        while True:
            stream: Any = self._replicas.answer.remote(scope, body)
            try:
                status, headers, first = await _read_head(stream)
                reason = _loss_reason(status, first)
            except _REPLICA_LOST as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            except BaseException:
                stream.cancel()
                raise
            if reason is None:
                response = StreamingResponse(_read_body(stream, first), status)
                response.raw_headers = headers  # those of the replica alone
                return response
            if time.monotonic() >= deadline:
                text = f"no replica could answer within {self._resend_s:g} s: {reason}"
                error_body = ApiError(503, text, kind=SERVER, code="no_replica")
                return Response(error_body.encode(), 503, error_body.headers, "application/json")
            _LOG.warning("request %s is sent again: %s", request_id, reason)
            await asyncio.sleep(_RESEND_DELAY_S)


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas at which each has the target load, for Serve's autoscaler.

    The autoscaler applies the bounds and delays of :class:`RaySettings`.
    """
    loads = (context.aggregated_metrics or {}).get(_LOAD)
    if not loads:
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(loads.values()) - 1e-6)), {}


def app(args: Mapping[str, Any] | None = None) -> serve.Application:
    """Return the application for ``serve run`` and ``serve deploy``. ``args``: fields of :class:`RaySettings`.

    Raises :class:`ConfigError` for unknown or invalid settings.
    """
    try:
        settings = RaySettings(**dict(args or {}))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'settings'}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{problems}; the settings are {', '.join(RaySettings.model_fields)}") from None
    replica_count: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        replica_count = {
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
        max_ongoing_requests=100_000,  # the server limits requests itself, with status 429
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=30.0,
        **replica_count,
    )(Replica)
    ingress = serve.deployment(name="OutriderIngress", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100_000)(
        Ingress
    )
    return ingress.bind(replica.bind(settings), settings.resend_s)


def _gauge(name: str, text: str, tags: dict[str, str]) -> Gauge:
    gauge = Gauge(name, text, ("replica",))
    gauge.set_default_tags(tags)
    return gauge


def _scope(request: Request, request_id: str) -> dict[str, Any]:
    """Return the serializable part of a request's ASGI scope."""
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"x-request-id"]
    keys = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
    scope = {key: request.scope[key] for key in keys if key in request.scope}
    return {
        **scope,
        "asgi": {"version": "3.0"},
        "root_path": "",
        "headers": [*headers, (b"x-request-id", request_id.encode())],
    }


async def _read_head(stream: Any) -> tuple[int, list[tuple[bytes, bytes]], dict[str, Any]]:
    """Return status, headers and first body message of a response. The client gets no byte before this message arrives."""
    head = await anext(stream)
    # Serve adds the header x-request-id itself.
    headers = [(name, value) for name, value in head.get("headers", ()) if name.lower() != b"x-request-id"]
    return head["status"], headers, await anext(stream)


def _loss_reason(status: int, first: Mapping[str, Any]) -> str | None:
    """Return the message of a response that reports the loss of its replica; None for every other response."""
    if status != 503:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(first["body"])["error"]
        if error["code"] in _REPLICA_LOST_CODES:
            return str(error["message"])
    return None


async def _read_body(stream: Any, first: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """Yield the body of a response. If the replica dies after its begin, the last part is an error event."""
    try:
        yield first.get("body", b"")
        async for message in stream:
            yield message.get("body", b"")
    except _REPLICA_LOST:
        error = ApiError(503, "the replica died in the middle of its answer", kind=SERVER, code="engine_lost")
        yield b"data: " + error.encode() + b"\n\n"
    finally:
        stream.cancel()
