"""``outrider chat``: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli.answer import Answer
from outrider.cli.chat_options import ChatTemplateOption, find_template, read_template
from outrider.cli.engine_options import AnyModelOptions, with_options
from outrider.cli.images import Question
from outrider.cli.inputs import MAX_BYTES, check_utf8
from outrider.cli.models import launched
from outrider.cli.report import Interrupted, JsonOption, Report, Unfinished
from outrider.cli.sampling_options import SamplingOptions
from outrider.cli.stopping import Stop
from outrider.cli.streams import note
from outrider.device.errors import OutriderError
from outrider.errors import RequestError

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.model.chat_template import ChatTemplate

_PROMPT, _MORE, _QUOTES = "> ", ". ", '"""'
_HELP = (
    "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer; a message of several lines stands "
    'between """ and """'
)


@with_options
def chat(
    *,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told before the conversation.")
    ] = None,
    chat_template: ChatTemplateOption = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Maximum number of tokens of an answer.")
    ] = 1024,
    sampling: SamplingOptions,
    options: AnyModelOptions,
    json_output: JsonOption = False,
) -> Report:
    """Talk with a model. /reset forgets the conversation, /exit ends it; Ctrl-C ends an answer. From a pipe, each line is a
    message.
    """
    from outrider.cli.torch_probe import require_torch

    require_torch()
    speculation = options.speculation()
    template = find_template(speculation.model, None if chat_template is None else read_template(chat_template))
    sampling.params(max_tokens=max_tokens)  # wrong options are told before a model is loaded
    with closing(options.loader(speculation, max_requests=1, say=not json_output)()) as engine:
        terminal = not json_output and sys.stdin.isatty() and sys.stdout.isatty()
        talk = _Conversation(engine, template, sampling, max_tokens, system, terminal)

        def said() -> dict[str, object]:
            return {
                "messages": talk.messages,
                "answers": [answer.data(engine) for answer in talk.answers],
                "prefix_hits": engine.stats.prefix_hits,
                "speculate": speculation.kind,
                **launched(engine),
            }

        try:
            failed = _talk(talk, None if json_output else _write)
        except OutriderError as error:
            raise Unfinished(error, said()) from error
        except KeyboardInterrupt as error:
            raise Interrupted(str(error), said()) from None
        data = said()
    if failed is not None:
        data["error"] = failed

    def render(console: Console) -> None:
        if failed is not None:
            console.print(f"error: {failed}; the text before it is right", style="bold red", markup=False)

    return Report(data=data, render=render, exit_code=0 if failed is None else 1)


@dataclass(slots=True)
class _Interrupts:
    """What Ctrl-C does: it ends the answer that is being written. At the prompt of a terminal it drops the line; while a
    pipe is read it ends the command, and so it does where an answer that should end doesn't.
    """

    terminal: bool
    reading: bool = False
    asked: bool = False

    def __call__(self) -> bool:
        if self.reading:
            if self.terminal:
                raise _LineDropped
            return False
        before, self.asked = self.asked, True
        return not before

    def read(self, line: Callable[[], str]) -> str:
        """A line, waited for."""
        self.reading = True
        try:
            return line()
        finally:
            self.reading, self.asked = False, False


class _LineDropped(KeyboardInterrupt):
    """Ctrl-C at the prompt."""


@dataclass(slots=True)
class _Conversation:
    """What was said, and the engine that answers. Pages of what was said before are shared through the prefix cache."""

    engine: Engine
    template: ChatTemplate
    sampling: SamplingOptions
    max_tokens: int
    system: str | None
    terminal: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, message: str, write: Callable[[str], object] | None, ended: Callable[[], bool]) -> str | None:
        """Answer a message; returns what went wrong on the device, if anything did.

        Raises :class:`RequestError` where the conversation can't go on with this message, which is then dropped.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        tokens = self.template.tokens(asked)
        room = self.engine.longest_request - len(tokens)
        if room < 1:
            anew = "begin a new one with /reset" if self.terminal else "put a line with /reset before it"
            raise RequestError(
                f"the conversation has {len(tokens)} tokens with this message, and the context holds "
                f"{self.engine.longest_request} with an answer; {anew}, or give --max-context"
            )
        answer = Answer(Question(tokens))
        self.answers.append(answer)  # also one that is interrupted
        try:
            answer.stream(self.engine, self.sampling.params(max_tokens=min(self.max_tokens, room)), write, ended=ended)
        except RequestError:
            self.answers.pop()
            raise
        if answer.text or not ended():  # else there is nothing to go on with
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer.error


def _talk(talk: _Conversation, write: Callable[[str], object] | None) -> str | None:
    """Answer until there are no more lines; what went wrong on the device, if that ended it."""
    terminal = talk.terminal
    interrupts = _Interrupts(terminal)
    stop = Stop.of_process()
    with ExitStack() as stack:
        if stop is not None:
            stack.enter_context(stop.interrupts(interrupts))
        if terminal:
            _say(_HELP)
        for line in _terminal_lines(interrupts) if terminal else _piped_lines(interrupts):
            if line == "/exit":
                break
            if line == "/reset":
                talk.reset()
            elif line == "/help" or (terminal and line.startswith("/") and " " not in line):
                _say(_HELP)
            else:
                try:
                    error = talk.answer(line, write, lambda: interrupts.asked)
                except RequestError as refused:
                    if not terminal:
                        raise
                    _say(str(refused))
                else:
                    if error is not None:
                        return error
    return None


def _terminal_lines(interrupts: _Interrupts) -> Iterator[str]:
    """Messages that a person types."""
    if find_spec("readline") is not None:
        import readline  # noqa: F401  (input() edits lines with it)
    while True:
        try:
            text = interrupts.read(lambda: input(_PROMPT)).strip()
            if text.startswith(_QUOTES):
                text = _quoted(text, lambda: interrupts.read(lambda: input(_MORE)))
        except EOFError:
            _write("\n")
            return
        except _LineDropped:
            _write("\n")
            _say(_HELP)
            continue
        try:
            check_utf8("the message", text)
        except RequestError as error:
            _say(str(error))
            continue
        if text:
            yield text


def _piped_lines(interrupts: _Interrupts) -> Iterator[str]:
    """The lines of standard input, each a message; what stands between triple quotes is one."""
    while line := interrupts.read(_piped_line):
        text = line.strip()
        if text.startswith(_QUOTES):
            text = _quoted(text, lambda: interrupts.read(_piped_line) or None)
        if text:
            yield text


def _piped_line() -> str:
    """A line with its end; nothing at the end of standard input."""
    line = sys.stdin.buffer.readline(MAX_BYTES + 1)
    if len(line) > MAX_BYTES:
        raise RequestError(f"standard input has a line of more than {MAX_BYTES >> 20} MiB; expected a message")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input isn't UTF-8 text: {error.reason} at byte {error.start} of a line") from None


def _quoted(first: str, more: Callable[[], str | None]) -> str:
    """A message between triple quotes, which ``first`` begins with. Raises :class:`RequestError` where they aren't closed."""
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


def _say(text: str) -> None:
    """To the person, beside what the model says."""
    note(f"outrider: {text}\n")
