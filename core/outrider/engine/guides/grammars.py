"""Grammars of guides: their compilation, and the state of one guided request.

:class:`Guidance` computes the masks of the tokens that a grammar allows, after the output and after each node of a draft.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.device import ConfigError
from outrider.engine.guides.guides import ChoiceGuide, Ebnf, Guide, JsonObject, JsonSchema, Regex
from outrider.engine.requests.sampling import SamplingParams, partial_match_length
from outrider.errors import BusyError, RequestError, one_line
from outrider.model import Tokenizer

_DOTS = re.compile(r'"(?:\\[\s\S]|[^"\\])*"?|\[(?:\\[\s\S]|[^\]\\])*\]?|#.*|(?<![\w-])(?P<dots>\.+)(?![\w-])')
"""Literals, character classes and comments of a grammar, and dots outside of them that are no part of a rule's name.

A literal without an end matches, too, so that a search takes linear time.
"""
_ANY_CHARACTER = r"[\u0000-\U0010FFFF]"
ALLOW_ALL_WORD = -1
"""A mask word that allows all of its 32 tokens."""
MASK_TIME_LIMIT_S = 1.0
"""CPU-time limit for the masks of one request in one iteration, in seconds.

All other requests of the batch wait for these masks. Ambiguous grammars take longer with each token.
"""


def mask_words(vocabulary: int) -> int:
    """Return W, the number of int32 words of a mask with one bit for each of ``vocabulary`` tokens."""
    return -(-vocabulary // 32)


def mask_of_tokens(tokens: Iterable[int], vocabulary: int) -> Tensor:
    """Return a mask int32 [W] that allows ``tokens`` and no other token."""
    allowed = torch.zeros(mask_words(vocabulary) * 32, dtype=torch.int64)
    allowed[torch.tensor(sorted(tokens), dtype=torch.int64)] = 1
    bits = (allowed.view(-1, 32) << torch.arange(32)).sum(dim=1)
    return bits.to(torch.int32)


class Matcher(Protocol):
    """A position in a grammar, which advances with each output token. Grammar libraries and test tools implement this
    protocol.
    """

    def accept(self, token: int) -> bool:
        """Advance by ``token`` and return True, or return False without a change if the grammar doesn't allow it."""

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens that the matcher has accepted."""

    def fill(self, words: Tensor, index: int) -> None:
        """Write the mask of allowed tokens into row ``index`` of ``words`` int32 [N, W].

        Bit i of word w stands for token 32w+i. Not called if the matcher is :attr:`is_complete`.
        """

    @property
    def is_complete(self) -> bool:
        """Return True if the text is complete, so that no token may follow."""


class UnrestrictedMatcher:
    """A matcher that allows every token and whose text is never complete; requests of the warm-up use it."""

    is_complete = False

    def accept(self, token: int) -> bool:
        """Return True for every token."""
        del token
        return True

    def rollback(self, count: int) -> None:
        """Do nothing: the matcher has no position."""
        del count

    def fill(self, words: Tensor, index: int) -> None:
        """Write :data:`ALLOW_ALL_WORD` to every word of row ``index``."""
        words[index].fill_(ALLOW_ALL_WORD)


class DelayedMatcher:
    """A matcher for the text after the first occurrence of ``marker``. Until then every token but ``ends`` is allowed.

    ``bytes_of`` returns a token's text. ``crossing`` are the tokens, with their texts, that may complete the marker and begin
    the constrained text at once: they aren't allowed where they would.
    """

    def __init__(
        self,
        matcher: Matcher,
        marker: bytes,
        bytes_of: Callable[[int], bytes],
        *,
        crossing: Sequence[tuple[int, bytes]],
        ends: frozenset[int],
        vocabulary: int,
    ) -> None:
        self._matcher = matcher
        self._marker = marker
        self._bytes_of = bytes_of
        self._crossing = crossing
        self._ends = ends
        self._vocabulary = vocabulary
        self._waiting_mask = ~mask_of_tokens(ends, vocabulary)
        self._seen: bytes | None = b""  # the beginning of the marker that the text ends with; None after the marker
        self._history: list[bytes | None] = []  # the value before each accepted token

    def accept(self, token: int) -> bool:
        """Append the token's text and look for the marker in it. After the marker, pass the token to the matcher. Returns
        False if the token isn't allowed.
        """
        if self._seen is None:
            if not self._matcher.accept(token):
                return False
            self._history.append(None)
            return True
        text = self._seen + self._bytes_of(token)
        before, marker, rest = text.partition(self._marker)
        if token in self._ends or rest.strip():
            return False
        self._history.append(self._seen)
        self._seen = None if marker else before[len(before) - partial_match_length(before, (self._marker,)) :]
        return True

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens: first those after the marker, then those before."""
        for _ in range(count):
            self._seen = self._history.pop()
            if self._seen is None:
                self._matcher.rollback(1)

    def fill(self, words: Tensor, index: int) -> None:
        """After the marker, write the matcher's mask to row ``index`` of ``words``. Before it, write a mask without the
        ``ends`` and the crossing tokens that would violate the guide.
        """
        if self._seen is None:
            self._matcher.fill(words, index)
            return
        words[index] = self._waiting_mask
        crossing = [token for token, text in self._crossing if (self._seen + text).partition(self._marker)[2].strip()]
        if crossing:
            words[index] &= ~mask_of_tokens(crossing, self._vocabulary)

    @property
    def is_complete(self) -> bool:
        """True if the marker has come and the text after it is complete."""
        return self._seen is None and self._matcher.is_complete


