"""The only table of sampling defaults, for the command line and the Python interface. Loads no torch.

Each value comes from the first source in this list that names it: the request, the command line, the model's files
(`generation_config.json`, GGUF's `general.sampling.*`), the card of a packaged model, the neutral values below.
"""

from collections.abc import Iterator, Mapping
from typing import Any, final

from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import SamplingParams, without_aliases

_GUARD = frozenset({"repetition_penalty", "repetition_window"})
NEUTRAL: Mapping[str, Any] = {"max_new_tokens": NUM_TOKENS_OF_CALLS}
CHAT_DEFAULTS: Mapping[str, Any] = {**NEUTRAL, "temperature": 0.7, "top_p": 0.95}
PRESETS: Mapping[str, Mapping[str, Any]] = {  # --preset NAME
    "seed": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "repetition_window": 64,
    }
}


@final
class SamplingDefaults(Mapping[str, Any]):
    """Sampling values that a model requests, under the names of SamplingParams. `from_files` overrides `from_card`."""

    __slots__ = ("_merged", "from_card", "from_files")

    def __init__(self, from_files: Mapping[str, Any], from_card: Mapping[str, Any] | None = None) -> None:
        self.from_files = dict(from_files)
        self.from_card = {name: value for name, value in (from_card or {}).items() if name not in self.from_files}
        self._merged = self.from_files | self.from_card

    def __getitem__(self, name: str) -> Any:
        return self._merged[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._merged)

    def __len__(self) -> int:
        return len(self._merged)

    def __repr__(self) -> str:
        return repr(self._merged)


def neutral_values(*, is_chat: bool) -> Mapping[str, Any]:
    """Return the values to use if neither the request nor the model names one."""
    return CHAT_DEFAULTS if is_chat else NEUTRAL


def beside(from_model: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's values for the parameters that `given` does not set.

    A card's repetition penalty belongs to the card's temperature, so a caller who sets a temperature samples without
    it.
    """
    found = {name: value for name, value in from_model.items() if name not in given}
    if isinstance(from_model, SamplingDefaults) and "temperature" in given:
        found = {name: value for name, value in found.items() if name not in from_model.from_card.keys() & _GUARD}
    return found


def default_params(from_model: Mapping[str, Any], given: Mapping[str, Any], *, is_chat: bool) -> SamplingParams:
    """Return the parameters of a request that names only `given`.

    Raises InvalidRequestError if a given name is unknown, or its value is invalid.
    """
    given = without_aliases(given)
    return SamplingParams.from_mapping({**neutral_values(is_chat=is_chat), **beside(from_model, given), **given})
