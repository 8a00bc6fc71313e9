"""The declared parameters as JSON, from which the page builds its controls."""

from typing import Any

from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import PARAMETERS, SamplingParams
from infer.serving.server.routes.one_answer import OneAnswerBody

_NOT_SHARED = frozenset({"model", "user", "stream", "stream_options", "n", "prompt_logprobs", "return_token_ids"})


def page_parameters() -> dict[str, Any]:
    """Return the sliders, the headings of a trace's stages, and the fields that `/v1/trace` and `/v1/branch` have."""
    return {
        "numbers": [_slider(name) for name, declared in PARAMETERS.items() if declared.slider is not None],
        "headings": {name: declared.stage for name, declared in PARAMETERS.items() if declared.stage},
        "shared": [name for name in OneAnswerBody.__struct_fields__ if name not in _NOT_SHARED],
    }


def _slider(name: str) -> dict[str, Any]:
    declared, standard = PARAMETERS[name], getattr(SamplingParams(max_new_tokens=NUM_TOKENS_OF_CALLS), name)
    assert declared.slider is not None
    least, most, step = declared.slider
    label = declared.stage if "-" in declared.stage else (declared.body_name or name).replace("_", " ")
    return {
        "name": declared.body_name or name,
        "label": label.capitalize(),
        "hint": declared.help,
        "min": least,
        "max": most,
        "step": step,
        "off": declared.none[0] if standard is None else standard,
    }