class OptionalMatcher:
    """A matcher of texts that ``matcher`` matches, and of those that begin with one of ``starts`` after at most one token of
    white space.

    ``openers`` are the tokens, with their texts, that may be a part of such a beginning.
    """

    def __init__(
        self,
        matcher: Matcher,
        starts: Sequence[bytes],
        bytes_of: Callable[[int], bytes],
        openers: Sequence[tuple[int, bytes]],
    ) -> None:
        self._matcher = matcher
        self._starts = starts
        self._bytes_of = bytes_of
        self._openers = openers
        self._head: bytes | None = b""  # the text while it may become a start; None once that is decided
        self._is_guided = True  # False once the matcher has refused the text, or a start has come
        self._history: list[tuple[bytes | None, bool, bool]] = []  # both values before each token, and if the matcher took it

    def accept(self, token: int) -> bool:
        """Advance by ``token`` and return True, or return False if it continues no start and the matcher refuses it."""
        head, is_guided = self._head, self._is_guided
        text = None if head is None else head + self._bytes_of(token)
        if text is not None and self._is_leading_space(text):
            text, is_taken = b"", False
        else:
            is_taken = is_guided and self._matcher.accept(token)
            is_free = (head is None and not is_guided) or (text is not None and text.startswith(tuple(self._starts)))
            if is_free or text is None or not self._may_become_start(text):
                text, is_guided = None, is_taken and not is_free
                if not (is_free or is_taken):
                    return False
            else:
                is_guided = is_taken
        self._history.append((self._head, self._is_guided, is_taken))
        self._head, self._is_guided = text, is_guided
        return True

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens."""
        for _ in range(count):
            self._head, self._is_guided, is_taken = self._history.pop()
            self._matcher.rollback(int(is_taken))

    def fill(self, words: Tensor, index: int) -> None:
        """Write the matcher's mask, with the tokens that continue a start, to row ``index`` of ``words``. After a start, all
        tokens are allowed.
        """
        if self._is_guided:
            self._matcher.fill(words, index)
        else:
            words[index].fill_(ALLOW_ALL_WORD if self._head is None else 0)
        if self._head is not None:
            texts = ((token, self._head + text) for token, text in self._openers)
            found = [token for token, text in texts if self._is_leading_space(text) or self._may_become_start(text)]
            words[index] |= mask_of_tokens(found, 32 * words.shape[1])

    @property
    def is_complete(self) -> bool:
        """True if the matcher has matched a complete text."""
        return self._is_guided and self._matcher.is_complete

    def _is_leading_space(self, text: bytes) -> bool:
        return not self._history and bool(text) and not text.strip()

    def _may_become_start(self, text: bytes) -> bool:
        """Return True if ``text`` isn't empty and begins with a start or is the beginning of one."""
        return bool(text) and any(text.startswith(start) or start.startswith(text) for start in self._starts)


