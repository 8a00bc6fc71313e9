"""Claims about `infer sample-trace` and its function: they show the sampler's own stages, noise and choice."""

import math
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from cases import cases
from commands import run
from fake_cli import FakeModel
from infer import LLM, InvalidRequestError, SamplingParams
from infer.cli.commands.generate_command import trace_lines
from infer.cli.streamed_text import display_width
from infer.compute.sampling.definition import LogitsError, sample_token, stages
from infer.compute.sampling.trace import sample_trace
from infer.outputs import SampleTrace
from infer.sampling_params import PARAMETERS
from test_session import NUM_TOKENS

CONTEXT = [3, 5, 5, 8, 13]
END = NUM_TOKENS - 2
EVERYTHING: dict[str, Any] = {
    "temperature": 1.3, "top_k": 30, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "repetition_window": 4,
    "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {1: 2.5, 2: -math.inf}, "min_new_tokens": 4,
    "allowed_token_ids": range(150), "seed": 7,
}  # fmt: skip
MIXES = [
    EVERYTHING,
    EVERYTHING | {"temperature_last": True},
    EVERYTHING | {"temperature": 0},
    {"seed": 2**64 - 1},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.5, "seed": 3},
    {"logit_bias": {9: math.inf, 11: math.inf}, "seed": 1},
]


def make_logits(seed: int, vocab_size: int = 200) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def make_trace(params: SamplingParams, logits: torch.Tensor, **values: Any) -> SampleTrace:
    return sample_trace(logits, params, CONTEXT, num_prompt_tokens=2, eos_token_ids={0}, **values)


# The function


@pytest.mark.parametrize("values", MIXES)
def test_the_chosen_token_is_the_reference_samplers(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for seed in range(20):
        logits = make_logits(seed)
        expected = sample_token(logits, CONTEXT, params, num_prompt_tokens=2, eos_token_ids={0})
        trace = make_trace(params, logits)
        assert (trace.token_id, trace.chosen.token_id, trace.position, trace.step) == (expected, expected, 5, 4)
        assert max(c.score for c in trace.candidates if c.score is not None) == trace.chosen.score


@pytest.mark.parametrize("values", MIXES)
def test_every_number_is_that_of_the_samplers_stages(values: dict[str, Any]) -> None:
    params, logits = SamplingParams(**values), make_logits(1)
    passed = dict(stages(logits, CONTEXT, params, num_prompt_tokens=2, eos_token_ids={0}))
    trace = make_trace(params, logits)
    assert [stage.name for stage in trace.stages] == [*passed]
    for index, stage in enumerate(trace.stages):
        x = passed[stage.name]
        shares = x.double().softmax(0)
        assert stage.num_kept == int((x > -math.inf).sum())
        assert stage.others == pytest.approx(1 - sum(c.probabilities[index] for c in trace.candidates), abs=1e-9)
        for candidate in trace.candidates:
            logit = float(x[candidate.token_id])
            assert candidate.logits[index] == (None if logit == -math.inf else logit)
            assert candidate.probabilities[index] == pytest.approx(float(shares[candidate.token_id]), abs=1e-12)


def test_filters_remove_and_penalties_move() -> None:
    trace = make_trace(SamplingParams(**EVERYTHING), make_logits(4))
    by_name = {stage.name: stage for stage in trace.stages}
    assert list(by_name) == [
        "raw", "allowed", "logit_bias", "min_new_tokens", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "temperature", "top_k", "top_p", "min_p",
    ]  # fmt: skip
    for name in ("top_k", "top_p", "min_p", "allowed"):
        assert by_name[name].moved == 0, name
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty", "temperature"):
        assert (by_name[name].removed, by_name[name].moved > 0) == (0, True), name
    traces = [trace, make_trace(SamplingParams(**EVERYTHING, temperature_last=True), make_logits(1))]
    found = {stage.name for each in traces for stage in each.stages}
    assert found - {"raw", "allowed"} == {name for name, declared in PARAMETERS.items() if declared.stage}
    assert min(by_name["logit_bias"].removed, by_name["logit_bias"].moved) > 0
    assert (by_name["raw"].removed, by_name["top_k"].num_kept, by_name["top_p"].value) == (0, 30, 0.8)


def test_the_removed_mass_is_that_of_the_dropped_tokens() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    trace = make_trace(SamplingParams(temperature=1, top_k=3, top_p=0.8, seed=5), logits)
    assert [stage.removed for stage in trace.stages] == pytest.approx([0, 0.05, 0.15 / 0.95], abs=1e-6)
    assert [candidate.dropped_by for candidate in trace.candidates] == [None, None, "top_p", "top_k"]
    assert [stage.num_kept for stage in trace.stages] == [4, 3, 2]
    moved = [stage.moved for stage in make_trace(SamplingParams(temperature=0.5, seed=5), logits).stages]
    assert moved == pytest.approx([0, 0.25 / 0.365 - 0.5], abs=1e-6)  # the total variation of p and of p², normalised


def test_the_chosen_token_is_always_shown() -> None:
    unlikely = [make_trace(SamplingParams(seed=seed), torch.zeros(200), num_candidates=1) for seed in range(30)]
    assert all(len(trace.candidates) == 1 and trace.chosen.token_id == trace.token_id for trace in unlikely)
    assert len({trace.token_id for trace in unlikely}) > 20


def test_a_token_that_only_a_bias_makes_likely_is_shown_with_its_raw_rank() -> None:
    logits = make_logits(2)
    rare = int(logits.argmin())
    trace = make_trace(SamplingParams(temperature=0, logit_bias={rare: 60.0}), logits, num_candidates=3)
    assert (trace.token_id, trace.chosen.rank, trace.chosen.noise, trace.seed) == (rare, 200, None, None)
    assert [candidate.rank for candidate in trace.candidates] == [1, 2, 200]


def test_a_row_that_cannot_be_sampled_is_a_named_error() -> None:
    with pytest.raises(LogitsError, match="NaN"):
        make_trace(SamplingParams(seed=1), torch.full((5,), math.nan))
    with pytest.raises(InvalidRequestError, match="num_candidates must be at least 1, got 0"):
        make_trace(SamplingParams(seed=1), make_logits(1), num_candidates=0)
    with pytest.raises(InvalidRequestError, match="seed"):
        make_trace(SamplingParams(), make_logits(1))


# With a model


@cases(
    "values",
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 7},
    {"frequency_penalty": 0.5, "min_new_tokens": 9, "seed": 8, "temperature_last": True, "min_p": 0.01},
)
def test_every_step_ends_in_the_token_that_generate_gives(llm: LLM, values: dict[str, Any]) -> None:
    params = SamplingParams(**values, max_new_tokens=12, ignore_eos=True)
    expected = llm.generate("once upon", params).token_ids
    traces = [llm.sample_trace("once upon", params, step=step) for step in range(1, 13)]
    assert [trace.token_id for trace in traces] == expected
    assert [trace.step for trace in traces] == list(range(1, 13))
    assert traces[0].text_before == "once upon"


