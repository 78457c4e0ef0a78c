"""The command and OpenAI's own client, as people use both: ``python tests/serve/official.py [SCHEMAS]``.

Needs the extra ``serve``, and the packages openai, jsonschema and hypothesis. Starts ``outrider serve`` with the bundled
model and speculation in float32, asks for whole and streamed completions, a chat, log-probabilities, and JSON for so many
drawn schemas (200), whose outputs are validated; compares tokens with ``outrider generate``. Prints what was seen as JSON;
exit code 1 where something was wrong.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.guided_schemas import SCHEMAS, check_fits

COMMAND = [sys.executable, "-m", "outrider.cli.main"]
PROMPTS = ("def add(a, b):", "class Tree:", "import os\n", "def read(path):")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MODEL, TOKENS, AT_ONCE = "outrider-bundled", 24, 16


def generated(prompt):
    """The text that the command without a server gives."""
    command = [*COMMAND, "generate", "--backend", "cpu", "--dtype", "float32", "--max-tokens", str(TOKENS), "--json"]
    done = subprocess.run([*command, "--prompt", prompt], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["text"]


def ask(client, seen):
    """Completions, whole and as streams, with log-probabilities; a chat."""
    for prompt in PROMPTS:
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        whole = client.completions.create(**asked, logprobs=2)
        text = whole.choices[0].text
        streamed = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        pieces = [chunk.choices[0].text for chunk in streamed if chunk.choices]
        assert "".join(pieces) == text
        assert len(whole.choices[0].logprobs.token_logprobs) == whole.usage.completion_tokens
        assert all(value <= 0 for value in whole.choices[0].logprobs.token_logprobs)
        assert "".join(whole.choices[0].logprobs.tokens) == text
        wanted = generated(prompt)
        assert text == wanted, (text, wanted)
        seen["same as generate"] += 1
        seen["accepted"] += whole.usage.completion_tokens_details.accepted_draft_tokens or 0
    messages = [{"role": "user", "content": "write a loop"}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    chat = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == chat.message.content
    assert len(chat.logprobs.content[0].top_logprobs) == 2
    seen["chats"] += 1


def ask_for_json(client, seen, schemas):
    """An output for each drawn schema, validated where it ended by itself."""
    found = []

    @settings(
        max_examples=-(-schemas // 8),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(given=st.lists(SCHEMAS, min_size=8, max_size=8))
    def draw(given):
        found.extend(given)

    draw()
    found = found[:schemas]

    def one(place):
        schema = found[place]
        asked = {"type": "json_schema", "json_schema": {"name": "drawn", "schema": schema, "strict": True}}
        choice = client.completions.create(
            model=MODEL,
            prompt="x = ",
            max_tokens=400,
            temperature=0.0 if place % 2 else 1.0,
            seed=place,
            extra_body={"response_format": asked},
        ).choices[0]
        if choice.finish_reason == "stop":
            check_fits(choice.text, schema)
        return choice.finish_reason

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for reason in pool.map(one, range(len(found))):
            seen[f"schemas, {reason}"] = seen.get(f"schemas, {reason}", 0) + 1


def main(schemas=200):
    """Run it all; what was seen."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template, tempfile.TemporaryFile("w+") as log:
        template.write(TEMPLATE)
        template.flush()
        options = [
            "--port",
            "0",
            "--backend",
            "cpu",
            "--dtype",
            "float32",
            "--max-context",
            "1024",
            "--chat-template",
            template.name,
        ]
        server = subprocess.Popen([*COMMAND, "serve", *options], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            seen = {"ready_s": round(time.monotonic() - began, 1), "same as generate": 0, "accepted": 0, "chats": 0}
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=1200) as client:
                ask(client, seen)
                ask_for_json(client, seen, schemas)
            server.send_signal(signal.SIGTERM)
            seen["exit code"] = server.wait(120)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise
        finally:
            server.kill()
            server.wait()
            server.stdout.close()
    seen["seconds"] = round(time.monotonic() - began, 1)
    assert seen["exit code"] == 0
    assert seen["accepted"] > 0
    assert seen.get("schemas, stop", 0) > schemas // 2
    return seen


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
