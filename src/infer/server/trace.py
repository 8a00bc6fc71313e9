"""`/v1/trace`: an answer, and how each of its tokens was sampled, stage by stage."""

from collections.abc import Sequence
from typing import Annotated, final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from infer.batch_file.result_line import FINISH_REASONS
from infer.outputs import GenerationResult, SampleTrace
from infer.server.asking import while_connected
from infer.server.call import call_of
from infer.server.choices import accept
from infer.server.endpoint import ApiRoute
from infer.server.models import check_model
from infer.server.one_answer import OneAnswerBody, ask_one
from infer.server.read_body import read_body
from infer.server.refusals import refuse
from infer.server.replies import json_response
from infer.server.shapes import Json, usage_of_choices
from infer.server.state import ServerState

_MAX_TOKENS, _MAX_CANDIDATES = 256, 64
_GRAMMARS = ("response_format", "regex", "grammar", "choice")


@final
class TraceBody(OneAnswerBody, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)] | None = None
    num_candidates: Annotated[int, Meta(ge=1, le=_MAX_CANDIDATES)] | None = None  # 10 unless given


async def trace(request: Request, state: ServerState) -> Response:
    body, llm = read_body(await request.body(), TraceBody), state.llm()
    check_model(request, state, body.model)
    for name in _GRAMMARS:
        if getattr(body, name) is not None:
            message = f"{name}: a trace does not show what a grammar forbids: leave it out"
            raise refuse(message, name, "unsupported_parameter")
    if body.stream:
        raise refuse("stream must not be true: a trace is answered whole", "stream", "unsupported_value")
    asked = ask_one(body, llm.llm.sampling_defaults)
    choices = await accept(request, state, asked)
    (result,), (prompt_ids,) = await while_connected(request, choices.results()), choices.prompt_ids
    tracing = llm.trace_result(prompt_ids, asked.params[0], result, num_candidates=body.num_candidates or 10)
    traces = await while_connected(request, tracing)
    spell = llm.llm.tokenizer.token_bytes
    return json_response(trace_object(call_of(request).model, prompt_ids, result, traces, spell))


def trace_object(
    model: str,
    prompt_ids: Sequence[int],
    result: GenerationResult,
    traces: Sequence[SampleTrace],
    spelling: Sequence[bytes],
) -> Json:
    """`prompt_bytes` and `bytes` are those of the tokens: a character may lie in several."""
    tokens = [
        {name: value for name, value in each.to_json().items() if name != "text_before"}
        | {"bytes": list(spelling[each.token_id])}
        for each in traces
    ]
    return {
        "object": "trace",
        "model": model,
        "prompt_token_ids": list(prompt_ids),
        "prompt_bytes": [list(spelling[each]) for each in prompt_ids],
        "text": result.text,
        "token_ids": result.token_ids,
        "seed": result.seed,
        "finish_reason": FINISH_REASONS[result.finish_reason],
        "stop_reason": result.stop_reason,
        "tokens": tokens,
        "usage": usage_of_choices([result], 1),
    }


ROUTES = [ApiRoute("POST", "/v1/trace", trace, operation="trace")]
