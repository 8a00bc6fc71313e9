"""What is told on stderr behind an answer: its times, and with --stats which way it came."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from infer.params import CONSTRAINTS, SamplingParams
from infer.results import GenerationResult, GenerationStats, percentile


def time_lines(result: GenerationResult, *, verbose: bool) -> Iterator[str]:
    timing = result.timing
    steps = timing.inter_token_times_s
    yield f"TTFT: {1000 * timing.ttft_s:.2f} ms"
    if steps:
        mean_ms = 1000 * sum(steps) / len(steps)
        yield f"Avg TBT: {mean_ms:.2f} ms ({timing.decode_tokens_per_second:.1f} tokens/sec)"
    else:
        yield "Avg TBT: none (fewer than two tokens)"
    if result.stop_reason == "context":
        yield "Stopped: the context is full (--max-seq-len)"
    if verbose:
        yield f"TBT {_percentiles(steps)}"
        yield f"Tokens: {result.prompt_tokens} prompt, {result.generated_tokens} generated"
        yield f"Finish: {result.finish_reason} ({result.stop_reason!r})"
        yield f"Seed: {result.seed}"


def total_line(results: Sequence[GenerationResult], seconds: float) -> str:
    """Of many answers, which share their steps."""
    count = sum(result.generated_tokens for result in results)
    return f"{len(results)} answers: {count} tokens in {seconds:.2f} s ({count / max(seconds, 1e-9):.1f} tokens/sec)"


def stats_lines(
    results: Sequence[GenerationResult], params: SamplingParams, options: Mapping[str, Any]
) -> Iterator[str]:
    """A block of names and figures; those of several answers are added up, a step that they share counted for each."""
    stats = GenerationStats(*map(sum, zip(*(astuple(result.stats) for result in results), strict=True)))
    count = sum(result.generated_tokens for result in results)
    held = [name for name in CONSTRAINTS if getattr(params, name) is not None]
    guessed = [f"{options['speculation']} speculation"] if options["speculation"] else []
    rows = [
        ("path", ", ".join(["greedy" if params.is_greedy else "sampled", *guessed, *held])),
        ("prompt", _prompt(results, stats)),
        ("answer", _counted(count, "token")),
        ("chains", _chains(stats)),
        ("single steps", f"{stats.single_steps}"),
        ("drafts", _drafts(stats)),
        ("masks", f"{stats.masks_filled} filled" if stats.masks_filled else "none"),
        ("forced", _counted(stats.tokens_forced, "token") + " not sampled" if stats.tokens_forced else "none"),
        *_times(results),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        yield f"{name:<{width}}  {text}"


def _times(results: Sequence[GenerationResult]) -> Iterator[tuple[str, str]]:
    if len(results) != 1:
        return
    timing = results[0].timing
    yield "first token", f"{1000 * timing.ttft_s:.2f} ms"
    shares = f"sampling apart {1000 * timing.sampling_time_s:.2f} ms" if timing.sampling_time_s else "sampling within"
    decode_s = timing.decode_time_s + timing.sampling_time_s
    yield "decode", f"{1000 * decode_s:.2f} ms, {timing.decode_tokens_per_second:.1f} tokens/sec, {shares}"
    yield "between", _percentiles(timing.inter_token_times_s)


def _percentiles(seconds: Sequence[float]) -> str:
    return ", ".join(f"p{percent} {1000 * percentile(seconds, float(percent)):.2f} ms" for percent in (50, 95, 99))


def _prompt(results: Sequence[GenerationResult], stats: GenerationStats) -> str:
    """The step that gives the first token takes the last of the prompt."""
    count, reused = (sum(values) for values in zip(*((x.prompt_tokens, x.reused_tokens) for x in results), strict=True))
    steps = _counted(stats.prefill_steps + len(results), "step")
    return f"{_counted(count, 'token')} in {steps}" + (f", {reused} of them reused" if reused else "")


def _chains(stats: GenerationStats) -> str:
    if not stats.chains:
        return "none"
    return f"{stats.chains} of {stats.chain_tokens / stats.chains:.1f} tokens, {stats.chain_tokens} in all"


def _drafts(stats: GenerationStats) -> str:
    if not stats.drafts_proposed:
        return "none"
    share = stats.drafts_accepted / stats.drafts_proposed
    return f"{stats.drafts_proposed} proposed, {stats.drafts_accepted} accepted ({share:.0%})"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
