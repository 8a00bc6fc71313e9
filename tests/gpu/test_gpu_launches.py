"""Claims about how many kernels a step launches on a GPU, how many are compiled for it, and in which sizes."""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from infer.compute import ops
from infer.compute.operands.limits import GPU_STEP, HOST_STEP, StepLimits
from infer.compute.operands.step import Chunk, Step
from infer.engine.runner.runner import Runner
from infer.models.transformer import Transformer

pytest.importorskip("triton", reason="Triton is not installed")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_models
from gpu_launches import num_variants, recorded_launches
from infer.compute.backends.cuda import attention
from infer.compute.backends.cuda.capture import CapturedForward, StepSize, size_for, sizes_ahead
from infer.compute.backends.cuda.graphs import Repeats

CPU = torch.device("cpu")


TYPES = ("Q4_0", "BF16")
MIXERS = {  # kernels between two products of a layer
    "two layers": ["rotate_append", "attend_chunks"],
    "tiny delta nets": ["prepare_tokens", "multiply_keys", "mix_runs", "gate_heads"],
    "tiny convolutions": ["convolve_tokens"],
    "tiny experts": ["rotate_append", "attend_chunks"],
}


def make_captured(shape: str, context: int, limits: tuple[int, int]) -> tuple[Transformer, Runner, CapturedForward]:
    model = gpu_models.make_model(shape, "Q4_0", CPU, context)
    runner: Runner = gpu_models.make_runner(model, 1, context, capture=False)
    with ops.using(model.backend):
        return model, runner, CapturedForward(lambda step: model.forward(step, runner.cache), *limits, CPU, Repeats())


def forward_launches(shape: str, type_: str, num_tokens: int) -> list[str]:
    """Return the kernels of a step of one row, from the embedding on."""
    model = gpu_models.make_model(shape, type_, CPU, 256)
    runner = gpu_models.make_runner(model, 1, 256, capture=False)
    runner.cache.reserve(0, num_tokens)
    with recorded_launches() as launches, torch.inference_mode():
        model.forward(Step.of([1] * num_tokens), runner.cache)
    warps = {entry[1] for launch in launches for entry in launch.variant if entry[0] == "num_warps"}
    assert warps <= {1, 2, 4, 8, 16, 32}, "a program has at most 1,024 threads"
    names = [launch.kernel for launch in launches]
    return names[next(index for index, name in enumerate(names) if name.startswith("embed")) :]


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("shape", MIXERS)
def test_a_forward_launches_few_kernels_and_waits_for_no_choice(shape: str, type_: str, num_tokens: int) -> None:
    """Mixers and gates leave their results in planes, which the next product takes."""
    one = "matvec" if type_ == "Q4_0" else "dense"
    product = "matmul" if type_ == "Q4_0" and num_tokens > 1 else one
    mixer = ["quantize_rows", product, *MIXERS[shape], product]
    if shape == "tiny experts":
        tiles = [] if product == "matvec" else ["plan_tiles", "fill_tiles"]
        experts = [f"expert_{product}", f"expert_{product}", "add_pairs"]
        feed_forward = ["normalize_rows", "multiply_few_rows", "choose_experts", *tiles, *experts]
    else:
        feed_forward = ["quantize_rows", product, product]
    embed = "embed_rows" if type_ == "Q4_0" else "embed_floats"
    layers = [*mixer, *feed_forward] * (2 if shape == "two layers" else 1)
    assert forward_launches(shape, type_, num_tokens) == [embed, *layers, "quantize_rows", one]  # the head has one line


@pytest.mark.parametrize("type_", TYPES)
def test_a_forward_with_per_layer_inputs_launches_their_kernels_in_each_layer(type_: str) -> None:
    names = forward_launches("tiny per-layer inputs", type_, 1)
    assert [names.count(name) for name in ("rotate_append", "attend_chunks", "gate_rows")] == [3, 3, 3]
    assert sum(name.startswith("embed") for name in names) == 2
    assert names.count("add_normalized_rows") == 3 * 3 + 1  # after each part of a layer, and of the inputs


@pytest.mark.parametrize("type_", TYPES)
def test_a_forward_of_parallel_parts_launches_no_more_than_one_of_parts_in_turn(type_: str) -> None:
    product = "matvec" if type_ == "Q4_0" else "dense"
    up, mixer = ["quantize_rows", product], ["quantize_rows", product, *MIXERS["two layers"], product]
    assert forward_launches("tiny LayerNorm", type_, 1)[1:] == [*up, *mixer, product, "quantize_rows", product]


@pytest.mark.parametrize(("shape", "planned"), [("two layers", [1, 0]), ("tiny per-layer inputs", [1, 1, 0])])
def test_the_first_layer_of_a_page_group_plans_attention_for_the_others(shape: str, planned: list[int]) -> None:
    model = gpu_models.make_model(shape, "Q4_0", CPU, 256)
    runner = gpu_models.make_runner(model, 1, 256, capture=False)
    runner.cache.reserve(0, 3)
    step, programs = Step.of([1] * 3), list[int]()

    class Grids:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            return lambda *_, **__: programs.append(grid[0])

    with recorded_launches(), pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(attention, "rotate_append", Grids())
        for _ in range(2):  # another forward of the same step plans again
            model.forward(step, runner.cache)
    assert [count - 3 for count in programs] == planned * 2


