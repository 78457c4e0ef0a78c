"""What ranks tell each other, as text: it comes back as it was, and nothing else is taken."""

import json
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.device import DeviceError
from outrider.engine.config import Choice as Chosen
from outrider.engine.config import DecidedConfig
from outrider.engine.guides.guides import GUIDES, ChoiceGuide, Ebnf, JsonObject, JsonSchema, Regex
from outrider.engine.ranks import records
from outrider.engine.ranks.records import DecisionRecord, RecordError, decode, decode_call, encode, encode_call
from outrider.engine.requests.hand_over import RequestState
from outrider.engine.requests.sampling import TokenLogprobs
from outrider.model import Media, MediaGrid

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
TOKENS = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
PENALTIES = st.floats(-2, 2) | st.integers(-2, 2)
GUIDE = {
    JsonSchema: st.sampled_from(['{"type": "integer"}', {"enum": ["a", "é", 1]}]).map(JsonSchema),
    JsonObject: st.just(JsonObject()),
    Regex: st.sampled_from(["a+", "[0-9]{2}", "é|\\d"]).map(Regex),
    Ebnf: st.tuples(TEXT, TEXT).map(lambda each: Ebnf(*each)),
    ChoiceGuide: st.lists(TEXT, min_size=1, max_size=3).map(ChoiceGuide),
}
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(9, 2**31 - 1),
    temperature=st.floats(2**-32, 2**32, exclude_min=True),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    ignore_eos=st.booleans(),
    top_k=st.integers(0, 9),
    top_p=st.floats(2**-32, 1) | st.just(1),
    min_p=st.just(0.0) | st.floats(2**-32, 1),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-(2.0**64), 2.0**64) | st.just(-math.inf), max_size=4),
    min_tokens=st.integers(0, 9),
    stop=st.lists(TEXT, max_size=2),
    logprobs=st.none() | st.integers(0, 9),
    n=st.integers(1, 9),
    guide=st.none() | st.one_of(*GUIDE.values()),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
MEDIA = st.builds(
    Media,
    st.builds(MediaGrid, kind=st.sampled_from(["image", "video"]), frames=st.just(1), rows=st.just(2), columns=st.just(2)),
    st.tuples(st.integers(0, 3), st.integers(0, 3), DTYPES).map(
        lambda each: (torch.arange(each[0] * each[1]).view(each[0], each[1]) - 2).to(each[2]).T
    ),
    st.binary(max_size=9),
)
LOGPROBS = st.builds(
    TokenLogprobs, st.integers(0, 9), st.floats(), st.lists(st.tuples(st.integers(0, 9), st.floats()), max_size=2).map(tuple)
)
MEDIA_TUPLE = st.lists(MEDIA, max_size=2).map(tuple)
STATE = st.builds(
    RequestState,
    prompt=TOKENS,
    params=PARAMS,
    output=TOKENS,
    priority=st.integers(),
    media=MEDIA_TUPLE,
    logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
)
CALLS = {
    "add_request": st.tuples(TOKENS, st.none() | PARAMS, st.integers(), MEDIA_TUPLE),
    "generate": st.tuples(
        st.lists(TOKENS, max_size=3).map(tuple),
        st.none() | PARAMS | st.lists(st.none() | PARAMS, max_size=2).map(tuple),
        st.none() | st.lists(MEDIA_TUPLE, max_size=2).map(tuple),
    ),
    "abort": st.tuples(st.integers()),
    "drop": st.tuples(TOKENS),
    "hand_over": st.tuples(st.integers()),
    "take_over": st.tuples(st.text()),
    "resume": st.tuples(STATE),
    "expect_pages": st.tuples(STATE, st.integers(0, 9)),
    "pages_arrived": st.tuples(
        st.integers(),
        st.dictionaries(TEXT, DTYPES.map(lambda dtype: torch.arange(3).to(dtype)[None]), max_size=2),
    ),
    "release_pages": st.tuples(st.integers()),
    "vote": st.tuples(st.integers(), st.text()),
}


