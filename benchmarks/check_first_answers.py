"""Check how many simple questions the packaged model answers rightly, at its defaults and at other sampling settings.

python benchmarks/check_first_answers.py
python benchmarks/check_first_answers.py --settings all --cache answers.json
python benchmarks/check_first_answers.py --sets held-out --seeds 24

An answer is cut if it reaches the limit of 512 tokens, repeated if a run of eight words occurs three times in it, and
otherwise right or wrong by its question's rule (first_questions.py). --continued asks for raw texts in place of a chat.
Ends with 1 if the defaults answer less than --bound rightly, or if one of their answers is cut.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from command_line import REPORTS, make_parser
from first_questions import CONTINUED, SETS, Question, repeats_itself
from infer import LLM, SamplingParams
from machine import write_report

OUTCOMES = ("right", "wrong", "repeated", "cut")
_CARD = {"temperature": 0.2, "top_p": 0.9}
_GREEDY = {"temperature": 0.0}


@dataclass(frozen=True)
class Trial:
    """One answer to one question."""

    question: str
    seed: int
    outcome: str
    num_tokens: int
    answer: str


class Answers:
    """Answers by model, setting, prompt and seed, kept in a file if one is given: a run does not compute them again."""

    def __init__(self, llm: LLM, model: str, path: Path | None) -> None:
        self.llm, self.model, self.path = llm, model, path
        found = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.kept: dict[str, dict[str, Any]] = found

    def of(self, prompts: Sequence[str], params: SamplingParams, seeds: int, *, is_chat: bool) -> list[dict[str, Any]]:
        """Return one answer per prompt and seed, in this order. Greedy answers are computed for one seed."""
        trials = [(prompt, 0 if params.is_greedy else seed) for prompt in prompts for seed in range(seeds)]
        keys = [f"{self.model} {is_chat} {params!r} {seed} {prompt}" for prompt, seed in trials]
        missing = {key: trial for key, trial in zip(keys, trials, strict=True) if key not in self.kept}
        asked = [[{"role": "user", "content": prompt}] if is_chat else prompt for prompt, _ in missing.values()]
        each = [replace(params, seed=seed) for _, seed in missing.values()]
        results = self.llm.generate_all(asked, each) if missing else []
        for key, result in zip(missing, results, strict=True):
            is_cut = result.finish_reason == "length"
            self.kept[key] = {"text": result.text, "is_cut": is_cut, "num_tokens": result.generated_tokens}
        if self.path is not None and missing:
            self.path.write_text(json.dumps(self.kept, indent=1, ensure_ascii=False))
        return [self.kept[key] for key in keys]


def candidates(default: SamplingParams, which: str) -> dict[str, SamplingParams]:
    """Sampling settings by name, the model's own default first."""
    values: dict[str, Mapping[str, Any]] = {"greedy": _GREEDY, "T 0.2 top-p 0.9": _CARD}
    if which == "all":
        for temperature in (0.1, 0.2, 0.3):
            for top_p in (0.7, 0.8, 0.9, 1.0):
                values[f"T {temperature} top-p {top_p}"] = {"temperature": temperature, "top_p": top_p}
            values[f"T {temperature} min-p 0.1"] = {"temperature": temperature, "min_p": 0.1}
        for base_name, base in (("greedy", _GREEDY), ("T 0.2 top-p 0.9", _CARD)):
            for penalty in (1.05, 1.1, 1.15, 1.2):
                for window in (64, 128, 256, None):
                    added = {"repetition_penalty": penalty, "repetition_window": window}
                    values[f"{base_name} rep {penalty}/{window or 'all'}"] = {**base, **added}
            for penalty in (0.05, 0.1, 0.2, 0.3):
                values[f"{base_name} freq {penalty}"] = {**base, "frequency_penalty": penalty}
    made = {name: SamplingParams(max_new_tokens=default.max_new_tokens, **each) for name, each in values.items()}
    return {"default": default} | (made if which != "default" else {})


