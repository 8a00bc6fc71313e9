"""Decoders without a mask: EmbeddingGemma with its dense layers and prompts, from folders and GGUF files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from converted import convert
from embedding_model import PROMPTS, write_dense, write_modules
from encoder_models import BY_NAME, make_encoder, states_of
from encoder_tokenizers import SENTENCES, as_xlmr_gguf, make_xlmr_folder
from infer import LLM
from infer.cli.model_commands.explain_command import lines
from infer.models.catalog.explanation import explain

TEXTS = [*SENTENCES, "", " ".join(SENTENCES * 3)]


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
    for place in (2, 3):
        vectors = vectors @ load_file(folder / f"{place}_Dense" / "model.safetensors")["linear.weight"].T
    return normalize(vectors)


def test_vectors_are_those_of_transformers_and_of_the_dense_layers(gemma: tuple[LLM, Any, Any, Path]) -> None:
    llm, *made = gemma
    for name, prompt in ((None, ""), ("query", PROMPTS["query"])):
        wanted = expected(*made, [prompt + text for text in TEXTS])
        torch.testing.assert_close(llm.embed(TEXTS, prompt_name=name), wanted, rtol=0, atol=1e-5)


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
    path = convert(folder, tmp_path / "model.gguf", as_xlmr_gguf(folder))
    with LLM(folder) as wanted, LLM(path) as found:
        windows = [[each.window for each in llm.architecture.attention] for llm in (found, wanted)]
        assert windows[0] == windows[1]
        torch.testing.assert_close(found.embed(TEXTS), wanted.embed(TEXTS), rtol=0, atol=1e-6)
