"""`infer batch` as an actor of Ray Data: it takes rows and returns the lines of `infer batch`, byte for byte.

    rows = ray.data.read_text("in.jsonl", override_num_blocks=64, ray_remote_args={"num_cpus": 0})
    rows.map_batches(
        BatchEngine, fn_constructor_kwargs={"model": "smollm2", "threads": 4}, num_cpus=4,
        batch_format="pyarrow", batch_size=64, compute=ray.data.ActorPoolStrategy(size=2),
    )

A line depends only on its row. A line that Ray computes twice, after a kill or for other reasons, is the same.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, final

from infer.engine.requests.prompt_batch import BATCH_SIZE
from infer.errors import InvalidRequestError
from infer.llm import LLM
from infer.serving.batch_file.answering import answer_rows
from infer.serving.batch_file.batch_rows import BatchSettings, Line, Row, read_row, row_of
from infer.system.cores import default_num_threads, take_cores

_TEXT = "text"  # the column of `ray.data.read_text`
_NO_ID = ""


@final
class BatchEngine:
    """Answers rows of a data set in an actor of Ray Data, with the lines of `infer batch`.

    Args:
        model: The model, as in `LLM`.
        seed: The seed from which, with its id, each row gets its own.
        values: Sampling parameters of rows that do not give them.
        finished: The ids of rows that get no line.
        batch_size: The number of rows that are answered at a time.
        settings: The other arguments of `LLM`.

    Examples:
        >>> rows = ray.data.read_text("in.jsonl", override_num_blocks=64)  # doctest: +SKIP
        >>> lines = rows.map_batches(  # doctest: +SKIP
        ...     BatchEngine, fn_constructor_kwargs={"model": "smollm2", "threads": 4},
        ...     num_cpus=4, batch_format="pyarrow", batch_size=64, compute=ray.data.ActorPoolStrategy(size=2),
        ... )
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        seed: int = 0,
        values: Mapping[str, Any] | None = None,
        finished: Collection[str] = (),
        batch_size: int = BATCH_SIZE,
        **settings: Any,
    ) -> None:
        take_cores(settings.get("threads") or default_num_threads())
        self._llm, self._finished = LLM(model, **settings), frozenset(finished)
        self._settings = BatchSettings(model, seed, batch_size, values or {})

    def __call__(self, batch: Any) -> Any:
        """Return the lines of a batch of rows.

        Args:
            batch: The rows, a `pyarrow.Table`.

        Returns:
            A table with the columns `id` and `line`.

        Raises:
            InvalidRequestError: A row has no id of its own, and there are no line numbers to name it after.
        """
        lines = dict[str, str]()

        def keep(line: Line) -> None:
            lines[line.row_id] = line.text

        rows = [row for row in _rows_of(batch) if row.id not in self._finished]
        if len({row.id for row in rows} - {_NO_ID}) < len(rows):
            raise InvalidRequestError("each row must have its own id: only the id says which row a line answers")
        answer_rows(self._llm, rows, self._settings, keep)
        found = [lines[row.id] for row in rows]
        return type(batch).from_pydict({"id": [row.id for row in rows], "line": found})


def _rows_of(batch: Any) -> Iterator[Row]:
    """Yield the rows of a batch. Null counts as absent, because a table has all columns in each row."""
    try:
        records = batch.to_pylist()
    except AttributeError:
        message = f'map_batches(BatchEngine, …) must have batch_format="pyarrow", got batches of {type(batch).__name__}'
        raise InvalidRequestError(message) from None
    for record in records:
        if record.keys() == {_TEXT}:
            if record[_TEXT].strip():
                yield read_row(record[_TEXT], _NO_ID)
        else:
            yield row_of(_without_nulls(record), _NO_ID)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
