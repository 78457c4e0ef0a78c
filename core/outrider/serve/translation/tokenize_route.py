"""The routes that convert text to tokens and tokens to text, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from outrider.serve.api.api_errors import bad_request
from outrider.serve.api.request_fields import ListOf, NestedObject, StrictFields
from outrider.serve.api.service import Service
from outrider.serve.translation.conversation import ObjectList, chat_request


class TokenizeRequest(StrictFields):
    """The body of ``POST /tokenize``: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: ObjectList | None = None
    tools: ObjectList | None = None
    chat_template_kwargs: NestedObject | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(StrictFields):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: ListOf[int]


def add_tokenize_routes(app: FastAPI, service: Service, responses: Mapping[int | str, dict[str, Any]]) -> None:
    """Add the routes to ``app``. ``responses`` describes the error responses for the API's schema."""
    prompter = service.prompter

    @app.post("/tokenize", responses=dict(responses))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the tokens of a prompt, or of the prompt that the chat template makes of messages."""
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("expected one of prompt and messages", "prompt")
        if body.add_special_tokens is False:
            message = "add_special_tokens false isn't served: the tokens are those that a completion gets"
            raise bad_request(message, "add_special_tokens")
        if body.model is not None:
            service.check_model(body.model)
        if body.messages is not None:
            fields = {"messages": body.messages, "tools": body.tools, "chat_template_kwargs": body.chat_template_kwargs}
            chat = chat_request({"model": service.config.names[0], **fields})
            prompt = await service.build_prompts(lambda: prompter.chat(chat), size=None)
        else:
            text = body.prompt or ""
            (prompt,) = await service.build_prompts(lambda: prompter.completion_prompts(text), size=len(text))
        tokens = list(prompt.tokens)
        texts = [prompter.tokenizer.bytes_of(token).decode(errors="replace") for token in tokens]
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": service.engine.info.longest_request,
                "tokens": tokens,
                "token_strs": texts if body.return_token_strs else None,
            }
        )

    @app.post("/detokenize", responses=dict(responses))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of the request's token ids."""
        if body.model is not None:
            service.check_model(body.model)
        prompter.check_tokens(body.tokens, "tokens")
        text = await service.build_prompts(lambda: prompter.tokenizer.decode(body.tokens), size=len(body.tokens))
        return JSONResponse({"prompt": text})
