"""Tool calls and reasoning of model families: texts that xgrammar's own description of each family accepts."""

import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from xgrammar.testing import _is_grammar_accept_string

from outrider.device import ConfigError
from outrider.serve.api import format_reader
from outrider.serve.api.format_reader import FormatReader
from outrider.serve.api.model_formats import REASONING_FORMATS, TOOL_FORMATS, ModelFormat, choose_format
from outrider.serve.command import HttpOptions
from serve.reading import put_together

ARGUMENTS = {"path": 'a "b"}\n<x>', "count": 3, "deep": {"k": [1, None]}}
DEEP = {"k": {"type": "array", "items": {"type": ["integer", "null"]}}}
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object", "properties": DEEP}},
    "required": ["path"],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
M3 = "]<]minimax[>["


def minimax_m3(name, value):
    """An element as MiniMax M3 writes it: objects and lists are elements in elements."""
    if isinstance(value, dict | list):
        children = value.items() if isinstance(value, dict) else (("item", each) for each in value)
        inner = "".join(minimax_m3(*child) for child in children)
    else:
        inner = value if isinstance(value, str) else json.dumps(value)
    return f"{M3}<{name}>{inner}{M3}</{name}>"


FAMILIES = [
    (*names, *texts)
    for names, *texts in json.loads((Path(__file__).resolve().parents[1] / "data/calls_of_families.json").read_text("utf-8"))
]
"""Formats of tools and reasoning, xgrammar's name or None; texts before a call, of it, and after it; the end of the prompt,
where the reasoning begins there; and the text between two calls."""
PROMPTS_OPEN_THINK = ("qwen_3", "qwen_3_coder", "deepseek_r1", "deepseek_v3_1", "deepseek_v3_2", "glm_4_7")
"""Families whose description leaves ``<think>`` to the prompt."""


def read(model_format, text, sizes, *, prompt="", tools=(TOOL,), **options):
    """The message of a text in pieces of these sizes, and its deltas."""
    reader, pieces = FormatReader(model_format, prompt, tools, **options), []
    for size in sizes:
        if size < len(text):
            pieces, text = [*pieces, text[:size]], text[size:]
    made, deltas = put_together(reader, [*pieces, text])
    assert reader.has_calls == bool(made["calls"])
    return made, deltas


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family[2] or family[0]}-{len(family[3])}")
def test_calls_and_reasoning_of_a_family(family):
    tool_format, reasoning_format, described, before, call, after, prompt, between = family
    model_format, text = ModelFormat(tool_format, reasoning_format), before + call + after
    if described is not None:
        tag = xgrammar.get_model_structural_tag(described, tools=[TOOL], reasoning="enabled")
        generated = text.removeprefix("<think>") if described in PROMPTS_OPEN_THINK else text
        assert _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(tag), generated), generated
    whole, _ = read(model_format, text, [], prompt=prompt)
    assert [(each["name"], json.loads(each["arguments"])) for each in whole["calls"]] == [("look", ARGUMENTS)]
    assert whole["content"].strip() == ""
    assert whole["reasoning_content"].strip() == ("" if reasoning_format == "none" else "hm, <b>")
    by_letter, deltas = read(model_format, text, [1] * len(text), prompt=prompt)
    assert by_letter == whole
    written = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta]
    pieces = 5 if call.startswith("look(") else 12  # the arguments of a Python call come as a whole each
    assert sum(map(bool, written)) > pieces, "arguments come while they are written"
    two, _ = read(model_format, before + call + between + call + after, [7] * 300, prompt=prompt)
    assert [each["name"] for each in two["calls"]] == ["look", "look"]
    assert two["content"].strip() == ""
    one, _ = read(model_format, text, [3] * 300, prompt=prompt, max_calls=1)
    assert one == whole
    none, _ = read(model_format, text, [2] * 300, prompt=prompt, tools=())
    assert none["calls"] == []
    assert "path" in none["content"]


