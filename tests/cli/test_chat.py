"""``outrider chat``, and ``outrider generate --chat``: messages through the checkpoint's template."""

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from outrider.bundled import bundled
from outrider.cli.options.option_records import read_messages
from outrider.model.media.chat_template import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)
COMMON = ("--backend", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The bundled model with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(bundled("target"), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def typed(monkeypatch):
    """Puts bytes on standard input."""

    def put(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return put


def test_a_prompt_is_a_message(outrider, checkpoint):
    common = ("generate", "--model", checkpoint, "--max-tokens", "6", "--json", *COMMON)
    chat = outrider(*common, "--chat", "--prompt", "def read(").json
    plain = outrider(*common, "--prompt", "# user: def read(\n# assistant: ").json
    assert chat["token_ids"] == plain["token_ids"]


def test_messages_of_a_file(outrider, checkpoint, tmp_path):
    said = [
        {"role": "user", "content": "def read("},
        {"role": "assistant", "content": "path"},
        {"role": "user", "content": [{"type": "text", "text": "more"}, {"type": "text", "text": "of it"}]},
    ]
    (tmp_path / "said.json").write_text(json.dumps(said))
    common = ("generate", "--model", checkpoint, "--max-tokens", "6", "--json", *COMMON)
    chat = outrider(*common, "--messages", str(tmp_path / "said.json")).json
    written = "# user: def read(\n# assistant: path\n# user: more\nof it\n# assistant: "
    assert chat["token_ids"] == outrider(*common, "--prompt", written).json["token_ids"]


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (2, "{", "not JSON"),
        (2, "{}", "expected a list of 1 to"),
        (2, "[]", "expected a list of 1 to"),
        (2, '["a"]', "message 0 is 'a'"),
        (2, '[{"role": "user"}]', "message 0, of the role 'user': content is None"),
        (2, '[{"role": "user", "content": [{"type": "text", "text": "a"}, null]}]', r"message 0: content[1] is None"),
        (2, '[{"role": "user", "content": [{"type": "text"}]}]', "message 0: content[0] is {'type': 'text'}"),
        (1, '[{"role": "user", "content": "\\ud800"}]', "half a character (a lone surrogate) is in the messages"),
        (1, '[{"role": "tool", "content": "x"}]', "the chat template refused the messages: no tools here"),
    ],
)
def test_messages_that_are_none(outrider, checkpoint, tmp_path, code, said, told):
    (tmp_path / "said.json").write_text(said)
    result = outrider("generate", "--messages", str(tmp_path / "said.json"), "--model", checkpoint, *COMMON)
    assert result.code == code
    assert told in result.err


@pytest.mark.parametrize(
    ("code", "given", "told"),
    [
        (2, ("--chat", "--token-ids", "1"), "--token-ids"),
        (2, ("--messages", "x.json", "--prompt", "a"), "x.json"),
    ],
)
def test_options_that_contradict(outrider, code, given, told):
    result = outrider("generate", *given, *COMMON)
    assert result.code == code
    assert told in result.err


def test_a_model_without_a_template_cannot_chat(outrider, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    result = outrider("generate", "--model", str(tmp_path / "plain"), "--chat", "--prompt", "a", *COMMON)
    assert result.code == 1
    assert "has no chat template: it continues texts" in result.err


def test_the_bundled_model_answers(outrider, typed):
    """Messages are comments, so the code after them is the answer: chat needs no network and no options."""
    typed(b"read a file\nand now close it\n")
    result = outrider("chat", "--max-tokens", "6", "--json", *COMMON).json
    common = ("generate", "--max-tokens", "6", "--json", *COMMON)
    assert result["answers"][0]["token_ids"] == outrider(*common, "--prompt", "# read a file\n").json["token_ids"]
    roles = ["user", "assistant"] * 2
    assert [message["role"] for message in result["messages"]] == roles


def test_a_template_of_ones_own(outrider, checkpoint, tmp_path, typed):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    typed(b"def read(\n")
    common = ("--max-tokens", "4", "--speculate", "none", "--json", *COMMON)
    (own,) = outrider("chat", "--chat-template", str(tmp_path / "own.jinja"), *common).json["answers"]
    assert own["token_ids"] == outrider("generate", "--prompt", "def read(", *common).json["token_ids"]


@pytest.fixture
def with_files(checkpoint, tmp_path):
    """The checkpoint with other files: text by name, None for one that isn't there."""

    def make(files):
        path = tmp_path / "other"
        shutil.copytree(checkpoint, path)
        for name, text in files.items():
            (path / name).unlink(missing_ok=True)
            if text is not None:
                (path / name).parent.mkdir(exist_ok=True)
                (path / name).write_text(text)
        return str(path)

    return make


def tokenizer_config(template):
    held = json.loads((bundled("target") / "tokenizer_config.json").read_text())
    return json.dumps(held | {"chat_template": template})


SEVERAL = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": None, "tokenizer_config.json": tokenizer_config(SEVERAL)},
        {"additional_chat_templates/tool_use.jinja": "tools"},
        {"chat_template.jinja": None, "chat_template.json": json.dumps({"chat_template": TEMPLATE})},
    ],
    ids=["a list", "a folder", "chat_template.json"],
)
def test_where_else_a_template_may_be(outrider, checkpoint, with_files, files):
    common = ("generate", "--chat", "--prompt", "def read(", "--max-tokens", "6", "--json", *COMMON, "--model")
    assert outrider(*common, with_files(files)).json["token_ids"] == outrider(*common, checkpoint).json["token_ids"]


