"""Encoders: vectors, labels and scores as `transformers` computes them, and refusals of calls that generate."""

import base64
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases import cases
from converted_encoders import write_gguf
from encoder_models import BY_NAME, CONTEXT, make_encoder, states_of, write_modules
from encoder_tokenizers import SENTENCES, as_bert_gguf, as_xlmr_gguf, make_bert_folder, make_xlmr_folder
from infer import LLM, ModelError
from infer.cli.commands.explain_command import lines
from infer.engine.requests.answer import Work
from infer.engine.texts.text_tasks import score_pairs
from infer.errors import ContextLengthError, ModelFormatError, TruncationWarning, UnsupportedModelError
from infer.models.catalog.explanation import explain
from refusals import check_refused
from served import serving
from test_reranking import values_of


def make_folder(folder: Path, name: str, **modules: Any) -> tuple[Any, Any]:
    """Save a model with a tokenizer, and return both of `transformers`."""
    tokenizer = make_xlmr_folder(folder) if name == "xlm-roberta" else make_bert_folder(folder)
    model = make_encoder(BY_NAME[name], folder, vocab_size=len(tokenizer) + 1)  # GGUF files have one more token
    write_modules(folder, **modules)
    return model, tokenizer


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Any]]:
    folder = tmp_path_factory.mktemp("bert")
    model, tokenizer = make_folder(folder, "bert", pooling_mode_mean_tokens=True)
    with LLM(folder) as llm:
        yield llm, model, tokenizer


def expected(model: Any, tokenizer: Any, texts: list[str], pool: Callable[[Tensor], Tensor]) -> Tensor:
    found = torch.stack([pool(states_of(model, tokenizer(text)["input_ids"])) for text in texts])
    return torch.nn.functional.normalize(found)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "nomic", "modernbert"])
@pytest.mark.parametrize(("mode", "place"), [("cls_token", 0), ("mean_tokens", None), ("lasttoken", -1)])
def test_vectors_are_those_of_transformers(name: str, mode: str, place: int | None, tmp_path: Path) -> None:
    model, tokenizer = make_folder(tmp_path, name, **{f"pooling_mode_{mode}": True})
    texts = [*SENTENCES, "", " ".join(SENTENCES * 2)]
    wanted = expected(model, tokenizer, texts, lambda states: states.mean(0) if place is None else states[place])
    with LLM(tmp_path) as llm:
        torch.testing.assert_close(llm.embed(texts), wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_text_has_the_same_bits_in_every_call(bert: tuple[LLM, Any, Any]) -> None:
    llm, texts = bert[0], [*SENTENCES, " ".join(SENTENCES * 4)]
    together = llm.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        assert torch.equal(llm.embed([text])[0], vector)
    assert torch.equal(llm.embed([texts[index % len(texts)] for index in range(100)])[: len(texts)], together)


def test_calls_that_generate_are_refused_in_one_line(bert: tuple[LLM, Any, Any]) -> None:
    llm, chat = bert[0], [{"role": "user", "content": "x"}]
    calls = [lambda: llm.generate("x"), lambda: llm.generate(["x", "y"]), lambda: next(llm.stream("x")), llm.trim]
    calls += [lambda: llm.chat(chat), llm.session, lambda: llm.logits([1, 2]), lambda: llm.prompt_logprobs("x")]
    for call in calls:
        check_refused(call, "bert is an encoder and generates no text: use embed")


def test_a_text_above_the_limit_is_refused_or_cut(bert: tuple[LLM, Any, Any]) -> None:
    llm, _, tokenizer = bert
    long = " ".join(SENTENCES * 40)
    message = f"the text has .* tokens and the context holds {CONTEXT}"
    check_refused(lambda: llm.embed([long]), message, ContextLengthError)
    with pytest.warns(TruncationWarning, match=f"1 of 1 texts were cut to {CONTEXT} tokens"):
        found = llm.embed([long], truncate=True)
    ids = tokenizer(long)["input_ids"]
    assert torch.equal(found, llm.embed([[*ids[: CONTEXT - 1], ids[-1]]]))


@pytest.mark.slow(cases=2)
@cases("file key length",
    ("sentence_bert", "max_seq_length", 9), ("sentence_xlm-roberta", "max_seq_length", 9),
    *(("tokenizer", "model_max_length", each) for each in (9, 10**30)),
)  # fmt: skip
def test_texts_have_the_limit_of_sentence_transformers(file: str, key: str, length: int, tmp_path: Path) -> None:
    make_folder(tmp_path, "bert", pooling_mode_mean_tokens=True)
    path, limit = tmp_path / f"{file}_config.json", min(length, CONTEXT)
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {key: length}))
    long = " ".join(SENTENCES * 40)
    with LLM(tmp_path) as llm, warnings.catch_warnings(action="ignore"):
        assert llm.max_seq_len == limit
        found = llm.embed([long], truncate=True)
        check_refused(lambda: llm.embed([long]), f"the context holds {limit}", ContextLengthError)
    with LLM(tmp_path, max_seq_len=CONTEXT) as llm:  # a caller may raise the limit up to the positions
        ids = llm.tokenizer.encode(long)
        assert torch.equal(found, llm.embed([[*ids[: limit - 1], ids[-1]]]))
        assert llm.embed([ids[:CONTEXT]]).shape[0] == 1