@pytest.mark.parametrize("shape", ["two layers", *gpu_models.PARTS])
def test_a_bucket_compiles_nothing_that_another_has_compiled(shape: str) -> None:
    _, _, captured = make_captured(shape, 256, (64, 64))
    with recorded_launches() as launches:
        for count in (8, 16, 64):
            captured._recording(count, count)
        compiled = num_variants(launches)
        for count in (1, 2, 4, 32):
            captured._recording(count, count)
            captured._recording(count, 1)
    assert num_variants(launches) == compiled


@torch.inference_mode()
def test_sizes_recorded_ahead_compile_the_kernels_of_all_other_sizes() -> None:
    model, _, captured = make_captured("two layers", 1024, GPU_STEP)
    columns = [gpu_models.columns_of(model, 1, temperature=0), gpu_models.columns_of(model, 1, top_p=0.9)]
    assert captured.record_ahead(columns) == 0, "where nothing is compiled, nothing is recorded ahead"
    with recorded_launches() as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repeats, "records_ahead", True)
        assert captured.record_ahead(columns) == len(list(sizes_ahead(GPU_STEP))) == 6
        compiled = num_variants(launches)
        for size in (StepSize(4, 4), StepSize(512, 512), StepSize(2048, 64), StepSize(4096, 0), StepSize(8192, 512)):
            forward = captured._recording(*size)
            for each in columns if size.tokens == size.logits else []:
                captured._multi_step.record(forward.result, captured._inputs.step(*size), each, None, None)
                captured._verifier.record(forward.result, [Chunk(0, [1])] * 3, each, None, None)
        while captured.record_next():
            assert num_variants(launches) == compiled
    usual = {
        size_for(*size, GPU_STEP) for count in range(1, 65) for size in ((count, count), (64 * count, 1), (count, 0))
    }
    assert usual <= captured._recordings.keys(), "no request waits for these"


def test_a_size_that_finds_no_memory_is_left_to_the_step_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, captured = make_captured("two layers", 256, (8, 8))
    monkeypatch.setattr(Repeats, "records_ahead", True)
    with recorded_launches():
        captured.record_ahead([])
        record = Mock(side_effect=torch.OutOfMemoryError("full"))
        with monkeypatch.context() as patch:
            patch.setattr(captured, "_recording", record)
            assert captured.record_next()
            assert not captured.record_next()
        assert record.call_count == 1
        assert len(captured.run(Step.of([1, 2]))) == 1


def test_a_chunk_without_logits_computes_no_line_of_the_head() -> None:
    _, runner, captured = make_captured("two layers", 1024, (8, 8))
    runner.cache.reserve(0, 4)
    counts = list[int]()
    for logit_indices in ([3], []):
        with recorded_launches() as launches:
            assert len(captured.run(Step.of(range(4), logit_indices=logit_indices))) == len(logit_indices)
        counts.append(sum(launch.kernel == "matvec" for launch in launches))
    assert counts[0] - counts[1] == 2  # the product is recorded, and replayed


@pytest.mark.parametrize("limits", [GPU_STEP, HOST_STEP, StepLimits(6, 4), StepLimits(512, 512)], ids=str)
def test_each_step_has_a_size_with_room_for_it(limits: StepLimits) -> None:
    steps = [
        (num_tokens, num_logits)
        for num_tokens in {*range(1, min(600, limits.tokens) + 1), limits.tokens // 2 + 1, limits.tokens}
        for num_logits in {0, 1, 3, 9, 65, num_tokens, limits.logits}
        if num_logits <= min(num_tokens, limits.logits)
    ]
    for num_tokens, num_logits in steps:
        size = size_for(num_tokens, num_logits, limits)
        assert num_tokens <= size.tokens <= min(2 * num_tokens, limits.tokens)
        assert (size.logits == 0) == (num_logits == 0)
        assert num_logits <= size.logits <= limits.logits
        if num_tokens == num_logits:
            assert size.logits <= size.tokens, "a step of decoding has no more lines than tokens"
    assert len({size_for(*step, limits) for step in steps}) <= 48


def test_few_sizes_are_recorded_ahead_and_a_step_may_have_one_of_them() -> None:
    assert list(sizes_ahead(GPU_STEP)) == [(1, 1), (8, 8), (16, 16), (64, 64), (512, 8), (8192, 8)]
    assert list(sizes_ahead(StepLimits(16, 4))) == [(1, 1), (16, 4)]
    for size in sizes_ahead(GPU_STEP):
        assert size_for(size.tokens, size.logits, GPU_STEP) == size
