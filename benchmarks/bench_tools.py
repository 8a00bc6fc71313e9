"""What tools cost: a token of free text beside tools, and one of a forced call, against a token of free text alone.

    python benchmarks/bench_tools.py            twenty rounds: about a minute

The same prompt of ids, in turns; medians of seconds a token, without the first, and of each round's ratio to `free`.
`auto` may call and does not; `call` must, and the grammar forces most of its tokens.
"""

from statistics import median
from typing import Any

from command_line import make_parser
from infer import LLM, RequestOptions
from infer.engine.request_maker import Ask
from infer.engine.sequence import Sequence
from infer.sampling_params import SamplingParams
from machine import cpu_model

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"name": "get_weather_forecast", "description": "Weather of a city.", "parameters": SCHEMA}]
MESSAGES = [{"role": "user", "content": "Tell me about the weather in Paris for three days, at length."}]
NEW_TOKENS = 96
CASES: dict[str, dict[str, Any]] = {"free": {}, "auto": {"tool_choice": "auto"}, "call": {"tool_choice": "required"}}


def seconds_of(llm: LLM, name: str, tool_format: str, params: SamplingParams) -> tuple[float, int]:
    """A token, without the first, and how many there were."""
    host = llm._opened
    options = RequestOptions(tools=TOOLS, tool_format=tool_format, parallel_tool_calls=False, **CASES[name])
    prompt = host.requests.read(Ask(MESSAGES, params, options))
    prompt = prompt if name != "free" else prompt._replace(conversation=None)
    request = host.requests.complete(prompt, params, options)
    result = host.stream(Sequence(request)).run(None)
    times = result.timing.arrival_times_s
    return (times[-1] - times[0]) / (len(times) - 1), len(times)


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", threads=True, rounds=20)
    parser.add_argument("--format", default="hermes")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, threads=arguments.threads, max_seq_len=2_048)
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, stop_token_ids=[], ignore_eos=False)
    rounds = [
        {name: seconds_of(llm, name, arguments.format, params) for name in CASES} for _ in range(arguments.rounds + 1)
    ][1:]
    print(f"{cpu_model()}, {arguments.threads} threads, {arguments.model}, {arguments.format}")
    for name in CASES:
        seconds, ratio = (
            median(each[name][0] for each in rounds),
            median(each[name][0] / each["free"][0] for each in rounds),
        )
        print(f"{name:6} {1e3 * seconds:7.2f} ms a token, {ratio - 1:+6.1%}, {rounds[0][name][1]} tokens")


if __name__ == "__main__":
    main()