def test_a_template_for_conversations_with_tools(with_files):
    directory = Path(with_files({"additional_chat_templates/tool_use.jinja": "{{ tools[0].name }}"}))
    template = ChatTemplate.from_checkpoint(directory)
    said = [{"role": "user", "content": "hello"}]
    assert template.text(said) == "# user: hello\n# assistant: "
    assert template.text(said, tools=[{"name": "wrench"}]) == "wrench"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            {"chat_template.jinja": "{% for m in messages %}\n{{ m.role"},
            "jinja: the chat template can't be read as Jinja: line 2",
        ),
        ({"chat_template.jinja": " \n"}, "chat_template.jinja: the chat template is empty"),
        ({"chat_template.jinja": ""}, "chat_template.jinja: the chat template is empty"),
        (
            {"chat_template.jinja": None, "tokenizer_config.json": tokenizer_config(SEVERAL[1:])},
            "tokenizer_config.json: has the chat templates tool_use, and none that is called default",
        ),
        (
            {"chat_template.jinja": None, "tokenizer_config.json": tokenizer_config(5)},
            "its chat template is 5, expected a text",
        ),
        (
            {"chat_template.jinja": None, "tokenizer_config.json": '{"chat_template":'},
            "tokenizer_config.json: isn't valid JSON",
        ),
    ],
)
def test_a_broken_template_is_named_before_a_model_is_loaded(outrider, with_files, files, told):
    result = outrider("generate", "--chat", "--prompt", "a", "--model", with_files(files), *COMMON)
    assert result.code == 1
    assert told in result.err


def test_an_empty_file_is_no_template(outrider, checkpoint, tmp_path):
    (tmp_path / "empty.jinja").write_text("")
    result = outrider("chat", "--chat-template", str(tmp_path / "empty.jinja"), "--model", checkpoint, *COMMON)
    assert result.code == 1
    assert "the chat template is empty" in result.err


def test_a_conversation_through_a_pipe(outrider, checkpoint, typed):
    typed(b'def read(\n\n"""\nclass A:\n  x\n"""\n/reset\ndef read(\n/exit\nnever read\n')
    found = outrider("chat", "--model", checkpoint, "--max-tokens", "5", "--system", "S", "--json", *COMMON).json
    first, second, again = (answer["token_ids"] for answer in found["answers"])
    assert first == again
    assert [each["role"] for each in found["messages"]] == ["system", "user", "assistant"]
    assert len(second) == 5


def test_the_turns_of_a_conversation(outrider, checkpoint, typed):
    first = "def read(path, mode, buffering, encoding, errors, newline, closefd, opener):"
    typed(f"{first}\nmore\n".encode())
    found = outrider("chat", "--model", checkpoint, "--max-tokens", "5", "--json", *COMMON).json
    assert found["prefix_hits"] >= 16  # the second turn begins with the first
    said = [each["content"] for each in found["messages"]]
    assert said[0::2] == [first, "more"]
    assert said[1::2] == [answer["text"] for answer in found["answers"]]


