"""Conversion of text, token ids and conversations to prompts for the engine.

The functions of this module take milliseconds for long texts. The server then calls them in a thread.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.device import ConfigError
from outrider.errors import CheckpointError, RequestError, one_line
from outrider.model import Media, MediaProcessor, Tokenizer
from outrider.model.media.chat_template import ChatTemplate, call_arguments
from outrider.model.media.vision import decode_image
from outrider.serve.api.model_formats import ModelFormat, choose_format
from outrider.serve.api.request_fields import ChatMessage, ChatRequest, MessagePart, thinking_variables
from outrider.serve.api.responses import bad_request
from outrider.serve.connection.engine_messages import EngineInfo

_MAX_IMAGES = 64
"""Maximum number of images in a request."""
_CHARACTERS_PER_TOKEN = 8
"""Characters per token of the context length that a long text's first part has; this part is tokenised first, to refuse texts
that are too long.
"""


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A prompt in the form that the engine reads: token ids and images."""

    tokens: Sequence[int]
    media: Sequence[Media] = ()
    """Images of the prompt, in the order of their placeholder tokens."""
    text: str = ""
    """Text that the chat template made of a conversation; empty for other prompts."""
    media_tokens: int = 0
    """Number of tokens that the engine adds to ``tokens``: all features of an image but the first."""

    @property
    def length(self) -> int:
        """Number of tokens that the engine reads."""
        return len(self.tokens) + self.media_tokens


class PromptResources:
    """The tokenizer and the templates of a checkpoint. They are loaded without the weights. Immutable.

    ``chat_template`` is a Jinja template that replaces the checkpoint's. ``response_template`` describes how the model writes
    tool calls and reasoning, in transformers' format; it replaces the checkpoint's. ``tool_format`` and ``reasoning_format``
    name formats of :mod:`outrider.serve.api.model_formats` and replace both. Raises :class:`CheckpointError` or
    :class:`ConfigError` if a file, a template or a name can't be used.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        chat_template: str | None = None,
        response_template: Mapping[str, Any] | None = None,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> None:
        self.tokenizer = Tokenizer.from_checkpoint(model_dir)
        self.chat_template = ChatTemplate.from_checkpoint(model_dir, source=chat_template)
        source = "" if self.chat_template is None else self.chat_template.tool_source
        chosen = choose_format(tool_format, reasoning_format, source)
        own = None if self.chat_template is None else self.chat_template.response_template
        template = (
            own if response_template is None and tool_format is None and reasoning_format is None else response_template
        )
        self.answer_format: Mapping[str, Any] | ModelFormat = chosen if template is None else template
        """How the model writes tool calls and reasoning: the given format, the checkpoint's, or that of its family."""
        markers = chosen.literals
        if template is not None:
            _check_response_template(template)
            markers = json.dumps(template["fields"], ensure_ascii=False).replace("\\\\", "\\")
        self.marker_tokens = self.tokenizer.spelled_in(markers)
        """Special tokens that the answer format names, which have text in answers."""


