"""`RequestMaker`: the only way from a caller's `Ask` to a request.

`LLM`, `AsyncLLM`, sessions and the server each make an `Ask`. This module does not use the engine, so a request can be
made on any thread.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self, final

from infer.compute.operands.limits import RECENT_PAGES
from infer.compute.sampling.keywords import Params, params_of, refuse_sampling, split_keywords
from infer.engine.prepare.answer_grammars import AnswerGrammars
from infer.engine.requests.async_answers import Check
from infer.engine.requests.conversation import Conversation, TemplateProbes
from infer.engine.requests.prompt_encoding import Prompt, PromptIds, fitted, is_conversation, prompt_ids
from infer.engine.requests.request_options import RequestOptions, check_count, split_options
from infer.engine.step.request import Limits, Request, check_ids, make_request
from infer.engine.step.sequence import Sequence
from infer.errors import InvalidRequestError, MessageWarning, RequestWarning, SchemaWarning, about
from infer.sampling_params import SamplingParams
from infer.system.processes.lane import asking_for
from infer.text.grammar.budget import Budget, BudgetConstraint
from infer.text.grammar.constraint import Constraint
from infer.text.grammar.grammar import Grammar, grammar_of
from infer.text.grammar.grammar_compiler import make_compiler
from infer.text.tokenizer import Tokenizer
from infer.text.toolcalls.answer_format import AnswerFormat
from infer.text.toolcalls.past_calls import with_values

_MAX_WARNED = 1_000
OnError = Callable[[int, InvalidRequestError], None]


@final
@dataclass(frozen=True)
class Ask:
    """A prompt, and how to answer it.

    `sampling` has keywords that change the model's defaults. With `has_variables`, its other keywords are variables of
    the chat template. If `variables` are given, the prompt must be messages. `token_ids` replace the prompt's own ids,
    and `respell` changes the ids that the template gives.
    """

    prompt: Prompt
    params: Params | None = None
    options: RequestOptions = field(default_factory=RequestOptions)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] | None = None
    has_variables: bool = False
    token_ids: Items[int] | None = None
    respell: Callable[[list[int]], list[int]] | None = None

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        params: Params | None,
        options: RequestOptions | None,
        keywords: Mapping[str, Any],
        *,
        has_variables: bool = False,
    ) -> Self:
        """Return the ask of a call whose keywords may also be options. Raises InvalidRequestError for an option."""
        options, sampling = split_options(options, keywords)
        return cls(prompt, params, options, sampling, has_variables=has_variables)


class ReadPrompt(NamedTuple):
    """The prompt of an ask as ids, and its parameters. `conversation` is None for a text or ids."""

    ids: PromptIds
    params: SamplingParams
    conversation: Conversation | None
    checkpoints: tuple[int, ...] = ()


@final
class RequestMaker:
    """Makes requests of one model. For any thread."""

    def __init__(
        self,
        limits: Limits,
        tokenizer: Tokenizer,
        sampling_defaults: Mapping[str, Any],
        grammar_backend: str,
        checkpoint_tokens: int = 0,
        refusal: str | None = None,
    ) -> None:
        """Begin with the model's limits.

        `checkpoint_tokens` is the runner's value. `refusal` returns the reason why no request can be answered.
        """
        self._refusal = refusal
        self._least_with_checkpoints = RECENT_PAGES * checkpoint_tokens  # one step keeps all states of shorter prompts
        self.limits, self._tokenizer, self._sampling_defaults = limits, tokenizer, sampling_defaults
        self._compiler = make_compiler(tokenizer, limits.vocab_size, backend=grammar_backend)
        self._answer_grammars = AnswerGrammars(self._compiler)
        self._probes = TemplateProbes(tokenizer)
        self.warns = True  # False for a server, which reports warnings in its answers
        self._warned: set[str] = set()

    # From an `Ask` to its answer

    def sequence(self, ask: Ask, check: Check = lambda: None) -> Sequence:
        """Return the sequence that answers an ask. `check` is called between the stages and may raise.

        Raises InvalidRequestError.
        """
        request = self.request(ask, check)
        check()
        return Sequence(request)

    def request(self, ask: Ask, check: Check = lambda: None) -> Request:
        """Read the prompt and make the request. Raises InvalidRequestError."""
        with asking_for(ask.options.tenant):
            prompt = self.read(ask)
            check()
            return self.complete(prompt, prompt.params, ask.options)

    def choices(self, ask: Ask, params: Items[SamplingParams], check: Check = lambda: None) -> list[Sequence]:
        """Return one sequence for each of `params`, all with one prompt, which is read once. Raises as `sequence`."""
        variables = ask.variables or {}
        refuse_sampling(variables, self._tokenizer.chat_templates)
        ask = replace(ask, params=params[0], variables=variables if is_conversation(ask.prompt) else None)
        sequences = list[Sequence]()
        with asking_for(ask.options.tenant):
            prompt = self.read(ask)
            for each in params:
                check()
                sequences.append(Sequence(self.complete(prompt, each, ask.options)))
        return sequences

    def numbered(
        self,
        prompts: Iterable[tuple[Prompt, Params | None]],
        options: RequestOptions,
        sampling: Mapping[str, Any],
        on_error: OnError | None = None,
        check: Check = lambda: None,
    ) -> Iterator[tuple[int, Request]]:
        """Yield the request of each prompt with its number.

        A refusal names the number and ends all, unless there is an `on_error` to call. A mapping of parameters may
        contain options.
        """
        for index, (prompt, given) in enumerate(prompts):
            try:
                own, params = split_options(options, given) if isinstance(given, Mapping) else (options, given)
                request = self.request(Ask(prompt, params, own, sampling), check)
            except InvalidRequestError as error:
                if on_error is None:
                    raise type(error)(f"prompt {index}: {error}") from error
                on_error(index, error)
            else:
                yield index, request

    # Its stages

    def params_of(self, ask: Ask) -> SamplingParams:
        """Return the parameters of an `Ask`. A conversation has other defaults than a text."""
        return params_of(ask.params, ask.sampling, self._sampling_defaults, is_chat=is_conversation(ask.prompt))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt without tools or variables. Raises InvalidRequestError."""
        return prompt_ids(prompt, self._tokenizer, self.limits.max_seq_len)

    def conversation(
        self, prompt: Prompt, options: RequestOptions, variables: Mapping[str, Any] | None = None
    ) -> Conversation | None:
        """Return the conversation of a prompt that is messages, or None for a text or ids.

        Raises InvalidRequestError for options that need messages.
        """
        if variables is not None or is_conversation(prompt):
            return Conversation(self._tokenizer, self._probes, options, variables or {})
        for name in ("tools", "tool_choice", "reasoning_budget"):
            if getattr(options, name):
                message = f"{name} needs a conversation: pass a list of messages to chat()"
                raise InvalidRequestError(message, param=name)
        return None

    def read(self, ask: Ask) -> ReadPrompt:
        """Render and tokenize the prompt, and truncate it if its options allow that. Raises InvalidRequestError."""
        if self._refusal is not None:
            raise InvalidRequestError(self._refusal)
        if ask.has_variables:
            sampling, variables = split_keywords(ask.sampling, self._tokenizer.chat_templates)
            ask = replace(ask, sampling=sampling, variables=variables)
        params, overflow = self.params_of(ask), ask.options.overflow
        conversation = self.conversation(ask.prompt, ask.options, ask.variables)
        prompt = ask.prompt if ask.token_ids is None else ask.token_ids

        def encode(prompt: Prompt) -> list[int]:
            if conversation is None or ask.token_ids is not None:
                return prompt_ids(prompt, self._tokenizer, most if overflow == "error" else None)
            found = conversation.encode(prompt)
            return found if ask.respell is None else ask.respell(found)

        most, bos_token_id = self.limits.max_seq_len, self.limits.bos_token_id
        ids = fitted(prompt, encode, bos_token_id, most, params, overflow)
        checkpoints: tuple[int, ...] = ()
        if conversation is not None and ids.messages and 0 < self._least_with_checkpoints < len(ids.token_ids):
            checkpoints = conversation.checkpoints(ids.messages, ids.token_ids)
        return ReadPrompt(ids, params, conversation, checkpoints)

    def complete(self, prompt: ReadPrompt, params: SamplingParams, options: RequestOptions) -> Request:
        """Return the request. Raises InvalidRequestError for parameters, tools or a grammar that cannot be used."""
        ids, _, conversation, checkpoints = prompt
        answer_format = None if conversation is None else conversation.answer_format(ids.token_ids)
        grammar = grammar_of(params)
        answer_format, make_constraint = self._constrained(grammar, answer_format)
        schema_warnings = self._compiler.warnings_of(grammar)
        schema_warnings += () if answer_format is None else answer_format.warnings
        message_warnings = () if conversation is None else tuple(with_values(ids.messages)[1])
        self._warn(SchemaWarning, schema_warnings)
        self._warn(MessageWarning, message_warnings)
        if options.prefill_chunk is not None:
            check_count("prefill_chunk", options.prefill_chunk, 1, self.limits.step.tokens)
        check_ids("answer_prefix", options.answer_prefix, self.limits.vocab_size)
        return replace(
            make_request(self.limits, self._tokenizer, ids.token_ids, params),
            make_constraint=make_constraint,
            answer_format=answer_format,
            warnings=schema_warnings + message_warnings,
            num_draft_tokens=options.num_draft_tokens if options.speculation else 0,
            prefill_chunk=options.prefill_chunk,
            cancel=options.cancel,
            num_truncated=ids.truncated_tokens,
            tenant=options.tenant,
            priority=options.priority,
            timeout=options.timeout,
            cache_salt=options.cache_salt,
            answer_prefix=tuple(options.answer_prefix),
            checkpoints=checkpoints,
        )

    def _warn(self, category: type[RequestWarning], messages: Iterable[str]) -> None:
        """Warn once about each text."""
        for message in messages:
            if not self.warns or message in self._warned:
                continue
            if len(self._warned) >= _MAX_WARNED:
                self._warned.clear()
            self._warned.add(message)
            warnings.warn(message, category, stacklevel=3)

    def _constrained(
        self, grammar: Grammar | None, form: AnswerFormat | None
    ) -> tuple[AnswerFormat | None, Callable[[], Constraint] | None]:
        """Return the answer's format, with tools that can be enforced, and a function that makes its constraint.

        One constraint was already made. Raises InvalidRequestError for a grammar or tools that cannot be compiled.
        """
        compiler = self._compiler
        source = None
        if form is not None:
            with about("tools" if form.calls is not None or grammar is None else grammar.kind):
                form, source = self._answer_grammars.prepare(form, grammar)
        make: Callable[[], Constraint] | None = None
        if form is not None and source is not None:
            make = self._within_budget(form, partial(compiler.compile_answer, source))
        elif grammar is not None:
            make = partial(compiler.compile, grammar)
        if make is not None:
            with about("tools" if grammar is None else grammar.kind):
                make()
        return form, make

    def _within_budget(self, form: AnswerFormat, make: Callable[[], Constraint]) -> Callable[[], Constraint]:
        """Return the constraint, or one that also closes the reasoning when its budget is used up."""
        budget = self._budget(form)
        return make if budget is None else lambda: BudgetConstraint(make(), budget)

    def _budget(self, form: AnswerFormat) -> Budget | None:
        reasoning = form.reasoning
        if reasoning is None or form.budget is None:
            return None
        closing_ids = {mark: token_id for token_id, mark in form.marks.items()}.get(reasoning.closing)
        ids = self._compiler.spell(reasoning.closing) if closing_ids is None else [closing_ids]
        opening, closing = (text.encode(errors="surrogatepass") for text in (reasoning.opening, reasoning.closing))
        spelling = self._tokenizer.token_bytes

        def bytes_of(token_id: int) -> bytes:
            mark = form.marks.get(token_id)
            return spelling[token_id] if mark is None else mark.encode(errors="surrogatepass")

        return Budget(form.budget, opening, closing, tuple(ids), bytes_of, form.is_open)
