"""Keys and values in fewer bits change the distributions of SmolLM2 and Gemma only a little."""

from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch

from infer import load_model, load_tokenizer
from infer.compute.operands.step import Chunk
from infer.compute.ops import backend_of
from infer.engine.runner.runner import Runner
from oracle import mean_kl

pytestmark = pytest.mark.slow

NUM_TOKENS = 512
NUM_COMPARED = 128  # the last tokens, which see most of the others
MOST = {"f16": 2e-6, "q8": 1e-3, "q4": 2e-2}  # mean KL against f32
TEXT = " ".join(topics["assignment"].split())


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
@torch.inference_mode()
def test_fewer_bits_change_little(name: str) -> None:
    model, _ = load_model(name, max_seq_len=NUM_TOKENS)
    token_ids = load_tokenizer(name).encode(TEXT)[:NUM_TOKENS]
    logits = {}
    for kv_type in ("f32", *MOST):
        context = Runner(replace(model, kv_type=kv_type), NUM_TOKENS, capture=False)
        context.reserve(0, len(token_ids))
        with backend_of(model.device).threads():
            logits[kv_type] = context.forward([Chunk(0, token_ids, num_drafts=NUM_COMPARED - 1)]).clone()
    found = {kv_type: mean_kl(logits["f32"], logits[kv_type]) for kv_type in MOST}
    assert all(0 < found[kv_type] <= most for kv_type, most in MOST.items()), found
    assert found["f16"] < found["q8"] < found["q4"], found
