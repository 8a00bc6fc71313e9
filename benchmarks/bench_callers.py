"""Eight answers at once, by who asks for them: one batch, eight threads, eight tasks of an event loop.

    python benchmarks/bench_callers.py            twenty rounds, each way in turn: some minutes
    python benchmarks/bench_callers.py --quick    five rounds

Tokens per second of all together, prompts included: best, median, and the median of each round's ratio to the batch.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from command_line import make_parser
from infer import LLM, AsyncLLM, SamplingParams
from machine import cpu_model

NUM_ANSWERS, NEW_TOKENS = 8, 64
PARAMS = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = [f"Once upon a time, number {index}" for index in range(NUM_ANSWERS)]
Answers = list[list[int]]


def make_ways(llm: LLM) -> dict[str, Callable[[], Answers]]:
    tasks = AsyncLLM(llm)

    async def read(prompt: str) -> list[int]:
        return [piece.token_id async for piece in tasks.stream(prompt, PARAMS)]

    async def read_all() -> Answers:
        return await asyncio.gather(*map(read, PROMPTS))

    async def generate_all() -> Answers:
        results = await asyncio.gather(*(tasks.generate(prompt, PARAMS) for prompt in PROMPTS))
        return [result.token_ids for result in results]

    def in_threads(ask: Callable[[str], list[int]]) -> Answers:
        with ThreadPoolExecutor(NUM_ANSWERS) as threads:
            return list(threads.map(ask, PROMPTS))

    return {
        "LLM.generate_all": lambda: [result.token_ids for result in llm.generate_all(PROMPTS, PARAMS)],
        "threads, LLM.generate": lambda: in_threads(lambda prompt: llm.generate(prompt, PARAMS).token_ids),
        "threads, LLM.stream": lambda: in_threads(lambda prompt: [p.token_id for p in llm.stream(prompt, PARAMS)]),
        "tasks, AsyncLLM.generate": lambda: asyncio.run(generate_all()),
        "tasks, AsyncLLM.stream": lambda: asyncio.run(read_all()),
    }


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=20)
    parser.add_argument("--quick", action="store_true", help="five rounds")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, threads=arguments.threads)
    ways, seconds = make_ways(llm), dict[str, list[float]]()
    expected, *_ = [way() for way in ways.values()]
    for _ in range(5 if arguments.quick else arguments.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            answers = way()
            seconds.setdefault(name, []).append(time.perf_counter() - began)
            assert answers == expected, f"{name}: other tokens"
    print(f"{arguments.model}, {arguments.threads} threads, {cpu_model()}")
    batch, num_tokens = seconds["LLM.generate_all"], NUM_ANSWERS * NEW_TOKENS
    for name, took in seconds.items():
        ratio = median(alone / each for alone, each in zip(batch, took, strict=True))
        print(f"{name:26} {num_tokens / min(took):6.0f} {num_tokens / median(took):6.0f} tok/s {ratio:6.2f} x")


if __name__ == "__main__":
    main()
