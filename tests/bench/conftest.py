"""The bandwidth that a limit is made of is measured over small buffers: which figure comes out matters to no test."""

import pytest


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr("outrider_bench.rates._HOST_BYTES", 1 << 20)
    monkeypatch.setattr("outrider_bench.rates._DEVICE_BYTES", 1 << 20)
    monkeypatch.setattr("outrider_bench.rates._PRODUCT_SIZES", (64,))
