"""What each way of forgetting costs: needles found at ten depths, and perplexity on the last tokens of a long text.

    python benchmarks/kv_policies.py                              SmolLM2: about a quarter of an hour alone
    python benchmarks/kv_policies.py --budgets 1024 --needles 10 --only needles
    python benchmarks/kv_policies.py --only stability             four times the context that the model was made for

Every policy sees the same prompts. A needle counts as found if the greedy answer holds its number; `of full` counts
only those that the whole cache finds. Reports go to benchmarks/reports/.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from infer import LLM, SamplingParams, __version__
from infer.errors import InvalidRequestError
from infer.llm import set_num_threads
from machine import available_cores, cpu_model
from needles import Needle, make_needles, reference_text

REPORTS = Path(__file__).with_name("reports")
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


def make_llm(name: str, policy: str, budget: int | None, max_seq_len: int) -> LLM:
    if budget is None:
        return LLM(name, max_seq_len=max_seq_len)
    return LLM(name, max_seq_len=max_seq_len, eviction_policy=policy, eviction_window=budget, protected_prefix=4)


def settings(budgets: Sequence[int], longest: int) -> list[tuple[str, int | None]]:
    """The whole cache first: the others are compared with it."""
    return [("none", None), *((policy, budget) for policy in POLICIES for budget in budgets if budget < longest)]


# Needles


def measure_recall(name: str, budgets: Sequence[int], num_tokens: int, per_depth: int) -> list[Recall]:
    found = list[Recall]()
    for policy, budget in settings(budgets, num_tokens):
        llm = make_llm(name, policy, budget, num_tokens + ANSWER_TOKENS)
        needles = make_needles(llm.tokenizer, num_tokens, DEPTHS * per_depth)
        answers = [_is_found(llm, needle) for needle in needles]
        full = found[0].found if found else answers
        kept = [mine for mine, whole in zip(answers, full, strict=True) if whole]
        found.append(Recall(policy, budget, answers, sum(kept) / max(1, len(kept))))
        print(f"{policy} {budget or ''}: {sum(answers)} of {len(answers)} needles", flush=True)
    return found


def _is_found(llm: LLM, needle: Needle) -> bool:
    params = SamplingParams(temperature=0, max_new_tokens=ANSWER_TOKENS)
    return needle.answer in llm.generate(needle.token_ids, params).text


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
    found = []
    for policy, budget in settings(budgets, num_tokens):
        llm = make_llm(name, policy, budget, num_tokens)
        token_ids = llm.tokenizer.encode(reference_text())[:num_tokens]
        perplexity = _perplexity(llm, token_ids, num_tokens - num_last)
        found.append(Tail(policy, budget, num_tokens, perplexity))
        print(f"{policy} {budget or ''}: perplexity {perplexity:.3f} on the last {num_last}", flush=True)
    return found


def _perplexity(llm: LLM, token_ids: list[int], num_known: int) -> float:
    """Of what follows the known tokens, which are a prompt."""
    context = llm._take_context()
    context.extend(0, token_ids[: num_known - 1])
    context.end_prompt(0)
    scored = context.score(0, token_ids[num_known - 1 :], 0, llm.architecture.vocab_size)
    return _perplexity_of([each.logprob for each in scored])


def _perplexity_of(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def measure_stability(name: str, budget: int, num_tokens: int) -> list[Tail]:
    """Perplexity of stretch after stretch of one text with `sliding`, far behind the context of the training."""
    llm = make_llm(name, "sliding", budget, num_tokens)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--only", choices=("needles", "tails", "stability"))
    parser.add_argument("--length", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--needles", type=int, default=2, help="at each depth")
    parser.add_argument("--last", type=int, default=512, help="tokens that a tail's perplexity is of")
    parser.add_argument("--stable-length", type=int, default=32_768, help="tokens of the text that slides")
    parser.add_argument("--threads", type=int, default=available_cores())
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
    path = REPORTS / f"kv-policies-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    report = {
        "version": __version__,
        "cpu": cpu_model(),
        "settings": vars(arguments),
        "needles": [asdict(each) for each in recalls],
        "tails": [asdict(each) for each in tails],
        "stability": [asdict(each) for each in stable],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    try:
        main()
    except InvalidRequestError as error:
        raise SystemExit(f"kv_policies: {error}") from error
