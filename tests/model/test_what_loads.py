"""The page of models says what loads, and the tests' own lists say what it says."""

from infer.model.families import FAMILIES
from tiny import TINY
from what_loads import PAGE, page_with_table


def test_the_table_of_models_is_that_of_the_tests() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_with_table(), "run tests/what_loads.py, tests on the path"


def test_every_family_is_compared_with_transformers() -> None:
    alias = {"gemma3", "qwen3_5", "qwen3_5_moe"}  # a multimodal model's text part by another name
    alias |= {"gemma4", "gemma4_unified", "gemma4_unified_text"}
    assert {tiny.config.model_type for tiny in TINY} == set(FAMILIES) - alias
