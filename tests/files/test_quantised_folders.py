"""Folders that GPTQ, AWQ and other methods quantised, compared with `transformers` on the values they stand for."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from byte_tokenizer import write_byte_tokenizer
from commands import run
from extent import usual_or_all
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.weights import FileWeight, UnreadWeight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.errors import ModelError, ModelFormatError, UnsupportedModelError
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from quantised_folders import METHODS, Method, by_name, is_quantised, save, set_config, write_quantised
from refusals import check_refused, refusal
from steps import load_network, logits_of
from tiny import BY_NAME, Tiny, make_tiny

CPU = torch.device("cpu")
LENGTH = 60
WIDE = LlamaConfig(
    num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=96, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a folder of floats whose matrices have 128 columns or more, and the model of `transformers`."""
    folder = tmp_path_factory.mktemp("floats")
    return folder, make_tiny(Tiny("llama_wide", WIDE), folder)


def logits_of_folder(folder: Path, token_ids: list[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return the logits of our kernels with a cache in float32. dtype: None keeps the matrices as they are loaded."""
    return logits_of(load_network(folder, dtype=dtype), token_ids, CacheSettings(kv_type="f32"))


def values_of(weight: FileWeight, first: int, last: int) -> Tensor:
    rows = weight.rows(first, last)
    return rows.data.float() if rows.data.is_floating_point() else dequantize(rows.data, rows.type)


Written = Callable[[str, Path], dict[str, Tensor]]


@pytest.fixture(scope="module")
def written(llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return a function that writes the folder of a method, and returns the values that all tensors stand for."""

    @cache
    def pack(name: str) -> tuple[Path, dict[str, Tensor]]:
        folder, method = tmp_path_factory.mktemp("packed"), by_name(name)
        return folder, write_quantised(llama[0], folder, method.pack, method.config, method.key)

    def write(name: str, folder: Path) -> dict[str, Tensor]:
        packed, meant = pack(name)
        shutil.copytree(packed, folder, dirs_exist_ok=True)
        return meant

    return write


def rounded(method: Method, name: str, values: Tensor) -> Tensor:
    """Return the values of a tensor as they are loaded."""
    return values.half().float() if method.type == "F16" and is_quantised(name, values) else values


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_quantised_folder_has_the_numbers_of_its_method(method: Method, written: Written, tmp_path: Path) -> None:
    """Blocks have them exactly, and F16 rounds each once. Any rows can be read together."""
    meant = written(method.name, tmp_path)
    tensors = open_checkpoint(tmp_path).tensors
    weights = LazyWeights(tensors)
    for name in (name for name in meant if name.endswith("_proj.weight")):
        info, weight = tensors[name], weights[name]
        num_rows = weight.shape[0]
        assert isinstance(weight, UnreadWeight)
        assert weight.type == info.type == ("F32" if "layers.0.mlp.down" in name else method.type)
        expected = rounded(method, name, meant[name])
        for first, last in ((0, num_rows), (5, 6), (16, num_rows), (3, 45)):
            found = values_of(weight, first, last)
            error = 2**-23 if method.name == "nvfp4-pack-quantized" else 0.0  # error of the factor's reciprocal
            assert torch.allclose(found, expected[first:last], rtol=error, atol=0.0), (name, first, last)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_quantised_folder_gives_the_logits_of_transformers_with_its_numbers(
    method: Method, written: Written, llama: tuple[Path, Any], tmp_path: Path
) -> None:
    """F16 rounds each value once, which the logits show. The kernels add no other error."""
    meant, oracle = written(method.name, tmp_path), llama[1]
    token_ids = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    held = {name: rounded(method, name, values) for name, values in meant.items()}
    found = logits_of_folder(tmp_path, token_ids)
    with torch.inference_mode():
        for numbers, tolerance in ((meant, 1e-3 if method.is_exact else 5e-3), (held, 1e-3)):
            for name, values in numbers.items():
                oracle.get_parameter(name).copy_(values)
            expected = oracle(torch.tensor([token_ids])).logits[0]
            assert (found - expected).abs().max() <= tolerance


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("family", ["phi3", "qwen3_moe", "qwen3_5_gates", "qwen3_next"])
@pytest.mark.parametrize("method", ["gptq zero points", "pack-quantized", "fp8 blocks"])
def test_fused_matrices_and_experts_know_nothing_of_the_format(family: str, method: str, tmp_path: Path) -> None:
    """Rows of q, k, v, gates and experts are taken from quantised matrices as from matrices of floats."""
    tiny, chosen = BY_NAME[family], by_name(method)
    (tmp_path / "floats").mkdir()
    make_tiny(tiny, tmp_path / "floats")
    meant = write_quantised(tmp_path / "floats", tmp_path / "quantised", chosen.pack, chosen.config, chosen.key)
    save(tmp_path / "floats", {name: rounded(chosen, name, values) for name, values in meant.items()})
    assert "F32" in {info.type for info in open_checkpoint(tmp_path / "floats").tensors.values()}
    token_ids = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    found, expected = (logits_of_folder(tmp_path / each, token_ids, torch.float32) for each in ("quantised", "floats"))
    assert (found - expected).abs().max() <= 1e-5


Change = Callable[[dict[str, Tensor], str], Any]
AT = "model.layers.1.self_attn.k_proj"


def write_changed(written: Written, method: str, change: Change, folder: Path) -> None:
    written(method, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, AT)
    save(folder, tensors)


def cut(kind: str, rows: int | None = None, columns: int | None = None) -> Change:
    """Return a change that cuts a tensor to fewer rows or columns."""
    return with_values(kind, lambda tensor: tensor[:rows] if columns is None else tensor[:rows, :columns])


def without(kind: str) -> Change:
    return lambda tensors, at: tensors.pop(f"{at}.{kind}")


def with_floats(tensors: dict[str, Tensor], at: str) -> None:
    tensors[f"{at}.weight"] = torch.zeros(4, 4)


def codes_as_floats(tensors: dict[str, Tensor], at: str) -> None:
    tensors[f"{at}.weight"] = tensors.pop(f"{at}.qweight").float()


def with_values(kind: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors, at: tensors.update({f"{at}.{kind}": make(tensors[f"{at}.{kind}"])})


MISFITS = [
    ("gptq symmetric", without("scales"), r"k_proj\.qweight': expected a tensor scales next to it"),
    ("gptq symmetric", without("qzeros"), r"k_proj\.qweight': expected a tensor qzeros next to it"),
    ("gptq symmetric", without("qweight"), r"expected a tensor of quantised codes next to it, got none"),
    ("gptq zero points", cut("scales", rows=3), r"scales': expected the shape \(4, 64\) for 32 columns per scale"),
    ("gptq zero points", cut("qzeros", columns=4), r"qzeros': expected the shape \(4, 8\) for 4 bits"),
    ("gptq act-order", cut("g_idx", rows=64), r"g_idx': expected the shape \(128,\)"),
    ("gptq act-order", with_values("g_idx", lambda index: index + 1), "expected groups from 0 to 3, got 1 to 4"),
    ("gptq symmetric", with_values("scales", lambda scales: scales.long()), "expected F16 or BF16 or F32, got I64"),
    ("awq", without("scales"), r"k_proj\.qweight': expected a tensor scales next to it"),
    ("awq", with_values("qweight", lambda words: words.flatten()), "expected codes of a matrix, got the shape"),
    ("pack-quantized", without("weight_scale"), r"weight_packed': expected a tensor weight_scale next to it"),
    ("pack-quantized", cut("weight_scale", columns=2), "32 columns of 4 bits, as in config.json, got 64 columns"),
    ("pack-quantized", with_values("weight_shape", lambda shape: shape + 1), "expected 64 rows"),
    ("pack-quantized", with_values("weight_shape", lambda shape: shape - shape), "expected 64 rows"),
    ("fp8 blocks", without("weight_scale_inv"), r"k_proj\.weight': expected a tensor of scales next to it"),
    ("fp8 blocks", cut("weight_scale_inv", columns=3), r"one per block of 64 rows and 32 columns \(1, 4\)"),
    ("int-quantized", without("weight_scale"), "expected a tensor of scales next to it"),
    ("nvfp4-pack-quantized", without("weight_global_scale"), "expected a tensor weight_scale_2 next to it"),
    ("nvfp4-pack-quantized", cut("weight_scale", columns=4), r"the shape \(64, 8\) for 16 columns per scale"),
    ("mlx", without("biases"), "expected a tensor biases next to it"),
    ("gptq symmetric", with_floats, "is the same weight"),
    ("gptq symmetric", codes_as_floats, "expected a tensor of quantised codes next to it, got .*k_proj.weight' of"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "change", "problem"), MISFITS)
def test_tensors_must_fit_together(method: str, change: Change, problem: str, written: Written, tmp_path: Path) -> None:
    write_changed(written, method, change, tmp_path)
    message = refusal(lambda: open_checkpoint(tmp_path), ModelFormatError)
    assert re.search(problem, message)
    assert AT in message


REFUSED_NUMBERS = [
    ("gptq symmetric", with_values("qzeros", lambda words: words + 1), "zero points of 8, because of sym"),
    ("gptq symmetric", with_values("scales", lambda scales: scales * torch.inf), "expected finite scales of at"),
    ("fp8 blocks", with_values("weight_scale_inv", lambda scale: scale * 1e6), "finite values of at most"),
    ("fp8 matrices", with_values("weight", lambda w: (w.float() * torch.nan).to(w.dtype)), "numbers, got NaN"),
    ("modelopt nvfp4", with_values("weight_scale", lambda s: (-s.float()).to(s.dtype)), "got NaN or a negative"),
    ("modelopt nvfp4", with_values("weight_scale_2", lambda each: each * torch.inf), "expected a finite number"),
    ("nvfp4-pack-quantized", with_values("weight_global_scale", torch.zeros_like), "a number that is not 0"),
    ("mlx", with_values("biases", lambda biases: biases * torch.nan), "biases': expected finite biases of at most"),
    ("mlx", with_values("biases", lambda biases: biases.float() + 7e4), "expected finite biases of at most 65,504"),
    ("mxfp4-pack-quantized", with_values("weight_scale", lambda scale: scale | 255), "up to 254, got 255"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "change", "problem"), REFUSED_NUMBERS)
def test_numbers_that_blocks_cannot_hold_are_refused_when_they_are_read(
    method: str, change: Change, problem: str, written: Written, tmp_path: Path
) -> None:
    write_changed(written, method, change, tmp_path)
    weight = LazyWeights(open_checkpoint(tmp_path).tensors)[f"{AT}.weight"]
    check_refused(lambda: weight.rows(0, 16), problem, ModelFormatError)


REFUSED_CONFIGS = [
    ("gptq symmetric", {"bits": 5}, r"bits is 5: of gptq, .* 2, 3, 4, 8: use .*bfloat16"),
    ("gptq symmetric", {"checkpoint_format": "marlin"}, "'marlin': of gptq, .* gptq, gptq_v2"),
    ("gptq symmetric", {"group_size": 0}, r"group_size: expected -1 or an integer from 1 to 16777216, got 0"),
    ("gptq symmetric", {"group_size": 2**70}, r"group_size: expected -1 or an integer from 1 to 16777216"),
    ("gptq symmetric", {"group_size": 64}, r"expected the shape \(2, .* for 64 columns per scale"),
    ("gptq symmetric", {"quant_method": "awq"}, r"expected the shape"),
    ("awq", {"version": "gemv"}, "version is 'gemv': of awq, .* gemm"),
    ("awq", {"zero_point": False}, "zero_point is False: of awq, .* True"),
    ("pack-quantized", {"format": "marlin-24"}, "format is 'marlin-24': of compressed-tensors, .* pack-quantized"),
    ("pack-quantized", {"transform_config": {"config_groups": {"u": {}}}}, "transforms of activations are not"),
    ("pack-quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format is 'sparse-24-bitmask'"),
    ("pack-quantized", {"config_groups": []}, None),
    ("pack-quantized", {"config_groups": [1]}, "config_groups: expected an object"),
    ("fp8 blocks", {"weight_block_size": [0, 1]}, "weight_block_size: expected two integers from 1"),
    ("modelopt nvfp4", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ': of modelopt, .* FP8, NVFP4"),
    ("mlx", {"mode": "mxfp4"}, "mode is 'mxfp4': of MLX, .* affine"),
    ("mlx", {"bits": 6}, "bits is 6: of MLX, .* 2, 4, 8"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "values", "problem"), REFUSED_CONFIGS)
def test_configs_that_we_do_not_read_are_refused_in_one_line(
    method: str, values: dict[str, Any], problem: str | None, written: Written, tmp_path: Path
) -> None:
    chosen = by_name(method)
    written(method, tmp_path)
    set_config(tmp_path, chosen.key, chosen.config | values)
    if problem is None:
        assert open_checkpoint(tmp_path).tensors[f"{AT}.weight"].type == chosen.type
        return
    assert re.search(problem, refusal(lambda: open_checkpoint(tmp_path)))


@pytest.mark.parametrize("key", ["compression_config", "quantization"])
def test_two_methods_in_a_config_are_refused(key: str, written: Written, tmp_path: Path) -> None:
    written("gptq symmetric", tmp_path)
    set_config(tmp_path, key, by_name("gptq symmetric").config)
    open_checkpoint(tmp_path)
    set_config(tmp_path, key, by_name("awq").config)
    with pytest.raises(UnsupportedModelError, match=f"two methods .*, quantization_config gptq and {key} awq: r"):
        open_checkpoint(tmp_path)


MATRIX = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
anything = settings(
    max_examples=usual_or_all(40, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("name", ["gptq act-order", "pack-quantized", "fp8 matrices", "modelopt nvfp4", "mlx"])
@anything
@given(share=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_any_byte_of_a_quantised_file_may_change(name: str, share: float, value: int, tmp_path: Path) -> None:
    method = by_name(name)
    tensors = {f"lm_head.{kind}": each.contiguous() for kind, each in method.pack(MATRIX.repeat(1, 2)).tensors.items()}
    content = bytearray(safetensors.torch.save(tensors))
    content[int(share * len(content))] = value
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", method.key: method.config}))
    with suppress(ModelError):
        for weight in LazyWeights(open_checkpoint(tmp_path).tensors).values():
            assert weight.rows(0, weight.shape[0]).data.numel() >= 0


def test_codes_of_gptq_without_a_config_are_refused(written: Written, tmp_path: Path) -> None:
    written("gptq symmetric", tmp_path)
    set_config(tmp_path, "quantization_config", None)
    with pytest.raises(ModelError, match=r"expected quant_method gptq or awq in config\.json's quantization_config"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("is_empty", [True, False])
def test_biases_that_are_zero_in_all_layers_are_dropped(is_empty: bool, written: Written, tmp_path: Path) -> None:
    """Tools for GPTQ write them for models that have no biases."""
    written("gptq symmetric", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    biases = {f"model.layers.{layer}.self_attn.o_proj.bias": torch.zeros(128).half() for layer in range(2)}
    biases["model.layers.1.self_attn.o_proj.bias"][5] = 0 if is_empty else 1
    save(tmp_path, tensors | biases)
    found = open_checkpoint(tmp_path).tensors
    assert [name in found for name in biases] == [not is_empty] * 2


def test_scales_of_activations_and_caches_are_not_loaded(written: Written, tmp_path: Path) -> None:
    written("fp8 matrices", tmp_path)
    tensors, names = load_file(tmp_path / "model.safetensors"), set(open_checkpoint(tmp_path).tensors)
    kinds = ("k_proj.input_scale", "k_proj.activation_scale", "k_scale", "v_scale")
    save(tmp_path, tensors | {f"model.layers.1.self_attn.{kind}": torch.ones(1) for kind in kinds})
    assert set(open_checkpoint(tmp_path).tensors) == names


def test_explain_and_estimate_name_the_method_the_types_and_the_memory(written: Written, tmp_path: Path) -> None:
    written("awq", tmp_path)
    write_byte_tokenizer(tmp_path)
    # 2 × (q, o 128 × 128; k, v 64 × 128; gate, up 256 × 128), and one down 128 × 256: codes, zero points and scales.
    values = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 2 * 256 * 128) + 128 * 256
    num_bytes = values // 2 + values // 128 * 5 // 2
    line = f"13 tensors, {values / 1e6:.1f} M values, {num_bytes / 1e6:.1f} MB as awq, 4 bits, 1 × 128 values per scale"
    assert line in run("explain", tmp_path).out
    rows = {row["type"]: row for row in run("explain", tmp_path, "--json").json()["weights"]}
    assert (rows["Q5_0"]["num_values"], rows["Q5_0"]["num_bytes"], rows["F32"]["method"]) == (values, num_bytes, "")
    report = run("estimate", tmp_path, "--device", "cpu", "--json").json()
    floats = 4 * (2 * 96 * 128 + 128 * 256 + 5 * 128)
    assert report["weight_types"] == ["F32", "Q5_0"]
    assert 0 <= report["weight_bytes"] - values * 22 // 32 - floats <= 2 * 4 * 256 * 32  # tables of rotation
