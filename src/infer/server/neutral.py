"""Fields of OpenAI's that ask for what is not built: accepted at the values that ask for nothing, else refused."""

from typing import Any, NamedTuple

from infer.server.refusals import refuse, shown


class Neutral(NamedTuple):
    values: tuple[Any, ...]  # that ask for nothing; null always does
    instead: str = "leave it out"


_NO_TOOLS = "tool calls are not supported yet: leave it out"
_TEXT_ALONE = "only text is served: leave it out"

NEUTRAL = {
    "audio": Neutral((), _TEXT_ALONE),
    "background": Neutral((False,), "answers are not kept: leave it out and read the stream"),
    "best_of": Neutral((1,), "ask for n answers with logprobs and choose yourself"),
    "context_management": Neutral(([],), "nothing is compacted: leave it out"),
    "conversation": Neutral((), "conversations are not kept: send the earlier messages as input"),
    "function_call": Neutral(("none", "auto"), _NO_TOOLS),
    "functions": Neutral(([],), _NO_TOOLS),
    "max_tool_calls": Neutral((), _NO_TOOLS),
    "modalities": Neutral((["text"],), _TEXT_ALONE),
    "moderation": Neutral((), "nothing is moderated: leave it out"),
    "parallel_tool_calls": Neutral((True, False), _NO_TOOLS),
    "prediction": Neutral((), 'give speculation: "ngram", which guesses by itself'),
    "previous_response_id": Neutral((), "answers are not kept: send the earlier messages as input"),
    "prompt": Neutral((), "prompts are not kept: send the text as input"),
    "prompt_cache_options": Neutral((), "leave it out"),
    "prompt_cache_retention": Neutral(("in_memory", "in-memory"), "prompts are kept in memory while there is room"),
    "reasoning": Neutral(({}, {"effort": None}, {"effort": "none"}), "reasoning is not supported yet: leave it out"),
    "reasoning_effort": Neutral(("none",), "reasoning is not supported yet: leave it out"),
    "service_tier": Neutral(("auto", "default"), "there is one tier: leave it out, or see priority"),
    "store": Neutral((False,), "answers are not kept: leave it out"),
    "suffix": Neutral(("",), "the model does not fill in text: leave it out"),
    "tool_choice": Neutral(("none", "auto"), _NO_TOOLS),
    "tools": Neutral(([],), _NO_TOOLS),
    "verbosity": Neutral(("medium",), "leave it out and say it in a message"),
    "web_search_options": Neutral((), "nothing is searched: leave it out"),
}

# Names that are used elsewhere for what has another name here.
ELSEWHERE = {
    "guided_json": 'response_format: {"type": "json_schema", "json_schema": {"name": …, "schema": …}}',
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_decoding_backend": "leave it out: the server has one backend",
    "guided_whitespace_pattern": "regex",
    "structured_outputs": "response_format, regex, choice or grammar",
    "json_schema": 'response_format: {"type": "json_schema", "json_schema": {"name": …, "schema": …}}',
    "extra_body": "its fields beside the others: extra_body is a keyword of the Python client",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_probs": "top_logprobs",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_window",
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "use_beam_search": "leave it out: there is no beam search",
    "response_schema": "response_format",
    "truncate_prompt_tokens": 'overflow: "truncate_left"',
    "enable_thinking": 'chat_template_kwargs: {"enable_thinking": …}',
    "thinking": 'chat_template_kwargs: {"enable_thinking": …}',
    "template_vars": "chat_template_kwargs",
    "system": "a message with role system",
    "inputs": "messages, or prompt of /v1/completions",
}


def check_neutral(name: str, value: object) -> None:
    """Raises ApiError unless the value of this field of NEUTRAL asks for nothing."""
    values, instead = NEUTRAL[name]
    if value is None or any(type(value) is type(each) and value == each for each in values):
        return
    code = "unsupported_value" if values else "unsupported_parameter"
    raise refuse(f"{name} must not be {shown(value)}: {instead}", name, code)
