"""Backend names as people type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.device import ConfigError
from outrider.registry import BackendSpec, parse_spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", BackendSpec(name="cpu")),
        ("cuda:1", BackendSpec(name="cuda", ordinal=1)),
        ("sim:seed=7,like=npu", BackendSpec(name="sim", options={"seed": "7", "like": "npu"})),
        ("sim:2,seed=7", BackendSpec(name="sim", ordinal=2, options={"seed": "7"})),
        ("sim:schedule=a=b:c", BackendSpec(name="sim", options={"schedule": "a=b:c"})),
        ("auto", BackendSpec(name="auto")),
        (" my-chip_2 ", BackendSpec(name="my-chip_2")),
    ],
)
def test_reads(text, expected):
    assert parse_spec(text) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "isn't a name"),
        (":1", "isn't a name"),
        ("a b", "isn't a name"),
        ("cpu:", "nothing follows"),
        ("cpu:-1", "'-1'"),
        ("cpu:1,2", "'2'"),
        ("cpu:seed=1,2", "'2'"),
        ("sim:seed=", "'seed='"),
        ("sim:=7", "'=7'"),
        ("sim:seed=1,seed=2", "twice"),
        ("sim:seed=1,", "''"),
        ("auto:1", "takes no device"),
    ],
)
def test_refuses_and_names_the_part(text, named):
    with pytest.raises(ConfigError, match="backend") as caught:
        parse_spec(text)
    assert named in str(caught.value)


@given(st.text())
def test_any_text_is_read_or_refused(text):
    try:
        spec = parse_spec(text)
    except ConfigError:
        return
    assert parse_spec(str(spec)) == spec
