"""How far each precision is from the float32 model: logits, KL, likeliest tokens and perplexity over one text.

    python benchmarks/check_precision.py                                        2,000 tokens, all models: some minutes
    python benchmarks/check_precision.py --models smollm2 --tokens 300          a look
    python benchmarks/check_precision.py --llama-python PATH --json benchmarks/reports/precision.json

The reference of a GGUF file is the same file dequantised (`dtype="float32"`), which the tests prove equal to
transformers. `NAME-safetensors` is the file's dequantised weights rounded to bfloat16, in a folder: there the reference
is `weights="bf16"`, and q8 and q4 are what quantising at load costs. SmolLM2's weights come from 4 bits, so that its q4
finds most of them again; Gemma's come from 5 to 8 bits and show what q4 really costs. All sides see the same tokens,
in chunks that bound the memory; llama.cpp runs in an environment of its own, found as bench_peers finds it.
"""

import argparse
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench_peers import Side, SideError, Worker, find_llama_python, make_peer, say, worker
from command_line import make_parser
from infer import __version__, load_model, load_tokenizer
from infer.checkpoint import open_checkpoint, resolve
from infer.checkpoint.lazy_weights import LazyWeights
from infer.llm import set_num_threads
from infer.model.load import dense
from infer.operands.step import Step
from infer.ops import backend_of
from infer.runner.caches import make_cache
from machine import cpu_model

TEXT = Path(__file__).with_name("precision_text.txt")
SAFETENSORS = "-safetensors"
GGUF_OPTIONS = {"float32": {"dtype": "float32"}, "exact": {"precision": "exact"}, "fast": {"precision": "fast"}}
SAFETENSORS_OPTIONS = {"bf16": {"weights": "bf16"}, "q8": {"weights": "q8"}, "q4": {"weights": "q4"}}
OPTIONS_BY_MODEL: dict[str, dict[str, dict[str, Any]]] = {
    "smollm2": GGUF_OPTIONS,
    "gemma3-270m": GGUF_OPTIONS,
    "smollm2" + SAFETENSORS: SAFETENSORS_OPTIONS,
    "gemma3-270m" + SAFETENSORS: SAFETENSORS_OPTIONS,
}  # the first of each is the reference
CLEAR_MARGIN = 0.05  # between the likeliest and the second logit: below it a different choice says little
_TWO_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}  # ours → Hugging Face's
_FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


class LogitsSource(ABC):
    """A side that reads the text chunk by chunk, in order."""

    @abstractmethod
    def read(self, token_ids: list[int], start: int) -> Tensor:
        """float32 logits after each of the tokens, the first of which stands at `start`."""


@final
class InferSource(LogitsSource):
    def __init__(self, model_id: str | Path, context: int, options: dict[str, Any]) -> None:
        self._model, _ = load_model(model_id, max_seq_len=context, **options)
        self._cache = make_cache(self._model, context)

    @torch.inference_mode()
    def read(self, token_ids: list[int], start: int) -> Tensor:
        self._cache.reserve(0, len(token_ids))
        with backend_of(self._model.device).threads():
            logits = self._model.forward(Step.of(token_ids, start, logit_indices=range(len(token_ids))), self._cache)
        self._cache.commit(0, len(token_ids))
        return logits


@final
class LlamaSource(LogitsSource):
    """llama.cpp answers with a file."""

    def __init__(self, started: Worker, path: Path, context: int, threads: int, folder: Path) -> None:
        self._worker, self._file = started, folder / "logits"
        started.ask(do="load", path=str(path), threads=threads, context=context, variant="")

    def read(self, token_ids: list[int], start: int) -> Tensor:
        self._worker.ask(do="logits", tokens=token_ids, start=start, path=str(self._file))
        return torch.from_numpy(np.fromfile(self._file, np.float32)).reshape(len(token_ids), -1)


@final
class Reference:
    """A chunk as all sides are compared with it. next_ids is one shorter at the end of the text."""

    def __init__(self, logits: Tensor, next_ids: Tensor) -> None:
        self.logits, self.next_ids = logits, next_ids
        first, second = logits.topk(2).values.unbind(-1)
        self.margin, self.likeliest = first - second, logits.argmax(-1)
        self.logs = logits.double().log_softmax(-1)
        self.probabilities = self.logs.exp()


def surprise(logs: Tensor, next_ids: Tensor) -> list[float]:
    """−log p of the token that follows each."""
    return (-logs[: len(next_ids)].gather(1, next_ids[:, None])[:, 0]).tolist()


@dataclass
class Comparison:
    """What accumulates of one side beside its reference, a value for each token."""

    max_error: float = 0.0
    divergence: list[float] = field(default_factory=list)  # KL(reference ‖ side)
    agrees: list[bool] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)  # of the reference
    surprise: list[float] = field(default_factory=list)  # −log p of the text's next token
    reference_surprise: list[float] = field(default_factory=list)

    def add(self, reference: Reference, side: Tensor) -> None:
        """Of a chunk."""
        self.max_error = max(self.max_error, float((side - reference.logits).abs().max()))
        self.margin += reference.margin.tolist()
        self.agrees += (reference.likeliest == side.argmax(-1)).tolist()
        logs = side.double().log_softmax(-1)
        self.surprise += surprise(logs, reference.next_ids)
        self.reference_surprise += surprise(reference.logs, reference.next_ids)
        self.divergence += (reference.probabilities * (reference.logs - logs)).sum(-1).tolist()


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    model: str
    reference: str
    side: str
    tokens: int
    max_logit_error: float
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    clear_tokens: int  # whose margin is above CLEAR_MARGIN
    clear_top1_agreement: float
    perplexity: float
    reference_perplexity: float
    perplexity_change: float  # relative


