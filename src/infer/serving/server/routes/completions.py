"""`/v1/completions`: continue texts or ids, with n choices each. With `echo`, the prompt is part of the answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import astuple
from msgspec.structs import replace as replace_fields
from starlette.requests import Request
from starlette.responses import Response

import infer
from infer.engine.requests.ask import Ask
from infer.outputs import GenerationResult, TokenLogprob
from infer.serving.protocols.chat_answers import FINISH_REASONS, Spelling, completion_columns
from infer.serving.protocols.fields import Reading, refuse
from infer.serving.protocols.openai.ask import CompletionBody, ask_completion
from infer.serving.server.answer_types import (
    AnswerHead,
    Bytes,
    Count,
    FinishReason,
    HeadedAnswer,
    Json,
    Usage,
    extension,
    logprobs_of,
    prompt_logprobs_of,
    token_columns,
    usage_of,
)
from infer.serving.server.call import call_of
from infer.serving.server.choices import ChoicePart, accept
from infer.serving.server.endpoint import answer_any_model, post
from infer.serving.server.replies import ReplyFormat, Scores, StreamUsage, make_head, reply, score_prompts
from infer.serving.server.routes.tokens import prepared
from infer.serving.server.server_state import ServerState


async def complete(request: Request, state: ServerState, body: CompletionBody) -> Response:
    llm = answer_any_model(request, state, body.model)
    asked = await ask_to_complete(request, state, body)
    choices = await accept(request, state, asked)
    ids = choices.prompt_ids
    echoed = await score_prompts(request, state, ids, body.logprobs if body.echo else None)
    scored = await score_prompts(request, state, ids, body.prompt_logprobs)
    prompts = [Prompt(*each) for each in zip(asked.prompts, ids, echoed, scored, strict=True)]
    head = make_head("cmpl-", request, state)
    shape = CompletionShape(head, body, llm.tokenizer, prompts)
    return await reply(request, state, choices, shape, is_streamed=body.stream)


async def ask_to_complete(request: Request, state: ServerState, body: CompletionBody) -> Ask:
    """Return what the body asks for. A prompt with a suffix gets the marks of its model. Raises ApiError."""
    asked = ask_completion(body, state.llm().llm.sampling_defaults)
    return await _filling_in(request, state, body, asked) if body.suffix else asked


async def _filling_in(request: Request, state: ServerState, body: CompletionBody, asked: Ask) -> Ask:
    """Return the prompts with `suffix` after the text that is to be written.

    If the model cannot fill in text, warn and continue the prompts. Raises ApiError.
    """
    tokenizer, after = state.llm().llm.tokenizer, body.suffix or ""
    if tokenizer.infill_marks is None:
        problem = "suffix: this model has no tokens to fill in text; the prompt is continued"
        if state.settings.unknown_fields == "refuse":
            raise refuse(f"{problem}: leave it out", "suffix")
        Reading(state.settings.unknown_fields, call_of(request).warnings).warn(problem)
        return asked
    if body.echo:
        raise refuse("echo must not be given with suffix: leave out echo", "echo")
    if any(not isinstance(each, str) for each in asked.prompts):
        raise refuse("with suffix, prompts must be texts, got token ids: put the suffix into the ids", "prompt")
    prompts = await prepared(
        request, state, lambda: [tokenizer.encode_infill(each, after) for each in asked.prompts], "suffix"
    )
    return between(asked, prompts, tokenizer)


def between(asked: Ask, prompts: Sequence[Sequence[int]], tokenizer: "infer.Tokenizer") -> Ask:
    """Return the request with the encoded texts as its prompts. The answer also ends at the marks' end tokens."""
    ends = () if tokenizer.infill_marks is None else tokenizer.infill_marks.ends
    params = [replace(each, stop_token_ids=[*(each.stop_token_ids or ()), *ends]) for each in asked.params]
    return replace(asked, prompts=prompts, params=params)


class CompletionLogprobs(Struct):
    """Log-probabilities by columns, with one entry per token. An entry is null for a token that is not scored."""

    tokens: list[str | None]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]

    def __add__(self, other: "CompletionLogprobs") -> "CompletionLogprobs":
        return CompletionLogprobs(
            *(first + second for first, second in zip(astuple(self), astuple(other), strict=True))
        )


class CompletionChoice(Struct):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    token_bytes: list[Bytes] | UnsetType = UNSET
    token_origins: list[str] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Json | None] | UnsetType = UNSET


