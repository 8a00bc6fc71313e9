"""`LLM.classify`: probabilities are those of `transformers`, and depend only on the text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from byte_tokenizer import EOS
from cases import cases
from classifier_model import LABELS, join_pairs, make_classifier
from embedding_model import CONTEXT
from gguf_files import HIDDEN, random_tensors, write_model
from infer import LLM, Classification, InvalidRequestError, ModelError
from infer.engine.texts import text_states
from infer.errors import TruncationWarning
from infer.files import open_checkpoint
from infer.models.pooled_head import load_head
from refusals import check_refused

TEXTS = ["the food was cold", "a", "once upon a time " * 9, "a"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("classifier")
    make_classifier(folder, pad_token_id=EOS)
    with LLM(folder, kv_type="f32") as llm:
        yield llm


@torch.inference_mode()
def logits_of(model: Any, folder: Path, texts: list[Any]) -> torch.Tensor:
    """Return the logits of texts and pairs by `transformers`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(*([text] if isinstance(text, str) else text)).input_ids for text in texts]
    return torch.cat([model(torch.tensor([each])).logits for each in ids]).double()


def values_of(found: list[Classification], labels: Any = LABELS) -> torch.Tensor:
    """Return the values in the order of the labels."""
    by_label = [dict(zip(each.labels, each.probabilities, strict=True)) for each in found]
    return torch.tensor([[each[label] for label in labels] for each in by_label], dtype=torch.float64)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3Text", "Phi3", "SmolLM3"])
def test_probabilities_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = make_classifier(tmp_path, getattr(transformers, f"{name}Config"), pad_token_id=EOS)
    ids = [list(text.encode()) for text in TEXTS]
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([each])).logits for each in ids]).double()
    with LLM(tmp_path, kv_type="f32") as llm:
        found = llm.classify(ids)
    assert torch.allclose(values_of(found), logits.softmax(-1), atol=1e-4)
    assert [each.label for each in found] == [LABELS[index] for index in logits.argmax(-1).tolist()]
    assert all(sorted(each.probabilities, reverse=True) == list(each.probabilities) for each in found)
    assert all(sum(each.probabilities) == pytest.approx(1) for each in found)
    assert logits.softmax(-1)[0].max() < 0.999


@cases(
    "labels settings function",
    (LABELS, {"problem_type": "multi_label_classification"}, torch.sigmoid),
    (LABELS, {"problem_type": "single_label_classification"}, lambda logits: logits.softmax(-1)),
    (LABELS, {"problem_type": "regression"}, lambda logits: logits),
    (LABELS[:2], {}, lambda logits: logits.softmax(-1)),
    (["score"], {}, torch.sigmoid),
    (["score"], {"problem_type": "regression"}, lambda logits: logits),
)
def test_the_kind_of_problem_sets_the_function(tmp_path: Path, labels: list[str], settings: Any, function: Any) -> None:
    model = make_classifier(tmp_path, labels=labels, pad_token_id=EOS, **settings)
    with LLM(tmp_path, kv_type="f32") as llm:
        found = values_of(llm.classify(TEXTS), labels)
    assert torch.allclose(found, function(logits_of(model, tmp_path, TEXTS)), atol=1e-4)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("num_labels", [1, 2, 4])
def test_labels_without_names_have_those_of_transformers(tmp_path: Path, num_labels: int) -> None:
    make_classifier(tmp_path, labels=None, num_labels=num_labels, pad_token_id=EOS)
    with LLM(tmp_path) as llm:
        (found,) = llm.classify(["a"])
    assert sorted(found.labels) == [f"LABEL_{index}" for index in range(num_labels)]


def test_pairs_are_joined_as_the_tokenizer_joins_them(tmp_path: Path) -> None:
    model = make_classifier(tmp_path, pad_token_id=EOS)
    join_pairs(tmp_path)
    pairs: list[Any] = [("a premise", "a hypothesis"), ("", "b"), ("a", "x" * 200)]
    with LLM(tmp_path, kv_type="f32") as llm:
        found = llm.classify([*pairs, "ab"])
        assert torch.allclose(values_of(found), logits_of(model, tmp_path, [*pairs, "ab"]).softmax(-1), atol=1e-4)
        assert llm.classify([list(pairs[0])]) == found[:1]
        assert llm.tokenizer.encode_pair("a" * 3000, "b").ids == [97] * 3000 + [257, 98]
        with pytest.warns(TruncationWarning, match=f"1 of 2 texts were cut to {CONTEXT} tokens"):
            cut = llm.classify([("a", "x" * 999), "a"], truncate=True)
        assert cut[0] == llm.classify([("a", "x" * (CONTEXT - 2))])[0]
        with pytest.raises(InvalidRequestError, match=r"text 0: the first text of the pair has .* and the context"):
            llm.classify([("x" * 999, "a")], truncate=True)


