"""Compiling: what was asked for."""

BUILT = []


class Spec:
    def __init__(self, *key):
        self._key = key
        self.is_compiled = key in BUILT

    def build_and_load(self):
        BUILT.append(self._key)


def gen_batch_prefill_module(
    backend,
    dtype_q,
    dtype_kv,
    dtype_o,
    dtype_idx,
    head_dim_qk,
    head_dim_vo,
    pos_encoding_mode,
    use_sliding_window,
    use_logits_soft_cap,
    use_fp16_qk_reduction,
):
    return Spec(backend, dtype_q, head_dim_qk, use_sliding_window)
