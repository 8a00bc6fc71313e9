"""The requests whose answers `data/answers.json` stores: one row each. `answer_runs` computes them.

A row names a model of `answer_models`, the settings with which `LLM` loads it, and the parameters of the call. The rows
of one model with the same settings are neighbours, so that it is loaded once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from answer_models import EOS

Call = Literal["generate", "generate_all", "chat", "session", "score", "embed", "rerank", "classify"]

TEXT = "The quick brown fox jumps over the lazy dog."
LONG = " ".join(f"{number} foxes and {number * number % 97} dogs," for number in range(20))  # 400 tokens
REPEATED = "abc cab bac " * 4
EIGHT = tuple(TEXT[: 5 * length] for length in range(1, 9))
DOCUMENTS = ("Foxes jump.", "The bridge was built in 1932.", "A dog sleeps.")
TURNS = ("Hello", "What does the fox do?", "And the dog?")
STOP_ID = 120

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}
SCORED = GREEDY | {"logprobs": 2}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_new_tokens": 16}
FEW_LETTERS = {"allowed_token_ids": tuple(b"abc ")}
NGRAM = FEW_LETTERS | {"temperature": 0.3, "seed": 3, "max_new_tokens": 24, "speculation": "ngram"}
GRAMMAR = 'start: "fox" (" " WORD)+ "."\nWORD: /[a-c]{1,3}/'


def _object(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMA = _object(name={"enum": ["fox", "dog"]}, legs={"enum": [2, 4]})
COUNT = {"name": "count", "description": "Count animals.", "parameters": _object(animal={"enum": ["fox", "dog"]})}
TOOL = {"type": "function", "function": COUNT}
TOOLS = {"tools": (TOOL,), "max_new_tokens": 80}
MESSAGES = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "How many foxes are there?"})


@dataclass(frozen=True)
class Case:
    """A request. `asked` is a prompt, or what the call takes in its place: texts, messages, turns."""

    name: str
    model: str
    params: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    call: Call = "generate"
    asked: Any = TEXT


def _on(model: str, *rows: tuple[str, Mapping[str, Any]], settings: Mapping[str, Any] | None = None) -> list[Case]:
    """Return the rows of one model, each with its name, its parameters, and perhaps `call` and `asked`."""
    cases = []
    for name, values in rows:
        params = dict(values)
        own = {key: params.pop(key) for key in ("call", "asked") if key in params}
        cases.append(Case(f"{model}: {name}", model, params, settings or {}, **own))
    return cases


_BATCH: dict[str, Any] = {"call": "generate_all", "asked": EIGHT}
_SAMPLED_BATCH = SEEDED | {"batch_size": 8, "top_k": 40} | _BATCH
_CHUNKS = GREEDY | {"prefill_chunk": 37, "asked": LONG}
_DRAFTS = NGRAM | {"asked": REPEATED}

_FILTERS = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "temperature": 1.4, "temperature_last": True, "seed": 9}

_SAMPLERS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("sampled", SEEDED),
    ("low temperature", SEEDED | {"temperature": 0.4, "seed": 2**53 - 1}),
    ("top k", SEEDED | {"top_k": 5}),
    ("top p", SEEDED | {"top_p": 0.8, "seed": 10}),
    ("min p", SEEDED | {"min_p": 0.1, "seed": 8}),
    ("filters, temperature last", SEEDED | _FILTERS),
    ("repetition penalty", GREEDY | {"repetition_penalty": 1.3}),
    ("repetition window", SEEDED | {"repetition_penalty": 1.5, "repetition_window": 8}),
    ("frequency penalty", SEEDED | {"frequency_penalty": 0.9} | FEW_LETTERS),
    ("presence penalty", SEEDED | {"presence_penalty": -1.5}),
    ("bias", SEEDED | {"logit_bias": {65: 3.5, 66: 4.0, 67: float("-inf"), EOS: 2.0}}),
    ("few letters", SEEDED | FEW_LETTERS),
    ("at least some tokens", SEEDED | {"min_new_tokens": 6, "logit_bias": {EOS: 30.0}}),
    ("no end", SEEDED | {"ignore_eos": True, "logit_bias": {EOS: 9.0}}),
    ("stop string", SEEDED | {"stop": ["ca", "bbc "]} | FEW_LETTERS),
    ("stop id", SEEDED | {"stop_token_ids": [STOP_ID], "logit_bias": {STOP_ID: 5.0}}),
    ("log-probabilities", SEEDED | {"logprobs": 5}),
    ("processed log-probabilities", SEEDED | {"logprobs": 3, "logprobs_mode": "processed", "top_k": 8}),
)
_CONSTRAINTS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("schema", SEEDED | {"json_schema": SCHEMA, "max_new_tokens": 60}),
    ("pattern", SEEDED | {"regex": "fox [a-c ]{3,12}x?"}),
    ("grammar", GREEDY | {"grammar": GRAMMAR}),
    ("choice", GREEDY | {"choice": ["dogs", "foxes", "fox"]}),
    ("schema with drafts", GREEDY | {"json_schema": SCHEMA, "max_new_tokens": 60, "speculation": "ngram"}),
)
_CALLS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("batch of 8", _SAMPLED_BATCH),
    ("long prompt in chunks", _CHUNKS),
    ("drafts", _DRAFTS),
    ("begun answer", GREEDY | {"answer_prefix": tuple(b"The fox")}),
    ("prompt that is cut", GREEDY | {"overflow": "truncate_left", "asked": LONG * 2}),
    ("score of a prompt", {"call": "score"}),
    ("chat", SEEDED | {"call": "chat", "asked": MESSAGES}),
    ("tools, required", SEEDED | TOOLS | {"tool_choice": "required", "call": "chat", "asked": MESSAGES}),
    ("tools, one by name", GREEDY | TOOLS | {"tool_choice": "count", "call": "chat", "asked": MESSAGES}),
    ("session", GREEDY | {"call": "session", "asked": TURNS}),
    ("sampled session", SEEDED | {"repetition_penalty": 1.1, "call": "session", "asked": TURNS}),
    ("vectors", {"call": "embed", "asked": (TEXT, "fox", LONG)}),
)
_KV_TYPES = ("f32", "f16", "bf16", "q8", "q4")
_FAST: dict[str, Any] = {"precision": "fast"}

_SESSION = GREEDY | {"call": "session", "asked": TURNS}
_SHARED: dict[str, Any] = {"batch_size": 1, "call": "generate_all", "asked": (LONG, f"{LONG} fox")}
_LONG_SCORED, _LONG_GREEDY = SCORED | {"asked": LONG}, GREEDY | {"asked": LONG}
_GREEDY, _IN_CHUNKS = ("greedy", SCORED), ("long prompt in chunks", _CHUNKS)
_OF_8, _WITH_DRAFTS = ("batch of 8", _SAMPLED_BATCH), ("drafts", _DRAFTS)
_VECTORS: dict[str, Any] = {"call": "embed", "asked": (TEXT, "fox")}
_RANKED: dict[str, Any] = {"call": "rerank", "asked": DOCUMENTS}

CASES: tuple[Case, ...] = (
    *_on("llama", _GREEDY, *_SAMPLERS, *_CONSTRAINTS, *_CALLS),
    *(_on("llama", (f"cache in {each}", _LONG_SCORED), settings={"kv_type": each})[0] for each in _KV_TYPES),
    *_on("llama", ("op by op", SCORED), settings={"capture": False}),
    *_on("llama", ("sliding eviction", _LONG_GREEDY), settings={"eviction_policy": "sliding", "eviction_window": 64}),
    *_on("llama", ("snapkv eviction", _LONG_GREEDY), settings={"eviction_policy": "snapkv", "eviction_window": 96}),
    *_on("llama", ("shared prefixes", GREEDY | _SHARED), settings={"reuse_prefixes": True}),
    *_on("llama", ("weights in q8", SCORED), settings={"weights": "q8"}),
    *_on("llama", ("weights in q8, fast", SCORED), settings={"weights": "q8"} | _FAST),
    *_on("llama", ("weights in q4", SCORED), settings={"weights": "q4"}),
    *_on("llama", ("weights in q4, fast", SCORED), settings={"weights": "q4"} | _FAST),
    *_on("llama", ("weights in bf16", SCORED), settings={"weights": "bf16"}),
    *_on("llama in bf16", _GREEDY, _OF_8),
    *_on("llama in f16", _GREEDY, _OF_8),
    *_on("gguf", ("exact", SCORED), ("exact batch of 8", _SAMPLED_BATCH), ("exact prompt", _CHUNKS)),
    *_on("gguf", ("fast", SCORED), ("fast batch of 8", _SAMPLED_BATCH), ("fast prompt", _CHUNKS), settings=_FAST),
    *_on("gemma2", _GREEDY, _IN_CHUNKS, _WITH_DRAFTS),
    *_on("gemma2", ("cache in q8", SCORED), settings={"kv_type": "q8"}),
    *_on("gemma2", ("cache in q4", SCORED), settings={"kv_type": "q4"}),
    *_on("gemma4", _GREEDY, _IN_CHUNKS),
    *_on("qwen2_moe", _GREEDY, _OF_8, _IN_CHUNKS),
    *_on("qwen2_moe", ("weights in q4", SCORED), settings={"weights": "q4"}),
    *_on("qwen2_moe", ("weights in q4, fast", SCORED), settings={"weights": "q4"} | _FAST),
    *_on("gpt_oss", _GREEDY, _IN_CHUNKS),
    *_on("gpt_oss", ("cache in q8", SCORED), settings={"kv_type": "q8"}),
    *_on("llama4", _GREEDY, _IN_CHUNKS),
    *_on("qwen3_5", _GREEDY, _OF_8, _IN_CHUNKS, _WITH_DRAFTS, ("session", _SESSION)),
    *_on("qwen3_5", ("cache in q4", SCORED), settings={"kv_type": "q4"}),
    *_on("qwen3_5", ("weights in q8, fast", SCORED), settings={"weights": "q8"} | _FAST),
    *_on("olmo_hybrid", _GREEDY, _IN_CHUNKS),
    *_on("lfm2", _GREEDY, _OF_8, _IN_CHUNKS, _WITH_DRAFTS),
    *_on("qwen3", _GREEDY),
    *_on("qwen3", ("rerank", _RANKED), settings={"reranker": "qwen3"}),
    *_on("embedder", ("last state", _VECTORS)),
    *_on("embedder", ("mean, 16 dimensions", _VECTORS | {"pooling": "mean", "dimensions": 16}), ("cosines", _RANKED)),
    *_on("classifier", ("labels", {"call": "classify", "asked": DOCUMENTS})),
    *_on("bert", ("mean", {"call": "embed", "asked": (TEXT, "fox", LONG), "pooling": "mean"})),
    *_on("bert", ("first state", _VECTORS | {"pooling": "cls", "normalize": False})),
)
