"""Every order in which a small program may run, by brute force: what each read of the host can find.

It shares nothing with the model but the language, of which it knows a part: no graphs, flags or scopes; the host waits for a
stream or for the device, and asks a stream.
"""

from __future__ import annotations

import torch

from outrider_conformance.programs import language as lang


def outcomes(program):
    """(path, kind, index) → every content that a read there may find; paths and memory as in the model's expectations."""
    return _Orders(program).all()


class _Orders:
    def __init__(self, program):
        self.program, self.found, self.seen = program, {}, set()

    def all(self):
        memory = {}
        for kind, memories in (("buffer", self.program.buffers), ("slot", self.program.slots)):
            for index, each in enumerate(memories):
                memory[kind, index] = tuple(lang.pattern(index, each.count, torch.int64).tolist())
        hosts = ((self.program.steps, ()),)
        queues = ((),) * self.program.streams
        self._from((hosts, queues, tuple(sorted(memory.items())), (None,) * self.program.events, frozenset()))
        return self.found

    def _from(self, state):
        """`hosts` are (steps to come, path before them) with the step's number counted by what is left."""
        waiting = [state]
        while waiting:
            state = waiting.pop()
            if state not in self.seen:
                self.seen.add(state)
                waiting += self._next(state)

    def _next(self, state):
        hosts, queues, memory, _, over = state
        if not hosts[0][0] and len(hosts) == 1 and not any(queues):
            for key, content in memory:
                self._note((len(self.program.steps), ("buffer", "slot").index(key[0]), key[1]), key, content)
            return
        for number, queue in enumerate(queues):
            if queue and (queue[0][0] != "wait" or queue[0][1] in over):
                yield self._device(state, number)
        for number in range(1, len(hosts)) if len(hosts) > 1 else (0,):
            steps, path = hosts[number]
            if steps:
                step, at = steps[0], (*path, self._total(path) - len(steps))
                if isinstance(step, lang.ThreadsStep):
                    yield ((steps[1:], path), (step.first, (*at, 0)), (step.second, (*at, 1))), *state[1:]
                elif (after := self._host(state, step, at)) is not None:
                    moved = tuple((steps[1:], path) if n == number else host for n, host in enumerate(hosts))
                    yield moved, *after
        if len(hosts) > 1 and not any(steps for steps, _ in hosts[1:]):
            yield hosts[:1], *state[1:]

    def _total(self, path):
        steps = self.program.steps
        if path:
            steps = (steps[path[0]].first, steps[path[0]].second)[path[1]]
        return len(steps)

    def _note(self, path, key, content):
        self.found.setdefault((path, key), set()).add(content)

    def _device(self, state, number):
        hosts, queues, memory, events, over = state
        verb, *rest = queues[number][0]
        queues = tuple(queue[1:] if n == number else queue for n, queue in enumerate(queues))
        if verb == "done":
            over = over | {rest[0]}
        elif verb == "move":
            make, target, places, source = rest
            now = dict(memory)
            read = now[source[0]] if source else ()
            made = make(tuple(read[place] for place in source[1]) if source else ())
            content = list(now[target])
            for place, value in zip(places, made, strict=True):
                content[place] = value
            now[target] = tuple(content)
            memory = tuple(sorted(now.items()))
        elif verb == "item":
            path, key = rest
            self._note(path, key, dict(memory)[key])
        return hosts, queues, memory, events, over

    def _host(self, state, step, path):
        """What the host's step does; None while it waits."""
        _, queues, memory, events, over = state
        if isinstance(step, lang.Synchronize):
            held = queues[step.which] if step.how == "stream" else any(queues)
            return None if held else state[1:]
        if isinstance(step, lang.HostRead):
            self._note(path, ("slot", step.slot), dict(memory)["slot", step.slot])
            return state[1:]
        if isinstance(step, lang.Query):
            if not queues[step.which]:
                self._note(path, ("slot", step.slot), dict(memory)["slot", step.slot])
            return state[1:]
        if isinstance(step, lang.HostWrite):
            now = dict(memory)
            content = list(now["slot", step.slot.of])
            content[step.slot.view] = lang.pattern(step.seed, step.slot.count, torch.int64).tolist()
            now["slot", step.slot.of] = tuple(content)
            return queues, tuple(sorted(now.items())), events, over
        works = self._works(step, path, events)
        if isinstance(step, lang.EventStep) and step.verb == "record":
            events = tuple(path if n == step.event else event for n, event in enumerate(events))
        queues = tuple((*queue, *works) if n == step.stream else queue for n, queue in enumerate(queues))
        return queues, memory, events, over

    def _works(self, step, path, events):
        if isinstance(step, lang.EventStep):
            return [("done", path) if step.verb == "record" else ("wait", events[step.event])]
        if isinstance(step, lang.Item):
            return [("item", path, ("buffer", step.of))]
        if step.kind == "fill":
            return [("move", _value(step.value, step.to.count), ("buffer", step.to.of), _places(step.to), None)]
        to, source = ((span.key, span) for span in (step.to, step.source))
        make = _tripled(step.value) if step.kind == "mix" else _same
        return [("move", make, to[0], _places(to[1]), (source[0], _places(source[1])))]


def _places(span):
    return tuple(range(span.start, span.start + span.count * span.stride, span.stride))


def _same(values):
    return values


_MADE: dict = {}  # one function for one value: states are compared


def _value(value, count):
    return _MADE.setdefault((value, count), lambda _: (value,) * count)


def _tripled(add):
    return _MADE.setdefault(add, lambda values: tuple((3 * v + add + (1 << 63)) % (1 << 64) - (1 << 63) for v in values))
