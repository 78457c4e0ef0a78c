"""The table of formats by model family, and the choice of a format for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import regex

from outrider.device import ConfigError

_JSON_NAME = r'"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
NAMED_ARGUMENTS = regex.compile(rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?{_JSON_NAME}(?=\{{)')
"""Start of a JSON object that is a call: everything before the object of the arguments."""
_PROMPT_TAIL = 256
"""Characters at the end of a prompt in which the start of reasoning is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRegion:
    """One kind of region in a model's text, such as the reasoning or a tool call.

    All regular expressions match a text as soon as they have it: none ends with an optional part.
    """

    kind: Literal["content", "reasoning", "call"]
    starts: tuple[str, ...]
    """Literals with which ``head`` may begin."""
    head: str
    """Regular expression of the text from the start to the body. The groups ``name`` and ``id`` are those of a call."""
    body: Literal["text", "json", "object", "parameters", "pairs"] = "text"
    """What follows the head.

    - ``text``: reasoning up to one of ``ends``; content up to the next region.
    - ``json``: the arguments, a JSON object.
    - ``object``: a JSON object with the name and the arguments.
    - ``parameters``: one tagged value for each argument, up to one of ``ends``.
    - ``pairs``: an object whose keys have no quotes and whose texts stand between ``ends[0]``.
    """
    ends: tuple[str, ...] = ()
    """Literals that end reasoning, or regular expressions that end a call with ``parameters``."""
    parameter: str = ""
    """Regular expression before a tagged value. The group ``key`` is its name; ``text`` matches if it is text."""
    value_ends: tuple[str, ...] = ()
    """Literals after a tagged value. If one begins with a line break, the value's first line break isn't part of it."""
    again: str = ""
    """Regular expression between this call and the next ``object``."""
    tails: tuple[str, ...] = ()
    """Regular expressions of text after a call that belongs to it. Each may be absent."""
    only_first: bool = False
    """True if the region must begin the answer."""


def _call(*starts: str, **fields: object) -> FormatRegion:
    return FormatRegion(kind="call", starts=starts, **fields)  # type: ignore[arg-type]


def _reasoning(start: str, *ends: str) -> tuple[FormatRegion, ...]:
    return (FormatRegion(kind="reasoning", starts=(start,), head=regex.escape(start), ends=ends),)


def _marker(*literals: str) -> FormatRegion:
    """Return a region that leaves out control tokens and goes on with content."""
    return FormatRegion(kind="content", starts=literals, head="|".join(map(regex.escape, literals)))


_DSML = r"<｜DSML｜invoke name=\"(?P<name>[^\"]{1,256})\">"
_KIMI_CALL = (
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256}):\d+)\s*<\|tool_call_argument_begin\|>\s*"
)
_DEEPSEEK_NAME = r"(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]{1,256})(?:<｜tool▁sep｜>|\s*```json)\s*"
_HARMONY_RECIPIENT = r" ?to=(?:functions\.)?(?P<name>[^\s<]{1,256})"

