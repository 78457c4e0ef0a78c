"""A prefill side and a decode side in one thread: messages go through the wire's bytes, and arrive when the test says so."""

import time
from collections import deque

from outrider.disaggregation.connections import MessageDecoder
from outrider.disaggregation.decode_worker import DecodeWorker
from outrider.disaggregation.page_landing import FollowerLinks, LandingRegistry, registered_memory
from outrider.disaggregation.prefill_worker import PrefillWorker
from outrider.engine.ranks.ranks import ParallelConfig
from outrider.transports.link import LocalTransport
from ranks.threads import run_bodies

PEER = 1
LIMIT_S = 60


class Couple:
    """``transport``: one object for both sides, or two."""

    def __init__(self, giver, taker, transport, **options):
        self.prefill, self.decode = PrefillWorker(giver), DecodeWorker(taker, **options)
        self.transport = transport
        self.outputs, self.ended = {}, {}
        self.connect()

    def connect(self):
        """As after a start of either side."""
        self.to_prefill, self.to_decode = deque(), deque()
        giver, taker = self.prefill.engine, self.decode.engine
        layout = ParallelConfig(tensor=taker.model.shards.attention.size, data=taker.groups)
        there = self._open(taker, accepts=False, memory=registered_memory(taker, layout.tensor))
        landing = LandingRegistry(taker).open_landing(there, "127.0.0.1")
        offers = landing.offers()
        parts = [layout.shards(rank).attention for rank in range(layout.world)]
        given = [registered_memory(giver, part.size, part) for part in parts]
        links = [self._open(giver, accepts=True, memory=each) for each in given]
        for link, offer in zip(links, offers, strict=True):
            link.connect(offer)
        landing.connect([link.offer() for link in links])
        self.links = links
        self.prefill.add_peer(PEER, lambda message: self.to_decode.append(message.encode()), links, layout.tensor)
        self.decode.add_peer(PEER, lambda message: self.to_prefill.append(message.encode()), landing)

    def _open(self, engine, *, accepts, memory):
        regions, states = memory
        return self.transport.open(regions, engine.backend, accepts=accepts, host="127.0.0.1", states=states)

    def submit(self, state):
        got, key = [], len(self.outputs)
        self.outputs[key] = got

        def emit(output):
            got.append(output)
            if output.finish_reason is not None:
                self.ended[key] = output

        return key, self.decode.submit(state, emit)

    def tokens(self, key):
        return tuple(token for output in self.outputs[key] for token in output.tokens)

    def deliver(self):
        for queue, side in ((self.to_prefill, self.prefill), (self.to_decode, self.decode)):
            for frame in list(queue):
                queue.popleft()
                for message in MessageDecoder(1 << 24).feed(frame):
                    side.handle_message(PEER, message)

    def turn(self):
        self.deliver()
        busy = self.prefill.run_iteration()
        return self.decode.run_iteration() or busy

    def run(self, until=None):
        end = time.monotonic() + LIMIT_S
        while not (until() if until is not None else len(self.ended) == len(self.outputs)):
            if not self.turn():
                time.sleep(0.0005)
            assert time.monotonic() < end, "it didn't end"

    def rest(self):
        """Both engines hold nothing any more."""
        self.run(lambda: not (self.prefill.has_work or self.decode.has_work or self.to_prefill or self.to_decode))
        for engine in (self.prefill.engine, self.decode.engine):
            engine.drain()

    def lose(self, side):
        """A side dies: what it has said last may not arrive, and the other one learns of it."""
        self.to_prefill.clear()
        self.to_decode.clear()
        (self.decode if side == "prefill" else self.prefill).remove_peer(PEER)

    def close(self):
        self.prefill.remove_peer(PEER)
        self.decode.remove_peer(PEER)


def on_ranks(layout, make, make_giver, lead):
    """What ``lead`` returns for the couple of a prefill engine and a decode engine on several ranks, which are threads.

    Afterwards no engine holds a page or a row that it didn't hold before.
    """
    transport = LocalTransport()

    def free(engine):
        return engine.free_pages, engine.free_rows

    def body(ranks):
        engine, found = make(ranks), None
        before = free(engine)
        if engine.follows:
            links = FollowerLinks(engine, transport, rank=ranks.rank)
            engine.follow(links.execute_query)
            assert not links._links
        else:
            try:
                sides = Couple(make_giver(), engine, transport)
                given = free(sides.prefill.engine)
                found = lead(sides)
                sides.rest()
                assert free(sides.prefill.engine) == given
                sides.close()
            finally:
                engine.close()
        assert free(engine) == before
        return found

    return run_bodies(layout, body)[0]
