"""Facts about a model, for lists of models: values only, which load nothing."""

from typing import Any, NamedTuple


class ModelFacts(NamedTuple):
    """Facts about a model.

    `num_bytes` is the size of its files, and `digest` identifies them. `modified_at` is in seconds. `template` is the
    chat template, or "". `abilities` have Ollama's names.
    """

    file_format: str
    family: str
    num_parameters: int
    weights: str
    num_bytes: int
    modified_at: float
    digest: str
    context: int | None
    embedding_size: int
    template: str
    sampling: dict[str, Any]
    abilities: tuple[str, ...]

    @property
    def parameter_size(self) -> str:
        """The number of parameters, such as "134.5M"."""
        millions = self.num_parameters / 1e6
        return f"{millions:.1f}M" if millions < 1e3 else f"{millions / 1e3:.1f}B"
