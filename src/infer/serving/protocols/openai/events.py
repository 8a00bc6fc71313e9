"""Answers of `/v1/chat/completions` and `/v1/completions`, whole or in chunks."""

from abc import abstractmethod
from collections.abc import Sequence
from operator import add
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, final

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import astuple
from msgspec.structs import replace as replace_fields

import infer
from infer.outputs import GenerationResult
from infer.serving.protocols.events import (
    FINISH_REASONS,
    Accepted,
    Bytes,
    Count,
    Delta,
    Json,
    Output,
    Scored,
    ScoredChoice,
    Scores,
    Shape,
    extension,
)
from infer.serving.protocols.openai.ask import ChatBody, CompletingBody, CompletionBody, StreamOptions

TextFinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length"]})]
ChatFinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls"]})]


class PromptTokensDetails(Struct):
    """Tokens of prompts that were not read again. `disk_tokens` of them were loaded from disk, if any were."""

    cached_tokens: Count
    disk_tokens: Count | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """Accepted and rejected predictions are the tokens of the server's own drafts."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CalledFunction(Struct):
    name: str
    arguments: str


class CalledTool(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class HeadedOutput(Output):
    """An answer that begins with the fields of `Head`."""

    id: str
    created: Count
    model: str
    system_fingerprint: str


def usage_of(results: Sequence[GenerationResult], num_choices: int) -> Usage:
    """Return the usage. A prompt counts once, however many choices it has."""
    firsts = results[::num_choices]  # the choice of each prompt that read it
    num_prompt_tokens = sum(result.prompt_tokens for result in firsts)
    num_completion = sum(result.generated_tokens for result in results)
    proposed = sum(result.stats.drafts_proposed for result in results)
    accepted = sum(result.stats.drafts_accepted for result in results)
    num_reasoning = sum(result.reasoning_tokens for result in results)
    from_disk = sum(result.disk_tokens for result in firsts) or UNSET
    return Usage(
        num_prompt_tokens,
        num_completion,
        num_prompt_tokens + num_completion,
        PromptTokensDetails(sum(result.reused_tokens for result in firsts), from_disk),
        CompletionTokensDetails(num_reasoning, accepted, proposed - accepted),
    )


def finish_reason_of(result: GenerationResult) -> str:
    """Return OpenAI's name of the finish reason."""
    reason = FINISH_REASONS[result.finish_reason]
    return "tool_calls" if reason == "stop" and result.tool_calls else reason


def message_of(result: GenerationResult) -> dict[str, Any]:
    """Return the answer as OpenAI's message. Its content is None if the answer has only calls."""
    message = result.to_message() | {"refusal": None}
    return message | {"content": None} if result.tool_calls and not result.text else message


class ChatLogprobs(Struct):
    content: list[ScoredChoice]
    refusal: None


