"""Every family from a GGUF file gives the logits of the safetensors it was converted from, and is exported alike."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from converted import convert
from infer.compute import ops
from infer.files import open_checkpoint
from infer.files.gguf.gguf import GGUFFile, TypedValue, read_gguf
from infer.files.tensors.lazy_weights import read_weight
from infer.models.gguf_export.plan import network_plan
from steps import load_network, logits_of
from tiny import DELTA_NETS, LONGROPE, TINY, Tiny, make_tiny

# Settings that llama.cpp's files cannot express: another activation, some settings of yarn, an unusual order of layers
# without rotation, a cap that is off.
_NOT_IN_GGUF = {"llama_relu", "llama_relu2", "llama_quick_gelu", "llama_odd_sizes", "llama_yarn_mscale"}
_NOT_IN_GGUF |= {"gemma3_capped", "gemma2_uncapped", "smollm3_windows", "qwen3_moe_mixed", "gpt_oss_plain"}
_NOT_IN_GGUF |= {"mellum_mixed", "muse_glimmer_listed", "llama4_chunks", "llama4_plain", "lfm2_biases"}
_NOT_IN_GGUF |= {"lfm2_moe_plain", "qwen3_next_mixed", "olmo_hybrid", "olmo_hybrid_rotated"}
CONVERTED = [tiny for tiny in [*TINY, LONGROPE] if tiny.name not in _NOT_IN_GGUF]


def logits(path: Path) -> torch.Tensor:
    token_ids = torch.randint(3, 96, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    with ops.using("reference"):
        return logits_of(load_network(path, dtype=torch.float32), token_ids)


def assert_exported_alike(folder: Path, file: GGUFFile) -> None:
    """Check that the export has the keys and the tensors of the file, in its types and shapes."""
    plan = network_plan(open_checkpoint(folder))
    keys = {key: TypedValue(file.value_types[key], value) for key, value in file.metadata.items()}
    assert {key: value for key, value in keys.items() if plan.values.get(key) != value} == {}
    assert {tensor.name: tensor.shape for tensor in plan.tensors} == {
        name: info.shape for name, info in file.tensors.items()
    }
    for tensor in plan.tensors:
        stored = read_weight(file.tensors[tensor.name]).data.reshape(tensor.num_rows, -1)
        torch.testing.assert_close(tensor.read(0, tensor.num_rows), stored, rtol=1e-6, atol=0)


@pytest.mark.slow(cases=6)
@pytest.mark.parametrize("tiny", CONVERTED, ids=lambda tiny: tiny.name)
def test_a_converted_file_gives_the_logits_of_the_folder(tiny: Tiny, tmp_path: Path) -> None:
    config = copy.deepcopy(tiny.config)
    if "query_pre_attn_scalar" in vars(config):
        config.query_pre_attn_scalar = config.head_dim  # as in files of all sizes except two
    if "post_norm_eps" in vars(config):
        config.post_norm_eps = 1e-8  # a constant of llama.cpp
    make_tiny(replace(tiny, config=config), tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf")
    assert_exported_alike(tmp_path, read_gguf(path))
    # The value heads of a delta net have another order in a file, and so have the sums over them.
    assert (logits(path) - logits(tmp_path)).abs().max() <= (2e-4 if tiny in DELTA_NETS else 2e-5)
