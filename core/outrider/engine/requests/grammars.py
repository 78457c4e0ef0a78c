"""Guides to matchers: xgrammar compiles a guide for the engine's tokenizer, with limits and a cache.

Compiling belongs to no thread: a server calls :meth:`Grammars.compile` beside the engine, whose own call then finds it done.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from outrider.device import ConfigError
from outrider.engine.requests.guidance import Guidance, words_of
from outrider.engine.requests.guides import Choice, Ebnf, Guide, JsonObject, JsonSchema, Regex
from outrider.engine.requests.sampling import SamplingParams
from outrider.errors import RequestError, one_line
from outrider.model import Tokenizer

COMPILE_SECONDS = 20.0
"""What compiling a guide may take."""
CACHE_BYTES = 256 << 20
"""What compiled guides may take together; one alone, a quarter of it."""
_COMPILING = 4  # threads at most, those that are late and can't be stopped included
_WHITESPACE = 16  # characters at most between two parts of JSON: a model may not get lost in them


def available() -> bool:
    """Whether guides can be compiled in this installation."""
    return find_spec("xgrammar") is not None


class Grammars:
    """Compiled guides of one tokenizer. Any thread may call it. ``ends``: the model's end-of-sequence tokens. ``seconds``:
    what compiling a guide may take, if that's less than usual; None: whatever it takes, where another rank has compiled it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocabulary: int,
        ends: tuple[int, ...],
        seconds: float | None = math.inf,
    ) -> None:
        self._seconds = seconds
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._lock = threading.Lock()
        self._made: OrderedDict[Guide, Any] = OrderedDict()
        self._making: dict[Guide, Future[Any]] = {}
        self._compiler: Any = None
        self._compiler_lock = threading.Lock()  # making it takes longer than anything under the other lock
        self._special = frozenset() if tokenizer is None else tokenizer.special_tokens
        self._textless: frozenset[int] = frozenset()  # known once there is a compiler

    def compile(self, guide: Guide) -> Any:
        """The compiled grammar of a guide, from the cache or made now; blocks until it's there.

        Raises :class:`ConfigError` where guides can't be compiled, and :class:`RequestError` for one that can't be.
        """
        limit = None if self._seconds is None else min(self._seconds, COMPILE_SECONDS)
        if self._seconds != math.inf and self._tokenizer is not None and available():
            self._ready()  # made once: what other ranks wait for is the guide alone
        with self._lock:
            found = self._made.get(guide)
            if found is not None:
                self._made.move_to_end(guide)
                return found
            future = self._making.get(guide)
            if future is None:
                self._check_possible()
                if len(self._making) >= _COMPILING:
                    raise RequestError(
                        f"{len(self._making)} guides are being compiled, as many as may be at a time; send the request later"
                    )
                future = self._making[guide] = Future()
                threading.Thread(target=self._run, args=(guide, future), name="outrider-guide", daemon=True).start()
        try:
            return future.result(timeout=limit)
        except Late:
            raise RequestError(
                f"compiling the guide takes more than {limit:.0f} s; make it smaller: fewer optional properties, "
                "less nesting, lower counts"
            ) from None

    def guidance(self, params: SamplingParams, stops: frozenset[int]) -> Guidance:
        """The state of a new request. ``stops``: tokens that end it. Raises as :meth:`compile` does."""
        assert params.guide is not None
        compiled = self.compile(params.guide)
        # A stop token that is text is text to the grammar: the request ends at it all the same.
        ends = frozenset(self._ends) | (stops & self._special)
        matcher = XgrammarMatcher(compiled, sorted(ends), self._textless)
        overlooked = frozenset(self._ends) if params.ignore_eos else frozenset()
        banned = frozenset(token for token, value in params.biases if value == float("-inf"))
        return Guidance(
            matcher,
            vocabulary=self._vocabulary,
            held_back=((ends | stops, params.min_tokens), (overlooked, params.max_tokens)),
            banned=banned,
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_possible(self) -> None:
        if self._tokenizer is None:
            raise ConfigError(
                "the request has a guide, and this engine was built without a tokenizer, of which a guide is made; take a "
                "checkpoint that has one, through Engine.from_checkpoint"
            )
        if not available():
            raise ConfigError("the request has a guide, which xgrammar compiles; install it: pip install 'outrider[guided]'")

    def _run(self, guide: Guide, future: Future[Any]) -> None:
        try:
            made = self._compile(guide)
        except BaseException as error:
            with self._lock:
                del self._making[guide]
            future.set_exception(error)
            return
        with self._lock:
            del self._making[guide]
            self._made[guide] = made
            while sum(each.memory_size_bytes for each in self._made.values()) > CACHE_BYTES:
                self._made.popitem(last=False)
        future.set_result(made)

    def _compile(self, guide: Guide) -> Any:
        compiler = self._ready()
        try:
            made = _compiled(compiler, guide)
        except Exception as error:  # what the library says of this guide
            said = one_line(str(error).split("Check failed: ")[-1].split("] ", 1)[-1])
            raise RequestError(f"the {type(guide).__name__} guide can't be compiled: {said}") from error
        if made.memory_size_bytes > CACHE_BYTES // 4:
            raise RequestError(
                f"the compiled guide takes {made.memory_size_bytes} bytes, at most {CACHE_BYTES // 4} are allowed; make it "
                "smaller"
            )
        matcher = XgrammarMatcher(made, sorted(self._ends), self._textless)
        words = _no_token(self._vocabulary)
        if not matcher.over:
            matcher.fill(words, 0)
            if not bool(words.any()):
                raise RequestError(f"the {type(guide).__name__} guide allows no text that this tokenizer can write")
        return made

    def _ready(self) -> Any:
        """The compiler, made when it's first needed."""
        with self._compiler_lock:
            if self._compiler is None:
                assert self._tokenizer is not None
                xgrammar = import_module("xgrammar")
                texts = self._tokenizer.token_bytes(self._vocabulary)
                ends = [token for token in self._ends if token < self._vocabulary]
                for token in ends:
                    texts[token] = b""
                self._textless = frozenset(token for token, text in enumerate(texts) if not text)
                info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=self._vocabulary, stop_token_ids=ends)
                # Its own threads would take the engine's cores, and the cache is ours.
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler


class XgrammarMatcher:
    """A matcher of xgrammar. Without ``ends`` it's over as soon as the text is complete. ``textless``: tokens without text,
    which no grammar allows unless they're ends.
    """

    def __init__(self, compiled: Any, ends: list[int], textless: frozenset[int]) -> None:
        self._never = textless.difference(ends)
        library = import_module("xgrammar")
        self._matcher = library.GrammarMatcher(
            compiled, override_stop_tokens=ends or None, terminate_without_stop_token=not ends
        )

    def accept(self, token: int) -> bool:
        """Take a token, if it's allowed."""
        if self.over or token in self._never:  # the library would write a warning for the latter to standard error
            return False
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """Undo tokens."""
        self._matcher.rollback(count)

    def fill(self, words: Tensor, index: int) -> None:
        """The tokens that may come next."""
        self._matcher.fill_next_token_bitmask(words, index)

    @property
    def over(self) -> bool:
        """Whether the text has ended."""
        return bool(self._matcher.is_terminated())


def _compiled(compiler: Any, guide: Guide) -> Any:
    if isinstance(guide, JsonSchema):
        return compiler.compile_json_schema(guide.written, max_whitespace_cnt=_WHITESPACE)
    if isinstance(guide, JsonObject):
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, max_whitespace_cnt=_WHITESPACE)
    if isinstance(guide, Regex):
        return compiler.compile_regex(guide.written)
    if isinstance(guide, Ebnf):
        return compiler.compile_grammar(guide.grammar, root_rule_name=guide.root)
    assert isinstance(guide, Choice)
    return compiler.compile_grammar(guide.grammar)


def _no_token(vocabulary: int) -> Tensor:
    return torch.zeros((1, words_of(vocabulary)), dtype=torch.int32)
