"""`check_gpu`'s sections on models: the same bits on every path, a file's own text, and tokens per second."""

import functools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.compute import ops
from infer.compute.operands.step import Chunk
from infer.compute.operands.weights import FileWeight
from infer.compute.ops import SampledStep
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.engine.runner.runner import Runner
from infer.files import open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.load import load_transformer
from infer.models.tensors import expected_shapes
from infer.models.transformer import Transformer
from infer.sampling_params import SamplingParams
from random_weights import make_tensor, make_weight

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _LLAMA | {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "two layers": _LLAMA | {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    },
    "two layers of experts": {
        "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 1024,
    },
    "tiny": _LLAMA | {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
    },
    "tiny experts": {
        "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 256,
    },
    "tiny delta nets": {
        "model_type": "olmo_hybrid", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "layer_types": ["linear_attention"], "num_attention_heads": 2,
        "num_key_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 256,
    },
    "tiny convolutions": {
        "model_type": "lfm2", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "layer_types": ["conv"], "num_attention_heads": 2, "num_key_value_heads": 1, "conv_L_cache": 3,
        "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 256,
    },
    "tiny LayerNorm": {  # attention in parallel to an MLP without a gate, norms with biases, a bias of the head
        "model_type": "phi", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256,
    },
    "tiny per-layer inputs": {  # shared keys, norms of values, per-layer inputs, layers with a scale
        "model_type": "gemma4_text", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "global_head_dim": 64, "hidden_size_per_layer_input": 32, "max_position_embeddings": 256,
    },
}  # fmt: skip
PARTS = ("tiny experts", "tiny delta nets", "tiny convolutions", "tiny LayerNorm", "tiny per-layer inputs")
GREEDY = {"temperature": 0.0}
STEPS = 16  # steps without a return to Python
WARM_UP = 2  # steps before those that are timed
TEXT_TOKENS, MOST_DIVERGENCE = 64, 1e-4  # of a file's own text; KL of the reference's next tokens, in nats


def make_model(
    shape: str, type_: str, device: torch.device, context: int, *, shares_layers: bool = False
) -> Transformer:
    """Return a model of random weights. With `shares_layers`, matrices of one shape have the same values: it is faster
    to make.
    """
    architecture = make_architecture(SHAPES[shape])
    make = functools.cache(make_weight) if shares_layers else make_weight
    shapes = expected_shapes(architecture).items()
    weights: dict[str, FileWeight] = {name: make_tensor(name, size, type_, make) for name, size in shapes}
    with ops.using("cuda"):
        backend = ops.backend_of(device)
    return load_transformer(architecture, weights, backend=backend, max_seq_len=context)


def make_runner(model: Transformer, rows: int, context: int, **options: Any) -> Runner:
    with ops.using(model.backend):
        return Runner(model, context, num_slots=rows, **options)


def at_context(runner: Runner, slot: int, context: int) -> None:
    """Give the slot a cache of `context` tokens without computing them. Its pages keep their old content."""
    runner.cache.truncate(slot, 0)
    runner.cache.reserve(slot, context)
    runner.commit(slot, context)


def columns_of(model: Transformer, rows: int, **params: Any) -> SamplingColumns:
    each = [SamplingParams(seed=row, **params) for row in range(rows)]
    return SamplingColumns.of(each, model.architecture.vocab_size, device=model.device)


def sampling_of(
    model: Transformer, prompts: Sequence[Sequence[int]], count: int, **params: Any
) -> tuple[SamplingColumns, History | None]:
    """Return columns, and for penalties a history with room for `count` tokens after each prompt."""
    columns = columns_of(model, len(prompts), **params)
    if not columns.has_penalty:
        return columns, None
    capacity = max(map(len, prompts)) + count
    history = History(len(prompts), capacity, model.architecture.vocab_size, model.device)
    for slot, prompt in enumerate(prompts):
        history.begin(slot, prompt)
    return columns, history


def random_ids(count: int, seed: int, vocab_size: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(count)]


