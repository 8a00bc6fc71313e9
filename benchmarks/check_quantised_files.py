"""Compare the files of `infer quantize` with those of llama.cpp's tool: size, perplexity, and KL against the source.

    python benchmarks/check_quantised_files.py --llama-quantize PATH            SmolLM2, all types without a matrix
    python benchmarks/check_quantised_files.py --llama-quantize PATH --matrix --types IQ2_XXS Q4_K_M
    python benchmarks/check_quantised_files.py --llama-quantize PATH --model gemma3-270m --windows 8 --sources 2
    python benchmarks/check_quantised_files.py --source F16.gguf --types Q4_K_M Q2_K

Both files are read by infer, over the same windows. Without --source, it is made of a packaged model, whose weights lie
on grids: they are dequantised, and each channel between two matrices is scaled by a random factor on one side and by
its inverse on the other. The network computes the same, and no weight lies on a grid. --sources makes several sources,
each with factors of its own: one rounding of all weights is one draw, and draws differ by several percent of the KL.

With --matrix both tools get the same importance matrix, which `infer imatrix` makes of the source. Its text is every
second topic of Python's help. The windows are from a short text and from the other topics. Ctrl-C ends with a report.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import geometric_mean, mean
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from harness import make_parser, say, write_report
from infer import LLM
from infer.cli.bench.text_measures import collect_importance, cut, measure_divergence
from infer.compute.quantization.ggml_blocks import dequantize
from infer.files import resolve
from infer.files.gguf.gguf import TypedValue, read_gguf
from infer.files.gguf.gguf_writer import TensorPlan, write_gguf
from infer.files.gguf.importance_matrix import read_importance_matrix
from infer.files.gguf.quantised_file import (
    QuantisationRequest,
    SourceTensor,
    choose_types,
    model_of_gguf,
    write_quantised,
)

CONTEXT = 512
TOPICS = [topics[name] for name in sorted(topics)]
TEXT = "\n".join([Path(__file__).with_name("precision_text.txt").read_text(), *TOPICS[::2]])
CALIBRATION = "\n".join(TOPICS[1::2])[:14_000]
TYPES = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0"),
    *("IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K"),
)
Tensors = dict[str, Tensor]


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", threads=True)
    parser.add_argument("--source", type=Path, help="a GGUF file of floats; default: made of the model")
    parser.add_argument("--sources", type=int, default=1, help="number of sources that are made (1)")
    parser.add_argument("--llama-quantize", metavar="PATH", help="llama.cpp's tool")
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--windows", type=int, default=20, help=f"of {CONTEXT} tokens; half of them are predicted (20)")
    parser.add_argument("--matrix", action="store_true", help="make an importance matrix, and give it to both tools")
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    try:
        rows.extend(measured(options))
    except KeyboardInterrupt:
        say("stopped: the report has what was measured")
    write_report(options, means=means(rows), rows=rows)
    return 0


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    reference = None
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.sources):
            source = options.source or rescaled(resolve(options.model), Path(folder) / "source.gguf", number)
            reference = reference or Reference(source, options.windows)
            matrix = Path(folder) / "imatrix.gguf" if options.matrix else None
            if matrix is not None:
                write_matrix(source, matrix, options.threads)
            for type_ in options.types:
                task = Task(source, Path(folder) / "q.gguf", type_, matrix, options.threads)
                for row in measure(task, options.llama_quantize, reference):
                    yield row | {"source": number}


@final
class Reference:
    """The source's logits, computed once. Sources that are made have the same logits up to rounding errors."""

    def __init__(self, source: Path, num_windows: int) -> None:
        with LLM(source, kv_type="f32") as llm:
            self.tokenizer, self.max_seq_len = llm.tokenizer, llm.max_seq_len
            self.text = TEXT[: len(TEXT) * (CONTEXT * num_windows + 8) // len(llm.tokenizer.encode(TEXT))]
            while len(llm.tokenizer.encode(self.text)) < CONTEXT * num_windows:
                self.text = TEXT[: len(self.text) + CONTEXT]
            windows = cut(self.tokenizer, self.tokenizer.encode(self.text), CONTEXT)
            self._logits = {tuple(each[:-1]): llm.logits(each[:-1], last=CONTEXT // 2 - 1) for each in windows}

    def logits(self, token_ids: list[int], *, last: int) -> Tensor:
        return self._logits[tuple(token_ids)][-last:]


class Task(NamedTuple):
    """A file that both tools write."""

    source: Path
    path: Path
    type: str
    matrix: Path | None
    threads: int


def measure(task: Task, llama_quantize: str | None, reference: Reference) -> Iterator[dict[str, Any]]:
    sides: dict[str, Callable[[], None]] = {"infer": partial(quantise_here, task)}
    if llama_quantize:
        given = () if task.matrix is None else ("--imatrix", task.matrix)
        command = [llama_quantize, *given, task.source, task.path, task.type, task.threads]
        sides["llama.cpp"] = partial(subprocess.run, list(map(str, command)), check=True, capture_output=True)
    for side, run in sides.items():
        task.path.unlink(missing_ok=True)
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        with LLM(task.path, kv_type="f32") as model:
            found = measure_divergence(reference, model, reference.text, CONTEXT)  # type: ignore[arg-type]
        row = {"type": task.type, "side": side, "megabytes": round(task.path.stat().st_size / 1e6, 2)}
        row |= {"seconds": round(seconds, 2)} | found.to_json()
        del row["kl_by_position"]
        of_files = f"{found.reference.perplexity:8.4f} → {found.other.perplexity:8.4f}"
        say(f"{task.type:8} {side:10} {row['megabytes']:7} MB  perplexity {of_files}  KL {found.mean_kl:.5f}")
        yield row


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each type and side, over all sources, with the ratio of the KL to that of llama.cpp."""
    found = list[dict[str, Any]]()
    for type_, side in dict.fromkeys((row["type"], row["side"]) for row in rows):
        own, other = (
            [row for row in rows if (row["type"], row["side"]) == (type_, name)] for name in (side, "llama.cpp")
        )
        line = {"type": type_, "side": side, "megabytes": own[0]["megabytes"]}
        line["perplexity"] = geometric_mean(row["other"]["perplexity"] for row in own)
        line["mean_kl"] = mean(row["mean_kl"] for row in own)
        if other and side == "infer":
            line["ratios"] = [a["mean_kl"] / b["mean_kl"] for a, b in zip(own, other, strict=False)]
        found.append(line)
        print(", ".join(f"{name} {value}" for name, value in line.items()))
    return found


def quantise_here(task: Task) -> None:
    importance = {} if task.matrix is None else read_importance_matrix(task.matrix)
    model, request = model_of_gguf(read_gguf(task.source)), QuantisationRequest(task.type, importance=importance)
    write_quantised(task.path, model, request, choose_types(model, request), task.threads)


def write_matrix(source: Path, path: Path, threads: int) -> None:
    found = collect_importance(str(source), [("help", CALIBRATION)], chunk_size=CONTEXT, threads=threads)
    found.write(path)


def rescaled(model: Path, path: Path, seed: int) -> Path:
    """Write a packaged model in F32, with random scales between matrices that leave its function as it is."""
    file = read_gguf(model)
    tensors = {tensor.name: floats(tensor) for tensor in model_of_gguf(file).tensors}
    noise, architecture = torch.Generator().manual_seed(seed), file.metadata["general.architecture"]
    heads, key_heads = (file.metadata[f"{architecture}.attention.head_count{kind}"] for kind in ("", "_kv"))
    for layer in range(file.metadata[f"{architecture}.block_count"]):
        rescale_layer(tensors, f"blk.{layer}.", heads, key_heads, noise)
    values = file.typed_values | {"general.file_type": TypedValue("u32", 0)}
    write_gguf(path, values, [plan(name, tensor) for name, tensor in tensors.items()])
    return path


def rescale_layer(tensors: Tensors, layer: str, heads: int, key_heads: int, noise: torch.Generator) -> None:
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
    scales = factors(len(values))
    values *= scales[:, None]
    per_query = scales.reshape(key_heads, 1, -1).expand(-1, heads // key_heads, -1)
    tensors[f"{layer}attn_output.weight"] /= per_query.reshape(-1)


def floats(tensor: SourceTensor) -> Tensor:
    rows = 1 if len(tensor.shape) == 1 else tensor.shape[0]
    stored = tensor.read(0, rows)
    return (stored if tensor.type == "F32" else dequantize(stored, tensor.type)).reshape(tensor.shape).clone()


def plan(name: str, tensor: Tensor) -> TensorPlan:
    return TensorPlan(name, "F32", tuple(tensor.shape), lambda: [tensor.contiguous().numpy().tobytes()])


if __name__ == "__main__":
    raise SystemExit(main())