class Guidance:
    """The matcher of one request. Between calls the matcher has accepted exactly the request's output."""

    def __init__(
        self,
        matcher: Matcher,
        *,
        vocabulary: int,
        held_back: Sequence[tuple[frozenset[int], int]] = (),
        banned: frozenset[int] = frozenset(),
    ) -> None:
        """Create the guidance of one request from its matcher.

        ``held_back`` are pairs of a token set and the number of output tokens before which the set is masked, unless the
        grammar allows no other token. ``banned`` are tokens that the request's ``logit_bias`` bans.
        """
        self._matcher = matcher
        self._output_length = 0
        self._draft_depth = 0  # draft tokens that the matcher has accepted after the output
        self._late = False
        self._unheld = [(~mask_of_tokens(held, vocabulary), until) for held, until in held_back if held and until]
        self._unbanned = ~mask_of_tokens(banned, vocabulary) if banned else None

    @property
    def exceeded_time_limit(self) -> bool:
        """Return True if masks took longer than :data:`MASK_TIME_LIMIT_S`. :meth:`accept_token` then rejects every token."""
        return self._late

    @property
    def is_complete(self) -> bool:
        """Return True if the output is complete and no token may follow."""
        return self._matcher.is_complete

    def accept_token(self, token: int) -> str | None:
        """Advance by an output token. Return None, or the reason if the guide doesn't allow the token."""
        self._roll_back_to(0)
        if self._late:
            return (
                f"finding what its guide allows behind {self._output_length} tokens took more than {MASK_TIME_LIMIT_S:g} s; "
                "write the guide with fewer ways to read a text"
            )
        if not self._matcher.accept(token):
            return (
                f"token {token} at {self._output_length} of the output isn't allowed by the guide, and nothing that is was "
                "left to choose; a logit_bias may ban it"
            )
        self._output_length += 1
        return None

    def fill_next_mask(self, words: Tensor, index: int) -> None:
        """Write the mask of the token after the output into row ``index`` of ``words`` int32 [N, W]."""
        self._roll_back_to(0)
        began = time.thread_time()
        self._fill(words, index)
        self._late |= time.thread_time() - began > MASK_TIME_LIMIT_S

    def fill_draft_masks(self, tokens: Sequence[int], parents: Sequence[int], words: Tensor) -> None:
        """Write the masks of the tokens after the output and after each draft node into ``words`` int32 [N, W].

        ``tokens``: the tokens of nodes 1 to N-1. ``parents``: the parent of each of the N nodes, -1 for the root and for
        unused nodes. Nodes after a disallowed token get a mask of all tokens, because the target rejects them.
        """
        words.fill_(ALLOW_ALL_WORD)
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            if node and parent >= 0:
                children.setdefault(parent, []).append(node)
        began = time.thread_time()
        self._fill(words, 0)
        stack = [(node, 0) for node in reversed(children.get(0, ()))]
        while stack:
            node, depth = stack.pop()
            self._roll_back_to(depth)
            self._late |= time.thread_time() - began > MASK_TIME_LIMIT_S
            if self._late:
                break
            if self._matcher.is_complete or not self._matcher.accept(tokens[node - 1]):
                continue
            self._draft_depth += 1
            self._fill(words, node)
            stack += [(child, depth + 1) for child in reversed(children.get(node, ()))]
        self._late |= time.thread_time() - began > MASK_TIME_LIMIT_S
        self._roll_back_to(0)

    def _roll_back_to(self, depth: int) -> None:
        """Roll the matcher back to ``depth`` tokens of the draft, also from tokens that an interrupted call left."""
        if self._draft_depth > depth:
            self._matcher.rollback(self._draft_depth - depth)
            self._draft_depth = depth

    def _fill(self, words: Tensor, index: int) -> None:
        row = words[index]
        if self._matcher.is_complete:
            row.fill_(ALLOW_ALL_WORD)
            return
        self._matcher.fill(words, index)
        for unheld, until in self._unheld:
            if self._output_length + self._draft_depth < until and bool((row & unheld).any()):
                row &= unheld
        if self._unbanned is not None and not bool((row & self._unbanned).any()):
            row.fill_(ALLOW_ALL_WORD)  # the guide allows banned tokens only: accept_token() rejects the sampled one


