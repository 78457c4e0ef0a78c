"""Record a picture of SmolLM2's answer in which accepted draft tokens are green.

python picture.py ../../docs/images/accepted-drafts.svg
"""

import re
import sys
from contextlib import closing
from pathlib import Path

from demo import TASK
from rich.console import Console
from rich.text import Text
from timing import load_outrider, open_smollm2

from outrider import SamplingParams
from outrider.cli.commands.generate import split_text

QUESTION = "How do I learn to swim?"
WIDTH = 88


def main() -> int:
    _, directory, template = open_smollm2()
    console = Console(record=True, width=WIDTH, file=sys.stderr)
    for prompt, drafter, draft_tokens, tokens in (
        (QUESTION, "eagle3", 3, 72),
        (TASK.read_text(encoding="utf-8"), "ngram", 7, 64),
    ):
        answer, iterations, count = Text(), 0, 0
        with closing(load_outrider(directory, drafter, draft_tokens, "float32")) as engine:
            messages = [{"role": "user", "content": prompt}]
            for output in engine.stream(template.tokens(messages), SamplingParams(max_tokens=tokens)):
                drafted, own = split_text(output, engine.tokenizer)
                answer.append(drafted, style="green").append(own)
                iterations, count = iterations + 1, count + len(output.tokens)
        console.print(Text(f"> {prompt.splitlines()[0]}", style="bold"))
        console.print(answer)
        console.print(Text(f"{drafter}: {count} tokens in {iterations} iterations\n", style="dim"))
    picture = console.export_svg(title="SmolLM2-135M-Instruct; accepted draft tokens are green")
    # Without fonts of another host, the reader's own are used.
    Path(sys.argv[1]).write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