def test_a_file_of_windows_begins_with_a_mark_that_is_no_text(outrider, checkpoint, typed):
    typed(b'\xef\xbb\xbf"""\r\na\r\nb\r\n"""\r\n')
    said = outrider("chat", "--model", checkpoint, "--max-tokens", "2", "--json", *COMMON).json["messages"]
    assert [each["content"] for each in said if each["role"] == "user"] == ["a\nb"]


def test_a_conversation_longer_than_the_context_is_told(outrider, checkpoint, typed):
    typed(b"a b c d e f g h i j k l m n o p\n" * 3)
    result = outrider("chat", "--model", checkpoint, "--max-context", "48", "--max-tokens", "4", *COMMON)
    assert result.code == 1
    assert "put a line with /reset before it, or give --max-context" in result.err


def test_answers_stay_where_a_later_line_is_refused(outrider, checkpoint, typed):
    typed(b"hi\nagain\n\xff\n")
    result = outrider("chat", "--model", checkpoint, "--max-tokens", "4", "--json", *COMMON)
    assert result.code == 1
    assert result.json["error"]["type"] == "RequestError"
    assert "isn't UTF-8" in result.json["error"]["message"]
    assert [len(answer["token_ids"]) for answer in result.json["answers"]] == [4, 4]
    assert [each["role"] for each in result.json["messages"]] == ["user", "assistant"] * 2


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGINT, "Interrupted", 130), (signal.SIGTERM, "Terminated", 143)]
)
def test_answers_stay_where_a_signal_ends_it(outrider, checkpoint, monkeypatch, number, kind, code):
    class Lines(io.BytesIO):
        def readline(self, size=-1):
            if self.tell():
                os.kill(os.getpid(), number)
            return super().readline(size)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Lines(b"hi\nagain\n"), encoding="utf-8"))
    result = outrider("chat", "--model", checkpoint, "--max-tokens", "4", "--json", *COMMON)
    assert result.code == code
    assert result.json["error"]["type"] == kind
    assert [len(answer["token_ids"]) for answer in result.json["answers"]] == [4]


def test_quotes_that_nobody_closes(outrider, checkpoint, typed):
    typed(b'"""\nclass A\n')
    result = outrider("chat", "--model", checkpoint, *COMMON)
    assert result.code == 1
    assert "without closing them" in result.err


@pytest.mark.parametrize(("presses", "code"), [(1, 0), (2, 130)])
def test_an_interrupt_ends_the_answer(outrider, checkpoint, typed, monkeypatch, presses, code):
    """One ends the answer. A second one, where the answer doesn't end, ends the command."""
    from outrider.cli.commands import chat
    from outrider.cli.terminal import stopping

    monkeypatch.setattr(stopping, "_TWICE_S", 0.0)
    pieces = []

    def write(text):
        pieces.append(text)
        if len(pieces) == 3:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(chat, "_write", write)
    typed(b"def read(\nmore\n")
    result = outrider("chat", "--model", checkpoint, "--max-tokens", "40", *COMMON)
    assert result.code == code
    assert len(pieces) > 10 if presses == 1 else len(pieces) <= 5


def test_a_person_at_a_terminal(outrider, checkpoint, monkeypatch):
    """Ctrl-C at the prompt drops the line; what isn't a command is explained; Ctrl-D ends."""
    lines = iter(["interrupt", "/bogus", "def read(", "/reset", ""])

    def line(prompt):
        text = next(lines, None)
        if text is None:
            raise EOFError
        if text == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        return text

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    result = outrider("chat", "--model", checkpoint, "--max-tokens", "5", *COMMON)
    assert result.code == 0
    assert result.err.count("/reset forgets the conversation") == 3
    assert len(result.out.strip()) > 0


def test_arguments_of_calls_are_objects_for_the_template(tmp_path):
    """OpenAI's API has them as JSON text, an empty one for none; other text, and objects, stay."""
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": text}} for text in ('{"a": [1]}', "", "[1]", {"b": 2})
    ]
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    (tmp_path / "said.json").write_text(json.dumps(said))
    _, message = read_messages(tmp_path / "said.json")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"a": [1]}, {}, "[1]", {"b": 2}]
