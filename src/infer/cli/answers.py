"""`infer generate`: one answer as it comes, or many in the order of their prompts."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from infer.cli.model import Model
from infer.cli.prompts import Prompt
from infer.cli.report import stats_lines, time_lines, total_line
from infer.cli.terminal import Spinner, TextWriter, cancel_on_signal
from infer.errors import InvalidRequestError
from infer.params import SamplingParams
from infer.progress import PROGRESS_WIDTH, StatusLine, bar
from infer.results import GenerationResult


@final
class PrefillLine:
    """How much of a long prompt is read, where stderr is a terminal; gone before the first word."""

    def __init__(self, *, shown: bool) -> None:
        self._line = StatusLine() if shown and sys.stderr.isatty() else None

    def show(self, done: int, total: int) -> None:
        if self._line is not None:
            share = done / max(total, 1)
            self._line.show(f"prompt {bar(share, PROGRESS_WIDTH):<{PROGRESS_WIDTH}} {int(100 * share)} %")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def answer_one(model: Model, prompt: Prompt, params: SamplingParams, options: Mapping[str, Any]) -> int:
    """The exit status. The text goes to stdout as it comes."""
    writer, line = TextWriter(sys.stdout), PrefillLine(shown=not options["quiet"])

    def on_token(token_id: int, text: str) -> None:
        line.close()
        if not options["as_json"]:
            writer.write(text)

    with cancel_on_signal() as cancellation:
        try:
            result = model.generate(
                prompt, params, on_token=on_token, cancel=cancellation.event, on_prefill=line.show, **_path(options)
            )
        finally:
            line.close()
    if options["as_json"]:
        writer.write(_record(result, options))
    writer.end_line()
    _raise_failure([result], "the generation")
    if not cancellation.exit_status:
        lines = () if options["quiet"] else time_lines(result, verbose=options["verbose"])
        _tell(lines, [result], params, options)
    return cancellation.exit_status


def answer_many(
    model: Model, prompts: Sequence[Prompt], params: Sequence[SamplingParams], options: Mapping[str, Any]
) -> int:
    """The exit status. Answers are written when all are there, those that a signal cut short included."""
    writer, started = TextWriter(sys.stdout), time.perf_counter()
    spinner = Spinner(f"answering {len(prompts)} prompts", shown=not options["quiet"])
    with cancel_on_signal() as cancellation:
        with spinner:
            results = model.generate_all(
                prompts, params, cancel=cancellation.event, on_progress=spinner.progress, **_path(options)
            )
        seconds = time.perf_counter() - started
        for index, result in enumerate(results):
            if options["as_json"]:
                writer.write(_record(result, options))
            else:
                writer.write("\n" * (index > 0) + result.text)
            writer.end_line()
    _raise_failure(results, "the answer to prompt")
    if not cancellation.exit_status:
        _tell(() if options["quiet"] else [total_line(results, seconds)], results, params[0], options)
    return cancellation.exit_status


def _path(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "speculation": options["speculation"],
        "num_draft_tokens": options["draft_tokens"],
        "prefill_chunk": options["prefill_chunk"],
    }


def _record(result: GenerationResult, options: Mapping[str, Any]) -> str:
    return json.dumps({"model": options["model"]} | result.to_json(), ensure_ascii=False)


def _raise_failure(results: Sequence[GenerationResult], what: str) -> None:
    for index, result in enumerate(results, 1):
        if result.error is not None:
            raise InvalidRequestError(f"{what}{f' {index}' * (len(results) > 1)} ended early: {result.error}")


def _tell(
    lines: Iterable[str], results: Sequence[GenerationResult], params: SamplingParams, options: Mapping[str, Any]
) -> None:
    shown = [*lines, *(stats_lines(results, params, options) if options["stats"] else ())]
    if shown:
        print("\n".join(shown), file=sys.stderr)
