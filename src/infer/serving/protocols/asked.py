"""A body's prompts, parameters and options as plain values, for the server, `infer batch` and `infer replay`."""

from collections.abc import Mapping
from typing import Any

from infer.engine.requests.ask import Ask
from infer.request_limits import MAX_ANSWERS, NUM_TOKENS_OF_COMPLETIONS
from infer.serving.protocols.bodies import ChatBody, CompletingBody, CompletionBody
from infer.serving.protocols.chat_messages import messages_of
from infer.serving.protocols.llamacpp_bodies import InfillBody
from infer.serving.protocols.params import make_options, make_params, prompts_of, sampling_values, seeds_of
from infer.serving.protocols.refusals import refuse, shown
from infer.serving.protocols.tool_options import conversation_options, conversation_variables


def ask_chat(body: ChatBody, defaults: Mapping[str, Any], template: str | None = None) -> Ask:
    """Return the request of a body, with the model's own `defaults`, for its chat template. Raises BodyError."""
    params = make_params(chat_values(body), defaults, seeds_of(body.seed, body.n or 1), "messages")
    variables = conversation_variables(body, template)
    options = conversation_options(body, body.reasoning_effort)
    is_answered = 0 not in (body.max_tokens, body.max_completion_tokens)
    return Ask(
        [messages_of(body.messages)],
        params,
        options,
        variables=variables,
        prompt_name="messages",
        is_answered=is_answered,
    )


def ask_completion(body: CompletionBody | InfillBody, defaults: Mapping[str, Any]) -> Ask:
    """Return the request of a body, with the model's own `defaults`. Raises BodyError."""
    prompts, num_choices = prompts_of("" if body.prompt is None else body.prompt), body.n or 1
    if len(prompts) * num_choices > MAX_ANSWERS:
        message = f"prompts times n must be at most {MAX_ANSWERS}, got {len(prompts)} times {num_choices}: split it"
        raise refuse(message, "prompt")
    values = {"max_new_tokens": NUM_TOKENS_OF_COMPLETIONS} | completion_values(body)
    params = make_params(values, defaults, seeds_of(body.seed, num_choices), "prompt")
    return Ask(prompts, params, make_options(body), is_answered=body.max_tokens != 0)


def chat_values(body: ChatBody) -> dict[str, Any]:
    """Return the fields of SamplingParams that a chat's body names, except the seed. Raises BodyError."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}: give one"
        raise refuse(message, "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs needs logprobs: true", "top_logprobs")
    return sampling_values(body) | ({"logprobs": body.top_logprobs or 0} if body.logprobs else {})


def completion_values(body: CompletionBody | InfillBody) -> dict[str, Any]:
    """Return the fields of SamplingParams that a completion's body names, except the seed. Raises BodyError."""
    return sampling_values(body) | ({} if body.logprobs is None else {"logprobs": body.logprobs})


def refuse_unless_neutral(body: CompletingBody, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise BodyError for a field that has no meaning here, unless its value is neutral."""
    for name, values in neutral.items():
        if (value := getattr(body, name, None)) is not None and value not in values:
            raise refuse(f"{name} must not be {shown(value)} here: leave it out", name, "unsupported_value")
