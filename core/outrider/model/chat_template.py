"""ChatTemplate: from the messages of a conversation to the tokens of a prompt, by the checkpoint's own template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.device import ConfigError
from outrider.errors import CheckpointError, RequestError, one_line

_FILES = ("chat_template.jinja", "chat_template.json")
_CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """A checkpoint's chat template, filled in by transformers. Immutable after construction; may be shared by threads.

    ``source`` is the template itself, in Jinja. ``response_template`` is what the checkpoint says of how calls of tools are
    written, as transformers has it; None where it says nothing.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        if "sanitize_control_tokens" not in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ConfigError(
                "this release of transformers takes control tokens within messages for real ones; expected 5.20 or newer: "
                "pip install 'transformers>=5.20'"
            )
        self._tokenizer = tokenizer
        self.source = source
        self.response_template: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)

    @classmethod
    def from_checkpoint(cls, directory: Path, *, source: str | None = None) -> ChatTemplate | None:
        """The template of a checkpoint, or ``source`` in its place; None where there is neither.

        No code of the checkpoint is run. Raises :class:`CheckpointError` where its tokenizer can't be read.
        """
        if source is None and not _has_template(directory):
            return None
        tokenizer = _tokenizer(directory)
        found = source or getattr(tokenizer, "chat_template", None)
        return None if found is None else cls(tokenizer, found)

    def tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. ``variables`` are those that the template knows beside the usual ones.

        A message is an object with a ``role`` and its ``content``. What is spelled like a control token within a message
        becomes text. Raises :class:`RequestError` where the template refuses the messages, or makes nothing of them.
        """
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        found = self._apply(
            messages, tools, {"tokenize": True, "return_dict": False, "sanitize_control_tokens": True} | how, variables
        )
        if not found:
            raise RequestError("the chat template made nothing of the messages")
        return [int(token) for token in found]

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The same conversation as text. Raises as :meth:`tokens` does."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return str(self._apply(messages, tools, {"tokenize": False} | how, variables))

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        how: Mapping[str, Any],
        variables: Mapping[str, Any] | None,
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools or None, chat_template=self.source, **how, **(variables or {})
            )
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template refused the messages: {one_line(str(error))}") from error


def _has_template(directory: Path) -> bool:
    if any((directory / name).is_file() for name in _FILES):
        return True
    config = directory / _CONFIG
    try:
        return config.is_file() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))
    except ValueError:
        return False


def _tokenizer(directory: Path) -> Any:
    """Transformers' tokenizer, which knows how to fill in a chat template. No code of the checkpoint is run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{directory}: its tokenizer can't be read for chats: {type(error).__name__}: {one_line(str(error))}"
        ) from error
