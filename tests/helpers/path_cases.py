"""Generations of every kind, the answer of each by definition, and every way to run them.

`by_definition` does not use the loop: it computes the whole sequence again for each token, fills the grammar's mask
and samples with `sampling.definition`. All other ways are compared with it.
"""

import random
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import cycle
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
)

from byte_tokenizer import write_byte_tokenizer
from infer import SamplingParams, Stream, Tokenizer, load_model, load_tokenizer
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.step import Step
from infer.compute.sampling import definition, sampler
from infer.engine.engine import Engine
from infer.engine.requests.prompt_batch import answer_all
from infer.engine.runner.runner import Runner, make_cache
from infer.engine.speculation.policy import Guess
from infer.engine.step.answer_parts import TextOutput
from infer.engine.step.drafting import Drafting
from infer.engine.step.request import Request
from infer.engine.step.sequence import Lease
from infer.engine.step.sequence import Sequence as Answering
from infer.models.transformer import Transformer
from infer.outputs import GenerationResult, TokenLogprob
from infer.text.grammar.constraint import Constraint
from infer.text.grammar.grammar import grammar_of
from infer.text.grammar.grammar_compiler import Compiler
from looping import loop_of, open_stream
from recompute import RecomputeRunner, make_request
from steps import join
from tiny import Tiny, make_tiny

Drafts = Literal["none", "ngram", "adaptive", "right", "half", "random", "ends"]
DRAFTS: tuple[Drafts, ...] = ("none", "ngram", "adaptive", "right", "half", "random", "ends")

MERGES = [("{", '"'), ('"', ":"), ('":', " "), ("a", "b"), ("ab", "c"), ("b", "a"), ("ba", "r"), ("c", " "), ("1", "0")]
VOCAB_SIZE = 256 + len(MERGES) + 2
EOS, END_OF_TURN = VOCAB_SIZE - 2, VOCAB_SIZE - 1
EMBEDDING = VOCAB_SIZE + 13  # with 13 rows that belong to no token
CONTEXT = 160
WINDOW = 8
NUM_BESIDE = 8  # sequences that the definition computes in one step, one per row

