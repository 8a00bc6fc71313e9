"""A loaded model with its engine, as `LLM`, its sessions and servers share it, and the load of both and of its drafts.

A draft model must have the vocabulary of the model. Without one, the model's own head drafts if its files have one.
"""

import hashlib
import logging
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar, final

import torch

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.prefix_store import open_store
from infer.compute.operands.identity import identity_of
from infer.engine.engine import Engine
from infer.engine.prefixes.prefix_disk import PrefixDisk, prefix_fingerprint
from infer.engine.requests.answer import Answer, once
from infer.engine.requests.ask import Ask
from infer.engine.requests.loop import Loop
from infer.engine.requests.request_maker import RequestMaker
from infer.engine.requests.stream import AsyncStream
from infer.engine.requests.text_heads import ModelFacts, TextHeads, make_text_heads
from infer.engine.runner.hidden_states import HiddenStates, TextEncoder
from infer.engine.runner.runner import Runner, plan_rows
from infer.engine.runner.token_states import HeadInput, TokenStates
from infer.engine.step.model_drafter import FIRST_TOKENS, ModelDrafter
from infer.engine.step.request import limits_of
from infer.engine.step.sequence import Lease
from infer.engine.tensor_parallel.leading import LeadingRunner
from infer.engine.tensor_parallel.ranks import Ranks, start_ranks
from infer.errors import InvalidRequestError, closed
from infer.files import Checkpoint
from infer.files.generation_config import defaults_of
from infer.files.tensors.lazy_weights import LazyWeights
from infer.model_settings import ModelSettings
from infer.models.compile_ahead import make_outline
from infer.models.draft_plan import DraftPlan, plan_draft
from infer.models.from_checkpoint import load_checked, load_tokenizer
from infer.models.load import OnProgress, load_transformer
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.transformer import Transformer
from infer.text.templates.chat_template import start_rendering
from infer.text.tokenizer import Tokenizer

_Result = TypeVar("_Result")
log = logging.getLogger("infer.server")
_MOST_UNSHARED = 64  # a vocabulary may have a 64th more tokens than the other, which are never drafted