class Completion(HeadedAnswer, tag_field="object", tag="text_completion"):
    """The answer, or a chunk of it. The last chunks have the usage and the reasons why choices ended."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Prompt(NamedTuple):
    given: Any
    ids: Sequence[int]
    echoed: Scores  # set if the prompt is echoed with log-probabilities
    scored: Scores  # set if `prompt_logprobs` asks for them


@final
class CompletionShape(ReplyFormat):
    def __init__(
        self, head: AnswerHead, body: CompletionBody, tokenizer: "infer.Tokenizer", prompts: Sequence[Prompt]
    ) -> None:
        self._head, self._body, self._tokenizer, self._usage = head, body, tokenizer, StreamUsage.of(body)
        self._num_prompt_tokens, self._num_tokens = sum(len(prompt.ids) for prompt in prompts), 0
        self._spelling, self._num_choices = Spelling.of(tokenizer), body.n or 1
        self._openings = [self._opening(prompt) for prompt in prompts]
        starts = [len(opening.text) for opening in self._openings]
        ids = [prompt.ids for prompt in prompts]
        self._offsets = [
            _Offsets(tokenizer, start, before)
            for before, start in zip(ids, starts, strict=True)
            for _ in range(self._num_choices)
        ]

    def whole(self, results: Sequence[GenerationResult]) -> Completion:
        choices = list[CompletionChoice]()
        for index, result in enumerate(results):
            choice = self._begun(index)
            columns = self._columns(index, result.token_ids, result.logprobs or ())
            choice.text += result.text
            choice.logprobs = choice.logprobs + columns if choice.logprobs and columns else columns
            choice.finish_reason = FINISH_REASONS[result.finish_reason]
            if self._body.return_token_ids:
                choice.token_ids = list(result.token_ids)
            choices.append(choice)
        usage, facts = usage_of(results, self._num_choices), extension(dict(enumerate(results)))
        return Completion(*self._head, choices, usage, infer=facts)

    def opening(self) -> list[Completion]:
        """Return one chunk per choice if a part of its prompt is to be sent, else none."""
        if not (self._body.echo or self._body.return_token_ids or self._body.prompt_logprobs is not None):
            return []
        return [self._chunk(self._begun(index)) for index in range(len(self._openings) * self._num_choices)]

    def chunks(self, part: ChoicePart) -> list[Completion]:
        self._num_tokens += len(part.pieces)
        if part.result is not None:
            reason = FINISH_REASONS[part.result.finish_reason]
            chunk = self._chunk(CompletionChoice(part.choice, part.text, finish_reason=reason))
            chunk.infer = extension({part.choice: part.result})
            return [chunk]
        columns = self._columns(part.choice, [piece.token_id for piece in part.pieces], logprobs_of(part.pieces))
        ids = token_columns(part.pieces, self._spelling.token_bytes) if self._body.return_token_ids else {}
        if not (part.text or columns or ids):
            return []
        return [self._chunk(CompletionChoice(part.choice, part.text, columns, **ids))]

    def closing(self, results: Sequence[GenerationResult]) -> list[Completion]:
        return [Completion(*self._head, [], usage_of(results, self._num_choices))] if self._usage.is_last else []

    def _opening(self, prompt: Prompt) -> CompletionChoice:
        """Return the fields of a choice that come from its prompt.

        They are its text and log-probabilities if the prompt is echoed, and its ids and scores if they were requested.
        """
        begun = CompletionChoice(0, "")
        if self._body.echo:
            is_text = isinstance(prompt.given, str)
            begun.text = prompt.given if is_text else self._tokenizer.decode(prompt.ids, skip_special_tokens=False)
            if self._body.logprobs is not None:
                begun.logprobs = self._prompt_columns(prompt, adds_bos=is_text and self._tokenizer.adds_bos)
        if self._body.return_token_ids:
            begun.prompt_token_ids = list(prompt.ids)
        if prompt.scored:
            begun.prompt_logprobs = prompt_logprobs_of(prompt.scored, self._spelling)
        return begun

    def _begun(self, index: int) -> CompletionChoice:
        """Return the choice with this index before its first token."""
        return replace_fields(self._openings[index // self._num_choices], index=index)

    def _prompt_columns(self, prompt: Prompt, *, adds_bos: bool) -> CompletionLogprobs:
        columns = completion_columns(prompt.echoed, self._spelling)
        columns["tokens"][0] = self._spelling.text(prompt.ids[0])
        offsets = _Offsets(self._tokenizer, 0)
        before = [0] if adds_bos else []  # BOS is not a part of the text
        return CompletionLogprobs(**columns, text_offset=before + offsets.of(prompt.ids[len(before) :]))

    def _columns(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of a choice's next tokens, including the one that ends it.

        None if no log-probabilities were requested.
        """
        if self._body.logprobs is None:
            return None
        columns = completion_columns(logprobs, self._spelling)
        return CompletionLogprobs(**columns, text_offset=self._offsets[index].of(token_ids))

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return Completion(*self._head, [choice], self._usage.after(self._num_prompt_tokens, self._num_tokens))


@final
class _Offsets:
    """Counts the characters of a text before each token: of an answer to a prompt, or of a prompt."""

    def __init__(self, tokenizer: "infer.Tokenizer", start: int, prompt_ids: Sequence[int] | None = None) -> None:
        self._detokenizer = tokenizer.make_detokenizer(prompt_ids is not None, prompt_ids)
        self._num_characters = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the number of characters before each of the next tokens."""
        found = list[int]()
        for token_id in token_ids:
            found.append(self._num_characters)
            self._num_characters += len(self._detokenizer.push(token_id))
        return found


ROUTES = [
    post("/v1/completions", complete, "Continue a text", CompletionBody, Completion, "text_completion", streams=True)
]