@pytest.mark.parametrize("found", [0, True, "many"])
def test_a_broken_limit_of_texts_names_its_key(found: Any, tmp_path: Path) -> None:
    make_folder(tmp_path, "bert")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": found}))
    check_refused(lambda: LLM(tmp_path), "key 'max_seq_length': expected a number from 1, got", ModelFormatError)


def test_settings_of_models_that_generate_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "bert")
    message = "eviction_policy sliding needs a model that generates"
    check_refused(lambda: LLM(tmp_path, eviction_policy="sliding"), message)
    check_refused(lambda: LLM(tmp_path, tensor_parallel=2), "tensor_parallel=2 is for models that generate")


def test_a_server_embeds_and_refuses_to_chat(bert: tuple[LLM, Any, Any]) -> None:
    llm = bert[0]
    with serving(llm, model="bert") as served:
        texts = SENTENCES[:3]
        asked = {"model": "bert", "input": texts, "encoding_format": "base64"}
        answer = served.client.post("/v1/embeddings", json=asked).json()
        bits = [base64.b64decode(each["embedding"]) for each in answer["data"]]
        found = [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in bits]
        assert torch.equal(torch.stack(found), llm.embed(texts))
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        bodies = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
        for path, body in (bodies | {"/v1/chat/completions": chat, "/v1/messages": chat}).items():
            refused = served.client.post(path, json={"model": "bert", **body})
            assert refused.status_code == 400, path
            assert "is an encoder and generates no text" in refused.text, path
        for path in ("/health", "/metrics", "/props", "/v1/models"):
            assert served.client.get(path).status_code == 200, path


def test_explain_names_the_norm_that_one_layer_lacks(tmp_path: Path) -> None:
    make_folder(tmp_path, "modernbert")
    first, *others = (line for line in lines(explain(tmp_path)) if line.startswith("layer"))
    assert first.endswith("no norm before attention")
    assert others
    assert all(line.endswith(", norm before attention") for line in others)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "nomic", "modernbert"])
def test_a_gguf_file_gives_the_vectors_of_the_folder(name: str, tmp_path: Path) -> None:
    pooling, mode = (2, "cls_token") if name in ("bert", "modernbert") else (1, "mean_tokens")
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    folder.mkdir()
    model, _ = make_folder(folder, name, **{f"pooling_mode_{mode}": True})
    write_gguf(model, path, (as_xlmr_gguf if name == "xlm-roberta" else as_bert_gguf)(folder), pooling)
    texts = [*SENTENCES, " ".join(SENTENCES * 2)]
    with LLM(folder) as wanted, LLM(path) as found:
        assert found.architecture.max_positions == wanted.architecture.max_positions
        torch.testing.assert_close(found.embed(texts), wanted.embed(texts), rtol=0, atol=1e-6)


def test_a_gguf_encoder_with_parts_that_are_not_run_is_refused(tmp_path: Path) -> None:
    model, _ = make_folder(tmp_path, "bert", pooling_mode_mean_tokens=True)
    path = tmp_path / "model.gguf"
    write_gguf(model, path, as_bert_gguf(tmp_path), 1, **{"attention.causal": True})
    check_refused(lambda: LLM(path), r"model\.gguf: bert with a mask is not supported", UnsupportedModelError)


# Heads of labels


LABELS = ("bad", "so-so", "good")
NAMES = ("bert", "electra", "distilbert", "roberta", "xlm-roberta", "nomic", "modernbert", "modernbert-biased")
QUERY, DOCUMENTS = SENTENCES[0], [*SENTENCES[1:6], "", SENTENCES[1]]
TEXTS = [*SENTENCES[:4], "", " ".join(SENTENCES * 3)]
PAIRS = [(QUERY, each) for each in DOCUMENTS]


def make_head_folder(folder: Path, name: str, labels: tuple[str, ...] = LABELS, **settings: Any) -> tuple[Any, Any]:
    """Save a classifier with a tokenizer, and return the model and the tokenizer of `transformers`."""
    tokenizer = make_xlmr_folder(folder) if "roberta" in name else make_bert_folder(folder)
    named = dict(enumerate(labels))
    model = make_encoder(BY_NAME[name], folder, vocab_size=len(tokenizer) + 1, id2label=named, **settings)
    return model, tokenizer


@torch.inference_mode()
def logits_of(name: str, model: Any, tokenizer: Any, texts: list[Any]) -> torch.Tensor:
    inputs = ("input_ids", "token_type_ids") if name in ("bert", "electra", "nomic") else ("input_ids",)
    encoded = [tokenizer([text]) for text in texts]  # as a list, because an empty second argument would be ignored
    given = [{key: torch.tensor(each[key]) for key in inputs} for each in encoded]
    return torch.cat([model(**each).logits for each in given]).double()


