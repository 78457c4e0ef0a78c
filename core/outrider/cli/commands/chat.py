"""``outrider chat``: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from outrider.cli.commands.generate import StreamedOutput
from outrider.cli.options.models import launched
from outrider.cli.options.option_records import (
    ChatTemplateOption,
    MaxTokensOption,
    ModelOptions,
    SamplingOptions,
    find_template,
    read_template,
    with_options,
)
from outrider.cli.options.option_values import JsonOption, checking_options, option, text
from outrider.cli.terminal.files import MAX_BYTES, check_utf8
from outrider.cli.terminal.report import CommandReport, Interrupted, PartialResultError, highlighter, note
from outrider.cli.terminal.stopping import SignalStop
from outrider.cli.terminal.torch_probe import require_torch
from outrider.device.errors import OutriderError
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.model.media.chat_template import ChatTemplate

_PROMPT, _CONTINUATION_PROMPT, _QUOTES = "> ", ". ", '"""'
_HELP = (
    "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer; a message of several lines stands "
    'between """ and """'
)


@with_options
def chat(
    *,
    system: Annotated[str | None, option("--system", value=text(), help="System message, before the conversation.")] = None,
    chat_template: ChatTemplateOption = None,
    max_tokens: MaxTokensOption = 1024,
    options: ModelOptions,
    sampling: SamplingOptions,
    json_output: JsonOption = False,
) -> CommandReport:
    """Talk with a model. /reset forgets the conversation, /exit ends it; Ctrl-C ends an answer. From a pipe, each line is a
    message.
    """
    with checking_options():
        sampling.params(max_tokens=max_tokens)
        given_template = None if chat_template is None else read_template(chat_template)
    require_torch()
    speculation = options.speculation()
    template = find_template(speculation.model, given_template)
    with closing(options.loader(speculation, max_requests=1)()) as engine:
        terminal = not json_output and sys.stdin.isatty() and sys.stdout.isatty()
        conversation = _Conversation(engine, template, sampling, max_tokens, system, terminal)

        def conversation_data() -> dict[str, object]:
            return {
                "messages": conversation.messages,
                "answers": [answer.data(engine) for answer in conversation.answers],
                "prefix_hits": engine.stats.prefix_hits,
                "speculate": speculation.kind,
                **launched(engine),
            }

        try:
            failed = _answer_messages(conversation, None if json_output else _write)
        except OutriderError as error:
            raise PartialResultError(error, conversation_data()) from error
        except KeyboardInterrupt as error:
            raise Interrupted(str(error), conversation_data()) from None
        data = conversation_data()
    if failed is not None:
        data["error"] = failed

    def render(console: Console) -> None:
        if failed is not None:
            console.print(f"outrider: error: {failed}; the text before it is valid", style="bold red", markup=False)

    return CommandReport(data=data, render=render, exit_code=0 if failed is None else 1, streamed=True)


@dataclass(slots=True)
class _Interrupts:
    """The handler of Ctrl-C in a conversation.

    While an answer is written, the first Ctrl-C ends the answer and a second one ends the command. At the prompt of a
    terminal, Ctrl-C drops the line. While a pipe is read, Ctrl-C ends the command.
    """

    terminal: bool
    reading: bool = False
    requested: bool = False
    """True once an interrupt has requested the end of the current answer."""

    def __call__(self) -> bool:
        if self.reading:
            if self.terminal:
                raise _LineDropped
            return False
        before, self.requested = self.requested, True
        return not before

    def read_line(self, read: Callable[[], str]) -> str:
        """Return the line that ``read`` returns. Until then, Ctrl-C counts as typed at the prompt."""
        self.reading = True
        try:
            return read()
        finally:
            self.reading, self.requested = False, False


class _LineDropped(KeyboardInterrupt):
    """Raised when Ctrl-C at the prompt discards the line being typed."""