@final
class Host:
    def __init__(
        self,
        loop: Loop,
        model: Transformer,
        settings: ModelSettings,
        facts: ModelFacts,
        ranks: Ranks | None,
        draft: tuple[Transformer, DraftPlan] | None = None,
    ) -> None:
        """Give an engine to the loop that loaded the model.

        `ranks` are the other processes of a model that is divided between processes. Each loads its part. `draft` is
        the model that drafts for it.
        """
        self.loop, self.settings, self.facts, self._ranks = loop, settings, facts, ranks
        self.tokenizer, limits = facts.tokenizer, limits_of(model, facts.tokenizer)
        self.reads_whole_texts = model.architecture.reads_whole_texts  # it is an encoder
        self.engine_if_any: Engine | None = None  # None for an encoder, and after `close`
        self._open_model: Transformer | None = model
        self._text_states: HiddenStates | TextEncoder | None = None
        refusal, checkpoint_tokens = None, 0
        if self.reads_whole_texts:
            refusal = _refusal_of(model.architecture.family, facts.heads)
        else:
            slots = model.step_limits.logits
            drafter = None if draft is None else loop.run(make_drafter, *draft, model, slots, limits.vocab_size)
            runner = loop.run(_make_runner, model, settings, ranks, drafter, limits.vocab_size)
            self.engine_if_any = Engine(runner, draft_model=drafter, prefixes=self._open_prefixes(runner))
            checkpoint_tokens = runner.checkpoint_tokens
        loop.own(self.engine_if_any, model.backend)
        has_draft_model = draft is not None
        self.has_draft_head = draft is not None and draft[1].is_head
        self.requests = RequestMaker(
            limits, facts, settings.grammar_backend, checkpoint_tokens, refusal, has_draft_model=has_draft_model
        )

    def _open_prefixes(self, runner: Runner) -> PrefixDisk | None:
        """Return the prefixes on disk, or None if they are off, or if the cache cannot use them."""
        if not (self.settings.prefix_disk and runner.shares_prefixes and runner.has_whole_rows):
            return None
        model = self.fingerprint(runner.cache.kind) | {"times": repr(self.facts.modified_ns)}
        fingerprint = prefix_fingerprint(model, runner)
        store = open_store(fingerprint, self.settings.prefix_disk)
        if isinstance(store, str):
            log.warning("prefixes of prompts are not stored on disk: %s", store)
            return None
        loop = weakref.ref(self.loop)  # a weak reference, so that an unused loop can end

        def call(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
            if (open_loop := loop()) is None:
                raise closed()
            return open_loop.call(once(function, *arguments)).get

        return PrefixDisk(store, runner.cache, call)

    def close(self) -> None:
        """End all answers, and free the caches and the weights. A second call does nothing."""
        self.loop.close()
        self._open_model = self.engine_if_any = self._text_states = None
        if self._ranks is not None:
            self._ranks.close()

    @property
    def model(self) -> Transformer:
        """The network. Raises ClosedError after `close`."""
        if (model := self._open_model) is None:
            raise closed()
        return model

    @property
    def engine(self) -> Engine:
        """The engine. Raises InvalidRequestError for an encoder, and ClosedError after `close`."""
        self.requests.check_generates()
        if (engine := self.engine_if_any) is None:
            raise closed()
        return engine

    @property
    def runner(self) -> Runner:
        """The runner of the engine. Raises as `engine`."""
        return self.engine.runner

    def check_has_states(self) -> None:
        """Raise InvalidRequestError if several processes share the model, because they give no hidden states."""
        if self._ranks is not None:
            raise InvalidRequestError(
                "vectors, scores and labels of texts need a model in one process: load it without tensor_parallel"
            )

    def text_states(self) -> HiddenStates | TextEncoder:
        """Return the computation of texts' hidden states, made on first use. For the loop's thread."""
        if self._text_states is None:
            make = TextEncoder if self.reads_whole_texts else HiddenStates
            self._text_states = make(self.model, self.settings.cache.kv_type, capture=self.settings.capture)
        return self._text_states

    def warn_of_template(self, stacklevel: int) -> None:
        """Warn if the model's own chat template cannot render conversations. Plain text needs no template."""
        if self.tokenizer.chat_template is None:
            return
        try:
            self.tokenizer.check_chat_template()
        except InvalidRequestError as error:
            warnings.warn(f"conversations will not work with this model: {error}", stacklevel=stacklevel)

    def fingerprint(self, cache_kind: str) -> dict[str, str]:
        """Return the values that must be equal for a saved cache to be valid here."""
        tokenizer = self.tokenizer
        vocabulary = repr((tokenizer.token_bytes, sorted(tokenizer.special_token_ids), sorted(tokenizer.eos_token_ids)))
        return {
            "architecture": _digest(identity_of(self.model.architecture)),
            "tokenizer": _digest(vocabulary),
            "weights": self.facts.weights,
            "cache": cache_kind,
        }

    @cached_property
    def system_fingerprint(self) -> str:
        """Fingerprint of the model, its settings and the kind of its kernels.

        Equal fingerprints give equal answers to the same request and seed. A saved session needs no equal kernels, so
        `fingerprint` does not name them.
        """
        kind = "" if self.reads_whole_texts else self.runner.cache.kind
        kernels = self.facts.kernels
        named = () if kernels == "cpu" else (kernels,)  # permalinks that were made before kinds had names are of a CPU
        model = self.fingerprint(kind), self.tokenizer.chat_templates, *named
        return f"fp_{_digest(repr((*model, sorted(self.facts.sampling_defaults.items()))))[:16]}"

    def limit(self, max_running: int, gap_seconds: float) -> None:
        """Call `Engine.limit` before the next step: limits of running sequences, and of a step's seconds.

        This does not wait for the step.
        """
        if self.engine_if_any is not None:
            self.loop.call(once(self.engine_if_any.limit, max_running, gap_seconds))

    async def answers(self, ask: Ask) -> list[Answer]:
        """Return the answers to an ask of one prompt, which is read on a thread. None of them has begun."""
        sequences = await self.loop.prepare(partial(self.requests.sequences, ask), is_constrained=ask.is_constrained)
        return [self.loop.answer(sequence) for sequence in sequences]

    def astream(self, ask: Ask) -> AsyncStream:
        """Return a stream of the answer to an ask, whose prompt is read when the stream is."""

        async def prepare() -> Answer:
            (answer,) = await self.answers(ask)
            return answer

        return AsyncStream(prepare)

    def change(self, lease: Lease, change: Callable[[int], _Result]) -> _Result:
        """Return `Engine.change(lease, change)`, called on the loop's thread."""
        return self.loop.run(lambda: self.engine.change(lease, change))


def load_host(
    checkpoint: Checkpoint, tokenizer: Tokenizer, settings: ModelSettings, on_progress: OnProgress | None = None
) -> Host:
    """Return the loaded model. Raises ModelError if it is not usable or does not fit in memory."""
    heads = make_text_heads(checkpoint, tokenizer, settings.reranker)
    if tokenizer.chat_template is not None:
        start_rendering()
    defaults, ranks, loop = defaults_of(checkpoint), start_ranks(checkpoint, settings), Loop()
    own = settings if ranks is None else replace(settings, device=ranks.source.device_of(0))
    group = None if ranks is None else ranks.group
    # Rows of weights are allocated on the memory node of the thread that packs them.
    network = loop.load(lambda show: load_checked(checkpoint, tokenizer, own, show, group=group), on_progress)
    draft = loop.load(lambda show: load_draft_model(settings, checkpoint, network, tokenizer, show), None)
    facts = ModelFacts(
        tokenizer,
        f"{checkpoint.fingerprint()} {settings.weights} {settings.precision} {settings.dtype}",
        defaults,
        heads.of_network(network.architecture),
        network.backend.kernel_kind(make_outline(network.architecture, checkpoint.tensors, own)),
        tuple(file.modified_ns for file in checkpoint.files),
    )
    return Host(loop, network, settings, facts, ranks, draft)


def _refusal_of(family: str, heads: TextHeads) -> str:
    """Return the reason why an encoder answers no request."""
    use = "embed()" if heads.classifier is None else "rerank()" if heads.reranker else "classify()"
    return f"{family} is an encoder and generates no text: use {use}, or load a decoder"


def _make_runner(
    model: Transformer, settings: ModelSettings, ranks: Ranks | None, drafter: ModelDrafter | None, vocab_size: int
) -> Runner:
    """Return the runner of a model, with recorded steps. For a head that drafts, it keeps the states of tokens."""
    reserved_bytes = 0 if drafter is None else drafter.unwritten_bytes
    plan = plan_rows(model, settings.cache, settings.pool_pages, reserved_bytes)
    options: dict[str, Any] = {"num_slots": model.step_limits.logits, "capture": settings.capture}
    options |= {"settings": plan.settings, "pool_pages": plan.pool_pages}
    if drafter is not None and drafter.head_input is not None:
        options["states"] = drafter.head_input.states
    make = Runner if ranks is None else partial(LeadingRunner, ranks)
    runner = make(model, capacity=model.max_seq_len, **options)
    if isinstance(runner, LeadingRunner):
        runner.check_logits()
    started = time.perf_counter()
    if count := runner.warm_up(vocab_size):
        log.info("recorded %d steps for the device in %.1f s", count, time.perf_counter() - started)
    return runner


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# Drafts


def load_draft_model(
    settings: ModelSettings,
    checkpoint: Checkpoint,
    model: Transformer,
    tokenizer: Tokenizer,
    on_progress: OnProgress | None = None,
) -> tuple[Transformer, DraftPlan] | None:
    """Return the draft model that the settings name, or the model's own head. None if nothing drafts.

    Raises InvalidRequestError if it cannot draft for the model, and ModelError if it is not usable or does not fit in
    the memory that the model has left. A head that does not fit, or on another device than a CPU, is left out, and the
    log says so.
    """
    if settings.device == "auto":
        settings = replace(settings, device=model.backend.memory_rules)
    if (plan := plan_draft(settings, checkpoint, model.max_seq_len)) is None:
        if checkpoint.drafting and settings.draft_head and (settings.device, settings.tensor_parallel) != ("cpu", 1):
            log.warning("the model's own head drafts only on a CPU, in one process: it is left out")
        return None
    if plan.is_head:
        return _load_head(settings, plan, model)
    if model.architecture.reads_whole_texts:
        raise InvalidRequestError(f"draft_model: {model.architecture.family} is an encoder and generates no text")
    own = load_tokenizer(plan.checkpoint)
    check_vocabularies(str(settings.draft_model), own, tokenizer)
    return load_checked(plan.checkpoint.without_metadata(), own, plan.settings, on_progress), plan


def _load_head(settings: ModelSettings, plan: DraftPlan, model: Transformer) -> tuple[Transformer, DraftPlan] | None:
    """Return the model's own head, or None if it does not fit in the memory that the model has left."""
    backend, own = model.backend, plan.settings
    load = LoadSettings.of(own, backend.num_threads(), backend.memory_rules)
    available, num_bytes = backend.available_bytes(), plan.num_bytes(load)
    if available is not None and num_bytes > available:
        log.warning("the model's head that drafts needs %d MB and is left out", num_bytes // 10**6)
        return None
    outline = make_outline(plan.architecture, plan.checkpoint.tensors, own)
    with backend.compiling([outline]), backend.threads():
        head = load_transformer(
            plan.architecture,
            LazyWeights(plan.checkpoint.tensors),
            backend=backend,
            dtype=None if own.dtype == "auto" else getattr(torch, own.dtype),
            keep_floats_as=own.weights,
            precision=own.precision,
            max_seq_len=own.max_seq_len,
            shared=model,
        )
    return head, plan


def check_vocabularies(name: str, draft: Tokenizer, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequestError if an id stands for other bytes in the draft model's vocabulary."""
    own, others = draft.token_bytes, tokenizer.token_bytes
    differing = next((i for i, (left, right) in enumerate(zip(own, others, strict=False)) if left != right), None)
    if differing is None and abs(len(own) - len(others)) * _MOST_UNSHARED <= len(others):
        return
    token = (
        "" if differing is None else f", and token {differing} is {own[differing]!r:.40}, not {others[differing]!r:.40}"
    )
    raise InvalidRequestError(
        f"draft_model={name!r:.200} has another vocabulary than the model: {len(own):,} tokens, not {len(others):,}"
        f"{token}: name a smaller model of the same family"
    )


def make_drafter(
    draft: Transformer, plan: DraftPlan, model: Transformer, num_slots: int, vocab_size: int
) -> ModelDrafter:
    """Return the drafter of a loaded draft model, with a cache for as many slots as its model has.

    A head reads the states that the model's runner keeps for it, in `head_input.states`.
    """
    own = TokenStates(draft, 1) if plan.is_head else None
    options: dict[str, Any] = {"num_slots": num_slots, "pool_pages": plan.pool_pages, "states": own}
    runner = Runner(draft, draft.max_seq_len, capture=plan.settings.capture, settings=CacheSettings(), **options)
    head_input = None if own is None else HeadInput(draft, TokenStates(model, FIRST_TOKENS), own)
    return ModelDrafter(runner, vocab_size, head_input)
