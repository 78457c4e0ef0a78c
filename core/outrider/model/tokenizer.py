"""Text to tokens and back, by the checkpoint's tokenizer.json, or by an older file that transformers makes one of."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from outrider.device import ConfigError
from outrider.errors import CheckpointError, RequestError, shown
from outrider.model.reading import present, read_bytes, read_json, reading
from outrider.model.stream_decoder import StreamDecoder

_FILE = "tokenizer.json"
_CONFIG, _ADDED = "tokenizer_config.json", "added_tokens.json"
_SIDES = ("lstrip", "rstrip", "single_word", "normalized", "special")
_OLDER = ("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
_MAX_GROWTH = 10_000
_LIMIT = 256 << 20  # bytes; vocabularies of a quarter million tokens take thirty million


class Tokenizer:
    """A checkpoint's tokenizer. Immutable after construction; may be shared by threads."""

    def __init__(self, tokenizer: HfTokenizer, origin: Path = Path("tokenizer")) -> None:
        self._tokenizer = tokenizer
        self.origin = origin  # for messages: what a tokenizer can't do may show when it's used
        # a tokenizer.json may carry the padding and truncation of its training
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
        self._alphabet = _byte_alphabet() if self._byte_level else {}

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``, or what older checkpoints have in its place, which transformers converts. Tokens that only
        the files beside it tell of are added, as transformers does it.

        Raises :class:`CheckpointError` if there is none, or it can't be read.
        """
        path = Path(directory) / _FILE
        if not present(path):
            older = next((Path(directory) / name for name in _OLDER if present(Path(directory) / name)), None)
            if older is None:
                raise CheckpointError(f"{path}: no such file; a tokenizer is expected beside the weights")
            return cls(_converted(older), older)
        content = read_bytes(path, _LIMIT)
        with reading(path, "a tokenizer"):
            made = HfTokenizer.from_buffer(content)
        for source, tokens in _told_beside(Path(directory)):
            with reading(source, "tokens that were added"):
                _add(made, tokens)
        with reading(path, "a tokenizer"):
            return cls(made, path)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be larger, for padding."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def spellings(self) -> dict[int, str]:
        """How the tokenizer's file spells each token."""
        return {token: spelling for spelling, token in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with the start token where the checkpoint's own post-processor adds one.

        Raises :class:`RequestError` for a text that isn't Unicode, :class:`CheckpointError` where the tokenizer fails.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the text has half a character at {error.start} (a lone surrogate)") from error
        with reading(self.origin, "a tokenizer"):
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of ``ids``; ids that the tokenizer doesn't know are skipped. ``special_tokens``: whether those give text."""
        with reading(self.origin, "a tokenizer"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special_tokens))

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling, or None."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for, alone: it may be part of a character. A special token gives its spelling, an id that the
        tokenizer doesn't know nothing.
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
        """Ids of tokens that give no text."""
        return frozenset(int(i) for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    def token_bytes(self, vocabulary: int) -> list[bytes]:
        """The bytes that each token of a model's ``vocabulary`` adds to a text; none for special tokens and for ids that the
        tokenizer doesn't know. A tokenizer that drops a space at the beginning of a text drops it later.

        Raises :class:`ConfigError` for a tokenizer whose tokens have no bytes of their own.
        """
        if not (self._byte_level or self._spaced):
            raise ConfigError(
                f"{self.origin}: tokens have no bytes of their own; expected a decoder ByteLevel, ByteFallback or Metaspace"
            )
        found = [b""] * vocabulary
        added = self._tokenizer.get_added_tokens_decoder()
        alphabet = _byte_alphabet() if self._byte_level else {}
        for spelling, token in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token >= vocabulary:
                continue
            if token in added:
                found[token] = b"" if added[token].special else spelling.encode()
            elif self._byte_level and all(character in alphabet for character in spelling):
                found[token] = bytes(alphabet[character] for character in spelling)
            elif self._byte_fallback and self._continues(token):
                found[token] = bytes((int(spelling[1:-1], 16),))
            else:
                found[token] = (spelling.replace("\u2581", " ") if self._spaced else spelling).encode()
        return found

    def stream(self, *, special_tokens: bool = False) -> StreamDecoder:
        """A decoder for one stream of tokens. ``special_tokens``: whether those give text."""
        decode = partial(self.decode, special_tokens=True) if special_tokens else self.decode
        return StreamDecoder(decode, self._continues if self._byte_fallback else None)

    def _continues(self, token: int) -> bool:
        """Whether the token is one byte of a run that is only decoded as a whole (sentencepiece's byte fallback)."""
        spelling = self._tokenizer.id_to_token(token)
        return spelling is not None and len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">")


