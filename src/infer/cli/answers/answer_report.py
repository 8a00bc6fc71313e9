"""The report on stderr after an answer: its times and, with --stats, its path."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple

from infer.cli.options.command_options import GenerateOptions
from infer.cli.terminal.terminal import columns_of_rows
from infer.outputs import GenerationResult, GenerationStats, GenerationTiming, percentile
from infer.sampling_params import CONSTRAINTS, SamplingParams


def cut_lines(results: Sequence[GenerationResult]) -> Iterator[str]:
    """Yield a line for each truncated prompt or answer, with the option that prevents it."""
    lost = sum(result.truncated_tokens for result in results)
    if lost:
        yield f"the prompt lost its first {lost} tokens (--overflow)"
    for reason, option in (("max_new_tokens", "-n"), ("context", "--max-seq-len")):
        cut = [result.generated_tokens for result in results if result.stop_reason == reason]
        where = f"{cut[0]} tokens" if len(set(cut)) == 1 and reason == "max_new_tokens" else "their limits"
        where = "the end of the context" if reason == "context" else where
        if cut:
            yield (f"{len(cut)} of {len(results)} answers " if len(results) > 1 else "") + f"cut at {where} ({option})"


def time_lines(result: GenerationResult, *, verbose: bool) -> Iterator[str]:
    timing = result.timing
    yield f"TTFT: {1000 * timing.ttft_s:.2f} ms"
    rate = timing.decode_tokens_per_second
    if rate is not None:
        yield f"Avg TBT: {1000 / rate:.2f} ms ({rate:.1f} tokens/sec)"
    else:
        yield "Avg TBT: – (fewer than two tokens)"
    if verbose:
        yield f"TBT {_percentiles(timing.inter_token_times_s)}"
        yield f"Tokens: {result.prompt_tokens} prompt, {result.generated_tokens} generated"
        yield f"Finish: {result.finish_reason} ({result.stop_reason!r})"
        yield f"Seed: {result.seed}"


def total_line(results: Sequence[GenerationResult], seconds: float) -> str:
    """Return the total of many answers, which share their steps."""
    count = sum(result.generated_tokens for result in results)
    return f"{len(results)} answers: {count} tokens in {seconds:.2f} s ({count / max(seconds, 1e-9):.1f} tokens/sec)"


def stats_lines(results: Sequence[GenerationResult], params: SamplingParams, options: GenerateOptions) -> Iterator[str]:
    """Return a block of names and figures, as lines.

    The figures of several answers are added up, so a shared step counts once per answer.
    """
    stats = GenerationStats(*map(sum, zip(*(astuple(result.stats) for result in results), strict=True)))
    count = sum(result.generated_tokens for result in results)
    held = [name for name in CONSTRAINTS if getattr(params, name) is not None]
    guessed = [f"{options.speculation} speculation"] if options.speculation else []
    rows = [
        ("path", ", ".join(["greedy" if params.is_greedy else "sampled", *guessed, *held])),
        ("prompt", _prompt(results, stats)),
        ("answer", _counted(count, "token")),
        ("multi-steps", _multi_steps(stats)),
        ("single steps", f"{stats.single_steps}"),
        ("drafts", _drafts(stats)),
        ("masks", f"{stats.masks_filled} filled" if stats.masks_filled else "none"),
        ("forced", _counted(stats.tokens_forced, "token") + " not sampled" if stats.tokens_forced else "none"),
        *_times(results),
    ]
    return columns_of_rows(rows, "<<")


def _times(results: Sequence[GenerationResult]) -> Iterator[tuple[str, str]]:
    if len(results) != 1:
        return
    timing = results[0].timing
    yield "first token", f"{1000 * timing.ttft_s:.2f} ms"
    decode_s = timing.decode_time_s + timing.sampling_time_s
    sampling = f"{1000 * timing.sampling_time_s:.2f} ms of it sampling"
    yield "decode", f"{1000 * decode_s:.2f} ms, {rate_text(timing)}, {sampling}" if decode_s else "–"
    yield "between", _percentiles(timing.inter_token_times_s)
    yield "arrival", _percentiles(timing.arrival_gaps_s)


def rate_text(timing: GenerationTiming) -> str:
    rate = timing.decode_tokens_per_second
    return "–" if rate is None else f"{rate:.1f} tokens/sec"


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "–"
    return ", ".join(f"p{percent} {1000 * percentile(seconds, float(percent)):.2f} ms" for percent in (50, 95, 99))


def _prompt(results: Sequence[GenerationResult], stats: GenerationStats) -> str:
    """Return the figures of the prompts. The step that gives the first token also reads the end of the prompt."""
    count, reused = (sum(values) for values in zip(*((x.prompt_tokens, x.reused_tokens) for x in results), strict=True))
    steps = _counted(stats.prefill_steps + len(results), "step")
    return f"{_counted(count, 'token')} in {steps}" + (f", {reused} of them reused" if reused else "")


def _multi_steps(stats: GenerationStats) -> str:
    if not stats.multi_steps:
        return "none"
    count, num_tokens = stats.multi_steps, stats.multi_step_tokens
    return f"{count} of {num_tokens / count:.1f} tokens, {num_tokens} in all"


def _drafts(stats: GenerationStats) -> str:
    if not stats.drafts_proposed:
        return "none"
    share = stats.drafts_accepted / stats.drafts_proposed
    return f"{stats.drafts_proposed} proposed, {stats.drafts_accepted} accepted ({share:.0%})"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
