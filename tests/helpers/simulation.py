"""An engine without a model: the scheduler, the queue's rules and pages as integers. Steps' costs move its clock.

It mirrors `Engine.step` and `Slots`, and measures waits, shares and pages in simulated time.
"""

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import product
from math import ceil, inf
from typing import final

from infer.compute.operands.limits import HOST_STEP
from infer.engine.step.fair_queueing import (
    ANSWER_WORK,
    EXPECTED_ANSWER,
    AnswerLengths,
    Blocked,
    KeptSlots,
    Running,
    Tenants,
    Waiting,
    has_pages,
    may_pass,
    rank_of,
    victim,
    work_of,
)
from infer.engine.step.scheduler import (
    LEAST_PROMPT_TOKENS,
    MAX_SECONDS,
    MAX_STEPS,
    STREAM_SECONDS,
    Demand,
    Plan,
    Scheduler,
)
from infer.engine.step.step_costs import StepCosts, StepWork
from infer.engine.step.step_shares import StepPart, StepShares


@dataclass(eq=False)
class Request:
    """A request. Its answer has `num_new` tokens, which is unknown before its end. It is cancelled after `patience`."""

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
    num_computed: int = 0
    num_given: int = 0
    given_at_entry: int = 0
    num_preemptions: int = 0
    pages: int = 0
    charged: int | None = None
    passed: int = 0  # work of the requests that passed it while it waited for pages
    num_recomputed: int = 0  # tokens that were computed again
    entered_at: float | None = None
    ended_at: float | None = None
    bound: float = inf  # bound of its wait, as the scheduler computed it at the submission
    first_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_given


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


