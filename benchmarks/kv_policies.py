"""Measure the cost of eviction: needles found at ten depths, and perplexity on the last tokens of a long text.

    python benchmarks/kv_policies.py                              SmolLM2: about a quarter of an hour
    python benchmarks/kv_policies.py --budgets 1024 --needles 10 --only needles
    python benchmarks/kv_policies.py --only stability             four times the context that the model was made for

Every policy sees the same prompts. A needle counts as found if the greedy answer has its number; `of full` counts only
the needles that the whole cache finds.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from harness import make_parser, write_report
from infer import LLM
from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.step import Chunk
from infer.engine.runner.runner import Runner
from infer.errors import InvalidRequestError
from infer.llm import set_num_threads
from needles import make_needles, reference_text

POLICIES = ("sliding", "snapkv")
DEPTHS = [(2 * index + 1) / 20 for index in range(10)]
ANSWER_TOKENS = 8
STEP = 1024  # tokens of text per figure of stability
CHUNK = 64  # tokens whose logits are in memory at the same time

Row = dict[str, Any]


def make_context(llm: LLM, policy: str, budget: int | None) -> Runner:
    kept = {} if budget is None else {"eviction_window": budget, "protected_prefix": 4}
    return Runner(llm.model, llm.max_seq_len, settings=CacheSettings(eviction_policy=policy, **kept))


class Policies:
    """A prompt in the cache of every policy. Policies that see the whole prompt copy the whole cache's row."""

    def __init__(self, llm: LLM, budgets: Sequence[int], longest: int) -> None:
        forgetting = [(policy, budget) for policy in POLICIES for budget in budgets if budget < longest]
        self.all: list[tuple[str, int | None]] = [("none", None), *forgetting]
        self._contexts = [make_context(llm, *each) for each in self.all]

    def read(self, token_ids: Sequence[int]) -> list[Runner]:
        """Return a context per policy, the whole cache first."""
        whole, *others = self._contexts
        whole.cache.truncate(0, 0)
        whole.extend(0, token_ids)
        for context in others:
            context.cache.truncate(0, 0)
            if context.compresses_prompts:
                is_long = context.model.is_long(len(token_ids))
                context.cache.import_row(0, dict(whole.cache.export_row(0)), len(token_ids), is_long=is_long)
            else:
                context.extend(0, token_ids)
        return self._contexts


def measure_recall(name: str, budgets: Sequence[int], num_tokens: int, per_depth: int) -> Iterator[Row]:
    llm = LLM(name, max_seq_len=num_tokens + ANSWER_TOKENS)
    policies = Policies(llm, budgets, num_tokens)
    answers: list[list[bool]] = [[] for _ in policies.all]
    for needle in make_needles(llm.tokenizer, num_tokens, DEPTHS * per_depth):
        for found, context in zip(answers, policies.read(needle.token_ids[:-1]), strict=True):
            said = greedy_answer(context, needle.token_ids, ANSWER_TOKENS)
            found.append(needle.answer in llm.tokenizer.decode(said))
    for (policy, budget), found in zip(policies.all, answers, strict=True):
        kept = [mine for mine, whole in zip(found, answers[0], strict=True) if whole]
        by_depth = [sum(found[index :: len(DEPTHS)]) for index in range(len(DEPTHS))]
        of_full = round(sum(kept) / max(1, len(kept)), 3)
        yield {"policy": policy, "budget": budget, "found": sum(found), "of_full": of_full, "by_depth": by_depth}


@torch.inference_mode()
def greedy_answer(context: Runner, prompt: list[int], count: int) -> list[int]:
    """Return the tokens after a prompt of which all but the last token are read."""
    made = prompt[-1:]
    with ops.backend_of(torch.device("cpu")).threads():
        while len(made) <= count:
            context.cache.reserve(0, 1)
            logits = context.forward([Chunk(0, made[-1:])])
            context.commit(0, 1)
            if len(made) == 1:
                context.after_prompt(0, prompt)
            made.append(int(logits[0].argmax()))
    return made[1:]


def measure_tails(name: str, budgets: Sequence[int], num_tokens: int, num_last: int) -> Iterator[Row]:
    """Yield the perplexity of the last tokens of a text, after the other tokens as a prompt."""
    llm = LLM(name, max_seq_len=num_tokens)
    policies, num_known = Policies(llm, budgets, num_tokens), num_tokens - num_last
    token_ids = llm.tokenizer.encode(reference_text())[:num_tokens]
    for (policy, budget), context in zip(policies.all, policies.read(token_ids[: num_known - 1]), strict=True):
        context.after_prompt(0, token_ids[: num_known - 1])
        yield {"policy": policy, "budget": budget, "perplexity": perplexity(score(context, token_ids[num_known - 1 :]))}


@torch.inference_mode()
def score(context: Runner, token_ids: Sequence[int]) -> list[float]:
    """Read tokens, and return the log-probability of each but the first."""
    found = list[float]()
    with ops.backend_of(torch.device("cpu")).threads():
        for start in range(0, len(token_ids), CHUNK):
            chunk, following = token_ids[start : start + CHUNK], token_ids[start + 1 : start + CHUNK + 1]
            context.cache.reserve(0, len(chunk))
            logs = context.forward([Chunk(0, list(chunk), num_drafts=len(chunk) - 1)]).log_softmax(-1)
            context.commit(0, len(chunk))
            found += [float(row[token_id]) for row, token_id in zip(logs, following, strict=False)]
    return found


def perplexity(logprobs: Sequence[float]) -> float:
    return round(math.exp(-sum(logprobs) / len(logprobs)), 3)


def measure_stability(name: str, budget: int, num_tokens: int) -> Iterator[Row]:
    """Yield the perplexity of stretch after stretch of one text with `sliding`, far beyond the training's context."""
    options = {"eviction_policy": "sliding", "eviction_window": budget, "protected_prefix": 4}
    llm = LLM(name, max_seq_len=num_tokens, **options)
    logprobs = llm.prompt_logprobs(llm.tokenizer.encode(reference_text())[:num_tokens])
    for start in range(0, num_tokens, STEP):
        stretch = [each.logprob for each in logprobs[start : start + STEP] if each is not None]
        yield {"policy": "sliding", "budget": budget, "up_to": start + STEP, "perplexity": perplexity(stretch)}


def shown(rows: Iterator[Row]) -> list[Row]:
    """Print each row as it is measured, and return all rows."""
    found = []
    for row in rows:
        found.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items() if value is not None), flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", threads=True)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--only", choices=("needles", "tails", "stability"))
    parser.add_argument("--length", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--needles", type=int, default=2, help="at each depth")
    parser.add_argument("--last", type=int, default=512, help="tokens of which a tail's perplexity is measured")
    parser.add_argument("--stable-length", type=int, default=32_768, help="tokens of the text that slides")
    options = parser.parse_args()
    set_num_threads(options.threads)
    name, budgets, length = options.model, options.budgets, options.length
    measures = {
        "needles": lambda: measure_recall(name, budgets, length, options.needles),
        "tails": lambda: measure_tails(name, budgets, length, options.last),
        "stability": lambda: measure_stability(name, max(budgets), options.stable_length),
    }
    results = {kind: shown(make()) for kind, make in measures.items() if options.only in (None, kind)}
    write_report(options, **results)


if __name__ == "__main__":
    try:
        main()
    except InvalidRequestError as error:
        raise SystemExit(f"kv_policies: {error}") from error
