"""infer beside transformers on the same dequantised weights, interleaved in one run: prefill and decode, batch 1.

    python benchmarks/bench_transformers.py --prompt-tokens 512 --new-tokens 64

transformers runs SmolLM2 dequantised to bfloat16 and to float32; infer runs it as stored, and dequantised likewise.
Needs the packages of the extra `dev`.
"""

import argparse
import runpy
import time
from abc import ABC, abstractmethod
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from command_line import make_parser
from infer import LLM, SamplingParams
from infer.checkpoint import open_checkpoint
from machine import cpu_model
from workload import make_synthetic_prompt

# The tests' own construction of a transformers model from a checkpoint.
make_oracle = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "integration" / "oracle.py"))["make_oracle"]


class Seconds(NamedTuple):
    prefill: float
    decode: float


class Engine(ABC):
    @abstractmethod
    def measure(self, prompt: list[int], new_tokens: int) -> Seconds:
        """Greedy: the time to the first token, and that of the `new_tokens` after it."""


class InferEngine(Engine):
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def measure(self, prompt: list[int], new_tokens: int) -> Seconds:
        params = SamplingParams(temperature=0, max_new_tokens=new_tokens + 1, ignore_eos=True)
        timing = self.llm.generate(prompt, params).timing
        return Seconds(timing.prefill_time_s, timing.total_time_s - timing.prefill_time_s)


class TransformersEngine(Engine):
    def __init__(self, model_name: str, dtype: torch.dtype) -> None:
        self.model = make_oracle(open_checkpoint(model_name)).to(dtype)
        self.model.set_attn_implementation("sdpa")  # its fastest

    @torch.inference_mode()
    def measure(self, prompt: list[int], new_tokens: int) -> Seconds:
        start = time.perf_counter()
        out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        prefilled = time.perf_counter()
        for _ in range(new_tokens):
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return Seconds(prefilled - start, time.perf_counter() - prefilled)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, threads=True, rounds=5)
    parser.add_argument("--model", default="smollm2", help="an installed GGUF model")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    return parser.parse_args()


def make_engines(arguments: argparse.Namespace, max_seq_len: int) -> dict[str, Engine]:
    def make_infer(dtype: str) -> InferEngine:
        return InferEngine(LLM(arguments.model, dtype=dtype, threads=arguments.threads, max_seq_len=max_seq_len))

    engines: dict[str, Engine] = {"infer as stored": make_infer("auto")}
    for dtype in arguments.dtypes:
        engines[f"infer {dtype}"] = make_infer(dtype)
        engines[f"transformers {dtype}"] = TransformersEngine(arguments.model, getattr(torch, dtype))
    torch.set_num_threads(arguments.threads)
    return engines


def main() -> None:
    arguments = parse_arguments()
    engines = make_engines(arguments, arguments.prompt_tokens + arguments.new_tokens + 1)
    tokenizer = next(engine.llm.tokenizer for engine in engines.values() if isinstance(engine, InferEngine))
    prompt = make_synthetic_prompt(tokenizer.encode, arguments.prompt_tokens)
    results: dict[str, list[Seconds]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.measure(prompt[:16], 2)
    for _ in range(arguments.rounds):
        for name, engine in engines.items():
            results[name].append(engine.measure(prompt, arguments.new_tokens))

    print(f"{arguments.model} on {cpu_model()}, {arguments.threads} threads; medians of {arguments.rounds} rounds")
    print(f"{'':24} {'prefill tok/s':>14} {'decode tok/s':>14}   against transformers {arguments.dtypes[0]}")
    base = rates(results[f"transformers {arguments.dtypes[0]}"], arguments)
    for name, seconds in results.items():
        prefill, decode = rates(seconds, arguments)
        print(f"{name:24} {prefill:>14.1f} {decode:>14.1f}   {prefill / base[0]:.2f}× {decode / base[1]:.2f}×")


def rates(seconds: list[Seconds], arguments: argparse.Namespace) -> tuple[float, float]:
    prefill, decode = (median(column) for column in zip(*seconds, strict=True))
    return arguments.prompt_tokens / prefill, arguments.new_tokens / decode


if __name__ == "__main__":
    main()
