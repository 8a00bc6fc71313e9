"""Measure how far each precision is from the float32 model, or each storage of keys and values from float32 ones.

    python benchmarks/check_precision.py                                 2,000 tokens, both models: some minutes
    python benchmarks/check_precision.py --models smollm2 --tokens 300
    python benchmarks/check_precision.py --of kv --tokens 20480          keys and values: windows of 2,048 tokens

`--of weights` compares `exact`, `fast` and llama.cpp with the same file dequantised, which the tests prove equal to
transformers; keys and values have 32 bits. `--of bf16` and `--of f16` store the weights in that type, with float
activations as the reference. `--of kv` compares each `kv_type` with `f32`; products are exact unless the side is named
`fast`, and the text is the language reference that every CPython carries. All sides see the same tokens, in windows
that begin anew, in chunks that bound the memory. llama.cpp runs in an environment of its own, found as bench_peers
finds it.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench_peers import peer_worker
from harness import Worker, WorkerError, find_llama_python, make_parser, say, write_report
from infer import load_model, load_tokenizer
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.step import Step
from infer.compute.ops import backend_of
from infer.engine.runner.runner import make_cache
from infer.files import resolve
from infer.llm import set_num_threads
from needles import reference_text

TEXT = Path(__file__).with_name("precision_text.txt")
LLAMA = "llama.cpp"
# Options of `load_model` and the type of keys and values, by side. The first side is the reference.
SIDES: Mapping[str, Mapping[str, tuple[dict[str, Any], str]]] = {
    "weights": {
        "float32": ({"dtype": "float32"}, "f32"),
        "exact": ({"precision": "exact"}, "f32"),
        "fast": ({"precision": "fast"}, "f32"),
    },
    "bf16": {
        "exact": ({"dtype": "bfloat16"}, "f32"),
        "fast": ({"dtype": "bfloat16", "precision": "fast"}, "f32"),
    },
    "f16": {
        "exact": ({"dtype": "float16"}, "f32"),
        "as bf16": ({"dtype": "bfloat16"}, "f32"),
        "as bf16, fast": ({"dtype": "bfloat16", "precision": "fast"}, "f32"),
    },
    "kv": {kv_type: ({}, kv_type) for kv_type in ("f32", "f16", "bf16", "q8", "q4")}
    | {f"fast {kv_type}": ({"precision": "fast"}, kv_type) for kv_type in ("f16", "bf16")},
}
CLEAR_MARGIN = 0.05  # between the two largest logits; with a smaller one, another choice says little


# Reads tokens from a position on, and returns the float32 logits after each. Position 0 begins a new text.
Read = Callable[[list[int], int], Tensor]


def reader_of(model: Any, context: int, kv_type: str) -> Read:
    cache = make_cache(model, context, settings=CacheSettings(kv_type=kv_type))

    @torch.inference_mode()
    def read(token_ids: list[int], start: int) -> Tensor:
        cache.truncate(0, start)
        cache.reserve(0, len(token_ids))
        step = Step.of(token_ids, start, logit_indices=range(len(token_ids)))
        with backend_of(model.device).threads():
            logits: Tensor = model.forward(step, cache)
        cache.commit(0, len(token_ids))
        return logits

    return read


def llama_reader(worker: Worker, file: Path) -> Read:
    """Return a reader by llama.cpp, which answers with a file."""

    def read(token_ids: list[int], start: int) -> Tensor:
        worker.ask("logits", tokens=token_ids, start=start, path=str(file))
        return torch.from_numpy(np.fromfile(file, np.float32)).reshape(len(token_ids), -1)

    return read


class Reference:
    """A chunk of the reference, with the data of all comparisons. `next_ids` is one shorter at the end of a window."""

    def __init__(self, logits: Tensor, next_ids: Tensor) -> None:
        self.logits, self.next_ids = logits, next_ids
        first, second = logits.topk(2).values.unbind(-1)
        self.margin, self.likeliest = first - second, logits.argmax(-1)
        self.logs = logits.double().log_softmax(-1)
        self.probabilities = self.logs.exp()


@dataclass
class Comparison:
    """Values of one side compared with its reference, one per token."""

    max_error: float = 0.0
    divergence: list[float] = field(default_factory=list)  # KL(reference ‖ side)
    agrees: list[bool] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)  # margin of the reference
    surprise: list[float] = field(default_factory=list)  # −log p of the text's next token
    reference_surprise: list[float] = field(default_factory=list)

    def add(self, reference: Reference, side: Tensor) -> None:
        self.max_error = max(self.max_error, float((side - reference.logits).abs().max()))
        self.margin += reference.margin.tolist()
        self.agrees += (reference.likeliest == side.argmax(-1)).tolist()
        logs = side.double().log_softmax(-1)
        self.surprise += _surprise(logs, reference.next_ids)
        self.reference_surprise += _surprise(reference.logs, reference.next_ids)
        self.divergence += (reference.probabilities * (reference.logs - logs)).sum(-1).tolist()

    def summary(self) -> dict[str, float]:
        agrees, clear = np.array(self.agrees), np.array(self.margin) > CLEAR_MARGIN
        perplexity, expected = (float(np.exp(np.mean(each))) for each in (self.surprise, self.reference_surprise))
        return {
            "tokens": len(agrees),
            "max_logit_error": self.max_error,
            "mean_kl": float(np.mean(self.divergence)),
            "p99_kl": float(np.percentile(self.divergence, 99)),
            "top1_agreement": float(agrees.mean()),
            "clear_top1_agreement": float(agrees[clear].mean()),
            "perplexity": perplexity,
            "perplexity_change": perplexity / expected - 1,
        }


def _surprise(logs: Tensor, next_ids: Tensor) -> list[float]:
    found: list[float] = (-logs[: len(next_ids)].gather(1, next_ids[:, None])[:, 0]).tolist()
    return found


def make_readers(name: str, context: int, options: argparse.Namespace, stack: ExitStack) -> dict[str, Read]:
    """Load every side. The reference is the first."""
    models, readers = dict[str, Any](), dict[str, Read]()
    for side, (load, kv_type) in SIDES[options.of].items():
        if str(load) not in models:
            models[str(load)], _ = load_model(name, max_seq_len=context, **load)
        readers[side] = reader_of(models[str(load)], context, kv_type)
    if options.of == "weights" and (python := find_llama_python(options.llama_python)):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        worker = stack.enter_context(Worker(peer_worker(python), is_quiet=True))
        try:
            worker.ask("load", path=str(resolve(name)), threads=options.threads, context=context)
            readers[LLAMA] = llama_reader(worker, folder / "logits")
        except WorkerError as error:
            say(f"llama.cpp is left out: {error}")
    elif options.of == "weights":
        say("no environment with llama-cpp-python (--llama-python): infer is measured alone")
    return readers


def check(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of each side of a model."""
    text = reference_text() if options.of == "kv" else TEXT.read_text("utf-8")
    token_ids = load_tokenizer(name).encode(text)[: options.tokens]
    window = min(options.window, len(token_ids))
    with ExitStack() as stack:
        readers = make_readers(name, window + 1, options, stack)
        (reference, read), *others = readers.items()
        comparisons = {side: Comparison() for side, _ in others}
        for first in range(0, len(token_ids) - window + 1, window):
            ids = token_ids[first : first + window]
            for start in range(0, window, options.chunk):
                chunk = ids[start : start + options.chunk]
                following = torch.tensor(ids[start + 1 : start + 1 + len(chunk)])
                expected = Reference(read(chunk, start), following)
                for side, other in others:
                    comparisons[side].add(expected, other(chunk, start))
            say(f"{name}: {first + window} of {len(token_ids)} tokens")
        for side, found in comparisons.items():
            yield {"model": name, "reference": reference, "side": side, **found.summary()}


def table(findings: list[dict[str, Any]]) -> str:
    formats = {
        "model": "", "side": "", "reference": "", "tokens": "", "max_logit_error": ".4f", "mean_kl": ".2e",
        "p99_kl": ".2e", "top1_agreement": ".2%", "clear_top1_agreement": ".2%", "perplexity": ".4f",
        "perplexity_change": "+.4%",
    }  # fmt: skip
    rows = [list(formats), ["---"] * len(formats)]
    rows += [[format(finding[name], kind) for name, kind in formats.items()] for finding in findings]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = make_parser(__doc__, threads=True)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3-270m"])
    parser.add_argument("--of", choices=list(SIDES), default="weights")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--window", type=int, default=2048, help="tokens that are read as one text")
    parser.add_argument("--chunk", type=int, default=64, help="tokens whose logits are held at the same time")
    parser.add_argument("--llama-python", metavar="PATH", help="a Python that has llama-cpp-python")
    options = parser.parse_args()
    set_num_threads(options.threads)
    findings = [finding for name in options.models for finding in check(name, options)]
    print(table(findings))
    write_report(options, clear_margin=CLEAR_MARGIN, findings=findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
