"""Claims about `infer explain`: it agrees with the loaded model, and does not load torch."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import refused, run
from gguf_files import write_model
from infer import LLM
from infer.cli.commands.explain_command import ranges
from infer.cli.model_loading import q8_context
from infer.cli.terminal import q8_remark
from infer.compute.kvcache.groups import q8_pays_from, read_bytes
from infer.compute.operands.architecture import Layer
from infer.compute.operands.feed_forwards import Dense
from infer.compute.operands.mixers import Attention, Rope
from infer.models.catalog.explanation import _kv_types, explain, group_layers
from infer.models.from_checkpoint import load_tokenizer
from tiny import BY_NAME, Tiny, make_tiny
from watched import python_command

ATTENTION = Attention(4, 2, 16, Rope(10_000.0, 16), 0.25)
LAYER = Layer(ATTENTION, Dense(64))
TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]},
    "added_tokens": [
        {"id": 2 + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True} for i, text in enumerate(("<s>", "</s>", "<|im_end|>"))
    ],
}  # fmt: skip


def make_folder(tiny: Tiny, folder: Path) -> Path:
    make_tiny(tiny, folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [3, 4]}))
    return folder


def lines_of(folder: Path) -> dict[str, str]:
    lines = (line.split("  ", 1) for line in run("explain", folder).out.splitlines())
    return {name: words.strip() for name, words in lines}


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_a_summary_of_a_gguf_tokenizer_is_the_tokenizers(name: str) -> None:
    tokenizer, summary = load_tokenizer(name), explain(name).tokenizer
    assert summary.ends == {i: tokenizer.backend.id_to_token(i) for i in tokenizer.eos_token_ids}
    assert summary.num_special_tokens == len(tokenizer.special_token_ids)
    assert (summary.vocab_size, summary.adds_bos) == (tokenizer.vocab_size, tokenizer.adds_bos)
    assert summary.bos == tokenizer.backend.id_to_token(tokenizer.bos_token_id or 0)
    assert summary.templates == tokenizer.chat_template_names


@pytest.mark.slow
def test_a_folder_is_explained_without_torch(tmp_path: Path) -> None:
    folder = make_folder(BY_NAME["gemma3"], tmp_path)
    code = "import sys; from infer.cli import main; status = main(); print('torch' in sys.modules); sys.exit(status)"
    done = subprocess.run(
        python_command(code, "explain", str(folder), "--json"), capture_output=True, text=True, check=True
    )
    text, _, has_torch = done.stdout.strip().rpartition("\n")
    assert has_torch == "False"
    found = json.loads(text)
    assert found == json.loads(json.dumps(explain(folder).to_json()))
    assert [group["layers"] for group in found["layer_groups"]] == [[0, 1, 2, 3, 4, 6], [5]]
    assert [group["values"]["window"] for group in found["layer_groups"]] == [8, None]
    assert (found["common"]["head_dim"], found["tokenizer"]["ends"]) == (32, {"3": "</s>", "4": "<|im_end|>"})
    assert found["tokenizer"]["pre_tokenizer"] == "Digits, ByteLevel"
    assert (found["tokenizer"]["templates"], found["sampling_defaults"]) == (["default"], {"temperature": 0.5})
    assert found["file_bytes"] == (folder / "model.safetensors").stat().st_size
    sizes = {size["kv_type"]: size for size in found["cache"]}
    assert sizes["f32"]["bytes_per_1000_tokens"] == 1000 * 7 * 2 * 2 * 32 * 4
    assert sizes["f16"]["bytes_per_1000_tokens_beyond_windows"] == 1000 * 2 * 2 * 32 * 2


def test_lines_name_each_difference(tmp_path: Path) -> None:
    lines = lines_of(make_folder(BY_NAME["gemma3"], tmp_path))
    assert lines["layers 0–4, 6"] == "rope of 32 at 10,000, window 8"
    assert lines["layer 5"] == "rope of 32 at 1,000,000, no window"
    assert lines["every layer"].startswith("attention, heads 4, kv heads 2, head size 32, ")
    assert ", dense, mlp 96, " in lines["every layer"]
    assert lines["sampling"] == "temperature 0.5"


def test_lines_name_convolutions_and_their_state(tmp_path: Path) -> None:
    folder = make_folder(BY_NAME["lfm2"], tmp_path)
    lines = lines_of(folder)
    assert lines["layers 0, 2"].startswith("short conv, num channels 64, num taps 3")
    page_bytes = 2 * 64 * 64 * 4
    assert explain(folder).state_bytes == page_bytes
    assert lines["state"].startswith(f"{5 * page_bytes / 1e6:.1f} MB for a sequence, ")


def test_layers_are_grouped_by_what_differs() -> None:
    others = [replace(ATTENTION, rope=None, window=8, has_qkv_bias=has_bias) for has_bias in (False, True)]
    windowed, biased = (replace(LAYER, mixer=other) for other in others)
    common, groups = group_layers([LAYER, windowed, LAYER, biased])
    assert common["head_dim"] == 16
    assert common.keys().isdisjoint({"rope", "window", "has_qkv_bias"})
    assert [group.layers for group in groups] == [(0, 2), (1,), (3,)]
    assert groups[0].values == {"rope": {"theta": 10_000.0, "dim": 16}, "window": None, "has_qkv_bias": False}
    assert group_layers([LAYER, LAYER])[1][0].values == {}
    _, (_, bare) = group_layers([LAYER, replace(LAYER, feed_forward=None)])
    assert bare.values == {"feed_forward": None}


def test_only_types_that_a_cache_can_have_are_listed() -> None:
    for head_dim, is_listed in ((32, True), (48, False)):
        found = list(_kv_types([replace(ATTENTION, head_dim=size) for size in (32, head_dim)]))
        assert ("q8" in found) is ("q4" in found) is is_listed
        assert {"f32", "f16", "bf16"} <= set(found)


def test_q8_is_recommended_from_the_context_at_which_a_step_reads_a_tenth_less() -> None:
    layer = replace(ATTENTION, head_dim=32)  # 256 bytes of keys and values per token in f16, 136 in q8

    def found(weights: int, *, kv_type: str = "f16", most: int = 4096, mixer: Attention = layer) -> int | None:
        return q8_pays_from([mixer], kv_type, most, lambda kind, context: weights + read_bytes(mixer, kind, context))

    assert found(1) == 512
    assert found(2048 * 1064) == 2048  # 106.4 = 256 − 1.1 × 136, times ten
    assert found(2048 * 1064 + 1000) == found(4096 * 1064) == 4096
    assert found(4096 * 1064 + 1000) is None
    assert found(2048 * 1064, most=2047) is None
    assert found(1, kv_type="q4") is None
    assert found(1, mixer=replace(layer, head_dim=48)) is None
    assert found(512 * 1064, mixer=replace(layer, window=500)) is None


def test_explain_estimate_and_a_loaded_model_recommend_q8_from_one_context() -> None:
    report = json.loads(run("estimate", "smollm2", "--json").out)
    with LLM("smollm2") as llm, LLM("smollm2", kv_type="q8") as other:
        assert q8_context(llm) == explain("smollm2").q8_pays_from == report["q8_pays_from"] == 1024
        assert q8_context(other) is None
    assert json.loads(run("estimate", "smollm2", "--json", "--kv-type", "q8").out)["q8_pays_from"] is None
    evicting = ("--eviction-policy", "sliding", "--eviction-window", "512")
    assert json.loads(run("estimate", "smollm2", "--json", *evicting).out)["q8_pays_from"] is None
    assert q8_remark(1024) in " ".join(run("explain", "smollm2").out.split())


def test_ranges_join_neighbours() -> None:
    assert ranges([0, 1, 2, 4, 6, 7]) == "0–2, 4, 6–7"


def test_a_model_that_does_not_load_is_not_explained(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", tensors={"token_embd.weight": torch.zeros(40, 64).numpy()})
    assert "config and tensors disagree: missing model.norm.weight" in refused("explain", path, status=3)
