"""`/v1/completions`: continue texts or ids, with n choices each. With `echo`, the prompt is part of the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from starlette.requests import Request
from starlette.responses import Response

import infer
from infer.batch_file.openai_logprobs import Spelling, completion_columns
from infer.batch_file.result_line import FINISH_REASONS
from infer.outputs import GenerationResult, TokenLogprob
from infer.server.answer_types import (
    Head,
    Json,
    extension,
    logprobs_of,
    prompt_logprobs_of,
    token_columns,
    usage_of_choices,
)
from infer.server.asked import make_options, make_params, sampling_values, seeds_of, token_limit
from infer.server.asking import read_request
from infer.server.call import call_of
from infer.server.choices import Asked, Part, accept
from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError
from infer.server.refusals import refuse, shown
from infer.server.replies import Scores, StreamUsage, make_head, reply, score_prompts
from infer.server.routes.served_models import answer_any_model
from infer.server.routes.tokens import prepared
from infer.server.schema import CompletionBody
from infer.server.server_state import ServerState
from infer.server.unknown_fields import Reading

_MAX_TOKENS = 16
_MAX_ANSWERS = 1024  # of a body


async def complete(request: Request, state: ServerState) -> Response:
    llm = state.llm().llm
    body = await read_request(request, state, CompletionBody)
    answer_any_model(request, state, body.model)
    asked = ask(body, llm.sampling_defaults)
    if body.suffix:
        asked = await _filling_in(request, state, body, asked)
    choices = await accept(request, state, asked)
    ids = choices.prompt_ids
    echoed = await score_prompts(request, state, ids, body.logprobs if body.echo else None)
    scored = await score_prompts(request, state, ids, body.prompt_logprobs)
    prompts = [Prompt(*each) for each in zip(asked.prompts, ids, echoed, scored, strict=True)]
    head = make_head("cmpl-", request, state)
    shape = CompletionShape(head, body, llm.tokenizer, prompts)
    return await reply(request, state, choices, shape, is_streamed=bool(body.stream))


def ask(body: CompletionBody, defaults: Mapping[str, Any]) -> Asked:
    """Return what the body asks for, over the model's own `defaults`. Raises ApiError."""
    prompts, num_choices = prompts_of(body.prompt), body.n or 1
    if len(prompts) * num_choices > _MAX_ANSWERS:
        message = f"prompts times n must be at most {_MAX_ANSWERS}, got {len(prompts)} times {num_choices}: ask twice"
        raise refuse(message, "prompt")
    most = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    values = sampling_values(body) | {"max_new_tokens": token_limit(most), "logprobs": body.logprobs}
    params = make_params(values, defaults, seeds_of(body.seed, num_choices), "prompt")
    return Asked(prompts, params, make_options(body), "prompt", {}, is_answered=most != 0)


