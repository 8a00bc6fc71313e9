"""Measure the drafts of a model's own head: random weights of real shapes, with drafts that are right and that are not.

    python benchmarks/bench_draft_head.py                 twelve layers of the shapes of Qwen3.5-0.8B in 8 bits
    python benchmarks/bench_draft_head.py --layers 24 --rounds 5

    never right        greedy: a head of random weights guesses nothing
    seldom, often      the noise of the sampler chooses among a few tokens, and a head draws with the same noise

Figures are tokens per second of one answer, and ratios are to the model without its head. Each round asserts that both
give the same tokens.
"""

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from harness import compare, make_parser, print_head, write_report
from infer import LLM, GenerationResult, SamplingParams
from infer.files.config import config_from_folder
from infer.models.families import make_architecture
from infer.models.tensors import expected_shapes

CONFIG: dict[str, Any] = {"model_type": "qwen3_5_text", "vocab_size": 32_768, "hidden_size": 1024, "head_dim": 256}
CONFIG |= {"intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
CONFIG |= {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128}
CONFIG |= {"linear_value_head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "eos_token_id": 0}
CONFIG |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
NUM_TOKENS = 120
CASES: dict[str, dict[str, Any]] = {
    "never right": {"temperature": 0},
    "seldom right": {"temperature": 1, "allowed_token_ids": list(range(100, 116))},
    "often right": {"temperature": 2, "allowed_token_ids": [100, 101]},
}


def write_model(folder: Path, num_layers: int) -> None:
    """Write a folder in the published names, with a tokenizer of meaningless tokens."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    torch.manual_seed(0)
    hidden, tensors = CONFIG["hidden_size"], dict[str, torch.Tensor]()
    for name, shape in expected_shapes(make_architecture(config_from_folder(folder))).items():
        tensors |= _published(name, shape)
    last = f"model.layers.{max(index for index in range(num_layers) if index % 4 == 3)}."
    tensors |= {name.replace(last, "mtp.layers.0."): each.clone() for name, each in tensors.items() if last in name}
    tensors["mtp.fc.weight"] = _random(hidden, 2 * hidden)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    tensors |= {f"mtp.{name}.weight": torch.zeros(hidden, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    Tokenizer(models.WordLevel({f"token{index}": index for index in range(256)}, "token0")).save(
        str(folder / "tokenizer.json")
    )


def _random(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).to(torch.bfloat16)


def _published(name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return random weights of one of our tensors, by its published name. The rows of q and of its gate alternate."""
    norms = {".attention_norm.": ".input_layernorm.", ".mlp_norm.": ".post_attention_layernorm."}
    deltas = (
        {f".{which}_proj.": f".in_proj_{which}." for which in ("qkv", "z", "a", "b")} if "linear_attn" in name else {}
    )
    for ours, theirs in (norms | deltas | {".taps": ".conv1d.weight", ".decay": ".A_log"}).items():
        name = name.replace(ours, theirs)
    if ".gate_proj." in name and "self_attn" in name:
        return {}
    if ".self_attn.q_proj." in name:
        return {name: _random(2 * shape[0], shape[1])}
    if name.endswith("conv1d.weight"):
        return {name: _random(shape[0], 1, shape[1])}
    return {name: _random(*shape) if len(shape) > 1 else torch.zeros(shape, dtype=torch.bfloat16)}


def main() -> None:
    parser = make_parser(__doc__, threads=True, rounds=5)
    parser.add_argument("--layers", type=int, default=12, help="of the model, beside the head's (12)")
    options = parser.parse_args()
    answers = dict[tuple[str, int], GenerationResult]()
    with TemporaryDirectory() as name:
        write_model(Path(name), options.layers)
        sides = {
            side: LLM(name, weights="q8", draft_head=has_head, threads=options.threads, max_seq_len=2048)
            for side, has_head in (("without its head", False), ("with its head", True))
        }

        def measure(case: str, side: str, number: int) -> float:
            params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, seed=number + 2, **CASES[case])
            started = time.perf_counter()
            result = sides[side].generate([100 + index * index % 50 for index in range(40)], params)
            seconds = time.perf_counter() - started - result.timing.ttft_s
            other = answers.setdefault((case, number), result)
            assert result.token_ids == other.token_ids, f"{side}: other tokens than without"
            if result.stats.drafts_proposed:
                shares.setdefault(case, []).append(result.stats.drafts_accepted / result.stats.drafts_proposed)
            return (NUM_TOKENS - 1) / seconds

        shares = dict[str, list[float]]()
        print_head(options, "tokens per second")
        figures = compare(CASES, sides, options.rounds, measure)
    accepted = {case: sum(each) / len(each) for case, each in shares.items()}
    print("drafts accepted:", ", ".join(f"{case} {share:.0%}" for case, share in accepted.items()))
    write_report(options, figures=figures.to_json(), accepted=accepted)


if __name__ == "__main__":
    main()
