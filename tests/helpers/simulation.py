"""An engine without a model: the scheduler, the queue's rules and pages as integers. Steps' costs move its clock.

It mirrors `Engine.step` and `Slots`, and measures waits, shares and pages in simulated time.
"""

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any, final

from infer.compute.operands.limits import HOST_STEP
from infer.engine.step.fairness import (
    ANSWER_WORK,
    EXPECTED_ANSWER,
    HEAD_START,
    MeanLengths,
    Queue,
    has_pages,
    work_of,
)
from infer.engine.step.scheduler import (
    LEAST_PROMPT_TOKENS,
    MAX_SECONDS,
    MAX_STEPS,
    STREAM_SECONDS,
    Plan,
    Scheduler,
    StepPart,
    StepShares,
)
from infer.engine.step.step_costs import StepCosts, StepWork


@dataclass(eq=False)
class Request:
    """A request. Its answer has `num_new` tokens, which is unknown before its end. It is cancelled after `patience`.

    It is a `fairness.Candidate`, and a `scheduler.Demand`.
    """

    arrives_at: float
    num_prompt: int
    num_new: int
    max_new: int
    tenant: str = ""
    priority: int = 0
    patience: float = inf
    is_streamed: bool = True
    # Its results
    number: int = 0
    submitted_at: float = 0.0
    entry: int = 0
    paid: int | None = None
    num_before: int = 0
    passed: int = 0
    num_computed: int = 0
    num_given: int = 0
    num_preemptions: int = 0
    pages: int = 0
    num_recomputed: int = 0  # tokens that were computed again
    entered_at: float | None = None
    ended_at: float | None = None
    bound: float = inf  # bound of its wait, as the scheduler computed it at the submission
    first_token_at: float | None = None

    # Constants of this simulation
    num_reused: int = 0
    num_drafts: int = 0
    checkpoints: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_prompt

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_given

    @property
    def num_generated(self) -> int:
        return self.num_given

    @property
    def room(self) -> int:
        return self.max_new - self.num_given

    @property
    def num_schedulable(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def useful_steps(self) -> int:
        return min(MAX_STEPS, self.room)


@final
@dataclass
class Machine:
    """`costs` as `StepCosts` has them: seconds for a step, a sequence, a further token, 1,024 positions of a token."""

    num_slots: int
    num_pages: int
    costs: tuple[float, float, float, float] = (2e-3, 3e-4, 4.5e-4, 9e-4)
    page_tokens: int = 64
    step_tokens: int = 512
    slowness: Callable[[], float] = lambda: 1.0  # factor of one step's time, caused by neighbours
    between: float = 0.0  # seconds between two steps, which belong to no step

    def seconds(self, work: StepWork) -> float:
        return self.slowness() * sum(cost * feature for cost, feature in zip(self.costs, work.features, strict=True))

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


def rank_of(request: Request) -> float:
    return request.submitted_at - HEAD_START * request.priority


def most_work_before(queue: Queue[Request], one: Request, waiting: Items[Request], running: int, most: int) -> float:
    """Return an upper bound of the work that is computed before a sequence enters, in the unit of `work_of`.

    `running` is the work that the running sequences may still take, `most` the most that any request may take. The
    bound holds for tenants that have an account, for answers that are not longer than expected, and if none
    of the tenant's own requests passes by a priority; after `HEAD_START` per level none can. Each sequence that enters
    before it, and the sequence itself, may wait for pages and be passed by as much work as its own. Preemptions are not
    counted.
    """
    tenants, own = queue.tenants, queue.work_of(one)
    before = (each for each in waiting if each.tenant == one.tenant and rank_of(each) <= rank_of(one))
    ahead, accounts = sum(map(queue.work_of, before)) - own, tenants.accounts
    least, reached = tenants._least_active(), accounts[one.tenant] + ahead
    others = accounts.keys() - {one.tenant}
    gaps = [max(0.0, reached - max(accounts.get(tenant, least), least)) for tenant in others]
    return running + 2 * (ahead + sum(most + gap for gap in gaps)) + own


def most_seconds(costs: StepCosts, work: float, num_sequences: int, longest: int) -> float:
    """Return an upper bound, in seconds, for `work` while `num_sequences` sequences of length `longest` run.

    Each step gives one sequence a token that counts, or reads `LEAST_PROMPT_TOKENS`, or as many as `STREAM_SECONDS`
    allow.
    """
    step = costs.predict(StepWork(num_sequences, num_sequences, num_sequences * longest))
    further = costs.predict_further(1, longest)
    reading = max(step / LEAST_PROMPT_TOKENS, 2 * further * step / STREAM_SECONDS) + further
    return work * max(step / ANSWER_WORK, reading)


@final
@dataclass
class ConstantLength:
    """Replaces `MeanLengths`: every answer is always expected to have `mean` further tokens."""

    mean: int

    def learn(self, tenant: str, num_tokens: int) -> None:
        return

    def expected(self, tenant: str, num_given: int = 0) -> int:
        return self.mean


@final
@dataclass
class Simulation:
    machine: Machine
    requests: Items[Request]
    expected_answer: int = EXPECTED_ANSWER
    learns: bool = False  # True if the queue learns the length of answers
    door: Callable[[Request], float | None] = lambda request: None  # seconds until a refused client retries, or inf
    now: float = 0.0
    num_steps: int = 0
    num_given: int = 0

    def run(self) -> "Simulation":
        machine = self.machine
        self.scheduler, self.queue = Scheduler(HOST_STEP), Queue[Request]()
        self.scheduler.limit_prompts(0.1)
        lengths: Any = (MeanLengths if self.learns else ConstantLength)(self.expected_answer)
        self.tenants, self.queue.lengths = self.queue.tenants, lengths
        self.shares = StepShares(self.scheduler.costs)
        self.free, self.served = machine.num_pages, dict.fromkeys((each.tenant for each in self.requests), 0)
        self.is_full = False
        self.learn_costs()
        self.waiting, self.running = list[Request](), list[Request]()
        coming = sorted(self.requests, key=lambda each: each.arrives_at)
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now = max(self.now, coming[0].arrives_at)
            while coming and coming[0].arrives_at <= self.now:
                request = coming.pop(0)
                if (told := self.door(request)) is None:
                    self.come(request)
                elif told < inf:
                    request.arrives_at = self.now + told
                    insort(coming, request, key=lambda each: each.arrives_at)
            self.drop_impatient()
            self.admit()
            if self.running:
                self.step()
        return self

    def learn_costs(self) -> None:
        for count, tokens, context in product((1, 2, 4, 8), (0, 64, 256), (0, 2048)):
            work = StepWork(count, count + tokens, (count + tokens) * context)
            self.scheduler.costs.learn(work, self.machine.seconds(work))

    def come(self, request: Request) -> None:
        self.queue.join(request, request.arrives_at)
        self.wait(request)
        left = [(max(0, each.num_prompt - each.num_computed), each.room) for each in self.running]
        running = sum(work_of(*each) for each in left)
        most = max(work_of(each.num_prompt, each.max_new) for each in self.requests)
        work = most_work_before(self.queue, request, self.waiting, running, most)
        longest = max(each.num_prompt + each.max_new for each in self.requests)
        request.bound = MAX_SECONDS + most_seconds(self.scheduler.costs, work, self.machine.num_slots, longest)

    def wait(self, request: Request) -> None:
        self.queue.wait(request)
        self.waiting.append(request)

    def drop_impatient(self) -> None:
        for request in [*self.waiting, *self.running]:
            if self.now - request.arrives_at > request.patience:
                self.leave(request)

    def leave(self, request: Request) -> None:
        request.ended_at = self.now
        (self.running if request in self.running else self.waiting).remove(request)
        self.give_up_pages(request)
        request.num_reused = max(0, request.num_prompt - request.num_computed)  # it does not pay for what was not read
        self.queue.leave(request, self.now)
        self.is_full = False

    def give_up_pages(self, request: Request) -> None:
        self.free, request.pages = self.free + request.pages, 0

    def admit(self) -> None:
        """Mirror `Slots.admit`."""
        blocked = list[Request]()
        while True:
            num_kept = self.queue.kept.count({each.tenant for each in self.running}, self.now, self.machine.num_slots)
            is_full = len(self.running) >= self.machine.num_slots - num_kept
            request = self.queue.next(self.running, blocked, is_full=is_full)
            if request is None:
                return
            if (givers := self.givers(request)) is not None:
                for giver in givers:
                    self.queue.gave(giver, request)
                    self.preempt(giver)
                self.queue.pass_by(request, blocked)
                self.enter(request)
            elif is_full:
                return
            else:
                blocked.append(request)

    def enter(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed = 0
        if request.paid is None:
            request.entered_at = self.now
        self.queue.enter(request)

    def givers(self, request: Request) -> list[Request] | None:
        givers, running = list[Request](), list(self.running)
        while len(running) >= self.machine.num_slots or not self.has_pages(request, running):
            giver = self.queue.giver_for(request, running, self.size)
            if giver is None:
                return None
            givers.append(giver)
            running.remove(giver)
        return givers

    def has_pages(self, request: Request, running: Items[Request]) -> bool:
        if self.is_full and self.running and len(running) == len(self.running):
            return False
        growths = [[self.pages_expected(each) - each.pages] for each in running]
        free = self.free + sum(each.pages for each in self.running if each not in running)
        return not running or has_pages([free], growths, [self.pages_expected(request)])

    def pages_expected(self, request: Request) -> int:
        return self.machine.pages_of(request.num_tokens + self.queue.expected_room(request))

    def size(self, request: Request) -> float:
        return max(1 / self.machine.num_slots, self.pages_expected(request) / self.machine.num_pages)

    def step(self) -> None:
        chosen = self.shares.choose([StepPart(each.tenant, 1, each.num_computed) for each in self.running])
        while True:
            active = [each for each in self.running if each.tenant in chosen]
            resting = [each for each in self.running if each.tenant not in chosen]
            plan = self.plan(active, resting)
            asked = list(zip(active, plan.num_tokens, strict=True))
            num_ready = sum(self.reserve(each, max(plan.num_steps, count)) for each, count in asked)
            if num_ready == len(asked) == sum(each in self.running for each in active):
                break
        assert sum(plan.num_tokens) > 0, "a step computes something"
        seconds = sum(self.machine.seconds(plan.work) for _ in range(plan.num_steps))
        self.now += seconds + self.machine.between
        self.num_steps += 1
        self.scheduler.update(plan, plan.num_steps, seconds, None)
        parts = [StepPart(each.tenant, count, each.num_computed) for each, count in asked if count]
        self.shares.computed(parts, plan.num_steps, seconds)
        for request, count in asked:
            given = 0
            if request.num_computed + count == request.num_tokens:
                given = min(plan.num_steps, request.num_new - request.num_given)
            read = min(request.num_computed + count, request.num_prompt) - min(request.num_computed, request.num_prompt)
            request.num_computed += count + max(0, given - 1)
            request.num_given += given
            self.num_given += given
            if given and request.first_token_at is None:
                request.first_token_at = self.now
            self.served[request.tenant] += work_of(read, given)
            if request.num_given == request.num_new:
                self.leave(request)
            else:
                self.trim(request)

    def plan(self, active: Items[Request], resting: Items[Request]) -> Plan:
        """Mirror `Steps._plan`."""
        max_steps = MAX_STEPS if self.shares.most_steps is None else min(MAX_STEPS, self.shares.most_steps)
        others_wait, others_stream = bool(self.waiting or resting), any(each.is_streamed for each in resting)
        limits = self.machine.step_tokens, max_steps
        return self.scheduler.plan(active, *limits, others_wait=others_wait, others_stream=others_stream)

    def reserve(self, request: Request, count: int) -> bool:
        """Return False if a sequence was preempted. Then the step is planned again."""
        while request in self.running:
            more = self.machine.pages_of(request.num_computed + count) - request.pages
            if more <= self.free:
                self.free -= max(0, more)
                request.pages += max(0, more)
                return True
            victim = self.queue.victim_of(self.running, self.size)
            assert victim is not None, "alone it fits"
            self.preempt(victim)
            self.is_full = True
        return False

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.wait(request)
        self.give_up_pages(request)
        request.num_preemptions += 1
        request.num_recomputed += request.num_computed

    def trim(self, request: Request) -> None:
        kept = self.machine.pages_of(request.num_computed)
        self.free, request.pages = self.free + request.pages - kept, kept