@pytest.mark.parametrize("pad_token_id", [EOS, None])
def test_the_last_token_that_is_no_padding_is_pooled(tmp_path: Path, pad_token_id: int | None) -> None:
    model = make_classifier(tmp_path, pad_token_id=pad_token_id)
    texts = ["hello<eos><eos>", "<eos>hello<eos>", "<eos><eos>", "hello"]
    with LLM(tmp_path, kv_type="f32") as llm:
        found = llm.classify(texts)
    assert torch.allclose(values_of(found), logits_of(model, tmp_path, texts).softmax(-1), atol=1e-4)
    assert (found[0] == found[3]) == (pad_token_id is not None)


def test_the_bits_of_a_result_depend_only_on_its_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.classify(TEXTS)
    assert (expected, expected[1]) == ([llm.classify([text])[0] for text in TEXTS], expected[3])
    assert llm.classify([llm.tokenizer.encode(text) for text in TEXTS]) == expected
    for step_tokens in (1, 50):
        monkeypatch.setattr(text_states, "step_tokens", lambda host, count=step_tokens: count)
        assert llm.classify(TEXTS) == expected
    assert llm.classify([]) == []


def test_a_classification_has_its_first_label_and_plain_json() -> None:
    found = Classification(("b", "a"), (0.75, 0.25))
    assert (found.label, found.probability) == ("b", 0.75)
    assert found.to_json() == {"labels": ["b", "a"], "probabilities": [0.75, 0.25]}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a", "texts must be a list of texts or pairs of texts, got str"),
        ([""], "text 0: the prompt is empty"),
        (["a", "x" * 999], f"text 1: the text has 999 tokens and the context holds {CONTEXT}"),
        ([("a", "x" * 999)], "text 0: the tokenizer has no form for pairs of texts"),
        ([[{"role": "user", "content": "a"}]], "text 0: a classifier reads a text, ids or a pair of texts"),
        ([("a", "b", "c")], "text 0: a pair must be two texts, got 3"),
        ([("a", 5)], "text 0: a pair must be two texts, got int"),
        ([("a", "\ud800")], "text 0: the text contains a lone surrogate"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_classified_give_one_line(llm: LLM, texts: Any, message: str) -> None:
    check_refused(lambda: llm.classify(texts), message)


def test_a_model_without_labels_says_what_it_lacks(embedder: LLM) -> None:
    check_refused(lambda: embedder.classify(["a"]), r"this model is not a classifier: its files have no weight of")


@pytest.mark.slow(cases=2)
@cases(
    "config message",
    ({"id2label": {"0": "a", "1": "b"}}, "id2label: expected 3 names, one per row of the weight, got"),
    ({"id2label": {"0": "a", "1": "b", "3": "c"}}, "id2label: expected a name for each number from 0, got"),
    ({"id2label": {"0": "a", "1": "b", "2": 5}}, "id2label: expected 3 names"),
    ({"id2label": ["a", "b", "c"]}, "id2label: expected a name for each number"),
    ({"problem_type": "odd"}, "problem_type: expected one of single_label_classification, .*, got 'odd'"),
    ({"problem_type": ["odd"]}, "problem_type: expected one of"),
    ({"architectures": ["Qwen3ForTokenClassification"]}, "Qwen3ForTokenClassification labels tokens: supported"),
)
def test_broken_labels_are_an_error_of_the_model(tmp_path: Path, config: Any, message: str) -> None:
    make_classifier(tmp_path, pad_token_id=EOS)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    check_refused(lambda: LLM(tmp_path), message, ModelError)


def test_a_gguf_file_names_the_labels_of_its_layers(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    shapes = {"cls.weight": (HIDDEN, HIDDEN), "cls.bias": (HIDDEN,), "cls.output.weight": (3, HIDDEN)}
    layers = {name: noise.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    def extend(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_array("qwen3.classifier.output_labels", list(LABELS))

    write_model(tmp_path / "a.gguf", "qwen3", {**random_tensors("qwen3"), **layers}, extend=extend)
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert checkpoint.reranker is None
    assert checkpoint.classifier.labels == LABELS
    assert not [name for name in checkpoint.tensors if name.startswith("cls")]
    state = torch.randn(HIDDEN).double()
    weight, bias, output = (torch.from_numpy(each).double() for each in layers.values())
    torch.testing.assert_close(load_head(checkpoint.classifier.head).of(state), output @ (weight @ state + bias).tanh())