@dataclass(slots=True)
class _Conversation:
    """The messages of a conversation, and the engine that answers them. Each answer reuses the KV pages of earlier turns
    (prefix cache).
    """

    engine: Engine
    template: ChatTemplate
    sampling: SamplingOptions
    max_tokens: int
    system: str | None
    terminal: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[StreamedOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all messages of the conversation but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, message: str, write: Callable[[str], object] | None, ended: Callable[[], bool]) -> str | None:
        """Answer a message, and return the device error that ended the answer, or None.

        Raises :class:`RequestError`, and drops the message, if the conversation can't continue with it.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        tokens = self.template.tokens(messages)
        max_new_tokens = self.engine.longest_request - len(tokens)
        if max_new_tokens < 1:
            new_conversation = "begin a new one with /reset" if self.terminal else "put a line with /reset before it"
            raise RequestError(
                f"the conversation has {len(tokens)} tokens with this message, and the context holds "
                f"{self.engine.longest_request} with an answer; {new_conversation}, or give --max-context"
            )
        answer = StreamedOutput(tokens)
        self.answers.append(answer)  # an interrupted answer is recorded too
        try:
            params = self.sampling.params(max_tokens=min(self.max_tokens, max_new_tokens))
            answer.stream(self.engine, params, write, ended=ended, highlight=highlighter())
        except RequestError:
            self.answers.pop()
            raise
        if answer.text or not ended():  # an interrupted answer without text is dropped
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer.error


def _answer_messages(conversation: _Conversation, write: Callable[[str], object] | None) -> str | None:
    """Answer each message of standard input, and return the device error that ended the conversation, or None."""
    terminal = conversation.terminal
    interrupts = _Interrupts(terminal)
    stop = SignalStop.of_process()
    with ExitStack() as stack:
        if stop is not None:
            stack.enter_context(stop.interrupts(interrupts))
        if terminal:
            _print_note(_HELP)
        for line in _terminal_lines(interrupts) if terminal else _piped_lines(interrupts):
            if line == "/exit":
                break
            if line == "/reset":
                conversation.reset()
            elif line == "/help" or (terminal and line.startswith("/") and " " not in line):
                _print_note(_HELP)
            else:
                try:
                    error = conversation.answer(line, write, lambda: interrupts.requested)
                except RequestError as refused:
                    if not terminal:
                        raise
                    _print_note(str(refused))
                else:
                    if error is not None:
                        return error
    return None


def _terminal_lines(interrupts: _Interrupts) -> Iterator[str]:
    """Yield each message that a person types at the terminal's prompt, until the end of the input."""
    if find_spec("readline") is not None:
        import readline  # noqa: F401  (input() edits lines with it)
    while True:
        try:
            text = interrupts.read_line(lambda: input(_PROMPT)).strip()
            if text.startswith(_QUOTES):
                text = _read_quoted(text, lambda: interrupts.read_line(lambda: input(_CONTINUATION_PROMPT)))
        except EOFError:
            _write("\n")
            return
        except _LineDropped:
            _write("\n")
            _print_note(_HELP)
            continue
        try:
            check_utf8("the message", text)
        except RequestError as error:
            _print_note(str(error))
            continue
        if text:
            yield text


def _piped_lines(interrupts: _Interrupts) -> Iterator[str]:
    """Yield each line of standard input as a message. Lines between triple quotes are one message."""
    while line := interrupts.read_line(_piped_line):
        text = line.strip()
        if text.startswith(_QUOTES):
            text = _read_quoted(text, lambda: interrupts.read_line(_piped_line) or None)
        if text:
            yield text


def _piped_line() -> str:
    """Return the next line of standard input with its line end; an empty text at the end of the input."""
    line = sys.stdin.buffer.readline(MAX_BYTES + 1)
    if len(line) > MAX_BYTES:
        raise RequestError(f"standard input has a line of more than {MAX_BYTES >> 20} MiB; expected a message")
    try:
        return line.decode("utf-8-sig")  # editors of Windows begin files with a mark
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input isn't UTF-8 text: {error.reason} at byte {error.start} of a line") from None


def _read_quoted(first: str, more: Callable[[], str | None]) -> str:
    """Return a message between triple quotes, the first line of which is ``first``; ``more`` reads the next line.

    Raises :class:`RequestError` at the end of standard input before the closing quotes.
    """
    text = first.removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        line = more()
        if line is None:
            raise RequestError(f"the message begins with {_QUOTES}, and standard input ends without closing them")
        text = f"{text}\n{line.rstrip()}"
    return text.rstrip().removesuffix(_QUOTES).strip()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_note(text: str) -> None:
    """Print a note on standard error, apart from the text of the model."""
    note(f"outrider: {text}\n")