COMPILE_SECONDS = 20.0
"""Time limit for compiling one guide, in seconds."""
CACHE_BYTES = 256 << 20
"""Size limit of all cached guides, in bytes. One guide may have a quarter of it."""
_MAX_COMPILE_THREADS = 4  # includes threads past their time limit, which can't be stopped
_NUM_COMPILER_THREADS = 2
_MAX_JSON_WHITESPACE = 16  # characters between two parts of JSON: without a limit a model can emit whitespace forever


def guides_are_available() -> bool:
    """Return True if xgrammar is installed."""
    return find_spec("xgrammar") is not None


class Grammars:
    """The compiled guides of one tokenizer. Every thread may call its methods."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocabulary: int,
        ends: tuple[int, ...],
        seconds: float | None = math.inf,
    ) -> None:
        """Create a compiler for a tokenizer.

        ``ends`` are the model's end-of-sequence tokens. ``seconds`` limits the compilation of one guide below
        :data:`COMPILE_SECONDS`; None means no limit, for a rank whose guide another rank has already compiled.
        """
        self._time_limit_s = seconds
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Guide, Any] = OrderedDict()
        self._compiling: dict[Guide, Future[Any]] = {}
        self._compiler: Any = None
        self._compiler_lock = threading.Lock()  # separate: creating the compiler takes longer than any use of _lock
        self._special = frozenset() if tokenizer is None else tokenizer.special_tokens
        self._edge_tokens: dict[Hashable, tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]] = {}
        self._textless: frozenset[int] = frozenset()  # filled when the compiler is created

    def compile(self, guide: Guide) -> Any:
        """Return the compiled grammar of ``guide``, from the cache or newly compiled. Blocks until it is compiled.

        Raises :class:`ConfigError` if the engine can't compile any guide, :class:`RequestError` if this guide fails, and
        :class:`BusyError` if too many guides are being compiled.
        """
        limit = None if self._time_limit_s is None else min(self._time_limit_s, COMPILE_SECONDS)
        if self._tokenizer is not None:
            self._find_edge_tokens(guide)
            guide = replace(guide, after="", unless=())  # these have no effect on the grammar
        if self._time_limit_s != math.inf and self._tokenizer is not None and guides_are_available():
            self._create_compiler_once()  # outside the time limit: other ranks wait for the guide only
        with self._lock:
            compiled = self._compiled.get(guide)
            if compiled is not None:
                self._compiled.move_to_end(guide)
                return compiled
            future = self._compiling.get(guide)
            if future is None:
                self._check_can_compile()
                if len(self._compiling) >= _MAX_COMPILE_THREADS:
                    raise BusyError(
                        f"{len(self._compiling)} guides are being compiled, as many as may be at a time; send the request "
                        "later"
                    )
                future = self._compiling[guide] = Future()
                threading.Thread(target=self._run, args=(guide, future), name="outrider-guide", daemon=True).start()
        try:
            return future.result(timeout=limit)
        except FutureTimeout:
            raise RequestError(
                f"compiling the guide takes more than {limit:.0f} s; make it smaller: fewer optional properties, "
                "less nesting, lower counts"
            ) from None

    def guidance(self, params: SamplingParams, stops: frozenset[int]) -> Guidance:
        """Return the guidance of a new request that the tokens ``stops`` end. Raises like :meth:`compile`."""
        assert params.guide is not None
        compiled = self.compile(params.guide)
        # The grammar treats a stop token with text as text. The request still ends at the token.
        ends = frozenset(self._ends) | (stops & self._special)
        matcher: Matcher = XgrammarMatcher(compiled, sorted(ends), self._textless)
        if params.guide.after or params.guide.unless:
            matcher = self._restrict_less(matcher, params.guide, ends)
        ignored_ends = frozenset(self._ends) if params.ignore_eos else frozenset()
        banned = frozenset(token for token, value in params.biases if value == float("-inf"))
        return Guidance(
            matcher,
            vocabulary=self._vocabulary,
            held_back=((ends | stops, params.min_tokens), (ignored_ends, params.max_tokens)),
            banned=banned,
        )

    def _restrict_less(self, matcher: Matcher, guide: Guide, ends: frozenset[int]) -> Matcher:
        """Return ``matcher`` for the part of the text, or for the texts, that ``guide`` constrains."""
        assert self._tokenizer is not None
        bytes_of = self._tokenizer.bytes_of
        crossing, openers = self._find_edge_tokens(guide)
        if guide.unless:
            matcher = OptionalMatcher(matcher, [start.encode() for start in guide.unless], bytes_of, openers)
        if guide.after:
            marker = guide.after.encode()
            return DelayedMatcher(matcher, marker, bytes_of, crossing=crossing, ends=ends, vocabulary=self._vocabulary)
        return matcher

    def _find_edge_tokens(self, guide: Guide) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """Return the tokens, with their text in bytes, in which ``guide.after`` can end before the token does, and those that
        are white space or part of the beginning of a text in ``guide.unless``. The last result is cached.
        """
        if not (guide.after or guide.unless):
            return [], []
        key = (guide.after, guide.unless)
        with self._lock:
            found = self._edge_tokens.get(key)
        if found is None:
            assert self._tokenizer is not None
            last, starts = guide.after.encode()[-1:], [start.encode() for start in guide.unless]
            rests = [start[index:] for start in starts for index in range(len(start))]
            texts = [(token, self._tokenizer.bytes_of(token)) for token in range(self._vocabulary)]
            crossing = [(token, text) for token, text in texts if last and text.partition(last)[2].strip()]
            first_bytes = {rest[0] for rest in rests}.union(b" \t\r\n") if starts else ()
            openers = [
                (token, text)
                for token, text in texts
                if text[:1] and text[0] in first_bytes
                if not text.strip() or any(rest.startswith(text) or text.startswith(rest) for rest in rests)
            ]
            found = crossing, openers
            with self._lock:
                self._edge_tokens = {key: found}
        return found

    def _check_can_compile(self) -> None:
        if self._tokenizer is None:
            raise ConfigError(
                "the request has a guide, and this engine was built without a tokenizer, of which a guide is made; take a "
                "checkpoint that has one, through Engine.from_checkpoint"
            )
        if not guides_are_available():
            raise ConfigError("the request has a guide, which xgrammar compiles; install it: pip install 'outrider[guided]'")

    def _run(self, guide: Guide, future: Future[Any]) -> None:
        try:
            compiled = self._compile(guide)
        except BaseException as error:
            with self._lock:
                del self._compiling[guide]
            future.set_exception(error)
            return
        with self._lock:
            del self._compiling[guide]
            self._compiled[guide] = compiled
            while sum(each.memory_size_bytes for each in self._compiled.values()) > CACHE_BYTES:
                self._compiled.popitem(last=False)
        future.set_result(compiled)

    def _compile(self, guide: Guide) -> Any:
        compiler = self._create_compiler_once()
        try:
            compiled = _compile_guide(compiler, guide)
        except Exception as error:  # xgrammar raises RuntimeError and others for guides that it rejects
            reason = one_line(str(error).split("Check failed: ")[-1].split("] ", 1)[-1])
            reason = re.sub(r"^\S+\.(cc|h):\d+: ", "", reason)  # the place in xgrammar's sources
            raise RequestError(f"the {type(guide).__name__} guide can't be compiled: {reason}") from error
        if compiled.memory_size_bytes > CACHE_BYTES // 4:
            raise RequestError(
                f"the compiled guide takes {compiled.memory_size_bytes} bytes, at most {CACHE_BYTES // 4} are allowed; make "
                "it smaller"
            )
        matcher = XgrammarMatcher(compiled, sorted(self._ends), self._textless)
        words = torch.zeros((1, mask_words(self._vocabulary)), dtype=torch.int32)
        if not matcher.is_complete:
            matcher.fill(words, 0)
            if not bool(words.any()):
                raise RequestError(f"the {type(guide).__name__} guide allows no text that this tokenizer can write")
        return compiled

    def _create_compiler_once(self) -> Any:
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
                # max_threads=1: more threads would compete with the engine for cores. This class has the cache.
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            return self._compiler


class XgrammarMatcher:
    """A :class:`~outrider.engine.guides.grammars.Matcher` over a guide that xgrammar has compiled."""

    def __init__(self, compiled: Any, ends: list[int], textless: frozenset[int]) -> None:
        """Create a matcher of one compiled guide.

        ``ends`` are tokens that end a complete text; if empty, the matcher is over as soon as the text is complete.
        ``textless`` are tokens without text, which no grammar allows unless they are in ``ends``.
        """
        self._never_allowed = textless.difference(ends)
        library = import_module("xgrammar")
        self._matcher = library.GrammarMatcher(
            compiled, override_stop_tokens=ends or None, terminate_without_stop_token=not ends
        )

    def accept(self, token: int) -> bool:
        """Advance xgrammar by ``token`` and return True, or return False if the grammar forbids it. A token after the
        complete text, or one without text, is not passed to xgrammar.
        """
        if self.is_complete or token in self._never_allowed:  # xgrammar prints a warning for a token without text
            return False
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens that the matcher has accepted."""
        self._matcher.rollback(count)

    def fill(self, words: Tensor, index: int) -> None:
        """Write xgrammar's mask of the tokens that may come next to row ``index`` of ``words`` int32 [N, W]."""
        self._matcher.fill_next_token_bitmask(words, index)

    @property
    def is_complete(self) -> bool:
        """True if xgrammar has reached the end of the text, so that no token may follow."""
        return bool(self._matcher.is_terminated())