def generated(
    runner: Runner, prompts: Sequence[Sequence[int]], count: int, steps: int, **params: Any
) -> list[list[int]]:
    """Return `count` tokens after each prompt, with `steps` steps without a return to Python."""
    columns, history = sampling_of(runner.model, prompts, count, **params)
    found = [list[int]() for _ in prompts]
    for slot, prompt in enumerate(prompts):
        runner.extend(slot, prompt[:-1])
    last = [prompt[-1] for prompt in prompts]
    while len(found[0]) < count:
        ahead = min(steps, count - len(found[0]))
        for slot in range(len(prompts)):
            runner.cache.reserve(slot, ahead)
        step = SampledStep([Chunk(slot, [each]) for slot, each in enumerate(last)], runner.lengths, columns, history)
        sampled = runner.multi_step(step, ahead) if steps > 1 else runner.launch(step).wait()
        for slot, token_ids in enumerate(sampled.token_ids):
            found[slot] += token_ids
            runner.commit(slot, len(token_ids))
            last[slot] = token_ids[-1]
    return found


def verified(runner: Runner, prompt: Sequence[int], expected: Sequence[int], **params: Any) -> list[int]:
    """Return the tokens after the prompt with up to three drafts per step. Every fifth token is drafted wrong."""
    vocab_size, found, last = runner.model.architecture.vocab_size, list[int](), prompt[-1]
    columns, history = sampling_of(runner.model, [prompt], len(expected), **params)
    runner.extend(0, prompt[:-1])
    while len(found) < len(expected):
        places = range(len(found), min(len(found) + 3, len(expected) - 1))
        drafts = [(expected[place] + (place % 5 == 4)) % vocab_size for place in places]
        runner.cache.reserve(0, 1 + len(drafts))
        step = SampledStep([Chunk(0, [last, *drafts], len(drafts))], runner.lengths, columns, history)
        (token_ids,), *_ = runner.launch(step).wait()
        found += token_ids
        runner.commit(0, len(token_ids))
        last = found[-1]
    return found


