"""What cases share; the emulation is there already, as a plugin of pytest."""

import pytest


@pytest.fixture
def fused_calls(monkeypatch):
    """Sparse mode and host lengths of each call of CANN's attention, as they are when it runs."""
    import torch_npu

    issued = []
    packet = torch_npu.npu_fused_infer_attention_score

    class Packet:
        @staticmethod
        def out(*args, **kwargs):
            issued.append((kwargs["sparse_mode"], kwargs["actual_seq_lengths_kv"]))
            return packet.out(*args, **kwargs)

    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", Packet)
    return issued