@pytest.mark.parametrize("family", [each for each in FAMILIES if each[1] != "none"], ids=lambda each: each[2] or each[0])
def test_a_call_in_reasoning_is_one_if_the_reasoning_has_no_end(family):
    tool_format, reasoning_format, _, before, call, after, prompt, _ = family
    model_format = ModelFormat(tool_format, reasoning_format)
    end = REASONING_FORMATS[reasoning_format][0].ends[0]
    reasoning, opener = before.split(end)
    for sizes in ([], [1] * 500):
        made, _ = read(model_format, reasoning + opener + call + after, sizes, prompt=prompt)
        assert [(each["name"], json.loads(each["arguments"])) for each in made["calls"]] == [("look", ARGUMENTS)]
        draft, _ = read(model_format, f"{reasoning}{opener}{call}{after}{end}done", sizes, prompt=prompt)
        assert (draft["calls"], draft["content"]) == ([], "done")
        assert "hm, <b>" in made["reasoning_content"] < draft["reasoning_content"]


@pytest.mark.parametrize(
    ("name", "missing"),
    [("qwen3-coder", "</parameter>\n"), ("minimax", "</parameter>"), ("deepseek", "</｜DSML｜parameter>")],
)
def test_a_value_without_an_end_ends_before_the_next_tag(name, missing):
    """Long contexts make models leave tags out. Tags of parameters that can't come next are a part of the value."""
    call = next(family[4] for family in FAMILIES if family[0] == name and missing in family[4])
    text = {"qwen3-coder": "{}", "minimax": "<minimax:tool_call>{}</minimax:tool_call>", "deepseek": "{}"}[name].format(call)
    for sizes in ([], [1] * 500):
        made, _ = read(ModelFormat(name, "none"), text.replace(missing, ""), sizes)
        assert [json.loads(each["arguments"]) for each in made["calls"]] == [ARGUMENTS]
        assert made["content"].strip() == ""
    if name != "deepseek":
        quoted = ARGUMENTS["path"] + "\n<parameter=path>\n<parameter name=path>\n<parameter=no>\n</function>\n</invoke>\nx"
        made, _ = read(ModelFormat(name, "none"), text.replace(ARGUMENTS["path"], quoted), [3] * 500)
        assert [json.loads(each["arguments"]) for each in made["calls"]] == [{**ARGUMENTS, "path": quoted}]


PIECES = sorted(
    {piece for family in FAMILIES for piece in (family[3], family[4][:30], family[4][-25:], family[5])}
    | {literal for region in sum(TOOL_FORMATS.values(), ()) for literal in region.starts}
    | {"", " ", "\n", "text", "{", "}", '{"name": "x", "arguments": {', '{"a": "\\"}"}', "é", "<", "</", '"', ": ", "[1]"}
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(sorted({family[:2] for family in FAMILIES})),
    st.lists(st.sampled_from(PIECES), max_size=7).map("".join),
    st.lists(st.integers(1, 9), max_size=200),
)
def test_a_stream_is_the_whole_for_every_text_and_every_cut(names, text, sizes):
    model_format = ModelFormat(*names)
    whole, _ = read(model_format, text, [])
    assert read(model_format, text, sizes)[0] == whole


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(st.sampled_from(PIECES), max_size=7).map("".join))
def test_text_without_a_call_stays_as_it_is(tool_format, text):
    made, _ = read(ModelFormat(tool_format, "none"), text, [5] * 99)
    if not made["calls"]:
        assert made == {"content": text, "reasoning_content": "", "calls": []}


@pytest.mark.parametrize("tool_format", [name for name in TOOL_FORMATS if name != "none"])
def test_white_space_without_an_end_is_not_matched_again_with_each_token(tool_format, monkeypatch):
    """A model may repeat it up to its limit: a match of all of it after each token took seconds of the server."""
    seen, match = [], format_reader.regex.match

    def recorded(pattern, text, *, pos, endpos=10**6, partial):
        seen.append(min(len(text), endpos) - pos)
        return match(pattern, text, pos=pos, endpos=endpos, partial=partial)

    monkeypatch.setattr(format_reader.regex, "match", recorded)
    model_format = ModelFormat(tool_format, "none")
    for start in {start for region in model_format.regions if region.kind == "call" for start in region.starts}:
        text = f"{start}{' ' * 3000}x"
        assert read(model_format, text, [50] * 99)[0] == {"content": text, "reasoning_content": "", "calls": []}
    assert max(seen) <= 1024


