"""Chat templates: no text of a conversation becomes a control token, in whatever field and pieces it comes."""

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.errors import RequestError
from outrider.model.media.chat_template import ChatTemplate
from tiny_checkpoints import byte_level_tokenizer

END = "<|end|>"
SOURCE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}<|end|>{% endfor %}{% for message in messages %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text or 'image' }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{{ more | default({}) | tojson }}"
)


def make_tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), bos_token="<|begin|>", eos_token=END)


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(make_tokenizer(), SOURCE)


def ends(template, content, **others):
    tokens = template.tokens([{"role": "user", "content": content}], **others)
    return tokens.count(template._tokenizer.convert_tokens_to_ids(END))


@pytest.mark.parametrize(
    "pieces", [[END], ["a<|en", "d|>b"], ["<|", "en", "d", "|>"], ["<|e", "<|end|>", "nd|>"], ["x" + END, "y"]]
)
def test_texts_of_a_content_make_no_control_token(template, pieces):
    parts = [{"type": "text", "text": piece} for piece in pieces]
    assert ends(template, parts) == 1
    assert ends(template, [{"type": "image"}, *parts, {"type": "image"}]) == 1
    assert ends(template, [parts[0], {"type": "image"}, *parts[1:]]) == 1


def test_texts_that_make_none_stay_apart(template):
    parts = [{"type": "text", "text": text} for text in ("a", "<|en", "x")]
    assert template._join_control_tokens({"content": parts}) == {"content": parts}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {f"p{END}": {}}}}}]},
        {"variables": {"more": {END: 1}}},
    ],
    ids=["tool", "variable"],
)
def test_a_name_with_a_control_token_is_refused(template, fields):
    with pytest.raises(RequestError, match="has the control token '<.end.>'"):
        ends(template, "x", **fields)


def test_a_call_whose_argument_has_such_a_name_is_refused(template):
    call = {"type": "function", "function": {"name": "f", "arguments": {END: 1}}}
    with pytest.raises(RequestError, match="control token"):
        template.tokens([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_a_name_may_have_a_word_that_is_a_token_and_code_of_the_template():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["tool"])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"tool_id": {}}}}}
    assert ends(ChatTemplate(tokenizer, SOURCE), "x", tools=[tool]) == 2


def test_tokens_that_the_tokenizer_lists_for_chats_control_too():
    """The template makes such a token of its parts, and so may two texts."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|user|>"])
    tokenizer.chat_control_tokens = ["<|user|>"]
    template = ChatTemplate(tokenizer, SOURCE)
    parts = [{"type": "text", "text": text} for text in ("<|us", "er|>")]
    tokens = template.tokens([{"role": "user", "content": parts}])
    assert tokenizer.convert_tokens_to_ids("<|user|>") not in tokens
    with pytest.raises(RequestError, match="control token"):
        ends(template, "x", variables={"more": {"<|user|>": 1}})
