"""`infer sample-trace` on SmolLM2 explains the token that `infer generate` prints."""

import json
from pathlib import Path

import pytest

from infer.cli import main, subcommands
from infer.llm import LLM

pytestmark = pytest.mark.slow

OPTIONS = {
    "defaults": ["--seed", "3"],
    "everything": [
        *["--seed", "5", "--temperature", "1.3", "--top-k", "50", "--top-p", "0.8", "--min-p", "0.02"],
        *["--frequency-penalty", "0.4", "--presence-penalty", "0.3", "--logit-bias", "4461=-inf"],
    ],
    "preset": ["--preset", "seed", "--seed", "3"],
    "greedy": ["--preset", "seed", "--temperature", "0"],
    "plain greedy": ["--temperature", "0"],
    "chat": ["--chat", "--system", "Be brief.", "--seed", "1"],
}


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_step_is_the_one_that_generate_took(
    name: str, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subcommands, "load_model", lambda options: llm)
    options = ["--prompt", "Roses are red, violets are", *OPTIONS[name], "--json", "-q"]
    assert main(["generate", "-n", "10", *options]) == 0
    token_ids = json.loads(capsys.readouterr().out)["token_ids"]
    for step in {1, 2, len(token_ids)}:
        assert main(["sample-trace", "--step", str(step), *options]) == 0
        trace = json.loads(capsys.readouterr().out)
        assert trace["token_id"] == token_ids[step - 1]
        for index, stage in enumerate(trace["stages"]):
            listed = sum(candidate["probabilities"][index] for candidate in trace["candidates"])
            assert listed + stage["others"] == pytest.approx(1, abs=1e-9)
