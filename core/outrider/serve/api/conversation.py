"""Conversion between other APIs and chat requests: the parts of a conversation, the blocks of an answer, and its writer."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationError, model_validator

from outrider.errors import shown
from outrider.serve.api.request_fields import MAX_MESSAGES, ChatRequest, ListOf, NestedObject, StrictFields, check_names
from outrider.serve.api.response_writer import ResponseWriter
from outrider.serve.api.responses import ApiError, bad_request, encode_named_event, invalid_fields
from outrider.serve.api.service import ChoiceDelta, Generation

_SYSTEM_ROLES = ("system", "developer")
T = TypeVar("T")
ObjectList = ListOf[NestedObject]
"""A list of JSON objects. The first item of another type ends the validation, which bounds its cost."""
Conversation = Annotated[ObjectList, Field(max_length=MAX_MESSAGES)]
"""The messages or items of a conversation: at most ``MAX_MESSAGES`` JSON objects."""


class TranslatedRequest(StrictFields):
    """The base class of requests that become chat requests."""

    refused: ClassVar[Mapping[str, str]]
    """Fields for features that the server lacks, with the advice for the error message. A request may have them empty."""
    refusal_codes: ClassVar[Mapping[str, str]] = {}
    """Codes of the errors for refused fields, by the fields' names."""
    nested: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names of the fields of each nested object, by the object's path."""
    ignored: ClassVar[frozenset[str]]
    """Fields that are accepted and have no effect."""

    model: Annotated[str, Field(max_length=4096)]
    chat_template_kwargs: NestedObject | None = Field(None, description="A field of this server.")

    @model_validator(mode="before")
    @classmethod
    def _served_fields(cls, data: Any) -> Any:
        """Drop the fields without an effect. Raises :class:`ApiError` for a field that is refused, or unknown and nested."""
        if not isinstance(data, dict):
            return data
        for name, reason in cls.refused.items():
            if data.get(name) not in (None, False, [], {}):
                code = cls.refusal_codes.get(name, "unsupported_parameter")
                raise bad_request(f"{name} isn't served: {reason}", name, code)
        for path, names in cls.nested.items():
            nested: Any = data
            for part in path.split("."):
                nested = nested.get(part) if isinstance(nested, dict) else None
            if isinstance(nested, dict):
                check_names(nested, path, names)
        return {name: value for name, value in data.items() if name not in cls.refused and name not in cls.ignored}


class ConversationBuilder:
    """A builder of chat messages. Consecutive parts of the assistant become one message, as chat templates expect.

    ``messages`` has the messages so far, in the form of :class:`~outrider.serve.api.request_fields.ChatMessage`.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, content: str | list[dict[str, Any]]) -> None:
        """Append a message of the user. All messages of the system become the first message: many chat templates refuse a
        later one.
        """
        if role not in _SYSTEM_ROLES:
            self.messages.append({"role": role, "content": content})
        elif self.messages and self.messages[0]["role"] in _SYSTEM_ROLES:
            self.messages[0]["content"] += f"\n\n{_joined(content)}"
        else:
            self.messages.insert(0, {"role": role, "content": _joined(content)})

    def add_reasoning(self, text: str) -> None:
        """Append reasoning of the assistant, which precedes the text and the calls of its message."""
        message = self._assistant(lacking=("content", "tool_calls"))
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_answer(self, text: str) -> None:
        """Append a text of the assistant to the conversation's messages."""
        message = self._assistant(lacking=("tool_calls",))
        message["content"] = f"{message['content']}\n{text}" if "content" in message else text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Append a tool call of the assistant. ``arguments`` is JSON text."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, content: str | list[dict[str, Any]]) -> None:
        """Append the result of a tool call to the conversation's messages."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _assistant(self, lacking: Sequence[str] = ()) -> dict[str, Any]:
        """Return the last message if it is the assistant's and lacks the fields ``lacking``, else append and return a new
        one.
        """
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in lacking):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def text_part(text: str) -> dict[str, Any]:
    """Return a part of a chat message that has text."""
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, Any]:
    """Return a part of a chat message that has an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def function_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return the tool of a chat request for a function's name, description and parameters."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the chat request with these fields. Raises :class:`ApiError` that names the first invalid field."""
    try:
        return ChatRequest.model_validate(dict(fields))
    except ValidationError as error:
        raise invalid_fields(error.errors(include_url=False, include_input=False)) from error


