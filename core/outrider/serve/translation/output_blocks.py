"""Blocks of an answer: the reasoning, the texts and the tool calls, in the order in which the model writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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
    def is_reasoning(self) -> bool:
        """True while the last block is reasoning."""
        return self._current is not None and self._current.kind == "reasoning"

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
