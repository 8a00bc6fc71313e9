"""Parameters of other servers that this server does not have: accepted if they are neutral, renamed, or refused.

A hint changes no token, whatever its value. Any other name that is neither listed here nor similar to a known one is
ignored with a warning (`fields`).
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from infer.engine.step.request_options import OPTIONS
from infer.sampling_params import PARAMETERS
from infer.system.json_limits import check_limits


class Foreign(NamedTuple):
    """A parameter of another server. `fix` says what to do instead. A null value means absent."""

    fix: str = ""
    neutral: tuple[Any, ...] = ()  # values that change nothing
    is_hint: bool = False  # every value is accepted, because none changes the answer
    warning: str = ""  # why it is ignored: every value is accepted, with this warning
    same_as: tuple[str, ...] = ()  # our names of the parameter; the first one that the body has is used
    becomes: Callable[[Any], dict[str, Any]] | None = None  # returns our fields for its value

    def is_neutral(self, value: Any) -> bool:
        """Return True if the value changes nothing. 1.0 equals 1, but true does not."""
        return self.is_hint or any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral
        )


def _schema_format(schema: Any) -> dict[str, Any]:
    schema = _decoded(schema)
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema}}}


def _decoded(given: Any) -> Any:
    """Return a value that may be given as JSON text."""
    if not isinstance(given, str):
        return given
    check_limits(given)
    return msgspec.json.decode(given)


def _structured(given: Any) -> dict[str, Any]:
    """Return our fields for vLLM's `structured_outputs`."""
    found = dict[str, Any]()
    if not isinstance(given, dict):
        return {"structured_outputs": given}
    for name, value in given.items():
        match name:
            case "json" if value is not None:
                found |= _schema_format(value)
            case "json_object" if value:
                found["response_format"] = {"type": "json_object"}
            case "regex" | "choice" if value is not None:
                found[name] = value
            case "structural_tag" if value is not None:
                found["response_format"] = {"type": name, **_decoded(value)}
            case "grammar" if value is not None:
                found[f"structured_outputs.{name}"] = value  # not one of our fields, so it is refused
    return found


def _thinking(given: Any) -> dict[str, Any]:
    """Return our fields for Anthropic's `thinking` in a chat."""
    if not isinstance(given, dict):
        return {"thinking": given}
    if given.get("type") == "disabled":
        return {"reasoning_effort": "none"}
    budget = given.get("budget_tokens")
    return {} if budget is None else {"thinking_token_budget": budget}


def _reasoning(given: Any) -> dict[str, Any]:
    """Return our fields for OpenRouter's `reasoning` in a chat."""
    if not isinstance(given, dict):
        return {"reasoning": given}
    if given.get("enabled") is False:
        return {"reasoning_effort": "none"}
    names = {"effort": "reasoning_effort", "max_tokens": "thinking_token_budget"}
    return {names[name]: value for name, value in given.items() if name in names and value is not None}


_TEXT_ONLY = "only text is served: leave it out"
_NOT_STORED = "answers are not stored: send the earlier messages"
_OTHER_ROUTE = "it is not supported on this route: use /v1/chat/completions"
_NO_SAMPLER = "this sampler is not supported: leave it out"
_SCHEMA_FIX = 'use response_format: {"type": "json_schema", "json_schema": {"name": …, "schema": …}}'
_LENGTHS = ("max_tokens", "max_output_tokens")
HINT = Foreign(is_hint=True)
_SCHEMA = Foreign(_SCHEMA_FIX, becomes=_schema_format)
_LENGTH = Foreign("use max_tokens", same_as=_LENGTHS)
# llama.cpp's. No other request has the salt, so false finds no earlier prompt.
CACHE_PROMPT = Foreign(becomes=lambda value: {"cache_salt": secrets.token_hex(16)} if value is False else {})

