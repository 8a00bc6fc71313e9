"""Claims about filters: every sampler applies each parameter that is declared as one, and the page ignores none.

A new filter needs a value in `VALUES`, and fails here until each sampler has it (`docs/dev/adding.md`).
"""

import json
import subprocess
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
from infer.sampling_params import FILTER_NAMES

SEEDS, VOCAB = range(40), 12
LOGITS = torch.linspace(0, 2, VOCAB)[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))]
VALUES: dict[str, Any] = {"top_k": 3, "top_p": 0.4, "min_p": 0.7}  # each drops tokens of LOGITS
filters = pytest.mark.parametrize("name", VALUES)

NOISE = Path(infer.__file__).parent / "serving" / "web_ui" / "noise.js"
CHOOSE = """
import { readFileSync } from "node:fs";
const { chosenWith, settingsOf } = await import(process.argv[1]);
const chosen = JSON.parse(readFileSync(0)).map(([trace, values, vocab]) =>
    chosenWith(trace, { ...settingsOf(trace), ...values }, vocab)?.token_id ?? null);
console.log(JSON.stringify(chosen));
"""


def expected(**values: Any) -> list[int]:
    return [sample_token(LOGITS, [], SamplingParams(seed=seed, **values)) for seed in SEEDS]


def choose(device: str, columns: SamplingColumns) -> Tensor:
    arguments = LOGITS.repeat(len(columns), 1), columns, None, torch.zeros(len(columns), dtype=torch.int64)
    if device == "cuda":
        from infer.compute.backends.cuda.sampling.sampler import Tiling, choose_by

        return choose_by(Tiling(block=256, chunk=4, capacity=32), *arguments)
    return (sampler if device == "definition" else ops).choose_tokens(*arguments)


def test_the_filters_are_the_parameters_that_are_declared_so() -> None:
    assert [*VALUES] == [*FILTERS] == [*FILTER_NAMES]


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("device", ["definition", "cpu", pytest.param("cuda", marks=pytest.mark.slow)])
@filters
def test_every_sampler_applies_every_filter(name: str, device: str) -> None:
    values = {name: VALUES[name]}
    columns = SamplingColumns.of([SamplingParams(seed=seed, **values) for seed in SEEDS], VOCAB)
    assert choose(device, columns).tolist() == expected(**values) != expected()


@filters
def test_what_if_of_the_page_has_the_filter_or_asks_the_server(name: str, node: str) -> None:
    """`chosenWith` has all candidates here, so only a filter that it does not know leaves it without an answer."""
    values, tokens = {name: VALUES[name]}, expected(**{name: VALUES[name]})
    own, plain = (
        [asdict(sample_trace(LOGITS, SamplingParams(seed=seed, **each), [], num_candidates=VOCAB)) for seed in SEEDS]
        for each in (values, {})
    )
    unknown = json.loads(json.dumps(own[0]).replace(f'"{name}"', '"unheard_of"'))
    asked = [*((trace, {}, VOCAB) for trace in [*own, unknown]), *((trace, values, VOCAB) for trace in plain)]
    command = [node, "--input-type=module", "-e", CHOOSE, NOISE.as_uri()]
    said = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(said.stdout)
    assert found[: len(own)] in (tokens, [None] * len(own))
    assert found[len(own)] is None
    assert found[len(own) + 1 :] == tokens or name not in NOISE.read_text()