def _compile_guide(compiler: Any, guide: Guide) -> Any:
    if isinstance(guide, JsonSchema):
        return compiler.compile_json_schema(guide.compiler_text, max_whitespace_cnt=_MAX_JSON_WHITESPACE)
    if isinstance(guide, JsonObject):
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, max_whitespace_cnt=_MAX_JSON_WHITESPACE)
    if isinstance(guide, Regex):
        return compiler.compile_regex(guide.compiler_text)
    if isinstance(guide, Ebnf):
        # xgrammar has no dot for any character, and takes it for the name of a rule.
        grammar = _DOTS.sub(lambda match: _ANY_CHARACTER * len(match["dots"]) if match["dots"] else match[0], guide.grammar)
        return compiler.compile_grammar(grammar, root_rule_name=guide.root)
    assert isinstance(guide, ChoiceGuide)
    return compiler.compile_grammar(guide.grammar)


Admit = Callable[[BaseException | None], None]
"""A function that admits a request whose guide was compiled, or refuses it with the error of its guide."""


class GuideCompilers:
    """The requests whose guides are compiled in threads, so that running requests don't wait for a compilation. The first
    guide starts the threads.
    """

    def __init__(self, compile_guide: Callable[[Guide], None]) -> None:
        self._compile_guide = compile_guide
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: dict[Hashable, tuple[Future[None], Admit]] = {}

    @property
    def has_waiting(self) -> bool:
        """True if a request waits for its guide."""
        return bool(self._waiting)

    def delay(self, request: Hashable, params: SamplingParams, admit: Admit) -> bool:
        """Start to compile the guide of ``request``, after which :meth:`admit_compiled` calls ``admit``. Return False for a
        request without a guide, which the caller admits itself.
        """
        if params.guide is None:
            return False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_COMPILER_THREADS, thread_name_prefix="outrider-guides")
        self._waiting[request] = self._pool.submit(self._compile_guide, params.guide), admit
        return True

    def admit_compiled(self) -> bool:
        """Admit or refuse each request whose guide has been compiled. Return True if there was one."""
        compiled = [(request, future, admit) for request, (future, admit) in self._waiting.items() if future.done()]
        for request, future, admit in compiled:
            del self._waiting[request]
            admit(future.exception())
        return bool(compiled)

    def wait(self, seconds: float) -> None:
        """Wait until a guide has been compiled, for at most ``seconds``."""
        wait([future for future, _ in self._waiting.values()], timeout=seconds, return_when=FIRST_COMPLETED)

    def drop(self, request: Hashable) -> None:
        """Forget a request that has ended, if it waits."""
        self._waiting.pop(request, None)

    def close(self) -> None:
        """Forget the requests, and cancel the compilations that haven't started. A running compilation continues until it is
        done.
        """
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
