"""Compare hidden states of texts by encoders, in f32 and Q8_0, with `transformers` on torch, in turns.

    python benchmarks/bench_encoders.py                         bge-small's shape, random weights
    python benchmarks/bench_encoders.py --hidden 768 --heads 12 --rounds 7

Tokens per second, medians over rounds. `transformers` gets the texts of a case as one batch without padding. It is what
sentence-transformers runs. Pooling is left out: it takes less than a hundredth of the time.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, BertConfig

from harness import compare, make_parser, print_head, write_report
from infer import ops
from infer.checkpoint import open_checkpoint
from infer.checkpoint.lazy_weights import LazyWeights
from infer.model.families import make_architecture
from infer.model.load import load_transformer
from infer.runner.text_encoder import TextEncoder

CASES = {"8 texts of 512 tokens": (8, 512), "16 texts of 32 tokens": (16, 32), "1 text of 12 tokens": (1, 12)}
SIDES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "f32": {},
    "q8": {"keep_floats_as": "q8"},
    "q8 fast": {"keep_floats_as": "q8", "precision": "fast"},
}
BACKEND = ops.backend_of(torch.device("cpu"))


def load(folder: Path, settings: dict[str, Any]) -> TextEncoder:
    checkpoint = open_checkpoint(folder)
    architecture = make_architecture(checkpoint.config)
    model = load_transformer(architecture, LazyWeights(checkpoint.tensors), backend=BACKEND, **settings)
    return TextEncoder(model, "auto", capture=True)


def seconds_of(encoder: TextEncoder, ids: list[list[int]]) -> float:
    began, per_tile = time.perf_counter(), max(1, 512 // len(ids[0]))
    with BACKEND.threads(), torch.inference_mode():
        for start in range(0, len(ids), per_tile):
            for _ in encoder.of(ids[start : start + per_tile]):
                pass
    return time.perf_counter() - began


def main() -> None:
    parser = make_parser(__doc__, threads=True, rounds=9)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    ops.set_num_threads(options.threads)
    config = BertConfig(
        hidden_size=options.hidden, num_attention_heads=options.heads, num_hidden_layers=options.layers,
        intermediate_size=4 * options.hidden,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        AutoModel.from_config(config).save_pretrained(folder)
        theirs = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
        ours = {side: load(Path(folder), settings) for side, settings in SIDES.items() if side != "transformers"}
    ids = {case: torch.randint(1000, 30_000, shape) for case, shape in CASES.items()}

    def measure(case: str, side: str, number: int) -> float:
        if side != "transformers":
            return ids[case].numel() / seconds_of(ours[side], ids[case].tolist())
        began = time.perf_counter()
        with torch.inference_mode():
            theirs(ids[case])
        return ids[case].numel() / (time.perf_counter() - began)

    print_head(options, "tokens per second")
    found = compare(CASES, SIDES, options.rounds, measure)
    write_report(options, results=found.to_json())


if __name__ == "__main__":
    main()
