"""``outrider bench overlap``: how much of the plan is hidden."""

import pytest


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kernels", "hidden"), [("", 0.2), (":kernels=host-plans", 0.6)])
def test_bench_overlap(outrider, kernels, hidden):
    """What a plan of lengths alone needs is little; one that is made on the host is where the plan stream earns its keep."""
    result = outrider("bench", "overlap", "--backend", f"sim{kernels}", "--batch", "2", "--new-tokens", "12", "--json").json
    assert result["plans_on_host"] == bool(kernels)
    rows = {row["column"]: row for row in result["results"]}
    assert list(rows) == [
        "plain decoding",
        "no plan stream",
        "whole-stream wait",
        "one draft-done event",
        "two targeted fences",
    ]
    assert result["same_tokens"]
    assert rows["no plan stream"]["plan_us"] is None
    for late in ("whole-stream wait", "one draft-done event"):
        assert rows[late]["hidden"] < 0.05
    # The virtual clock is exact: what is hidden is what a step gets shorter by, waits aside.
    targeted = rows["two targeted fences"]
    assert targeted["hidden"] > hidden
    assert targeted["step_us"] < min(
        row["step_us"] for name, row in rows.items() if name.split()[0] in ("no", "whole", "one")
    )


def test_bench_overlap_over_random_weights(outrider):
    result = outrider(
        *("bench", "overlap", "--backend", "cpu", "--shape", "tiny", "--speculate", "eagle", "--draft-tokens", "3"),
        *("--accept-length", "3", "--batch", "2", "--new-tokens", "12", "--rounds", "2", "--dtype", "float32", "--json"),
    ).json
    assert result["model"] == "random weights of tiny"
    assert result["acceptance"] == "synthetic, mean 3"
    assert "plain decoding" not in result["same_tokens"]
    assert len(result["same_tokens"]) == 4
    for row in result["results"]:
        assert row["step_us_least"] <= row["step_us"] <= row["step_us_most"]


def test_bench_overlap_says_what_is_wrong(outrider):
    for arguments, message in (
        (("--accept-length", "3"), "goes with --shape alone"),
        (("--speculate", "ngram"), "draft with eagle"),
        (("--shape", "no-such"), "there is no shape 'no-such'"),
    ):
        result = outrider("bench", "overlap", "--backend", "cpu", *arguments)
        assert (result.code, message in result.err) == (1, True), result.err
