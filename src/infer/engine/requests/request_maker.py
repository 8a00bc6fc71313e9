"""`RequestMaker`: the only way from a caller's `Ask` to a request.

`LLM`, `AsyncLLM`, sessions and the server each make an `Ask`. This module does not use the engine, so a request can be
made on any thread.
"""

import json
import warnings
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from typing import Any, final

from infer.compute.operands.limits import RECENT_PAGES
from infer.compute.sampling.keywords import Params, params_of, refuse_sampling, split_keywords
from infer.engine.requests.answer import Check
from infer.engine.requests.ask import Ask
from infer.engine.requests.preparing_child import format_to_json
from infer.engine.requests.prompt_encoding import (
    Conversation,
    Message,
    Prompt,
    TemplateProbes,
    fitted,
    is_conversation,
    prompt_ids,
)
from infer.engine.requests.text_heads import ModelFacts
from infer.engine.step.request import Limits, Request, check_ids, check_prompt, checked_params
from infer.engine.step.request_options import RequestOptions, split_options
from infer.engine.step.sequence import Sequence
from infer.errors import InvalidRequestError, MessageWarning, RequestWarning, SchemaWarning, about
from infer.parameters import Count
from infer.sampling_params import SamplingParams
from infer.system.child_process import asking_for
from infer.system.sized_cache import SizedCache
from infer.text.grammar.constraint import Budget, BudgetConstraint, Constraint
from infer.text.grammar.grammar import Grammar, grammar_of
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.grammar.libraries import ask_trial
from infer.text.toolcalls.answer_format import AnswerFormat
from infer.text.toolcalls.tools import Tool, anything_for, with_values

MAX_PREPARED_BYTES = 64 << 20
_LEAST_BYTES = 500
_BYTES_PER_CHARACTER = 12  # memory of Python objects per character of schemas and warnings as JSON
_MAX_WARNED = 1_000
OnError = Callable[[int, InvalidRequestError], None]


def _first_made(make: Callable[[], Constraint]) -> Callable[[], Constraint]:
    """Return a function that makes constraints. The first one is made at once, because that shows a bad grammar."""
    made = chain([make()], iter(make, None))
    return lambda: next(made)