class PromptBuilder:
    """A builder of prompts for one model. Threads may share it.

    ``wording`` has the model's tokenizer and templates; None loads them from ``model_dir``.
    """

    def __init__(self, model_dir: Path, info: EngineInfo, wording: PromptResources | None = None) -> None:
        wording = wording or PromptResources(model_dir)
        self.tokenizer, self.answer_format, self._chat = wording.tokenizer, wording.answer_format, wording.chat_template
        self.marker_tokens = wording.marker_tokens
        self._info = info
        self._processor = None if info.image_token is None else _processor(model_dir)

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return self._chat is not None

    def completion_prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[EnginePrompt]:
        """Return the prompts of a request to ``/v1/completions``: ``prompt`` is one prompt or a list of prompts.

        Raises :class:`ApiError` for an empty list, and for text or tokens that the model can't read.
        """
        prompts = listed_prompts(prompt)
        if not prompts:
            raise bad_request("prompt is an empty list; give at least one prompt", "prompt")
        for each in prompts:
            if not isinstance(each, str):
                self.check_length(len(each))
        return [EnginePrompt(self._tokens(each)) for each in prompts]

    def prompt_texts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[str]:
        """Return the prompts of a completion as they were sent. Token ids become text with the spelling of special tokens."""
        sent = listed_prompts(prompt)
        return [each if isinstance(each, str) else self.tokenizer.decode(each, special_tokens=True) for each in sent]

    def _tokens(self, prompt: str | list[int]) -> Sequence[int]:
        if isinstance(prompt, str):
            tokens: Sequence[int] = self._encode(prompt)
        else:
            tokens = prompt
            self.check_tokens(prompt, "prompt")
        if not tokens:
            if self._info.bos_token_id is None:
                raise bad_request("the prompt is empty; give at least one character or token", "prompt")
            tokens = [self._info.bos_token_id]  # as in OpenAI's API: the model starts a document
        return tokens

    def _encode(self, text: str) -> list[int]:
        try:
            self._check_text_length(text)
            return self.tokenizer.encode(text)
        except (RequestError, CheckpointError) as error:
            raise bad_request(str(error), "prompt") from error

    def check_tokens(self, tokens: Sequence[int], field: str) -> None:
        """Raise :class:`ApiError` that names ``field`` for a token outside the model's vocabulary."""
        size = self._info.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            wrong = next(token for token in tokens if not 0 <= token < size)
            raise bad_request(f"token {wrong} is outside the model's vocabulary of {size}", field)

    def check_length(self, length: int) -> None:
        """Raise :class:`ApiError` for a prompt of ``length`` tokens that exceeds the context length."""
        longest = self._info.longest_request
        if length >= longest:
            raise bad_request(
                f"the prompt has {length} tokens, this server takes {longest - 1} at most (its context is {longest})",
                "prompt",
                "context_length_exceeded",
            )

    def _check_text_length(self, text: str) -> None:
        """Raise :class:`ApiError` for a text that certainly exceeds the context length, after a part of it is tokenised.

        The last tokens of a part may differ from those of the whole text. So a part must have twice the context length.
        """
        longest = self._info.longest_request
        size = longest * _CHARACTERS_PER_TOKEN
        while size < len(text):
            count = len(self.tokenizer.encode(text[:size]))
            if count > 2 * longest:
                raise bad_request(
                    f"the first {size} of {len(text)} characters of the prompt have {count} tokens, this server takes "
                    f"{longest - 1} at most (its context is {longest})",
                    "prompt",
                    "context_length_exceeded",
                )
            size *= 4

    def chat(self, request: ChatRequest) -> EnginePrompt:
        """Return the prompt that the chat template makes of the conversation of ``request``.

        Raises :class:`ApiError` if the model has no chat template, or if the template rejects the conversation.
        """
        if self._chat is None:
            raise bad_request(
                "this model has no chat template, so it can't be chatted with; use /v1/completions, or start the server with "
                "--chat-template FILE",
                "messages",
                "no_chat_template",
            )
        images: list[Media] = []
        messages = [self._message(index, each, images) for index, each in enumerate(request.messages)]
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables = {**thinking_variables(False), **variables}
        # Parameters of transformers' apply_chat_template, which a request must not set.
        reserved = {
            "messages",
            "tools",
            "chat_template",
            "conversation",
            "documents",
            "tokenize",
            "padding",
            "truncation",
            "max_length",
        }
        options = {"continue_final_message": False, "add_generation_prompt": True}
        for name in options:
            if isinstance(variables.get(name), bool):
                options[name] = variables.pop(name)
        refused = {name for name in variables if name in reserved | options.keys() or name.startswith("return_")}
        if refused:
            raise bad_request(f"chat_template_kwargs has {min(refused)!r}, which isn't a template's", "chat_template_kwargs")
        try:
            text = self._chat.text(messages, tools=tools, variables=variables, **options)
            self._check_text_length(text)
            tokens = self._chat.tokens(messages, tools=tools, variables=variables, **options)
        except RequestError as error:
            raise bad_request(str(error), "messages") from error
        if images and sum(token == self._info.image_token for token in tokens) != len(images):
            raise bad_request("the chat template gave the images no place each; is it that of a vision model?", "messages")
        features = sum(image.grid.patches // self._info.patches_per_feature for image in images)
        return EnginePrompt(tokens, images, text, features - len(images))

    def _message(self, index: int, message: ChatMessage, images: list[Media]) -> dict[str, Any]:
        """Return ``message``, number ``index`` of the request, in the form that chat templates read. Its images are appended
        to ``images``.
        """
        field = f"messages[{index}]"
        for name in ("audio", "function_call"):
            if getattr(message, name) is not None:
                raise bad_request(f"{field}.{name} isn't served", f"{field}.{name}")
        variables = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
        if message.role == "developer" and self._chat is not None and "developer" not in self._chat.source:
            variables["role"] = "system"
        if isinstance(message.content, list):
            variables["content"] = self._content(field, message.content, images)
        elif message.content is not None:
            variables["content"] = message.content
        elif message.role == "assistant":
            variables["content"] = ""
        else:
            raise bad_request(f"{field} has no content", f"{field}.content")
        if message.tool_calls:
            variables["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call_arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        return variables

    def _content(self, field: str, parts: Sequence[MessagePart], images: list[Media]) -> str | list[dict[str, str]]:
        """Return the parts of a message for the chat template: one text without images, which every template reads, else a
        list of parts. Images are appended to ``images``; errors name ``field``.
        """
        content: list[dict[str, str]] = []
        for number, part in enumerate(parts):
            part_field = f"{field}.content[{number}]"
            if part.type == "image_url":
                if part.image_url is None:
                    raise bad_request(f"{part_field} has no image_url", f"{part_field}.image_url")
                images.append(self._image(part.image_url.url, f"{part_field}.image_url.url", len(images)))
                content.append({"type": "image"})
                continue
            text = {"text": part.text, "refusal": part.refusal}.get(part.type)
            if text is None:
                message = f"{part_field} is of the type {part.type}, which isn't served, or lacks its text"
                raise bad_request(message, part_field)
            content.append({"type": "text", "text": text})
        if any(part["type"] == "image" for part in content):
            return content
        return "\n".join(part["text"] for part in content)

    def _image(self, url: str, field: str, num_images: int) -> Media:
        if self._processor is None:
            raise bad_request("this is a model of text alone; it can't see images", field)
        if num_images >= _MAX_IMAGES:
            raise bad_request(f"more than {_MAX_IMAGES} images in a request", field)
        try:
            return self._processor.image(decode_image(_decode_data_url(url, field)))
        except RequestError as error:
            raise bad_request(str(error), field) from error


def listed_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    """Return the prompts of a completion as a list: ``prompt`` is one prompt or a list of prompts."""
    listed: Any = prompt
    return [listed] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else listed


def prompt_size(prompt: str | list[str] | list[int] | list[list[int]]) -> int:
    """Return the number of characters that the tokenizer has to encode for the prompts of a completion."""
    return sum(len(each) for each in listed_prompts(prompt) if isinstance(each, str))


def _decode_data_url(url: str, field: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise bad_request("expected an image as a data URL, data:image/…;base64,…; the server fetches nothing", field)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"the image's base64 can't be read: {error}", field) from error


def _check_response_template(template: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` if transformers' parser can't use ``template``."""
    try:
        from transformers.utils.chat_parsing import ResponseParser

        ResponseParser(dict(template), prefix="")
    except ImportError:
        raise ConfigError("calls of tools are parsed by a newer transformers; run: pip install 'outrider[serve]'") from None
    except Exception as error:
        raise ConfigError(f"the response template can't be used: {one_line(str(error))}") from error


def _processor(model_dir: Path) -> MediaProcessor | None:
    try:
        return MediaProcessor.from_checkpoint(model_dir)
    except (CheckpointError, ConfigError):
        return None  # the model can still serve text