def exact(value):
    """What tells any two values apart: NaN is itself, 1 isn't 1.0, and 0.0 isn't -0.0."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, tuple):
        return tuple(map(exact, value))
    if isinstance(value, dict):
        return {key: exact(each) for key, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return type(value), tuple(exact(getattr(value, each.name)) for each in fields(value))
    return type(value), repr(value)


def test_every_call_and_guide_is_drawn():
    assert set(CALLS) == set(records.CALLS)
    assert set(GUIDE) == set(GUIDES)


@given(st.one_of(*(st.tuples(st.just(name), arguments) for name, arguments in CALLS.items())))
def test_a_call_comes_back_as_it_was(call):
    text = encode_call(*call)
    json.loads(text, parse_constant=pytest.fail)
    assert exact(decode_call(text)) == exact(call)


@given(
    st.none()
    | st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.integers(), max_size=3).map(tuple)),
    st.lists(st.text(), max_size=2).map(tuple),
)
def test_a_record_comes_back_as_it_was(decisions, told):
    record = DecisionRecord(told, "iterate", decisions)
    assert decode(encode(record, DecisionRecord), DecisionRecord) == record


def test_configs_come_back_with_their_class():
    made = DecidedConfig(
        max_requests=2,
        page_size=4,
        num_pages=9,
        max_context=16,
        prefill_chunk=4,
        state_checkpoints=0,
        dtype="float32",
        overlap=True,
        mode="fused",
        graphs=False,
        buckets=(1, 2),
        chosen=(Chosen("buckets", (1, 2), "so"), Chosen("kv_memory", math.inf, "so"), Chosen("mode", None, "")),
    )
    assert exact(decode(encode(made, DecidedConfig), DecidedConfig)) == exact(made)


def changed(text, change):
    """The text of a call with one thing changed."""
    read = json.loads(text)
    change(read["record"]["add_request"])
    return json.dumps(read)


ADD = encode_call("add_request", ((1, 2), SamplingParams(guide=Regex("a")), 0, ()))
TOKENS_AT, PARAMS_AT, PRIORITY_AT, MEDIA_AT = range(4)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "expected JSON"),
        ("nonsense", "expected JSON"),
        (b"\x80\x04N.", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "isn't of version 3"),
        (ADD.replace('"version":3', '"version":1'), "isn't of version 3"),
        (ADD.replace('"version":3', '"version":true'), "isn't of version 3"),
        (ADD.replace('"version":3', '"version":3,"extra":1'), "isn't of version 3"),
        (ADD.replace("add_request", "abort"), "has 4 items; expected 1"),
        (ADD.replace("add_request", "system"), "expected one of add_request"),
        (ADD.replace('"temperature":0.0', '"temperature":NaN'), "temperature is nan; expected float"),
        (ADD.replace('"temperature":0.0', '"temperature":1e999'), r"record\[1\]\.temperature"),
        (ADD.replace('"temperature":0.0', '"temperature":{"float":"1"}'), r"record\[1\]\.temperature"),
        (
            changed(ADD, lambda call: call[TOKENS_AT].__setitem__(1, "2")),
            r"record\[0\]\[1\] is '2'; expected int",
        ),
        (changed(ADD, lambda call: call[TOKENS_AT].__setitem__(0, True)), r"record\[0\]\[0\] is True"),
        (changed(ADD, lambda call: call.__setitem__(TOKENS_AT, "12")), r"record\[0\] is"),
        (changed(ADD, lambda call: call.__setitem__(PRIORITY_AT, 1.5)), r"record\[2\] is 1.5"),
        (changed(ADD, lambda call: call.pop()), "has 3 items; expected 4"),
        (changed(ADD, lambda call: call[PARAMS_AT].update(run="this")), "SamplingParams has unknown fields: .'run'"),
        (changed(ADD, lambda call: call[PARAMS_AT].update(top_p=7)), "isn't a SamplingParams: top_p is 7"),
        (
            changed(ADD, lambda call: call[PARAMS_AT].update(guide={"Regex": {"pattern": "(", "after": "", "unless": []}})),
            "isn't a Regex",
        ),
        (changed(ADD, lambda call: call[PARAMS_AT].update(guide={"SamplingParams": {}})), "expected one of JsonSchema"),
        (
            changed(ADD, lambda call: call[PARAMS_AT]["guide"].update(JsonObject={})),
            "expected one of JsonSchema",
        ),
    ],
)
def test_other_text_is_refused(text, match):
    with pytest.raises(RecordError, match=match) as raised:
        decode_call(text)
    assert isinstance(raised.value, DeviceError)
    assert raised.value.device_lost


@pytest.mark.parametrize(
    ("pixels", "match"), [({"data": "%"}, "base64"), ({"data": "AAAA"}, "3 bytes"), (5, "expected Tensor")]
)
def test_bytes_that_are_no_tensor_are_refused(pixels, match):
    media = Media(MediaGrid(kind="image", frames=1, rows=1, columns=1), torch.zeros(1), b"")
    text = encode_call("add_request", ((1,), None, 0, (media,)))
    described = {"dtype": "float32", "shape": [1]}
    pixels = pixels if pixels == 5 else described | pixels
    with pytest.raises(RecordError, match=match):
        decode_call(changed(text, lambda call: call[MEDIA_AT][0].update(pixels=pixels)))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("abort", (print,)), ("abort", ("1",)), ("abort", (None,)), ("add_request", ((1.5,), None, 0, ()))],
)
def test_what_is_no_call_is_not_written(name, arguments):
    with pytest.raises(RecordError, match="a message can't hold; expected"):
        encode_call(name, arguments)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda one: (
            st.lists(one) | st.dictionaries(st.sampled_from(["version", "record", "add_request", "params", "float"]), one)
        ),
    )
)
def test_any_json_is_a_call_or_refused(value):
    try:
        decode_call(json.dumps({"version": 3, "record": value}))
    except RecordError:
        return
    pytest.fail("nothing of this is a call")