def check_paths(
    device: torch.device, is_tiny: bool, types: Sequence[str] = ("Q4_0", "Q8_0", "Q6_K", "BF16")
) -> Iterator[dict[str, Any]]:
    """Check that graphs, multi-steps, neighbours and drafts change no token of eager single steps."""
    shapes = ("tiny", *PARTS) if is_tiny else ("two layers", "two layers of experts", *PARTS)
    count, lengths = (3, (2, 3)) if is_tiny else (96, (3, 40, 300, 7))
    penalties = {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.4}
    for shape, type_ in product(shapes, types[:1] if is_tiny else types):
        context, vocab_size = SHAPES[shape]["max_position_embeddings"], SHAPES[shape]["vocab_size"]
        model = make_model(shape, type_, device, context)
        prompts = [random_ids(min(length, context // 3), length, vocab_size) for length in lengths]
        for params in (GREEDY, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}, penalties):
            one_by_one = make_runner(model, 1, context, capture=False)
            expected = generated(one_by_one, prompts[:1], count, 1, **params)[0]
            for name, found in every_path(model, context, prompts, expected, **params):
                is_right = found == expected
                yield {"op": f"model of {shape}, {name}", "type": type_, "tokens": count, "error": float(not is_right),
                       "is_right": is_right}  # fmt: skip


def every_path(
    model: Transformer, context: int, prompts: Sequence[Sequence[int]], expected: Sequence[int], **params: Any
) -> Iterator[tuple[str, list[int]]]:
    """Yield each path with the tokens that it generates after the first prompt."""
    alone, count = prompts[:1], len(expected)
    yield "graphs", generated(make_runner(model, 1, context), alone, count, 1, **params)[0]
    yield "several steps", generated(make_runner(model, 1, context), alone, count, STEPS, **params)[0]
    yield "in company", generated(make_runner(model, len(prompts), context), prompts, count, STEPS, **params)[0]
    yield "drafts", verified(make_runner(model, 1, context), prompts[0], expected, **params)


def check_file(device: torch.device, is_tiny: bool, path: Path) -> Iterator[dict[str, Any]]:
    """Check that a file's model writes the same text on every path, with the probabilities of plain torch.

    Yields the divergence of the next tokens' probabilities from those that `reference` computes on the CPU.
    """
    checkpoint, count = open_checkpoint(path), 3 if is_tiny else TEXT_TOKENS
    architecture, context, read = make_architecture(checkpoint.config), 4 * count, list[Tensor]()
    start = [int(checkpoint.metadata.get("tokenizer.ggml.bos_token_id", 1))]
    for name, place in (("cuda", device), ("reference", torch.device("cpu"))):
        with ops.using(name):
            backend = ops.backend_of(place)
        weights = LazyWeights(checkpoint.tensors)
        model = load_transformer(architecture, weights, backend=backend, max_seq_len=context)
        if name == "cuda":
            params = {"temperature": 0.7, "top_p": 0.9}
            ids = generated(make_runner(model, 1, context, capture=False), [start], count, 1, **params)[0]
            for path_name, found in every_path(model, context, [start, [*start, *ids]], ids, **params):
                is_right = found == ids
                yield {"op": f"file, {path_name}", "type": path.name, "tokens": count, "error": float(not is_right),
                       "is_right": is_right}  # fmt: skip
        with ops.using(backend):
            runner = make_runner(model, 1, context, capture=False)
            read.append(runner.append(0, [*start, *ids][:count], count).cpu().double().log_softmax(-1))
    ours, expected = read
    divergence = float((expected.exp() * (expected - ours)).nan_to_num(posinf=0.0).sum(-1).mean())
    same_best = float((ours.argmax(-1) == expected.argmax(-1)).double().mean())
    words = checkpoint.metadata.get("tokenizer.ggml.tokens", [])
    text = "".join(words[each] for each in ids if each < len(words)).replace("Ġ", " ").replace("Ċ", "\n")
    yield {"op": "file, beside plain torch", "type": path.name, "tokens": count, "error": divergence,
           "same_best": same_best, "text": text, "is_right": abs(divergence) < MOST_DIVERGENCE}  # fmt: skip


def check_answers(device: torch.device, is_tiny: bool, path: Path) -> Iterator[dict[str, Any]]:
    """Check that a user's answers have the same tokens for each number of answers at the same time."""
    from infer import LLM  # needs more packages than the other sections

    count, length, sizes = (8, 4, (1, 8)) if is_tiny else (64, 48, (64, 8, 1))
    prompts = [f"Write {number + 1} words about the number {number}." for number in range(count)]
    with LLM(path, device=str(device), max_seq_len=256) as llm:
        for params in (GREEDY, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}):
            each, expected = [params | {"seed": seed, "max_new_tokens": length} for seed in range(count)], None
            for size in sizes:
                started = time.perf_counter()
                results = llm.generate_all(prompts, each, batch_size=size)
                rate = count * length / (time.perf_counter() - started)
                found = [(each.token_ids, each.logprobs) for each in results]
                expected = expected or found
                what = {"op": "answers", **params, "at_once": size, "text": results[0].text}
                yield what | {"tokens_per_second": rate, "is_right": found == expected}


def time_model(
    model: Transformer, name: str, rows: int, context: int, tokens: int, rounds: int, *, after: int = 0
) -> dict[str, Any]:
    """Return the median tokens per second of greedy decoding after 16 tokens, and of reading a prompt of 512.

    With `after`, both begin after a context of that many tokens, which is not computed.
    """
    decode, prefill = [], []
    for _ in range(rounds + 1):
        runner = make_runner(model, rows, context)
        prompts = [random_ids(16, row, model.architecture.vocab_size) for row in range(rows)]
        columns = columns_of(model, rows, temperature=0.0)
        for slot in range(rows):
            at_context(runner, slot, after)
            runner.extend(slot, prompts[slot])
            runner.cache.reserve(slot, WARM_UP + tokens)
        step = SampledStep([Chunk(slot, [5]) for slot in range(rows)], runner.lengths, columns)
        runner.multi_step(step, WARM_UP)  # captures the sampler of these columns
        for slot in range(rows):
            runner.commit(slot, WARM_UP)
        model.backend.synchronize()
        started = time.perf_counter()
        runner.multi_step(step, tokens)
        decode.append(rows * tokens / (time.perf_counter() - started))
        runner.cache.reset()
        at_context(runner, 0, after)
        length = min(512, context - after)
        started = time.perf_counter()
        runner.extend(0, random_ids(length, 1, model.architecture.vocab_size))
        model.backend.synchronize()
        prefill.append(length / (time.perf_counter() - started))
    return {
        "model": name, "rows": rows, "after": after, "decode_tokens_per_second": statistics.median(decode[1:]),
        "prefill_tokens_per_second": statistics.median(prefill[1:]),
    }  # fmt: skip


def time_models(device: torch.device, is_tiny: bool) -> Iterator[dict[str, Any]]:
    if is_tiny:
        yield time_model(make_model("tiny", "Q8_0", device, 32), "tiny, Q8_0", 2, 32, 2, 1)
        return
    for type_ in ("BF16", "Q8_0", "Q4_0"):
        model = make_model("Llama-3.2-1B", type_, device, 2048, shares_layers=True)
        yield time_model(model, f"Llama-3.2-1B, {type_}", 1, 2048, 256, 3)
        del model
    model = make_model("Qwen3-0.6B", "BF16", device, 2048, shares_layers=True)
    for rows in (1, 8, 64):  # a step has 64 lines of logits
        yield time_model(model, "Qwen3-0.6B, BF16", rows, 1024, 128, 3)
    yield time_many(model, 256, 2048)


def time_contexts(device: torch.device, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the speed of decoding and of reading a prompt after long contexts, for one row and for several."""
    shape, contexts, tokens, rounds = ("tiny", (70,), 2, 1) if is_tiny else ("Llama-3.2-1B", (1024, 8192), 64, 2)
    capacity = contexts[-1] + (24 if is_tiny else 512)
    for type_ in ("Q4_0",) if is_tiny else ("Q4_K", "BF16"):
        model = make_model(shape, type_, device, capacity, shares_layers=True)
        for context in contexts:
            for rows in (2,) if is_tiny else (1, 8, 32):
                room = context + capacity - contexts[-1]
                yield time_model(model, f"{shape}, {type_}", rows, room, tokens, rounds, after=context)
        del model


def time_many(model: Transformer, num_requests: int, context: int) -> dict[str, Any]:
    """Run nano-vllm's benchmark: prompts and answers of 100 to 1,024 random tokens each, 64 at the same time."""
    generator = random.Random(0)
    sizes = [(generator.randint(100, 1024), generator.randint(100, 1024)) for _ in range(num_requests)]
    rows = min(64, num_requests)
    runner, left, last = make_runner(model, rows, context), dict[int, int](), dict[int, int]()
    columns = columns_of(model, rows, temperature=0.6)
    started, total = time.perf_counter(), sum(answer for _, answer in sizes)
    while sizes or left:
        for slot in set(range(rows)) - left.keys():
            if sizes:
                prompt, left[slot] = sizes.pop()
                runner.cache.truncate(slot, 0)
                runner.extend(slot, random_ids(prompt, prompt, model.architecture.vocab_size))
                last[slot] = 5
        slots, ahead = sorted(left), min(STEPS, *left.values())
        for slot in slots:
            runner.cache.reserve(slot, ahead)
        columns.select(slots)  # the sampler is captured again only if other slots take part
        chunks = [Chunk(slot, [last[slot]]) for slot in slots]
        found = runner.multi_step(SampledStep(chunks, runner.starts(chunks), columns), ahead)
        for slot, token_ids in zip(slots, found.token_ids, strict=True):
            runner.commit(slot, ahead)
            left[slot], last[slot] = left[slot] - ahead, token_ids[-1]
        left = {slot: count for slot, count in left.items() if count}
    seconds = time.perf_counter() - started
    return {"model": "Qwen3-0.6B, nano-vllm's bench", "rows": rows, "requests": num_requests,
            "decode_tokens_per_second": total / seconds}  # fmt: skip
