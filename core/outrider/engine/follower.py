"""The follower rank: an engine that repeats the decisions of the first rank, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.device import ConfigError
from outrider.engine.loop import Loop
from outrider.engine.ranks.commands import HandOverCommand, ResumeCommand, VoteRequest
from outrider.engine.ranks.decision_log import RankedDecisionLog
from outrider.engine.ranks.records import RanksDiffer
from outrider.errors import RequestError

Calls = Mapping[type, Callable[[Any], object]]
"""What an engine does for each command, by its class."""


Answer = Callable[[str], str]
"""The function of a rank that answers a vote request of the first rank; it belongs to the engine's caller."""


def answering(decision_log: RankedDecisionLog, answer: Answer | None) -> Callable[[VoteRequest], None]:
    """Return the handler of vote requests; it publishes the answer of this rank."""

    def answer_request(request: VoteRequest) -> None:
        if answer is None:
            raise ConfigError("the first rank asks what is beside this one's engine, and nothing is: use follow(answer=...)")
        decision_log.publish_vote(request.number, answer(request.said))

    return answer_request


def follow(decision_log: RankedDecisionLog, calls: Calls, loop: Loop) -> None:
    """Replay decision records until the first rank's engine is closed. The first rank delivers the outputs; here they are
    dropped.
    """
    try:
        while True:
            record = decision_log.next()
            for command in decision_log.commands:
                try:
                    calls[type(command)](command)
                except RequestError as error:
                    # Every rank rejects an invalid command; the first rank raises the error to its caller.
                    if not isinstance(command, HandOverCommand | ResumeCommand):
                        raise RanksDiffer(
                            f"rank {decision_log.ranks.rank} refuses a {type(command).__name__} that rank 0 took: {error}; "
                            "start all ranks with the same options, files and software"
                        ) from error
            if record.act == "iterate":
                loop.iterate()
            elif record.act == "drain":
                loop.drain()
            elif record.act == "end":
                return
            loop.output_queue.pop_outputs()
    except BaseException as error:
        stopped = loop.failure_recovery.stop_with_ranks(error)
        if isinstance(error, Exception) and stopped is not error:
            raise stopped from error
        raise
