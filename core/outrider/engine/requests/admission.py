"""Admission: check a caller's arguments and create requests from them, without changing the engine."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from outrider.device import ConfigError
from outrider.engine.config import MAX_LOGPROBS, DecidedConfig
from outrider.engine.guides.grammars import Grammars
from outrider.engine.requests.hand_over import RequestState
from outrider.engine.requests.request import Request, expand_prompt, request_media
from outrider.engine.requests.sampling import MAX_LOGIT_BIAS, SamplingParams, Transcript, watch_stop_strings
from outrider.errors import RequestError, shown
from outrider.model import Media, ModelConfig, Tokenizer, VisionTower


@dataclass(kw_only=True, slots=True)
class Admission:
    """The limits that a request is checked against. ``pages`` is the number of KV pages that requests can use; ``pages_of``
    returns the maximum number of pages that a request of a given token count holds at a time.
    """

    config: DecidedConfig
    model: ModelConfig
    pages: int
    pages_of: Callable[[int], int]
    tokenizer: Tokenizer | None
    grammars: Grammars
    vision: VisionTower | None

    @property
    def longest(self) -> int:
        """Maximum number of tokens of prompt and output of one request, limited by the context and by the cache."""
        return bisect.bisect_right(range(1, self.config.max_context + 1), self.pages, key=self.pages_of)

    def requests(self, first_id: int, tokens: Any, params: Any, *, priority: Any = 0, media: Any = ()) -> list[Request]:
        """Create the samples of one prompt, with ids from ``first_id`` on. The first leads; the others are its followers.

        Raises :class:`RequestError` for a prompt, an option or media that the engine cannot serve.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"the sampling parameters are a {type(params).__name__}; expected SamplingParams")
        urgency = checked_int(priority, "priority")
        seen = checked_media(media)
        prompt = expand_prompt(checked_tokens(tokens, limit=self.config.max_context), seen, self.model.vision)
        stops = self.check(prompt, params)
        pictures = request_media(seen, prompt, self.model.vision, self.vision)
        rope_key = self.model.rope.sharing_key(len(prompt))
        samples = []
        for index in range(params.n):
            request = Request(first_id + index, prompt, params.sample(index), stops, urgency, pictures, rope_key)
            self._watch_text(request)
            if params.guide is not None:
                request.guidance = self.grammars.guidance(params, stops)
            samples.append(request)
        samples[0].followers = samples[1:]
        return samples

    def batch(self, first_id: int, prompts: Any, params: Any, media: Any) -> list[list[Request]]:
        """Create the samples of each prompt, in the order of ``prompts``. ``params`` is one value for all prompts or one for
        each; ``media`` is None or one sequence for each prompt.

        Raises :class:`RequestError` if one of them cannot be served.
        """
        if not isinstance(prompts, Collection):
            raise RequestError(f"prompts is {shown(prompts)}; expected a text, or a sequence of texts or of token ids")
        count = len(prompts)
        if not (params is None or isinstance(params, SamplingParams | Sequence)):
            raise RequestError(f"the sampling parameters are a {type(params).__name__}; expected SamplingParams")
        each = list(params) if isinstance(params, Sequence) else [params] * count
        if len(each) != count:
            raise RequestError(f"{count} prompts came with {len(each)} sampling parameters; give one, or as many")
        if not (media is None or isinstance(media, Sequence)):
            raise RequestError(f"media is {shown(media)}; expected one sequence for each prompt")
        pictures = [()] * count if media is None else list(media)
        if len(pictures) != count:
            raise RequestError(f"{count} prompts came with media for {len(pictures)}; give one sequence for each")
        found: list[list[Request]] = []
        for prompt, chosen, seen in zip(prompts, each, pictures, strict=True):
            found.append(self.requests(first_id, prompt, chosen, media=seen))
            first_id += len(found[-1])
        return found

    def resumed(self, request_id: int, state: RequestState) -> Request:
        """Create a request whose context is the prompt and the output so far of ``state``."""
        given = self.checked(state)
        request = self.arrival(request_id, given)
        request.context = (*given.prompt, *given.output)
        return request

    def checked(self, state: RequestState) -> RequestState:
        """Return ``state`` with expanded placeholders. Raises :class:`RequestError` for a state that the engine cannot
        serve.
        """
        urgency = checked_int(state.priority, "priority")
        if state.params.n > 1:
            raise RequestError(f"n is {state.params.n}; a request that goes from engine to engine is one sample")
        seen = checked_media(state.media)
        prompt = expand_prompt(checked_tokens(state.prompt, limit=self.config.max_context), seen, self.model.vision)
        given = replace(state, prompt=prompt, media=seen, priority=urgency)
        self._check_output(given)
        return given

    def _check_output(self, state: RequestState) -> None:
        """Raise :class:`RequestError` if the output so far contradicts the request's options or limits."""
        output = state.output
        if len(output) >= state.params.max_tokens:
            raise RequestError(f"the request has {len(output)} tokens of output and asks for {state.params.max_tokens}")
        if not all(0 <= token < self.model.vocab_size for token in output):
            raise RequestError(f"the output so far has tokens outside of the vocabulary of {self.model.vocab_size}")
        if state.params.logprobs is not None and len(state.logprobs) != len(output):
            raise RequestError(f"{len(output)} tokens of output came with {len(state.logprobs)} log-probabilities")

    def arrival(self, request_id: int, handed: RequestState) -> Request:
        """Create the request that another engine handed over, without its device state.

        Raises :class:`RequestError` if its guide belongs to another tokenizer.
        """
        stops = self.check(handed.prompt, handed.params)
        request = Request(request_id, handed.prompt, handed.params, stops, handed.priority)
        request.media = request_media(handed.media, handed.prompt, self.model.vision, self.vision)
        request.rope_key = self.model.rope.sharing_key(len(handed.prompt))
        request.output, request.logprobs = list(handed.output), list(handed.logprobs)
        request.iterations, request.verified_tokens = handed.iterations, handed.verified_tokens
        request.context = (*handed.prompt, *handed.output[:-1])
        self._watch_text(request)
        if handed.params.guide is not None:
            request.guidance = self.grammars.guidance(handed.params, stops)
            for token in handed.output:
                refused = request.guidance.accept_token(token)
                if refused is not None:
                    raise RequestError(f"the request comes from an engine with another tokenizer: {refused}")
        return request

    def _watch_text(self, request: Request) -> None:
        """Attach the search for stop strings, or a transcript, to a request, and pass its output so far to both."""
        tokenizer, params = self.tokenizer, request.params
        if tokenizer is None:
            return
        if params.stop:
            request.stop_text = watch_stop_strings(tokenizer, params, request.prompt, request.output)
            request.text.append(request.stop_text.pop_certain_text())
            return
        request.transcript = Transcript(partial(tokenizer.stream, prompt=request.prompt))
        if request.output:
            request.transcript.append(tuple(request.output), is_last=False)

    def check(self, prompt: tuple[int, ...], params: SamplingParams) -> frozenset[int]:
        """Return the request's stop tokens. Raises :class:`RequestError` for a request that the engine cannot serve."""
        config, vocabulary = self.config, self.model.vocab_size
        _check_prompt(prompt, params, context=self.config.max_context, vocabulary=vocabulary)
        _check_pages(self.pages_of(len(prompt) + params.max_tokens), self.pages, config.page_size)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.model.eos_token_ids)
        _check_options(params, stops, config=config, vocabulary=vocabulary)
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                "the request has stop strings, and this engine was built without a tokenizer; take a checkpoint that has "
                "one, through Engine.from_checkpoint, or give stop_token_ids"
            )
        return frozenset(stops)


