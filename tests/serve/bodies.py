"""Random request bodies of a given size: valid JSON of many shapes in any field, and what is no JSON."""

import json

ITEMS = ("5", '"a"', "[]", "{}", "[5]", '["a"]', '{"a": 0}', "null", "1.5", "-1", "true", '{"role": "user", "content": "x"}')
PIECES = ("a", " ", "x = 1\\n", "\\u0041", "\\ud83d\\ude00", "ü", "😀", ",", "[", "<|endoftext|>", "\\n")
LISTS = ("prompt", "stop", "stop_token_ids", "messages", "tools", "modalities", "functions")
LISTS += ("input", "include", "tokens", "system")
OBJECTS = ("logit_bias", "metadata", "response_format", "chat_template_kwargs", "stream_options", "prediction")
PATHS = ("/v1/completions", "/v1/chat/completions") * 3
PATHS += ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize")
HEAD = '{"model": "m", "max_tokens": 1, '
CHAT = '"messages": [{"role": "user", "content": "x"}], '


def repeated(piece, size, between=""):
    """The piece so often that the text has about this size."""
    count = max(1, size // (len(piece.encode()) + len(between)))
    return between.join([piece] * count)


def list_body(drawn, size):
    items = repeated(drawn.choice(ITEMS), size, ",")
    odd = drawn.choice(ITEMS)
    lists = [f"[{items}]", f"[{items},{odd}]", f"[{odd},{items}]", f"[[{items}]]"]
    inner = drawn.choice([*lists, f'[{{"role": "user", "content": [{items}]}}]'])
    return f'{HEAD}"{drawn.choice(LISTS)}": {inner}}}'


def object_body(drawn, size):
    item = drawn.choice(ITEMS)
    fields = ",".join(f'"{number}": {item}' for number in range(max(1, size // (len(item) + 9))))
    field = drawn.choice([f'"{name}": {{{fields}}}' for name in OBJECTS] + [fields])
    long_name = f'"{"a" * size}": 1'
    return f'{HEAD}{drawn.choice(["", CHAT])}"prompt": "x", {drawn.choice([field, field, long_name])}}}'


def text_body(drawn, size):
    text = repeated(drawn.choice(PIECES), size)
    message = f'{{"role": "{drawn.choice(["user", "assistant", "tool", "odd"])}", "content": "{text}"}}'
    fields = [
        f'"prompt": "{text}"',
        f'"prompt": ["x", "{text}"]',
        f'"messages": [{message}]',
        f'"stop": "{text}"',
        f'"input": "{text}"',
    ]
    return f"{HEAD}{drawn.choice(fields)}}}"


def texts_body(drawn, size):
    length = drawn.choice([1, 100, 10_000])
    text = repeated(drawn.choice(PIECES), length)
    if drawn.random() < 0.5:
        return f'{HEAD}"prompt": [{repeated(json.dumps(text), size, ",")}]}}'
    message = f'{{"role": "user", "content": {json.dumps(text)}}}'
    return f'{HEAD}"messages": [{repeated(message, size, ",")}]}}'


def deep_body(drawn, size):
    depth = min(size // 2, drawn.choice([50, 190, 250, 900, 990, 1_000_000]))
    start, end = drawn.choice([("[", "]"), ('{"a":', "}"), ('{"anyOf":[', "]}"), ('{"properties":{"a":', "}}")])
    value = f"{start * depth}1{end * depth}"[:size]
    function = f'{{"name": "f", "parameters": {{"a": {value}}}}}'
    tool = f'"tools": [{{"type": "function", "function": {function}}}], "tool_choice": "required"'
    schema = f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {{"a": {value}}}}}}}'
    flat_tool = f'"input": "x", "tools": [{{"type": "function", "name": "f", "parameters": {{"a": {value}}}}}]'
    block = f'"input": [{{"role": "user", "content": {value}}}]'
    others = [f'"{name}": {{"a": {value}}}' for name in ("metadata", "chat_template_kwargs", "text", "reasoning")]
    fields = [tool, schema, flat_tool, block, f'"prompt": {value}', *others]
    return f"{HEAD}{drawn.choice(['', CHAT])}{drawn.choice(fields)}}}"


def broken_body(drawn, size):
    return drawn.choice(
        [
            drawn.randbytes(size),
            b"[" * size,
            b'{"a":' * (size // 5),
            b"1" * size,
            b'"' + b"a" * size,
            b"\x00" * size,
            b" " * size,
            b'{"model": "m", "prompt": [' + b"1" * min(size, 4000) + b"]}",
        ]
    )


KINDS = (list_body, object_body, text_body, texts_body, deep_body, broken_body)


def random_body(drawn, largest):
    """A body, and the path that it's sent to. Small and large sizes are equally likely by their logarithm."""
    size = int(1024 * (largest / 1024) ** drawn.random())
    body = drawn.choice(KINDS)(drawn, size)
    return drawn.choice(PATHS), body.encode() if isinstance(body, str) else body
