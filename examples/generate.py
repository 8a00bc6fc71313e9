"""Continue a text. Greedy decoding gives the same words every time."""

import sys

from infer import LLM, SamplingParams


def main(model: str = "smollm2", max_new_tokens: str = "48") -> None:
    llm = LLM(model)
    params = SamplingParams(temperature=0, max_new_tokens=int(max_new_tokens))
    result = llm.generate("Once upon a time", params)
    print(result.text)
    print(f"[{result.finish_reason}, {result.timing.decode_tokens_per_second or 0:.0f} tok/s]", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