def checked_media(media: Any) -> tuple[Media, ...]:
    """Return the media as a tuple. Raises :class:`RequestError` for anything but a sequence of :class:`Media`."""
    try:
        listed = (media,) if isinstance(media, str | bytes) else tuple(media)
    except TypeError:  # None, a number, a tensor without a dimension
        listed = (media,)
    for each in listed:
        if not isinstance(each, Media):
            raise RequestError(f"media has a {type(each).__name__}; expected what MediaProcessor makes")
    return listed


def _check_prompt(prompt: Sequence[int], params: SamplingParams, *, context: int, vocabulary: int) -> None:
    """Raise :class:`RequestError` unless the prompt consists of tokens of the vocabulary and leaves room for its output in
    ``context`` tokens.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    total = len(prompt) + params.max_tokens
    if total > context:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and asks for {params.max_tokens} more: {total} don't fit in the "
            f"context of {context}; shorten the prompt or lower max_tokens"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        wrong = next(token for token in prompt if not 0 <= token < vocabulary)
        raise RequestError(f"token {wrong} of the prompt is outside the model's vocabulary of {vocabulary}")


def _check_pages(needed: int, pages: int, page_size: int) -> None:
    """Raise :class:`RequestError` if a request that needs ``needed`` pages at its longest exceeds the cache."""
    if needed > pages:
        raise RequestError(
            f"the request needs {needed} KV pages of {page_size} tokens, the cache has {pages}; raise "
            "num_pages or lower max_tokens"
        )


def _check_options(params: SamplingParams, stops: set[int], *, config: DecidedConfig, vocabulary: int) -> None:
    """Raise :class:`RequestError` unless the sampling options name existing tokens, leave at least one token, and are within
    the engine's limits.
    """
    listed = dict(params.biases)
    wrong = next((token for token in listed if token >= vocabulary), None)
    if wrong is None:
        wrong = next((token for token in params.stop_token_ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise RequestError(f"token {wrong} of the sampling options is outside the model's vocabulary of {vocabulary}")
    most_bias = torch.finfo(config.torch_dtype).max
    wide = next((token for token, value in listed.items() if most_bias < abs(value) < float("inf")), None)
    if wide is not None:
        raise RequestError(
            f"logit_bias of token {wide} is {listed[wide]:g}; {config.dtype}, in which this engine computes, "
            f"holds {most_bias:g} at most"
        )
    banned = {token for token, value in listed.items() if value == float("-inf")}
    if params.min_tokens:
        banned |= stops
    if len(banned) >= vocabulary:
        raise RequestError("logit_bias and min_tokens ban every token of the vocabulary; leave at least one")
    entries = len(listed) + (len(stops) if params.min_tokens else 0)
    if entries > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias and the stop tokens that min_tokens bans make {entries} entries, a request may have "
            f"{MAX_LOGIT_BIAS}; list fewer tokens"
        )
    max_logprobs = min(MAX_LOGPROBS, vocabulary)
    if params.logprobs is not None and params.logprobs > max_logprobs:
        raise RequestError(f"logprobs is {params.logprobs}, an engine reports {max_logprobs} at most")


_MAX_ABS_INT = 2**62


def checked_tokens(prompt: Any, *, limit: int) -> tuple[int, ...]:
    """Return token ids as Python ints, from a sequence, a one-dimensional array or a one-dimensional tensor.

    Raises :class:`RequestError` for text, fractions, booleans, mappings, sets, and for more than ``limit`` tokens.
    """
    listed = prompt.tolist() if callable(getattr(prompt, "tolist", None)) else prompt
    if isinstance(listed, str | bytes | bytearray | Mapping | Set) or not isinstance(listed, Iterable):
        raise RequestError(
            f"the prompt is {_describe(prompt)}; expected token ids, a sequence of whole numbers (encode text first)"
        )
    tokens = tuple(islice(listed, limit + 1))
    # A prompt usually consists of ints alone: this check of the whole tuple avoids one call per token.
    if set(map(type, tokens)) != {int} or not (min(tokens) > -_MAX_ABS_INT and max(tokens) < _MAX_ABS_INT):
        tokens = tuple(checked_int(token, f"token {index} of the prompt") for index, token in enumerate(tokens))
    if len(tokens) > limit:
        count = len(listed) if isinstance(listed, Sized) else f"more than {limit}"
        raise RequestError(f"the prompt has {count} tokens: they don't fit in the context of {limit}; shorten the prompt")
    return tokens


def checked_int(argument: Any, name: str) -> int:
    """Return ``argument`` as an int within 63 bits. Raises :class:`RequestError`, also for booleans."""
    try:
        value = None if isinstance(argument, bool) else operator.index(argument)
    except TypeError:
        value = None
    if value is None or not -_MAX_ABS_INT < value < _MAX_ABS_INT:
        raise RequestError(f"{name} is {_describe(argument)}; expected a whole number")
    return value


def _describe(argument: object) -> str:
    return f"{shown(argument)} (a {type(argument).__name__})"
