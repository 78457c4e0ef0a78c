"""Rules of prose that a program can check: openings of docstrings, empty docstrings, discouraged words, long sentences.

Each rule is a function from text to findings. A rule has no list of exceptions: it excludes literal uses itself, such as
"behind a proxy".
"""

from __future__ import annotations

import ast
import collections
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from arch.parsing import nodes

MAX_SENTENCE_WORDS = 32
MIN_DOCSTRING_CHARACTERS = 26
"""A public docstring of one line below this length says less than the name."""
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 800

OPENINGS = frozenset(
    ["what", "whether", "those", "that", "as", "it", "nothing", "of", "who", "whose", "which", "where", "whatever"]
)

PROXY = r"(?:proxy|proxies|load balancer|router|firewall|gateway)"
DISCOURAGED = {
    # A server stands behind a proxy or a load balancer.
    rf"\bbehind\b(?! (?:a|the|its) (?:\w+ )?{PROXY})": "after, following, protected by",
    r"\bbeside\b": "next to, concurrently with, compared with, in addition to",
    r"\b(?:made|makes?) plain\b": "dequantized",
    # "cut up" and "cuts" as nouns of tiling; a cut of a hypothesis or a text is a cut.
    r"\bcut up\b|\bcuts\b": "tiled, tile configurations",
    r"\bby decree\b|\bdecreed\b": "synthetic acceptance",
    r"\bfor ever\b": "forever, without limit",
    r"\b(?:some|any)body\b|\bnobody\b|\bwhoever\b": "the caller, the user, or the component by name",
    r"\bin the same breath\b|\blikewise\b": "also, or the noun again",
    r"\bas (?:it is|they are|ever)\b": "unchanged",
    r"\blets? through\b": "accepts",
    r"\bwhat (?:there is|is there|comes|came|it takes|they take|is left)\b": "the noun",
    r"\bits luck\b|\bluck\b": "random outcome, seed",
    r"\bforsaken?\b|\bforsakes?\b|\bspoilt\b|\bspoils?\b|\bmisleads?\b": "released, corrupted, injected fault",
    r"\bseams?\b": "backend interface",
}


@dataclass(frozen=True)
class Finding:
    """One violation: ``where`` is path and line, ``rule`` one of the names that :func:`findings` uses."""

    where: str
    rule: str
    text: str


def prose_of_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind (``public``, ``private`` or ``comment``) and text of each docstring and comment.

    Comments of a module without a suspect line are left out.
    """
    for node in nodes(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            private = not isinstance(node, ast.Module) and node.name.startswith("_")
            yield node.body[0].lineno, "private" if private else "public", text
    # Splitting a module into tokens takes longer than all else here: only a module with a suspect line is worth it.
    if any(list(findings_in_text("comment", text)) for text in re.findall(r"(?=# ([A-Za-z].*))", source)):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and re.match(r"# [A-Za-z]", token.string):
                yield token.start[0], "comment", token.string[2:]


def prose_of_markdown(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind ``page`` and text of each line outside of code, tables, headings and HTML."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and line.strip() and not line.startswith(("|", "#", "    ", "<")):
            yield number, "page", line


def findings_in_text(kind: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield rule and detail for one piece of prose."""
    if kind in ("public", "private") and (first := re.match(r"[A-Za-z]+", text)) and first[0].lower() in OPENINGS:
        yield "opening", f"{first[0]!r}: begin with an imperative verb, or with the noun that the object is"
    if kind == "public" and "\n" not in text and len(text) < MIN_DOCSTRING_CHARACTERS:
        yield "empty docstring", f"{text!r}: say what it does, or delete it"
    plain = re.sub(r"``[^`]*``|`[^`]*`|\([^)]*\)|:\w+:|https?://\S+", "", text)
    for pattern, instead in DISCOURAGED.items():
        if match := re.search(pattern, plain, re.IGNORECASE):
            yield "word", f"{match[0]!r}: {instead}"
    for sentence in re.split(r"(?<=[.!?;:])\s", plain):
        if (words := len(sentence.split())) > MAX_SENTENCE_WORDS:
            yield "long sentence", f"{words} words: {' '.join(sentence.split()[:8])}"


def findings(path: str, source: str) -> list[Finding]:
    """Return what the rules find in one file, a Python module or a page."""
    pieces = prose_of_python(source) if path.endswith(".py") else prose_of_markdown(source)
    return [
        Finding(f"{path}:{line}", rule, detail)
        for line, kind, text in pieces
        for rule, detail in findings_in_text(kind, text)
    ]


def long_functions(path: str, source: str) -> list[str]:
    """Return each function of more than ``MAX_FUNCTION_LINES`` lines.

    A kernel in Triton's language is excluded: each operand and tile size is a parameter on a line of its own, and a split
    would change the compiled code.
    """
    return [
        f"{path}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
        and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def duplicate_classes(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the places of each class name that two classes have."""
    places = collections.defaultdict(list)
    for path, source in files.items():
        for node in nodes(source):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


BARE_VERBS = frozenset(["run", "take", "keep", "read", "of", "choose", "forget", "end"])


def bare_verbs(files: Mapping[str, str]) -> list[str]:
    """Return methods named with a bare verb in classes that neither have a base nor are one.

    A shared base class or a protocol may declare such a method.
    """
    classes = [(path, node) for path, source in files.items() for node in nodes(source) if isinstance(node, ast.ClassDef)]
    bases = {part for _, node in classes for base in node.bases for part in re.findall(r"\w+", ast.unparse(base))}
    return [
        f"{path}:{method.lineno}: {node.name}.{method.name}"
        for path, node in classes
        if not node.bases and node.name not in bases
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in BARE_VERBS
    ]
