"""What a client puts together of a streamed answer, or of a message that comes in deltas."""

import json


def cut(text, size):
    """The text in pieces of this size."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def put_together(reader, pieces):
    """The message of a text in pieces, and its deltas."""
    made, calls, deltas = {"content": "", "reasoning_content": ""}, {}, []
    for number, piece in enumerate(pieces):
        deltas.append(reader.feed(piece, last=number == len(pieces) - 1))
        for name in made:
            made[name] += deltas[-1].get(name, "")
        for call in deltas[-1].get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
            assert ("id" in call) == (not known["name"]), "the first delta of a call, and no other, has its id"
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return {**made, "calls": list(calls.values())}, deltas


def chunks_of(answer):
    """The chunks of a streamed completion, which ends as OpenAI's do."""
    assert answer.status_code == 200, answer.text
    *chunks, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]
