"""A prefill side and a decode side in one thread: messages go through the wire's bytes, and arrive when the test says so."""

import time
from collections import deque

from outrider.apart.decode_side import DecodeSide
from outrider.apart.landing import OneLanding, RankLandings
from outrider.apart.prefill_side import PrefillSide
from outrider.apart.wire import Decoder

PEER = 1
LIMIT_S = 60


class Couple:
    """``transport``: one object for both sides, or two."""

    def __init__(self, giver, taker, transport, **options):
        self.prefill, self.decode = PrefillSide(giver), DecodeSide(taker, **options)
        self.transport = transport
        self.outputs, self.ended = {}, {}
        self.connect()

    def connect(self):
        """As after a start of either side."""
        self.to_prefill, self.to_decode = deque(), deque()
        giver, taker = self.prefill.engine, self.decode.engine
        there = self.transport.open(taker.page_memory, taker.backend, accepts=False, host="127.0.0.1")
        landing = OneLanding(there) if taker.groups == 1 else RankLandings(taker).make(there, "127.0.0.1")
        offers = landing.offers()
        links = [self.transport.open(giver.page_memory, giver.backend, accepts=True, host="127.0.0.1") for _ in offers]
        for link, offer in zip(links, offers, strict=True):
            link.connect(offer)
        landing.connect([link.offer() for link in links])
        self.prefill.joined(PEER, lambda message: self.to_decode.append(message.encode()), links)
        self.decode.joined(PEER, lambda message: self.to_prefill.append(message.encode()), landing)

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
                for message in Decoder(1 << 24).feed(frame):
                    side.receive(PEER, message)

    def turn(self):
        self.deliver()
        busy = self.prefill.turn()
        return self.decode.turn() or busy

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
        (self.decode if side == "prefill" else self.prefill).left(PEER)

    def close(self):
        self.prefill.left(PEER)
        self.decode.left(PEER)
