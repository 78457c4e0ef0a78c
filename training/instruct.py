"""Prompts of four kinds for an instruction-tuned target, and the target's answers: the text that a draft head learns from.

Letters: B prompts, S positions, V vocabulary.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import corpus
import torch
from decoding import Generator
from torch import Tensor

from model import Target

KINDS = ("chat", "code", "maths", "summary")
CODE_TASKS = (
    "Rewrite this function with type hints:",
    "Add comments to this code:",
    "Add a docstring to this function:",
    "Explain what this function does:",
    "Rename the variables of this function and repeat it:",
    "Write a test for this function:",
)
SUMMARY_TASKS = (
    "Summarize the following text in two sentences:",
    "Summarize the following text and quote the important parts:",
    "List the main points of this text:",
    "Rewrite the following text in simpler words:",
    "Correct the spelling of this text:",
)
FIRST_WORDS = (
    "What is",
    "What are",
    "How do I",
    "How does",
    "Why",
    "Who",
    "When",
    "Can you",
    "Could you help me",
    "Tell me about",
    "Explain",
    "Write a",
    "Give me ideas for",
    "I want to",
    "Describe",
    "Is it",
)
MATHS_TASKS: tuple[Callable[[random.Random], str], ...] = (
    lambda r: f"What is {r.randint(11, 999)} {r.choice(('plus', 'minus', 'times'))} {r.randint(2, 99)}? Show your work.",
    lambda r: (
        f"A shop sells {r.randint(3, 60)} apples a day for {r.randint(2, 9)} dollars each. What does it earn in "
        f"{r.randint(2, 30)} days?"
    ),
    lambda r: f"A train travels {r.randint(40, 900)} km in {r.randint(2, 12)} hours. What is its average speed?",
    lambda r: f"Solve for x: {r.randint(2, 12)}x + {r.randint(1, 50)} = {r.randint(51, 200)}.",
    lambda r: f"What is {r.randint(5, 95)} percent of {r.randint(20, 2000)}?",
    lambda r: f"A rectangle is {r.randint(2, 50)} cm long and {r.randint(2, 50)} cm wide. What are its area and perimeter?",
    lambda r: (
        f"Ann has {r.randint(5, 90)} books and gives {r.randint(1, 5)} to each of {r.randint(2, 9)} friends. How many "
        "are left?"
    ),
    lambda r: f"Is {r.randint(20, 500)} divisible by {r.randint(2, 12)}? Explain.",
    lambda r: f"Write {r.randint(3, 20)}/{r.randint(21, 60)} as a decimal and simplify the fraction.",
    lambda r: f"What are the next three numbers after {r.randint(1, 9)}, {r.randint(10, 19)}, {r.randint(20, 29)}?",
)


@dataclass(frozen=True)
class Prompt:
    """A question as tokens of the target's chat template, with its kind."""

    kind: str
    tokens: list[int]


