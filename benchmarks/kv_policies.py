"""What each way of forgetting costs: needles found at ten depths, and perplexity on the last tokens of a long text.

    python benchmarks/kv_policies.py                              SmolLM2: about a quarter of an hour alone
    python benchmarks/kv_policies.py --budgets 1024 --needles 10 --only needles
    python benchmarks/kv_policies.py --only stability             four times the context that the model was made for

Every policy sees the same prompts. A needle counts as found if the greedy answer holds its number; `of full` counts
only those that the whole cache finds. Reports go to benchmarks/reports/.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from command_line import REPORTS, make_parser
from infer import LLM, ops
from infer.errors import InvalidRequestError
from infer.kvcache.cache_settings import CacheSettings
from infer.llm import set_num_threads
from infer.operands.step import Chunk
from infer.runner.runner import Runner
from machine import write_report
from needles import make_needles, reference_text

POLICIES = ("sliding", "snapkv")
DEPTHS = [(2 * index + 1) / 20 for index in range(10)]
ANSWER_TOKENS = 8
STEP = 1024  # tokens of text per figure of stability


@dataclass(frozen=True)
class Recall:
    policy: str
    budget: int | None
    found: list[bool]
    of_full: float  # of those that the whole cache finds


@dataclass(frozen=True)
class Tail:
    policy: str
    budget: int | None
    num_tokens: int
    perplexity: float


def settings(budgets: Sequence[int], longest: int) -> list[tuple[str, int | None]]:
    """The whole cache first: the others are compared with it."""
    return [("none", None), *((policy, budget) for policy in POLICIES for budget in budgets if budget < longest)]


def make_context(llm: LLM, policy: str, budget: int | None) -> Runner:
    kept = {} if budget is None else {"eviction_window": budget, "protected_prefix": 4}
    return Runner(llm.model, llm.max_seq_len, settings=CacheSettings(eviction_policy=policy, **kept))


class Policies:
    """A prompt behind every policy. Those that see all of it share what reading it made: the whole cache's."""

    def __init__(self, llm: LLM, budgets: Sequence[int], longest: int) -> None:
        self.all = settings(budgets, longest)
        self._contexts = [make_context(llm, *each) for each in self.all]

    def read(self, token_ids: Sequence[int]) -> list[Runner]:
        """A context for each, that of the whole cache last: none of them may change it."""
        whole, *others = self._contexts
        whole.truncate(0, 0)
        whole.extend(0, token_ids)
        for context in others:
            context.truncate(0, 0)
            if context.compresses_prompts:
                context.import_slot(0, dict(whole.cache.export_row(0)), len(token_ids))
            else:
                context.extend(0, token_ids)
        return self._contexts


# Needles


def measure_recall(name: str, budgets: Sequence[int], num_tokens: int, per_depth: int) -> list[Recall]:
    llm = LLM(name, max_seq_len=num_tokens + ANSWER_TOKENS)
    policies = Policies(llm, budgets, num_tokens)
    answers: list[list[bool]] = [[] for _ in policies.all]
    for needle in make_needles(llm.tokenizer, num_tokens, DEPTHS * per_depth):
        for found, context in zip(answers, policies.read(needle.token_ids[:-1]), strict=True):
            said = greedy_answer(context, needle.token_ids, ANSWER_TOKENS)
            found.append(needle.answer in llm.tokenizer.decode(said))
        print(f"depth {needle.depth:.2f}: " + " ".join(str(int(found[-1])) for found in answers), flush=True)
    recalls = []
    for (policy, budget), found in zip(policies.all, answers, strict=True):
        kept = [mine for mine, whole in zip(found, answers[0], strict=True) if whole]
        recalls.append(Recall(policy, budget, found, sum(kept) / max(1, len(kept))))
    return recalls


@torch.inference_mode()
def greedy_answer(context: Runner, prompt: list[int], count: int) -> list[int]:
    """What follows a prompt that is read but for its last token."""
    made = prompt[-1:]
    with ops.backend_of(torch.device("cpu")).threads():
        while len(made) <= count:
            context.reserve(0, 1)
            logits = context.forward([Chunk(0, made[-1:])])
            context.commit(0, 1)
            if len(made) == 1:
                context.after_prompt(0, prompt)
            made.append(int(logits[0].argmax()))
    return made[1:]