def expect(value: Any, kind: type[T], field: str) -> T:
    """Return ``value`` if it is of the type ``kind``. Raises :class:`ApiError` that names ``field``."""
    if not isinstance(value, kind):
        names = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}
        raise bad_request(f"{field} is {shown(value)}; expected {names[kind]}", field, "invalid_value")
    return value


def expect_objects(value: Any, field: str) -> list[tuple[str, dict[str, Any]]]:
    """Return each object of the list ``value`` with the name of its field, such as ``input[2]``. Raises :class:`ApiError` for
    anything else.
    """
    listed = expect(value, list, field)
    return [(name, expect(each, dict, name)) for name, each in ((f"{field}[{i}]", each) for i, each in enumerate(listed))]


def compact_json(value: Any) -> str:
    """Return ``value`` as JSON text without spaces."""
    return json.dumps(value, separators=(",", ":"))


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


_FIELDS = (("reasoning_content", "reasoning"), ("content", "text"))
"""The field of a message delta, and the kind of block that collects the field's text."""


@dataclass(slots=True)
class OutputBlock:
    """A contiguous part of an answer that is all reasoning, all text, or one tool call."""

    kind: str
    """``reasoning``, ``text`` or ``call``."""
    index: int
    """Number of the block in the answer."""
    name: str = ""
    """Name of the called function."""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The block's text so far. For a tool call: its arguments as JSON text."""
        return "".join(self.pieces)


class BlockStep(NamedTuple):
    """One change of a block: it opens, gets text, or closes."""

    action: Literal["open", "add", "close"]
    block: OutputBlock
    text: str = ""


class BlockSplitter:
    """A splitter of message deltas into blocks. White space alone makes no block of text."""

    def __init__(self) -> None:
        self.blocks: list[OutputBlock] = []
        self._current: OutputBlock | None = None
        self._space = ("", "")
        """Kind of block and white space that :meth:`feed` holds back until text of that kind follows."""

    @property
    def has_calls(self) -> bool:
        """True if one of the blocks is a tool call."""
        return any(block.kind == "call" for block in self.blocks)

    def feed(self, delta: dict[str, Any]) -> Iterator[BlockStep]:
        """Yield the changes of the answer's blocks that one message delta causes."""
        for name, kind in _FIELDS:
            if text := delta.get(name):
                yield from self._add_text(kind, text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._open("call", function["name"], call["id"])
            if function["arguments"]:
                yield self._add(function["arguments"])

    def finish(self) -> Iterator[BlockStep]:
        """Yield the close of the open block. Call it once, at the end of the answer."""
        self._space = ("", "")
        if self._current is not None:
            yield BlockStep("close", self._current)
            self._current = None

    def _add_text(self, kind: str, text: str) -> Iterator[BlockStep]:
        if self._current is None or self._current.kind != kind:
            text = self._space[1] + text if self._space[0] == kind else text
            if not text.strip():
                self._space = (kind, text)
                return
            yield from self._open(kind)
        yield self._add(text)

    def _open(self, kind: str, name: str = "", call_id: str = "") -> Iterator[BlockStep]:
        yield from self.finish()
        self._current = OutputBlock(kind, len(self.blocks), name, call_id)
        self.blocks.append(self._current)
        yield BlockStep("open", self._current)

    def _add(self, text: str) -> BlockStep:
        assert self._current is not None
        self._current.pieces.append(text)
        return BlockStep("add", self._current, text)


class TranslatedWriter(ResponseWriter):
    """The answer to a request that became a chat request with one choice."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._splitter = BlockSplitter()

    async def write_whole(self) -> dict[str, Any]:
        """Return the answer once it has ended. Raises :class:`ApiError` if the generation fails."""
        async for _ in self._events():
            pass
        return self._answer()

    async def write_events(self) -> AsyncIterator[bytes]:
        """Yield the encoded events. An error becomes an event."""
        try:
            async for event in self._events():
                yield encode_named_event(event)
        except ApiError as error:
            yield encode_named_event(self._error_event(error))

    async def _message_deltas(self) -> AsyncIterator[tuple[dict[str, Any], ChoiceDelta]]:
        """Yield each delta of the message and the delta of the choice that it comes from."""
        async for deltas in self._generation.deltas():
            for delta in deltas:
                yield self._generation.read_message(delta), delta

    @abstractmethod
    def _events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the answer."""

    @abstractmethod
    def _answer(self) -> dict[str, Any]:
        """Return the whole answer, after the last event."""

    @abstractmethod
    def _error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the event for an error of the generation."""
