"""Small open models on the hub that `infer chat` and `infer serve` offer, and the choice of three that fit a machine.

Sizes and architectures are written here as data, so that memory and speed are predicted without the network.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from infer.compute.operands.architecture import Architecture
from infer.compute.quantization.file_types import Mixture, Traits, may_quantise
from infer.files.hub.hub_download import is_hub_reachable
from infer.files.tensors.tensor_names import name_in_gguf
from infer.models.catalog.header_facts import ModelForecast, forecast
from infer.models.families import make_architecture
from infer.models.tensors import expected_shapes

NUM_OFFERED = 3
_HUB_SECONDS = 2.0
_USABLE_SHARE = 0.9  # of the available memory


@dataclass(frozen=True)
class StoredAs:
    """A tensor's header without a file."""

    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HubModel:
    """A model that can be downloaded. `name` is the value for `--model`; `config` has Hugging Face's names."""

    name: str
    num_bytes: int  # of the download
    mixture: str  # a name of `FILE_TYPES`
    config: Mapping[str, Any] = field(repr=False)

    @property
    def architecture(self) -> Architecture:
        return make_architecture(self.config)

    @property
    def tensors(self) -> dict[str, StoredAs]:
        """The tensors of the file, with the types that llama.cpp's quantiser gives them."""
        architecture, attention = self.architecture, self.architecture.attention[0]
        num_layers, group = len(architecture.layers), attention.num_heads // attention.num_kv_heads
        traits = Traits(num_layers, heads_per_key_head=group, has_output=not architecture.tied_embeddings)
        mixture, tensors = Mixture(self.mixture, traits, num_layers), dict[str, StoredAs]()
        for name, shape in expected_shapes(architecture).items():
            stored = str(name_in_gguf(name, {}))
            kind = mixture.choose(stored, shape) if may_quantise(stored, shape) else "F32"
            tensors[name] = StoredAs(kind, shape)
        return tensors

    def forecast(self) -> ModelForecast:
        return forecast(self.architecture, self.tensors)


def _llama(**sizes: Any) -> dict[str, Any]:
    return {"model_type": "llama", "tie_word_embeddings": True} | sizes


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, is_tied: bool = True) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": intermediate, "vocab_size": 151_936,
        "max_position_embeddings": 40_960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": is_tied,
    }  # fmt: skip


_LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
HUB_MODELS = (  # the smallest first
    HubModel("HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0", 386_404_992, "Q8_0", _llama(
        hidden_size=960, num_hidden_layers=32, num_attention_heads=15, num_key_value_heads=5, intermediate_size=2560,
        vocab_size=49_152, max_position_embeddings=8192, rope_theta=1e5, rms_norm_eps=1e-5,
    )),
    HubModel("Qwen/Qwen3-0.6B-GGUF:Q8_0", 639_446_688, "Q8_0", _qwen3(1024, 28, 16, 3072)),
    HubModel("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", 807_694_464, "Q4_K_M", _llama(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
        vocab_size=128_256, max_position_embeddings=131_072, rope_theta=5e5, rms_norm_eps=1e-5,
        rope_scaling=_LLAMA3_ROPE,
    )),
    HubModel("Qwen/Qwen3-1.7B-GGUF:Q8_0", 1_834_426_016, "Q8_0", _qwen3(2048, 28, 16, 6144)),
    HubModel("Qwen/Qwen3-4B-GGUF:Q4_K_M", 2_497_280_256, "Q4_K_M", _qwen3(2560, 36, 32, 9728)),
    HubModel("Qwen/Qwen3-8B-GGUF:Q4_K_M", 5_027_783_488, "Q4_K_M", _qwen3(4096, 36, 32, 12288, is_tied=False)),
)  # fmt: skip


def three_that_fit(available: int | None) -> list[tuple[HubModel, ModelForecast]]:
    """Return a small model, one from the middle, and the largest whose process fits `available` bytes.

    Fewer models are returned if fewer fit. If the available memory is unknown (None), every model counts as fitting.
    """
    found = [(model, model.forecast()) for model in HUB_MODELS]
    fitting = [each for each in found if available is None or each[1].memory_bytes <= _USABLE_SHARE * available]
    if len(fitting) <= NUM_OFFERED:
        return fitting
    return [fitting[0], fitting[len(fitting) // 2], fitting[-1]]


@final
class HubProbe:
    """One request to the hub on its own thread, which starts in the constructor."""

    def __init__(self) -> None:
        self._is_reachable = False
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def is_reachable(self) -> bool:
        """Return True if the hub answers within two seconds.

        A name server that does not answer does not make this wait longer.
        """
        self._thread.join(_HUB_SECONDS)
        return self._is_reachable

    def _ask(self) -> None:
        self._is_reachable = is_hub_reachable(_HUB_SECONDS)
