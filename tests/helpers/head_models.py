"""Tiny models with a head that drafts tokens, in the names of published files, and the head's forward in torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from infer.engine.requests.host import load_draft_model
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.from_checkpoint import load_checked
from infer.models.transformer import Transformer
from tiny import Tiny, change_tensors, make_tiny

_MTP = {"eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}


@dataclass(frozen=True)
class Head:
    """A head beside its model, both of `transformers`. `layer` has one layer and the last norm."""

    model: Any
    layer: Any
    joining: dict[str, Tensor]  # eh_proj, enorm, hnorm
    added: float  # to the weights of norms

    def states(self, token_ids: list[int]) -> Tensor:
        """Return the model's states after the last norm."""
        found: Tensor = self.model.model(torch.tensor([token_ids])).last_hidden_state[0]
        return found

    def __call__(self, token_ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits after each token and the head's own states. `states` are those before the tokens."""
        eps = self.model.config.rms_norm_eps
        embedded = self.model.model.embed_tokens(torch.tensor(token_ids))

        def norm(x: Tensor, name: str) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (self.joining[name] + self.added)

        joined = torch.cat([norm(embedded, "enorm"), norm(states, "hnorm")], -1) @ self.joining["eh_proj"].T
        own = self.layer.model(inputs_embeds=joined[None]).last_hidden_state[0]
        return self.model.lm_head(own), own


def make_headed(tiny: Tiny, folder: Path) -> Head:
    """Make a tiny model of Qwen3.5, Qwen3-Next or GLM-4.5 with a head in the same file, in their published names."""
    model, config = make_tiny(tiny, folder), tiny.config.to_dict()
    is_glm, hidden, last = config["model_type"] == "glm4_moe", config["hidden_size"], config["num_hidden_layers"]
    own = config | {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    own |= {"first_k_dense_replace": 0}
    beside = folder / "head"
    layer = make_tiny(Tiny("head", type(tiny.config)(**own)), beside)
    tensors = load_file(beside / "model.safetensors")
    joining = {"eh_proj": torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5}
    joining |= {name: torch.randn(hidden) * 0.3 + is_glm for name in ("enorm", "hnorm")}
    at = f"model.layers.{last}." if is_glm else "mtp.layers.0."
    stored = {name.replace("model.layers.0.", at): each for name, each in tensors.items() if ".layers." in name}
    stored[f"{at}shared_head.norm.weight" if is_glm else "mtp.norm.weight"] = tensors["model.norm.weight"]
    stored |= {f"{at + name if is_glm else _MTP[name]}.weight": each for name, each in joining.items()}
    change_tensors(folder, lambda found: found.update(stored))
    if is_glm:
        config_of = type(tiny.config).from_pretrained(folder)
        config_of.num_nextn_predict_layers = 1
        config_of.save_pretrained(folder)
    return Head(model, layer, joining, 0.0 if is_glm else 1.0)


def load_with_head(path: Path, settings: ModelSettings | None = None) -> tuple[Transformer, Transformer]:
    """Return a model and its head."""
    checkpoint, settings = open_checkpoint(path), settings or ModelSettings()
    model = load_checked(checkpoint, None, settings)
    draft = load_draft_model(settings, checkpoint, model, None)  # type: ignore[arg-type]  # a head needs no tokenizer
    assert draft is not None
    assert draft[1].is_head
    return model, draft[0]
