"""Answers: whole ones, and streams of server-sent events. Both end their work when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.serve.errors import ApiError

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class ClientGone(Exception):
    """The client has closed its connection, or doesn't read."""


class Answer(Response):
    """An answer that is still to be worked out: ``work`` returns it, as a mapping. Where the client goes away, ``work`` is
    cancelled. ``close`` is called in the end, however that comes.
    """

    def __init__(self, work: Callable[[], Awaitable[Mapping[str, Any]]], *, close: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        del scope
        try:
            data = await _unless_gone(receive, self._work())
        finally:
            self._close()
        await _send_whole(send, 200, json.dumps(data).encode(), {})


class EventStream(Response):
    """A stream of events: ``work`` yields them as bytes. ``write_s``: how long the client may take to read a piece.
    ``close`` is called in the end, however that comes.
    """

    def __init__(self, work: Callable[[], AsyncIterator[bytes]], *, close: Callable[[], None], write_s: float) -> None:
        super().__init__()
        self._work = work
        self._close = close
        self._write_s = write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        del scope
        try:
            await _unless_gone(receive, self._pump(send))
        finally:
            self._close()

    async def _pump(self, send: Send) -> None:
        headers = [(b"content-type", _EVENTS), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for piece in self._work():
                await self._write(send, piece)
        except ApiError as error:
            await self._write(send, b"data: " + error.encoded() + b"\n\n")
        await self._write(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, piece: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            raise ClientGone(f"the client hasn't read for {self._write_s:g} s") from None


async def send_error(send: Send, error: ApiError) -> None:
    """Answer with an error."""
    await _send_whole(send, error.status, error.encoded(), error.headers)


async def _send_whole(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    named += [(b"content-type", _JSON), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": body})


async def _unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """What ``work`` returns. Raises :class:`ClientGone` once the client has gone, and cancels it."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client has closed its connection")
        return working.result()
    finally:
        for task in (working, listening):
            if not task.done():
                task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
