"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from outrider.serve.api.api_errors import MESSAGES_PATH
from outrider.serve.api.asgi_responses import DeferredResponse, EventStreamResponse
from outrider.serve.api.service import Service
from outrider.serve.translation.messages_request import CountTokensRequest, MessagesRequest, translate_messages_request
from outrider.serve.translation.messages_writer import MessagesWriter
from outrider.serve.translation.responses_route import ChatStarter


def add_messages_routes(
    app: FastAPI, service: Service, start_chat: ChatStarter, responses: Mapping[int | str, dict[str, Any]]
) -> None:
    """Add the routes to ``app``. ``responses`` describes the responses of a generating route for the API's schema."""

    @app.post(MESSAGES_PATH, responses=dict(responses), response_class=Response)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        service.check_accepting()
        service.check_model(body.model)
        chat_writer = await start_chat(translate_messages_request(body), request, clamp=True)
        generation = chat_writer.generation
        writer = MessagesWriter(body, chat_writer)
        if body.stream:
            write_s = service.config.write_timeout_s
            return EventStreamResponse(writer.write_events, close=generation.close, write_s=write_s, end=b"")
        return DeferredResponse(writer.write_whole, close=generation.close)

    @app.post(f"{MESSAGES_PATH}/count_tokens", responses=dict(responses))
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Return the number of tokens that a message's conversation has."""
        service.check_model(body.model)
        chat = translate_messages_request(body)
        prompt = await service.build_prompts(lambda: service.prompter.chat(chat), size=None)
        return JSONResponse({"input_tokens": len(prompt.tokens)})
