"""Measure the files of `infer quantize` beside those of llama.cpp's tool: size, perplexity, and KL against the source.

    python benchmarks/check_quantised_files.py --llama-quantize PATH            SmolLM2, all types without a matrix
    python benchmarks/check_quantised_files.py --source F16.gguf --types Q4_K_M Q2_K

Both files are read by infer, over the same windows. Without --source, it is made of the packaged SmolLM2, whose Q4_1
weights would be kept by Q4_1: they are dequantised, and each channel between two matrices is scaled by a random factor
on one side and by its inverse on the other. The network computes the same, and no weight lies on a grid.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import make_parser, say, write_report
from infer import LLM
from infer.bench.text_quality import measure_divergence
from infer.checkpoint import resolve
from infer.checkpoint.gguf import TypedValue, read_gguf
from infer.checkpoint.gguf_writer import TensorPlan, write_gguf
from infer.checkpoint.quantised_file import (
    FileTensor,
    QuantisationRequest,
    choose_types,
    model_of_gguf,
    write_quantised,
)
from infer.quantization.ggml_blocks import dequantize

TEXT = Path(__file__).with_name("precision_text.txt")
TYPES = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0"),
    *("IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K"),
)
Tensors = dict[str, Tensor]


def main() -> int:
    parser = make_parser(__doc__, threads=True)
    parser.add_argument("--source", type=Path, help="a GGUF file of floats; default: made of the packaged SmolLM2")
    parser.add_argument("--llama-quantize", metavar="PATH", help="llama.cpp's tool")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = options.source or rescaled_smollm2(Path(folder) / "source.gguf")
        rows = [row for type_ in options.types for row in measure(source, type_, Path(folder) / "q.gguf", options)]
    write_report(options, rows=rows)
    return 0


def measure(source: Path, type_: str, path: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sides: dict[str, Callable[[], None]] = {"infer": partial(quantise_here, source, path, type_, options.threads)}
    if options.llama_quantize:
        command = [options.llama_quantize, str(source), str(path), type_, str(options.threads)]
        sides["llama.cpp"] = partial(subprocess.run, command, check=True, capture_output=True)
    for side, run in sides.items():
        path.unlink(missing_ok=True)
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        with LLM(source, kv_type="f32") as reference, LLM(path, kv_type="f32") as model:
            found = measure_divergence(reference, model, TEXT.read_text(), options.context)
        row = {"type": type_, "side": side, "megabytes": round(path.stat().st_size / 1e6, 2)}
        row["seconds"] = round(seconds, 2)
        say(f"{type_:8} {side:10} {row['megabytes']:7} MB  ppl {found.other.perplexity:8.4f}  KL {found.mean_kl:.5f}")
        yield row | found.to_json()


def quantise_here(source: Path, path: Path, type_: str, threads: int) -> None:
    model, request = model_of_gguf(read_gguf(source)), QuantisationRequest(type_)
    write_quantised(path, model, request, choose_types(model, request), threads)


def rescaled_smollm2(path: Path) -> Path:
    """Write the packaged SmolLM2 in F32, with random scales between matrices that leave its function as it is."""
    file = read_gguf(resolve("smollm2"))
    tensors = {name: floats(FileTensor(info)) for name, info in file.tensors.items()}
    noise = torch.Generator().manual_seed(0)
    for layer in range(file.metadata["llama.block_count"]):
        rescale_layer(tensors, f"blk.{layer}.", file.metadata, noise)
    values = file.typed_values | {"general.file_type": TypedValue("u32", 0)}
    write_gguf(path, values, [plan(name, tensor) for name, tensor in tensors.items()])
    return path


def rescale_layer(tensors: Tensors, layer: str, metadata: Mapping[str, Any], noise: torch.Generator) -> None:
    def factors(count: int) -> Tensor:
        return torch.exp(0.25 * torch.randn(count, generator=noise))

    hidden = len(tensors[f"{layer}attn_norm.weight"])
    for norm, readers in (("attn_norm", ("attn_q", "attn_k", "attn_v")), ("ffn_norm", ("ffn_gate", "ffn_up"))):
        scales = factors(hidden)
        tensors[f"{layer}{norm}.weight"] /= scales
        for name in readers:
            tensors[f"{layer}{name}.weight"] *= scales
    up, values = tensors[f"{layer}ffn_up.weight"], tensors[f"{layer}attn_v.weight"]
    scales = factors(len(up))
    up *= scales[:, None]
    tensors[f"{layer}ffn_down.weight"] /= scales
    scales, heads = factors(len(values)), metadata["llama.attention.head_count"]
    values *= scales[:, None]
    key_heads = metadata["llama.attention.head_count_kv"]
    per_query = scales.reshape(key_heads, 1, -1).expand(-1, heads // key_heads, -1)
    tensors[f"{layer}attn_output.weight"] /= per_query.reshape(-1)


def floats(tensor: FileTensor) -> Tensor:
    rows = 1 if len(tensor.shape) == 1 else tensor.shape[0]
    stored = tensor.read(0, rows)
    return (stored if tensor.type == "F32" else dequantize(stored, tensor.type)).reshape(tensor.shape).clone()


def plan(name: str, tensor: Tensor) -> TensorPlan:
    return TensorPlan(name, "F32", tuple(tensor.shape), lambda: [tensor.contiguous().numpy().tobytes()])


if __name__ == "__main__":
    raise SystemExit(main())
