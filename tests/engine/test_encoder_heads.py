"""Encoders with a head of labels: values and scores as `transformers` computes them, for texts and for pairs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import cases
from converted_encoders import write_gguf
from encoder_models import BY_NAME, CONTEXT, make_encoder
from encoder_tokenizers import SENTENCES, as_bert_gguf, as_xlmr_gguf, make_bert_folder, make_xlmr_folder
from infer import LLM, Classification, ModelError
from infer.cli.model_commands.explain_command import lines
from infer.engine.requests.loop_messages import Work
from infer.engine.texts.reranking import pairs_to_score, scores
from infer.errors import ContextLengthError, TruncationWarning, UnsupportedModelError
from infer.models.catalog.explanation import explain
from refusals import check_refused
from served import serving

LABELS = ("bad", "so-so", "good")
NAMES = ("bert", "electra", "distilbert", "roberta", "xlm-roberta", "nomic", "modernbert", "modernbert-biased")
WITH_TYPES = ("bert", "electra", "nomic")
QUERY, DOCUMENTS = SENTENCES[0], [*SENTENCES[1:6], "", SENTENCES[1]]
TEXTS = [*SENTENCES[:4], "", " ".join(SENTENCES * 3)]
PAIRS = [(QUERY, each) for each in DOCUMENTS]


def make_folder(folder: Path, name: str, labels: tuple[str, ...] = LABELS, **settings: Any) -> tuple[Any, Any]:
    """Save a classifier with a tokenizer, and return the model and the tokenizer of `transformers`."""
    tokenizer = make_xlmr_folder(folder) if "roberta" in name else make_bert_folder(folder)
    named = dict(enumerate(labels))
    model = make_encoder(BY_NAME[name], folder, vocab_size=len(tokenizer) + 1, id2label=named, **settings)
    return model, tokenizer


@torch.inference_mode()
def logits_of(name: str, model: Any, tokenizer: Any, texts: list[Any]) -> torch.Tensor:
    inputs = ("input_ids", "token_type_ids") if name in WITH_TYPES else ("input_ids",)
    encoded = [tokenizer([text]) for text in texts]  # as a list, because an empty second argument would be ignored
    given = [{key: torch.tensor(each[key]) for key in inputs} for each in encoded]
    return torch.cat([model(**each).logits for each in given]).double()


def values_of(found: list[Classification]) -> torch.Tensor:
    by_label = [dict(zip(each.labels, each.probabilities, strict=True)) for each in found]
    return torch.tensor([[each[label] for label in LABELS] for each in by_label], dtype=torch.float64)


def scores_of(llm: LLM, documents: list[str] = DOCUMENTS) -> list[float]:
    return [each.score for each in sorted(llm.rerank(QUERY, documents), key=lambda each: each.index)]


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("name", NAMES)
def test_labels_of_texts_and_pairs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokenizer = make_folder(tmp_path, name)
    given = [*TEXTS, *PAIRS]
    expected = logits_of(name, model, tokenizer, given).softmax(-1)
    with LLM(tmp_path) as llm:
        torch.testing.assert_close(values_of(llm.classify(given)), expected, rtol=0, atol=1e-5)
        assert llm._opened.settings.heads.reranker is None
    assert expected.std(0).min() > 0.003


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "nomic", "modernbert-biased"])
def test_scores_of_one_label_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokenizer = make_folder(tmp_path, name, ("score",))
    expected = logits_of(name, model, tokenizer, PAIRS)[:, 0].sigmoid()
    with LLM(tmp_path) as llm:
        assert scores_of(llm) == pytest.approx(expected.tolist(), abs=1e-5)
        labelled = llm.classify(PAIRS)
    assert [each.probability for each in labelled] == pytest.approx(expected.tolist(), abs=1e-5)
    assert expected[:5].std() > 0.005


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("kind", ["cls, gelu", "mean, gelu_new", "cls, relu", "mean, silu", "cls, tanh"])
def test_modernbert_pools_as_its_config_says(kind: str, tmp_path: Path) -> None:
    pooling, activation = kind.split(", ")
    own = {"classifier_pooling": pooling, "classifier_activation": activation, "classifier_bias": pooling == "cls"}
    model, tokenizer = make_folder(tmp_path, "modernbert", **own)
    expected = logits_of("modernbert", model, tokenizer, TEXTS).softmax(-1)
    with LLM(tmp_path) as llm:
        torch.testing.assert_close(values_of(llm.classify(TEXTS)), expected, rtol=0, atol=1e-5)


@pytest.mark.slow(cases=3)
@cases(
    "changes function",
    ({}, torch.sigmoid),
    ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda logits: logits),
    ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, torch.sigmoid),
    ({"sentence_transformers": {"version": "5.0.0"}}, torch.sigmoid),
    ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda logits: logits),
    ({"problem_type": "regression"}, lambda logits: logits),
)
def test_the_files_choose_the_function_of_a_score(changes: dict[str, Any], function: Any, tmp_path: Path) -> None:
    model, tokenizer = make_folder(tmp_path, "bert", ("score",))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    expected = function(logits_of("bert", model, tokenizer, PAIRS)[:, 0]).tolist()
    with LLM(tmp_path) as llm:
        assert scores_of(llm) == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("ranker")
    make_folder(folder, "bert", ("score",))
    with LLM(folder) as llm:
        yield llm


def test_the_bits_of_a_score_depend_on_its_pair_alone(ranker: LLM) -> None:
    together = scores_of(ranker)
    assert together == [scores_of(ranker, [each])[0] for each in DOCUMENTS]
    assert (together, together[0]) == (scores_of(ranker, DOCUMENTS * 12)[: len(DOCUMENTS)], together[-1])
    assert scores_of(ranker, []) == []


def test_a_document_above_the_limit_is_cut_at_its_end(ranker: LLM) -> None:
    long = " ".join(SENTENCES * 40)
    message = f"document 1: the text has .* tokens and the context holds {CONTEXT}"
    check_refused(lambda: ranker.rerank(QUERY, ["x", long]), message)
    with pytest.warns(TruncationWarning, match=f"1 of 2 texts were cut to {CONTEXT} tokens"):
        found = ranker.rerank(QUERY, ["x", long], truncate=True)
    assert len(found) == 2
    first = f"document 0: the first text of the pair has .* tokens .* holds {CONTEXT}: only the second text is cut"
    check_refused(lambda: ranker.rerank(long, ["x"], truncate=True), first, ContextLengthError)
    message = "instruction must be left out: this model's prompt has none"
    check_refused(lambda: ranker.rerank(QUERY, ["x"], instruction="find"), message)


def test_a_server_ranks_scores_and_labels(ranker: LLM) -> None:
    expected = scores_of(ranker)
    with serving(ranker, model="ranker") as served:
        asked = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS}
        answer = served.client.post("/v1/rerank", json=asked).json()
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert [found[index] for index in range(len(DOCUMENTS))] == expected
        asked = {"model": "ranker", "text_1": QUERY, "text_2": DOCUMENTS}
        assert [each["score"] for each in served.client.post("/v1/score", json=asked).json()["data"]] == expected
        asked = {"model": "ranker", "input": [list(each) for each in PAIRS]}
        found = served.client.post("/v1/classify", json=asked).json()["data"]
        assert [each["probs"][0] for each in found] == pytest.approx(expected, abs=1e-12)
        refused = served.client.post("/v1/completions", json={"model": "ranker", "prompt": "x"})
        assert "bert is an encoder and generates no text: use rerank()" in refused.text


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("name", "labels"), [("xlm-roberta", ("score",)), ("modernbert", LABELS)])
def test_a_gguf_file_gives_the_values_of_the_folder(name: str, labels: tuple[str, ...], tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    folder.mkdir()
    model, _ = make_folder(folder, name, labels)
    metadata = (as_xlmr_gguf if name == "xlm-roberta" else as_bert_gguf)(folder)
    write_gguf(model, path, metadata, 4)
    with LLM(folder) as wanted, LLM(path) as found:
        for texts in (TEXTS, PAIRS):
            for one, other in zip(wanted.classify(texts), found.classify(texts), strict=True):
                assert (other.labels, other.probabilities) == (one.labels, pytest.approx(one.probabilities, abs=1e-6))
        assert len(labels) > 1 or scores_of(found) == pytest.approx(scores_of(wanted), abs=1e-6)


def test_a_gguf_file_of_bert_lacks_a_layer_of_the_head(tmp_path: Path) -> None:
    model, _ = make_folder(tmp_path, "bert", ("score",))
    path = tmp_path / "model.gguf"
    write_gguf(model, path, as_bert_gguf(tmp_path), 4)
    message = r"the head of labels lacks the tensor cls\.weight, so its scores"
    check_refused(lambda: LLM(path), message, UnsupportedModelError)


@pytest.mark.slow(cases=3)
@cases(
    "name lost changes problem",
    ("bert", "bert.pooler.dense.weight", {}, r"tensor 'pooler\.dense\.weight': is missing"),
    ("roberta", "classifier.dense.weight", {}, r"tensor 'classifier\.dense\.weight': is missing"),
    ("modernbert", "head.norm.weight", {}, r"tensor 'head\.norm\.weight': is missing"),
    ("modernbert", "", {"classifier_pooling": "max"}, "classifier_pooling 'max' is not supported: supported are"),
    ("modernbert", "", {"classifier_activation": ["x"]}, r"classifier_activation \['x'\] is not supported"),
    ("modernbert", "", {"norm_eps": "x"}, "norm_eps"),
    ("bert", "", {"architectures": ["BertForTokenClassification"]}, "TokenClassification does not label texts"),
    ("bert", "", {"id2label": {"0": "a"}}, "expected 3 names, one per row of the weight"),
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(
    name: str, lost: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    make_folder(tmp_path, name)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(path)
    tensors.pop(lost, None)
    save_file(tensors, path)
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    check_refused(lambda: LLM(tmp_path), problem, ModelError)


@pytest.mark.slow(cases=1)
@cases(
    "tensor problem",
    ("classifier.weight", r"tensor 'classifier\.weight': expected finite numbers"),
    ("bert.encoder.layer.1.attention.self.key.bias", "text 0: the model's states are not finite: its weights are"),
)
def test_numbers_that_are_not_finite_give_no_scores(tensor: str, problem: str, tmp_path: Path) -> None:
    make_folder(tmp_path, "bert", ("score",))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][0] = torch.nan
    save_file(tensors, path)
    with pytest.raises(ModelError, match=problem), LLM(tmp_path) as llm:
        llm.rerank(QUERY, DOCUMENTS)


@pytest.mark.parametrize(("labels", "use"), [(("score",), "ranks documents"), (LABELS, "labels texts")])
def test_explain_says_what_a_head_is_for(labels: tuple[str, ...], use: str, tmp_path: Path) -> None:
    make_folder(tmp_path, "bert", labels)
    assert f"an encoder: it {use}, and generates no text" in "\n".join(lines(explain(tmp_path)))


def test_an_encoder_is_not_shared_out(tmp_path: Path) -> None:
    make_folder(tmp_path, "bert")
    check_refused(lambda: LLM(tmp_path, tensor_parallel=2), "tensor_parallel=2 is for models that generate")


def test_other_calls_continue_between_the_heads_of_two_texts(ranker: LLM) -> None:
    host = ranker._opened
    pairs = pairs_to_score(host, PAIRS, None, truncate=False)

    def counted(work: Work[list[float]]) -> Work[int]:
        num_turns = 0
        for gives_way in work:
            num_turns += bool(gives_way)
            yield gives_way
        return num_turns

    assert host.loop.call(counted(scores(host, pairs))).get() > len(PAIRS)
