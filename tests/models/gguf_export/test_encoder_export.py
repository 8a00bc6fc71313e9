"""Claims about exported encoders and embedding models: the file has the folder's vectors, labels and scores."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from embedding_model import write_dense, write_modules
from encoder_models import BY_NAME, make_encoder
from encoder_tokenizers import SENTENCES, make_bert_folder, make_xlmr_folder
from infer import LLM
from infer.errors import UnsupportedModelError
from infer.files import open_checkpoint
from infer.models.gguf_export.plan import export_plan, network_plan
from refusals import check_refused
from reranker_model import make_logit_score, make_reranker_model
from test_plan import cut_words, write

LABELS = {0: "bad", 1: "good", 2: "so-so"}


def make_folder(folder: Path, name: str, labels: dict[int, str] | None) -> Path:
    tokenizer = make_xlmr_folder(folder) if "roberta" in name else make_bert_folder(folder)
    settings = {} if labels is None else {"id2label": labels}
    make_encoder(BY_NAME[name], folder, vocab_size=len(tokenizer) + 1, num_hidden_layers=2, **settings)
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
    make_encoder(BY_NAME["embedding-gemma"], tmp_path)
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
    make_encoder(BY_NAME["qwen3"], tmp_path)
    add_modules(tmp_path, pooling, *sizes)
    check_refused(lambda: network_plan(open_checkpoint(tmp_path)), message, UnsupportedModelError)


def test_an_encoder_with_another_activation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="activation is 'relu': it would be read as 'gelu'"):
        export_plan(open_checkpoint(make_folder(tmp_path, "bert-relu", None)))