def test_ids_are_a_prompt_too_and_a_seed_that_was_drawn_is_told(llm: LLM) -> None:
    trace = llm.sample_trace([97, 99], SamplingParams())
    assert llm.sample_trace("ac", SamplingParams(seed=trace.seed)) == trace


def test_a_step_beyond_the_answer_names_its_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0, logit_bias={END: math.inf})
    assert llm.sample_trace("a", params).token_id == END
    end = rf"step must be at most 1, the end of the answer \(eos, {END}\), got 2"
    for step, message in ((2, end), (0, r"step must be a whole number in \[1, 400\], got 0")):
        with pytest.raises(InvalidRequestError, match=message):
            llm.sample_trace("a", params, step=step)


def test_a_row_that_fails_says_so(llm: LLM) -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[5], logit_bias={5: -math.inf})
    with pytest.raises(InvalidRequestError, match="ended early: no token of this row is allowed"):
        llm.sample_trace("a", params)


def test_the_last_logits_are_the_last_of_all(llm: LLM) -> None:
    ids = list(range(150))
    for last in (1, 3, 149, 150, 151):
        assert torch.equal(llm.logits(ids, last=last), llm.logits(ids)[-last:])


# The command


def test_the_command_traces_what_generate_says(folder: Path) -> None:
    options = ["--model", folder, "--seed", "11", "--temperature", "1.1", "--min-p", "0.01", "--json", "-q"]
    said = run("generate", "--prompt", "abc", "-n", "4", "--ignore-eos", *options).json()["token_ids"]
    for step in (1, 4):
        record = run("sample-trace", "--prompt", "abc", "--step", step, "--ignore-eos", *options).json()
        assert (record["token_id"], record["step"], record["seed"]) == (said[step - 1], step, 11)
        assert [stage["name"] for stage in record["stages"]] == ["raw", "temperature", "min_p"]


def test_the_table_is_plain_text_where_stdout_is_no_terminal(fake: FakeModel) -> None:
    out, err = run("sample-trace", "--prompt", "hello", "--step", "3")
    lines = out.splitlines()
    assert lines[0] == "step 3, after 'hello': position 5, seed 7"
    assert [" ".join(line.split()) for line in lines[2:11]] == [
        "raw top-k logit + noise = score",
        "2",
        "1 '<b>&\\n' 50.00% 62.50% 2.00 0.10 2.10",
        "→ 2 'é\\x1b[1m' 30.00% 37.50% 1.00 1.20 2.20",
        "3 '深い深い深い深い… 20.00% ×",
        "others",
        "tokens left 3 2",
        "mass removed 20.00%",
        "mass moved",
    ]
    assert lines[-1] == "chosen: 'é\\x1b[1m' (11), number 2 by its raw logit, 37.50% after the last stage"
    assert ("\x1b" in out, err) == (False, "")


def test_the_options_are_those_of_generate(fake: FakeModel) -> None:
    options = ["--prompt", "params", "--preset", "seed", "--top-k", "0", "--seed", "5"]
    shown = run("sample-trace", *options, "--json").json()["text_before"]
    assert shown == run("generate", "-q", *options).out.strip() != str(SamplingParams())


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_terminal_gets_colours_and_no_line_wider_than_itself(fake: FakeModel, width: int) -> None:
    lines = list(trace_lines(fake.sample_trace("hello", SamplingParams()), width))[1:-1]
    assert any("\x1b[" in line for line in lines)
    assert max(display_width(click.unstyle(line)) for line in lines) <= width
