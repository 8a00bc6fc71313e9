"""The comparison with an older commit, on a tiny model, and the random layers on which benchmarks compare engines."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from cases import cases
from infer import LLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


import beside
from random_weights import write_gguf

pytestmark = pytest.mark.slow

BESIDE = [sys.executable, beside.__file__]


class Answering:
    """A side with a fixed answer to the question for its bits."""

    def __init__(self, token_ids: list[int], logprobs: list[float]) -> None:
        self.worker, self._bits = self, [token_ids, logprobs]

    def ask(self, do: str) -> list[Any]:
        assert do == "greedy_answer"
        return self._bits


@cases(
    "new said",
    (Answering([1, 2, 3], [0.5]), "3 greedy tokens and their log-probabilities are equal"),
    (Answering([1, 2, 4], [0.5]), "the greedy tokens differ after 2 of 3"),
    (Answering([1, 2], [0.5]), "the greedy tokens differ after 2 of 3"),
    (Answering([1, 2, 3], [0.25]), "3 greedy tokens are equal, their log-probabilities differ"),
)
def test_the_bits_of_both_sides_are_compared(new: Answering, said: str) -> None:
    sides: dict[str, Any] = {beside.OLD: Answering([1, 2, 3], [0.5]), beside.NEW: new}
    assert beside.compare_bits(sides) == f"bits: {said}"


def test_the_last_commit_runs_beside_this_tree_and_its_work_tree_is_removed(tmp_path: Path) -> None:
    rows = [row for row in beside.UNITS if row not in {"prefill", "http", "host-16", "host-60"}]
    write_gguf(tmp_path / "model.gguf", beside.TINY_CONFIG, 1, "F32", beside.TINY_CONFIG["vocab_size"])
    ended = subprocess.run(
        [*BESIDE, "HEAD", "--model", tmp_path / "model.gguf", "--rounds", "1", "--only", *rows],
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = {line.split()[0]: line for line in ended.stdout.splitlines()}
    assert lines["old:"].split()[1] == lines["new:"].split()[1]
    for row in rows:
        assert re.search(r" \d+\.\d\d × ", lines[row]), ended.stdout + ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert str(tmp_path) not in beside.git("worktree", "list")


CONFIG = {"model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16}
CONFIG |= {"num_experts_per_tok": 2, "norm_topk_prob": True, "num_hidden_layers": 12, "rms_norm_eps": 1e-6}
CONFIG |= {"rope_theta": 1e6, "max_position_embeddings": 512, "vocab_size": 151_936, "tie_word_embeddings": False}


def write_and_rebuild(folder: Path, type_: str = "Q4_K") -> Qwen3MoeForCausalLM:
    """Write three layers, and return the model of transformers with the weights that the `gguf` package reads."""
    write_gguf(folder / "model.gguf", CONFIG, 3, type_, vocab_size=2048)
    found = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(folder / "model.gguf").tensors
    }
    oracle = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG | {"num_hidden_layers": 3, "vocab_size": 2048}))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 3)
    with torch.no_grad():
        for name, parameter in oracle.eval().named_parameters():
            block = name.replace("model.layers.", "blk.")[:5]
            stored = [names.get_name(name, try_suffixes=(".weight",)) or name]
            if "experts." in name:
                parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
                stored = [f"{block}.ffn_{which}_exps.weight" for which in parts]
            parameter.copy_(torch.cat([found.pop(each) for each in stored], 1 if len(stored) > 1 else 0))
    assert not found
    return oracle


@pytest.mark.parametrize("type_", ["Q4_K", "IQ1_M", "IQ3_XXS", "NVFP4"])
@torch.inference_mode()
def test_random_layers_are_a_model_that_others_compute(type_: str, tmp_path: Path) -> None:
    oracle, prompt = write_and_rebuild(tmp_path, type_), list(range(1000, 1012))
    expected = oracle(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).topk(5)
    answer = LLM(tmp_path / "model.gguf").generate(prompt, temperature=0, max_new_tokens=1, logprobs=5)
    assert answer.logprobs is not None
    top = answer.logprobs[0].top
    assert [token for token, _ in top] == expected.indices.tolist()
    np.testing.assert_allclose([logprob for _, logprob in top], expected.values.tolist(), rtol=1e-3, atol=1e-2)