def functions_and_texts(stdlib: Path) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Return functions and long docstrings of the standard library, each with whether its file is held out."""
    functions, texts = [], []
    for source in corpus.read_sources(stdlib):
        try:
            tree = ast.parse(source.text)
        except (SyntaxError, ValueError):
            continue
        held_out, lines = corpus.is_held_out(source.path), source.text.split("\n")
        for node in definitions(tree):
            if isinstance(node, ast.FunctionDef):
                code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if 120 <= len(code) <= 700:
                    functions.append((code, held_out))
            docstring = ast.get_docstring(node) or ""
            if 200 <= len(docstring) <= 900:
                texts.append((docstring, held_out))
    return functions, texts


def definitions(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """Yield a module, class or function and those inside of it, except in conditional statements."""
    yield node
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield from definitions(child)


class Conversations:
    """The source of prompts, and of the target's answers to them.

    Questions of the kind chat are those that the target writes itself after ``opening``, the tokens of its chat template in
    front of a question (Xu et al. 2024, Magpie).
    """

    kinds = KINDS

    def __init__(
        self, target: Target, tokenizer: Any, stdlib: Path, *, prompt: int, total: int, end: int, batch: int
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.limit, self.total, self.end, self.batch = prompt, total, end, batch
        self.device = target.embed_tokens.weight.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        functions, texts = functions_and_texts(stdlib)
        self.sources = {
            (kind, wanted): [text for text, held_out in found if held_out is wanted]
            for kind, found in (("code", functions), ("summary", texts))
            for wanted in (False, True)
        }
        pairs = zip(self.encode("A"), self.encode("7"), strict=False)
        self.opening = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        self.writers: dict[float, ForcedGenerator] = {}

    def encode(self, question: str) -> list[int]:
        """Return the tokens of a question in the chat template, with the opened answer."""
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def draw(self, count: int, rng: random.Random, *, held_out: bool) -> list[Prompt]:
        """Return ``count`` prompts, two of five of them chat. Those of training never come from a held-out file."""
        cycle = (*KINDS, "chat")
        questions = iter(self.write_questions(2 * (count // len(cycle) + 1), rng))
        found: list[Prompt] = []
        while len(found) < count:
            kind = cycle[len(found) % len(cycle)]
            if kind == "chat":
                question = next(questions)
            elif kind == "maths":
                question = rng.choice(MATHS_TASKS)(rng)
            else:
                text = rng.choice(self.sources[kind, held_out])
                task = rng.choice(CODE_TASKS if kind == "code" else SUMMARY_TASKS)
                question = f"{task}\n\n```python\n{text}\n```" if kind == "code" else f"{task}\n\n{text}"
            tokens = self.encode(question)
            if len(tokens) <= self.limit:
                found.append(Prompt(kind, tokens))
        return found

    def write_questions(self, count: int, rng: random.Random) -> list[str]:
        """Return questions that the target writes after the first words, each up to the end of its first sentence."""
        found: list[str] = []
        while len(found) < count:
            torch.manual_seed(rng.randrange(1 << 30))
            words = [rng.choice(FIRST_WORDS) for _ in range(self.batch)]
            prompts = [[*self.opening, *self.tokenizer(each, add_special_tokens=False)["input_ids"]] for each in words]
            for row in self.write(prompts, temperature=1.0, total=len(self.opening) + 40).tolist():
                text = self.tokenizer.decode(row[len(self.opening) :]).split("<|")[0]
                sentence = re.match(r"[^.?!\n]+[.?!]?", text)
                if sentence is not None:
                    found.append(sentence[0].strip())
        return found[:count]

    def write(self, prompts: Sequence[list[int]], *, temperature: float, total: int | None = None) -> Tensor:
        """Return each prompt with the target's continuation, [B, total]."""
        total = self.total if total is None else total
        if temperature not in self.writers:
            self.writers[temperature] = ForcedGenerator(self.target, self.batch, self.total, temperature, self.dtype)
        writer, rows = self.writers[temperature], []
        for at in range(0, len(prompts), self.batch):
            part = list(prompts[at : at + self.batch])
            part += part[:1] * (self.batch - len(part))
            rows.append(writer.answer(part, total)[: len(prompts) - at])
        return torch.cat(rows)


class Pieces(Conversations):
    """Draws the beginnings of functions, for a target that completes code and has no use for questions."""

    kinds = ("code",)

    def draw(self, count: int, rng: random.Random, *, held_out: bool) -> list[Prompt]:
        functions = self.sources["code", held_out]
        found: list[Prompt] = []
        while len(found) < count:
            tokens = self.tokenizer(rng.choice(functions), add_special_tokens=False)["input_ids"]
            found.append(Prompt("code", tokens[: rng.randrange(16, self.limit)]))
        return found


class ForcedGenerator(Generator):
    """A generator for prompts of different lengths: while a row is inside its prompt, its next token is the prompt's."""

    def __init__(self, target: Target, batch: int, length: int, temperature: float, dtype: torch.dtype) -> None:
        super().__init__(target, batch, length, temperature, dtype)
        self.lengths = torch.ones(batch, dtype=torch.long, device=self.device)

    def sample(self, hidden: Tensor) -> Tensor:
        following = (self.position + 1).clamp(max=self.tokens.shape[1] - 1)
        given = self.tokens.index_select(1, following)[:, 0]
        return torch.where(following < self.lengths, given, super().sample(hidden))

    def answer(self, prompts: list[list[int]], total: int) -> Tensor:
        """Return the prompts, each continued to ``total`` tokens."""
        shortest = min(len(prompt) for prompt in prompts) - 1
        self.position.fill_(shortest - 1)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
        self.lengths.copy_(torch.tensor([len(prompt) for prompt in prompts], device=self.device))
        return self.run(self.tokens[:, :shortest].clone(), total - shortest)
