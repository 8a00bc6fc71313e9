"""Stream answers of seven tokens from a model through `LLM.stream`, one for each line of standard input."""

import sys

from infer import LLM, SamplingParams

if __name__ == "__main__":
    with LLM(sys.argv[1], threads=1) as llm:
        print("ready", flush=True)
        for _ in sys.stdin:
            for _piece in llm.stream("The capital of France is", SamplingParams(max_tokens=7, temperature=0)):
                pass
            print("answered", flush=True)
