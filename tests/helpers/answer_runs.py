"""The way in which the requests of `answer_cases` are run, through the public API, and their answers as rows of JSON.

A row has the token ids and finish reasons of each answer, and digests of bits: of the logits after every token of the
prompt and the answer, and of log-probabilities, vectors or scores if the request asks for these.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from answer_cases import TEXT, Case
from answer_models import MODELS
from infer import LLM, GenerationResult

Row = dict[str, Any]
_STORED = Path(__file__).parents[1] / "data" / "answers.json"


def read_stored() -> dict[str, Row]:
    """Return the stored rows by name."""
    rows: dict[str, Row] = json.loads(_STORED.read_text(encoding="utf-8")) if _STORED.exists() else {}
    return rows


def write_stored(rows: Mapping[str, Row]) -> None:
    """Store the rows, one per line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    _STORED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def differences(stored: Row, found: Row) -> list[str]:
    """Return a line for each part of a row that differs: the first token that differs, or the value of another part."""
    first = _first_token(stored.get("ids", []), found.get("ids", []))
    parts = [name for name in {**stored, **found} if name != "ids" and stored.get(name) != found.get(name)]
    lines = [f"{name} is {found.get(name)}, stored is {stored.get(name)}" for name in parts]
    return lines if first is None else [first, *lines]


def _first_token(stored: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> str | None:
    """Return a line for the first token that differs, or None."""
    if len(stored) != len(found):
        return f"there are {len(found)} answers, stored are {len(stored)}"
    for at, (wanted, token_ids) in enumerate(zip(stored, found, strict=True)):
        for place, (one, other) in enumerate(zip_longest(wanted, token_ids)):
            if one != other:
                now, before = "missing" if other is None else other, "no token" if one is None else one
                return f"token {place} of answer {at} is {now}, stored is {before}"
    return None


def write_model(name: str, folder: Path) -> Path:
    """Write a model into an existing folder, unless it is there, and return the path for `LLM`."""
    path = folder / name.replace(" ", "-")
    if name == "gguf":
        from answer_gguf import write_mixed_gguf  # here, because emulated CPUs have no `gguf` package

        if not path.exists():
            path.mkdir()
            write_mixed_gguf(path / "model.gguf")
        return path / "model.gguf"
    return path if path.exists() else MODELS[name]().write(path)


class Answers:
    """Answers to cases. The model of the last case stays loaded for the next one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: tuple[str, LLM] | None = None

    def of(self, case: Case) -> Row:
        """Return the row of a case."""
        key = repr((case.model, sorted(case.settings.items())))
        if self._loaded is None or self._loaded[0] != key:
            self.close()
            self._loaded = key, LLM(write_model(case.model, self._folder), **case.settings)
        return answer(self._loaded[1], case)

    def close(self) -> None:
        """Close the loaded model."""
        if self._loaded is not None:
            self._loaded[1].close()
            self._loaded = None


@contextmanager
def answers_in(folder: Path) -> Iterator[Answers]:
    """Yield an object that answers cases, with models in `folder`. Close its model at the end."""
    with closing(Answers(folder)) as answers:
        yield answers


def answer(llm: LLM, case: Case) -> Row:
    """Return the row of a case that the model answers."""
    params, encode = dict(case.params), llm.tokenizer.encode
    if case.call == "generate":
        return _row(llm, [(encode(case.asked), llm.generate(case.asked, **params))])
    if case.call == "generate_all":
        results = llm.generate_all(case.asked, **params)
        return _row(llm, list(zip(map(encode, case.asked), results, strict=True)))
    if case.call == "chat":
        tools = {"tools": params["tools"]} if "tools" in params else {}
        return _row(llm, [(llm.tokenizer.encode_chat(case.asked, **tools), llm.chat(case.asked, **params))])
    if case.call == "session":
        return _session(llm, case.asked, params)
    return {"bits": digest(_numbers(llm, case, params))}


def _session(llm: LLM, messages: Sequence[str], params: dict[str, Any]) -> Row:
    """Return the row of a conversation. Its logits are those of all its tokens."""
    with llm.session() as session:
        results = [session.send(message, **params) for message in messages]
        logits = llm.logits(session.token_ids)
    return _answered(results) | {"logits": digest(logits)}


def _row(llm: LLM, answered: Sequence[tuple[list[int], GenerationResult]]) -> Row:
    """Return the row of answers to prompts of ids."""
    results = [result for _, result in answered]
    texts = [[*prompt, *result.token_ids][-llm.max_seq_len :] for prompt, result in answered]
    return _answered(results) | {"logits": digest(torch.cat([llm.logits(ids) for ids in texts]))}


def _answered(results: Sequence[GenerationResult]) -> Row:
    row: Row = {"ids": [result.token_ids for result in results]}
    row["ends"] = [f"{result.finish_reason} {result.stop_reason}" for result in results]
    if scored := [entry for result in results for entry in result.logprobs or ()]:
        numbers = ((each.rank, each.logprob, *sum(each.top, ())) for each in scored)
        row["logprobs"] = digest([number for each in numbers for number in each])
    return row


def _numbers(llm: LLM, case: Case, params: dict[str, Any]) -> Sequence[float] | torch.Tensor:
    """Return the numbers that a call without an answer returns."""
    if case.call == "score":
        return [entry.logprob for entry in llm.prompt_logprobs(case.asked) if entry is not None]
    if case.call == "embed":
        return llm.embed(case.asked, **params)
    if case.call == "rerank":
        return [number for found in llm.rerank(TEXT, case.asked) for number in (found.index, found.score)]
    return [number for found in llm.classify(case.asked) for number in found.probabilities]


def digest(numbers: Sequence[float] | torch.Tensor) -> str:
    """Return a digest of the numbers' bits as float32. The last bits of a float64 depend on torch's library."""
    return hashlib.sha256(np.asarray(numbers, dtype=np.float32).tobytes()).hexdigest()[:12]
