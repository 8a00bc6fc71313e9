"""`suffix` of /v1/completions: the answer is inserted between two texts, for models that were trained to write it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from byte_tokenizer import write_byte_tokenizer
from infer import LLM
from served import serving
from test_session import make_model
from tiny import Tiny, make_tiny

BYTES_AND_ENDS = 258
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
PREFIX, SUFFIX, MIDDLE, PAD = range(BYTES_AND_ENDS, BYTES_AND_ENDS + 4)
CODESTRAL = ["[SUFFIX]", "[PREFIX]"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
ASKED = {"prompt": "ab", "suffix": "yz", "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def make_infilling(tmp_path: Path) -> Callable[[list[str]], LLM]:
    def make(marks: list[str]) -> LLM:
        config = LlamaConfig(vocab_size=BYTES_AND_ENDS + len(marks), bos_token_id=None, eos_token_id=256, **SIZES)
        make_tiny(Tiny("infilling", config), tmp_path)
        write_byte_tokenizer(tmp_path, added=marks)
        return LLM(tmp_path)

    return make


def post(llm: LLM, status: int = 200, **changed: Any) -> Any:
    with serving(llm) as served:
        answer = served.client.post("/v1/completions", json=ASKED | changed)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_the_prompt_has_texts_and_marks_in_the_model_s_order(make_infilling: Callable[[list[str]], LLM]) -> None:
    found = post(make_infilling(QWEN))["choices"][0]
    assert found["prompt_token_ids"] == [PREFIX, *b"ab", SUFFIX, *b"yz", MIDDLE]
    assert found["token_ids"]


def test_the_suffix_is_first_without_a_mark_for_the_middle(make_infilling: Callable[[list[str]], LLM]) -> None:
    found = post(make_infilling(CODESTRAL), prompt=["ab", ""])["choices"]
    assert [each["prompt_token_ids"] for each in found] == [[258, *b"yz", 259, *b"ab"], [258, *b"yz", 259]]


def test_the_answer_ends_at_the_marks_that_end_it(make_infilling: Callable[[list[str]], LLM]) -> None:
    found = post(make_infilling(QWEN), logit_bias={str(PAD): 100})["choices"][0]
    assert (found["token_ids"], found["text"], found["finish_reason"]) == ([PAD], "", "stop")


def test_options_that_exclude_a_suffix_are_refused(make_infilling: Callable[[list[str]], LLM]) -> None:
    llm = make_infilling(QWEN)
    assert post(llm, 400, echo=True)["error"]["param"] == "echo"
    assert post(llm, 400, prompt=[1, 2])["error"]["param"] == "prompt"


def test_a_model_without_marks_continues_the_prompt_with_a_warning(tmp_path: Path) -> None:
    llm = LLM(make_model(tmp_path))
    found, plain = post(llm), post(llm, suffix="")
    (warning,) = found["infer"]["warnings"]
    assert "no tokens to fill in text" in warning
    assert found["choices"] == plain["choices"]
    assert "warnings" not in plain["infer"]