def check_same_tokens(own: Tokenizer, directory: Path) -> None:
    """Raise :class:`CheckpointError` where a draft has a tokenizer.json, and most of its tokens aren't those of ``own``, the
    target's: as large a vocabulary may be another one, and then hardly a draft is accepted.

    A draft without that file, or with one that can't be read, isn't asked.
    """
    try:
        if read_bytes(own.origin, _LIMIT) == read_bytes(directory / _FILE, _LIMIT):
            return
        other = Tokenizer.from_checkpoint(directory)
    except CheckpointError:
        return
    here, there = own.spellings(), other.spellings()
    both = sorted(here.keys() & there.keys())
    differing = [token for token in both if here[token] != there[token]]
    if 2 * len(differing) > len(both):
        token = differing[0]
        raise CheckpointError(
            f"{other.origin}: {len(differing)} of {len(both)} tokens aren't the target's: token {token} is "
            f"{shown(there[token])}, and {shown(here[token])} there, so it would draft another text than the target reads; "
            "expected a draft with the target's tokenizer"
        )


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers spell a byte as a character: printable ones as they are, the others from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint comes with a tokenizer; one without serves token ids."""
    return any(present(directory / name) for name in (_FILE, *_OLDER))


def _converted(path: Path) -> HfTokenizer:
    """The tokenizer of a checkpoint that has no tokenizer.json, as transformers makes it of the file ``path``."""
    from transformers import AutoTokenizer

    for file in (path, *(path.parent / name for name in ("tokenizer_config.json", "special_tokens_map.json"))):
        if file is path or present(file):
            read_bytes(file, _LIMIT)  # for its checks: transformers opens whatever is there
    needed = "it may need the package sentencepiece: pip install 'outrider[sentencepiece]'"
    with reading(path, "a tokenizer", "" if find_spec("sentencepiece") else needed):
        made: Any = AutoTokenizer.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False, use_fast=True)
        backend = getattr(made, "backend_tokenizer", None)
        if not isinstance(backend, HfTokenizer):
            raise ConfigError(f"transformers' {type(made).__name__} can't be made a tokenizer.json; save it as one")
        # A copy: what transformers made stays its own.
        return HfTokenizer.from_str(backend.to_str())


def _told_beside(directory: Path) -> list[tuple[Path, dict[int, AddedToken]]]:
    """Tokens by id that the files beside tokenizer.json tell of, and where. What isn't of their form is passed over."""
    found: list[tuple[Path, dict[int, AddedToken]]] = []
    config, older = directory / _CONFIG, directory / _ADDED
    if present(config):
        told = read_json(config).get("added_tokens_decoder")
        entries = told.items() if isinstance(told, dict) else ()
        found.append((config, {int(key): _added_token(value) for key, value in entries if _is_added(key, value)}))
    if present(older):
        ids = read_json(older)
        found.append((older, {id: AddedToken(text) for text, id in ids.items() if text and type(id) is int}))
    return found


def _is_added(key: str, value: object) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10 and isinstance(value, dict) and bool(value.get("content"))


def _added_token(value: dict[str, Any]) -> AddedToken:
    return AddedToken(str(value["content"]), **{side: value[side] for side in _SIDES if isinstance(value.get(side), bool)})


def _add(tokenizer: HfTokenizer, tokens: dict[int, AddedToken]) -> None:
    """Add those that aren't there, where they get the id that they're said to have."""
    there = tokenizer.get_added_tokens_decoder()
    for token in sorted(tokens.keys() - there.keys()):
        known = tokenizer.token_to_id(tokens[token].content)
        if token == (tokenizer.get_vocab_size(with_added_tokens=True) if known is None else known):
            tokenizer.add_tokens([tokens[token]])


def _growth(part: Any) -> int:
    """How much longer a normaliser or decoder may make a text: one replacement works on what another has made."""
    if not isinstance(part, dict):
        return 1
    inner = math.prod(_growth(each) for name in ("normalizers", "decoders") for each in part.get(name, ()))
    return inner * max(1, len(part.get("content") or "") if part.get("type") == "Replace" else 1)


def _has_decoder(decoder: Any, kind: str) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == kind or any(_has_decoder(inner, kind) for inner in decoder.get("decoders", ()))
