"""Claims about the plan of a GGUF file: the file has the folder's model, or one line names what GGUF lacks."""

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from infer import LLM
from infer.compute.operands.weights import StoredWeight
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.errors import UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.gguf.gguf_writer import TensorPlan, write_gguf
from infer.files.tensors.lazy_weights import LazyWeights, as_float32
from infer.models.gguf_export.plan import ExportPlan, export_plan, network_plan
from infer.models.gguf_export.tensors import ExportTensor
from quantised_folders import by_name, write_quantised
from refusals import refusal
from tiny import BY_NAME, make_tiny


def write(plan: ExportPlan, path: Path, rows: int = 7) -> Path:
    """Write the file, some rows at a time."""

    def pieces(tensor: ExportTensor) -> Iterator[bytes]:
        for first in range(0, tensor.num_rows, rows):
            part = tensor.read(first, min(first + rows, tensor.num_rows)).contiguous()
            yield part.view(torch.uint8).numpy().tobytes()

    plans = [TensorPlan(each.name, each.type, each.shape, lambda each=each: pieces(each)) for each in plan.tensors]
    write_gguf(path, plan.values, plans)
    return path


def cut_words(folder: Path) -> None:
    """Let the byte tokenizer cut words by GPT-2's rules, for which GGUF has a name."""
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace('"use_regex": false', '"use_regex": true'))


DIFFERENCES = [
    ("llama_relu", r"llama cannot say that layers\[0\]\.feed_forward\.activation is 'relu': .* read as 'silu'"),
    ("llama4_chunks", r"layers\[0\]\.mixer\.chunk is 23: it would be read as 8192"),
    ("qwen3_moe_mixed", r"router\.is_normalized is False: it would be read as True"),
    ("llama_yarn_mscale", r"rope\.frequency_factors\[1\] is 1\.326"),
    ("gpt_oss_plain", "gpt-oss cannot describe the network: config: sliding_window must be"),
    ("lfm2_biases", r"the tensor 'model\.layers\.0\.conv\.bias' has no name in a GGUF file of lfm2"),
    ("olmo_hybrid", "GGUF has no architecture for model_type 'olmo_hybrid'"),
]


@pytest.mark.parametrize(("name", "message"), DIFFERENCES)
def test_a_network_unknown_to_gguf_is_refused_by_its_difference(tmp_path: Path, name: str, message: str) -> None:
    make_tiny(BY_NAME[name], tmp_path)
    assert re.search(message, refusal(lambda: network_plan(open_checkpoint(tmp_path)), UnsupportedModelError))


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("name", ["smollm3", "gemma3"])
def test_a_written_file_answers_as_the_folder_to_the_bit(tmp_path: Path, name: str) -> None:
    config = copy.deepcopy(BY_NAME[name].config)
    config.vocab_size = VOCAB_SIZE
    if name == "gemma3":
        config.query_pre_attn_scalar = config.head_dim  # a constant of llama.cpp
    make_tiny(replace(BY_NAME[name], config=config), tmp_path)
    write_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}")
    cut_words(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 5, "eos_token_id": 256}')
    path = write(export_plan(open_checkpoint(tmp_path)), tmp_path / "model.gguf")
    with LLM(tmp_path) as folder, LLM(path) as file:
        answers = [llm.generate("né 12", max_tokens=6, seed=3, logprobs=2) for llm in (folder, file)]
        assert (answers[0].token_ids, answers[0].logprobs) == (answers[1].token_ids, answers[1].logprobs)
        assert folder.tokenizer.chat_templates == file.tokenizer.chat_templates == ("{{ messages[0].content }}",)


@pytest.mark.parametrize(
    ("name", "method"), [("llama", "gptq 2 bits"), ("phi3", "mxfp4-pack-quantized"), ("qwen3_5", "fbgemm_fp8")]
)
def test_quantised_matrices_keep_the_values_that_the_folder_has(tmp_path: Path, name: str, method: str) -> None:
    made, floats, folder = by_name(method), tmp_path / "floats", tmp_path / "folder"
    floats.mkdir()
    make_tiny(BY_NAME[name], floats)
    write_quantised(floats, folder, made.pack, made.config, made.key)
    source = open_checkpoint(folder)
    again = open_checkpoint(write(network_plan(source), tmp_path / "model.gguf"))
    types = {info.type for each, info in again.tensors.items() if each.endswith("o_proj.weight")}
    assert types == {made.type if BLOCK_TYPES[made.type].ggml_id is not None else "F32"}
    moved = (".linear_attn.",)  # their value heads have another order, which test_converted_families checks
    for each, weight in LazyWeights(source.tensors).items():
        if not any(part in each for part in moved):
            read = LazyWeights(again.tensors)[each]
            own, other = (as_float32(StoredWeight(w.type, w.shape, w.data)).data for w in (weight, read))
            assert torch.equal(own, other), each


@pytest.mark.parametrize("name", ["lfm2_moe", "qwen3_next"])
def test_routers_and_convolutions_are_float32_whatever_the_folder_has(tmp_path: Path, name: str) -> None:
    make_tiny(BY_NAME[name], tmp_path)
    floats = load_file(tmp_path / "model.safetensors")
    halves = {each: tensor.to(torch.bfloat16) for each, tensor in floats.items()}
    save_file(halves, tmp_path / "model.safetensors")
    tensors = network_plan(open_checkpoint(tmp_path)).tensors
    types = {each.name: each.type for each in tensors if len(each.shape) > 1}
    kept = {each for each, type in types.items() if type == "F32"}
    assert kept == {each for each in types if "ffn_gate_inp" in each or "conv.weight" in each or "conv1d" in each}
    assert set(types.values()) == {"F32", "BF16"}
    assert {each.type for each in tensors if len(each.shape) == 1} == {"F32"}