_SIZES: dict[str, Any] = {"vocab_size": EMBEDDING, "hidden_size": 64, "intermediate_size": 96, "bos_token_id": None}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(num_hidden_layers=2, **_SIZES),
    "wide": LlamaConfig(num_hidden_layers=2, head_dim=32, **_SIZES),
    "windows": Gemma3TextConfig(num_hidden_layers=6, head_dim=16, sliding_window=WINDOW, **_SIZES),
    "chunks": Llama4TextConfig(
        num_hidden_layers=4, head_dim=16, attention_chunk_size=WINDOW, floor_scale=WINDOW, num_local_experts=4,
        intermediate_size_mlp=96, **_SIZES,
    ),
    "experts": Qwen2MoeConfig(
        num_hidden_layers=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=128, **_SIZES,
    ),
    "shared keys": Gemma4TextConfig(
        num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=2,
        head_dim=16, global_head_dim=32, sliding_window=WINDOW, hidden_size_per_layer_input=0, attention_k_eq_v=True,
        num_global_key_value_heads=1, **_SIZES,
    ),
    "convolutions": Lfm2Config(num_hidden_layers=4, full_attn_idxs=[1, 3], **_SIZES),
    "states": Qwen3_5TextConfig(
        num_hidden_layers=4, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, **_SIZES,
    ),
    "sigmoids": Glm4MoeConfig(
        num_hidden_layers=2, head_dim=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, **_SIZES,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """A tiny model with its tokenizer, and the outcomes by definition. A copy with another model computes its own."""

    model: Transformer
    tokenizer: Tokenizer
    compiler: Compiler
    folder: Path
    settings: CacheSettings | None = None
    found: "dict[str, Outcome]" = field(default_factory=dict, init=False, compare=False)


def varied_ids(count: int) -> list[int]:
    """Return a prompt in which few tokens are equal to their neighbours."""
    return [(7 * index + index * index // 9) % EOS for index in range(count)]


def make_folder(name: str, folder: Path) -> Path:
    make_tiny(Tiny(name, CONFIGS[name]), folder)
    write_byte_tokenizer(folder, merges=MERGES)
    return folder


def make_world(name: str, folder: Path) -> World:
    make_tiny(Tiny(name, CONFIGS[name]), folder)
    return finish_world(folder)


def finish_world(folder: Path) -> World:
    """Return the world of a model that has no tokenizer yet."""
    write_byte_tokenizer(folder, merges=MERGES)
    model, _ = load_model(folder)
    tokenizer = load_tokenizer(folder)
    return World(model, tokenizer, Compiler(tokenizer), folder)


@dataclass(frozen=True)
class Case:
    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Outcome:
    """The parts of a result that must not depend on the way in which it was computed."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | int | None
    grammar_complete: bool | None
    error: str | None
    logprobs: list[TokenLogprob] | None

    @classmethod
    def of(cls, result: GenerationResult) -> "Outcome":
        return cls(**{each.name: getattr(result, each.name) for each in fields(cls)})


_LETTERS = [*b"abc ", *range(256, EOS)]  # so few that a text soon repeats itself

_REPETITION: dict[str, Any] = {"repetition_penalty": 1.3, "repetition_window": 12}
_BIAS: dict[str, Any] = {"logit_bias": {EOS: 4.0, ord("a"): 4.0, ord("b"): 3.5, ord("q"): 2.5, 7: -np.inf}}
_PROCESSED: dict[str, Any] = {"logprobs": 1, "logprobs_mode": "processed"}

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, penalised": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "seeded": {"temperature": 0.8, "seed": 1},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2} | _REPETITION,
    "counted": {"temperature": 0.7, "frequency_penalty": 0.6, "presence_penalty": 0.4, "min_p": 0.02, "seed": 3},
    "ending": {"temperature": 0.9, "min_new_tokens": 6, "stop_token_ids": [ord("q")], "seed": 4} | _BIAS,
    "stopped": {"temperature": 1.0, "allowed_token_ids": [*_LETTERS, EOS], "stop": ["cab ", "bb", " ab"], "seed": 5},
    "few letters": {"temperature": 0.4, "allowed_token_ids": _LETTERS, "repetition_penalty": 1.1, "seed": 6},
    "scored": {"temperature": 0.6, "allowed_token_ids": [*_LETTERS, EOS], "stop": ["ca"], "logprobs": 2, "seed": 7},
    "scored, penalised": {"temperature": 0, "presence_penalty": 0.3, "min_new_tokens": 3} | _PROCESSED,
}
_SCHEMA = {
    "type": "object",
    "properties": {"bar": {"enum": ["abc abc", "abc", 10, None]}, "abab": {"type": "array", "items": {"const": "ba"}}},
    "required": ["bar", "abab"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {"free": {}, "regex": {"regex": "bar abc[a-c ]{3,14}x?"}}
GRAMMARS |= {"choice": {"choice": ["abc abc bar", "abc bar bar bar", "ba"]}, "schema": {"json_schema": _SCHEMA}}
LENGTHS = (1, 5, 23, 71)


def make_cases() -> list[Case]:
    """Return cases of every sampler with every grammar, on prompts of different lengths that repeat themselves."""
    cases = []
    for index, (sampler_name, values) in enumerate(SAMPLERS.items()):
        for place, (grammar_name, grammar) in enumerate(GRAMMARS.items()):
            rng = random.Random(100 * index + place)
            words = [rng.choices(_LETTERS, k=rng.randint(2, 5)) for _ in range(3)]
            prompt = [token_id for _ in range(40) for token_id in rng.choice(words)]
            length = LENGTHS[(index + place) % len(LENGTHS)]
            # A case with a grammar has no limits of its own: few letters or bans may leave no allowed token.
            own = {name: value for name, value in values.items() if not grammar or name != "allowed_token_ids"}
            params = SamplingParams(**{"max_new_tokens": 24 + index, **own, **grammar})
            cases.append(Case(f"{sampler_name}, {grammar_name}", tuple(prompt[:length]), params))
    return cases


CASES = make_cases()


def constraint_of(world: World, params: SamplingParams) -> Constraint | None:
    grammar = grammar_of(params)
    return None if grammar is None else world.compiler.compile(grammar)


@torch.inference_mode()
def full_logits(world: World, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the logits after the last token of each sequence, by the forward alone, with one row per sequence."""
    lengths = [len(token_ids) for token_ids in sequences]
    cache = make_cache(world.model, max(lengths), len(sequences), step_tokens=max(lengths), settings=world.settings)
    for row, length in enumerate(lengths):
        cache.reserve(row, length)
    steps = [Step.of(token_ids, row=row) for row, token_ids in enumerate(sequences)]
    return world.model.forward(join(steps), cache)[:, :VOCAB_SIZE].clone()


def by_definition(world: World, case: Case) -> Outcome:
    return all_by_definition(world, [case])[0]


def all_by_definition(world: World, cases: Sequence[Case]) -> list[Outcome]:
    """Return the outcomes. For each token, the whole sequence is computed again. Known cases are not computed again."""
    keys = [repr((case.prompt, asdict(case.params))) for case in cases]
    answers = {key: _answer(world, case) for key, case in zip(keys, cases, strict=True) if key not in world.found}
    logits: dict[str, torch.Tensor | None] = dict.fromkeys(answers)
    while answers:
        asked = dict[str, list[int]]()
        for key, answer in list(answers.items()):
            try:
                asked[key] = answer.send(logits[key])
            except StopIteration as end:
                world.found[key] = end.value
                del answers[key]
        for first in range(0, len(asked), NUM_BESIDE):
            some = list(asked)[first : first + NUM_BESIDE]
            logits |= dict(zip(some, full_logits(world, [asked[key] for key in some]), strict=True))
    return [world.found[key] for key in keys]


def _answer(world: World, case: Case) -> Generator[list[int], torch.Tensor | None, Outcome]:
    """Generate an answer: yield the ids so far, and receive the logits after them."""
    tokenizer, params = world.tokenizer, case.params
    request = Request(tokenizer, tuple(case.prompt), params, world.model.max_seq_len, VOCAB_SIZE)
    output = TextOutput(request)
    token_ids, text = list(case.prompt), ""
    constraint = constraint_of(world, params)
    logprobs, is_complete = list[TokenLogprob](), False
    while output.finish_reason is None:
        logits, allowed = (yield token_ids), None
        if constraint is not None:
            words = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
            constraint.fill(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
            allowed = torch.from_numpy(bits.astype(bool))
        options: dict[str, Any] = {"num_prompt_tokens": len(case.prompt), "eos_token_ids": tokenizer.eos_token_ids}
        token_id = definition.sample_token(logits, token_ids, params, allowed=allowed, **options)
        if params.logprobs is not None:
            if params.logprobs_mode == "processed":
                logits = definition.process_logits(logits, token_ids, params, allowed=allowed, **options)
            logprobs.append(_logprob(logits, token_id, params.logprobs))
        if constraint is not None:
            assert constraint.accept([token_id]) == 1
            is_complete = constraint.done
        token_ids.append(token_id)
        text += output.push(token_id, is_complete=is_complete).text
    ends = output.finish_reason, output.stop_reason, None if constraint is None else is_complete, None
    return Outcome(token_ids[len(case.prompt) :], text, *ends, None if params.logprobs is None else logprobs)


def _logprob(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprob:
    chosen = torch.tensor([token_id])
    logprobs, ranks, top_ids, top = sampler.log_probabilities(logits[None], chosen, count)
    alternatives = tuple(zip(top_ids[0].tolist(), top[0].tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[0]), int(ranks[0]), alternatives)


class Always:
    """A policy that ignores measured times, and drafts many, none, one and three tokens in turn."""

    def __init__(self) -> None:
        self._numbers = cycle((8, 8, 0, 1, 3))

    def tokens_between(self, times: object) -> int:
        return 4

    speed = inf  # tokens per second, more than plain steps have

    def num_draft_tokens(self, times: object, confidence: int, num_known: int, seconds: object) -> int:
        return next(self._numbers)

    def observe(self, confidence: int, is_right: bool) -> None:
        assert confidence or not is_right


SHARES = {"right": 1.0, "half": 0.7}  # of right drafts


class Oracle:
    """A drafter that knows the answer. Its drafts are all right, half right, wrong, or the end of the answer."""

    def __init__(self, kind: Drafts, expected: Sequence[int], token_ids: list[int]) -> None:
        self._kind, self._expected, self._ids = kind, expected, token_ids
        self._num_given = self._num_known = len(token_ids)
        self._rng = random.Random(len(token_ids))

    @property
    def num_new(self) -> int:
        return len(self._ids) - self._num_known

    def follow(self) -> Guess:
        self._num_known += 1
        return Guess(4, True)

    def match(self) -> int:
        return 4

    def propose(self, max_tokens: int) -> list[int]:
        drafts, share = list(self._expected[len(self._ids) - self._num_given :][:max_tokens]), SHARES.get(self._kind, 0)
        drafts += [EMBEDDING] * (max_tokens - len(drafts))
        for index, right in enumerate(drafts):
            wrong, end = self._rng.randrange(EMBEDDING), (EOS, END_OF_TURN, ord("q"))[index % 3]
            if right == EMBEDDING or self._rng.random() >= share:
                drafts[index] = end if self._kind == "ends" else wrong
        return drafts


@dataclass(frozen=True)
class Way:
    """One way to run a generation."""

    drafts: Drafts = "none"
    chunk: int = 512
    chain: int = 8
    capture: bool = True
    cached: bool = True

    def __str__(self) -> str:
        kind = "recomputed" if not self.cached else "captured" if self.capture else "op by op"
        return f"{kind}, drafts {self.drafts}, chunk {self.chunk}, chain {self.chain}"


def make_sequence(world: World, case: Case, way: Way, expected: Sequence[int] = (), **options: Any) -> Answering:
    """Return a sequence. `options` are the options of its request."""
    made: dict[str, Any] = {"num_draft_tokens": 8, "prefill_chunk": way.chunk}
    made["speculation"] = None if way.drafts == "none" else "ngram"
    if (grammar := grammar_of(case.params)) is not None:
        made["make_constraint"] = partial(world.compiler.compile, grammar)
    sequence = Answering(make_request(world.model, world.tokenizer, case.prompt, case.params, **made | options))
    fake: Any = sequence
    if way.drafts not in ("none", "adaptive"):
        fake.test_policy = Always()
    if way.drafts in ("right", "half", "random", "ends"):
        fake.test_draft = Oracle(way.drafts, expected, sequence.token_ids)
    return sequence


def _enter(drafting: Drafting, sequence: Any, enter: Any = Drafting.enter) -> None:
    """Enter with the drafter and the policy that a test gave the sequence. They are used until it leaves its slot."""
    enter(drafting, sequence)
    if (policy := vars(sequence).get("test_policy")) is not None:
        drafting._policies[sequence.slot] = [(drafting._ngrams, policy)]
    if (draft := vars(sequence).pop("test_draft", None)) is not None:
        drafting._ngrams._drafts[sequence.slot] = draft  # type: ignore[attr-defined]


Drafting.enter = _enter  # type: ignore[method-assign]


def check_ends(world: World, engine: Engine, sequences: Sequence[Answering], cases: Sequence[Case]) -> None:
    """Run an engine to the end, and check the answers. The cache is consistent after each step."""
    while engine.sequences:
        engine.step()
        engine.runner.cache.check_integrity()  # type: ignore[attr-defined]
    assert [Outcome.of(sequence.result()) for sequence in sequences] == all_by_definition(world, cases)


def make_runner(
    world: World, way: Way, capacity: int = CONTEXT, num_slots: int = 1, step_tokens: int | None = None
) -> Runner:
    if not way.cached:
        return RecomputeRunner(world.model, world.settings)
    limits = world.model.step_limits
    model = replace(world.model, step_limits=limits._replace(tokens=step_tokens or limits.tokens))
    return Runner(model, capacity, num_slots=num_slots, capture=way.capture, settings=world.settings)


class Place:
    """An engine, and the lease of a slot for consecutive answers."""

    def __init__(self, world: World, way: Way, runner: Runner | None = None) -> None:
        self.runner = runner or make_runner(world, way)
        self.engine, self.lease = Engine(self.runner, max_steps=way.chain), Lease()
        self.loop = loop_of(self.engine)

    def stream(self, sequence: Answering) -> Stream:
        return open_stream(self.loop, sequence, self.lease)

    @property
    def length(self) -> int:
        return 0 if self.lease.slot is None else self.runner.lengths[self.lease.slot]


def run_alone(
    world: World, case: Case, way: Way, expected: Sequence[int] = (), place: Place | None = None
) -> GenerationResult:
    place = place or Place(world, way)
    sequence = make_sequence(world, case, way, expected)
    result = place.stream(sequence).run()
    assert sequence.num_computed + sequence.num_pending == len(case.prompt) + len(result.token_ids)
    assert place.length == len(place.lease.token_ids) <= sequence.num_computed
    return result


def run_batch(world: World, cases: Sequence[Case], way: Way, num_slots: int, expected: Any) -> list[GenerationResult]:
    waiting = [make_sequence(world, case, way, ids) for case, ids in zip(cases, expected, strict=True)]
    return run_all(world, waiting, way, num_slots)


def run_all(
    world: World, waiting: Sequence[Answering], way: Way, num_slots: int, **options: Any
) -> list[GenerationResult]:
    """Run all cases. `options` are the options of the runner."""
    made = {"capture": way.capture, "settings": world.settings, **options}
    engine = Engine(Runner(world.model, CONTEXT, num_slots=num_slots, **made), max_steps=way.chain)
    ended = dict(answer_all(loop_of(engine), enumerate(waiting), num_slots))
    return [ended[number] for number in range(len(waiting))]
