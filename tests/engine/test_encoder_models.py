"""Encoders: vectors as `transformers` computes them, and one line of refusal for calls that generate."""

import base64
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converted_encoders import write_gguf
from encoder_models import BY_NAME, CONTEXT, make_encoder, states_of, write_modules
from encoder_tokenizers import SENTENCES, as_bert_gguf, as_xlmr_gguf, make_bert_folder, make_xlmr_folder
from infer import LLM
from infer.cli.model_commands.explain_command import lines
from infer.errors import (
    ContextLengthError,
    ModelFormatError,
    TruncationWarning,
    UnsupportedModelError,
)
from infer.models.catalog.explanation import explain
from refusals import check_refused
from served import serving


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
    many = llm.embed([texts[index % len(texts)] for index in range(100)])
    assert torch.equal(many[: len(texts)], together)


def test_calls_that_generate_are_refused_in_one_line(bert: tuple[LLM, Any, Any]) -> None:
    llm, chat = bert[0], [{"role": "user", "content": "x"}]
    calls = [lambda: llm.generate("x"), lambda: llm.generate(["x", "y"]), lambda: next(llm.stream("x")), llm.trim]
    calls += [
        lambda: llm.chat(chat),
        llm.session,
        lambda: llm.logits([1, 2]),
        lambda: llm.prompt_logprobs("x"),
        llm.trim,
    ]
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
@pytest.mark.parametrize(
    ("file", "key", "length"),
    [("sentence_bert", "max_seq_length", 9), *(("tokenizer", "model_max_length", each) for each in (9, 10**30))],
)
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


def test_an_eviction_policy_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "bert")
    message = "eviction_policy sliding needs a model that generates"
    check_refused(lambda: LLM(tmp_path, eviction_policy="sliding"), message)


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


def test_explain_says_what_an_encoder_is_for(tmp_path: Path) -> None:
    make_folder(tmp_path, "bert")
    shown = "\n".join(lines(explain(tmp_path)))
    told = "an encoder: it embeds texts, and generates no text", "no mask", "1000 tokens"
    assert [each in shown for each in told] == [True, True, False]


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
