"""Claims about per-layer inputs on a GPU, norms of embeddings and scales of layers, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer.compute.backends import reference
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.weights import Norm, PerLayerWeights, Projection, UnreadWeight
from test_cuda_weights import CPU, activations, assert_near, norm_of, quantized_values, weight_of

pytest.importorskip("triton", reason="Triton is not installed")

from gpu_twins import assert_left_in_planes
from infer.compute.backends import cuda
from infer.compute.backends.cuda.activations import twin_of

pytestmark = pytest.mark.usefixtures("quick_interpreter")
VOCAB, LAYERS, DIM, HIDDEN = 20, 4, 64, 96
TOKENS = torch.tensor([3, 0, 19, 3, 17, 5, 6, 7, 8, 9])


def per_layer_weights(type_: str) -> tuple[PerLayerWeights, PerLayerWeights]:
    """Return the reference's and CUDA's."""
    whole = weight_of(type_, VOCAB, LAYERS * DIM)
    table = UnreadWeight(whole.type, whole.shape, lambda low, high: whole.data[low:high])
    projection = Projection((weight_of("F32", LAYERS * DIM, HIDDEN),))
    stored = PerLayerWeights(table, 0.7, projection, norm_of(DIM))
    (packed,) = cuda.prepare(Projection((table,)), CPU).parts
    return stored, replace(stored, table=packed, projection=cuda.prepare(projection, CPU))


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "BF16"])
def test_inputs_are_those_of_the_reference_for_any_number_of_tokens(type_: str) -> None:
    stored, packed = per_layer_weights(type_)
    x = activations(len(TOKENS), HIDDEN)
    found = cuda.per_layer_inputs(x, TOKENS, packed)
    assert_near(found, reference.per_layer_inputs(x, TOKENS, stored))
    for index in (0, 4):
        assert torch.equal(
            cuda.per_layer_inputs(x[index : index + 1], TOKENS[index : index + 1], packed)[0], found[index]
        )


def test_a_token_that_is_padding_has_no_inputs() -> None:
    _, packed = per_layer_weights("Q8_0")
    x, ids = activations(3, HIDDEN), torch.tensor([4, -1, 5])
    x[1] = torch.nan
    found = cuda.per_layer_inputs(x, ids, packed)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def gated(type_: str, x: Tensor, inputs: Tensor) -> Activations:
    gate = cuda.prepare(Projection((weight_of(type_, DIM, HIDDEN),)), CPU)
    return cuda.gate_inputs(x, gate, "gelu_tanh", inputs, DIM)


@pytest.mark.parametrize("type_", ["Q8_0", "BF16", "F32"])
def test_a_gate_takes_its_layers_columns_and_leaves_what_the_next_product_takes(type_: str) -> None:
    x, inputs = activations(10, HIDDEN), activations(10, LAYERS * DIM)
    found, gate = gated(type_, x, inputs), Projection((weight_of(type_, DIM, HIDDEN),))
    seen = quantized_values(x) if type_ == "Q8_0" else x
    assert_near(found.floats, reference.gate_inputs(seen, gate, "gelu_tanh", inputs, DIM).floats)
    twin = twin_of(found)
    assert (twin.quantized is None) == (type_ == "F32")
    if twin.quantized is not None:
        assert_left_in_planes(found, twin.planes)
    for index in (0, 7):
        alone = gated(type_, x[index : index + 1], inputs[index : index + 1])
        assert torch.equal(alone.floats[0], found.floats[index])


@pytest.mark.parametrize("norm", [None, norm_of(HIDDEN)], ids=["plain", "norm"])
def test_a_layer_s_scale_multiplies_the_residual_stream_after_the_sum(norm: Norm | None) -> None:
    x, residual, stored = activations(9, DIM), activations(9, HIDDEN), Projection((weight_of("F32", HIDDEN, DIM),))
    expected = reference.project_add(residual, Activations(x), stored, norm, 0.3)
    found = cuda.project_add(residual.clone(), Activations(x), cuda.prepare(stored, CPU), norm, 0.3)
    assert_near(found, expected)
    assert not torch.allclose(found, reference.project_add(residual, Activations(x), stored, norm), rtol=0.1)


def test_embeddings_are_divided_by_their_root_mean_square() -> None:
    weight, ids = weight_of("Q8_0", 7, HIDDEN), torch.tensor([6, 0, 3])
    (table,) = cuda.prepare(Projection((weight,)), CPU).parts
    found = cuda.embed(table, ids, 2.0, 1e-5)
    assert_near(found, reference.embed(weight, ids, 2.0, 1e-5))
    assert torch.equal(cuda.embed(table, ids[1:2], 2.0, 1e-5)[0], found[1])
