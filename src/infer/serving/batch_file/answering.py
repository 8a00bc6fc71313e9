"""Answer rows with one model in this process, as a batch of the engine. Each row gets a line, also after a failure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from infer.compute.sampling.defaults import default_params
from infer.engine.requests.ask import Ask
from infer.engine.requests.prompt_batch import answer_all
from infer.engine.step.sequence import Sequence
from infer.errors import InvalidRequestError
from infer.llm import LLM
from infer.request_limits import NUM_TOKENS_OF_COMPLETIONS
from infer.sampling_params import values_from, without_zeros
from infer.serving.batch_file.result_line import refusal_line, result_line
from infer.serving.batch_file.row import ENDPOINTS, Row
from infer.serving.batch_file.settings import BatchSettings, Write
from infer.serving.batch_file.texts import answer_texts
from infer.serving.protocols.params import seed_of
from infer.serving.protocols.token_logprobs import Spelling
from infer.serving.protocols.tool_options import effort_variables


def answer_rows(llm: LLM, rows: Iterable[Row], settings: BatchSettings, write: Write) -> None:
    """Write each row's line when its answer ends.

    Rows are read when there is room for them. Cancelled rows get no line.
    """
    host, under_way = llm._opened, dict[int, Row]()

    def sequences() -> Iterator[tuple[int, Sequence]]:
        for number, row in enumerate(answer_texts(llm, rows, settings, write)):
            try:
                sequence = _sequence_of(llm, row, settings)
            except InvalidRequestError as error:
                write(refusal_line(row, error, settings.model))
            else:
                under_way[number] = row
                yield number, sequence

    spelling = Spelling.of(llm.tokenizer)
    for number, result in answer_all(host.loop, sequences(), settings.batch_size):
        row = under_way.pop(number)
        if result.finish_reason != "abort":
            shown = replace(result, warnings=row.warnings + result.warnings)
            write(result_line(row, shown, settings.model, spelling))


def _sequence_of(llm: LLM, row: Row, settings: BatchSettings) -> Sequence:
    """Return the sequence that answers a row. Raises InvalidRequestError."""
    if row.problem is not None:
        raise InvalidRequestError(row.problem)
    is_chat = not isinstance(row.prompt, str) and any(isinstance(each, Mapping) for each in row.prompt)
    values: dict[str, Any] = {"seed": seed_of(settings.seed, row.id)}
    if row.endpoint == ENDPOINTS[1]:
        values["max_new_tokens"] = NUM_TOKENS_OF_COMPLETIONS
    values |= {**settings.values, **without_zeros(values_from(row.values))}
    params = default_params(llm.sampling_defaults, is_chat=is_chat, **values)
    variables = {**effort_variables(row.effort, llm.tokenizer.chat_template), **row.variables}
    options = replace(settings.options, **row.options)
    return llm._opened.requests.sequence(Ask([row.prompt], [params], options, variables=variables))
