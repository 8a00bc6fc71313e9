"""Models that were made for embeddings, decoders with and without a mask: their prompts, dense layers, and vectors."""

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoTokenizer

from byte_tokenizer import EOS
from cases import cases
from converted import convert
from embedding_model import CONTEXT, PROMPTS, make_embedding_model, write_dense, write_modules
from encoder_models import BY_NAME, make_encoder, states_of
from encoder_tokenizers import SENTENCES, as_xlmr_gguf, make_xlmr_folder
from infer import LLM, InvalidRequestError, ModelError, Tokenizer
from infer.cli.commands.explain_command import lines
from infer.errors import TruncationWarning
from infer.files.heads.sentence_modules import DEFAULT_KEY, NAMES_KEY, TEXTS_KEY, prompts_from_gguf
from infer.models.catalog.explanation import explain
from refusals import check_refused
from served import Served, serving

TEXTS = ["hello", "", "once upon a time " * 9, "hello"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding")
    make_embedding_model(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, kv_type="f32") as llm:
        yield llm


@torch.inference_mode()
def vectors_of(folder: Path, texts: list[str]) -> Tensor:
    """Return the states of the last tokens by `transformers`."""
    from transformers import AutoModel

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = [torch.tensor([tokenizer(text).input_ids]) for text in texts]
    return torch.cat([model(each).last_hidden_state[:, -1] for each in ids])


@torch.inference_mode()
def through(folder: Path, places: Sequence[int], states: Tensor) -> Tensor:
    """Return the results of torch's modules for pooled states."""
    for place in places:
        tensors = load_file(folder / f"{place}_Dense" / "model.safetensors")
        states = nn.functional.linear(states, tensors["linear.weight"], tensors.get("linear.bias"))
        states = states.tanh() if "linear.bias" in tensors else states
    return states


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize(("size", "is_normalized"), [(40, True), (96, False), (64, True), (64, False)])
def test_dense_layers_follow_the_pooling_in_their_order(tmp_path: Path, is_normalized: bool, size: int) -> None:
    """The smallest model has no dense layers, and vectors of its hidden size."""
    dense = [] if size == 64 else [(96, True, "Tanh"), (size, False, "Identity")]
    make_embedding_model(tmp_path, dense=dense, is_normalized=is_normalized)
    expected = through(tmp_path, range(2, 2 + len(dense)), vectors_of(tmp_path, TEXTS))
    with LLM(tmp_path, kv_type="f32") as llm, serving(llm) as served:
        found = llm.embed(TEXTS)
        assert torch.allclose(found, normalize(expected) if is_normalized else expected, atol=1e-4)
        assert torch.equal(found, torch.cat([llm.embed([text]) for text in TEXTS]))
        assert torch.equal(llm.embed(TEXTS, normalize=is_normalized), found)
        assert torch.allclose(llm.embed(TEXTS, normalize=True), normalize(expected), atol=1e-4)
        assert torch.allclose(llm.embed(TEXTS, normalize=False), expected, atol=1e-4)
        with pytest.raises(InvalidRequestError, match=f"dimensions must be a whole number in .1, {size}., got 97"):
            llm.embed(TEXTS, dimensions=97)
        assert llm.embed([]).shape == (0, size)
        answer = served.client.post("/v1/embeddings", json={"input": TEXTS[0]}).json()
        assert torch.equal(torch.tensor([answer["data"][0]["embedding"]]), found[:1])


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("mode", ["cls", "mean", "weightedmean"])
def test_tokens_of_a_prompt_are_not_pooled_if_the_files_say_so(tmp_path: Path, mode: str) -> None:
    pooling = {"pooling_mode": mode, "include_prompt": False}
    model = make_embedding_model(tmp_path, pooling=pooling, is_normalized=False)
    prompt = PROMPTS["query"]
    with LLM(tmp_path, kv_type="f32") as llm:
        found = llm.embed(TEXTS, prompt_name="query")
        assert torch.equal(llm.embed([llm.tokenizer.encode("hello")]), llm.embed(["hello"]))
        for text, vector in zip(TEXTS, found, strict=True):
            with torch.inference_mode():
                states = model(torch.tensor([llm.tokenizer.encode(prompt + text)])).last_hidden_state[0]
            own = states[len(prompt) :]
            weights = torch.arange(len(prompt), len(states)) + 1.0 if mode == "weightedmean" else torch.ones(len(own))
            weights = torch.eye(len(own))[0] if mode == "cls" else weights
            assert torch.allclose(vector, weights @ own / weights.sum(), atol=1e-4)


def test_a_prompt_precedes_each_text(llm: LLM, folder: Path) -> None:
    assert llm.prompt_names == ("query", "document")
    expected = normalize(vectors_of(folder, [PROMPTS["query"] + text for text in TEXTS]))
    found = llm.embed(TEXTS, prompt_name="query")
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.equal(llm.embed(TEXTS, prompt_name="document"), llm.embed(TEXTS))
    assert torch.equal(found[2], llm.embed([TEXTS[2]], prompt_name="query")[0])


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_texts_are_read_in_lower_case_if_the_files_say_so(kind: str, tmp_path: Path, llm: LLM, folder: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / f"sentence_{kind}_config.json").write_text('{"do_lower_case": true}')
    assert Tokenizer.from_folder(tmp_path).encode("Übung A<|im_end|>") == llm.tokenizer.encode("übung a<|im_end|>")


def test_the_prompt_that_is_the_default_needs_no_name(tmp_path: Path, llm: LLM) -> None:
    make_embedding_model(tmp_path, default_prompt_name="query")
    with LLM(tmp_path, kv_type="f32") as other:
        assert torch.equal(other.embed(TEXTS), llm.embed(TEXTS, prompt_name="query"))
        ids = [llm.tokenizer.encode("hello")]
        assert torch.equal(other.embed(ids), llm.embed(ids))  # a prompt can only precede a text


def test_dimensions_cut_a_vector_and_normalise_it_again(llm: LLM) -> None:
    whole = llm.embed(TEXTS, normalize=False)
    for size in (1, 32, 64):
        assert torch.allclose(llm.embed(TEXTS, dimensions=size), normalize(whole[:, :size]), atol=1e-6)
        assert torch.equal(llm.embed(TEXTS, dimensions=size, normalize=False), whole[:, :size])


def test_the_files_may_name_the_number_of_dimensions(tmp_path: Path, llm: LLM) -> None:
    make_embedding_model(tmp_path, truncate_dim=24)
    with LLM(tmp_path, kv_type="f32") as other, serving(other) as served:
        assert torch.equal(other.embed(TEXTS), llm.embed(TEXTS, dimensions=24))
        assert torch.equal(other.embed(TEXTS, dimensions=64), llm.embed(TEXTS))
        assert len(served.ask("/v1/embeddings", input="hello")["data"][0]["embedding"]) == 24


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": False, "add_eos_token": True}])
def test_the_end_of_a_text_is_the_file_s_unless_a_flag_says_otherwise(tmp_path: Path, flags: dict[str, bool]) -> None:
    make_embedding_model(tmp_path, flags=flags)
    with LLM(tmp_path) as llm:
        assert llm.tokenizer.encode("ab")[2:] == [EOS + 1 if "add_eos_token" in flags else EOS]
        assert llm.tokenizer.encode("ab", parse_special=False) == llm.tokenizer.encode("ab")


def test_long_texts_are_cut_before_their_end_token(llm: LLM) -> None:
    texts = ["x" * CONTEXT, "short", "y" * 1000]
    with pytest.warns(TruncationWarning, match=f"2 of 3 texts were cut to {CONTEXT} tokens"):
        found = llm.embed(texts, truncate=True)
    cut = ["x" * (CONTEXT - 1), "short", "y" * (CONTEXT - 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(found, llm.embed(cut, truncate=True))
    with pytest.warns(TruncationWarning):
        (of_ids,) = llm.embed([[7] * 300], truncate=True)
    assert torch.equal(of_ids, llm.embed([[7] * CONTEXT])[0])


@cases(
    "texts options message",
    (["a"], {"prompt_name": "passage"}, "prompt_name must be one of 'query', 'document', got 'passage'"),
    ([[1]], {"prompt_name": "query"}, "text 0: prompt_name needs texts"),
    ("hello", {}, "prompts must be a list"),
    (["a"], {"pooling": "sum"}, "pooling must be 'mean' or 'last' or 'cls' or .*, got 'sum'"),
    (["a", [1, 10_000]], {}, "text 1: the prompt: token ids must be from 0"),
    (["a"], {"dimensions": 0}, "dimensions must be a whole number in .1, 64., got 0"),
    (["a", "x" * CONTEXT], {}, f"text 1: the text has {CONTEXT + 1} tokens and the context holds {CONTEXT}"),
    (["x" * (CONTEXT - 1)], {"prompt_name": "query"}, "text 0: the text has 280 tokens"),
)
def test_texts_that_cannot_be_embedded_give_one_line(llm: LLM, texts: Any, options: Any, message: str) -> None:
    check_refused(lambda: llm.embed(texts, **options), message)


@cases(
    "names texts default message",
    (["query"], ["a", "b"], None, "key 'infer.prompts.texts': expected 1 texts, one per name, got 2"),
    (["query"], "a", None, "key 'infer.prompts.texts': expected a list of texts"),
    ([1], ["a"], None, "key 'infer.prompts.names': expected a list of texts"),
    (["query"], ["a"], "text", "key 'infer.prompts.default': 'text' is not the name of a prompt"),
)
def test_broken_prompts_of_a_gguf_file_name_the_key(names: Any, texts: Any, default: Any, message: str) -> None:
    metadata = {NAMES_KEY: names, TEXTS_KEY: texts, DEFAULT_KEY: default}
    check_refused(lambda: prompts_from_gguf(Path("model.gguf"), metadata), re.escape(message), ModelError)


@pytest.mark.slow(cases=1)
@cases(
    "config message",
    ({"prompts": ["query"]}, "key 'prompts': expected texts by name"),
    ({"prompts": {"query": 5}}, "key 'prompts': expected texts by name"),
    ({"prompts": {}, "default_prompt_name": "query"}, "'query' is not the name of a prompt"),
    ({"truncate_dim": 0}, "key 'truncate_dim': expected a whole number from 1, got 0"),
    ({"truncate_dim": True}, "key 'truncate_dim': expected a whole number from 1, got True"),
    ("{", "JSON"),
)
def test_broken_prompts_are_an_error_of_the_model(tmp_path: Path, config: Any, message: str) -> None:
    make_embedding_model(tmp_path)
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config_sentence_transformers.json").write_text(text)
    check_refused(lambda: LLM(tmp_path), message, ModelError)


def test_a_server_takes_the_same_options_and_says_what_it_cut(served: Served, llm: LLM) -> None:
    body = {"input": ["hello", "x" * 999], "prompt_name": "query", "dimensions": 8, "normalize": False}
    refused = served.client.post("/v1/embeddings", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = served.client.post("/v1/embeddings", json=body | {"truncate": True}).json()
    with pytest.warns(TruncationWarning):
        expected = llm.embed(["hello", "x" * 999], prompt_name="query", dimensions=8, normalize=False, truncate=True)
    assert torch.equal(torch.tensor([each["embedding"] for each in answer["data"]]), expected)
    assert answer["infer"]["warnings"] == [f"1 of 2 texts were cut to {CONTEXT} tokens"]
    assert answer["usage"]["prompt_tokens"] == len(PROMPTS["query"] + "hello") + 1 + CONTEXT
    unknown = served.client.post("/v1/embeddings", json={"input": "a", "prompt_name": "passage"})
    assert unknown.json()["error"]["param"] == "prompt_name"


# Decoders without a mask


SENTENCE_TEXTS = [*SENTENCES, "", " ".join(SENTENCES * 3)]


def make_folder(folder: Path, name: str) -> tuple[Any, Any]:
    """Save a model with EmbeddingGemma's modules. Return the model and the tokenizer of `transformers`."""
    tokenizer = make_xlmr_folder(folder)
    model = make_encoder(BY_NAME[name], folder, vocab_size=len(tokenizer) + 1)  # GGUF files have one more token
    write_modules(folder, ["Transformer", "Pooling", "Dense", "Dense", "Normalize"])
    pooling = {"word_embedding_dimension": 96, "pooling_mode_mean_tokens": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    write_dense(folder / "2_Dense", 96, 160, False, "Identity")
    write_dense(folder / "3_Dense", 160, 96, False, "Identity")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return model, tokenizer


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Any, Path]]:
    folder = tmp_path_factory.mktemp("gemma")
    model, tokenizer = make_folder(folder, "embedding-gemma")
    with LLM(folder) as llm:
        yield llm, model, tokenizer, folder


@torch.inference_mode()
def expected(model: Any, tokenizer: Any, folder: Path, texts: list[str]) -> Tensor:
    vectors = torch.stack([states_of(model, tokenizer(text)["input_ids"]).mean(0) for text in texts])
    return normalize(through(folder, (2, 3), vectors))


def test_vectors_are_those_of_transformers_and_of_the_dense_layers(gemma: tuple[LLM, Any, Any, Path]) -> None:
    llm, *made = gemma
    for name, prompt in ((None, ""), ("query", PROMPTS["query"])):
        wanted = expected(*made, [prompt + text for text in SENTENCE_TEXTS])
        torch.testing.assert_close(llm.embed(SENTENCE_TEXTS, prompt_name=name), wanted, rtol=0, atol=1e-5)


def test_explain_names_the_task_of_a_decoder_without_a_mask(gemma: tuple[LLM, Any, Any, Path]) -> None:
    shown = "\n".join(lines(explain(gemma[3])))
    for told in ("an encoder: it embeds texts, and generates no text", "no mask", "window 21"):
        assert told in shown


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("name", ["embedding-gemma", "qwen2", "llama"])
def test_a_gguf_file_gives_the_vectors_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    make_folder(folder, name)
    if name == "llama":  # under its own name, it has the architecture llama-embed
        config = json.loads((folder / "config.json").read_text())
        del config["is_causal"]
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama_bidirec"}))
    with LLM(folder) as wanted, LLM(convert(folder, tmp_path / "model.gguf", as_xlmr_gguf(folder))) as found:
        windows = [[each.window for each in llm.architecture.attention] for llm in (found, wanted)]
        assert windows[0] == windows[1]
        torch.testing.assert_close(found.embed(SENTENCE_TEXTS), wanted.embed(SENTENCE_TEXTS), rtol=0, atol=1e-6)
