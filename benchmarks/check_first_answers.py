"""Check how many simple questions the packaged model answers rightly, at its defaults and at other sampling settings.

    python benchmarks/check_first_answers.py
    python benchmarks/check_first_answers.py --seeds 8 --report

An answer is cut if it reaches the limit of 512 tokens, repeated if a run of eight words occurs three times in it, and
otherwise right or wrong by its question's rule (first_questions.py). Ends with 1 if the defaults answer less than
--bound rightly, or if one of their answers is cut.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from first_questions import QUESTIONS, Question, repeats_itself
from harness import make_parser, print_head, write_report
from infer import LLM, GenerationResult, SamplingParams
from infer.compute.sampling.keywords import PRESETS

OUTCOMES = ("right", "wrong", "repeated", "cut")
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.2 top-p 0.9": {"temperature": 0.2, "top_p": 0.9},  # the model's card
    "--preset seed": PRESETS["seed"],
}


@dataclass(frozen=True)
class Trial:
    """One answer to one question."""

    question: str
    seed: int
    outcome: str
    num_tokens: int
    answer: str


def outcome_of(question: Question, result: GenerationResult) -> str:
    if result.finish_reason == "length":
        return "cut"
    if repeats_itself(result.text):
        return "repeated"
    return "right" if question.is_right(result.text) else "wrong"


def ask(llm: LLM, questions: Sequence[Question], params: SamplingParams, seeds: int) -> list[Trial]:
    """Ask each question in a new chat with each seed. Greedy answers have one seed."""
    asked = [(question, seed) for question in questions for seed in range(1 if params.is_greedy else seeds)]
    chats = [[{"role": "user", "content": question.text}] for question, _ in asked]
    results = llm.generate_all(chats, [replace(params, seed=seed) for _, seed in asked])
    return [
        Trial(question.text, seed, outcome_of(question, result), result.generated_tokens, result.text)
        for (question, seed), result in zip(asked, results, strict=True)
    ]


def row_of(name: str, trials: Sequence[Trial]) -> str:
    counts = Counter(trial.outcome for trial in trials)
    mean = sum(trial.num_tokens for trial in trials) / len(trials)
    shown = "".join(f"{counts[outcome]:>9}" for outcome in OUTCOMES)
    return f"{name:<20}{counts['right'] / len(trials):>7.2f}{shown}{mean:>9.0f}"


def results_of(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the number of each outcome, and the answers that are not right."""
    wrong = [asdict(trial) | {"answer": trial.answer[:200]} for trial in trials if trial.outcome != "right"]
    return {**Counter(trial.outcome for trial in trials), "not_right": wrong}


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", threads=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="QUESTION", help="ask only these questions")
    parser.add_argument("--seeds", type=int, default=3, help="answers to each question")
    parser.add_argument("--bound", type=float, default=0.85, help="the share that the defaults must answer rightly")
    options = parser.parse_args()
    llm = LLM(options.model, threads=options.threads)
    questions = [each for each in QUESTIONS if not options.only or each.text in options.only]
    default = llm.default_params(is_chat=True)
    settings = {name: SamplingParams(max_new_tokens=default.max_new_tokens, **each) for name, each in SETTINGS.items()}
    print_head(options, f"{len(questions)} questions")
    print(f"{'':<20}{'share':>7}" + "".join(f"{name:>9}" for name in OUTCOMES) + f"{'tokens':>9}")
    found: dict[str, list[Trial]] = {}
    for name, params in {"default": default, **settings}.items():
        found[name] = ask(llm, questions, params, options.seeds)
        print(row_of(name, found[name]), flush=True)
    write_report(options, results={name: results_of(trials) for name, trials in found.items()})
    own = Counter(trial.outcome for trial in found["default"])
    return int(own["right"] < options.bound * own.total() or own["cut"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
