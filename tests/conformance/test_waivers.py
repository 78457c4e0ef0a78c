"""A waiver without a reason, a link and a date is no waiver."""

import datetime

import pytest

from outrider.device import ConfigError
from outrider_conformance.reporting.verdict import read_waivers

GOOD = """
[[waiver]]
test = "test_l1_operators::test_an_operator_does_not_block_the_host[sort]"
reason = "the copy engine has no bytes of one bit"
link = "https://example.org/issues/7"
expires = 2030-01-31
"""


def write(tmp_path, text):
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    return path


def test_reads_and_matches(tmp_path):
    (waiver,) = read_waivers(write(tmp_path, GOOD))
    assert waiver.covers("test_l1_operators::test_an_operator_does_not_block_the_host[sort]")
    assert not waiver.covers("test_l1_operators::test_an_operator_does_not_block_the_host[topk]")
    assert waiver.expired(datetime.date(2030, 2, 1))
    assert not waiver.expired(datetime.date(2030, 1, 31))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('reason = "the copy engine has no bytes of one bit"', "", "reason"),
        ('link = "https://example.org/issues/7"', "", "link"),
        ("expires = 2030-01-31", "", "expires"),
        ("expires = 2030-01-31", 'expires = "soon"', "a date such as"),
        ("https://example.org/issues/7", "ask Bob", "address of the issue"),
        ("the copy engine has no bytes of one bit", " ", "must say something"),
        ("[[waiver]]", "[[waiwer]]", "waiwer"),
        ("[[waiver]]", "[[waiver", "not TOML"),
    ],
)
def test_catches(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ConfigError, match=message):
        read_waivers(write(tmp_path, GOOD.replace(old, new)))
