"""The bodies of llama.cpp's own routes: those of `/v1/completions`, with llama.cpp's names and formats."""

from typing import Any, final

from msgspec import Struct

from infer.serving.protocols.fields import Reading, refuse
from infer.serving.protocols.openai.ask import TextBody

_NEW_NAMES = {"n_predict": "max_tokens", "n_probs": "logprobs", "return_tokens": "return_token_ids", "n_cmpl": "n"}
_BANNED = -100.0  # the smallest bias of a body, for a token whose bias is false


@final
class InfillFile(Struct, kw_only=True):
    """Another file of the project, or a part of it."""

    text: str
    filename: str = "file"


@final
class InfillBody(TextBody, kw_only=True):
    """A request for the text between two texts. `prompt` is the beginning of the line, after `input_prefix`."""

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None

    @property
    def before(self) -> str:
        return self.input_prefix + (self.prompt or "")


def complete_llamacpp(given: Any, reading: Reading) -> Any:
    """Return a body of llama.cpp with the names and the formats of values of `/v1/completions`.

    Without `n_predict`, an answer is as long as the context allows. Raises BodyError for a grammar in GBNF.
    """
    if not isinstance(given, dict):
        return given
    found = {_NEW_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    reading.given_names.update({ours: name for name, ours in _NEW_NAMES.items() if name in given})
    found.setdefault("max_tokens", -1)
    if found["max_tokens"] == -2:  # until the context is full
        found["max_tokens"] = -1
    if (num := found.get("logprobs")) == 0 and type(num) is int:
        del found["logprobs"]
    if isinstance(bias := found.get("logit_bias"), list):
        found["logit_bias"] = _bias_by_id(bias)
    if isinstance(grammar := found.get("grammar"), str) and (not grammar or "::=" in grammar):
        if grammar:
            message = "grammar must be in Lark's syntax, got GBNF: rewrite it, or use json_schema"
            raise refuse(message, "grammar")
        del found["grammar"]
    return found


def _bias_by_id(pairs: list[Any]) -> dict[str, Any]:
    """Return the biases by token id. `false` bans a token. Raises BodyError."""
    found = dict[str, Any]()
    for index, pair in enumerate(pairs):
        match pair:
            case [int(token_id), bool(bias)] if not bias:
                found[str(token_id)] = _BANNED
            case [int(token_id), int() | float() as bias]:
                found[str(token_id)] = bias
            case _:
                path = f"logit_bias[{index}]"
                raise refuse(f"{path} must be a token id and its bias, such as [15043, -1.5]", path)
    return found
