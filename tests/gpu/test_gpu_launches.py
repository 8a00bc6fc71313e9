"""Claims about how many kernels a step launches on a GPU, and how many are compiled for it."""

import sys
from pathlib import Path

import pytest
import torch

from infer.compute import ops
from infer.compute.operands.limits import GPU_STEP
from infer.compute.operands.step import Chunk, Step
from infer.engine.runner.runner import Runner
from infer.models.transformer import Transformer

pytest.importorskip("triton", reason="Triton is not installed")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_models
from gpu_launches import num_variants, recorded_launches
from infer.compute.backends import cuda
from infer.compute.backends.cuda.capture import CapturedForward
from infer.compute.backends.cuda.graphs import Repeats
from infer.compute.backends.cuda.step_sizes import StepSize, sizes_ahead

CPU = torch.device("cpu")
PLAIN = ["advance_rows", "choose_plain", "score_blocks"]


def make_model(type_: str) -> Transformer:
    return gpu_models.make_model("two layers", type_, CPU, 1024)


def layer_launches(type_: str, num_tokens: int) -> list[str]:
    model = make_model(type_)
    runner = gpu_models.make_runner(model, 1, 1024, capture=False)
    runner.reserve(0, num_tokens)
    with recorded_launches() as launches, torch.inference_mode():
        model.residual(Step.of(range(num_tokens)), runner.cache)
    names = [launch.kernel for launch in launches]
    at = [index for index, name in enumerate(names) if name == "rotate_append"]
    assert len(at) == 2
    return names[at[0] : at[1]]


@pytest.mark.parametrize("num_tokens", [1, 17])
def test_a_layer_is_eight_launches(num_tokens: int) -> None:
    attention = ["rotate_append", "attend_chunks"]
    product = "matvec" if num_tokens == 1 else "matmul"
    rest = [product, "quantize_rows", product, product, "quantize_rows", product]
    assert layer_launches("Q4_0", num_tokens) == [*attention, *rest]
    rest = ["dense", "quantize_rows", "dense", "dense", "quantize_rows", "dense"]
    assert layer_launches("BF16", num_tokens) == [*attention, *rest]


def test_a_token_is_embedded_by_one_launch() -> None:
    for type_ in ("Q4_0", "BF16"):
        table = make_model(type_).embedding.parts[0]
        with recorded_launches() as launches:
            cuda.embed(table, torch.tensor([3]), 2.0)
        assert len(launches) == 1


@pytest.mark.parametrize("shape", ["two layers", *gpu_models.PARTS])
def test_a_bucket_compiles_nothing_that_another_has_compiled(shape: str) -> None:
    model = gpu_models.make_model(shape, "Q4_0", CPU, 256)
    runner: Runner = gpu_models.make_runner(model, 1, 256, capture=False)
    with ops.using(model.backend):
        captured = CapturedForward(lambda step: model.forward(step, runner.cache), 64, 64, CPU, Repeats())
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
    model = make_model("Q4_0")
    runner: Runner = gpu_models.make_runner(model, 1, 1024, capture=False)
    columns = [gpu_models.columns_of(model, 1, temperature=0), gpu_models.columns_of(model, 1, top_p=0.9)]
    with ops.using(model.backend):
        captured = CapturedForward(lambda step: model.forward(step, runner.cache), *GPU_STEP, CPU, Repeats())
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
        assert num_variants(launches) == compiled


def test_a_chunk_without_logits_computes_no_line_of_the_head() -> None:
    model = make_model("Q4_0")
    runner: Runner = gpu_models.make_runner(model, 1, 1024, capture=False)
    runner.reserve(0, 4)
    counts = list[int]()
    with ops.using(model.backend):
        captured = CapturedForward(lambda step: model.forward(step, runner.cache), 8, 8, CPU, Repeats())
    for logit_indices in ([3], []):
        with recorded_launches() as launches:
            assert len(captured.run(Step.of(range(4), logit_indices=logit_indices))) == len(logit_indices)
        counts.append(sum(launch.kernel == "matvec" for launch in launches))
    assert counts[0] - counts[1] == 2  # the product is recorded, and replayed
