"""A decode loop of your own: the network, a cache, and your choice of the next token. Here it is the likeliest one."""

import sys

import torch

from infer import load_model, load_tokenizer
from infer.compute.operands.step import Step
from infer.engine.runner.runner import make_cache


@torch.inference_mode()
def main(model_id: str = "smollm2", new_tokens: str = "24") -> None:
    model, _ = load_model(model_id)
    tokenizer = load_tokenizer(model_id)
    token_ids = tokenizer.encode("Once upon a time")
    cache = make_cache(model, len(token_ids) + int(new_tokens))
    pending = token_ids
    for _ in range(int(new_tokens)):
        cache.reserve(0, len(pending))
        logits = model.forward(Step.of(pending, cache.lengths[0]), cache)
        cache.commit(0, len(pending))
        pending = [int(logits[0].argmax())]
        token_ids += pending
    print(tokenizer.decode(token_ids))


if __name__ == "__main__":
    main(*sys.argv[1:])