class ChatMessage(Struct, kw_only=True):
    """The answer as a message. Its content is null if the answer has only calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    refusal: None


class ChatChoice(Struct):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(HeadedOutput, tag_field="object", tag="chat.completion"):
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Json | None] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    index: Count
    delta: Json
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    token_bytes: list[Bytes] | UnsetType = UNSET
    token_origins: list[str] | UnsetType = UNSET


class ChatChunk(HeadedOutput, tag_field="object", tag="chat.completion.chunk"):
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Json | None] | UnsetType = UNSET


class StoredChats(Struct, tag_field="object", tag="list"):
    """The list of stored chats, which is empty because nothing is stored."""

    data: list[ChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompletionLogprobs(Struct):
    """Log-probabilities by columns, with one entry per token. An entry is null for a token that is not scored."""

    tokens: list[str | None]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]

    def __add__(self, other: "CompletionLogprobs") -> "CompletionLogprobs":
        return CompletionLogprobs(*map(add, astuple(self), astuple(other)))


class CompletionChoice(Struct):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: TextFinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    token_bytes: list[Bytes] | UnsetType = UNSET
    token_origins: list[str] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Json | None] | UnsetType = UNSET


class Completion(HeadedOutput, tag_field="object", tag="text_completion"):
    """The answer, or a chunk of it. The last chunks have the usage and the reasons why choices ended."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletingShape(Shape):
    """Both routes of completions: chunks with the usage so far or, at the end, with the whole usage if requested."""

    chunk: ClassVar[type[ChatChunk | Completion]]

    def __init__(self, accepted: Accepted, body: CompletingBody, prefix: str) -> None:
        self._head, self._num_choices = accepted.head(prefix), body.n or 1
        self._spelling, self._asked = accepted.spelling, body.stream_options or StreamOptions()
        self._has_ids, self._num_tokens = bool(body.return_token_ids), 0
        has_counts = self._asked.continuous_usage_stats
        self._num_prompt_tokens = sum(map(len, accepted.prompt_ids)) if has_counts else 0

    @abstractmethod
    def choice(self, part: Delta, columns: Json) -> ChunkChoice | CompletionChoice | None:
        """Return the choice of a part's chunk, or None if it shows nothing. `columns` has the ids, if requested."""

    def chunks(self, part: Delta) -> list[Output]:
        self._num_tokens += len(part.pieces)
        has_columns = self._has_ids and part.result is None
        choice = self.choice(part, part.token_columns(self._spelling.token_bytes) if has_columns else {})
        if choice is None:
            return []
        facts = UNSET if part.result is None else extension([(part.choice, part.result)])
        return [self._chunk(choice, infer=facts)]

    def closing(self, results: Sequence[GenerationResult]) -> list[Output]:
        if not self._asked.include_usage:
            return []
        return [self.chunk(*self._head, [], usage_of(results, self._num_choices))]

    def _chunk(self, choice: Any, **fields: Any) -> Output:
        usage: Usage | UnsetType | None = None if self._asked.include_usage else UNSET
        if self._asked.continuous_usage_stats:
            usage = Usage(self._num_prompt_tokens, self._num_tokens, self._num_prompt_tokens + self._num_tokens)
        return self.chunk(*self._head, [choice], usage, **fields)


@final
class ChatShape(CompletingShape):
    body, answer, chunk = ChatBody, ChatCompletion, ChatChunk

    def __init__(self, accepted: Accepted, body: ChatBody) -> None:
        super().__init__(accepted, body, "chatcmpl-")
        self._has_tools, self._has_logprobs = bool(body.tools), body.logprobs
        self._of_prompt: Json = {"prompt_token_ids": accepted.prompt_ids[0]} if self._has_ids else {}
        for (scores,) in accepted.scores:
            self._of_prompt["prompt_logprobs"] = self._spelling.prompt_logprobs(scores)

    @staticmethod
    def scored(body: ChatBody) -> Sequence[int | None]:
        return () if body.prompt_logprobs is None else (body.prompt_logprobs,)

    def whole(self, results: Sequence[GenerationResult]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index,
                ChatMessage(**message_of(result)),
                self._logprobs(result),
                finish_reason_of(result),
                list(result.token_ids) if self._has_ids else UNSET,
            )
            for index, result in enumerate(results)
        ]
        usage, facts = usage_of(results, len(results)), extension(enumerate(results))
        return ChatCompletion(*self._head, choices, usage, **self._of_prompt, infer=facts)

    def opening(self) -> list[Output]:
        delta = {"role": "assistant", "content": None if self._has_tools else ""}
        chunks = [self._chunk(ChunkChoice(index=index, delta=delta)) for index in range(self._num_choices)]
        for name, value in self._of_prompt.items():
            setattr(chunks[0], name, value)
        return chunks

    def choice(self, part: Delta, columns: Json) -> ChunkChoice | None:
        delta = part.fields() | ({"content": part.text} if part.text else {})
        if part.result is not None:
            return ChunkChoice(index=part.choice, delta=delta, finish_reason=finish_reason_of(part.result))
        logprobs = self._logprobs(part)
        shows_something = delta or columns or (logprobs and logprobs.content)
        return ChunkChoice(index=part.choice, delta=delta, logprobs=logprobs, **columns) if shows_something else None

    def _logprobs(self, scored: Scored) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        entries: Any = self._spelling.chat_entries(scored)  # dicts of these fields
        return ChatLogprobs(entries, None)


