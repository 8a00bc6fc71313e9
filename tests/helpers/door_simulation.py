"""Clients at the door of a simulated engine. A refused client retries several times, when it was told to."""

from collections import defaultdict
from math import inf
from typing import final

from infer.serving.protocols.api_errors import ApiError
from infer.serving.server.door import Arrival, Door, Entry, Load, RemainingWork
from infer.serving.server_settings import ServerSettings
from simulation import Machine, Request, Simulation


@final
class DoorSimulation:
    """Requests at a door. `told` has the wait that each refused request was told, in seconds."""

    def __init__(
        self, machine: Machine, requests: list[Request], *, num_retries: int = 2, mean: float = 64.0, **limits: float
    ) -> None:
        self.life = Simulation(machine, requests, door=self.ask)
        settings = ServerSettings(slots=machine.num_slots, **limits)  # type: ignore[arg-type]
        self.door = Door(settings, clock=lambda: self.life.now)
        self.door.lengths.mean = mean
        self.num_retries, self.requests = num_retries, requests
        self.first_asked: dict[Request, float] = {}
        self.taken_at: dict[Request, float] = {}
        self.told: defaultdict[Request, list[float]] = defaultdict(list)
        self.entries: dict[Request, Entry] = {}  # entries of requests that have no token yet

    def run(self) -> None:
        self.life.run()

    def look(self) -> Load:
        machine, life = self.life.machine, self.life

        def work_of(each: Request) -> RemainingWork:
            answer = min(float(each.max_new - each.num_given), self.door.lengths.expected(each.tenant, each.num_given))
            left = max(0, each.num_tokens - each.num_computed - 1)
            return RemainingWork(each.tenant, each in life.running, left, each.num_computed, answer)

        works = [work_of(each) for each in (*life.running, *life.waiting)]
        costs = life.scheduler.costs
        return Load(works, costs, machine.num_slots, lambda n: machine.num_pages // machine.pages_of(n))

    def learn_waits(self) -> None:
        for request in [each for each in self.entries if each.first_token_at is not None]:
            waited = (request.first_token_at or 0.0) - self.taken_at[request]
            self.door.learn(self.entries.pop(request).predicted, waited)

    def ask(self, request: Request) -> float | None:
        self.learn_waits()
        self.first_asked.setdefault(request, self.life.now)
        arrival = Arrival(request.tenant, 1, 1, request.num_prompt, request.max_new)
        try:
            entry = self.door.enter(arrival, b"%d" % id(request), self.look)
        except ApiError as refused:
            told = int(refused.headers["retry-after-ms"]) / 1000
            self.told[request].append(told)
            return told if len(self.told[request]) <= self.num_retries else inf
        entry.num_submitted += 1  # from now on, the request is in the engine
        self.door.leave(entry)
        self.taken_at[request], self.entries[request] = self.life.now, entry
        return None

    @property
    def answered(self) -> list[Request]:
        return [each for each in self.requests if each.ended_at is not None]

    def waits(self) -> list[float]:
        """Return the time from acceptance to the first token of each accepted request."""
        return [(each.first_token_at or inf) - self.taken_at[each] for each in self.answered]
