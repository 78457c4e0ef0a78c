"""The command and the official client with 200 drawn schemas; behind the marker slow."""

import pytest


@pytest.mark.slow
def test_the_official_client_gets_what_the_command_serves():
    pytest.importorskip("jsonschema")
    from serve.official import main

    seen = main()
    assert seen["same as generate"] == 4
    assert seen["schemas, stop"] + seen.get("schemas, length", 0) == 200
