"""Fields of OpenAI's that ask for what is not built: accepted at the values that ask for nothing, else refused."""

from typing import Any, NamedTuple

from infer.server.refusals import refuse, shown


class Neutral(NamedTuple):
    values: tuple[Any, ...]  # that ask for nothing; null always does
    instead: str = "leave it out"


_TEXT_ALONE = "only text is served: leave it out"

NEUTRAL = {
    "audio": Neutral((), _TEXT_ALONE),
    "background": Neutral((False,), "answers are not kept: leave it out and read the stream"),
    "best_of": Neutral((1,), "ask for n answers with logprobs and choose yourself"),
    "context_management": Neutral(([],), "nothing is compacted: leave it out"),
    "conversation": Neutral((), "conversations are not kept: send the earlier messages as input"),
    "function_call": Neutral(("none", "auto"), "use tool_choice"),
    "functions": Neutral(([],), "use tools"),
    "max_tool_calls": Neutral((), "no tools are run here: leave it out"),
    "modalities": Neutral((["text"],), _TEXT_ALONE),
    "moderation": Neutral((), "nothing is moderated: leave it out"),
    "prediction": Neutral((), 'give speculation: "ngram", which guesses by itself'),
    "previous_response_id": Neutral((), "answers are not kept: send the earlier messages as input"),
    "prompt": Neutral((), "prompts are not kept: send the text as input"),
    "prompt_cache_options": Neutral((), "leave it out"),
    "prompt_cache_retention": Neutral(("in_memory", "in-memory"), "prompts are kept in memory while there is room"),
    "service_tier": Neutral(("auto", "default"), "there is one tier: leave it out, or see priority"),
    "store": Neutral((False,), "answers are not kept: leave it out"),
    "suffix": Neutral(("",), "the model does not fill in text: leave it out"),
    "thread": Neutral((), "answers are not kept: send all messages"),
    "verbosity": Neutral(("medium",), "leave it out and say it in a message"),
    "web_search_options": Neutral((), "nothing is searched: leave it out"),
}

# Names of other routes and of other servers: what to do instead.
_SCHEMA = 'use response_format: {"type": "json_schema", "json_schema": {"name": …, "schema": …}}'
_THINKING = "use reasoning_effort, or thinking_token_budget"
ELSEWHERE = {
    "best_of": "it is of /v1/completions",
    "echo": "it is of /v1/completions",
    "enable_thinking": _THINKING,
    "extra_body": "put its fields beside the others: it is a keyword of the Python client",
    "guided_choice": "use choice",
    "guided_decoding_backend": "leave it out: the server has one backend",
    "guided_grammar": "use grammar",
    "guided_json": _SCHEMA,
    "guided_regex": "use regex",
    "guided_whitespace_pattern": "use regex",
    "input": "use messages, or prompt of /v1/completions",
    "inputs": "use messages, or prompt of /v1/completions",
    "json_schema": _SCHEMA,
    "max_completion_tokens": "use max_tokens, or max_output_tokens of /v1/responses",
    "max_length": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "max_tokens": "use max_output_tokens",
    "messages": "it is of /v1/chat/completions: use prompt here, or input of /v1/responses",
    "min_new_tokens": "use min_tokens",
    "n_predict": "use max_tokens",
    "n_probs": "use top_logprobs",
    "num_predict": "use max_tokens",
    "num_return_sequences": "use n",
    "prompt": "it is of /v1/completions: use messages",
    "repeat_last_n": "use repetition_window",
    "repeat_penalty": "use repetition_penalty",
    "response_schema": "use response_format",
    "stop_sequences": "use stop",
    "structured_outputs": "use response_format, regex, choice or grammar",
    "suffix": "it is of /v1/completions",
    "system": "use a message with role system",
    "template_vars": "use chat_template_kwargs",
    "thinking": _THINKING,
    "truncate_prompt_tokens": 'use overflow: "truncate_left"',
    "use_beam_search": "leave it out: there is no beam search",
}


def check_neutral(name: str, value: object) -> None:
    """Raises ApiError unless the value of this field of NEUTRAL asks for nothing."""
    values, instead = NEUTRAL[name]
    if value is None or any(type(value) is type(each) and value == each for each in values):
        return
    code = "unsupported_value" if values else "unsupported_parameter"
    raise refuse(f"{name} must not be {shown(value)}: {instead}", name, code)
