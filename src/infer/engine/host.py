"""A loaded model and how it begins an answer: what `LLM` and its sessions share."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar, final

from infer.checkpoint.pooling import Pooling
from infer.engine.conversation import Conversation, TemplateProbes
from infer.engine.engine import Engine
from infer.engine.lease import Lease
from infer.engine.loop import Loop
from infer.engine.mailbox import Mailbox
from infer.engine.messages import once
from infer.engine.preparing import AsyncAnswers, Check
from infer.engine.prompt_ids import (
    Message,
    Prompt,
    PromptIds,
    fitted,
    is_conversation,
    prompt_ids,
)
from infer.engine.request import Request, check_ids, make_request, vocab_size_of
from infer.engine.request_options import RequestOptions, split_options
from infer.engine.sequence import Sequence
from infer.engine.stream import OnPrefill, OpenAnswer, Stream
from infer.errors import InvalidRequestError, MessageWarning, RequestWarning, SchemaWarning, about, closed
from infer.grammar.base import Constraint
from infer.grammar.budget import Budget, BudgetConstraint
from infer.grammar.compiler import make_compiler
from infer.grammar.grammar import Grammar, grammar_of
from infer.kvcache.cache_settings import CacheSettings
from infer.model.transformer import Transformer
from infer.operands.limits import MAX_STEP_LOGITS
from infer.prepare.answer import AnswerGrammars
from infer.runner.caches import default_pool_pages
from infer.runner.hidden_states import HiddenStates
from infer.runner.runner import Runner
from infer.sampling.keywords import Params, params_of, refuse_sampling, split_keywords
from infer.sampling_params import SamplingParams
from infer.system.lane import asking_for
from infer.tensor_parallel.leading import LeadingRunner
from infer.tensor_parallel.rank_settings import RunnerSettings
from infer.tensor_parallel.ranks import Ranks
from infer.tokenizer import Tokenizer
from infer.toolcalls.answer_format import AnswerFormat
from infer.toolcalls.past_calls import with_values

_MAX_WARNED = 1_000
_Found = TypeVar("_Found")
Encode = Callable[[Prompt], list[int]]
OnError = Callable[[int, InvalidRequestError], None]


@final
@dataclass(frozen=True)
class HostSettings:
    """`weights` tells them from others; `sampling_defaults` are the model's own, and so is the `pooling` of one made
    for embeddings.
    """

    weights: str
    cache: CacheSettings
    pool_pages: int | None
    capture: bool
    grammar_backend: str
    sampling_defaults: Mapping[str, Any]
    pooling: Pooling | None = None


@final
class Host:
    def __init__(
        self, loop: Loop, model: Transformer, tokenizer: Tokenizer, settings: HostSettings, ranks: Ranks | None = None
    ) -> None:
        """Give the loop, which loaded the model, an engine. `ranks` are the others of a model that is shared out: they
        load their shares.
        """
        self.loop, self.tokenizer, self.settings = loop, tokenizer, settings
        self._open_model: Transformer | None = model
        self.vocab_size = vocab_size_of(model, tokenizer)
        self._ranks = ranks
        self._open_runner: Runner | None = loop.run(_make_runner, model, settings, ranks)
        self._hidden_states: HiddenStates | None = None
        self.engine = Engine(self.runner)
        loop.own(self.engine)
        self.answers = AsyncAnswers(loop)
        self._compiler = make_compiler(tokenizer, self.vocab_size, backend=settings.grammar_backend)
        self._answer_grammars = AnswerGrammars(self._compiler)
        self._probes = TemplateProbes(tokenizer)
        self.warns = True  # a server says them in its answers instead
        self._warned: set[str] = set()

    def close(self) -> None:
        """End all answers, and free the caches and the weights. Again does nothing."""
        self.loop.close()
        self.answers.close()
        self._open_model = self._open_runner = self._hidden_states = None
        if self._ranks is not None:
            self._ranks.close()

    @property
    def model(self) -> Transformer:
        """Raises ClosedError after `close`."""
        if (model := self._open_model) is None:
            raise closed()
        return model

    @property
    def runner(self) -> Runner:
        """Raises ClosedError after `close`."""
        if (runner := self._open_runner) is None:
            raise closed()
        return runner

    def hidden_states(self) -> HiddenStates:
        """For the loop's thread. Made when it is first asked for. Raises InvalidRequestError for a model that is shared
        out.
        """
        if self._ranks is not None:
            raise InvalidRequestError("a model that is shared out embeds no texts: load it without tensor_parallel")
        if self._hidden_states is None:
            self._hidden_states = HiddenStates(self.model, self.settings.cache.kv_type, capture=self.settings.capture)
        return self._hidden_states

    @property
    def num_threads(self) -> int:
        """With which a forward computes."""
        return self.model.backend.num_threads()

    def warn_of_template(self, stacklevel: int) -> None:
        """If no conversation can be rendered by the model's own chat template; plain text needs none."""
        if self.tokenizer.chat_template is None:
            return
        try:
            self.tokenizer.check_chat_template()
        except InvalidRequestError as error:
            warnings.warn(f"no conversation will work: {error}", stacklevel=stacklevel)

    def fingerprint(self, cache_kind: str) -> dict[str, str]:
        """Return the values that must be equal for a saved cache to be valid here."""
        tokenizer = self.tokenizer
        vocabulary = repr((tokenizer.token_bytes, sorted(tokenizer.special_token_ids), sorted(tokenizer.eos_token_ids)))
        return {
            "architecture": _digest(repr(self.model.architecture)),
            "tokenizer": _digest(vocabulary),
            "weights": self.settings.weights,
            "cache": cache_kind,
        }

    @cached_property
    def system_fingerprint(self) -> str:
        """Fingerprint of the model and its settings. Equal fingerprints give equal answers to the same request and
        seed.
        """
        model = self.fingerprint(self.runner.cache.kind), self.tokenizer.chat_templates
        return f"fp_{_digest(repr((*model, sorted(self.settings.sampling_defaults.items()))))[:16]}"

    def encode(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, self.tokenizer, self.model.max_seq_len)

    def sampled_by(self, prompt: Prompt, params: Params | None, keywords: Mapping[str, Any]) -> SamplingParams:
        """A conversation has other neutral values than a text."""
        return params_of(params, keywords, self.settings.sampling_defaults, is_chat=is_conversation(prompt))

    def conversation(
        self, prompt: Prompt, options: RequestOptions, variables: Mapping[str, Any] | None = None
    ) -> Conversation | None:
        """Return the conversation of a prompt of messages; None for a text or ids.

        Raises InvalidRequestError for options that need messages.
        """
        if variables is not None or is_conversation(prompt):
            return Conversation(self.tokenizer, self._probes, options, variables or {})
        for name in ("tools", "tool_choice", "reasoning_budget"):
            if getattr(options, name):
                message = f"{name} belongs to a conversation: give a list of messages, to chat()"
                raise InvalidRequestError(message, param=name)
        return None

    def fit(self, prompt: Prompt, params: SamplingParams, options: RequestOptions, encode: Encode | None) -> PromptIds:
        """`encode` None is `self.encode`."""
        bos, most = self.tokenizer.bos_token_id, self.model.max_seq_len
        if encode is None:
            longest = most if options.overflow == "error" else None
            encode = partial(prompt_ids, tokenizer=self.tokenizer, max_seq_len=longest)
        return fitted(prompt, encode, bos, most, params, options.overflow)

    def request(
        self,
        prompt: PromptIds,
        params: SamplingParams,
        options: RequestOptions,
        conversation: Conversation | None = None,
    ) -> Request:
        """Raises InvalidRequestError for parameters, tools or a grammar that cannot be served."""
        answer_format = None if conversation is None else conversation.answer_format(prompt.token_ids)
        grammar = grammar_of(params)
        answer_format, make_constraint = self._constrained(grammar, answer_format)
        schema_warnings = self._compiler.warnings_of(grammar)
        schema_warnings += () if answer_format is None else answer_format.warnings
        message_warnings = () if conversation is None else tuple(with_values(prompt.messages)[1])
        self._warn(SchemaWarning, schema_warnings)
        self._warn(MessageWarning, message_warnings)
        check_ids("answer_prefix", options.answer_prefix, self.vocab_size)
        return replace(
            make_request(self.model, self.tokenizer, prompt.token_ids, params),
            make_constraint=make_constraint,
            answer_format=answer_format,
            warnings=schema_warnings + message_warnings,
            num_draft_tokens=options.num_draft_tokens if options.speculation else 0,
            prefill_chunk=options.prefill_chunk,
            cancel=options.cancel,
            num_truncated=prompt.truncated_tokens,
            tenant=options.tenant,
            priority=options.priority,
            timeout=options.timeout,
            cache_salt=options.cache_salt,
            answer_prefix=tuple(options.answer_prefix),
        )

    def requests(
        self,
        prompts: Iterable[tuple[Prompt, Params | None]],
        options: RequestOptions,
        keywords: Mapping[str, Any],
        on_error: OnError | None = None,
    ) -> Iterator[tuple[int, Request]]:
        """One after the other, each with its number, which an error names; with `on_error` the others go on. A mapping
        of parameters may hold options too.
        """
        for index, (prompt, given) in enumerate(prompts):
            try:
                own, params = split_options(options, given) if isinstance(given, Mapping) else (options, given)
                asked = self.sampled_by(prompt, params, keywords)
                conversation = self.conversation(prompt, own)
                fitting = self.fit(prompt, asked, own, None if conversation is None else conversation.encode)
                request = self.request(fitting, asked, own, conversation)
            except InvalidRequestError as error:
                if on_error is None:
                    raise type(error)(f"prompt {index}: {error}") from error
                on_error(index, error)
            else:
                yield index, request

    def sequence(
        self,
        prompt: Prompt,
        params: Params | None,
        options: RequestOptions,
        keywords: Mapping[str, Any],
        check: Check = lambda: None,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> Sequence:
        """Make the sequence that answers a prompt, in stages. `check` is called between them and may raise.

        `variables` are of the template, if the prompt must be messages.
        """
        asked = self.sampled_by(prompt, params, keywords)
        conversation = self.conversation(prompt, options, variables)
        with asking_for(options.tenant):
            fitting = self.fit(prompt, asked, options, None if conversation is None else conversation.encode)
            check()
            request = self.request(fitting, asked, options, conversation)
        check()
        return Sequence(request)

    def chat_sequence(
        self,
        messages: Items[Message],
        params: Params | None,
        options: RequestOptions,
        keywords: Mapping[str, Any],
        check: Check = lambda: None,
    ) -> Sequence:
        """The same for a conversation; `keywords` may also be variables of the template."""
        sampling, variables = split_keywords(keywords, self.tokenizer.chat_templates)
        return self.sequence(messages, params, options, sampling, check, variables=variables)

    def choices(
        self,
        prompt: Prompt,
        params: Items[SamplingParams],
        options: RequestOptions,
        variables: Mapping[str, Any],
        check: Check = lambda: None,
    ) -> list[Sequence]:
        """An answer for each of `params` to a prompt that is read once; `variables` are of the template of messages."""
        refuse_sampling(variables, self.tokenizer.chat_templates)
        conversation = self.conversation(prompt, options, variables if is_conversation(prompt) else None)
        sequences = list[Sequence]()
        with asking_for(options.tenant):
            fitting = self.fit(prompt, params[0], options, None if conversation is None else conversation.encode)
            for each in params:
                check()
                sequences.append(Sequence(self.request(fitting, each, options, conversation)))
        return sequences

    def _warn(self, category: type[RequestWarning], messages: Iterable[str]) -> None:
        """Warn of each once."""
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
        """Return the format with tools that can be enforced, and what makes a constraint, which was made once.

        Raises InvalidRequestError for a grammar or tools that cannot be compiled.
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
        """Return what closes the reasoning when its budget is used up."""
        budget = self._budget(form)
        return make if budget is None else lambda: BudgetConstraint(make(), budget)

    def _budget(self, form: AnswerFormat) -> Budget | None:
        reasoning = form.reasoning
        if reasoning is None or form.budget is None:
            return None
        closing_ids = {mark: token_id for token_id, mark in form.marks.items()}.get(reasoning.closing)
        ids = self._compiler.spell(reasoning.closing) if closing_ids is None else [closing_ids]
        opening, closing = (text.encode(errors="surrogatepass") for text in (reasoning.opening, reasoning.closing))
        spelling = self.tokenizer.token_bytes

        def bytes_of(token_id: int) -> bytes:
            mark = form.marks.get(token_id)
            return spelling[token_id] if mark is None else mark.encode(errors="surrogatepass")

        return Budget(form.budget, opening, closing, tuple(ids), bytes_of, form.is_open)

    def stream(
        self,
        sequence: Sequence,
        on_prefill: OnPrefill | None = None,
        lease: Lease | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Stream:
        """An answer at a slot of its own, or at that of a lease."""
        mailbox = Mailbox(shows_prefill=on_prefill is not None)
        return Stream(OpenAnswer(self.loop, sequence, mailbox, lease, on_end), on_prefill)

    def limit(self, max_running: int, gap_seconds: float) -> None:
        """Set `Engine.limit` before the next step. Never waits."""
        self.loop.call(once(self.engine.limit, max_running, gap_seconds))

    def change(self, lease: Lease, change: Callable[[int], _Found]) -> _Found:
        """Return `Engine.change(lease, change)`, called on the loop's thread."""
        return self.loop.run(lambda: self.engine.change(lease, change))


def _make_runner(model: Transformer, settings: HostSettings, ranks: Ranks | None) -> Runner:
    pool_pages = settings.pool_pages or default_pool_pages(model, settings.cache)
    asked = RunnerSettings(model.max_seq_len, settings.cache, MAX_STEP_LOGITS, pool_pages, settings.capture)
    if ranks is None:
        return Runner(model, **asked._asdict())
    ranks.load(asked)
    leading = LeadingRunner(ranks, model, **asked._asdict())
    leading.check_logits()
    return leading


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