FOREIGN: Mapping[str, Foreign] = {
    # Hints.
    **dict.fromkeys(
        (
            *("service_tier", "prediction", "verbosity", "store", "prompt_cache_options", "prompt_cache_retention"),
            *("prompt_cache_key", "safety_identifier", "user", "metadata", "max_tool_calls", "keep_alive"),
            *("client_metadata", "id_slot", "provider", "guided_decoding_backend"),
            "spaces_between_special_tokens",
            # Ollama's settings of a loaded model, and settings of samplers that are off.
            *("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "use_mmap", "use_mlock", "f16_kv"),
            *("num_keep", "vocab_only", "logits_all", "embedding_only", "penalize_newline", "draft_num_predict"),
            *("mirostat_tau", "mirostat_eta"),
            # llama.cpp's settings of its cache and of its answers' format, and settings of samplers that are off.
            *("n_keep", "n_discard", "n_indent", "t_max_prompt_ms", "timings_per_token", "response_fields"),
            *("min_keep", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
            *("xtc_threshold", "dynatemp_exponent"),
        ),
        HINT,
    ),
    "cache_prompt": CACHE_PROMPT,
    # OpenAI's.
    "audio": HINT,  # it matters only if `modalities` has audio
    "background": Foreign("answers are not stored: leave it out and read the stream", (False,)),
    "best_of": Foreign("request n answers with logprobs, and choose one", (0, 1)),
    "context_management": Foreign("contexts are not compacted: leave it out", ([], {})),
    "conversation": Foreign(_NOT_STORED),
    "echo": Foreign("use /v1/completions", (False,)),
    "function_call": Foreign("use tool_choice", ("none", "auto")),
    "functions": Foreign("use tools", ([],)),
    "input": Foreign("use messages, or prompt of /v1/completions"),
    **dict.fromkeys(("max_completion_tokens", *_LENGTHS), _LENGTH),
    "messages": Foreign("use prompt here, or send it to /v1/chat/completions"),
    "modalities": Foreign(_TEXT_ONLY, (["text"],)),
    "moderation": Foreign(warning="there is no moderation"),
    "previous_response_id": Foreign(_NOT_STORED),
    "prompt": Foreign("use messages here, or send it to /v1/completions"),
    "suffix": Foreign("use /v1/completions", ("",)),
    "system": Foreign("use a message with role system", ("",)),
    "web_search_options": Foreign(warning="there is no web search"),
    "lora": Foreign("adapters are not supported: leave it out", ([],)),
    "samplers": Foreign(warning="the order of the samplers is fixed"),
    "t_max_predict_ms": Foreign(warning="answers have no time limit here"),
    "num_ctx": Foreign(warning="the context is set with --max-seq-len at the server's start"),
    # Other names of parameters that exist here; a parameter declares its own other names.
    **{
        other: Foreign(f"use {name}", same_as=_LENGTHS if name == "max_tokens" else (name,))
        for own, declared in {**PARAMETERS, **OPTIONS}.items()
        for name in [declared.body_name or own]
        for other in declared.other_names
    },
    "enable_thinking": Foreign(
        "use reasoning_effort", becomes=lambda value: {"chat_template_kwargs": {"enable_thinking": value}}
    ),
    "guided_json": _SCHEMA,
    "json_schema": _SCHEMA,
    "num_return_sequences": Foreign("use n", same_as=("n",)),
    "reasoning": Foreign("use reasoning_effort", becomes=_reasoning),
    "response_schema": _SCHEMA,
    "structured_outputs": Foreign("use response_format, regex, choice or grammar", becomes=_structured),
    "thinking": Foreign("use reasoning_effort, or thinking_token_budget", becomes=_thinking),
    # Parameters of other routes here, which would change the answer.
    "chat_template_kwargs": Foreign("it needs messages", ({},)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), Foreign(_OTHER_ROUTE, (0,))),
    "logit_bias": Foreign(_OTHER_ROUTE, ({},)),
    "response_format": Foreign("use text.format, or /v1/chat/completions", ({}, {"type": "text"})),
    "reasoning_effort": Foreign("use reasoning.effort", becomes=lambda value: {"reasoning": {"effort": value}}),
    "n": Foreign("send several requests", (1,)),
    "stop": Foreign(_OTHER_ROUTE, ([], "")),
    "tools": Foreign(_OTHER_ROUTE, ([],)),
    "tool_choice": Foreign(_OTHER_ROUTE, ("none", "auto")),
    "top_logprobs": Foreign("use logprobs, the number of alternatives", (0,)),
    # Samplers and outputs that are not supported.
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "top_a", "dynatemp_range"), Foreign(_NO_SAMPLER, (0,))),
    **dict.fromkeys(("mirostat", "mirostat_mode", "no_repeat_ngram_size"), Foreign(_NO_SAMPLER, (0,))),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "smoothing_factor"), Foreign(_NO_SAMPLER, (0,))),
    **dict.fromkeys(("typical_p", "typical", "tfs", "tfs_z"), Foreign(_NO_SAMPLER, (1,))),
    "bad_words": Foreign("use logit_bias", ([],)),
    "extra_body": Foreign("put its fields into the body itself, as the Python client does", ({},)),
    "guided_grammar": Foreign("use grammar, in Lark's syntax", ("",)),
    "guided_whitespace_pattern": Foreign("use regex"),
    "include_reasoning": Foreign('use reasoning_format: "none", or leave it out', (True,)),
    "inputs": Foreign("use messages, or prompt of /v1/completions"),
    "length_penalty": Foreign("there is no beam search: leave it out", (1, 0)),
    "max_length": Foreign("use max_tokens"),
    "n_probs": Foreign("use top_logprobs", (0,)),
    "return_tokens_as_token_ids": Foreign("use return_token_ids", (False,)),
    "skip_special_tokens": Foreign("special tokens are never in the text: leave it out", (True,)),
    "template_vars": Foreign("use chat_template_kwargs", same_as=("chat_template_kwargs",)),
    "truncate_prompt_tokens": Foreign('use overflow: "truncate_left"'),
    "use_beam_search": Foreign("there is no beam search: leave it out", (False,)),
}