@final
class RequestMaker:
    """Makes requests of one model. For any thread."""

    def __init__(
        self,
        limits: Limits,
        facts: ModelFacts,
        grammar_backend: str,
        checkpoint_tokens: int,
        refusal: str | None,
        *,
        has_draft_model: bool = False,
    ) -> None:
        """Begin with the model's limits.

        `checkpoint_tokens` is the runner's value. `refusal` is the reason why no request can be answered.
        """
        self._refusal, self._has_draft_model = refusal, has_draft_model
        self._least_with_checkpoints = RECENT_PAGES * checkpoint_tokens  # one step keeps all states of shorter prompts
        self.limits, self._sampling_defaults = limits, facts.sampling_defaults
        self._tokenizer = tokenizer = facts.tokenizer
        self._compiler = Compiler(tokenizer, limits.vocab_size, backend=grammar_backend)
        self._formats = FormatPreparer(self._compiler)
        self._probes = TemplateProbes(tokenizer)
        self.warns = True  # False for a server, which reports warnings in its answers
        self._warned: set[str] = set()

    def check_generates(self) -> None:
        """Raise InvalidRequestError for an encoder."""
        if self._refusal is not None:
            raise InvalidRequestError(self._refusal)

    # From an `Ask` to its answers

    def make(self, ask: Ask, check: Check = lambda: None) -> list[Request]:
        """Return the requests of an ask of one prompt, one for each answer. The prompt is read once.

        `check` is called between the stages and may raise. Raises InvalidRequestError.
        """
        with asking_for(ask.options.tenant):
            return list(self._requests(self._settled(ask), check))

    def sequences(self, ask: Ask, check: Check = lambda: None) -> list[Sequence]:
        """Return the sequences that answer an ask of one prompt. Raises InvalidRequestError."""
        return [Sequence(request) for request in self.make(ask, check)]

    def sequence(self, ask: Ask, check: Check = lambda: None) -> Sequence:
        """Return the sequence that answers an ask of one prompt and one answer. Raises InvalidRequestError."""
        (request,) = self.make(ask, check)
        return Sequence(request)

    def numbered(
        self,
        prompts: Iterable[tuple[Prompt, Params | None]],
        ask: Ask,
        on_error: OnError | None = None,
        check: Check = lambda: None,
    ) -> Iterator[tuple[int, Request]]:
        """Yield the number and the request of each prompt. `ask` has what all prompts share.

        A prompt that is refused ends the iteration with an error that names its number. With `on_error`, that is
        called instead, and the next prompt follows. A mapping of parameters may contain options.
        """
        for index, (prompt, given) in enumerate(prompts):
            try:
                own = ask.options
                if isinstance(given, Mapping):
                    own, given = split_options(own, given)
                (request,) = self.make(replace(ask, prompts=[prompt], options=own, given=given), check)
            except InvalidRequestError as error:
                if on_error is None:
                    raise type(error)(f"prompt {index}: {error}") from error
                on_error(index, error)
            else:
                yield index, request

    # Parts of a request, for those who need no answer

    def params_of(self, ask: Ask) -> SamplingParams:
        """Return the parameters of the first answer. A conversation has other defaults than a text."""
        if ask.params:
            return ask.params[0]
        is_chat = is_conversation(ask.prompts[0])
        return params_of(ask.given, ask.sampling, self._sampling_defaults, is_chat=is_chat)

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

    # Stages

    def _settled(self, ask: Ask) -> Ask:
        """Return the ask with the variables of its template separated from its sampling keywords.

        Raises InvalidRequestError for other keywords, and for drafts of a draft model that is not loaded.
        """
        self.check_generates()
        if ask.options.speculation == "draft" and not self._has_draft_model:
            needed = "a draft model, or a head of the model's own on a CPU in one process"
            message = f"speculation='draft' needs {needed}: load the model with draft_model, or use 'ngram'"
            raise InvalidRequestError(message, param="speculation")
        if ask.has_variables:
            sampling, variables = split_keywords(ask.sampling, self._tokenizer.chat_templates)
            return replace(ask, sampling=sampling, variables=variables)
        if ask.params:
            variables = dict(ask.variables or {})
            refuse_sampling(variables, self._tokenizer.chat_templates)
            return replace(ask, variables=variables if is_conversation(ask.prompts[0]) else None)
        return ask

    def _requests(self, ask: Ask, check: Check) -> Iterator[Request]:
        """Yield the request of each answer, after reading the prompt."""
        limits, options, params = self.limits, ask.options, self.params_of(ask)
        conversation = self.conversation(ask.prompts[0], options, ask.variables)
        token_ids, num_truncated, messages = self._read(ask, params, conversation)
        form, message_warnings, checkpoints = None, tuple[str, ...](), tuple[int, ...]()
        if conversation is not None:
            form, message_warnings = conversation.answer_format(token_ids), tuple(with_values(messages)[1])
            if messages and 0 < self._least_with_checkpoints < len(token_ids):
                checkpoints = conversation.checkpoints(messages, token_ids)
        prompt = tuple(check_prompt(limits, token_ids, room=1))
        check_ids("answer_prefix", options.answer_prefix, limits.vocab_size)
        if options.prefill_chunk is not None:
            Count(1, limits.step.tokens).check("prefill_chunk", options.prefill_chunk)
        for each in ask.params or [params]:
            check()
            grammar = grammar_of(each)
            constrained = (form, None) if form is None and grammar is None else self._constrained(grammar, form)
            answer_format, make_constraint = constrained
            schema_warnings = () if grammar is None else self._compiler.warnings_of(grammar)
            schema_warnings += () if answer_format is None else answer_format.warnings
            for message in schema_warnings:
                self._warn(SchemaWarning, message)
            for message in message_warnings:
                self._warn(MessageWarning, message)
            yield Request(
                self._tokenizer,
                prompt,
                checked_params(limits, each),
                limits.max_seq_len,
                limits.vocab_size,
                options,
                make_constraint=make_constraint,
                num_truncated=num_truncated,
                answer_format=answer_format,
                messages=messages,
                checkpoints=checkpoints,
                warnings=schema_warnings + message_warnings,
            )

    def _read(
        self, ask: Ask, params: SamplingParams, conversation: Conversation | None
    ) -> tuple[list[int], int, abc.Sequence[Message]]:
        """Return what `fitted` returns for the rendered and tokenised prompt."""
        overflow = ask.options.overflow
        most = self.limits.max_seq_len if overflow == "error" else None

        def encode(prompt: Prompt) -> list[int]:
            if conversation is None or ask.token_ids is not None:
                return prompt_ids(prompt, self._tokenizer, most)
            token_ids = conversation.encode(prompt)
            return token_ids if ask.respell is None else ask.respell(token_ids)

        prompt = ask.prompts[0] if ask.token_ids is None else ask.token_ids
        return fitted(prompt, encode, self.limits, params, overflow)

    def _warn(self, category: type[RequestWarning], message: str) -> None:
        """Warn once about each text."""
        if self.warns and message not in self._warned:
            if len(self._warned) >= _MAX_WARNED:
                self._warned.clear()
            self._warned.add(message)
            warnings.warn(message, category, stacklevel=3)

    def _constrained(
        self, grammar: Grammar | None, form: AnswerFormat | None
    ) -> tuple[AnswerFormat | None, Callable[[], Constraint] | None]:
        """Return the answer's format, with tools that can be enforced, and a function that makes its constraint.

        Raises InvalidRequestError for a grammar or tools that cannot be compiled.
        """
        source = None
        if form is not None:
            with about("tools" if form.calls is not None or grammar is None else grammar.kind):
                form, source = self._formats.prepare(form, grammar)
        with about("tools" if grammar is None else grammar.kind):
            if form is not None and source is not None:
                return form, _first_made(self._within_budget(form, self._compiler.answer_maker(source)))
            return form, None if grammar is None else _first_made(self._compiler.maker(grammar))

    def _within_budget(self, form: AnswerFormat, make: Callable[[], Constraint]) -> Callable[[], Constraint]:
        """Return the constraint, or one that also closes the reasoning when its budget is used up."""
        reasoning = form.reasoning
        if reasoning is None or form.budget is None:
            return make
        closing_ids = {mark: token_id for token_id, mark in form.marks.items()}.get(reasoning.closing)
        ids = self._compiler.spell(reasoning.closing) if closing_ids is None else [closing_ids]
        opening, closing = (text.encode(errors="surrogatepass") for text in (reasoning.opening, reasoning.closing))
        spelling = self._tokenizer.token_bytes

        def bytes_of(token_id: int) -> bytes:
            mark = form.marks.get(token_id)
            return spelling[token_id] if mark is None else mark.encode(errors="surrogatepass")

        budget = Budget(form.budget, opening, closing, tuple(ids), bytes_of, form.is_open)
        return lambda: BudgetConstraint(make(), budget)


