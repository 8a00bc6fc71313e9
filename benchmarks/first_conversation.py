"""The first question that a newcomer asks: how many answers hold the word that is asked for, at which settings.

python benchmarks/first_conversation.py
python benchmarks/first_conversation.py --models smollm2 --seeds 8 --sets everyday

Four sets of ten questions, each with words of which the answer must hold one; every seed is a conversation of its own.
"default" is what a fresh `infer chat` takes: the model's card here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from command_line import REPORTS, make_parser
from infer import LLM, SamplingParams
from infer.sampling.defaults import PRESETS
from machine import write_report

MAX_NEW_TOKENS = 48

SETS: Mapping[str, Sequence[tuple[str, str]]] = {  # question, words one of which must be there
    "first": [
        ("What is the capital of France?", "Paris"),
        ("What is 2 + 2?", "4|four"),
        ("How many days are in a week?", "seven|7"),
        ("What color is the sky?", "blue"),
        ("Who wrote Romeo and Juliet?", "Shakespeare"),
        ("What is the opposite of hot?", "cold|cool"),
        ("What is the largest planet in the solar system?", "Jupiter"),
        ("What is the chemical formula of water?", "H2O|H₂O"),
        ("How many legs does a dog have?", "four|4"),
        ("What is the boiling point of water in degrees Celsius?", "100"),
    ],
    "geography": [
        ("What is the capital of England?", "London"),
        ("What is the capital of Italy?", "Rome"),
        ("What is the capital of Japan?", "Tokyo"),
        ("What is the capital of Germany?", "Berlin"),
        ("What is the capital of Spain?", "Madrid"),
        ("In which country is the Eiffel Tower?", "France"),
        ("On which continent is Egypt?", "Africa"),
        ("What is the largest ocean?", "Pacific"),
        ("Which river flows through London?", "Thames"),
        ("What is the longest river in South America?", "Amazon"),
    ],
    "nature": [
        ("What planet do we live on?", "Earth"),
        ("Which planet is known as the red planet?", "Mars"),
        ("What do we call water that falls from clouds?", "rain"),
        ("What gas do plants take in from the air?", "carbon dioxide|CO2|CO₂"),
        ("What is the star at the centre of our solar system?", "Sun"),
        ("What do bees make?", "honey"),
        ("How many legs does a spider have?", "eight|8"),
        ("What is frozen water called?", "ice"),
        ("Which organ pumps blood through the body?", "heart"),
        ("What is the process by which plants make food from light?", "photosynthesis"),
    ],
    "everyday": [
        ("How many hours are in a day?", "twenty-four|24"),
        ("How many months are in a year?", "twelve|12"),
        ("What is the opposite of up?", "down"),
        ("What is 3 + 5?", "8|eight"),
        ("Who painted the Mona Lisa?", "Leonardo|Vinci"),
        ("What colour do you get by mixing blue and yellow?", "green"),
        ("What language do people speak in Brazil?", "Portuguese"),
        ("Name a fruit that is yellow.", "banana|lemon|mango|pineapple"),
        ("Who was the first president of the United States?", "Washington"),
        ("What do you call a baby dog?", "puppy|pup"),
    ],
}


def settings_of(llm: LLM) -> dict[str, SamplingParams]:
    """By name, the default first; without seeds."""
    default = llm.default_params(is_chat=True)
    return {
        "default": default,
        "--preset seed": SamplingParams(**PRESETS["seed"]),
        "greedy": SamplingParams(temperature=0),
    }


def is_right(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE) is not None


def share_right(
    llm: LLM, questions: Sequence[tuple[str, str]], params: SamplingParams, num_seeds: int
) -> tuple[float, list[dict[str, str | int]]]:
    """The share of answers with the word, and what was wrong."""
    seeds = range(1 if params.is_greedy else num_seeds)
    trials = [(question, words, seed) for question, words in questions for seed in seeds]
    prompts = [[{"role": "user", "content": question}] for question, _, _ in trials]
    each = [replace(params, seed=seed, max_new_tokens=MAX_NEW_TOKENS) for _, _, seed in trials]
    results = llm.generate_all(prompts, each)
    wrong: list[dict[str, str | int]] = [
        {"question": question, "seed": seed, "answer": result.text}
        for (question, words, seed), result in zip(trials, results, strict=True)
        if not is_right(result.text, words)
    ]
    return 1 - len(wrong) / len(trials), wrong


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2"])
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--seeds", type=int, default=4, help="conversations for each question")
    parser.add_argument("--reports", type=Path, default=REPORTS)
    given = parser.parse_args()
    found: dict[str, dict[str, dict[str, object]]] = {}
    for model in given.models:
        llm = LLM(model)
        print(f"{model:<16}" + "".join(f"{name:>12}" for name in (*given.sets, "all")))
        for name, params in settings_of(llm).items():
            shares = {key: share_right(llm, SETS[key], params, given.seeds) for key in given.sets}
            mean = sum(share for share, _ in shares.values()) / len(shares)
            print(f"  {name:<14}" + "".join(f"{share:>12.2f}" for share in (*(x for x, _ in shares.values()), mean)))
            wrong = [each for _, some in shares.values() for each in some]
            row = {key: round(share, 4) for key, (share, _) in shares.items()}
            found.setdefault(model, {})[name] = {"shares": row, "mean": round(mean, 4), "wrong": wrong}
    settings = {"seeds": given.seeds, "max_new_tokens": MAX_NEW_TOKENS, "questions": 10 * len(given.sets)}
    write_report(given.reports, "first-conversation", settings, {"models": found})


if __name__ == "__main__":
    main()
