"""`/props`: the model, the settings that its answers depend on, and its default sampling parameters."""

from dataclasses import fields
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

import infer
from infer.sampling_params import PARAMETERS, SamplingParams
from infer.serving.protocols.answers import Count
from infer.serving.server.endpoint import get, json_response
from infer.serving.server.server_state import ServerState

_NEUTRAL = SamplingParams()
# Parameters that are shown even if their value is neutral.
_SHOWN = ("temperature", *(name for name, declared in PARAMETERS.items() if declared.is_filter))


class DefaultSampling(Struct):
    """The sampling parameters whose default is not neutral, for conversations and for texts."""

    chat: dict[str, Any]
    text: dict[str, Any]


class Props(Struct):
    model: str
    description: str
    version: str
    system_fingerprint: str
    can_chat: bool
    max_model_len: Count
    vocab_size: Count
    num_layers: Count
    total_slots: Count
    kv_type: str
    cache_bytes: Count
    default_sampling: DefaultSampling


async def props(request: Request, state: ServerState) -> Response:
    return json_response(props_of(state))


def props_of(state: ServerState) -> Props:
    host, llm = state.llm().host, state.llm().llm
    cache = None if host.reads_whole_texts else host.runner.cache
    return Props(
        model=state.settings.model,
        description=repr(llm),
        version=infer.__version__,
        system_fingerprint=host.system_fingerprint,
        can_chat=llm.can_chat,
        max_model_len=llm.max_seq_len,
        vocab_size=host.requests.limits.vocab_size,
        num_layers=len(llm.architecture.layers),
        total_slots=state.settings.slots,
        kv_type="none" if cache is None else cache.kind,
        cache_bytes=0 if cache is None else cache.num_bytes,
        default_sampling=DefaultSampling(
            _differing(llm.default_params(is_chat=True)), _differing(llm.default_params())
        ),
    )


def _differing(params: SamplingParams) -> dict[str, Any]:
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float | bool | str | None) and (name in _SHOWN or value != getattr(_NEUTRAL, name))
    }


ROUTES = [get("/props", props, "Show the model and its default sampling", answer=Props)]
