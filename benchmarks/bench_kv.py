"""What each way of storing keys and values costs: perplexity over a long text, and the speed of decoding behind it.

    python benchmarks/bench_kv.py                                        both, both models: about ten minutes alone
    python benchmarks/bench_kv.py --models smollm2 --only quality --tokens 20480
    python benchmarks/bench_kv.py --models smollm2 --only speed --contexts 128 1024 4096 8192

The text is the language reference that every CPython carries, in windows that begin anew; all types see the same
tokens, and differences of perplexity are against f32. The speeds are of greedy chains behind a filled cache, every
type in every round, so that what else the machine does meets all of them. Reports go to benchmarks/reports/.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from command_line import REPORTS, make_parser
from infer import SamplingParams, load_model, load_tokenizer
from infer.bench.speed import make_prompt
from infer.errors import InvalidRequestError
from infer.kvcache.cache_settings import CacheSettings
from infer.llm import set_num_threads
from infer.model.transformer import Transformer
from infer.operands.step import Chunk
from infer.ops import backend_of
from infer.quantization.kv_formats import KV_TYPES, key_block_bytes, num_blocks, value_block_bytes
from infer.runner.runner import Runner
from infer.sampling.columns import SamplingColumns
from machine import write_report
from needles import reference_text

MODELS = ("smollm2", "gemma3-270m")
REFERENCE, BASE = "f32", "f16"  # of perplexity, of speed
CHUNK = 256  # tokens whose logits are held at once
COLORS = {"f32": "#6b7280", "f16": "#2563eb", "bf16": "#0891b2", "q8": "#f59e0b", "q4": "#dc2626"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 360, 60, 40, 50


@dataclass
class Quality:
    """Sums over the tokens of all windows."""

    model: str
    kv_type: str
    window: int
    tokens: int = 0
    nll: float = 0.0
    predicted: int = 0
    divergence: float = 0.0  # KL(f32 ‖ this)
    agrees: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.predicted)


@dataclass(frozen=True)
class Speed:
    model: str
    kv_type: str
    context: int
    tokens_per_second: float  # median of the rounds
    ratio: float  # to f16: median of each round's own
    kv_bytes: int  # of the context


def kv_bytes(model: Transformer, kv_type: str, context: int) -> int:
    total = 0
    for layer in model.architecture.layers:
        block_bytes = key_block_bytes(kv_type, layer.head_dim) + value_block_bytes(kv_type, layer.head_dim)
        total += layer.num_kv_heads * num_blocks(context) * block_bytes
    return total


# Quality


@torch.inference_mode()
def measure_quality(name: str, kv_types: Sequence[str], num_tokens: int, window: int) -> list[Quality]:
    model, _ = load_model(name, max_seq_len=window)
    tokenizer = load_tokenizer(name)
    token_ids = tokenizer.encode(reference_text())[:num_tokens]
    contexts = {
        kind: Runner(model, window, capture=False, settings=CacheSettings(kv_type=kind))
        for kind in (REFERENCE, *kv_types)
    }
    found = {kind: Quality(name, kind, window) for kind in contexts}
    for start in range(0, len(token_ids) - window + 1, window):
        ids = token_ids[start : start + window]
        for context in contexts.values():
            context.truncate(0, 0)
        for at in range(0, window, CHUNK):
            chunk, following = ids[at : at + CHUNK], torch.tensor(ids[at + 1 : at + CHUNK + 1])
            expected = None
            for kind, context in contexts.items():
                logs = _log_probabilities(model, context, chunk)
                expected = logs if expected is None else expected
                _add(found[kind], logs, expected, following)
        print(f"{name}: {start + window} of {len(token_ids)} tokens", flush=True)
    return list(found.values())


def _log_probabilities(model: Transformer, runner: Runner, token_ids: list[int]) -> Tensor:
    with backend_of(model.device).threads():
        runner.reserve(0, len(token_ids))
        logits = runner.forward([Chunk(0, token_ids, num_drafts=len(token_ids) - 1)])
    runner.commit(0, len(token_ids))
    return logits.log_softmax(-1)


def _add(quality: Quality, logs: Tensor, expected: Tensor, following: Tensor) -> None:
    quality.tokens += len(logs)
    quality.predicted += len(following)
    quality.nll -= float(logs[: len(following)].gather(1, following[:, None]).double().sum())
    quality.agrees += int((logs.argmax(-1) == expected.argmax(-1)).sum())
    for left, right in zip(expected.split(32), logs.split(32), strict=True):
        quality.divergence += float((left.exp().double() * (left.double() - right)).sum())


def quality_lines(found: Sequence[Quality]) -> Iterator[str]:
    base = {each.model: each.perplexity for each in found if each.kv_type == REFERENCE}
    yield "| model | kv type | tokens | perplexity | against f32 | mean KL | same likeliest |"
    yield "|---|---|---|---|---|---|---|"
    for each in found:
        change, agrees = each.perplexity / base[each.model] - 1, each.agrees / each.tokens
        yield (
            f"| {each.model} | {each.kv_type} | {each.tokens} × {each.window} | {each.perplexity:.4f} | {change:+.3%} "
            f"| {each.divergence / each.tokens:.1e} | {agrees:.2%} |"
        )


# Speed


def measure_speed(
    name: str, kv_types: Sequence[str], contexts: Sequence[int], rounds: int, num_tokens: int
) -> list[Speed]:
    """Chains of num_tokens, each behind `context` tokens."""
    model, _ = load_model(name)
    largest = min(max(contexts) + num_tokens, model.max_seq_len)
    token_ids = make_prompt(model, largest, seed=0)
    columns = SamplingColumns.of([SamplingParams(temperature=0)], model.architecture.vocab_size, num_prompt_tokens=[1])
    filled = {kind: Runner(model, largest, settings=CacheSettings(kv_type=kind)) for kind in kv_types}
    found = []
    for context in sorted({min(context, largest - num_tokens) for context in contexts}):
        for each in filled.values():
            each.extend(0, token_ids[each.lengths[0] : context])
        rates: dict[str, list[float]] = {kind: [] for kind in kv_types}
        for number in range(rounds + 1):
            for kind, each in filled.items():
                rate = _multi_step_rate(model, each, columns, context, num_tokens)
                if number:  # the first warms up
                    rates[kind].append(rate)
        for kind, measured in rates.items():
            ratio = median(mine / base for mine, base in zip(measured, rates.get(BASE, measured), strict=True))
            found.append(Speed(name, kind, context, median(measured), ratio, kv_bytes(model, kind, context)))
        print("\n".join(speed_lines(found[-len(kv_types) :])), flush=True)
    return found


@torch.inference_mode()
def _multi_step_rate(
    model: Transformer, runner: Runner, columns: SamplingColumns, length: int, num_tokens: int
) -> float:
    with backend_of(model.device).threads():
        started = time.perf_counter()
        runner.reserve(0, num_tokens)
        (sampled,), _ = runner.multi_step([Chunk(0, [5])], num_tokens, columns, None, ())
        seconds = time.perf_counter() - started
    runner.truncate(0, length)
    return len(sampled.token_ids) / seconds


def speed_lines(found: Sequence[Speed]) -> Iterator[str]:
    yield "| model | kv type | context | tok/s | of f16 | keys and values |"
    yield "|---|---|---|---|---|---|"
    for each in found:
        yield (
            f"| {each.model} | {each.kv_type} | {each.context} | {each.tokens_per_second:.1f} | {each.ratio:.3f} "
            f"| {each.kv_bytes / 2**20:.1f} MiB |"
        )


def picture(found: Sequence[Speed]) -> str:
    """Tokens per second against the context, a line for each type, of one model."""
    contexts = sorted({each.context for each in found})
    top = 1.1 * max(each.tokens_per_second for each in found)

    def x(context: int) -> float:
        span = math.log(contexts[-1] / contexts[0]) or 1.0
        return LEFT + (WIDTH - LEFT - 90) * math.log(context / contexts[0]) / span

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * rate / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(found[0].model)}: tokens per second against context</text>',
    ]
    for tick in (top * part / 4 for part in range(5)):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 90}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.0f}</text>')
    for context in contexts:
        parts.append(f'<text x="{x(context):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{context}</text>')
    for place, kind in enumerate(dict.fromkeys(each.kv_type for each in found)):
        mine = [each for each in found if each.kv_type == kind]
        points = " ".join(f"{x(each.context):.1f},{y(each.tokens_per_second):.1f}" for each in mine)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[kind]}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH - 78}" y="{TOP + 16 * place}" fill="{COLORS[kind]}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = make_parser(__doc__, threads=True, rounds=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--kv-types", nargs="+", default=list(KV_TYPES), choices=KV_TYPES)
    parser.add_argument("--only", choices=("quality", "speed"))
    parser.add_argument("--tokens", type=int, default=20_480, help="of text")
    parser.add_argument("--window", type=int, default=2048, help="tokens that are read as one text")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096, 8192])
    parser.add_argument("--new-tokens", type=int, default=16, help="of each chain")
    arguments = parser.parse_args()
    set_num_threads(arguments.threads)
    quality, speed = list[Quality](), list[Speed]()
    for name in arguments.models:
        if arguments.only != "speed":
            kinds = [kind for kind in arguments.kv_types if kind != REFERENCE]
            quality += measure_quality(name, kinds, arguments.tokens, arguments.window)
        if arguments.only != "quality":
            options = arguments.contexts, arguments.rounds, arguments.new_tokens
            speed += measure_speed(name, arguments.kv_types, *options)
    print("\n".join([*(quality_lines(quality) if quality else ()), *(speed_lines(speed) if speed else ())]))
    _write(arguments, quality, speed)


def _write(arguments: argparse.Namespace, quality: Sequence[Quality], speed: Sequence[Speed]) -> None:
    results = {
        "quality": [asdict(each) | {"perplexity": each.perplexity} for each in quality],
        "speed": [asdict(each) for each in speed],
    }
    path = write_report(REPORTS, "kv", vars(arguments), results)
    for name in dict.fromkeys(each.model for each in speed):
        mine = [each for each in speed if each.model == name]
        path.with_name(f"{path.stem}-{name}.svg").write_text(picture(mine))


if __name__ == "__main__":
    try:
        main()
    except InvalidRequestError as error:
        raise SystemExit(f"bench_kv: {error}") from error
