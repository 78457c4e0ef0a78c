"""SGLang #26380: the schedule stream frees window slots, which clears entries of a map that a forward may still read.

Unmodified, of SGLang 0.5.23: `Scheduler.event_loop_overlap`, `run_batch`, `_apply_war_barrier`, `FutureMap`, the allocator of
sliding windows and its pool's map. Stand-ins: which batch is next (it frees what left the window, as preparing one does), the
model (it translates its slots through the map), what is done with results.
"""

from collections import deque
from types import SimpleNamespace

import absent
import running
import torch

backend = running.on_sim()
absent.stand_in("IPython", "torchvision", "gguf")

from sglang.srt.managers.overlap_utils import FutureMap  # noqa: E402
from sglang.srt.managers.schedule_batch import ScheduleBatch  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

STEPS, SLOTS = 4, 16


class Result(SimpleNamespace):
    has_sampled_token_ids = True

    def copy_to_cpu(self, **_):
        self.on_host = self.next_token_ids.to("cpu", non_blocking=True)
        self.copy_done.record()


def scheduler(pool, allocator):
    made = object.__new__(Scheduler)
    nothing = lambda *args, **kwargs: None  # noqa: E731
    made.__dict__.update(
        gracefully_exit=False, _engine_paused=False, ingest_requests=nothing, running_batch=None, last_batch=None,
        is_disable_overlap_for_batch=lambda *args, **kwargs: False, is_generation=True, enable_overlap=True, forward_ct=0,
        metrics_reporter=SimpleNamespace(record_scheduler_active=nothing), _sched_idled=False, scripted_scheduler_hook=None,
        profiler_manager=SimpleNamespace(_profile_batch_predicate=nothing), forward_sleep_time=None, disaggregation_mode=None,
        _confidence_budget_prepare=None, device_module=torch.sim, enable_unified_memory=False, enable_async_d2h_copy=False,
        spec_algorithm=SpeculativeAlgorithm.NONE, beam_coordinator=SimpleNamespace(maybe_select_and_relay=nothing),
        chunked_req=None, batch_record_buf=[[], []], batch_record_ct=0, processed_tokens_counter=0, on_idle=nothing,
        token_to_kv_pool_allocator=allocator, _war_barrier_enabled=True, record_batch_in_overlap=nothing,
        scheduler_stage_metrics=None, enable_unified_cache_external_linker=False, attn_dp_enabled=False,
    )  # fmt: skip
    for name in ("schedule", "forward", "copy"):
        stream = torch.sim.Stream()
        setattr(made, f"{name}_stream", stream)
        setattr(made, f"{name}_stream_ctx", torch.sim.stream(stream))
    made.future_map = FutureMap(torch.device("sim"), SpeculativeAlgorithm.NONE, pool, needs_cpu_seq_lens=False)
    return made


def steps(revert):
    kv = SWAKVPool(
        size=64, size_swa=64, page_size=1, dtype=torch.float32, head_num=1, head_dim=8, swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1], device="sim",
    )  # fmt: skip
    pool = SimpleNamespace(req_to_token=torch.zeros((4, 32), dtype=torch.int32, device="sim"))
    allocator = SWATokenToKVPoolAllocator(64, 64, 1, torch.float32, "sim", kv, need_sort=False)
    slots = allocator.alloc(SLOTS)
    made = scheduler(pool, allocator)
    backend.synchronize()
    met = [0]

    def batch_of(step):
        batch = object.__new__(ScheduleBatch)
        batch.__dict__.update(
            forward_mode=ForwardMode.DECODE, extend_num_tokens=None, reqs=[], spec_algorithm=SpeculativeAlgorithm.NONE,
            req_pool_indices=torch.tensor([1], device="sim"), seq_lens=torch.tensor([step + 8], device="sim"),
            sampling_info=None,
            prefill_input_ids_cpu=torch.ones(1, dtype=torch.int64).pin_memory() if step == 0 else None,
            mix_running_indices=None, return_logprob=False, input_ids=None,
            return_hidden_states=False, beam_tail=None, enable_overlap=True, device="sim", spec_info=None, step=step,
            hicache_consumer_index=-1,
        )  # fmt: skip
        batch.copy = lambda: batch
        return batch

    todo = deque(batch_of(step) for step in range(STEPS))

    def next_batch(**_):
        made.gracefully_exit = not todo
        if todo and todo[0].step:
            left = todo[0].step - 1  # the slot that has left the window of the batch to come
            allocator.free_swa(slots[left : left + 1])
        return SimpleNamespace(running_batch=None, batch_to_run=todo.popleft() if todo else None)

    def forward(batch):
        where = allocator.translate_loc_from_full_to_swa(slots[batch.step :])
        return Result(
            next_token_ids=where.sum().view(1) % 7, next_draft_input=None, delay_sample_func=None, extra_keep_alive_refs=None
        )

    def processed(batch, result):
        result.copy_done.synchronize()

    apply = made._apply_war_barrier

    def barrier():
        met[0] += 1
        if not revert:
            apply()

    made._apply_war_barrier = barrier
    made.get_next_batch_to_run, made.process_batch_result = next_batch, processed
    runner = SimpleNamespace(shared_read_done_event=None)
    made.model_worker = SimpleNamespace(last_shared_read_runner=runner, forward_batch_generation=forward)
    with torch.sim.stream(made.schedule_stream):
        made.event_loop_overlap()
    return met[0]


running.watched(backend, steps)
