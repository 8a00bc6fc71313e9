"""`/props`: the model, the settings that its answers depend on, and its default sampling parameters."""

from dataclasses import fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import infer
from infer.sampling_params import SamplingParams
from infer.server.answer_types import Json
from infer.server.endpoint import ApiRoute
from infer.server.replies import json_response
from infer.server.server_state import ServerState

_NEUTRAL = SamplingParams()
_SHOWN = ("temperature", "top_k", "top_p", "min_p")  # whatever they are


async def props(request: Request, state: ServerState) -> Response:
    return json_response(props_of(state))


def props_of(state: ServerState) -> Json:
    host, llm = state.llm().host, state.llm().llm
    return {
        "model": state.settings.model,
        "description": repr(llm),
        "version": infer.__version__,
        "system_fingerprint": host.system_fingerprint,
        "can_chat": llm.can_chat,
        "max_model_len": llm.max_seq_len,
        "vocab_size": host.vocab_size,
        "num_layers": len(llm.architecture.layers),
        "total_slots": state.settings.slots,
        "kv_type": host.runner.cache.kind,
        "cache_bytes": host.runner.cache.num_bytes,
        "default_sampling": {
            "chat": _differing(llm.default_params(is_chat=True)),
            "text": _differing(llm.default_params()),
        },
    }


def _differing(params: SamplingParams) -> dict[str, Any]:
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float | bool | str | None) and (name in _SHOWN or value != getattr(_NEUTRAL, name))
    }


ROUTES = [ApiRoute("GET", "/props", props)]
