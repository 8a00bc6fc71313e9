"""The library agrees with sentence-transformers on tiny random weights: vectors, prompts, dense layers, scores."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_tokenizer import EOS
from classifier_model import join_pairs, make_classifier
from embedding_model import make_embedding_model
from extent import usual_or_all
from infer import LLM
from reranker_model import NO, YES, make_logit_score
from test_encoder_models import DOCUMENTS, QUERY, make_head_folder, scores_of

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["hello", "", "once upon a time " * 9, "hello"]
PAIRS: list[Any] = [("cats", "a roof"), ("cats", ""), ("a " * 40, "b"), ("x", "x")]
DENSE = [(96, True, "Tanh"), (64, True, "GELU"), (40, True, "SiLU"), (24, False, "ReLU"), (20, False, "Identity")]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of sentence-transformers


MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
ENDS = (([], True), (DENSE, False), (DENSE[:1], True), ([], False))
EACH = product(MODES, (True, False), ENDS)
CASES = [({"pooling_mode": mode, "include_prompt": has}, *end) for mode, has, end in EACH]


@pytest.mark.parametrize(("pooling", "dense", "is_normalized"), CASES[:: usual_or_all(5, 1)])
def test_vectors_are_those_of_the_pipeline(tmp_path: Path, pooling: Any, dense: Any, is_normalized: bool) -> None:
    make_embedding_model(tmp_path, pooling=pooling, dense=dense, is_normalized=is_normalized)
    oracle = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    with LLM(tmp_path, kv_type="f32") as llm:
        for name in (None, "query"):
            expected = oracle.encode(TEXTS, prompt_name=name, batch_size=1)
            np.testing.assert_allclose(llm.embed(TEXTS, prompt_name=name).numpy(), expected, atol=1e-4)


def test_models_saved_by_the_pipeline_are_read(tmp_path: Path) -> None:
    """The newest files have other names of modules and settings than the fixtures."""
    make_embedding_model(tmp_path / "a", dense=DENSE[:2])
    oracle = sentence_transformers.SentenceTransformer(str(tmp_path / "a"), device="cpu")
    oracle.save(str(tmp_path / "b"))
    with LLM(tmp_path / "b", kv_type="f32") as llm:
        found = llm.embed(TEXTS, prompt_name="query").numpy()
    np.testing.assert_allclose(found, oracle.encode(TEXTS, prompt_name="query", batch_size=1), atol=1e-4)


@pytest.mark.parametrize("labels", [["relevant"], ["contradiction", "entailment", "neutral"]])
def test_a_cross_encoder_has_the_library_s_labels(tmp_path: Path, labels: list[str]) -> None:
    make_classifier(tmp_path, labels=labels, pad_token_id=EOS)
    join_pairs(tmp_path)
    oracle = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    expected = oracle.predict(PAIRS, batch_size=1, apply_softmax=len(labels) > 1).reshape(len(PAIRS), -1)
    with LLM(tmp_path, kv_type="f32") as llm:
        found = [dict(zip(each.labels, each.probabilities, strict=True)) for each in llm.classify(PAIRS)]
    np.testing.assert_allclose([[each[label] for label in labels] for each in found], expected, atol=1e-4)


@pytest.mark.parametrize("false_id", [NO, None])
def test_a_cross_encoder_that_compares_answers_has_the_library_s_scores(tmp_path: Path, false_id: int | None) -> None:
    make_logit_score(tmp_path, YES, false_id, model_type="CrossEncoder")
    logits = {"method": "forward", "method_output_name": "logits"}
    settings = {"transformer_task": "text-generation", "module_output_name": "causal_logits"}
    settings |= {"modality_config": {"text": logits, "message": {**logits, "format": "flat"}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    oracle = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    documents = ["a roof", "a bridge", ""]
    expected = oracle.predict([("cats", each) for each in documents], batch_size=1)
    with LLM(tmp_path, kv_type="f32") as llm:
        found = sorted(llm.rerank("cats", documents), key=lambda each: each.index)
    np.testing.assert_allclose([each.score for each in found], expected, atol=1e-4)


@pytest.mark.slow(rest=4)
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert"])
@pytest.mark.parametrize("activation", ["linear.Identity", "activation.Sigmoid", None])
def test_a_cross_encoder_of_whole_texts_has_the_library_s_scores(tmp_path: Path, name: str, activation: Any) -> None:
    make_head_folder(tmp_path, name, ("score",))
    path = tmp_path / "config.json"
    own = {} if activation is None else {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{activation}"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    oracle = sentence_transformers.CrossEncoder(str(tmp_path), device="cpu")
    expected = oracle.predict([(QUERY, each) for each in DOCUMENTS], batch_size=2)
    with LLM(tmp_path) as llm:
        np.testing.assert_allclose(scores_of(llm), expected, atol=1e-4)
