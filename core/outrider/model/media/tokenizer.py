"""Tokenizer: conversion between text and tokens by the checkpoint's tokenizer.json, or by older files that transformers
converts.

:class:`StreamDecoder` decodes tokens one by one, without partial characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from outrider.device import ConfigError
from outrider.errors import CheckpointError, RequestError, shown
from outrider.model.checkpoint.files import present, read_bytes, read_json, wrap_read_errors

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Decodes one stream of tokens to pieces of text. The pieces and :meth:`flush` together equal the decoding of all tokens.

    ``context`` are tokens before the stream: the pieces are then the text that the stream adds to theirs.

    A token's text depends on its neighbours: a character may span several tokens, and some tokenizers drop the space before
    the first word. Each step therefore decodes a window of tokens that begins with the last complete piece, and returns only
    text that later tokens cannot change.

    ``decode`` returns the text of tokens. ``continues``, if given, returns True for a token whose text stays open until a
    token of another kind follows. ``skipped`` are tokens without text. A decoder belongs to one stream and one thread.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        continues: Callable[[int], bool] | None = None,
        context: Sequence[int] = (),
        skipped: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._continues = continues
        self._lead = decode(context) if context else ""  # text of the given context, until a piece was returned
        self._context = list(context)  # then the tokens of the last complete piece
        self._pending: list[int] = []  # tokens since
        self._returned = 0  # characters of the window's text that were returned

    @property
    def is_complete(self) -> bool:
        """True if the returned pieces are the text of all tokens so far."""
        return not self._pending

    def push(self, *tokens: int) -> str:
        """Add tokens and return the text that is now certain, possibly empty. Several tokens at once cost as much as one."""
        self._pending.extend(token for token in tokens if token not in self._skipped)
        if self._is_open():
            return ""
        text = self._decode(self._context + self._pending)
        complete = not text.endswith(_REPLACEMENT)
        # An incomplete character decodes to one replacement character, and only the last character can be incomplete.
        certain = text if complete else text[:-1]
        start = self._start_of_new(text)
        piece = certain[start:]
        if piece:
            self._lead, self._returned = "", start + len(piece)
        if complete and piece:
            # Text without a context isn't certain: the decoding of a piece that is a space may be empty. The next piece
            # still begins at the right character, because both decodings drop the same space.
            self._context, self._pending = self._pending, []
            self._returned = len(self._decode(self._context))
        elif not complete and not self._lead and len(self._pending) > _MAX_PENDING_TOKENS:
            self._shorten_window()
        return piece

    def _shorten_window(self) -> None:
        """Drop the first tokens of a window whose end is incomplete.

        A model may repeat broken characters up to its limit, and each token would decode all of them again. The new window
        may begin inside a character: its first characters differ, but they were returned.
        """
        kept = self._pending[-_NUM_KEPT_TOKENS:]
        text = self._decode(kept)
        if text.endswith(_REPLACEMENT):
            self._context, self._pending, self._returned = [], kept, len(text) - 1

    def flush(self) -> str:
        """Return the remaining text, an incomplete character included, and end the stream."""
        text = self._decode(self._context + self._pending)
        piece = text[self._start_of_new(text) :]
        self._lead = ""
        self._context, self._pending, self._returned = [], [], 0
        return piece

    def _start_of_new(self, text: str) -> int:
        """Return the number of characters of the window's ``text`` that :meth:`push` has returned or that belong to the given
        context.

        The first tokens may complete a character that the context leaves incomplete.
        """
        if not self._lead:
            return self._returned
        differing = (index for index, (old, new) in enumerate(zip(self._lead, text, strict=False)) if old != new)
        return next(differing, min(len(self._lead), len(text)))

    def _is_open(self) -> bool:
        """Return True if the last token with text is one byte of a run that further tokens may continue."""
        if self._continues is None:
            return False
        for token in reversed(self._pending):
            if self._continues(token):
                return True
            if self._decode([token]):
                return False
        return False


_MAX_PENDING_TOKENS = 32
"""Number of tokens that the decoder keeps while the last character is incomplete."""
_NUM_KEPT_TOKENS = 8
"""Number of tokens that remain of a longer window: more than the 4 bytes of a character."""
_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE, _ADDED_TOKENS_FILE = "tokenizer_config.json", "added_tokens.json"
_ADDED_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_LEGACY_FILES = ("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
_MAX_GROWTH = 10_000
_CONTEXT_TOKENS = 16
"""Number of tokens of a prompt that decide how the text after the prompt begins."""
_LONG_TEXT = 4096  # characters from which encode releases Python's global lock, which takes some microseconds
_MAX_FILE_BYTES = 256 << 20  # a vocabulary of a quarter million tokens has thirty million bytes


class Tokenizer:
    """A checkpoint's tokenizer. Immutable after construction, so threads may share it."""

    def __init__(self, tokenizer: HfTokenizer, origin: Path = Path("tokenizer")) -> None:
        self._tokenizer = tokenizer
        self.origin = origin  # for error messages: some defects of a tokenizer appear only when it is used
        # A tokenizer.json may contain the padding and truncation settings of its training.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        parts = json.loads(tokenizer.to_str())
        growth = _growth(parts.get("normalizer")) * _growth(parts.get("decoder"))
        if growth > _MAX_GROWTH:
            raise ConfigError(f"its replacements make a text {growth} times as long, expected at most {_MAX_GROWTH} times")
        self._byte_fallback = _has_decoder(parts.get("decoder"), "ByteFallback")
        self._byte_level = _has_decoder(parts.get("decoder"), "ByteLevel")
        self._spaced = self._byte_fallback or _has_decoder(parts.get("decoder"), "Metaspace")
        self._added = frozenset(int(each["id"]) for each in parts.get("added_tokens") or ())
        self._special = frozenset(
            int(token) for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._alphabet = _byte_alphabet() if self._byte_level else {}

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``, or the files of an older checkpoint, which transformers converts.

        Tokens that only the neighbouring files define are added, as transformers does. Raises :class:`CheckpointError` if
        there is no tokenizer or it is unreadable.
        """
        path = Path(directory) / _TOKENIZER_FILE
        if not present(path):
            legacy = next((Path(directory) / name for name in _LEGACY_FILES if present(Path(directory) / name)), None)
            if legacy is None:
                raise CheckpointError(f"{path}: no such file; a tokenizer is expected next to the weights")
            return cls(_convert_legacy(legacy), legacy)
        content = read_bytes(path, _MAX_FILE_BYTES)
        with wrap_read_errors(path, "a tokenizer"):
            tokenizer = HfTokenizer.from_buffer(content)
        for source, tokens in _read_added_tokens(Path(directory)):
            with wrap_read_errors(source, "tokens that were added"):
                _add(tokenizer, tokens)
        with wrap_read_errors(path, "a tokenizer"):
            return cls(tokenizer, path)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included. A model's vocabulary may be larger because of padding."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def spellings(self) -> dict[int, str]:
        """Return the spelling of each token in the tokenizer's file."""
        return {token: spelling for spelling, token in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, with the start token if the checkpoint's post-processor adds one.

        Raises :class:`RequestError` for text with lone surrogates, and :class:`CheckpointError` if the tokenizer fails.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the text has half a character at {error.start} (a lone surrogate)") from error
        with wrap_read_errors(self.origin, "a tokenizer"):
            if len(text) < _LONG_TEXT:
                return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)
            # Other threads run meanwhile: of tokenizers' functions only those for batches release Python's global lock.
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of ``ids``. Unknown ids are skipped, and special tokens unless ``special_tokens`` is true."""
        with wrap_read_errors(self.origin, "a tokenizer"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special_tokens))

    def spelled_in(self, text: str) -> tuple[int, ...]:
        """Return the special tokens whose spelling is in ``text``, also as a regular expression."""
        special = [(token, str(self._tokenizer.id_to_token(token))) for token in sorted(self.special_tokens)]
        return tuple(token for token, spelling in special if spelling in text or re.escape(spelling) in text)

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this spelling, or None."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a single token, which may be part of a character.

        A special token returns its spelling, an unknown id returns no bytes.
        """
        spelling = self._tokenizer.id_to_token(token)
        if spelling is None:
            return b""
        if token in self._added:
            return str(spelling).encode()
        if self._byte_level and all(character in self._alphabet for character in spelling):
            return bytes(self._alphabet[character] for character in spelling)
        if self._byte_fallback and self._continues(token):
            return bytes((int(spelling[1:-1], 16),))
        return (spelling.replace("\u2581", " ") if self._spaced else self.decode([token], special_tokens=True)).encode()

    @property
    def special_tokens(self) -> frozenset[int]:
        """Ids of special tokens, which have no text."""
        return self._special

    def token_bytes(self, vocabulary: int) -> list[bytes]:
        """Return the bytes that each token of a model's ``vocabulary`` adds to a text.

        Special tokens and unknown ids have none. A tokenizer that drops a space at the beginning of a text drops it only when
        decoding. Raises :class:`ConfigError` for a tokenizer whose tokens have no bytes of their own.
        """
        if not (self._byte_level or self._spaced):
            raise ConfigError(
                f"{self.origin}: tokens have no bytes of their own; expected a decoder ByteLevel, ByteFallback or Metaspace"
            )
        special = self.special_tokens
        return [b"" if token in special else self.bytes_of(token) for token in range(vocabulary)]

    def stream(self, *, spelled: Collection[int] = (), prompt: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder for one stream of tokens. Of special tokens only those in ``spelled`` have text.

        The text continues that of the ``prompt`` tokens, unless a special token ends the prompt, which begins a new text.
        """
        decode = partial(self.decode, special_tokens=bool(spelled))
        continues = self._continues if self._byte_fallback else None
        context = self._context(prompt, continues) if prompt else ()
        return StreamDecoder(decode, continues, context, self.special_tokens.difference(spelled))

    def _context(self, prompt: Sequence[int], continues: Callable[[int], bool] | None) -> list[int]:
        """Return the last tokens of ``prompt`` that decide how the following text begins: those after its last special token,
        from outside a run of bytes.
        """
        special, start = self.special_tokens, max(len(prompt) - _CONTEXT_TOKENS, 0)
        while continues is not None and start > 0 and continues(prompt[start]):
            start -= 1
        context = list(prompt[start:])
        last_special = max((index for index, token in enumerate(context) if token in special), default=-1)
        return context[last_special + 1 :]

    def _continues(self, token: int) -> bool:
        """Return True if the token is one byte of a run that is decoded as a whole (sentencepiece's byte fallback)."""
        spelling = self._tokenizer.id_to_token(token)
        return spelling is not None and len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">")


def check_same_tokens(target: Tokenizer, directory: Path) -> None:
    """Raise :class:`CheckpointError` if most tokens of the draft's tokenizer in ``directory`` differ from those of
    ``target``.

    A vocabulary of the same size may be a different one, and hardly any draft would be accepted. A draft without a readable
    tokenizer is not checked.
    """
    try:
        if read_bytes(target.origin, _MAX_FILE_BYTES) == read_bytes(directory / _TOKENIZER_FILE, _MAX_FILE_BYTES):
            return
        draft = Tokenizer.from_checkpoint(directory)
    except CheckpointError:
        return
    wanted, found = target.spellings(), draft.spellings()
    common = sorted(wanted.keys() & found.keys())
    differing = [token for token in common if wanted[token] != found[token]]
    if 2 * len(differing) > len(common):
        token = differing[0]
        raise CheckpointError(
            f"{draft.origin}: {len(differing)} of {len(common)} tokens aren't the target's: token {token} is "
            f"{shown(found[token])}, and {shown(wanted[token])} there, so it would draft another text than the target reads; "
            "expected a draft with the target's tokenizer"
        )


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level spellings: printable bytes are themselves, the others follow from 256
    on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def has_tokenizer(directory: Path) -> bool:
    """Return True if a checkpoint has a tokenizer. A model without one is served with token ids."""
    return any(present(directory / name) for name in (_TOKENIZER_FILE, *_LEGACY_FILES))


def _convert_legacy(path: Path) -> HfTokenizer:
    """Return transformers' conversion of the legacy tokenizer file ``path``."""
    from transformers import AutoTokenizer

    for file in (path, *(path.parent / name for name in ("tokenizer_config.json", "special_tokens_map.json"))):
        if file is path or present(file):
            read_bytes(file, _MAX_FILE_BYTES)  # checks type and size, which transformers doesn't
    needed = "it may need the package sentencepiece: pip install 'outrider[sentencepiece]'"
    with wrap_read_errors(path, "a tokenizer", "" if find_spec("sentencepiece") else needed):
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False, use_fast=True
        )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, HfTokenizer):
            raise ConfigError(f"transformers' {type(tokenizer).__name__} can't be made a tokenizer.json; save it as one")
        # Copy, because transformers keeps and may change its own tokenizer.
        return HfTokenizer.from_str(backend.to_str())


