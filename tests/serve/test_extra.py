"""Without the extra, the core says what to install."""

import pytest

from outrider.device import ConfigError
from outrider.serve import extra


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name in ("fastapi", "uvicorn") else object())
    with pytest.raises(
        ConfigError, match=r"needs fastapi, uvicorn, which are not installed; run: pip install 'outrider\[serve\]'"
    ):
        extra.require_serve()


def test_the_command_says_so_too(monkeypatch, capsys):
    from outrider.cli.main import main

    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "fastapi" else object())
    assert main(["serve"]) == 1
    assert "pip install 'outrider[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--log-format", "xml"], "--log-format"),
        (["--tool-format", "odd"], "hermes"),
        (["--metrics-names", "odd"], "metric_names"),
        (["--max-queued", "-1"], "max_queued"),
    ],
)
def test_options_that_are_wrong(options, said, capsys):
    from outrider.cli.main import main

    assert main(["serve", *options]) in (1, 2)
    assert said in capsys.readouterr().err


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    from outrider.serve.command import _keys

    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    monkeypatch.setenv("OUTRIDER_API_KEY", "three, four")
    assert _keys(file) == ("three", "four", "one", "two")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no API key"):
        _keys(file)
