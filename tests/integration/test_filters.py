"""Claims about filters: every sampler applies each parameter that is declared as one, and the page ignores none.

A new filter needs a value in `VALUES`, and fails here until each sampler has it (`docs/dev/adding.md`).
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from infer import SamplingParams
from infer.compute import ops
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.definition import sample_token
from infer.compute.sampling.row_stages import FILTERS
from infer.compute.sampling.trace import sample_trace
from infer.outputs import SampleTrace
from infer.sampling_params import FILTER_NAMES

SEEDS, VOCAB = range(40), 12
LOGITS = torch.linspace(0, 2, VOCAB)[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))]
VALUES: dict[str, Any] = {"top_k": 3, "top_p": 0.4, "min_p": 0.7}  # each drops tokens of LOGITS
filters = pytest.mark.parametrize("name", VALUES)

NOISE = Path(infer.__file__).parent / "serving" / "web_ui" / "noise.js"
CHOOSE = """
import { readFileSync } from "node:fs";
const { chosenWith, settingsOf } = await import(process.argv[1]);
const chosen = JSON.parse(readFileSync(0)).map(({ trace, values, vocab }) =>
    chosenWith(trace, { ...settingsOf(trace), ...values }, vocab)?.token_id ?? null);
console.log(JSON.stringify(chosen));
"""


def expected(seed: int, **values: Any) -> int:
    return sample_token(LOGITS, [], SamplingParams(seed=seed, **values))


def on_cuda(logits: Tensor, columns: SamplingColumns, history: None, positions: Tensor) -> Tensor:
    from infer.compute.backends.cuda.sampling.sampler import Tiling, choose_by

    return choose_by(Tiling(block=256, chunk=4, capacity=32), logits, columns, history, positions)


SAMPLERS: dict[str, Callable[..., Tensor]] = {
    "definition": sampler.choose_tokens,
    "cpu": ops.choose_tokens,
    "cuda": on_cuda,
}


def test_the_filters_are_the_parameters_that_are_declared_so() -> None:
    assert [*VALUES] == [*FILTERS] == [*FILTER_NAMES]


@filters
def test_a_filter_changes_the_definition(name: str) -> None:
    assert [expected(seed, **{name: VALUES[name]}) for seed in SEEDS] != [expected(seed) for seed in SEEDS]


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("choose", SAMPLERS.values(), ids=SAMPLERS)
@filters
def test_every_sampler_applies_every_filter(name: str, choose: Callable[..., Tensor]) -> None:
    values = {name: VALUES[name]}
    columns = SamplingColumns.of([SamplingParams(seed=seed, **values) for seed in SEEDS], VOCAB)
    assert columns.has_filters
    tokens = choose(LOGITS.repeat(len(SEEDS), 1), columns, None, torch.zeros(len(SEEDS), dtype=torch.int64))
    assert tokens.tolist() == [expected(seed, **values) for seed in SEEDS]


@filters
def test_opencl_leaves_every_filter_to_the_host(name: str) -> None:
    from infer.compute.backends.opencl.sampled import is_plain

    for values, is_alone in (({}, True), ({name: VALUES[name]}, False)):
        assert is_plain(SamplingColumns.of([SamplingParams(seed=1, **values)], VOCAB)) == is_alone


@filters
def test_what_if_of_the_page_has_the_filter_or_asks_the_server(name: str, node: str) -> None:
    """`chosenWith` has all candidates here, so that only a filter that it does not know leaves it without an answer."""

    def trace_of(seed: int, values: dict[str, Any]) -> SampleTrace:
        return sample_trace(LOGITS, SamplingParams(seed=seed, **values), [], num_candidates=VOCAB)

    values = {name: VALUES[name]}
    asked = [
        {"trace": asdict(trace_of(seed, own)), "values": other, "vocab": VOCAB}
        for seed in SEEDS
        for own, other in ((values, {}), ({}, values))
    ]
    asked.append(asked[0] | {"trace": json.loads(json.dumps(asked[0]["trace"]).replace(f'"{name}"', '"unheard_of"'))})
    command = [node, "--input-type=module", "-e", CHOOSE, NOISE.as_uri()]
    said = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=60)
    *found, unheard_of = json.loads(said.stdout)
    assert unheard_of is None
    tokens = [expected(seed, **values) for seed in SEEDS]
    assert found[::2] in (tokens, [None] * len(tokens))
    assert found[1::2] == tokens or name not in NOISE.read_text()
