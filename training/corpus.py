"""The training text: Python's standard library, split by file; a byte-level BPE tokenizer; held-out prompts."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, PAD = "<|endoftext|>", "<|pad|>"
HELD_OUT_SHARE = 0.04
# Character tables and one huge string literal, which are no useful training text.
SKIPPED = ("encodings/", "pydoc_data/")


@dataclass(frozen=True)
class Source:
    """One file of the training text: its path and its content."""

    path: str
    """Path relative to the standard library's folder."""
    text: str


def read_sources(stdlib: Path) -> list[Source]:
    """Return every readable .py file of the standard library, without duplicates."""
    sources: list[Source] = []
    seen: set[str] = set()
    for file in sorted(stdlib.rglob("*.py")):
        relative = file.relative_to(stdlib).as_posix()
        if "site-packages" in relative or "dist-packages" in relative or relative.startswith(SKIPPED):
            continue
        try:
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) < 200 or digest in seen:
            continue
        seen.add(digest)
        sources.append(Source(relative, text))
    if not sources:
        raise SystemExit(f"no Python files under {stdlib}")
    return sources


def is_held_out(path: str) -> bool:
    """Return True for a fixed share of files, selected by the hash of their relative path."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) / 2**32 < HELD_OUT_SHARE


def long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 24}


def split(sources: list[Source]) -> tuple[list[Source], list[Source], list[str]]:
    """Return training files, held-out files, and the training files dropped because they resemble a held-out file.

    A training file is dropped if it holds more than a third of a held-out file's distinct long lines. It is also dropped if
    one held-out file holds more than a third of its own long lines.
    """
    held_out = [s for s in sources if is_held_out(s.path)]
    files_with_line: dict[str, set[int]] = defaultdict(set)
    for i, source in enumerate(held_out):
        for line in long_lines(source.text):
            files_with_line[line].add(i)
    sizes = [max(1, len(long_lines(s.text))) for s in held_out]
    train: list[Source] = []
    dropped: list[str] = []
    for source in sources:
        if is_held_out(source.path):
            continue
        own_lines = long_lines(source.text)
        shared = Counter(i for line in own_lines for i in files_with_line.get(line, ()))
        if any(n > 3 and (n > sizes[i] / 3 or n > len(own_lines) / 3) for i, n in shared.items()):
            dropped.append(source.path)
        else:
            train.append(source)
    return train, held_out, dropped


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which round-trips any text. The end token is 0, the pad token 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json in the format of transformers."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def encode(tokenizer: Tokenizer, sources: list[Source]) -> np.ndarray:
    """Return one stream of tokens, with each file between two end tokens."""
    end = tokenizer.token_to_id(END)
    stream = [np.array([end], dtype=np.uint16)]
    for encoding in tokenizer.encode_batch_fast([s.text for s in sources], add_special_tokens=False):
        stream += [np.array(encoding.ids, dtype=np.uint16), np.array([end], dtype=np.uint16)]
    return np.concatenate(stream)


def build(stdlib: Path, folder: Path, vocab_size: int, seed: int) -> None:
    """Write the tokenizer, the token streams of training and held-out files, the list of files and the held-out prompts to
    ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out, dropped = split(read_sources(stdlib))
    order = list(range(len(train)))
    random.Random(seed).shuffle(order)
    train = [train[i] for i in order]
    tokenizer = train_tokenizer([s.text for s in train], vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts: dict[str, object] = {"dropped": dropped}
    for name, sources in (("train", train), ("held_out", held_out)):
        tokens = encode(tokenizer, sources)
        np.save(folder / f"{name}.npy", tokens)
        facts[name] = {
            "files": len(sources),
            "bytes": sum(len(s.text.encode()) for s in sources),
            "tokens": len(tokens),
        }
    facts["held_out_paths"] = [s.path for s in held_out]
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    prompts = make_prompts(tokenizer, held_out, count=96)
    (folder / "prompts.json").write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n")
    print({k: v for k, v in facts.items() if k in ("train", "held_out")}, f"dropped {len(dropped)} files")


def make_prompts(tokenizer: Tokenizer, held_out: list[Source], count: int) -> list[dict[str, object]]:
    """Return excerpts of held-out files with 20 to 200 tokens, from the start of a line to just before white space."""
    rng = random.Random(20261120)
    long_enough = [s for s in held_out if len(s.text) > 1500]
    prompts: list[dict[str, object]] = []
    per_file: Counter[str] = Counter()
    for attempt in range(100 * count):
        if len(prompts) == count:
            break
        source = long_enough[attempt % len(long_enough)]
        wanted = round(20 * 10 ** rng.random())
        starts = [0] + [m.end() for m in re.finditer(r"\n+(?=[^\n])", source.text)]
        start = rng.choice(starts)
        piece = tokenizer.encode(source.text[start : start + 6 * wanted], add_special_tokens=False)
        rough = tokenizer.decode(piece.ids[:wanted], skip_special_tokens=False)
        ends = [m.start() for m in re.finditer(r"(?<=\S)\s", rough)]
        if not ends or per_file[source.path] > count // len(long_enough):
            continue
        text = rough[: ends[-1]]
        tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if 20 <= tokens <= 200 and source.text[start:].startswith(text):
            per_file[source.path] += 1
            line = source.text.count("\n", 0, start) + 1
            prompts.append({"file": source.path, "line": line, "tokens": tokens, "text": text})
    return prompts
