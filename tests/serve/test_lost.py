"""An engine that is lost: its requests get errors, and the server says so."""

import json
import threading
import time

import httpx
import pytest

from outrider.device import DeviceFault, DeviceLost
from serve.conftest import bundled_engine
from serve.running import running

ASKED = {"model": "m", "prompt": "def f():", "max_tokens": 8, "temperature": 0}


class Failing:
    """An engine whose steps fail as they are told to."""

    def __init__(self, engine):
        self.engine, self.step_, self.errors = engine, engine.step, []
        engine.step = self.step

    def step(self):
        if self.errors:
            raise self.errors.pop(0)
        time.sleep(0.002)
        return self.step_()


def test_faults_are_repeated_and_a_loss_ends_the_service(bundled_target):
    engine = bundled_engine(max_requests=2)
    failing = Failing(engine)
    with running(engine, bundled_target) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        told = threading.Event()
        server.call(lambda service: service.engine.add_loss_listener(lambda error: told.set()))
        whole = http.post("/v1/completions", json=ASKED).json()["choices"]
        failing.errors = [DeviceFault("a hiccup")] * 3
        assert http.post("/v1/completions", json=ASKED).json()["choices"] == whole
        body = {**ASKED, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            failing.errors = [DeviceLost("gone")]
            events = [line for line in lines if line]
        assert json.loads(events[-2][6:])["error"]["code"] == "engine_lost"
        assert told.wait(10)
        assert http.get("/health").status_code == http.get("/ready").status_code == 503
        assert "gone" in http.get("/health").json()["reason"]
        refused = http.post("/v1/completions", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_lost")
        assert 'outrider_up{model_name="m"} 0.0' in http.get("/metrics").text


def test_an_engine_that_can_not_be_made(bundled_target):
    from outrider.serve.connection.engine_client import EngineGone

    def make():
        raise RuntimeError("no such device")

    with pytest.raises(EngineGone, match="no such device"), running(make, bundled_target):
        pass