def test_a_format_is_chosen_by_the_chat_template():
    assert choose_format(None, None, "{{ '<tool_call>' }}{{ '<function=' }}<parameter=<think>") == ModelFormat(
        "qwen3-coder", "think"
    )
    assert choose_format(None, None, "<|start|>x<|channel|>final<|message|>") == ModelFormat("harmony", "harmony")
    assert choose_format("glm", None, "<tool_call><think>") == ModelFormat("glm", "think")
    assert choose_format(None, "none", "<tool_call><think>") == ModelFormat("hermes", "none")
    assert choose_format(None, None, "{{ messages }}") == ModelFormat("none", "none")
    for names in (("nonsense", None), (None, "nonsense")):
        with pytest.raises(ConfigError, match="expected one of"):
            choose_format(*names, "")
    hints = get_type_hints(HttpOptions, include_extras=True)
    for option, known in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
        names = re.findall(r"[\w-]+", hints[option].__metadata__[0].help)
        assert known.keys() <= {*names}, "the help lists each name"


@pytest.mark.parametrize(
    ("prompt", "opened"), [("x<think>\n", True), ("<think></think>\n\n", False), ("what is <think>?", False)]
)
def test_reasoning_that_the_prompt_opens(prompt, opened):
    made, _ = read(ModelFormat("hermes", "think"), "so</think>\n\nyes", [2, 3], prompt=prompt)
    expected = (
        {"content": "yes", "reasoning_content": "so"} if opened else {"content": "so</think>\n\nyes", "reasoning_content": ""}
    )
    assert made == {**expected, "calls": []}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"arguments": {"n": 1}, "name": "look"}</tool_call>', '{"n": 1}'),
        ('<tool_call>{"name": "look", "arguments": "{\\"n\\": 1}"}</tool_call>', '{"n": 1}'),
        ('<tool_call>{"name": "look"}</tool_call>', "{}"),
        ('<tool_call>{"name": "look", "arguments": {"n": 1, "x": "cut', '{"n": 1, "x": "cut'),
    ],
)
def test_calls_that_are_written_another_way(text, arguments):
    made, _ = read(ModelFormat("hermes", "none"), text, [4] * 30)
    assert made == {"content": "", "reasoning_content": "", "calls": [{"name": "look", "arguments": arguments}]}


def test_what_is_no_call_is_content_without_a_loss():
    text = 'class T(<tool_call>): x <tool_call>{"name": broken}</tool_call> and <think more'
    made, _ = read(ModelFormat("hermes", "think"), text, [3] * 40)
    assert made == {"content": text, "reasoning_content": "", "calls": []}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3-coder", '<tool_call>\n<function=look>\n{"path": "x"}\n</function>\n</tool_call>'),
        ("seed", "<seed:tool_call><function=look>path</function></seed:tool_call>"),
        ("deepseek", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<parameter name="path">x</｜DSML｜parameter>'),
        ("minimax", '<minimax:tool_call>\n<invoke name="look">\n{"path": "x"}\n</invoke>'),
    ],
)
def test_a_call_without_readable_arguments_is_content(name, text):
    """Not a call without arguments, which a client would run."""
    for sizes in ([], [1] * 200):
        made, _ = read(ModelFormat(name, "none"), text, sizes)
        assert made == {"content": text, "reasoning_content": "", "calls": []}


def test_analysis_with_a_content_type_is_reasoning():
    text = "<|channel|>analysis to=python code<|message|>1+1<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>"
    made, _ = read(ModelFormat("harmony", "harmony"), text, [3] * 99)
    assert made == {"content": "2", "reasoning_content": "1+1", "calls": []}


