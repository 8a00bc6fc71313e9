"""The page of models names each kind of model that loads, and agrees with the lists in the tests."""

import json
import re

import pytest

from encoder_models import ENCODERS
from infer.cli.commands.models_command import run_supported
from infer.models import families
from infer.models.catalog.supported import SUPPORTED
from infer.models.families import FAMILIES
from tiny import TINY
from what_loads import PAGE, page_with_table


def test_the_table_of_models_is_that_of_the_tests() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with_table(), "run tests/helpers/what_loads.py, tests on the path"


def test_every_family_is_compared_with_transformers() -> None:
    alias = {"gemma3", "qwen3_5", "qwen3_5_moe"}  # a multimodal model's text part by another name
    alias |= {"gemma4", "gemma4_unified", "muse_glimmer", "llama4"}
    alias |= {"llama_bidirec"}  # llama without a mask
    assert {tiny.config.model_type for tiny in TINY} == set(FAMILIES) - alias
    assert {encoder.model_type for encoder in ENCODERS} == set(families.ENCODERS)
    assert {each.model_type for each in SUPPORTED} == set(FAMILIES) - alias | set(families.ENCODERS)


def test_the_command_prints_what_loads(capsys: pytest.CaptureFixture[str]) -> None:
    run_supported(as_json=True)
    found = json.loads(capsys.readouterr().out)
    row = r"^\|[^|]*\| `([^`]*)` \| (yes|no) \| [^|]* \| (.*) \|$"
    on_page = re.findall(row, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    rows = [(each["model_type"], "yes" if each["gguf"] else "no", ", ".join(each["settings"])) for each in found]
    assert rows == on_page
    run_supported(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(SUPPORTED)
    (gemma,) = [line for line in lines if "gemma3_text" in line]
    assert "  yes       random weights and Gemma 3 270M, EmbeddingGemma  windows, norms of each q and k head, " in gemma
