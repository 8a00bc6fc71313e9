"""Products of BF16 weights in `fast`: a model in NumPy has its bits, and fingerprints name the kernels."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from infer import LLM, SamplingParams
from infer.compute import ops
from infer.compute.backends.cpu import needed_kernels
from infer.compute.backends.cpu.isa import BY_NAME, usable_instruction_sets
from infer.compute.backends.cpu.layouts import LAYOUTS, PAIRS
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.operands.weights import Projection, StoredWeight
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.compile_ahead import make_outline
from infer.models.families import make_architecture
from test_session import make_model

Floats = npt.NDArray[np.float32]
CPU, SET = torch.device("cpu"), "avx512bf16"
ROWS = 9 * 16 + 5  # units of two groups, and an incomplete group


@pytest.fixture
def _has_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    if BY_NAME[SET] not in usable_instruction_sets():
        pytest.skip(f"hardware: a CPU with {SET}")
    monkeypatch.setenv("INFER_ISA", SET)


def flushed(x: Floats) -> Floats:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x Wᵀ: chains of even and of odd pairs, in each pair the second product first, subnormal numbers as 0."""
    left, right = (flushed(each.bfloat16().float().numpy()).astype(np.float64) for each in (x, weight))
    sums = [np.zeros((len(left), len(right)), np.float32) for _ in range(2)]
    for first in range(0, left.shape[1], 2):
        chain = first // 2 % 2
        for i in (first + 1, first):
            if i < left.shape[1]:  # a product of two BF16 is exact, and one rounding of a float64 sum is that of an FMA
                sums[chain] = flushed((sums[chain] + np.outer(left[:, i], right[:, i])).astype(np.float32))
    return torch.from_numpy(sums[0] + sums[1])


def numbers(*shape: int) -> torch.Tensor:
    """Return random numbers of many sizes, some of which are subnormal in BF16."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator) * 2.0 ** torch.randint(-6, 7, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.02, x * 1e-40, x)


def stored(*shape: int) -> StoredWeight:
    return StoredWeight("BF16", shape, numbers(*shape).bfloat16())


@pytest.mark.usefixtures("_has_pairs")
@pytest.mark.parametrize("columns", [1, 33, 640])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_any_number_of_tokens_has_the_bits_of_the_model(columns: int, num_threads: int) -> None:
    set_num_threads(num_threads)
    weight = stored(ROWS, columns)
    packed, x = ops.prepare(Projection((weight,)), CPU, "fast"), numbers(530, columns)
    expected = model(x, weight.data)
    for count in (1, 2, 7, 64, 530):
        assert torch.equal(ops.norm_project(x[:count], None, packed).floats, expected[:count]), count


@pytest.mark.usefixtures("_has_pairs")
def test_a_value_that_is_not_finite_stays_in_its_row_and_shows() -> None:
    packed, x = ops.prepare(Projection((stored(ROWS, 64),)), CPU, "fast"), numbers(3, 64)
    before = ops.norm_project(x, None, packed).floats
    for value in (float("inf"), float("nan"), 3.4e38):
        x[1, 5] = value
        after = ops.norm_project(x, None, packed).floats
        assert torch.equal(after[::2], before[::2])
        assert not after[1].isfinite().any()


def test_embedded_rows_are_those_of_the_file() -> None:
    table = stored(50, 33)
    packed = ops.prepare(Projection((table,)), CPU, "fast")
    ids = torch.tensor([0, 17, 49])
    assert torch.equal(ops.embed(packed.parts[0], ids, 1.0, None), table.data.float()[ids])


@pytest.mark.usefixtures("_has_pairs")
def test_a_model_gives_the_same_tokens_in_chunks_in_batches_and_recorded(tmp_path: Path) -> None:
    make_model(tmp_path)
    prompts, params = (
        [[5 + at % 60 for at in range(size)] for size in (3, 40, 150)],
        SamplingParams(max_new_tokens=8, seed=7, logprobs=3),
    )
    found = []
    for capture in (True, False):
        with LLM(tmp_path, weights="bf16", precision="fast", capture=capture) as llm:
            found.append([each.logprobs for each in llm.generate_all(prompts, params)])
            found.append([llm.generate(prompt, params, prefill_chunk=16).logprobs for prompt in prompts])
    assert all(each == found[0] for each in found)


def kind(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **settings: str) -> str:
    monkeypatch.setattr(needed_kernels, "instruction_set", lambda: BY_NAME[name])
    checkpoint = open_checkpoint(folder)
    outline = make_outline(make_architecture(checkpoint.config), checkpoint.tensors, ModelSettings.of(settings))
    return needed_kernels.kernel_kind(outline)


def test_the_kind_of_kernels_names_only_products_whose_bits_are_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path)
    for name in BY_NAME:
        for weights, precision in (("bf16", "fast"), ("bf16", "exact"), ("auto", "fast"), ("q8", "fast")):
            has_pairs = (name, weights, precision) == (SET, "bf16", "fast")
            expected = f"cpu {SET}" if has_pairs else "cpu"
            assert kind(tmp_path, name, monkeypatch, weights=weights, precision=precision) == expected


@pytest.mark.usefixtures("_has_pairs")
def test_a_fingerprint_names_the_kernels_of_fast_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path)
    found: dict[str, set[str]] = {"fast": set(), "exact": set()}
    for name in (SET, "avx512vnni"):
        monkeypatch.setenv("INFER_ISA", name)
        for precision, fingerprints in found.items():
            with LLM(tmp_path, weights="bf16", precision=precision) as llm:
                fingerprints.add(llm.system_fingerprint)
    assert {precision: len(each) for precision, each in found.items()} == {"fast": 2, "exact": 1}


def test_other_floats_and_exact_products_stay_floats() -> None:
    forms = {
        (type_, planes): BY_NAME[SET].form(LAYOUTS[type_], planes)
        for type_ in ("F32", "F16", "BF16")
        for planes in (1, 2)
    }
    assert [key for key, form in forms.items() if form == PAIRS] == [("BF16", 1)]
    assert {form for key, form in forms.items() if key != ("BF16", 1)} == {0}