def scores_of(llm: LLM, documents: list[str] = DOCUMENTS) -> list[float]:
    return [each.score for each in sorted(llm.rerank(QUERY, documents), key=lambda each: each.index)]


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("name", NAMES)
def test_labels_of_texts_and_pairs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokenizer = make_head_folder(tmp_path, name)
    given = [*TEXTS, *PAIRS]
    expected = logits_of(name, model, tokenizer, given).softmax(-1)
    with LLM(tmp_path) as llm:
        torch.testing.assert_close(values_of(llm.classify(given), LABELS), expected, rtol=0, atol=1e-5)
        assert llm.host.facts.heads.reranker is None
    assert expected.std(0).min() > 0.003


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "nomic", "modernbert-biased"])
def test_scores_of_one_label_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokenizer = make_head_folder(tmp_path, name, ("score",))
    pairs = [*PAIRS, *((document, QUERY) for document in DOCUMENTS)]  # their second texts begin at different places
    expected = logits_of(name, model, tokenizer, pairs)[:, 0].sigmoid().tolist()
    with LLM(tmp_path) as llm:
        assert scores_of(llm) == pytest.approx(expected[: len(PAIRS)], abs=1e-5)
        assert [each.probability for each in llm.classify(pairs)] == pytest.approx(expected, abs=1e-5)
    assert torch.tensor(expected[:5]).std() > 0.005


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("kind", ["cls, gelu", "mean, gelu_new", "cls, relu", "mean, silu", "cls, tanh"])
def test_modernbert_pools_as_its_config_says(kind: str, tmp_path: Path) -> None:
    pooling, activation = kind.split(", ")
    own = {"classifier_pooling": pooling, "classifier_activation": activation, "classifier_bias": pooling == "cls"}
    model, tokenizer = make_head_folder(tmp_path, "modernbert", **own)
    expected = logits_of("modernbert", model, tokenizer, TEXTS).softmax(-1)
    with LLM(tmp_path) as llm:
        torch.testing.assert_close(values_of(llm.classify(TEXTS), LABELS), expected, rtol=0, atol=1e-5)


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
    model, tokenizer = make_head_folder(tmp_path, "bert", ("score",))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    expected = function(logits_of("bert", model, tokenizer, PAIRS)[:, 0]).tolist()
    with LLM(tmp_path) as llm:
        assert scores_of(llm) == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("ranker")
    make_head_folder(folder, "bert", ("score",))
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
    first = f"query has .* tokens .* holds {CONTEXT}: only the second text is cut"
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
    model, _ = make_head_folder(folder, name, labels)
    metadata = (as_xlmr_gguf if name == "xlm-roberta" else as_bert_gguf)(folder)
    write_gguf(model, path, metadata, 4)
    with LLM(folder) as wanted, LLM(path) as found:
        for texts in (TEXTS, PAIRS):
            for one, other in zip(wanted.classify(texts), found.classify(texts), strict=True):
                assert (other.labels, other.probabilities) == (one.labels, pytest.approx(one.probabilities, abs=1e-6))
        assert len(labels) > 1 or scores_of(found) == pytest.approx(scores_of(wanted), abs=1e-6)


def test_a_gguf_file_of_bert_lacks_a_layer_of_the_head(tmp_path: Path) -> None:
    model, _ = make_head_folder(tmp_path, "bert", ("score",))
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
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(
    name: str, lost: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    make_head_folder(tmp_path, name)
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
    make_head_folder(tmp_path, "bert", ("score",))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][0] = torch.nan
    save_file(tensors, path)
    with pytest.raises(ModelError, match=problem), LLM(tmp_path) as llm:
        llm.rerank(QUERY, DOCUMENTS)


@cases("labels use", ((), "embeds texts"), (("score",), "ranks documents"), (LABELS, "labels texts"))
def test_explain_says_what_an_encoder_is_for(labels: tuple[str, ...], use: str, tmp_path: Path) -> None:
    make_head_folder(tmp_path, "bert", labels) if labels else make_folder(tmp_path, "bert")
    shown = "\n".join(lines(explain(tmp_path)))
    told = f"an encoder: it {use}, and generates no text", "no mask", "1000 tokens"
    assert [each in shown for each in told] == [True, True, False]


def test_other_calls_continue_between_the_heads_of_two_texts(ranker: LLM) -> None:
    host = ranker.host
    task = score_pairs(host, PAIRS)

    def counted(work: Work[list[Any]]) -> Work[int]:
        num_turns = 0
        for gives_way in work:
            num_turns += bool(gives_way)
            yield gives_way
        return num_turns

    assert host.loop.call(counted(task.work(task.prepare(lambda: None)))).get() > len(PAIRS)
