"""ChatTemplate: from the messages of a conversation to the tokens of a prompt, by the checkpoint's own template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.device import ConfigError
from outrider.errors import CheckpointError, RequestError, one_line, shown
from outrider.model.reading import present, read_json, reading

_FILE, _OLDER = "chat_template.jinja", "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of a checkpoint with those that are for some conversations."""
_CONFIG = "tokenizer_config.json"
_KEY = "chat_template"
_USUAL, _TOOLS = "default", "tool_use"
"""What transformers calls the template of a conversation, and of one with tools, where there are several."""


class ChatTemplate:
    """A checkpoint's chat template, filled in by transformers. Immutable after construction; may be shared by threads.

    ``source`` is the template itself, in Jinja; ``with_tools`` that of conversations with tools, None: the same.
    ``response_template`` is what the checkpoint says of how calls of tools are written, as transformers has it; None where it
    says nothing. Raises :class:`ConfigError` for a template that isn't one.
    """

    def __init__(self, tokenizer: Any, source: str, with_tools: str | None = None) -> None:
        if "sanitize_control_tokens" not in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ConfigError(
                "this release of transformers takes control tokens within messages for real ones; expected 5.20 or newer: "
                "pip install 'transformers>=5.20'"
            )
        for text in (source,) if with_tools is None else (source, with_tools):
            _check(text)
        self._tokenizer = tokenizer
        self.source = source
        self._with_tools = source if with_tools is None else with_tools
        self.response_template: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)

    @classmethod
    def from_checkpoint(cls, directory: Path, *, source: str | None = None) -> ChatTemplate | None:
        """The template of a checkpoint, or ``source`` in its place; None where there is neither.

        Of several templates of a checkpoint it's the one called ``default``, and with tools the one called ``tool_use``.
        No code of the checkpoint is run. Raises :class:`CheckpointError` where its tokenizer or its template can't be read,
        :class:`ConfigError` for a ``source`` that is no template.
        """
        if source is not None:
            return cls(_tokenizer(directory), source)
        if not _has_template(directory):
            return None
        tokenizer = _tokenizer(directory)
        found = getattr(tokenizer, _KEY, None)
        origin = _CONFIG if not present(directory / _FILE) else _FILE
        if not found and origin == _CONFIG:
            found = None  # nothing there says that there is none; an empty file is a mistake
        if found is None and present(directory / _OLDER):
            found, origin = read_json(directory / _OLDER).get(_KEY), _OLDER
        if found is None:
            return None
        with reading(directory / origin, "a chat template", "--chat-template FILE gives another one"):
            return cls(tokenizer, *_chosen(found))

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
                list(messages),
                tools=tools or None,
                chat_template=self._with_tools if tools else self.source,
                **how,
                **(variables or {}),
            )
        except Exception as error:  # templates raise what they like
            if _has_half_characters(messages):
                raise RequestError("the messages have half a character (a lone surrogate); expected Unicode text") from error
            raise RequestError(f"the chat template refused the messages: {one_line(str(error))}") from error


def _has_template(directory: Path) -> bool:
    if any(present(directory / name) for name in (_FILE, _OLDER)) or (directory / MORE_TEMPLATES).is_dir():
        return True
    config = directory / _CONFIG
    return present(config) and _KEY in read_json(config)


def _chosen(found: object) -> tuple[str, str | None]:
    """The template of a conversation, and that of one with tools, of what a checkpoint has: a text, or several by name."""
    several = found if isinstance(found, dict) else {_USUAL: found}
    if _USUAL not in several:
        raise ConfigError(
            f"has the chat templates {', '.join(sorted(map(str, several)))}, and none that is called {_USUAL}; give the one "
            "that you mean with --chat-template FILE"
        )
    usual, tools = several[_USUAL], several.get(_TOOLS)
    if not isinstance(usual, str) or not isinstance(tools, str | None):
        wrong = tools if isinstance(usual, str) else usual
        raise ConfigError(f"its chat template is {shown(wrong)}, expected a text in Jinja")
    return usual, tools


def _check(source: str) -> None:
    """Raise :class:`ConfigError` for what Jinja can't read as a template, and for nothing."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if not source.strip():
        raise ConfigError("the chat template is empty; expected a text in Jinja that writes out the messages")
    try:
        render_jinja_template(conversations=[], chat_template=source)
    except ImportError as error:
        raise ConfigError(f"chat templates need a newer jinja2: {one_line(str(error))}") from error
    except Exception as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f"line {line}: "
        raise ConfigError(f"the chat template can't be read as Jinja: {where}{one_line(str(error))}") from error


def _has_half_characters(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some text in them isn't Unicode: JSON can spell half of a character."""
    try:
        json.dumps(messages, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    except (TypeError, ValueError):
        pass
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
