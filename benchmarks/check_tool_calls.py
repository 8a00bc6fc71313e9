"""Random tools × choices × formats, asked of a model: how many of its calls are malformed, or of no tool.

Sampled at a temperature of 1.5, so that the grammar has work. A call that its answer's length cut is not checked. Half
of the answers with tool_choice "auto" begin with what begins a call. Ends with 1 where a call is wrong. With --report
a run goes on where the one that wrote it ended.
"""

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from command_line import make_parser
from infer import LLM, GenerationResult, RequestOptions, SamplingParams
from infer.engine.prompt_batch import answer_all
from infer.engine.request_maker import Ask
from infer.engine.sequence import Sequence
from infer.toolcalls.formats import FORMATS
from machine import cpu_model

BATCH_SIZE, MAX_TOKENS = 16, 120
_WORDS = [
    "get",
    "set",
    "city",
    "user",
    "date",
    "price",
    "items",
    "mode",
    "note",
    "size",
    "unit",
    "path",
    "query",
    "limit",
]


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "nullable", "bounded"]
    match rng.choice(kinds + ["array", "object"] * (depth > 0)):
        case "enum":
            return {"enum": rng.sample(["red", "two words", 3, True, None, 'a "b"', 2.5], 3)}
        case "nullable":
            return {"type": [rng.choice(["string", "integer"]), "null"]}
        case "bounded":
            return {"type": "integer", "minimum": 1, "maximum": rng.randint(1, 500)}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 4}
        case "object":
            return random_object(rng, depth - 1)
        case kind:
            return {"type": kind}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 4))
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_request(rng: random.Random) -> dict[str, Any]:
    names = [f"{a}_{b}" for a, b in zip(rng.sample(_WORDS, 4), rng.sample(_WORDS, 4), strict=True)]
    tools = [{"name": name, "parameters": random_object(rng, 2)} for name in names[: rng.randint(1, 4)]]
    allowed = [{"type": "function", "name": tools[0]["name"]}]
    choices = ["auto", "auto", "none", "required", tools[0]["name"]]
    choices.append({"type": "allowed_tools", "mode": "required", "tools": allowed})
    return {
        "tools": tools,
        "tool_choice": rng.choice(choices),
        "tool_format": rng.choice(list(FORMATS)),
        "parallel_tool_calls": rng.random() < 0.5,
    }


def problems(request: dict[str, Any], result: GenerationResult) -> list[str]:
    """What is wrong with the calls of an answer."""
    schemas = {tool["name"]: tool["parameters"] for tool in request["tools"]}
    found = []
    if result.error is not None:
        found.append(f"failed: {result.error}")
    if request["tool_choice"] == "none" and result.tool_calls:
        found.append("a call where none may be")
    if not request["parallel_tool_calls"] and len(result.tool_calls) > 1:
        found.append("two calls where one may be")
    for call in result.tool_calls[: -1 if result.finish_reason == "length" else None]:
        if call.name not in schemas:
            found.append(f"no tool: {call.name}")
            continue
        try:
            errors = list(Draft202012Validator(schemas[call.name]).iter_errors(call.parsed()))
        except ValueError:
            errors = ["not JSON"]
        found += [f"malformed: {call.arguments}: {error}" for error in errors]
    return found


def sequences(
    llm: LLM, numbers: Iterable[int], seed: int, asked: dict[int, dict[str, Any]]
) -> Iterator[tuple[int, Sequence]]:
    """Each with its number. The prompt is the question alone: what holds the calls knows the tools all the same."""
    host = llm._opened
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        asked[number] = request = random_request(rng)
        prefix = list[int]()
        if request["tool_choice"] == "auto" and rng.random() < 0.5:
            prefix = llm.tokenizer.encode(FORMATS[request["tool_format"]].start, add_special_tokens=False)
        params = SamplingParams(temperature=1.5, max_new_tokens=MAX_TOKENS, seed=rng.getrandbits(32))
        options = RequestOptions(answer_prefix=prefix, **request)
        question = f"Do something with {rng.choice(_WORDS)} and {rng.choice(_WORDS)}."
        messages = [{"role": "user", "content": question}]
        prompt = host.requests.read(Ask(messages, params))
        prompt = prompt._replace(conversation=host.requests.conversation(messages, options))
        yield number, Sequence(host.requests.complete(prompt, params, options))


def count(counts: Counter[str], request: dict[str, Any], result: GenerationResult) -> None:
    counts["answers"] += 1
    counts["calls"] += len(result.tool_calls)
    counts["cut in a call"] += result.finish_reason == "length" and bool(result.tool_calls)
    counts["tokens"] += len(result.token_ids)
    counts["of them forced"] += result.stats.tokens_forced
    counts[f"calls of {request['tool_format']}"] += len(result.tool_calls)


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", threads=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="a JSON file of the counts, read first where it is there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ask nothing more after so many")
    arguments = parser.parse_args()
    before = json.loads(arguments.report.read_text()) if arguments.report and arguments.report.exists() else {}
    print(f"{cpu_model()}, {arguments.threads} threads, {arguments.model}", flush=True)
    llm, started = LLM(arguments.model, threads=arguments.threads, max_seq_len=1_024), time.perf_counter()
    counts, wrong, asked = (
        Counter[str](before.get("counts", {})),
        list(before.get("wrong", [])),
        dict[int, dict[str, Any]](),
    )
    numbers = itertools.takewhile(
        lambda _: time.perf_counter() - started < arguments.seconds, range(counts["answers"], arguments.count)
    )
    found = sequences(llm, numbers, arguments.seed, asked)
    for number, result in answer_all(llm._opened.loop, found, BATCH_SIZE):
        request = asked.pop(number)
        count(counts, request, result)
        if here := problems(request, result):
            wrong.append({"number": number, "request": request, "problems": here})
            print(number, json.dumps(request), *here, sep="\n  ")
    seconds = before.get("seconds", 0) + round(time.perf_counter() - started)
    print(f"{', '.join(f'{count:,} {name}' for name, count in counts.items())}, {seconds} s; {len(wrong)} wrong")
    if arguments.report:
        report = {"cpu": cpu_model(), "model": arguments.model, "seed": arguments.seed, "seconds": seconds}
        arguments.report.write_text(json.dumps(report | {"counts": counts, "wrong": wrong}, indent=1) + "\n")
    return min(len(wrong), 1)


if __name__ == "__main__":
    raise SystemExit(main())