_HERMES = (_call("<tool_call>", head=r"<tool_call>\s*(?=\{)", body="object", tails=(r"\s*</tool_call>",)),)
_QWEN_XML = (
    _call(
        "<tool_call>",
        "<function=",
        head=r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]{1,256})>",
        body="parameters",
        parameter=r"<parameter=(?P<key>[^>\n]{1,256})>",
        value_ends=("\n</parameter>", "</parameter>"),
        ends=(r"</function>",),
        tails=(r"\s*</tool_call>",),
    ),
)
TOOL_FORMATS: Mapping[str, tuple[FormatRegion, ...]] = {
    "none": (),
    "json": (_call("[", head=r"\[\s*(?=\{)", body="object", again=r"\s*,\s*(?=\{)", tails=(r"\s*\]",), only_first=True),),
    "hermes": _HERMES,
    "qwen3": _HERMES,
    "qwen3-coder": _QWEN_XML,
    "qwen3-xml": _QWEN_XML,
    "mistral": (
        _call("[TOOL_CALLS]", head=r"\[TOOL_CALLS\]\s*\[\s*(?=\{)", body="object", again=r"\s*,\s*(?=\{)", tails=(r"\s*\]",)),
        _call(
            "[TOOL_CALLS]",
            head=r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]{1,256})(?:\[CALL_ID\](?P<id>[\w-]{1,64}))?(?:\[ARGS\])?\s*(?=\{)",
            body="json",
        ),
    ),
    "llama3": (
        _call("<|python_tag|>", head=r"<\|python_tag\|>\s*(?=\{)", body="object", again=r"\s*[;,]\s*(?=\{)"),
        _call("{", head=rf"(?={NAMED_ARGUMENTS.pattern})", body="object", again=r"\s*[;,]\s*(?=\{)", only_first=True),
    ),
    "deepseek": (
        _call(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            head=rf"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>{_DEEPSEEK_NAME}(?=\{{)",
            body="json",
            tails=(r"\s*```", r"\s*<｜tool▁call▁end｜>", r"\s*<｜tool▁calls▁end｜>"),
        ),
        _call(
            "<｜DSML｜function_calls>",
            "<｜DSML｜tool_calls>",
            "<｜DSML｜invoke",
            head=rf"(?:<｜DSML｜(?:function|tool)_calls>\s*)?{_DSML}",
            body="parameters",
            parameter=r"<｜DSML｜parameter name=\"(?P<key>[^\"]{1,256})\"(?: string=\"(?:(?P<text>true)|false)\")?>",
            value_ends=("</｜DSML｜parameter>",),
            ends=(r"</｜DSML｜invoke>",),
            tails=(r"\s*</｜DSML｜(?:function|tool)_calls>",),
        ),
    ),
    "glm": (
        _call(
            "<tool_call>",
            head=r"<tool_call>\s*(?P<name>[^\s<{]{1,256})(?=\s*(?:<arg_key>|</tool_call>))",
            body="parameters",
            parameter=r"<arg_key>\s*(?P<key>[^<\n]{1,256})\s*</arg_key>\s*<arg_value>",
            value_ends=("</arg_value>",),
            ends=(r"</tool_call>",),
        ),
    ),
    "kimi": (
        _call(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            head=rf"(?:<\|tool_calls_section_begin\|>\s*)?{_KIMI_CALL}(?=\{{)",
            body="json",
            tails=(r"\s*<\|tool_call_end\|>", r"\s*<\|tool_calls_section_end\|>"),
        ),
    ),
    "kimi-k3": (
        _call(
            "<|open|>tools<|sep|>",
            "<|open|>call",
            head=r"(?:<\|open\|>tools<\|sep\|>\s*)?<\|open\|>call tool=\"(?P<name>[^\"]{1,256})\"[^<]{0,64}<\|sep\|>",
            body="parameters",
            parameter=r"<\|open\|>argument key=\"(?P<key>[^\"]{1,256})\"(?: type=\"(?:(?P<text>string)|\w*)\")?<\|sep\|>",
            value_ends=("<|close|>argument<|sep|>",),
            ends=(r"<\|close\|>call<\|sep\|>",),
            tails=(r"\s*<\|close\|>tools<\|sep\|>",),
        ),
    ),
    "minimax": (
        _call(
            "<minimax:tool_call>",
            "<invoke name=",
            head=r"(?:<minimax:tool_call>\s*)?<invoke name=\"?(?P<name>[^\">]{1,256})\"?>",
            body="parameters",
            parameter=r"<parameter name=\"?(?P<key>[^\">]{1,256})\"?>",
            value_ends=("</parameter>",),
            ends=(r"</invoke>",),
            tails=(r"\s*</minimax:tool_call>",),
        ),
    ),
    "gemma": (
        _call(
            "<|tool_call>",
            head=r"<\|tool_call>\s*call:(?P<name>[^\s{<]{1,256})(?=\{)",
            body="pairs",
            ends=('<|"|>',),
            tails=(r"\s*<tool_call\|>",),
        ),
    ),
    "functiongemma": (
        _call(
            "<start_function_call>",
            head=r"<start_function_call>\s*call:(?P<name>[^\s{<]{1,256})(?=\{)",
            body="pairs",
            ends=("<escape>",),
            tails=(r"\s*<end_function_call>",),
        ),
    ),
    "harmony": (
        _call(
            "<|start|>assistant",
            "<|channel|>",
            " to=",
            head=rf"(?:<\|start\|>assistant)?<\|channel\|>(?:commentary|analysis){_HARMONY_RECIPIENT}[^<]{{0,64}}"
            r"(?:<\|constrain\|>\w{1,32})?\s*<\|message\|>\s*(?=\{)",
            body="json",
            tails=(r"\s*<\|call\|>",),
        ),
        _call(
            "<|start|>assistant",
            " to=",
            head=rf"(?:<\|start\|>assistant)?{_HARMONY_RECIPIENT}<\|channel\|>(?:commentary|analysis)[^<]{{0,64}}"
            r"(?:<\|constrain\|>\w{1,32})?\s*<\|message\|>\s*(?=\{)",
            body="json",
            tails=(r"\s*<\|call\|>",),
        ),
    ),
}
"""Regions of tool calls by the name of the format."""
REASONING_FORMATS: Mapping[str, tuple[FormatRegion, ...]] = {
    "none": (),
    "think": _reasoning("<think>", "</think>"),
    "mistral": _reasoning("[THINK]", "[/THINK]"),
    "gemma": _reasoning("<|channel>thought\n", "<channel|>"),
    "kimi-k3": (
        *_reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        _marker("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "harmony": (
        FormatRegion(
            kind="reasoning",
            starts=("<|start|>assistant", "<|channel|>"),
            head=r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            ends=("<|end|>",),
        ),
        FormatRegion(
            kind="content",
            starts=("<|start|>assistant", "<|channel|>"),
            head=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)[^<]{0,64}(?:<\|constrain\|>\w{1,32})?<\|message\|>",
        ),
        _marker("<|end|>", "<|return|>", "<|call|>"),
    ),
}
"""Regions of reasoning, and of control tokens around content, by the name of the format."""
_FORMAT_MARKS = (
    ("harmony", "harmony", ("<|channel|>", "<|message|>")),
    ("kimi-k3", "kimi-k3", ("<|open|>", "<|sep|>")),
    ("kimi", "think", ("<|tool_calls_section_begin|>",)),
    ("deepseek", "think", ("<｜tool▁calls▁begin｜>",)),
    ("deepseek", "think", ("｜DSML｜",)),
    ("minimax", "think", ("<minimax:tool_call>",)),
    ("gemma", "gemma", ("<|tool_call>",)),
    ("functiongemma", "none", ("<start_function_call>",)),
    ("glm", "think", ("<arg_key>",)),
    ("qwen3-coder", "think", ("<function=", "<parameter=")),
    ("hermes", "think", ("<tool_call>",)),
    ("mistral", "mistral", ("[TOOL_CALLS]",)),
    ("llama3", "none", ("<|start_header_id|>", "parameters")),
    ("none", "think", ("<think>",)),
    ("none", "mistral", ("[THINK]",)),
)
"""Tool format, reasoning format, and the texts of a chat template that has them. The first match counts."""


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The regions in the text of one model."""

    tool_format: str
    reasoning_format: str

    @property
    def regions(self) -> tuple[FormatRegion, ...]:
        """All regions, calls first: their heads are more specific."""
        return TOOL_FORMATS[self.tool_format] + REASONING_FORMATS[self.reasoning_format]

    @property
    def literals(self) -> str:
        """A text that contains each literal of the regions, such as the spelling of special tokens."""
        patterns = [
            pattern
            for region in self.regions
            for pattern in (*region.starts, region.head, *region.ends, region.parameter, *region.value_ends, *region.tails)
        ]
        return "\n".join(patterns + [regex.sub(r"\\(.)", r"\1", pattern) for pattern in patterns])

    def open_reasoning(self, prompt: str) -> FormatRegion | None:
        """Return the region of the reasoning in which ``prompt`` ends, or None if it ends elsewhere."""
        tail = prompt[-_PROMPT_TAIL:]
        reasoning = (region for region in self.regions if region.kind == "reasoning")
        return next((region for region in reasoning if regex.search(rf"(?:{region.head})\s*\Z", tail)), None)


def choose_format(tool_format: str | None, reasoning_format: str | None, chat_template: str) -> ModelFormat:
    """Return the format of a model. None stands for the format that the chat template shows.

    Raises :class:`ConfigError` for an unknown name.
    """
    for option, name, known in (
        ("--tool-format", tool_format, TOOL_FORMATS),
        ("--reasoning-format", reasoning_format, REASONING_FORMATS),
    ):
        if name is not None and name not in known:
            raise ConfigError(f"{option} is {name!r}; expected one of {', '.join(known)}")
    shown = next((row for row in _FORMAT_MARKS if all(mark in chat_template for mark in row[2])), ("none", "none", ()))
    return ModelFormat(tool_format or shown[0], reasoning_format or shown[1])
