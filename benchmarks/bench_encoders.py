"""Compare hidden states of texts by encoders, in f32 and Q8_0, with `transformers` on torch and llama.cpp, in turns.

    python benchmarks/bench_encoders.py                         bge-small's shape, random weights
    python benchmarks/bench_encoders.py --llama-python PATH     with llama.cpp, in an environment of llama-cpp-python
    python benchmarks/bench_encoders.py --hidden 768 --heads 12 --rounds 7
    python benchmarks/bench_encoders.py --folders PATH          published weights, beside sentence-transformers

Tokens per second, medians over rounds. With `--folders`, sides get English texts, which they tokenise and pool too.
Otherwise `transformers` gets the texts of a case as one batch without padding. It is what sentence-transformers runs.
Pooling is left out: it takes less than a hundredth of the time. llama.cpp pools, and gets steps of at most 512 tokens,
as from its server.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, BertConfig

from harness import Worker, compare, find_llama_python, make_parser, print_head, write_report
from infer import LLM
from infer.compute import ops
from infer.engine.runner.hidden_states import TextEncoder
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.load import load_transformer

CASES = {"8 texts of 512 tokens": (8, 512), "16 texts of 32 tokens": (16, 32), "1 text of 12 tokens": (1, 12)}
SIDES: dict[str, dict[str, Any]] = {
    "transformers": {},
    "f32": {},
    "q8": {"keep_floats_as": "q8"},
    "q8 fast": {"keep_floats_as": "q8", "precision": "fast"},
}
PUBLISHED_CASES = {"8 texts of 180 words": (8, 180), "16 texts of 24 words": (16, 24), "1 text of 9 words": (1, 9)}
PUBLISHED_SIDES: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16 fast": {"weights": "bf16", "precision": "fast"},
    "q8": {"weights": "q8"},
    "q8 fast": {"weights": "q8", "precision": "fast"},
}
LLAMA_SIDES = {"llama.cpp f32": "", "llama.cpp q8": "Q8_0"}
WORKER = str(Path(__file__).with_name("peer_worker.py"))
TESTS = Path(__file__).parents[1] / "tests" / "helpers"
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
            texts = ids[start : start + per_tile]
            for _ in encoder.of(texts, list(map(len, texts))):
                pass
    return time.perf_counter() - began


def start_llama(stack: ExitStack, python: str, model: Any, folder: Path, threads: int) -> dict[str, Worker]:
    """Start llama.cpp with the model in f32, and in the Q8_0 of its own quantiser."""
    sys.path.append(str(TESTS))
    from converted_encoders import write_gguf

    size = model.config.vocab_size
    named = {"model": "bert", "tokens": [f"\u2581{index}" for index in range(size)], "token_type": [1] * size}
    named |= {"token_type_count": model.config.type_vocab_size}
    named |= {"cls_token_id": 101, "seperator_token_id": 102, "unknown_token_id": 100}
    write_gguf(model, folder / "f32.gguf", {f"tokenizer.ggml.{name}": value for name, value in named.items()}, 1)
    workers = {}
    for side, file_type in LLAMA_SIDES.items():
        workers[side] = stack.enter_context(Worker((python, WORKER, "llama-texts"), is_quiet=True))
        path = folder / "f32.gguf"
        if file_type:
            path = folder / "quantised.gguf"
            workers[side].ask("requantize", source=str(folder / "f32.gguf"), target=str(path), file_type=file_type)
        workers[side].ask("load", path=str(path), threads=threads)
    return workers


def measure_published(folder: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Return the rates of a published model, and each side's least cosine with the vectors of f32's peer."""
    from sentence_transformers import SentenceTransformer

    peers = {
        f"sentence-transformers {dtype}": SentenceTransformer(
            str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}
        )
        for dtype in ("float32", "bfloat16")
    }
    ours = {side: LLM(folder, threads=threads, **settings) for side, settings in PUBLISHED_SIDES.items()}
    words = Path(__file__).with_name("precision_text.txt").read_text().split()
    texts = {
        case: [" ".join(words[10 * index :][:length]) for index in range(count)]
        for case, (count, length) in PUBLISHED_CASES.items()
    }
    counts = {case: sum(len(ours["f32"].tokenizer.encode(text)) for text in texts[case]) for case in texts}

    def vectors(case: str, side: str) -> torch.Tensor:
        if side in ours:
            return ours[side].embed(texts[case])
        return torch.from_numpy(peers[side].encode(texts[case], batch_size=len(texts[case]), show_progress_bar=False))

    def rate(case: str, side: str, number: int) -> float:
        began = time.perf_counter()
        vectors(case, side)
        return counts[case] / (time.perf_counter() - began)

    found: dict[str, Any] = compare(texts, [*peers, *ours], rounds, rate).to_json()
    case, (peer, *others) = next(iter(texts)), [*peers, *ours]
    expected = vectors(case, peer)
    cosines = {side: torch.cosine_similarity(vectors(case, side), expected).min().item() for side in others}
    print("least cosine", {side: round(cosine, 6) for side, cosine in cosines.items()})
    return found | {"least cosine": cosines}


def main() -> None:
    parser = make_parser(__doc__, threads=True, rounds=9)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--llama-python", metavar="PATH", help="with llama-cpp-python")
    parser.add_argument("--folders", nargs="+", type=Path, help="of published encoders; needs sentence-transformers")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    ops.set_num_threads(options.threads)
    if options.folders:
        print_head(options, "tokens per second")
        results = {}
        for folder in options.folders:
            print(f"\n{folder.name}")
            results[folder.name] = measure_published(folder, options.threads, options.rounds)
        options.folders = list(results)
        write_report(options, results=results)
        return
    config = BertConfig(
        hidden_size=options.hidden, num_attention_heads=options.heads, num_hidden_layers=options.layers,
        intermediate_size=4 * options.hidden,
    )  # fmt: skip
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        AutoModel.from_config(config).save_pretrained(folder)
        theirs = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
        ours = {side: load(folder, settings) for side, settings in SIDES.items() if side != "transformers"}
        python = find_llama_python(options.llama_python) if options.llama_python else None
        peers = start_llama(stack, python, theirs, folder, options.threads) if python else {}
        ids = {case: torch.randint(1000, 30_000, shape) for case, shape in CASES.items()}

        def measure(case: str, side: str, number: int) -> float:
            count, texts = ids[case].numel(), ids[case].tolist()
            if side in peers:
                return count / float(peers[side].ask("seconds", texts=texts))
            if side != "transformers":
                return count / seconds_of(ours[side], texts)
            began = time.perf_counter()
            with torch.inference_mode():
                theirs(ids[case])
            return count / (time.perf_counter() - began)

        print_head(options, "tokens per second")
        found = compare(CASES, [*SIDES, *peers], options.rounds, measure)
    write_report(options, results=found.to_json())


if __name__ == "__main__":
    main()
