"""The marker `sample` leaves repeats of a claim to `make test-slow`, and never all of them."""

pytest_plugins = ["pytester"]

CASES = """
    import pytest

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("number", range(5))
    def test_some(number): pass

    @pytest.mark.sample(1, per="kernel")
    @pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("kernel", ["gemm", "norm"])
    def test_one_per_kernel(kernel, size): pass

    @pytest.mark.sample(3)
    def test_alone(): pass
"""
CONFTEST = """
    from drawing import leave_repeats_to_slow

    def pytest_collection_modifyitems(items):
        leave_repeats_to_slow(items)

    def pytest_configure(config):
        config.addinivalue_line("markers", "slow: x")
        config.addinivalue_line("markers", "sample: x")
"""


def chosen(pytester, *options):
    lines = pytester.runpytest("--collect-only", "-q", "-p", "no:xdist", *options).outlines
    return [line.partition("::")[2] for line in lines if "::" in line]


def test_some_cases_stay_and_the_others_are_slow(pytester):
    pytester.makepyfile(CASES)
    pytester.makeconftest(CONFTEST)
    fast, slow = chosen(pytester, "-m", "not slow"), chosen(pytester, "-m", "slow")
    assert sum(name.startswith("test_some") for name in fast) == 2
    per_kernel = [name for name in fast if name.startswith("test_one_per_kernel")]
    assert sorted("gemm" in name for name in per_kernel) == [False, True]
    assert not any("-3]" in name for name in per_kernel)
    assert "test_alone" in fast
    assert len(fast) + len(slow) == len({*fast, *slow}) == 5 + 6 + 1
    assert fast == chosen(pytester, "-m", "not slow")
