"""The perplexity of a text: exp of the mean surprise at each of its tokens."""

import math
import sys

from infer import LLM

TEXT = "The Moon is the Earth's only natural satellite. It goes around the Earth once in about twenty-seven days."


def main(model: str = "smollm2", text: str = TEXT) -> None:
    llm = LLM(model)
    token_ids = llm.tokenizer.encode(text)
    surprise = -llm.logits(token_ids).log_softmax(-1)
    mean = sum(surprise[i, token_ids[i + 1]].item() for i in range(len(token_ids) - 1)) / (len(token_ids) - 1)
    print(f"perplexity {math.exp(mean):.2f} over {len(token_ids)} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
