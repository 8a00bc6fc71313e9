"""Answer rows with one model in this process: as a batch of the engine, with one line per row, also after a failure."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import tee
from typing import Any

from infer.batch_file.openai_logprobs import Spelling
from infer.batch_file.result_line import error_line, result_line
from infer.batch_file.row import Row, seed_of
from infer.batch_file.settings import BatchSettings, Write
from infer.errors import InvalidRequestError
from infer.llm import LLM
from infer.sampling_params import values_from

_REFUSED = "invalid_request"


def answer_rows(llm: LLM, rows: Iterable[Row], settings: BatchSettings, write: Write) -> None:
    """Write each row's line when its answer ends.

    Rows are read when there is room for them. Cancelled rows get no line.
    """
    under_way = dict[int, Row]()
    rows_of_prompts, rows_of_params = tee(_askable(rows, settings, write))

    def params() -> Iterator[Mapping[str, Any]]:
        for number, row in enumerate(rows_of_params):
            under_way[number] = row
            yield {**row.values, **row.options}

    def refuse(number: int, error: InvalidRequestError) -> None:
        row = under_way.pop(number)
        write(error_line(row, _REFUSED, str(error), settings.model))

    spelling = Spelling.of(llm.tokenizer)
    prompts = (row.prompt for row in rows_of_prompts)
    answers = llm.generate_iter(
        prompts, params(), batch_size=settings.batch_size, on_error=refuse, options=settings.options
    )
    for number, result in answers:
        row = under_way.pop(number)
        if result.finish_reason != "abort":
            write(result_line(row, result, settings.model, spelling))


def _askable(rows: Iterable[Row], settings: BatchSettings, write: Write) -> Iterator[Row]:
    """Yield the rows that can be answered, with all their values. Write an error line for each of the others."""
    for row in rows:
        try:
            if row.problem is not None:
                raise InvalidRequestError(row.problem)
            values = {"seed": seed_of(settings.seed, row.id), **settings.values, **values_from(row.values)}
        except InvalidRequestError as error:
            write(error_line(row, _REFUSED, str(error), settings.model))
        else:
            yield row._replace(values=values)
