"""The body of our own routes: one answer to a text, ids or messages, with the fields of OpenAI's completions."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from infer.engine.requests.ask import Ask
from infer.outputs import GenerationResult
from infer.request_limits import MAX_TOKENS, NUM_TOKENS_OF_COMPLETIONS
from infer.serving.protocols.asked import refuse_unless_neutral
from infer.serving.protocols.bodies import CompletingBody, ConversationBody, Message
from infer.serving.protocols.chat_answers import finish_reason_of
from infer.serving.protocols.chat_messages import messages_of
from infer.serving.protocols.declared_fields import TokenId
from infer.serving.protocols.params import make_params, sampling_values, seeds_of
from infer.serving.protocols.refusals import refuse
from infer.serving.protocols.tool_options import conversation_options, conversation_variables
from infer.serving.server.answer_types import Json, usage_of

# Fields of the completions that have no meaning here, with their neutral values.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "prompt_logprobs": (),
    "return_token_ids": (True,),
}


_OF_MESSAGES = [name for name in ConversationBody.__struct_fields__ if name not in CompletingBody.__struct_fields__]


class OneAnswerBody(ConversationBody, kw_only=True):
    """A request for one answer: either `prompt` or `messages`, with the fields that belong to it."""

    prompt: str | list[TokenId] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None


def ask_one(
    body: OneAnswerBody, defaults: Mapping[str, Any], template: str | None, answer_prefix: Sequence[int] = ()
) -> Ask:
    """Return what the body asks for, over the model's own `defaults` and for its chat template. Raises ApiError."""
    refuse_unless_neutral(body, _NEUTRAL)
    values = {"max_new_tokens": NUM_TOKENS_OF_COMPLETIONS} | sampling_values(body)
    (params,) = make_params(values, defaults, seeds_of(body.seed, 1), "prompt" if body.messages is None else "messages")
    options = conversation_options(body, body.reasoning_effort, answer_prefix=tuple(answer_prefix))
    if (body.prompt is None) == (body.messages is None):
        code = "missing_required_parameter" if body.prompt is None else "invalid_value"
        raise refuse("give one of prompt and messages", "prompt", code)
    if body.messages is not None:
        variables = conversation_variables(body, template)
        return Ask([messages_of(body.messages)], [params], options, variables=variables, prompt_name="messages")
    for name in _OF_MESSAGES:
        if getattr(body, name) is not None:
            raise refuse(f"{name} belongs to messages: leave it out", name)
    return Ask([body.prompt], [params], options)


def end_of(result: GenerationResult) -> Json:
    """Return the fields of an answer, or of its last chunk, that are known at its end."""
    return {
        "finish_reason": finish_reason_of(result),
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "usage": usage_of([result], 1),
    }