class Prompt(NamedTuple):
    given: Any
    ids: Sequence[int]
    echoed: Scores  # not empty if the prompt is echoed with log-probabilities
    scored: Scores  # not empty if `prompt_logprobs` asks for them


@final
class CompletionShape(CompletingShape):
    body, answer, chunk = CompletionBody, Completion, Completion

    def __init__(self, accepted: Accepted, body: CompletionBody) -> None:
        super().__init__(accepted, body, "cmpl-")
        columns = accepted.ask.prompts, accepted.prompt_ids, *accepted.scores
        prompts = [Prompt(*each) for each in zip(*columns, strict=True)]
        self._body, self._tokenizer = body, accepted.served.llm.tokenizer
        self._openings = [self._opening(prompt) for prompt in prompts]
        self._offsets = [
            _Offsets(self._tokenizer, len(opening.text), prompt.ids)
            for prompt, opening in zip(prompts, self._openings, strict=True)
            for _ in range(self._num_choices)
        ]

    @staticmethod
    def scored(body: CompletionBody) -> Sequence[int | None]:
        return body.logprobs if body.echo else None, body.prompt_logprobs

    def whole(self, results: Sequence[GenerationResult]) -> Completion:
        choices = list[CompletionChoice]()
        for index, result in enumerate(results):
            choice = self._begun(index)
            columns = self._columns(index, result)
            choice.text += result.text
            choice.logprobs = choice.logprobs + columns if choice.logprobs and columns else columns
            choice.finish_reason = FINISH_REASONS[result.finish_reason]
            if self._has_ids:
                choice.token_ids = list(result.token_ids)
            choices.append(choice)
        usage, facts = usage_of(results, self._num_choices), extension(enumerate(results))
        return Completion(*self._head, choices, usage, infer=facts)

    def opening(self) -> list[Output]:
        """Return one chunk per choice if a part of its prompt is to be sent, else none."""
        if not (self._body.echo or self._has_ids or self._body.prompt_logprobs is not None):
            return []
        return [self._chunk(self._begun(index)) for index in range(len(self._openings) * self._num_choices)]

    def choice(self, part: Delta, columns: Json) -> CompletionChoice | None:
        if part.result is not None:
            return CompletionChoice(part.choice, part.text, finish_reason=FINISH_REASONS[part.result.finish_reason])
        logprobs = self._columns(part.choice, part)
        shows_something = part.text or logprobs or columns
        return CompletionChoice(part.choice, part.text, logprobs, **columns) if shows_something else None

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
        if self._has_ids:
            begun.prompt_token_ids = list(prompt.ids)
        if prompt.scored:
            begun.prompt_logprobs = self._spelling.prompt_logprobs(prompt.scored)
        return begun

    def _begun(self, index: int) -> CompletionChoice:
        """Return the choice with this index before its first token."""
        return replace_fields(self._openings[index // self._num_choices], index=index)

    def _prompt_columns(self, prompt: Prompt, *, adds_bos: bool) -> CompletionLogprobs:
        columns = self._spelling.completion_columns(prompt.echoed)
        columns["tokens"][0] = self._spelling.text(prompt.ids[0])
        offsets = _Offsets(self._tokenizer, 0)
        before = [0] if adds_bos else []  # BOS is not a part of the text
        return CompletionLogprobs(**columns, text_offset=before + offsets.of(prompt.ids[len(before) :]))

    def _columns(self, index: int, scored: Scored) -> CompletionLogprobs | None:
        """Return the log-probabilities of a choice's next tokens, including the one that ends it.

        None if no log-probabilities were requested.
        """
        if self._body.logprobs is None:
            return None
        columns = self._spelling.completion_columns(scored.logprobs or ())
        return CompletionLogprobs(**columns, text_offset=self._offsets[index].of(scored.token_ids))


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
