"""ChatTemplate: renders messages to prompt tokens with the template of a checkpoint. Also reads the JSON of messages."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from outrider.device import ConfigError
from outrider.errors import CheckpointError, RequestError, one_line, shown
from outrider.model.checkpoint.files import present, read_json, wrap_read_errors

_TEMPLATE_FILE, _LEGACY_FILE = "chat_template.jinja", "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of a checkpoint that holds further named templates."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE_KEY = "chat_template"
_DEFAULT_TEMPLATE, _TOOL_TEMPLATE = "default", "tool_use"
"""Names that transformers gives to the template without tools and to the template with tools."""
_MAX_DEPTH = 200
"""Maximum nesting of a JSON object. pydantic can write out 255 levels."""


class ChatTemplate:
    """A checkpoint's chat template, rendered by transformers. Immutable after construction, so threads may share it.

    ``source`` is the Jinja template. ``with_tools`` is the template of conversations with tools; None means ``source``.
    ``response_template`` is the checkpoint's format of tool calls as transformers parses it, or None. Raises
    :class:`ConfigError` for an invalid template.
    """

    def __init__(self, tokenizer: Any, source: str, with_tools: str | None = None) -> None:
        if "sanitize_control_tokens" not in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ConfigError(
                "this release of transformers takes control tokens within messages for real ones; expected 5.20 or newer: "
                "pip install 'transformers>=5.20'"
            )
        for text in (source,) if with_tools is None else (source, with_tools):
            _check_is_jinja(text)
        self._tokenizer = tokenizer
        self.source = source
        self.tool_source = source if with_tools is None else with_tools
        """The Jinja template of conversations with tools."""
        self.response_template: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
        control = sorted(_control_tokens(tokenizer, f"{self.source}\0{self.tool_source}"), key=len, reverse=True)
        self._longest_control_token = len(control[0]) if control else 0
        self._control_tokens = re.compile("|".join(map(re.escape, control)) or "(?!)")

    @classmethod
    def from_checkpoint(cls, directory: Path, *, source: str | None = None) -> ChatTemplate | None:
        """Return the checkpoint's template, or one made from ``source`` if given. Return None if there is neither.

        If the checkpoint has several templates, the one named ``default`` is used, and ``tool_use`` for conversations with
        tools. Code of the checkpoint is never executed. Raises :class:`CheckpointError` if the tokenizer or its template is
        unreadable, and :class:`ConfigError` if ``source`` is not a Jinja template.
        """
        if source is not None:
            return cls(_tokenizer(directory), source)
        if not _has_template(directory):
            return None
        tokenizer = _tokenizer(directory)
        found = getattr(tokenizer, _TEMPLATE_KEY, None)
        origin = _TOKENIZER_CONFIG if not present(directory / _TEMPLATE_FILE) else _TEMPLATE_FILE
        if not found and origin == _TOKENIZER_CONFIG:
            found = None  # an empty entry in the config means no template; an empty template file is an error
        if found is None and present(directory / _LEGACY_FILE):
            found, origin = read_json(directory / _LEGACY_FILE).get(_TEMPLATE_KEY), _LEGACY_FILE
        if found is None:
            return None
        with wrap_read_errors(directory / origin, "a chat template", "--chat-template FILE gives another one"):
            return cls(tokenizer, *_default_and_tool_template(found))

    def tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation. ``variables`` are additional variables of the template.

        Each message is an object with ``role`` and ``content``. Text in a message that spells a control token is tokenized as
        text. ``add_generation_prompt`` appends the beginning of the assistant's next message; ``continue_final_message``
        leaves the last message open instead. Raises :class:`RequestError` if the template rejects the messages or renders no
        tokens, and for a control token in the name of a field.
        """
        # transformers makes whole control tokens in values to text, in no key and not across the parts of a content.
        self._check_names(list(messages), tools and list(tools), variables)
        messages = [self._join_control_tokens(message) for message in messages]
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        tokens = self._apply(
            messages, tools, {"tokenize": True, "return_dict": False, "sanitize_control_tokens": True} | options, variables
        )
        if not tokens:
            raise RequestError("the chat template made nothing of the messages")
        return [int(token) for token in tokens]

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the rendered conversation as text. Arguments and errors are those of :meth:`tokens`."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return str(self._apply(messages, tools, {"tokenize": False} | options, variables))

    def _check_names(self, *values: object) -> None:
        """Raise :class:`RequestError` if the name of a field within ``values`` spells a control token."""
        unchecked = list(values)
        while unchecked:
            value = unchecked.pop()
            if isinstance(value, Mapping):
                for name in value:
                    if found := self._control_tokens.search(str(name)):
                        raise RequestError(f"the name {shown(name)} has the control token {found[0]!r}; name it otherwise")
                unchecked += value.values()
            elif isinstance(value, list | tuple):
                unchecked += value

    def _join_control_tokens(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``message`` with neighbouring texts of its content as one if they spell a control token together."""
        if not isinstance(content := message.get("content"), list):
            return message
        parts: list[Any] = []
        for is_text, group in groupby(content, lambda part: isinstance(part, dict) and isinstance(part.get("text"), str)):
            found = list(group)
            texts = [part["text"] for part in found] if is_text else []
            parts += [{**found[0], "text": "".join(texts)}] if self._spell_control_token(texts) else found
        return {**message, "content": parts}

    def _spell_control_token(self, texts: Sequence[str]) -> bool:
        """Return True if a control token begins in one of ``texts``, which follow each other, and ends in a later one."""
        whole, longest = "".join(texts), self._longest_control_token
        # A search of long texts would take a second for a tokenizer with a thousand control tokens.
        return any(
            (token := self._control_tokens.match(whole, start)) is not None and token.end() > end
            for end in accumulate(map(len, texts[:-1]))
            for start in range(max(0, end - longest + 1), end)
        )

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        variables: Mapping[str, Any] | None,
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools or None,
                chat_template=self.tool_source if tools else self.source,
                **options,
                **(variables or {}),
            )
        except Exception as error:  # a template may raise anything
            if _has_half_characters(messages):
                raise RequestError("half a character (a lone surrogate) is in the messages; expected Unicode text") from error
            raise RequestError(f"the chat template refused the messages: {one_line(str(error))}") from error


def _control_tokens(tokenizer: Any, templates: str) -> set[str]:
    """Return the tokens of ``tokenizer`` that control a conversation: special ones, and those that it lists for chats, by
    default those in the text of ``templates``. A word there may be code of the template, and names may have it.
    """
    listed = getattr(tokenizer, "chat_control_tokens", None)
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
    if listed is None:
        listed = [text for text in added if text in templates and not text.isidentifier()]
    return {text for text, is_special in added.items() if is_special or text in listed}


def _has_template(directory: Path) -> bool:
    if any(present(directory / name) for name in (_TEMPLATE_FILE, _LEGACY_FILE)) or (directory / MORE_TEMPLATES).is_dir():
        return True
    config = directory / _TOKENIZER_CONFIG
    return present(config) and _TEMPLATE_KEY in read_json(config)


def _default_and_tool_template(found: object) -> tuple[str, str | None]:
    """Return the default template and the template for tools from ``found``: one template, or several by name."""
    by_name = found if isinstance(found, dict) else {_DEFAULT_TEMPLATE: found}
    if _DEFAULT_TEMPLATE not in by_name:
        raise ConfigError(
            f"has the chat templates {', '.join(sorted(map(str, by_name)))}, and none that is called {_DEFAULT_TEMPLATE}; "
            "give the one that you mean with --chat-template FILE"
        )
    template, tools = by_name[_DEFAULT_TEMPLATE], by_name.get(_TOOL_TEMPLATE)
    if not isinstance(template, str) or not isinstance(tools, str | None):
        wrong = tools if isinstance(template, str) else template
        raise ConfigError(f"its chat template is {shown(wrong)}, expected a text in Jinja")
    return template, tools


def _check_is_jinja(source: str) -> None:
    """Raise :class:`ConfigError` if ``source`` is empty or not a Jinja template."""
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
    """Return True if a message contains a lone surrogate, which JSON can express but UTF-8 cannot encode."""
    try:
        json.dumps(messages, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return True
    except (TypeError, ValueError):
        pass
    return False


def _tokenizer(directory: Path) -> Any:
    """Return transformers' tokenizer, which renders chat templates. Code of the checkpoint is never executed."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{directory}: its tokenizer can't be read for chats: {type(error).__name__}: {one_line(str(error))}"
        ) from error


# -- JSON of messages ------------------------------------------------------------------------------------------------


def check_json(value: Any) -> Any:
    """Return ``value``. Raises ValueError for a number in it that JSON lacks, and for too much nesting."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise ValueError("a number is NaN or infinite, which isn't JSON")
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def read_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that ``text`` is, or None for other text, numbers that aren't finite, and too much nesting."""
    try:
        value = check_json(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def call_arguments(text: str) -> Any:
    """Return the arguments of a tool call as an object, which chat templates expect. An empty text stands for no arguments.
    Text that is no JSON object is returned unchanged.
    """
    arguments = read_object(text.strip() or "{}")
    return text if arguments is None else arguments
