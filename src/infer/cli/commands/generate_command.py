"""`infer generate` and `infer sample-trace`: answers, and how one token of an answer was sampled.

One answer is written while it is generated; many are written in the order of their prompts. The report on stderr has
the times of an answer and, with --stats, its path. A trace is a table or one JSON object.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple
from functools import partial
from typing import Any

import click

import infer
from infer.cli.command_options import GenerateOptions, TraceOptions
from infer.cli.process_streams import cancel_on_signal
from infer.cli.prompts import Prompt
from infer.cli.streamed_text import display_width, shortened
from infer.cli.terminal import PrefillLine, Spinner, TextWriter, columns_of_rows, counted, json_text, print_report
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, GenerationStats, GenerationTiming, SampleTrace, TraceCandidate, percentile
from infer.sampling_params import CONSTRAINTS, PARAMETERS, SamplingParams

LABEL_WIDTH = 18  # columns of a token's text
BLUE, ORANGE = 25, 166  # of xterm's 256 colours: bars under the numbers, and those of the chosen token
DROPPED = "×"
Style = Callable[[str], str]
Cell = tuple[str, Style]  # of the table of a trace


def answer_one(model: "infer.LLM", prompt: Prompt, params: SamplingParams, options: GenerateOptions) -> int:
    """Answer one prompt and return the exit status. The text goes to stdout while it is generated."""
    writer, line = TextWriter(sys.stdout), PrefillLine()
    is_text = not (options.as_json or options.as_lines)
    if options.permalink:
        from infer.cli.commands.replay_command import Permalink, body_of

        body = body_of(prompt, params, options.model)

    def on_token(token_id: int, text: str) -> None:
        line.close()
        if is_text:
            writer.write(text)
        elif options.as_lines:
            writer.write(f"{json_text({'token_id': token_id, 'text': text})}\n")

    with cancel_on_signal() as cancellation, closing(line):
        result = model.generate(
            prompt, params, on_token=on_token, cancel=cancellation.event, on_prefill=line.show, **_path(options)
        )
    if not is_text:
        writer.write(f"{json_text(_record(result, options))}\n")
    writer.end_line()
    _raise_failure([result], "the generation")
    if not cancellation.exit_status:
        _report(time_lines(result, verbose=options.verbose), [result], params, options)
        if options.permalink:
            print(Permalink.of(body, result, model.system_fingerprint).url, file=sys.stderr)
    return cancellation.exit_status


def answer_many(
    model: "infer.LLM", prompts: Sequence[Prompt], params: Sequence[SamplingParams], options: GenerateOptions
) -> int:
    """Answer all prompts and return the exit status.

    Answers are written when all have ended, including those that a signal stopped. As JSON lines, each answer is
    written with its index when it ends.
    """
    writer, started = TextWriter(sys.stdout), time.perf_counter()
    spinner = Spinner(f"answering {len(prompts)} prompts")

    def on_result(index: int, result: GenerationResult) -> None:
        writer.write(f"{json_text({'index': index} | _record(result, options))}\n")

    with cancel_on_signal() as cancellation:
        with spinner:
            results = model.generate_all(
                prompts,
                params,
                batch_size=options.batch_size,
                cancel=cancellation.event,
                on_progress=spinner.progress,
                on_result=on_result if options.as_lines else None,
                **_path(options),
            )
        seconds = time.perf_counter() - started
        if not options.as_lines:
            for index, result in enumerate(results):
                text = f"{json_text(_record(result, options))}\n"
                writer.write(text if options.as_json else "\n" * (index > 0) + result.text)
                writer.end_line()
    _raise_failure(results, "the answer to prompt")
    if not cancellation.exit_status:
        _report([total_line(results, seconds)], results, params[0], options)
    return cancellation.exit_status


def _path(options: GenerateOptions) -> dict[str, Any]:
    names = ("speculation", "num_draft_tokens", "prefill_chunk", "overflow")
    return {name: getattr(options, name) for name in names}


def _record(result: GenerationResult, options: GenerateOptions) -> dict[str, Any]:
    return {"model": options.model} | result.to_json()


def _raise_failure(results: Sequence[GenerationResult], what: str) -> None:
    for index, result in enumerate(results, 1):
        if result.error is not None:
            raise InvalidRequestError(f"{what}{f' {index}' * (len(results) > 1)} ended early: {result.error}")


def _report(
    lines: Iterable[str], results: Sequence[GenerationResult], params: SamplingParams, options: GenerateOptions
) -> None:
    """Print the cut answers and the lines unless `--quiet` is given, and the figures of `--stats`."""
    shown = [] if options.quiet else [*cut_lines(results), *lines]
    shown += stats_lines(results, params, options) if options.stats else ()
    if shown:
        print("\n".join(shown), file=sys.stderr)


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
    between = "– (fewer than two tokens)" if rate is None else f"{1000 / rate:.2f} ms ({rate_text(timing)})"
    yield f"Avg TBT: {between}"
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
    counts = ((each.generated_tokens, each.prompt_tokens, each.reused_tokens) for each in results)
    count, prompt, reused = map(sum, zip(*counts, strict=True))
    held = [name for name in CONSTRAINTS if getattr(params, name) is not None]
    speculation = options.speculation or ("draft" if options.settings.draft_model or stats.drafts_proposed else "off")
    guessed = [] if speculation == "off" else [f"{speculation} speculation"]
    steps = counted(stats.prefill_steps + len(results), "step")  # a first token's step reads the end of its prompt
    multi, in_multi = stats.multi_steps, stats.multi_step_tokens
    drafts, accepted = stats.drafts_proposed, stats.drafts_accepted
    rows = [
        ("path", ", ".join(["greedy" if params.is_greedy else "sampled", *guessed, *held])),
        ("prompt", f"{counted(prompt, 'token')} in {steps}" + (f", {reused} of them reused" if reused else "")),
        ("answer", counted(count, "token")),
        ("multi-steps", f"{multi} of {in_multi / multi:.1f} tokens, {in_multi} in all" if multi else "none"),
        ("single steps", f"{stats.single_steps}"),
        ("drafts", f"{drafts} proposed, {accepted} accepted ({accepted / drafts:.0%})" if drafts else "none"),
        ("masks", f"{stats.masks_filled} filled" if stats.masks_filled else "none"),
        ("forced", counted(stats.tokens_forced, "token") + " not sampled" if stats.tokens_forced else "none"),
        *(_times(results[0].timing) if len(results) == 1 else ()),
    ]
    return columns_of_rows(rows, "<<")


def _times(timing: GenerationTiming) -> Iterator[tuple[str, str]]:
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


def run_trace(model: "infer.LLM", prompt: Prompt, params: SamplingParams, options: TraceOptions) -> None:
    """Trace one token, and print the table."""
    with Spinner(f"step {options.step}"):
        trace = model.sample_trace(prompt, params, step=options.step, num_candidates=options.num_candidates)
    if options.as_json:
        print_report({"model": options.model} | trace.to_json(), (), as_json=True)
        return
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns if is_terminal else None
    for line in trace_lines(trace, width):
        click.echo(line, color=is_terminal and "NO_COLOR" not in os.environ)


def trace_lines(trace: SampleTrace, width: int | None = None) -> Iterator[str]:
    """Yield the table with styles.

    If it does not fit the width, it is divided into several tables, each with some of the stages.
    """
    seed = "greedy" if trace.seed is None else f"seed {trace.seed}"
    yield f"step {trace.step}, after {_quoted(_tail(trace.text_before, 48))}: position {trace.position}, {seed}"
    lines = _lines(trace)
    label_width, *widths = (max(display_width(text) for text, _ in column) for column in zip(*lines, strict=True))
    for columns in _fitting(widths, None if width is None else width - label_width):
        yield ""
        for (label, style), *cells in lines:
            head = (style(label) if label else "") + " " * (label_width - display_width(label))
            padded = ((f"{cells[i][0]:>{widths[i]}}", cells[i][1]) for i in columns)
            yield "  ".join([head, *(style(text) if text.strip() else text for text, style in padded)]).rstrip()
    yield ""
    chosen = trace.chosen
    yield (
        f"chosen: {_quoted(chosen.text)} ({chosen.token_id}), number {chosen.rank} by its raw logit, "
        f"{_percent(chosen.probabilities[-1])} after the last stage"
    )


def _lines(trace: SampleTrace) -> list[list[Cell]]:
    """Return the lines of the table: a label, and a cell per stage and per number of the race."""
    headings = {name: parameter.stage for name, parameter in PARAMETERS.items()}
    names = [headings.get(stage.name, stage.name) for stage in trace.stages]
    race = ["logit"] if trace.seed is None else ["logit", "+ noise", "= score"]
    blank: list[Cell] = [("", str)] * len(race)

    def line(label: str, texts: Iterable[str], style: Style = _dim) -> list[Cell]:
        return [(label, str), *((text, style) for text in texts), *blank]

    def shares(name: str) -> list[str]:
        return [_percent(share) if (share := getattr(stage, name)) else "" for stage in trace.stages]

    bars = [partial(_bar, stage.others, BLUE, _dim) for stage in trace.stages]
    return [
        [("", str), *((name, _bold) for name in (*names, *race))],
        line("", ("" if stage.value is None else f"{stage.value:g}" for stage in trace.stages)),
        *(_candidate_line(trace, candidate) for candidate in trace.candidates),
        [("others", _dim), *zip(shares("others"), bars, strict=True), *blank],
        line("tokens left", (f"{stage.num_kept:,}" for stage in trace.stages), str),
        line("mass removed", shares("removed")),
        line("mass moved", shares("moved")),
    ]


def _candidate_line(trace: SampleTrace, candidate: TraceCandidate) -> list[Cell]:
    style, color, mark = (_bold, ORANGE, "→") if candidate.token_id == trace.token_id else (str, BLUE, " ")
    cells = [(f"{mark}{candidate.rank:>3} {shortened(_quoted(candidate.text), LABEL_WIDTH)}", style)]
    for stage, logit, probability in zip(trace.stages, candidate.logits, candidate.probabilities, strict=True):
        if logit is not None:
            cells.append((_percent(probability), partial(_bar, probability, color, style)))
        else:
            cells.append((DROPPED if stage.name == candidate.dropped_by else "", _dim))
    logit = candidate.logits[-1]
    race = [logit] if trace.seed is None else [logit, candidate.noise, candidate.score]
    return [*cells, *(("" if value is None else f"{value:.2f}", style) for value in race)]


def _bold(text: str) -> str:
    return click.style(text, bold=True)


def _dim(text: str) -> str:
    return click.style(text, dim=True)


def _bar(share: float, color: int, style: Style, text: str) -> str:
    """Return the text with a share of its width shaded."""
    shaded = round(min(max(share, 0.0), 1.0) * len(text))
    bar = click.style(text[:shaded], fg="bright_white", bg=color, bold=style is _bold or None) if shaded else ""
    return bar + (style(text[shaded:]) if text[shaded:].strip() else text[shaded:])


def _fitting(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Divide the columns into as few groups as fit next to the labels, and return them."""
    groups: list[list[int]] = [[]]
    used = 0
    for index, width in enumerate(widths):
        if room is not None and groups[-1] and used + width + 2 > room:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += width + 2
    return groups


def _percent(share: float) -> str:
    """Return a share in percent, with two decimals. A share that would round to 0 is shown as <0.01%."""
    return "<0.01%" if 0 < share < 0.00005 else f"{share:.2%}"


def _quoted(text: str) -> str:
    """Return the text in quotes, on one line, with escapes for characters that do not print."""
    return "'" + "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text) + "'"


def _tail(text: str, count: int) -> str:
    return text if len(text) <= count else "…" + text[1 - count :]
