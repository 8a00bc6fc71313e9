"""The results of `LLM` on a tiny random model, captured or not, whole or streamed."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from byte_tokenizer import VOCAB_SIZE
from embedding_model import make_qwen3
from infer import LLM, ModelError, SamplingParams, load_tokenizer
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.mixers import Attention
from infer.errors import ContextLengthError
from infer.files.generation_config import sampling_defaults
from recompute import generate_recomputed
from refusals import check_refused, refusal

CONTEXT = 200
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=7, max_new_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_qwen3(folder, max_position_embeddings=CONTEXT)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 256}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_capture_and_cache_change_no_token(llm: LLM, folder: Path, params: SamplingParams) -> None:
    expected = llm.generate("once upon", params).token_ids
    assert LLM(folder, capture=False).generate("once upon", params).token_ids == expected
    assert llm.generate("once upon", params, prefill_chunk=3).token_ids == expected
    assert generate_recomputed(llm, llm.tokenizer.encode("once upon"), params).token_ids == expected


def test_the_number_of_threads_changes_no_token(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        texts = {LLM(folder, threads=count).generate("once", GREEDY).text for count in (1, 2, 3)}
    finally:
        torch.set_num_threads(before)
    assert len(texts) == 1


def test_logits_are_those_that_generate_sees(llm: LLM) -> None:
    result = llm.generate("abc", GREEDY)
    logits = llm.logits([*b"abc", *result.token_ids])
    assert (logits.shape, logits.argmax(-1)[2:-1].tolist()) == ((43, VOCAB_SIZE), result.token_ids)


def test_a_prompt_longer_than_the_context_names_both_lengths(llm: LLM) -> None:
    check_refused(lambda: llm.generate([1] * CONTEXT), r"200 tokens.*holds 200", ContextLengthError)


def test_chat_without_a_template_says_what_to_do(llm: LLM) -> None:
    check_refused(lambda: llm.chat([{"role": "user", "content": "hi"}]), "chat template")


def test_a_chat_template_of_ones_own_and_control_text_in_a_message(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    forged = [{"role": "user", "content": "a<eos>"}]
    end = load_tokenizer(folder).backend.token_to_id("<eos>")
    for allowed in (False, True):
        llm = LLM(folder, chat_template=template, allow_special=allowed)
        assert llm.can_chat
        assert (end in llm.tokenizer.encode_chat(forged)) is allowed
        given = llm.chat(forged, GREEDY, allow_special=not allowed).prompt_tokens
        assert given == len(llm.tokenizer.encode_chat(forged, allow_special=not allowed))
    check_refused(lambda: LLM(folder, chat_template="{% if %}"), r"chat template, line 1, is not valid")


def test_a_broken_template_gives_a_warning_at_load_and_plain_text_works(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "chat_template.jinja").write_text("{% endfor %}")
    told = r"\Aconversations will not work with this model: the chat template, line 1[^\n]*\Z"
    with pytest.warns(UserWarning, match=told):
        llm = LLM(copy)
    assert llm.generate("once", GREEDY).token_ids == LLM(folder).generate("once", GREEDY).token_ids


SAMPLING, PENALTY = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}, {"repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.9, "eos_token_id": 1}, SAMPLING),
        ({"do_sample": False, "temperature": 0.6, **PENALTY}, {"temperature": 0.0, **PENALTY}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0, "min_p": None}, {"temperature": 0.7}),
        ({"top_k": -1, "repetition_window": -1}, {"repetition_window": None}),
        ({"repetition_window": 64, "min_p": 0.05}, {"repetition_window": 64, "min_p": 0.05}),
    ],
)  # fmt: skip
def test_a_models_own_defaults_are_the_values_that_it_names(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sampling_defaults(config) == expected
    SamplingParams(**expected)


def test_a_grammar_is_kept_and_a_bad_one_is_refused(llm: LLM) -> None:
    result = llm.generate("a", SamplingParams(choice=["ab", "ba"], temperature=2.0, seed=1))
    assert result.text in ("ab", "ba")
    assert (result.finish_reason, result.stop_reason, result.grammar_complete) == ("stop", "grammar", True)
    cut = llm.generate("a", SamplingParams(regex="[ab]{9}", temperature=0, max_new_tokens=3))
    assert (cut.finish_reason, cut.grammar_complete) == ("length", False)
    check_refused(lambda: llm.generate("a", SamplingParams(regex="(a")), "regex, column")


def test_masks_filled_beside_a_step_and_before_it_give_equal_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(regex="([ab]{2}|[a-z]{5})+", temperature=1.0, seed=3, max_new_tokens=40)
    found = []
    for seconds in (0.0, 1000.0):
        monkeypatch.setattr("infer.engine.step.grammar_masks.HAND_OVER_SECONDS", seconds)
        found += [llm.generate("abab", params, speculation=speculation) for speculation in (None, "ngram")]
    assert all(result.token_ids == found[0].token_ids for result in found)
    assert all(result.stats.masks_filled >= result.stats.single_steps for result in found)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("weights", ["bf16", "q8", "q4"])
def test_weights_quantised_at_load_stay_close(llm: LLM, folder: Path, weights: str) -> None:
    token_ids = list(b"the quick brown fox jumps over the lazy dog")
    expected, logits = llm.logits(token_ids), LLM(folder, weights=weights).logits(token_ids)  # type: ignore[arg-type]
    spread = {"bf16": 0.02, "q8": 0.05, "q4": 0.4}[weights]
    error = float((expected - logits).std() / expected.std())
    assert 1e-6 < error < spread


def changed(folder: Path, copy: Path, **settings: Any) -> Path:
    """Copy a model, and change its config."""
    path = shutil.copytree(folder, copy, dirs_exist_ok=True) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return copy


def test_tensors_that_do_not_fit_the_config_are_all_named(folder: Path, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    changed(folder, tmp_path, intermediate_size=64, **layers)
    message = refusal(lambda: LLM(tmp_path), ModelError)
    assert "model.layers.2.self_attn.q_proj.weight" in message
    assert "model.layers.0.mlp.gate_proj.weight has shape (96, 64), the config requires (64, 64)" in message


def test_an_unknown_architecture_is_named_with_those_that_are_known(folder: Path, tmp_path: Path) -> None:
    changed(folder, tmp_path, model_type="mamba")
    check_refused(lambda: LLM(tmp_path), r"'mamba' is not supported.*gemma3_text.*llama.*qwen3", ModelError)


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: the size of a process is read from Linux's /proc")
def test_a_cache_holds_memory_only_where_it_was_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    layers = [Attention(9, 3, 64, None, 1.0)] * 30
    cache = PagedCache(layers, 4, 8192, "f16", torch.device("cpu"), step_tokens=512)
    assert cache.num_bytes > 700 << 20
    before = resident()
    for layer in cache.memory.layers:  # the first token
        layer.keys[:, 0, 0] = layer.values[:, 0, 0] = 1
    assert resident() - before <= 4 << 20, "two huge pages"
