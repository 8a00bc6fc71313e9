"""Claims about exported GGUF files: a file has the folder's model and vectors, or one line names what it lacks."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from embedding_model import write_dense, write_modules
from encoder_models import BY_NAME as ENCODERS
from encoder_models import make_encoder
from encoder_tokenizers import SENTENCES, make_bert_folder, make_xlmr_folder
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
from refusals import check_refused, refusal
from reranker_model import make_logit_score, make_reranker_model
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


LABELS = {0: "bad", 1: "good", 2: "so-so"}


def make_folder(folder: Path, name: str, labels: dict[int, str] | None) -> Path:
    tokenizer = make_xlmr_folder(folder) if "roberta" in name else make_bert_folder(folder)
    settings = {} if labels is None else {"id2label": labels}
    make_encoder(ENCODERS[name], folder, vocab_size=len(tokenizer) + 1, num_hidden_layers=2, **settings)
    return folder


def add_modules(folder: Path, pooling: str, *sizes: int) -> None:
    """Add the files of sentence-transformers: a pooling, and dense layers between vectors of these sizes."""
    write_modules(folder, ["Transformer", "Pooling", *["Dense"] * (len(sizes) - 1), "Normalize"])
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    for place, (columns, rows) in enumerate(pairwise(sizes), 2):
        write_dense(folder / f"{place}_Dense", columns, rows, False, "Identity")


@pytest.mark.parametrize(
    ("name", "pooling", "num_types"),
    [("bert", "mean_tokens", 2), ("distilbert", "mean_tokens", 1), ("xlm-roberta", "cls_token", 2)],
)
def test_an_exported_encoder_has_the_folders_vectors(tmp_path: Path, name: str, pooling: str, num_types: int) -> None:
    add_modules(make_folder(tmp_path, name, None), pooling)
    if name != "distilbert":
        path, own = tmp_path / "1_Pooling" / "config.json", {"include_prompt": name == "bert"}
        path.write_text(json.dumps(json.loads(path.read_text()) | own))
        prompts = {"prompts": {"query": "search: ", "text": ""}, "default_prompt_name": "query"}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60}))
    plan = export_plan(open_checkpoint(tmp_path))
    assert plan.values["tokenizer.ggml.token_type_count"].value == num_types, "llama.cpp needs it"
    path = write(plan, tmp_path / "model.gguf")
    with LLM(tmp_path) as folder, LLM(path) as file:
        assert folder.prompt_names == file.prompt_names
        assert folder.max_seq_len == file.max_seq_len == 60
        for prompt in (None, *folder.prompt_names):
            assert torch.equal(folder.embed(SENTENCES, prompt_name=prompt), file.embed(SENTENCES, prompt_name=prompt))


@pytest.mark.parametrize("name", ["distilbert", "electra"])
def test_a_classifier_whose_activation_gguf_cannot_say_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot say that the layers of its classifier are"):
        network_plan(open_checkpoint(make_folder(tmp_path, name, LABELS)))


def test_an_exported_classifier_has_the_labels_of_the_folder(tmp_path: Path) -> None:
    make_folder(tmp_path, "modernbert-biased", LABELS)
    path = write(export_plan(open_checkpoint(tmp_path)), tmp_path / "model.gguf")
    with LLM(tmp_path) as folder, LLM(path) as file:
        assert folder.classify(SENTENCES) == file.classify(SENTENCES)


def test_an_exported_cross_encoder_scores_pairs_as_the_folder(tmp_path: Path) -> None:
    path = write(export_plan(open_checkpoint(make_folder(tmp_path, "roberta", {0: "score"}))), tmp_path / "model.gguf")
    with LLM(tmp_path) as folder, LLM(path) as file:
        assert folder.rerank(SENTENCES[0], SENTENCES) == file.rerank(SENTENCES[0], SENTENCES)


def test_the_pooling_and_dense_layers_of_a_decoder_are_exported(tmp_path: Path) -> None:
    make_encoder(ENCODERS["embedding-gemma"], tmp_path)
    add_modules(tmp_path, "mean_tokens", 96, 40, 24)
    plan = network_plan(open_checkpoint(tmp_path))
    values = {key.partition(".")[2]: value.value for key, value in plan.values.items() if "gemma-embedding" in key}
    sizes = {key: value for key, value in values.items() if "dense" in key}
    assert (values["pooling_type"], values["attention.causal"], values["attention.sliding_window"]) == (1, False, 40)
    assert sizes == {"dense_2_feat_in": 96, "dense_2_feat_out": 40, "dense_3_feat_in": 40, "dense_3_feat_out": 24}
    again = open_checkpoint(write(plan, tmp_path / "model.gguf")).embedding
    own = open_checkpoint(tmp_path).embedding
    assert own is not None
    assert again is not None
    assert (again.pooling, again.normalizes, len(again.head)) == (own.pooling, True, 2)


@pytest.mark.parametrize("make", [make_reranker_model, make_logit_score], ids=["qwen3", "logit score"])
def test_an_exported_reranker_scores_as_the_folder(tmp_path: Path, make: Callable[..., Any]) -> None:
    source = tmp_path / ("Qwen3-Reranker-0.6B" if make is make_reranker_model else "ranker")
    prompts = {"prompts": {"judge": "Is it about it?"}, "default_prompt_name": "judge"}
    make(source, **({} if make is make_reranker_model else prompts))
    cut_words(source)
    plan = export_plan(open_checkpoint(source))
    assert ("tokenizer.chat_template.rerank" in plan.values) == (make is make_reranker_model)
    with LLM(source) as folder, LLM(write(plan, tmp_path / "model.gguf")) as file:
        found = [[each.score for each in llm.rerank("a", ["b", "yes no", "c"])] for llm in (folder, file)]
    assert found[0] == pytest.approx(found[1], abs=1e-12)


REFUSED_LAYERS = [
    ("max_tokens", (), "GGUF has no form for the pooling max"),
    ("mean_tokens", (96, 40, 30, 20), "no form for the layers after the pooling: it has two matrices"),
]


@pytest.mark.parametrize(("pooling", "sizes", "message"), REFUSED_LAYERS)
def test_layers_after_the_states_are_refused_if_gguf_lacks_them(
    tmp_path: Path, pooling: str, sizes: tuple[int, ...], message: str
) -> None:
    make_encoder(ENCODERS["qwen3"], tmp_path)
    add_modules(tmp_path, pooling, *sizes)
    check_refused(lambda: network_plan(open_checkpoint(tmp_path)), message, UnsupportedModelError)


def test_an_encoder_with_another_activation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="activation is 'relu': it would be read as 'gelu'"):
        export_plan(open_checkpoint(make_folder(tmp_path, "bert-relu", None)))