def recall_lines(found: Sequence[Recall]) -> Iterator[str]:
    yield "| policy | budget | needles found | of full | by depth, start to end |"
    yield "|---|---|---|---|---|"
    for each in found:
        by_depth = [each.found[index :: len(DEPTHS)] for index in range(len(DEPTHS))]
        rates = " ".join(f"{sum(answers) / len(answers):.0%}" for answers in by_depth)
        rate = sum(each.found) / len(each.found)
        yield f"| {each.policy} | {each.budget or '–'} | {rate:.0%} | {each.of_full:.0%} | {rates} |"


# Perplexity


def measure_tails(name: str, budgets: Sequence[int], num_tokens: int, num_last: int) -> list[Tail]:
    """Of the last tokens of a text, behind a prompt of the others."""
    llm = LLM(name, max_seq_len=num_tokens)
    policies, num_known = Policies(llm, budgets, num_tokens), num_tokens - num_last
    token_ids = llm.tokenizer.encode(reference_text())[:num_tokens]
    found = []
    for (policy, budget), context in zip(policies.all, policies.read(token_ids[: num_known - 1]), strict=True):
        context.after_prompt(0, token_ids[: num_known - 1])
        scored = context.score(0, token_ids[num_known - 1 :], 0, llm.architecture.vocab_size)
        found.append(Tail(policy, budget, num_tokens, _perplexity_of([each.logprob for each in scored])))
        print(f"{policy} {budget or ''}: perplexity {found[-1].perplexity:.3f} on the last {num_last}", flush=True)
    return found


def _perplexity_of(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def measure_stability(name: str, budget: int, num_tokens: int) -> list[Tail]:
    """Perplexity of stretch after stretch of one text with `sliding`, far behind the context of the training."""
    options = {"eviction_policy": "sliding", "eviction_window": budget, "protected_prefix": 4}
    llm = LLM(name, max_seq_len=num_tokens, **options)
    logprobs = llm.prompt_logprobs(llm.tokenizer.encode(reference_text())[:num_tokens])
    found = []
    for start in range(0, num_tokens, STEP):
        stretch = [each.logprob for each in logprobs[start : start + STEP] if each is not None]
        found.append(Tail("sliding", budget, start + STEP, _perplexity_of(stretch)))
    return found


def tail_lines(found: Sequence[Tail], what: str) -> Iterator[str]:
    yield f"| policy | budget | {what} | perplexity |"
    yield "|---|---|---|---|"
    for each in found:
        yield f"| {each.policy} | {each.budget or '–'} | {each.num_tokens} | {each.perplexity:.3f} |"


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", threads=True)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--only", choices=("needles", "tails", "stability"))
    parser.add_argument("--length", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--needles", type=int, default=2, help="at each depth")
    parser.add_argument("--last", type=int, default=512, help="tokens that a tail's perplexity is of")
    parser.add_argument("--stable-length", type=int, default=32_768, help="tokens of the text that slides")
    arguments = parser.parse_args()
    set_num_threads(arguments.threads)
    recalls, tails, stable = list[Recall](), list[Tail](), list[Tail]()
    if arguments.only in (None, "needles"):
        recalls = measure_recall(arguments.model, arguments.budgets, arguments.length, arguments.needles)
        print("\n".join(recall_lines(recalls)), flush=True)
    if arguments.only in (None, "tails"):
        tails = measure_tails(arguments.model, arguments.budgets, arguments.length, arguments.last)
        print("\n".join(tail_lines(tails, "tokens")), flush=True)
    if arguments.only in (None, "stability"):
        stable = measure_stability(arguments.model, max(arguments.budgets), arguments.stable_length)
        print("\n".join(tail_lines(stable, "up to token")), flush=True)
    results = {
        "needles": [asdict(each) for each in recalls],
        "tails": [asdict(each) for each in tails],
        "stability": [asdict(each) for each in stable],
    }
    write_report(REPORTS, "kv-policies", vars(arguments), results)


if __name__ == "__main__":
    try:
        main()
    except InvalidRequestError as error:
        raise SystemExit(f"kv_policies: {error}") from error
