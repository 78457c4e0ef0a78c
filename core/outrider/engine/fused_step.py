"""One iteration in fused mode: one graph on forward holds all stages from gather to stash.

    host:     stage inputs ─┐
    schedule: upload ── inputs_ready ─┐
    forward:  unpack · prefill · gather · draft · plan · verify · extend · stash ── shared_reads_done · results
                       (or with verify, in one pass of the target)
    copy:     results of the iteration to the host

The plan stream has no work. Schedule only uploads, and forward unpacks. So no edge to another stream lies between two graphs:
an upload arrives while the graph before runs, and results leave while the next graph runs. Inputs that equal those of the
iteration before are not uploaded again.
"""

from __future__ import annotations

from outrider.engine.graphs import Runner
from outrider.engine.guided import GuidedDecoding
from outrider.engine.prefill import Prefill
from outrider.engine.requests.batch import Batch
from outrider.engine.stages import Iteration, build_frame
from outrider.engine.state.parts import EngineParts
from outrider.engine.state.staging import Packer, PrefillBucket
from outrider.engine.step import Step


class FusedStep(Step):
    """The launcher of iterations in fused mode. The replayed graph takes the host's decisions from the staging buffer on the
    device, and nothing else from the host.
    """

    def __init__(
        self, parts: EngineParts, iteration: Iteration, runner: Runner, prefill: Prefill, guided: GuidedDecoding
    ) -> None:
        super().__init__(parts, iteration.stages, runner, prefill, guided)
        self._iteration = iteration

    def _upload_inputs(self, requested: Batch, packer: Packer, entry: int) -> None:
        """Upload the packed batch on schedule, and unpack it into request rows on forward. An iteration with a guided request
        uses the staged upload instead.
        """
        if requested.features.guided:
            super()._upload_inputs(requested, packer, entry)
            return
        streams, fences, batch = self._streams, self._fences, requested.launched
        # A copy between two graphs costs time, so unchanged inputs are not copied again. Forward has already waited for the
        # upload that wrote them.
        inputs_unchanged = self._staging.matches_previous(packer)
        if not inputs_unchanged:
            self._staging.upload(entry, packer.packed, streams.schedule)
        if self._guided.has_prompts(batch):
            fences.shared_reads_done.wait(streams.schedule)
            self._guided.upload_prompt_masks(batch, entry)
        fences.inputs_ready.signal(streams.schedule)

        fences.inputs_ready.wait(streams.forward)
        with self._backend.on(streams.forward):
            self._input_upload.unpack(batch, packer, None if inputs_unchanged else entry)

    def _decode(self, requested: Batch, bucket: PrefillBucket | None, entry: int) -> None:
        """Replay the graph of the whole iteration on forward; that of ``bucket`` if it holds the iteration with prompts. An
        iteration with a guided request calls the stages in staged mode instead.
        """
        if requested.features.guided:
            super()._decode(requested, bucket, entry)
            return
        if bucket is not None and bucket.decoding and self.prefill.graphs is not None:
            self.prefill.graphs.replay(bucket)
        else:
            decode = self.decode_batch(self.runner, requested.launched, requested.features)
            self.runner.run(self._iteration, decode, build_frame(self._parts.buffers, decode))
        self._fences.shared_reads_done.signal(self._streams.forward)
