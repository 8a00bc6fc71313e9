"""Print a sampled text while it is generated. The seed makes it the same text on every run."""

import sys

from infer import LLM, SamplingParams


def main(model: str = "smollm2", max_new_tokens: str = "48") -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_new_tokens=int(max_new_tokens), stop=["\n\n"])
    stream = LLM(model).stream("The best thing about the sea is", params)
    for piece in stream:
        print(piece.text, end="", flush=True)
    print()
    print(f"[{stream.result.finish_reason}]", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
