"""Check a model's calls for random tools, choices and formats: none may be malformed, and none of an unknown tool.

    python benchmarks/check_tool_calls.py --count 1000

The temperature is 1.5, so that the grammar has work. A call that is cut by its answer's length is not checked. Half of
the answers with tool_choice "auto" begin with the text that begins a call. Ends with 1 if a call is wrong. `--first`
continues an earlier run.
"""

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from jsonschema import Draft202012Validator

from harness import make_parser, print_head, write_report
from infer import LLM, GenerationResult, RequestOptions, SamplingParams
from infer.engine.requests.ask import Ask
from infer.engine.requests.prompt_batch import answer_all
from infer.engine.step.sequence import Sequence
from infer.text.toolcalls.formats import FORMATS, INDEX

BATCH_SIZE, MAX_TOKENS = 16, 120
_WORDS = ["get", "set", "city", "user", "date", "price", "items", "mode", "note", "size", "unit", "path", "limit"]


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
    """Return the faults of an answer's calls."""
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
    """Yield each sequence with its number. The prompt shows no tools: only the grammar of the calls knows them."""
    for number in numbers:
        rng = random.Random(f"{seed} {number}")
        asked[number] = request = random_request(rng)
        is_begun = request["tool_choice"] == "auto" and rng.random() < 0.5
        start = FORMATS[request["tool_format"]].start.replace(INDEX, "0") if is_begun else ""
        prefix = llm.tokenizer.encode(start, add_special_tokens=False)
        params = SamplingParams(temperature=1.5, max_new_tokens=MAX_TOKENS, seed=rng.getrandbits(32))
        options = RequestOptions(answer_prefix=prefix, **request)
        question = f"Do something with {rng.choice(_WORDS)} and {rng.choice(_WORDS)}."
        messages = [{"role": "user", "content": question}]
        ask = Ask([messages], [params], options, token_ids=llm.tokenizer.encode_chat(messages))
        yield number, llm.host.requests.sequence(ask)


def count(counts: Counter[str], request: dict[str, Any], result: GenerationResult) -> None:
    counts["answers"] += 1
    counts["calls"] += len(result.tool_calls)
    counts["cut in a call"] += result.finish_reason == "length" and bool(result.tool_calls)
    counts["tokens"] += len(result.token_ids)
    counts["of them forced"] += result.stats.tokens_forced
    counts[f"calls of {request['tool_format']}"] += len(result.tool_calls)


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", threads=True)
    parser.add_argument("--count", type=int, default=10_000, help="answers")
    parser.add_argument("--first", type=int, default=0, help="number of the first answer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print_head(options, f"{options.count} answers")
    llm = LLM(options.model, threads=options.threads, max_seq_len=1_024)
    counts, wrong, asked = Counter[str](), list[dict[str, Any]](), dict[int, dict[str, Any]]()
    found = sequences(llm, range(options.first, options.first + options.count), options.seed, asked)
    for number, result in answer_all(llm.host.loop, found, BATCH_SIZE):
        request = asked.pop(number)
        count(counts, request, result)
        if here := problems(request, result):
            wrong.append({"number": number, "request": request, "problems": here})
            print(number, json.dumps(request), *here, sep="\n  ")
    print(f"{', '.join(f'{count:,} {name}' for name, count in counts.items())}; {len(wrong)} wrong")
    write_report(options, counts=counts, wrong=wrong)
    return min(len(wrong), 1)


if __name__ == "__main__":
    raise SystemExit(main())
