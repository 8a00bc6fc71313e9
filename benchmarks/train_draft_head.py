"""Train the small hybrid with a head that drafts tokens, whose weights are in `tests/data/draft-head`.

    python benchmarks/train_draft_head.py OUT      minutes on one core

The model has the layers and the file of Qwen3.5: gated delta nets, gated attention, and `mtp.*`. Its tokens are bytes.
It learns sentences of few words, so that a test can expect many of the head's drafts to be right. The model learns the
next token and the head the one after it, from the model's states, which the head does not change.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from harness import make_parser, write_report

WORDS = (
    ("The", "Every", "No", "Another"),
    ("small", "quiet", "yellow", "wooden", "forgotten"),
    ("engine", "garden", "teacher", "mountain", "window", "river"),
    ("remembers", "follows", "paints", "carries", "answers"),
    ("twelve", "several", "those", "many"),
    ("letters", "machines", "stories", "bridges", "questions"),
)
SIZES: dict[str, Any] = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
SIZES |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "max_position_embeddings": 1024}
SIZES |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 256}
LENGTH, BATCH, RATE = 96, 12, 4e-3


def sentences(rng: random.Random, num_bytes: int) -> bytes:
    """Return text of random sentences."""
    text = ""
    while len(text) < num_bytes:
        text += " ".join(rng.choice(words) for words in WORDS) + ". "
    return text[:num_bytes].encode()


class Head(nn.Module):
    """The head, with one layer of the model's kind. It shares the model's embedding."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        one = config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        self.layer, hidden = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**one)).model, config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.norms, self.eps = nn.Parameter(torch.zeros(2, hidden)), config.rms_norm_eps

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        both = zip((embedded, states), self.norms, strict=True)
        joined = torch.cat([rms_norm(x, x.shape[-1:], 1 + weight, self.eps) for x, weight in both], -1)
        found: Tensor = self.layer(inputs_embeds=self.fc(joined)).last_hidden_state
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors by their published names."""
        own = {name: each for name, each in self.layer.state_dict().items() if not name.startswith("embed_tokens")}
        found = {f"mtp.{name}": each for name, each in own.items()} | {"mtp.fc.weight": self.fc.weight}
        return found | {
            "mtp.pre_fc_norm_embedding.weight": self.norms[0],
            "mtp.pre_fc_norm_hidden.weight": self.norms[1],
        }


def train(num_steps: int) -> tuple[Qwen3_5ForCausalLM, Head]:
    torch.manual_seed(0)
    rng, kinds = random.Random(0), ["linear_attention", "full_attention", "linear_attention"]
    config = Qwen3_5TextConfig(num_hidden_layers=3, layer_types=kinds, **SIZES)
    model, head = Qwen3_5ForCausalLM(config), Head(config)
    parameters = [*model.parameters(), *(each for name, each in head.named_parameters() if "embed_tokens" not in name)]
    optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, num_steps)
    for step in range(num_steps):
        ids = torch.tensor([list(sentences(rng, LENGTH)) for _ in range(BATCH)])
        states = model.model(ids[:, :-1]).last_hidden_state
        logits = model.lm_head(states)
        own = head(model.model.embed_tokens(ids[:, 1:-1]).detach(), states[:, :-1].detach())
        drafted = own @ model.lm_head.weight.detach().T
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        of_head = cross_entropy(drafted.flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        (loss + of_head).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == num_steps - 1:
            equal = (drafted.argmax(-1) == logits[:, 1:].argmax(-1)).float().mean()
            print(f"step {step:5}  model {loss:.3f}  head {of_head:.3f}  equal guesses {equal:.0%}", flush=True)
    return model, head


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path, help="a folder for the config and the weights")
    parser.add_argument("--steps", type=int, default=700, help="of training (700)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, head = train(options.steps)
    tensors = {name: each for name, each in model.state_dict().items() if name != "lm_head.weight"} | head.tensors()
    options.out.mkdir(parents=True, exist_ok=True)
    stored = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in tensors.items()}
    save_file(stored, options.out / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"mtp_num_hidden_layers": 1}
    kept = {name: config[name] for name in sorted(config) if name in SIZES or name in _KEPT}
    (options.out / "config.json").write_text(json.dumps(kept, indent=1) + "\n")
    write_report(options, num_bytes=sum(each.nbytes for each in stored.values()))


_KEPT = ("model_type", "num_hidden_layers", "layer_types", "rms_norm_eps", "rope_parameters", "mtp_num_hidden_layers")
_KEPT += ("linear_conv_kernel_dim", "hidden_act")

if __name__ == "__main__":
    main()
