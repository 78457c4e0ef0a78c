"""Options of commands that chat, and the conversation that they describe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.options.option_values import INPUT_FILE, option
from outrider.cli.terminal.inputs import read_text
from outrider.errors import RequestError, shown

if TYPE_CHECKING:
    from outrider.model.media.chat_template import ChatTemplate

_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_MESSAGES = 10_000

ChatOption = Annotated[bool, option("--chat", help="Pass the prompt as a message, through the checkpoint's chat template.")]
MessagesOption = Annotated[
    Path | None,
    option(
        "--messages",
        value=INPUT_FILE,
        help='A conversation to answer, as JSON: [{"role": "user", "content": "…"}, …]; - is standard input.',
    ),
]
ChatTemplateOption = Annotated[
    Path | None, option("--chat-template", value=INPUT_FILE, help="A Jinja template in place of the checkpoint's.")
]


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """A prompt that is a conversation, put into words by the checkpoint's chat template."""

    messages: tuple[Mapping[str, Any], ...] | None
    """Messages of a file; None: the prompt of the command is the only message."""

    @classmethod
    def from_options(cls, chat: bool, messages: Path | None) -> ConversationPrompt | None:
        """Return the conversation, or None without ``--chat`` and ``--messages``. Raises :class:`RequestError`."""
        if not chat and messages is None:
            return None
        return cls(None if messages is None else read_messages(messages))

    def template(self, model: Path) -> ChatTemplate:
        """Return the chat template of ``model``. Raises :class:`RequestError` for a checkpoint without one."""
        return find_template(model, None)

    def tokens(self, template: ChatTemplate, prompt: str | Sequence[int], *, images: int) -> list[int]:
        """Return the tokens of the conversation. The prompt's message begins with placeholders for ``images`` images."""
        messages = self.messages
        if messages is None:
            content: Any = prompt
            if images:
                content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
            messages = ({"role": "user", "content": content},)
        return template.tokens(messages)


def find_template(model: Path, source: str | None) -> ChatTemplate:
    """Return the chat template of a checkpoint, or ``source`` in its place.

    Raises :class:`RequestError` for a checkpoint without a template or without a tokenizer.
    """
    from outrider.model.media.chat_template import ChatTemplate
    from outrider.model.media.tokenizer import has_tokenizer

    if not has_tokenizer(model):
        raise RequestError(f"{model} has no tokenizer, so it can't chat; outrider generate --token-ids takes token ids")
    found = ChatTemplate.from_checkpoint(model, source=source)
    if found is None:
        raise RequestError(
            f"{model} has no chat template: it continues texts, and wasn't made to answer messages; give it a template with "
            "outrider chat --chat-template FILE, choose a checkpoint that was trained to chat, or use outrider generate "
            "--prompt TEXT"
        )
    return found


def read_template(path: Path) -> str:
    """Read a Jinja template from a file. Raises :class:`RequestError` for a file that isn't UTF-8 text."""
    return read_text(path, "a chat template", _MAX_TEMPLATE_BYTES)


def read_messages(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Read the messages of a JSON file. Raises :class:`RequestError`, which names the first invalid message."""
    try:
        found = json.loads(read_text(path, "messages as JSON"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, list) or not 0 < len(found) <= _MAX_MESSAGES:
        raise RequestError(
            f"{path}: has {shown(found)}; expected a list of 1 to {_MAX_MESSAGES} messages: "
            '[{"role": "user", "content": "…"}]'
        )
    for index, message in enumerate(found):
        where = f"{path}: message {index}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} is {shown(message)}; expected an object with a role and its content")
        content = message.get("content")
        if content in (None, "") and message["role"] == "assistant":
            continue  # it may call tools instead
        if not isinstance(content, str | list) or not content:
            raise RequestError(f"{where}, of the role {shown(message['role'])}: content is {shown(content)}; expected a text")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise RequestError(
                    f"{where}: content[{number}] is {shown(part)}; expected an object with a type, such as "
                    '{"type": "text", "text": "…"}'
                )
    return tuple(found)