def _read_added_tokens(directory: Path) -> list[tuple[Path, dict[int, AddedToken]]]:
    """Return the added tokens by id in the files next to tokenizer.json, for each file. Malformed entries are ignored."""
    found: list[tuple[Path, dict[int, AddedToken]]] = []
    config, added = directory / _CONFIG_FILE, directory / _ADDED_TOKENS_FILE
    if present(config):
        decoder_entries = read_json(config).get("added_tokens_decoder")
        entries = decoder_entries.items() if isinstance(decoder_entries, dict) else ()
        found.append((config, {int(key): _added_token(value) for key, value in entries if _is_added(key, value)}))
    if present(added):
        ids = read_json(added)
        found.append((added, {id: AddedToken(text) for text, id in ids.items() if text and type(id) is int}))
    return found


def _is_added(key: str, value: object) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10 and isinstance(value, dict) and bool(value.get("content"))


def _added_token(value: dict[str, Any]) -> AddedToken:
    return AddedToken(
        str(value["content"]), **{flag: value[flag] for flag in _ADDED_FLAGS if isinstance(value.get(flag), bool)}
    )


def _add(tokenizer: HfTokenizer, tokens: dict[int, AddedToken]) -> None:
    """Add the added tokens that the tokenizer lacks, as long as the tokenizer gives each its declared id."""
    existing = tokenizer.get_added_tokens_decoder()
    for token in sorted(tokens.keys() - existing.keys()):
        known = tokenizer.token_to_id(tokens[token].content)
        if token == (tokenizer.get_vocab_size(with_added_tokens=True) if known is None else known):
            tokenizer.add_tokens([tokens[token]])


def _growth(part: Any) -> int:
    """Return the factor by which a normalizer or decoder may lengthen a text, from its part of tokenizer.json. Successive
    replacements multiply.
    """
    if not isinstance(part, dict):
        return 1
    inner = math.prod(_growth(each) for name in ("normalizers", "decoders") for each in part.get(name, ()))
    return inner * max(1, len(part.get("content") or "") if part.get("type") == "Replace" else 1)


def _has_decoder(decoder: Any, kind: str) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == kind or any(_has_decoder(inner, kind) for inner in decoder.get("decoders", ()))
