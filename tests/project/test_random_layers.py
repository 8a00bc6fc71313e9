"""The random layers on which benchmarks compare engines are a model that others compute."""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from infer import LLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


from random_weights import write_folder, write_gguf

pytestmark = pytest.mark.slow

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
    check_first_token(tmp_path / "model.gguf", prompt, expected)


def check_first_token(path: Path, prompt: list[int], expected: Any) -> None:
    answer = LLM(path).generate(prompt, temperature=0, max_new_tokens=1, logprobs=5)
    assert answer.logprobs is not None
    top = answer.logprobs[0].top
    assert [token for token, _ in top] == expected.indices.tolist()
    np.testing.assert_allclose([logprob for _, logprob in top], expected.values.tolist(), rtol=1e-3, atol=1e-2)


@torch.inference_mode()
def test_a_random_folder_is_a_model_in_bf16_that_others_compute(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if "expert" not in name and name != "norm_topk_prob"}
    write_folder(tmp_path, config | {"model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 2048})
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert oracle.dtype == torch.bfloat16
    expected = oracle.float()(torch.tensor([[1, 5, 9, 700]])).logits[0, -1].log_softmax(-1).topk(5)
    check_first_token(tmp_path, [1, 5, 9, 700], expected)
    assert LLM(tmp_path).tokenizer.encode("to") == [256]
