"""Answer rows with one model in this process, as a batch of the engine. Each row gets a line, also after a failure.

Neighbouring rows of one task about texts with equal options are computed together. A row's line is the same as alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from infer.compute.sampling.keywords import default_params
from infer.engine.requests.ask import Ask
from infer.engine.requests.prompt_batch import answer_all
from infer.engine.requests.prompt_encoding import is_conversation
from infer.engine.step.request_options import RequestOptions
from infer.engine.step.sequence import Sequence
from infer.engine.texts.text_ids import TextIds
from infer.engine.texts.text_tasks import TextTask, classifier_of, classify, embed, rerank, together
from infer.errors import InferError, InvalidRequestError
from infer.llm import LLM
from infer.sampling_params import values_from, without_zeros
from infer.serving.batch_file.batch_rows import BatchSettings, Row, TextsBody, Write
from infer.serving.protocols.bodies import Served, seed_of
from infer.serving.protocols.events import Spelling
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody
from infer.serving.protocols.retrieval import ClassifyBody, EmbeddingsBody, RerankBody

MAX_TEXTS, MAX_TOKENS = 256, 4096  # computed together: many steps, but few seconds, after which their lines are written

_Prepared = tuple[Row, TextTask[Any], TextIds]


def answer_rows(llm: LLM, rows: Iterable[Row], settings: BatchSettings, write: Write) -> None:
    """Write each row's line when its answer ends.

    Rows are read when there is room for them. Cancelled rows get no line.
    """
    host, under_way = llm.host, dict[int, Row]()

    def sequences() -> Iterator[tuple[int, Sequence]]:
        for number, row in enumerate(answer_texts(llm, rows, settings, write)):
            try:
                sequence = _sequence_of(llm, row, settings)
            except InvalidRequestError as error:
                write(row.refusal_line(error, settings.model))
            else:
                under_way[number] = row
                yield number, sequence

    spelling = Spelling.of(llm.tokenizer)
    for number, result in answer_all(host.loop, sequences(), settings.batch_size):
        row = under_way.pop(number)
        if result.finish_reason != "abort":
            shown = replace(result, warnings=row.warnings + result.warnings)
            write(row.result_line(shown, settings.model, spelling))


def _sequence_of(llm: LLM, row: Row, settings: BatchSettings) -> Sequence:
    """Return the sequence that answers a row. Raises InvalidRequestError."""
    if row.problem is not None:
        raise InvalidRequestError(row.problem)
    served = Served(llm, values=settings.values, seed=seed_of(settings.seed, row.id))
    if isinstance(row.body, ChatBody | CompletionBody):
        asked: Any = row.body.ask(served)  # at once, because a row has no suffix
    else:
        values = {"seed": served.seed, **settings.values, **without_zeros(values_from(row.values))}
        params = default_params(llm.sampling_defaults, values, is_chat=is_conversation(row.prompt))
        asked = Ask([row.prompt], [params], RequestOptions(**row.options))
    return llm.host.requests.sequence(replace(asked, options=replace(asked.options, cancel=settings.cancel)))


def answer_texts(llm: LLM, rows: Iterable[Row], settings: BatchSettings, write: Write) -> Iterator[Row]:
    """Write the line of each row of texts, and yield all other rows."""
    waiting, cancel = list[_Prepared](), settings.cancel

    def write_waiting() -> None:
        if not (cancel and cancel.is_set()):
            _write_lines(llm, waiting, settings.model, write)
        waiting.clear()

    for row in rows:
        if not isinstance(row.body, TextsBody):
            write_waiting()
            yield row
            continue
        try:
            task = _task_of(llm, row)
            texts = task.prepare(lambda: None)
        except InvalidRequestError as error:
            write_waiting()
            write(row.refusal_line(error, settings.model))
            continue
        if waiting and (task.group is None or task.group != waiting[0][1].group):
            write_waiting()
        waiting.append((row, task, texts))
        all_texts = [each for _, _, texts in waiting for each in texts.texts]
        if len(all_texts) >= MAX_TEXTS or sum(len(each.ids) for each in all_texts) >= MAX_TOKENS:
            write_waiting()
    write_waiting()


def _write_lines(llm: LLM, rows: list[_Prepared], model: str, write: Write) -> None:
    """Compute rows together, and write their lines. If that fails, compute each alone, because it has its own error."""
    if not rows:
        return
    try:
        results = llm.host.loop.call(together([(task, texts) for _, task, texts in rows])).get()
    except InferError as error:
        if len(rows) > 1:
            for each in rows:
                _write_lines(llm, [each], model, write)
        elif isinstance(error, InvalidRequestError):
            write(rows[0][0].refusal_line(error, model))
        else:
            raise
    else:
        for (row, _, texts), items in zip(rows, results, strict=True):
            write(row.texts_line(msgspec.to_builtins(items), texts, model))


def _task_of(llm: LLM, row: Row) -> TextTask[Any]:
    """Return the task of a row, whose result has the items of the answer.

    Raises InvalidRequestError if the model cannot compute it.
    """
    host, body = llm.host, row.body
    if isinstance(body, EmbeddingsBody):
        if host.facts.heads.embedder is None and body.pooling is None:
            raise InvalidRequestError("this model was not trained for embeddings: give pooling to use it anyway")
        return embed(host, body.texts(), body.options()).then(lambda vectors: body.items(vectors.numpy()))
    if isinstance(body, ClassifyBody):
        task = classify(host, body.texts(), truncate=bool(body.truncate))
        labels = classifier_of(host).labels
        return task.then(lambda values: body.items(values, labels))
    assert isinstance(body, RerankBody)
    options = {"truncate": bool(body.truncate), "is_raw": bool(body.raw_scores)}
    documents = body.document_texts()
    return rerank(host, body.query, documents, body.top_n, body.instruction, **options).then(body.items)
