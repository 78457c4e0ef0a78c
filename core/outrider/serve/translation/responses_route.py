"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from outrider.serve.api.asgi_responses import DeferredResponse, EventStreamResponse
from outrider.serve.api.request_fields import ChatRequest
from outrider.serve.api.response_writer import ResponseWriter
from outrider.serve.api.service import Service
from outrider.serve.translation.response_store import ResponseStore
from outrider.serve.translation.responses_request import ResponsesRequest, translate_responses_request
from outrider.serve.translation.responses_writer import ResponsesWriter


class ChatStarter(Protocol):
    """A function that starts the generation of a chat request."""

    async def __call__(self, body: ChatRequest, request: Request, *, clamp: bool = False) -> ResponseWriter:
        """Return the writer of the response. With ``clamp``, ``max_tokens`` may exceed the context, which then ends it."""
        ...


def add_responses_routes(
    app: FastAPI, service: Service, start_chat: ChatStarter, responses: Mapping[int | str, dict[str, Any]]
) -> None:
    """Add the routes to ``app``. ``responses`` describes the responses of a generating route for the API's schema."""
    store = ResponseStore()

    @app.post("/v1/responses", responses=dict(responses), response_class=Response)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Generate the next items of a conversation."""
        service.check_accepting()
        service.check_model(body.model)
        previous = body.previous_response_id
        earlier = () if previous is None else store.find(previous, "previous_response_id").items
        chat, tools, items = translate_responses_request(body, earlier)

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                store.add(response, [*items, *response["output"]])

        chat_writer = await start_chat(chat, request)
        generation = chat_writer.generation
        writer = ResponsesWriter(body, tools, chat_writer, keep)
        if body.stream:
            write_s = service.config.write_timeout_s
            return EventStreamResponse(writer.write_events, close=generation.close, write_s=write_s, end=b"")
        return DeferredResponse(writer.write_whole, close=generation.close)

    @app.get("/v1/responses/{response_id}", responses=dict(responses))
    async def stored_response(response_id: str) -> Response:
        """Return the response object of an earlier request."""
        return JSONResponse(store.find(response_id).response)

    @app.delete("/v1/responses/{response_id}", responses=dict(responses))
    async def delete_response(response_id: str) -> Response:
        """Remove a stored response. Responses that continue it stay."""
        store.remove(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
