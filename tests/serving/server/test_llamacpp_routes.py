"""llama.cpp's own routes, `/completion` and `/infill`, with its field names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from byte_tokenizer import write_byte_tokenizer
from cases import cases
from infer import LLM
from infer.text.tokenizer.infill import InfillMarks
from served import Served, serving
from test_session import make_model
from tiny import Tiny, make_tiny

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
PREFIX, SUFFIX, MIDDLE, PAD, REPO, FILE = range(258, 258 + len(MARKS))
GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 6}
# A body of the VS Code extension.
EDITOR: dict[str, Any] = {
    "id_slot": 0, "input_prefix": "a\n", "input_suffix": "z\n", "input_extra": [], "prompt": "b", "n_predict": 6,
    "n_cmpl": 1, "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 2500,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model that can fill in text."""
    config = LlamaConfig(
        vocab_size=258 + len(MARKS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    make_tiny(Tiny("infilling", config), folder)
    write_byte_tokenizer(folder, added=MARKS)
    with LLM(folder) as llm, serving(llm, model="tiny") as served:
        yield served


def events(served: Served, path: str, **body: Any) -> list[Any]:
    return [json.loads(each.removeprefix("data: ")) for each in served.stream(path, **body).strip().split("\n\n")]


def test_a_completion_is_the_library_s_answer_whole_and_as_events(served: Served) -> None:
    expected = served.state.llm().llm.generate("hello", temperature=0, max_new_tokens=6)
    whole = served.ask("/completion", prompt="hello", return_tokens=True, **GREEDY)
    *pieces, last = events(served, "/completion", prompt="hello", **GREEDY)
    assert (whole["content"], whole["tokens"]) == (expected.text, expected.token_ids)
    assert "".join(each["content"] for each in (*pieces, last)) == expected.text
    assert [token for each in pieces for token in each["tokens"]] == expected.token_ids
    assert not any(each["stop"] for each in pieces)
    for found in (whole, last):
        assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
        assert (found["tokens_predicted"], found["tokens_evaluated"], found["prompt"]) == (6, 5, "hello")
        assert found["generation_settings"]["n_ctx"] == 96
        timings = found["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == 5
        assert timings["predicted_ms"] == pytest.approx(6 * timings["predicted_per_token_ms"])


def test_prompts_are_texts_ids_or_several_and_the_end_has_its_reason(served: Served) -> None:
    text, ids = (served.ask("/completion", prompt=prompt, **GREEDY) for prompt in ("ab", list(b"ab")))
    several = served.ask("/completion", prompt=["ab", "c"], **GREEDY)
    assert text["content"] == ids["content"] == several[0]["content"]
    assert [each["index"] for each in several] == [0, 1]
    biased = {"logit_bias": [[ord("q"), 100], [ord("r"), False]], "temperature": 0}
    word = served.ask("/completion", prompt="ab", stop=["qq"], **biased)
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("", "word", "qq")
    end = served.ask("/completion", prompt="ab", logit_bias=[[256, 100]])
    assert (end["stop_type"], end["tokens_predicted"]) == ("eos", 1)
    full = served.ask("/completion", prompt="ab", ignore_eos=True)
    assert (full["stop_type"], full["tokens_cached"]) == ("limit", 96)


def test_probabilities_and_seeds_are_those_of_openai_s_route(served: Served) -> None:
    found = served.ask("/completion", prompt="ab", n_probs=2, **GREEDY)["completion_probabilities"]
    (choice,) = served.ask("/v1/completions", prompt="ab", logprobs=2, temperature=0, max_tokens=6)["choices"]
    assert [each["logprob"] for each in found] == choice["logprobs"]["token_logprobs"]
    assert all(each["top_logprobs"][0]["id"] == each["id"] for each in found)
    *pieces, _ = events(served, "/completion", prompt="ab", n_probs=2, **GREEDY)
    assert [each["completion_probabilities"] for each in pieces] == [[each] for each in found]
    drawn = [served.ask("/completion", prompt="ab", seed=-1, n_predict=24) for _ in range(2)]
    assert len({each["generation_settings"]["seed"] for each in drawn}) == 2
    assert served.ask("/completion", prompt="ab", seed=7, n_predict=4)["generation_settings"]["seed"] == 7


def test_an_editor_gets_the_text_between_two_texts(served: Served) -> None:
    llm = served.state.llm().llm
    ids = [PREFIX, *b"a\nb", SUFFIX, *b"z\n", MIDDLE]
    asked = EDITOR | {"temperature": 0}
    found = served.ask("/infill", **asked)
    assert found["content"] == llm.generate(ids, temperature=0, max_new_tokens=6, top_k=40, top_p=0.99).text
    assert (found["tokens_evaluated"], found["truncated"]) == (len(ids), False)
    warm = served.ask("/infill", **asked | {"n_predict": 0, "samplers": []})
    assert (warm["content"], warm["tokens_predicted"], warm["tokens_evaluated"]) == ("", 0, len(ids))
    other = [{"text": "x", "filename": "f"}]
    assert served.ask("/infill", **asked | {"input_extra": other})["prompt"] == (
        "<|repo_name|>project\n<|file_sep|>f\nx<|file_sep|>file\n<|fim_prefix|>a\nb<|fim_suffix|>z\n<|fim_middle|>"
    )
    ended = served.ask("/infill", **asked | {"logit_bias": [[PAD, 100]]})
    assert (ended["content"], ended["stop_type"]) == ("", "eos")


def test_files_that_do_not_fit_are_left_out_the_first_ones_first(served: Served) -> None:
    marks, files = InfillMarks(1, 2, 3, frozenset()), [("", text) for text in ("aaa", "b", "")]
    for num_tokens, kept in ((10, b"b\n\n\n\n"), (9, b"\n\n"), (None, b"aaa\n\nb\n\n\n\n")):
        prompt = marks.prompt("x", "y", files, lambda text: list(text.encode()), num_tokens)
        assert prompt == [*kept, 1, *b"x", 2, *b"y", 3]
    extra = [{"text": name * 60} for name in "pq"]
    found = served.ask("/infill", **EDITOR | {"input_extra": extra})["prompt"]
    assert "p" not in found.replace("repo_name", "").replace("project", "").replace("file_sep", "").replace("fim_p", "")


@cases(
    "path body message",
    ("completion", {"prompt": "a", "grammar": "root ::= 'a'"}, "Lark's syntax, got GBNF: rewrite it"),
    ("completion", {"prompt": "a", "logit_bias": [["a", 1]]}, "logit_bias[0] must be a token id"),
    ("completion", {"prompt": "a", "n_predict": "x"}, "n_predict is read as max_tokens: expected `int"),
    ("completion", {"prompt": "a", "dry_multiplier": 0.8}, "dry_multiplier must not be 0.8"),
    ("infill", {"input_suffix": "a"}, "input_prefix is missing"),
    ("infill", {"input_prefix": "a" * 100, "input_suffix": ""}, "103 tokens and the context holds 96"),
)
def test_a_refusal_names_llama_cpp_s_field(served: Served, path: str, body: dict[str, Any], message: str) -> None:
    assert message in served.refusal(f"/{path}", **body)["message"]


def test_a_model_without_marks_says_so_in_one_line(tmp_path: Path) -> None:
    with LLM(make_model(tmp_path)) as llm, serving(llm) as served:
        found = served.refusal("/infill", **EDITOR)["message"]
    assert found == "the model has no tokens to fill in text: continue a prompt instead"