def most_work_before(tenants: Tenants, one: Waiting, waiting: Items[Waiting], running: int, most: int) -> float:
    """Return an upper bound of the work that is computed before a sequence enters, in the unit of `work_of`.

    `running` is the work that the running sequences may still take, `most` the most that any request may take. The
    bound holds for tenants that have a weight or an account, for answers that are not longer than expected, and if none
    of the tenant's own requests passes by a priority; after `HEAD_START` per level none can. Each sequence that enters
    before it, and the sequence itself, may wait for pages and be passed by as much work as its own. Preemptions are not
    counted.
    """
    ahead = sum(each.work for each in waiting if each.tenant == one.tenant and each.rank <= one.rank) - one.work
    accounts = tenants._accounts
    least, reached = tenants._least_active(), accounts[one.tenant] + ahead / tenants.weight(one.tenant)
    others = {*accounts, *tenants._weights} - {one.tenant}
    gaps = [max(0.0, reached - max(accounts.get(tenant, least), least)) for tenant in others]
    theirs = (most + tenants.weight(tenant) * gap for tenant, gap in zip(others, gaps, strict=True))
    return running + 2 * (ahead + sum(theirs)) + one.work


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
class Simulation:
    machine: Machine
    requests: Items[Request]
    weights: dict[str, float] = field(default_factory=dict)
    expected_answer: int = EXPECTED_ANSWER
    learns: bool = False  # True if the queue learns the length of answers
    door: Callable[[Request], float | None] = lambda request: None  # seconds until a refused client retries, or inf
    now: float = 0.0
    num_steps: int = 0
    num_given: int = 0
    num_come: int = 0

    def run(self) -> "Simulation":
        machine = self.machine
        self.scheduler, self.tenants = Scheduler(HOST_STEP, prompt_seconds=0.1), Tenants(self.weights)
        self.shares = StepShares(self.scheduler.costs, self.tenants.weight)
        self.free, self.served = machine.num_pages, dict.fromkeys((each.tenant for each in self.requests), 0)
        self.lengths, self.is_full, self.kept = AnswerLengths(self.expected_answer), False, KeptSlots()
        self.learn_costs()
        self.waiting, self.running = list[Request](), list[Request]()
        coming = sorted(self.requests, key=lambda each: each.arrives_at)
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now = max(self.now, coming[0].arrives_at)
            while coming and coming[0].arrives_at <= self.now:
                request = coming.pop(0)
                if (told := self.door(request)) is None:
                    request.number, self.num_come = self.num_come, self.num_come + 1
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
        self.tenants.come(request.tenant)
        self.waiting.append(request)
        left = [(max(0, each.num_prompt - each.num_computed), each.max_new - each.num_given) for each in self.running]
        running = sum(work_of(*each) for each in left)
        most = max(work_of(each.num_prompt, each.max_new) for each in self.requests)
        waiting = [self.waiting_of(each) for each in self.waiting]
        work = most_work_before(self.tenants, self.waiting_of(request), waiting, running, most)
        longest = max(each.num_prompt + each.max_new for each in self.requests)
        request.bound = MAX_SECONDS + most_seconds(self.scheduler.costs, work, self.machine.num_slots, longest)

    def room_of(self, request: Request) -> int:
        learnt = ceil(self.lengths.expected(request.tenant, request.num_given))
        return min(request.max_new - request.num_given, learnt if self.learns else self.expected_answer)

    def waiting_of(self, request: Request) -> Waiting:
        rank, work = rank_of(request.arrives_at, request.priority), work_of(request.num_prompt, self.room_of(request))
        return Waiting(request.number, request.tenant, rank, work, request.charged is not None)

    def drop_impatient(self) -> None:
        for request in [*self.waiting, *self.running]:
            if self.now - request.arrives_at > request.patience:
                self.leave(request)

    def leave(self, request: Request) -> None:
        request.ended_at = self.now
        (self.running if request in self.running else self.waiting).remove(request)
        self.give_up_pages(request)
        if request.charged is not None:
            used = work_of(min(request.num_computed, request.num_prompt), request.num_given)
            self.tenants.charge(request.tenant, used - request.charged)
            self.lengths.learn(request.tenant, request.num_given)
        self.kept.left(request.tenant, request.number, self.now)
        self.is_full = False
        self.tenants.go(request.tenant)

    def give_up_pages(self, request: Request) -> None:
        self.free, request.pages = self.free + request.pages, 0

    def admit(self) -> None:
        """Mirror `Slots.admit`."""
        blocked = list[Request]()
        while self.waiting:
            num_kept = self.kept.count((each.tenant for each in self.running), self.now, self.machine.num_slots)
            is_full = len(self.running) >= self.machine.num_slots - num_kept
            able = self.idle() if is_full else self.passing(blocked)
            if not able:
                return
            waiting = {each.number: each for each in able}
            request = waiting[self.tenants.first(map(self.waiting_of, able)).number]
            if (givers := self.givers(request)) is None:
                if is_full:
                    return
                blocked.append(request)
                continue
            for giver in givers:
                self.tenants.gave(self.running_of(giver), self.num_given)
                self.kept.got(request.number)
                self.preempt(giver)
            for each in blocked:
                each.passed += self.waiting_of(request).work
            self.enter(request)

    def enter(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.given_at_entry, request.num_computed = request.num_given, 0
        self.kept.entered(request.tenant, request.number)
        if request.charged is None:
            request.entered_at, request.charged = self.now, self.waiting_of(request).work
            self.tenants.charge(request.tenant, request.charged)

    def idle(self) -> list[Request]:
        tenants = {each.tenant for each in self.running}
        return [each for each in self.waiting if each.tenant not in tenants]

    def passing(self, blocked: Items[Request]) -> list[Request]:
        if not blocked:
            return self.waiting
        before = [Blocked(each.num_tokens, self.waiting_of(each).work, each.passed) for each in blocked]
        shorter = [each for each in self.waiting if may_pass(each.num_tokens, self.waiting_of(each).work, before)]
        tenants = {each.tenant for each in blocked}
        idle = [each for each in self.idle() if each not in blocked and self.tenants.is_owed(each.tenant, tenants)]
        return shorter or idle

    def givers(self, request: Request) -> list[Request] | None:
        found, running = list[Request](), list(self.running)
        while len(running) >= self.machine.num_slots or not self.has_pages(request, running):
            one = self.waiting_of(request)
            giver = self.tenants.giver(one, self.size(request), list(map(self.running_of, running)), self.num_given)
            if giver is None:
                return None
            found.append(next(each for each in running if each.number == giver.number))
            running.remove(found[-1])
        return found

    def has_pages(self, request: Request, running: Items[Request]) -> bool:
        if self.is_full and self.running and len(running) == len(self.running):
            return False
        pages_of = self.machine.pages_of
        growths = [[pages_of(each.num_tokens + self.room_of(each)) - each.pages] for each in running]
        free = self.free + sum(each.pages for each in self.running if each not in running)
        return not running or has_pages([free], growths, [pages_of(request.num_tokens + self.room_of(request))])

    def size(self, request: Request) -> float:
        pages = self.machine.pages_of(request.num_tokens + self.room_of(request))
        return max(1 / self.machine.num_slots, pages / self.machine.num_pages)

    def running_of(self, request: Request) -> Running:
        num_given, was_preempted = request.num_given - request.given_at_entry, request.num_preemptions > 0
        return Running(request.number, num_given, was_preempted, request.tenant, request.priority, self.size(request),
                       request.num_tokens)  # fmt: skip

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
        """Mirror `StepPlanner._plan`."""
        demands = [self.demand(each) for each in active]
        if (most_steps := self.shares.most_steps) is not None:
            demands = [demand._replace(max_steps=min(demand.max_steps, most_steps)) for demand in demands]
        num_waiting, others_stream = len(self.waiting) + len(resting), any(each.is_streamed for each in resting)
        return self.scheduler.plan(demands, self.machine.step_tokens, num_waiting, others_stream=others_stream)

    def demand(self, request: Request) -> Demand:
        useful = min(MAX_STEPS, request.max_new - request.num_given)
        return Demand(request.num_tokens - request.num_computed, 0, MAX_STEPS, useful, MAX_STEPS, request.num_computed,
                      request.number, request.is_streamed)  # fmt: skip

    def reserve(self, request: Request, count: int) -> bool:
        """Return False if a sequence was preempted. Then the step is planned again."""
        while request in self.running:
            more = self.machine.pages_of(request.num_computed + count) - request.pages
            if more <= self.free:
                self.free -= max(0, more)
                request.pages += max(0, more)
                return True
            found = victim(list(map(self.running_of, self.running)), self.tenants.weight)
            assert found is not None, "alone it fits"
            self.preempt(next(each for each in self.running if each.number == found.number))
            self.is_full = True
        return False

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.append(request)
        self.give_up_pages(request)
        request.num_preemptions += 1
        request.num_recomputed += request.num_computed

    def trim(self, request: Request) -> None:
        kept = self.machine.pages_of(request.num_computed)
        self.free, request.pages = self.free + request.pages - kept, kept