def summarize(model: str, reference: str, side: str, found: Comparison) -> Finding:
    agrees, clear = np.array(found.agrees), np.array(found.margin) > CLEAR_MARGIN
    perplexity, expected = (float(np.exp(np.mean(values))) for values in (found.surprise, found.reference_surprise))
    return Finding(
        model=model,
        reference=reference,
        side=side,
        tokens=len(agrees),
        max_logit_error=found.max_error,
        mean_kl=float(np.mean(found.divergence)),
        p99_kl=float(np.percentile(found.divergence, 99)),
        top1_agreement=float(agrees.mean()),
        clear_tokens=int(clear.sum()),
        clear_top1_agreement=float(agrees[clear].mean()),
        perplexity=perplexity,
        reference_perplexity=expected,
        perplexity_change=perplexity / expected - 1,
    )


def compare(name: str, token_ids: list[int], sources: dict[str, LogitsSource], chunk: int) -> Iterator[Finding]:
    """The first source is the reference of the others."""
    (reference, source), *others = sources.items()
    comparisons = {side: Comparison() for side, _ in others}
    for start in range(0, len(token_ids), chunk):
        ids = token_ids[start : start + chunk]
        next_ids = torch.tensor(token_ids[start + 1 : start + 1 + len(ids)])
        expected = Reference(source.read(ids, start), next_ids)
        for side, other in others:
            comparisons[side].add(expected, other.read(ids, start))
        show(f"{name}: {start + len(ids)} of {len(token_ids)} tokens")
    for side, found in comparisons.items():
        yield summarize(name, reference, side, found)


def write_safetensors(name: str, folder: Path) -> Path:
    """A GGUF model as a Hugging Face folder: its dequantised weights, matrices in bfloat16."""
    checkpoint = open_checkpoint(name)
    has_four_norms = "model.layers.0.post_mlp_norm.weight" in checkpoint.tensors
    names = _FOUR_NORMS if has_four_norms else _TWO_NORMS
    tensors = {}
    for ours, weight in LazyWeights(checkpoint.tensors).items():
        tensor = dense(weight).float()
        if tensor.dim() > 1:
            tensor = tensor.to(torch.bfloat16)
        elif has_four_norms:
            tensor = tensor - 1  # Gemma's files store w for 1 + w
        stem, _, kind = ours.removesuffix(".weight").rpartition(".")
        tensors[f"{stem}.{names.get(kind, kind)}.weight"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config)))
    load_tokenizer(checkpoint).backend.save(str(folder / "tokenizer.json"))
    return folder


def check(name: str, arguments: argparse.Namespace, llama: Side | None) -> list[Finding]:
    """Load every side of a model and compare them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = name.removesuffix(SAFETENSORS)
        model_id = source if name == source else write_safetensors(source, folder)
        token_ids = load_tokenizer(source).encode(arguments.text.read_text("utf-8"))
        if len(token_ids) < arguments.tokens:
            say(f"{name}: the text has {len(token_ids)} tokens only")
        token_ids = token_ids[: arguments.tokens]
        context = len(token_ids) + 1
        sources: dict[str, LogitsSource] = {}
        for side, options in OPTIONS_BY_MODEL[name].items():
            show(f"{name}: loading {side}")
            sources[side] = InferSource(model_id, context, options)
        if llama is not None and name == source:
            show(f"{name}: loading llama.cpp")
            try:
                started = stack.enter_context(worker(llama))
                sources["llama.cpp"] = LlamaSource(started, resolve(name), context, arguments.threads, folder)
            except SideError as error:
                say(f"llama.cpp is left out: {error}")
        return list(compare(name, token_ids, sources, arguments.chunk))


def table(findings: list[Finding]) -> str:
    columns: list[tuple[str, Callable[[Finding], str]]] = [
        ("model", lambda f: f.model),
        ("side", lambda f: f"{f.side} / {f.reference}"),
        ("tokens", lambda f: str(f.tokens)),
        ("max Δlogit", lambda f: f"{f.max_logit_error:.4f}"),
        ("mean KL", lambda f: f"{f.mean_kl:.2e}"),
        ("p99 KL", lambda f: f"{f.p99_kl:.2e}"),
        ("top-1", lambda f: f"{f.top1_agreement:.2%}"),
        (f"top-1, margin > {CLEAR_MARGIN:g}", lambda f: f"{f.clear_top1_agreement:.2%}"),
        ("perplexity", lambda f: f"{f.perplexity:.4f}"),
        ("change", lambda f: f"{f.perplexity_change:+.4%}"),
    ]
    rows = [[title for title, _ in columns], ["---"] * len(columns)]
    rows += [[value(finding) for _, value in columns] for finding in findings]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def show(text: str) -> None:
    """Progress, where somebody may be looking."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, threads=True)
    parser.add_argument("--models", nargs="+", choices=list(OPTIONS_BY_MODEL), default=list(OPTIONS_BY_MODEL))
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=64, help="tokens whose logits are held at once")
    parser.add_argument("--text", type=Path, default=TEXT, metavar="FILE")
    parser.add_argument("--llama-python", metavar="PATH", help="a Python that has llama-cpp-python")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    set_num_threads(arguments.threads)
    llama_python = find_llama_python(arguments.llama_python)
    llama = None if llama_python is None else make_peer(llama_python)
    if llama is None:
        say("no environment with llama-cpp-python (--llama-python): infer is measured alone")
    findings = [finding for name in arguments.models for finding in check(name, arguments, llama)]
    show("")
    print(table(findings))
    if arguments.json is not None:
        report = {
            "machine": cpu_model(),
            "threads": arguments.threads,
            "infer_version": __version__,
            "torch_version": torch.__version__,
            "text": arguments.text.name,
            "clear_margin": CLEAR_MARGIN,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "findings": [asdict(finding) for finding in findings],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
