"""Prompts: from text, token ids or a conversation to what the engine takes. Everything here may take milliseconds; the
server calls it outside its event loop where the text is long.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.device import ConfigError
from outrider.errors import CheckpointError, RequestError, one_line
from outrider.model import Media, MediaProcessor, Tokenizer
from outrider.model.chat_template import ChatTemplate
from outrider.serve.errors import ApiError, bad_request
from outrider.serve.fields import ChatRequest, Message, Part
from outrider.serve.messages import EngineInfo

_MOST_IMAGES = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine takes it. ``text``: that of a conversation as the template wrote it."""

    tokens: Sequence[int]
    media: Sequence[Media] = ()
    text: str = ""


class Wording:
    """What a checkpoint says of text, which can be read before its weights are: tokenizer and templates. Immutable.

    ``chat_template``: a Jinja template in place of the checkpoint's. ``response_template``: how the model writes calls of
    tools and its reasoning, as transformers' ``response_template``, in place of the checkpoint's. Raises
    :class:`CheckpointError` and :class:`ConfigError` for what can't be read.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        chat_template: str | None = None,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = Tokenizer.from_checkpoint(model_dir)
        self.chat = ChatTemplate.from_checkpoint(model_dir, source=chat_template)
        own = None if self.chat is None else self.chat.response_template
        self.response_template: Mapping[str, Any] | None = response_template or own
        if self.response_template is not None:
            _check_response_template(self.response_template)


class Prompter:
    """Makes prompts for one model. May be shared by threads. ``wording``: the model's, if it was read already."""

    def __init__(self, model_dir: Path, info: EngineInfo, wording: Wording | None = None) -> None:
        read = Wording(model_dir) if wording is None else wording
        self.tokenizer, self.response_template, self._chat = read.tokenizer, read.response_template, read.chat
        self._info = info
        self._processor = None if info.image_token is None else _processor(model_dir)

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._chat is not None

    def completion(self, given: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
        """The prompts of ``POST /v1/completions``. Raises :class:`ApiError`."""
        listed: Sequence[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not listed:
            raise bad_request("prompt is an empty list; give at least one prompt", "prompt")
        return [Prompt(self._tokens(each)) for each in listed]

    def _tokens(self, prompt: str | list[int]) -> Sequence[int]:
        if isinstance(prompt, str):
            tokens: Sequence[int] = self._encode(prompt)
        else:
            tokens = prompt
            if tokens and not (min(tokens) >= 0 and max(tokens) < self._info.vocab_size):
                wrong = next(token for token in tokens if not 0 <= token < self._info.vocab_size)
                raise bad_request(f"token {wrong} is outside the model's vocabulary of {self._info.vocab_size}", "prompt")
        if not tokens:
            if self._info.bos_token_id is None:
                raise bad_request("the prompt is empty; give at least one character or token", "prompt")
            tokens = [self._info.bos_token_id]  # as OpenAI does: from the start of a document
        return tokens

    def _encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except (RequestError, CheckpointError) as error:
            raise bad_request(str(error), "prompt") from error

    def chat(self, asked: ChatRequest) -> Prompt:
        """The prompt of a conversation. Raises :class:`ApiError`."""
        if self._chat is None:
            raise bad_request(
                "this model has no chat template, so it can't be chatted with; use /v1/completions, or start the server with "
                "--chat-template FILE",
                "messages",
                "no_chat_template",
            )
        images: list[Media] = []
        messages = [self._message(index, each, images) for index, each in enumerate(asked.messages)]
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        variables = dict(asked.chat_template_kwargs or {})
        if asked.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", asked.reasoning_effort)
        reserved = {"tools", "chat_template", "conversation", "documents", "tokenize", "padding", "truncation", "max_length"}
        options = {"continue_final_message": False, "add_generation_prompt": True}
        for name in options:
            if isinstance(variables.get(name), bool):
                options[name] = variables.pop(name)
        taken = {name for name in variables if name in reserved | options.keys() or name.startswith("return_")}
        if taken:
            raise bad_request(f"chat_template_kwargs has {min(taken)!r}, which isn't a template's", "chat_template_kwargs")
        try:
            tokens = self._chat.tokens(messages, tools=tools, variables=variables, **options)
            text = self._chat.text(messages, tools=tools, variables=variables, **options) if tools else ""
        except RequestError as error:
            raise bad_request(str(error), "messages") from error
        if images and sum(token == self._info.image_token for token in tokens) != len(images):
            raise bad_request("the chat template gave the images no place each; is it that of a vision model?", "messages")
        return Prompt(tokens, images, text)

    def _message(self, index: int, message: Message, images: list[Media]) -> dict[str, Any]:
        """A message as templates know them; its images are appended to ``images``."""
        where = f"messages[{index}]"
        for name in ("audio", "function_call"):
            if getattr(message, name) is not None:
                raise bad_request(f"{where}.{name} isn't served", f"{where}.{name}")
        made = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
        if message.role == "developer" and self._chat is not None and "developer" not in self._chat.source:
            made["role"] = "system"
        if isinstance(message.content, list):
            made["content"] = self._content(where, message.content, images)
        elif message.content is not None:
            made["content"] = message.content
        elif message.role == "assistant":
            made["content"] = ""
        else:
            raise bad_request(f"{where} has no content", f"{where}.content")
        if message.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        return made

    def _content(self, where: str, parts: Sequence[Part], images: list[Media]) -> str | list[dict[str, str]]:
        """The parts of a message: one text where there are no images, which all templates know."""
        made: list[dict[str, str]] = []
        for number, part in enumerate(parts):
            at = f"{where}.content[{number}]"
            if part.type == "image_url":
                if part.image_url is None:
                    raise bad_request(f"{at} has no image_url", f"{at}.image_url")
                images.append(self._image(part.image_url.url, f"{at}.image_url.url", len(images)))
                made.append({"type": "image"})
                continue
            text = {"text": part.text, "refusal": part.refusal}.get(part.type)
            if text is None:
                raise bad_request(f"{at} is of the type {part.type}, which isn't served, or lacks its text", at)
            made.append({"type": "text", "text": text})
        if any(part["type"] == "image" for part in made):
            return made
        return "\n".join(part["text"] for part in made)

    def _image(self, url: str, where: str, before: int) -> Media:
        if self._processor is None:
            raise bad_request("this is a model of text alone; it can't see images", where)
        if before >= _MOST_IMAGES:
            raise bad_request(f"more than {_MOST_IMAGES} images in a request", where)
        try:
            return self._processor.image(_picture(_data_of(url, where), where))
        except RequestError as error:
            raise bad_request(str(error), where) from error


def prompt_size(given: str | list[str] | list[int] | list[list[int]]) -> int:
    """Characters of the prompts of a completion that have to be tokenised."""
    if isinstance(given, str):
        return len(given)
    return sum(len(each) for each in given if isinstance(each, str))


def _data_of(url: str, where: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise bad_request("expected an image as a data URL, data:image/…;base64,…; the server fetches nothing", where)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"the image's base64 can't be read: {error}", where) from error


def _picture(data: bytes, where: str) -> Any:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            if picture.width * picture.height > (Image.MAX_IMAGE_PIXELS or 1 << 26):
                raise bad_request(f"the image has {picture.width} x {picture.height} pixels, which is too many", where)
            return picture.convert("RGB")
    except ApiError:
        raise
    except Exception as error:  # readers of image formats raise what they like
        raise bad_request(f"the image can't be read: {one_line(str(error))}", where) from error


def _arguments(text: str) -> Any:
    """Templates write the arguments of a call from an object; what isn't one stays as it is."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def _check_response_template(template: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigError` for one that transformers can't read."""
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
        return None  # the text of a vision model can be asked for without
