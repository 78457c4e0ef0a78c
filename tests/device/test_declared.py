"""What a backend says once: to its constructor or by overriding; and a view of it that declares more."""

import pytest
import torch

from outrider.device import CapabilityError, InterfaceError, KernelSet, SpeculativeSync
from outrider_cpu.backend import CpuBackend, capabilities


class Given(CpuBackend):
    def __init__(self, **said):
        super(CpuBackend, self).__init__("given", torch.device("cpu"), **said)


CAPABILITIES = capabilities(bfloat16=False)
SAID = {"capabilities": CAPABILITIES, "kernels": KernelSet(), "speculative_sync": SpeculativeSync}


@pytest.mark.parametrize("missing", SAID)
def test_what_is_said_nowhere_is_named(missing):
    with pytest.raises(TypeError, match=f"Given declares no {missing}: pass {missing}=… to Backend.__init__"):
        Given(**{key: value for key, value in SAID.items() if key != missing})


def test_what_is_overridden_need_not_be_given():
    class Overriding(Given):
        @property
        def capabilities(self):
            return CAPABILITIES

    backend = Overriding(**{**SAID, "capabilities": None})
    assert backend.capabilities is CAPABILITIES


def test_kernels_and_policy_are_made_of_the_backend_and_once():
    made = []

    def kernels(backend):
        made.append(backend)
        return KernelSet()

    backend = Given(**{**SAID, "kernels": kernels})
    assert made == [], "made when it's first asked for"
    assert backend.kernels is backend.kernels
    assert made == [backend]
    assert backend.speculative_sync is backend.speculative_sync
    assert backend.speculative_sync.backend is backend


def test_a_view_declares_more_and_shares_the_rest():
    backend = CpuBackend()
    view = backend.with_capabilities(event_timing=True)
    assert view.create_event("timed", timing=True).timing
    with pytest.raises(CapabilityError):
        backend.create_event("timed", timing=True)
    stream = view.create_stream("s")
    assert backend.streams == (stream,)
    assert view.kernels is backend.kernels
    assert isinstance(view, CpuBackend)
    with pytest.raises(InterfaceError), backend.on(stream):
        pass
    with pytest.raises(TypeError, match="no_such_ability"):
        backend.with_capabilities(no_such_ability=True)