def test_values_have_the_types_of_the_schema():
    schema = {
        "type": "object",
        "properties": {"a": {"type": ["boolean", "null"]}, "b": {"type": "number"}, "c": {}, "s": {"type": "string"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    values = {"a": "True", "b": "many", "c": "[1]", "d": "plain", "s": "5"}
    inner = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    made, _ = read(ModelFormat("qwen3-coder", "none"), f"<function=f>{inner}</function>", [5] * 99, tools=(tool,))
    assert json.loads(made["calls"][0]["arguments"]) == {"a": True, "b": "many", "c": [1], "d": "plain", "s": "5"}


def test_types_come_from_the_whole_schema():
    """By reference, by the values of an enumeration, and by one of several schemas. Broken schemas allow any type."""
    schema = {
        "$defs": {"Name": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}},
        "properties": {
            "r": {"$ref": "#/$defs/Name"},
            "e": {"enum": ["5", "6"]},
            "c": {"const": "5"},
            "a": {"allOf": [{"$ref": "#/$defs/Name"}]},
            "o": {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]},
            "q": {"type": ["string", "null"]},
            "l": {"$ref": "#/$defs/loop"},
            "b": {"type": 5, "anyOf": 5, "$defs": 5},
            "n": {"$ref": "#/nowhere"},
        },
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    values = dict.fromkeys("recao", "5") | {"q": '"x"', "l": "null", "b": "5", "n": "5"}
    made = {**values, "l": None, "b": 5, "n": 5}
    tags = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    coder, _ = read(ModelFormat("qwen3-coder", "none"), f"<function=f>{tags}</function>", [9] * 99, tools=(tool,))
    assert json.loads(coder["calls"][0]["arguments"]) == made
    elements = f'{M3}<invoke name="f">' + "".join(minimax_m3(*each) for each in values.items()) + f"{M3}</invoke>"
    m3, _ = read(ModelFormat("minimax-m3", "none"), elements, [9] * 99, tools=(tool,))
    assert json.loads(m3["calls"][0]["arguments"]) == made
    for broken in ({"properties": [1]}, {"$ref": "#"}, {"properties": {"x": 5}}):
        odd = {"type": "function", "function": {"name": "f", "parameters": broken}}
        found, _ = read(ModelFormat("qwen3-coder", "none"), "<function=f><parameter=x>5</parameter>", [], tools=(odd,))
        assert json.loads(found["calls"][0]["arguments"]) == {"x": 5}


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("\n\n{0}", "", ""),
        ("I look.\n\n{0}\n{0}\n", "I look.", ""),
        ("I look.\n\n{0}\nDone.\n", "I look.\n\nDone.\n", ""),
        ("\n<think>so</think>\n\n{0}", "", "so"),
        ("\n <tool_call>no", "\n <tool_call>no", ""),
    ],
)
def test_white_space_next_to_calls_is_left_out(text, content, reasoning):
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    for sizes in ([], [1] * 300):
        made, _ = read(ModelFormat("hermes", "think"), text.replace("{0}", call), sizes)
        assert (made["content"], made["reasoning_content"]) == (content, reasoning)
        assert len(made["calls"]) == text.count("{0}")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            "[look(path='it\\'s', n=-1.5, deep={'k': (1, True)})]",
            {"path": "it's", "n": -1.5, "deep": {"k": [1, True]}},
        ),
        ('[look(path="[a, b)", deep={"k": [true, null]})]', {"path": "[a, b)", "deep": {"k": [True, None]}}),
        ("[look(path=main, count='5',)]", {"path": "main", "count": "5"}),
        ("[look()]", {}),
    ],
)
def test_arguments_of_python_calls(text, arguments):
    made, _ = read(ModelFormat("pythonic", "none"), text, [3] * 40)
    assert made["content"] == ""
    assert [json.loads(call["arguments"]) for call in made["calls"]] == [arguments]


@pytest.mark.parametrize(
    "text",
    ["[print(x)] and more", "[1, 2]", "[f(x) for x in y]", "see [look(a=1)]", "<|python_start|>f(a == 1)", "[f(a==1)]"],
)
def test_python_that_is_no_call_is_content(text):
    for sizes in ([], [1] * 40):
        made, _ = read(ModelFormat("pythonic", "none"), text, sizes)
        assert made == {"content": text, "reasoning_content": "", "calls": []}


def test_elements_of_minimax_m3():
    """Empty values, a marker inside of a text, an object in a list, and a value without a type in the schema."""
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "l": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "string"}}}},
            "o": {"type": "object"},
            "e": {"type": "array"},
        },
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    values = {"s": f"a {M3} </s> {M3}</x>", "l": [{"n": "5"}, {"n": ""}], "o": {}, "e": [], "u": [1, "x"], "v": "5"}
    text = f'{M3}<invoke name="f">\n' + "\n".join(minimax_m3(*each) for each in values.items())
    whole, _ = read(ModelFormat("minimax-m3", "none"), f"{text}\n{M3}</invoke>\n{M3}</tool_call>", [4] * 200, tools=(tool,))
    assert json.loads(whole["calls"][0]["arguments"]) == {**values, "v": 5}
    assert whole["content"] == ""
    cut, _ = read(ModelFormat("minimax-m3", "none"), text + "stray", [4] * 200, tools=(tool,))
    assert json.loads(cut["calls"][0]["arguments"]) == {**values, "v": 5}
    assert cut["content"] == "stray", "text that belongs to no argument isn't lost"
