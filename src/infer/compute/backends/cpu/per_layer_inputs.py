"""Commands of `PerLayerInput`: all layers' inputs of a token, and the gate with which a layer takes its own."""

from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.cpu.projections import add_rows, project
from infer.compute.backends.cpu.recording import Run, scope
from infer.compute.backends.cpu.records import EMBED_FROM_FILE
from infer.compute.backends.cpu.threads.dispatch_table import NO_BARRIER, Arguments
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.weights import PerLayerWeights, Projection, UnreadWeight, Weight


def per_layer_inputs(
    x: Float[Tensor, "tokens hidden"], token_ids: Int[Tensor, "tokens"], weights: PerLayerWeights
) -> Float[Tensor, "tokens inputs"]:
    features = weights.projection.out_features
    with scope(weights.projection.label, tokens=token_ids) as run:
        inputs = run.tensor("per-layer inputs", run.capacity, features)
        contexts = run.tensor("per-layer contexts", run.capacity, features)
        _embed_from_file(run, weights.table, weights.table_scale, inputs)
        project(run, Activations(x), None, weights.projection, (contexts, 0))
        add_rows(run, inputs, contexts, weights.norm, rows_per_token=features // weights.dim)
        return inputs


def _embed_from_file(run: Run, table: Weight, scale: float, out: Tensor) -> None:
    """Append what stores the tokens' rows of a table that stays in its file, times scale."""
    assert isinstance(table, UnreadWeight)
    assert table.place is not None
    descriptor, offset = table.place
    arguments = Arguments(EMBED_FROM_FILE, descriptor=descriptor, offset=offset, row_bytes=table.row_bytes)
    arguments.set(in_features=table.in_features, num_rows=table.out_features, out=out, scale=scale)
    arguments.keeps.append(table)
    run.append("rows", arguments, NO_BARRIER, ".weights.embed:make_embed_from_file", table.type)


def gate_inputs(
    x: Float[Tensor, "tokens hidden"],
    gate: Projection,
    activation: Activation,
    inputs: Float[Tensor, "tokens inputs"],
    first_column: int,
) -> Activations:
    with scope(gate.label, num_tokens=len(x)) as run:
        out, first = run.columns("gated inputs", run.capacity, gate.out_features, gate.shares)
        own = first_column if gate.shares is None else first_column + gate.shares.own[0]
        project(run, Activations(x), None, gate, (out, first), kind=f"gate_{activation}", factors=(inputs, own))
        return Activations(run.gathered(out, gate.shares))