@final
class FormatPreparer:
    """Prepares formats of answers, and caches them, because an agent sends the same tools in every turn.

    A process with limits reads, loosens and tries the schemas. This process only writes the question, and compiles the
    source that was tried, so it runs no Python code for each part of a schema. For any thread.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._kept = SizedCache[dict[str, Any]](MAX_PREPARED_BYTES)

    def prepare(self, form: AnswerFormat, answer: Grammar | None) -> tuple[AnswerFormat, str | None]:
        """Return a format whose tools can be enforced, and the source of its grammar, or None if it needs none.

        `answer` is the request's own grammar for the text. Raises InvalidRequestError.
        """
        has_calls = form.calls is not None
        if not has_calls and not (form.reasoning and (answer is not None or form.budget is not None)):
            return form, None
        self._compiler.check_answers()
        form = _as_json(form)
        question = {"format": format_to_json(form), "answer": answer}
        key = blake2b(json.dumps(question).encode(), digest_size=32).digest()
        name, backend = "tools" if has_calls else "the grammar of the answer", self._compiler.backend
        prepared = self._kept.get_or_make(key, lambda: ask_trial(backend, question, name), _num_bytes)
        return _with(form, prepared), prepared["source"]


def _num_bytes(prepared: Mapping[str, Any]) -> int:
    size = len(json.dumps([prepared["tools"], prepared["warnings"]]))
    return _LEAST_BYTES + len(prepared["source"].encode()) + _BYTES_PER_CHARACTER * size


def _with(form: AnswerFormat, prepared: Mapping[str, Any]) -> AnswerFormat:
    """Return the format with the changed tools and the warnings."""
    form = replace(form, warnings=tuple(prepared["warnings"]))
    if form.calls is None:
        return form
    changed = dict(prepared["tools"])  # parameters, by the tools' indices
    tools = (
        replace(tool, parameters=changed.get(index, tool.parameters)) for index, tool in enumerate(form.calls.tools)
    )
    return replace(form, calls=replace(form.calls, tools=tuple(tools)))


def _as_json(form: AnswerFormat) -> AnswerFormat:
    """Return the format without schemas that are not JSON, which Python programs may give.

    Raises InvalidRequestError for such schemas of strict tools.
    """
    if form.calls is None:
        return form
    is_json = form.calls.form.syntax == "json"
    tools = tuple(_tool_as_json(index, tool, is_json) for index, tool in enumerate(form.calls.tools))
    return replace(form, calls=replace(form.calls, tools=tools))


def _tool_as_json(index: int, tool: Tool, is_json: bool) -> Tool:
    try:
        json.dumps(tool.parameters)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"it is not JSON ({type(error).__name__})"
        if tool.is_strict:
            raise InvalidRequestError(f"tools[{index}] ({tool.name}): its schema cannot be used: {problem}") from None
        said = f"tool {tool.name!r}: its whole schema is left out, so its arguments may be any object: {problem}"
        return replace(tool, parameters=anything_for(tool.parameters, is_json=is_json), warnings=(*tool.warnings, said))
    return tool
