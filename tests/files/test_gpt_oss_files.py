"""Folders of gpt-oss: MXFP4 in two tensors against `transformers`, and files whose parts do not fit together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from infer.compute.operands.weights import UnreadWeight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.errors import ModelFormatError
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from steps import load_network, logits_of
from tiny import BY_NAME, change_tensors, make_tiny

CPU = torch.device("cpu")
LENGTH = 60


def make_quantized(folder: Path) -> Any:
    """Write a folder of gpt-oss with random MXFP4 matrices, and return the model of `transformers`."""
    model = make_tiny(BY_NAME["gpt_oss"], folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, columns, rows = tensors.pop(name).shape
        shape = num_experts, rows, columns // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 126, shape, generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            model.get_parameter(name).copy_(floats)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = (folder / "config.json").read_text()
    quantized = '{"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},'
    (folder / "config.json").write_text(config.replace("{", quantized, 1))
    return model


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(None, marks=pytest.mark.slow)], ids=["floats", "as stored"]
)
def test_mxfp4_folders_give_the_logits_of_transformers(dtype: torch.dtype | None, tmp_path: Path) -> None:
    oracle = make_quantized(tmp_path)
    token_ids = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    logits = logits_of(load_network(tmp_path, dtype=dtype), token_ids)
    # By default, the cache is f16, and activations of stored matrices have 16 bits.
    assert (logits - expected).abs().max() <= (1e-4 if dtype is torch.float32 else 2e-2)
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95


def test_parts_of_a_stack_are_the_rows_of_each_expert(tmp_path: Path) -> None:
    make_quantized(tmp_path)
    stored, weights = load_file(tmp_path / "model.safetensors"), LazyWeights(open_checkpoint(tmp_path).tensors)
    at = "model.layers.1.mlp.experts"
    whole = convert_moe_packed_tensors(
        stored[f"{at}.gate_up_proj_blocks"], stored[f"{at}.gate_up_proj_scales"], dtype=torch.float32
    )
    for expert in range(6):
        for first, which in enumerate(("gate", "up")):
            found = weights[f"{at}.{expert}.{which}_proj.weight"]
            assert isinstance(found, UnreadWeight)
            expected = whole[expert, :, first::2].T
            for low, high in ((0, 96), (5, 6), (40, 96)):
                rows = found.rows(low, high)
                assert torch.equal(dequantize(rows.data, rows.type).reshape(rows.shape), expected[low:high])
            bias = weights[f"{at}.{expert}.{which}_proj.bias"]
            assert torch.equal(bias.data, stored[f"{at}.gate_up_proj_bias"][expert, first::2])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors, at: tensors.pop(f"{at}_scales"), "expected a tensor of its scales next to it"),
        (lambda tensors, at: tensors.pop(f"{at}_blocks"), "expected a tensor of its blocks next to it"),
        (lambda tensors, at: tensors.update({f"{at}_scales": torch.zeros(6, 192, 3, dtype=torch.uint8)}), "the shape"),
        (lambda tensors, at: tensors.update({f"{at}_scales": torch.zeros(6, 192, 2)}), r"expected bytes \(U8\)"),
        (lambda tensors, at: tensors.update({f"{at}_scales": torch.zeros((), dtype=torch.uint8)}), "experts, rows and"),
        (lambda tensors, at: tensors.update({at: torch.zeros(6, 64, 192)}), "is the same weight as"),
    ],
    ids=["no scales", "no blocks", "another shape", "another type", "no axes", "floats too"],
)
def test_parts_that_do_not_fit_together_are_named(change: Any, problem: str, tmp_path: Path) -> None:
    make_quantized(tmp_path)
    change_tensors(tmp_path, lambda tensors: change(tensors, "model.layers.2.mlp.experts.gate_up_proj"))
    with pytest.raises(ModelFormatError, match=rf"model\.layers\.2\.mlp\.experts\.gate_up_proj_\w+'.*{problem}"):
        open_checkpoint(tmp_path)