def prompts_of(prompt: str | Sequence[Any]) -> list[Any]:
    """Return the prompts as texts or lists of ids. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(type(each) is int for each in prompt):
        return [prompt]
    for index, each in enumerate(prompt):
        if not isinstance(each, type(prompt[0])) or not isinstance(each, str | list) or each == []:
            raise _no_prompt(f"prompt[{index}]", each)
        if isinstance(each, list):
            for place, token_id in enumerate(each):
                if type(token_id) is not int:
                    raise _no_prompt(f"prompt[{index}][{place}]", token_id)
    if not prompt:
        raise _no_prompt("prompt", prompt)
    return list(prompt)


async def _filling_in(request: Request, state: ServerState, body: CompletionBody, asked: Asked) -> Asked:
    """Return the prompts with `suffix` behind the text that is to be written.

    If the model cannot fill in text, warn and continue the prompts. Raises ApiError.
    """
    tokenizer, after = state.llm().llm.tokenizer, body.suffix or ""
    marks = tokenizer.infill_marks
    if marks is None:
        told = "suffix: this model has no tokens to fill in text; the prompt is continued"
        if state.settings.unknown_fields == "refuse":
            raise refuse(f"{told}: leave it out", "suffix")
        Reading(state.settings.unknown_fields, call_of(request).warnings).warn(told)
        return asked
    if body.echo:
        raise refuse("echo cannot be given with suffix: leave it out", "echo")
    if any(not isinstance(each, str) for each in asked.prompts):
        raise refuse("suffix needs prompts that are texts: token ids have its place already", "prompt")
    prompts = await prepared(
        request, state, lambda: [tokenizer.encode_infill(each, after) for each in asked.prompts], "suffix"
    )
    params = [replace(each, stop_token_ids=[*(each.stop_token_ids or ()), *marks.ends]) for each in asked.params]
    return replace(asked, prompts=prompts, params=params)


def _no_prompt(path: str, value: object) -> ApiError:
    message = f"prompt must be a text, token ids, or a list of texts or of token ids: {path} is {shown(value)}"
    return refuse(message, path, "invalid_type")


class Prompt(NamedTuple):
    given: Any
    ids: Sequence[int]
    echoed: Scores  # where it is echoed with log-probabilities
    scored: Scores  # where `prompt_logprobs` asks for them


@final
class CompletionShape:
    def __init__(
        self,
        head: Head,
        body: CompletionBody,
        tokenizer: "infer.Tokenizer",
        prompts: Sequence[Prompt],
    ) -> None:
        self._head, self._body, self._tokenizer, self._usage = head, body, tokenizer, StreamUsage.of(body)
        self._num_prompt_tokens, self._num_tokens = sum(len(prompt.ids) for prompt in prompts), 0
        self._spelling, self._num_choices = Spelling.of(tokenizer), body.n or 1
        self._openings = [self._opening(prompt) for prompt in prompts]
        starts = [len(opening["text"]) for opening in self._openings]
        self._offsets = [_Offsets(tokenizer, start, skips_special=True) for start in starts for _ in range(body.n or 1)]

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        choices = list[Json]()
        for index, result in enumerate(results):
            begun = self._openings[index // self._num_choices]
            columns = self._columns(index, result.token_ids, result.logprobs or ())
            choice = begun | {
                "index": index,
                "text": begun["text"] + result.text,
                "logprobs": _joined(begun["logprobs"], columns),
                "finish_reason": FINISH_REASONS[result.finish_reason],
            }
            choices.append(choice | self._token_ids(result.token_ids))
        return {
            **self._head.to_json("text_completion"),
            "choices": choices,
            "usage": usage_of_choices(results, self._num_choices),
            "infer": extension(dict(enumerate(results))),
        }

    def opening(self) -> list[Json]:
        """Return one chunk per choice if something of its prompt is to be sent, else none."""
        if not (self._body.echo or self._body.return_token_ids or self._body.prompt_logprobs is not None):
            return []
        indices = range(len(self._openings) * self._num_choices)
        return [self._chunk([{"index": index, **self._openings[index // self._num_choices]}]) for index in indices]

    def chunk(self, part: Part) -> Json | None:
        self._num_tokens += len(part.pieces)
        choice: Json = {"index": part.choice, "text": part.text, "logprobs": None, "finish_reason": None}
        if part.result is not None:
            choice["finish_reason"] = FINISH_REASONS[part.result.finish_reason]
            return self._chunk([choice]) | {"infer": extension({part.choice: part.result})}
        ids = [piece.token_id for piece in part.pieces]
        choice["logprobs"] = self._columns(part.choice, ids, logprobs_of(part.pieces))
        if self._body.return_token_ids:
            choice |= token_columns(part.pieces, self._spelling.token_bytes)
        return self._chunk([choice]) if part.text or choice["logprobs"] or "token_ids" in choice else None

    def closing(self, results: Sequence[GenerationResult]) -> list[Json]:
        if not self._usage.is_last:
            return []
        return [self._chunk([]) | {"usage": usage_of_choices(results, self._num_choices)}]

    def _opening(self, prompt: Prompt) -> Json:
        """Return the fields of a choice that come from its prompt.

        They are its text and log-probabilities if the prompt is echoed, and its ids and scores if they were requested.
        """
        begun: Json = {"text": "", "logprobs": None, "finish_reason": None}
        if self._body.echo:
            is_text = isinstance(prompt.given, str)
            begun["text"] = prompt.given if is_text else self._tokenizer.decode(prompt.ids, skip_special_tokens=False)
            if self._body.logprobs is not None:
                begun["logprobs"] = self._prompt_columns(prompt, adds_bos=is_text and self._tokenizer.adds_bos)
        if self._body.return_token_ids:
            begun["prompt_token_ids"] = list(prompt.ids)
        if prompt.scored:
            begun["prompt_logprobs"] = prompt_logprobs_of(prompt.scored, self._spelling)
        return begun

    def _prompt_columns(self, prompt: Prompt, *, adds_bos: bool) -> Json:
        columns = completion_columns(prompt.echoed, self._spelling)
        columns["tokens"][0] = self._spelling.text(prompt.ids[0])
        offsets = _Offsets(self._tokenizer, 0, skips_special=False)
        before = [0] if adds_bos else []  # it is no part of the text
        return {**columns, "text_offset": before + offsets.of(prompt.ids[len(before) :])}

    def _columns(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Json | None:
        """Return the log-probabilities of a choice's next tokens, including the one that ends it.

        None if no log-probabilities were requested.
        """
        if self._body.logprobs is None:
            return None
        columns = completion_columns(logprobs, self._spelling)
        return {**columns, "text_offset": self._offsets[index].of(token_ids)}

    def _chunk(self, choices: list[Json]) -> Json:
        usage = self._usage.field(self._num_prompt_tokens, self._num_tokens)
        return {**self._head.to_json("text_completion"), "choices": choices, **usage}

    def _token_ids(self, token_ids: Sequence[int]) -> Json:
        return {"token_ids": list(token_ids)} if self._body.return_token_ids else {}


@final
class _Offsets:
    """Counts the characters of a text before each token."""

    def __init__(self, tokenizer: "infer.Tokenizer", start: int, *, skips_special: bool) -> None:
        self._detokenizer = tokenizer.make_detokenizer(skip_special_tokens=skips_special)
        self._num_characters = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the number of characters before each of the next tokens."""
        found = list[int]()
        for token_id in token_ids:
            found.append(self._num_characters)
            self._num_characters += len(self._detokenizer.push(token_id))
        return found


def _joined(first: Json | None, second: Json | None) -> Json | None:
    if first is None or second is None:
        return second
    return {name: first[name] + second[name] for name in second}


ROUTES = [ApiRoute("POST", "/v1/completions", complete, operation="text_completion")]
