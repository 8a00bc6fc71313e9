"""`/completion` and `/infill`: llama.cpp's own routes, for editors that speak to its server."""

from functools import partial
from typing import TypeVar

from msgspec.structs import replace as replace_fields
from starlette.requests import Request
from starlette.responses import Response

from infer.engine.requests.ask import Ask
from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import SEED_BITS
from infer.serving.protocols.asked import ask_completion
from infer.serving.protocols.bodies import CompletionBody
from infer.serving.protocols.llamacpp_bodies import InfillBody, complete_llamacpp
from infer.serving.protocols.params import seed_of
from infer.serving.server.call import call_of
from infer.serving.server.choices import accept
from infer.serving.server.endpoint import post
from infer.serving.server.llamacpp_events import LlamaAsked, LlamaCompletion, LlamaShape
from infer.serving.server.replies import reply
from infer.serving.server.routes.completions import ask_to_complete, between
from infer.serving.server.routes.served_models import answer_any_model
from infer.serving.server.routes.tokens import prepared
from infer.serving.server.server_state import ServerState

_Body = TypeVar("_Body", CompletionBody, InfillBody)


async def completion(request: Request, state: ServerState, body: CompletionBody) -> Response:
    answer_any_model(request, state, body.model)
    asked = await ask_to_complete(request, state, _settled(request, body))
    return await _answer(request, state, body, asked)


async def infill(request: Request, state: ServerState, body: InfillBody) -> Response:
    answer_any_model(request, state, body.model)
    llm = state.llm().llm
    asked = ask_completion(_settled(request, body), llm.sampling_defaults)
    files = [(each.filename, each.text) for each in body.input_extra or ()]
    num_answer_tokens = asked.params[0].max_new_tokens or NUM_TOKENS_OF_CALLS
    room = llm.max_seq_len - min(num_answer_tokens, llm.max_seq_len // 2)

    def encode() -> list[int]:
        return llm.tokenizer.encode_infill(body.before, body.input_suffix, files, max_tokens=room)

    prompt = await prepared(request, state, encode, "input_prefix")
    return await _answer(request, state, body, between(asked, [prompt], llm.tokenizer))


def _settled(request: Request, body: _Body) -> _Body:
    """Return the body with a seed in place of -1, and with one token in place of none.

    A body that asks for no token has its prompt read into the cache. The seed is derived from the request's id, so that
    another process continues the answer with the same seed.
    """
    seed = seed_of(0, call_of(request).id) >> (64 - SEED_BITS) if body.seed == -1 else body.seed
    return replace_fields(body, seed=seed, max_tokens=body.max_tokens or 1)


async def _answer(request: Request, state: ServerState, body: CompletionBody | InfillBody, asked: Ask) -> Response:
    llm = state.llm().llm
    choices = await accept(request, state, asked)
    facts = LlamaAsked(
        call_of(request).model,
        choices.prompt_ids,
        asked.params,
        llm.max_seq_len,
        has_content=body.max_tokens != 0,
        has_tokens=bool(body.return_token_ids or body.stream),
    )
    return await reply(request, state, choices, LlamaShape(facts, llm.tokenizer), is_streamed=body.stream)


_post = partial(post, complete=complete_llamacpp, streams=True)
_ANSWER = LlamaCompletion | list[LlamaCompletion]
ROUTES = [
    _post("/completion", completion, "Continue a text", CompletionBody, _ANSWER, "text_completion"),
    _post("/infill", infill, "Write the text between two texts", InfillBody, LlamaCompletion, "text_completion"),
]