def outcome_of(answer: Mapping[str, Any], question: Question | None) -> str:
    """Return the outcome of an answer; a text that is continued has no question, and may reach the limit."""
    if question is not None and answer["is_cut"]:
        return "cut"
    if repeats_itself(answer["text"]):
        return "repeated"
    return "right" if question is None or question.is_right(answer["text"]) else "wrong"


def ask(answers: Answers, questions: Sequence[Question], params: SamplingParams, seeds: int) -> list[Trial]:
    found = answers.of([question.text for question in questions], params, seeds, is_chat=True)
    asked = [(question, seed) for question in questions for seed in range(seeds)]
    return [
        Trial(question.text, seed, outcome_of(answer, question), answer["num_tokens"], answer["text"])
        for (question, seed), answer in zip(asked, found, strict=True)
    ]


def continue_texts(answers: Answers, texts: Sequence[str], params: SamplingParams, seeds: int) -> list[Trial]:
    found = answers.of(texts, params, seeds, is_chat=False)
    asked = [(text, seed) for text in texts for seed in range(seeds)]
    return [
        Trial(text, seed, outcome_of(answer, None), answer["num_tokens"], answer["text"])
        for (text, seed), answer in zip(asked, found, strict=True)
    ]


def row_of(name: str, trials: Sequence[Trial]) -> str:
    counts = Counter(trial.outcome for trial in trials)
    mean = sum(trial.num_tokens for trial in trials) / len(trials)
    shown = "".join(f"{counts[outcome]:>9}" for outcome in OUTCOMES)
    return f"{name:<28}{counts['right'] / len(trials):>7.2f}{shown}{mean:>9.0f}"


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", threads=True)
    parser.add_argument("--settings", choices=["default", "few", "all"], default="few")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=["first"])
    parser.add_argument("--only", nargs="+", default=[], metavar="QUESTION", help="ask only these of the questions")
    parser.add_argument("--continued", action="store_true", help="continue texts in place of a chat")
    parser.add_argument("--seeds", type=int, default=3, help="answers to each question")
    parser.add_argument("--bound", type=float, default=0.85, help="the share that the defaults must answer rightly")
    parser.add_argument("--cache", type=Path, help="a JSON file of answers, read first if it exists")
    parser.add_argument("--reports", type=Path, default=REPORTS)
    given = parser.parse_args()
    llm = LLM(given.model, threads=given.threads)
    answers = Answers(llm, given.model, given.cache)
    questions = [each for name in given.sets for each in SETS[name] if not given.only or each.text in given.only]
    print(f"{'':<28}{'share':>7}" + "".join(f"{name:>9}" for name in OUTCOMES) + f"{'tokens':>9}")
    found: dict[str, list[Trial]] = {}
    for name, params in candidates(llm.default_params(is_chat=not given.continued), given.settings).items():
        if given.continued:
            found[name] = continue_texts(answers, CONTINUED, params, given.seeds)
        else:
            found[name] = ask(answers, questions, params, given.seeds)
        print(row_of(name, found[name]), flush=True)
    report(given.reports, vars(given), found)
    own = Counter(trial.outcome for trial in found["default"])
    return int(own["right"] < given.bound * own.total() or own["cut"] > 0)


def report(folder: Path, given: Mapping[str, Any], found: Mapping[str, Sequence[Trial]]) -> None:
    results = {
        name: {
            **Counter(trial.outcome for trial in trials),
            "mean_tokens": round(sum(trial.num_tokens for trial in trials) / len(trials), 1),
            "not_right": [
                {"question": trial.question, "seed": trial.seed, "outcome": trial.outcome, "answer": trial.answer[:200]}
                for trial in trials
                if trial.outcome != "right"
            ],
        }
        for name, trials in found.items()
    }
    settings = {name: given[name] for name in ("model", "settings", "sets", "only", "continued", "seeds")}
    write_report(folder, "first-answers", settings, {"results": results})


if __name__ == "__main__":
    raise SystemExit(main())
