"""`infer generate`: write one answer while it is generated, or many in the order of their prompts."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import infer
from infer.cli.answers.answer_report import cut_lines, stats_lines, time_lines, total_line
from infer.cli.answers.permalink import Permalink, body_of
from infer.cli.options.command_options import GenerateOptions
from infer.cli.options.prompts import Prompt
from infer.cli.terminal.signals import cancel_on_signal
from infer.cli.terminal.terminal import PrefillLine, Spinner, TextWriter
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams


def answer_one(model: "infer.LLM", prompt: Prompt, params: SamplingParams, options: GenerateOptions) -> int:
    """Answer one prompt and return the exit status. The text goes to stdout while it is generated."""
    writer, line = TextWriter(sys.stdout), PrefillLine(shown=not options.quiet)
    is_text = not (options.as_json or options.as_lines)
    body = body_of(prompt, params, options.model) if options.permalink else None

    def on_token(token_id: int, text: str) -> None:
        line.close()
        if is_text:
            writer.write(text)
        elif options.as_lines:
            writer.write(_json_line({"token_id": token_id, "text": text}))

    with cancel_on_signal() as cancellation:
        try:
            result = model.generate(
                prompt, params, on_token=on_token, cancel=cancellation.event, on_prefill=line.show, **_path(options)
            )
        finally:
            line.close()
    if not is_text:
        writer.write(_json_line(_record(result, options)))
    writer.end_line()
    _raise_failure([result], "the generation")
    if not cancellation.exit_status:
        lines = () if options.quiet else [*cut_lines([result]), *time_lines(result, verbose=options.verbose)]
        _report(lines, [result], params, options)
        if body is not None:
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
    spinner = Spinner(f"answering {len(prompts)} prompts", shown=not options.quiet)

    def on_result(index: int, result: GenerationResult) -> None:
        writer.write(_json_line({"index": index} | _record(result, options)))

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
            _write_all(results, writer, options)
    _raise_failure(results, "the answer to prompt")
    if not cancellation.exit_status:
        lines = () if options.quiet else [*cut_lines(results), total_line(results, seconds)]
        _report(lines, results, params[0], options)
    return cancellation.exit_status


def _write_all(results: Sequence[GenerationResult], writer: TextWriter, options: GenerateOptions) -> None:
    for index, result in enumerate(results):
        if options.as_json:
            writer.write(_json_line(_record(result, options)))
        else:
            writer.write("\n" * (index > 0) + result.text)
        writer.end_line()


def _path(options: GenerateOptions) -> dict[str, Any]:
    return {
        "speculation": options.speculation,
        "num_draft_tokens": options.num_draft_tokens,
        "prefill_chunk": options.prefill_chunk,
        "overflow": options.overflow,
    }


def _record(result: GenerationResult, options: GenerateOptions) -> dict[str, Any]:
    return {"model": options.model} | result.to_json()


def _json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _raise_failure(results: Sequence[GenerationResult], what: str) -> None:
    for index, result in enumerate(results, 1):
        if result.error is not None:
            raise InvalidRequestError(f"{what}{f' {index}' * (len(results) > 1)} ended early: {result.error}")


def _report(
    lines: Iterable[str], results: Sequence[GenerationResult], params: SamplingParams, options: GenerateOptions
) -> None:
    shown = [*lines, *(stats_lines(results, params, options) if options.stats else ())]
    if shown:
        print("\n".join(shown), file=sys.stderr)
