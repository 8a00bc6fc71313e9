"""Anthropic's Messages, and llama.cpp's `/completion` and `/infill`: requests, answers and errors with their names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from byte_tokenizer import write_byte_tokenizer
from cases import cases
from infer import LLM
from infer.serving.protocols.anthropic.ask import MessagesBody, messages_of, variables_of
from infer.serving.protocols.fields import read_body
from infer.text.tokenizer.infill import InfillMarks
from served import Served, serving
from test_session import make_model
from tiny import Tiny, make_tiny

ASKED = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
EVENTS = ["message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop", "message_delta",
          "message_stop"]  # fmt: skip


def read(**body: Any) -> MessagesBody:
    return read_body(json.dumps(ASKED | body).encode(), MessagesBody)


def test_a_system_is_a_string_or_blocks_and_turns_of_one_role_are_one() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    last = {"role": "assistant", "content": "d"}
    turns = [{"role": "user", "content": blocks}, {"role": "user", "content": "c"}, last]
    expected = [{"role": "system", "content": "ab"}, {"role": "user", "content": "ab\nc"}, last]
    for system, found in ((blocks, expected), ("ab", expected), (None, expected[1:])):
        body = read(system=system, messages=turns)
        assert messages_of(body.messages, body.system) == found
    assert variables_of(body, expected, None) == {"continue_final_message": True}
    assert variables_of(body, expected[:2], None) == {}


def test_a_message_is_the_library_s_answer(served: Served, llm: LLM) -> None:
    system = {"role": "system", "content": "be"}
    expected = llm.chat([system, *ASKED["messages"]], temperature=0, max_new_tokens=12)  # type: ignore[misc]
    found = served.ask("/v1/messages", **ASKED | {"system": "be"})
    assert found["content"] == [{"type": "text", "text": expected.text}]  # AI SDK 6 refuses null citations
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage = found["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (expected.prompt_tokens, expected.generated_tokens)
    counted = {name: value for name, value in ASKED.items() if name in ("model", "messages")} | {"system": "be"}
    assert served.ask("/v1/messages/count_tokens", **counted) == {"input_tokens": expected.prompt_tokens}


def test_a_last_turn_of_the_assistant_is_gone_on_with(served: Served, llm: LLM) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "abc"}]  # type: ignore[misc]
    expected = llm.chat(messages, temperature=0, max_new_tokens=12, continue_final_message=True)
    assert served.ask("/v1/messages", **ASKED | {"messages": messages})["content"][0]["text"] == expected.text


def test_an_answer_is_held_to_a_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    asked = ASKED | {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "max_tokens": 99}
    found = served.ask("/v1/messages", **asked)
    assert json.loads(found["content"][0]["text"])["a"] in (1, 2)
    assert found["stop_reason"] in ("end_turn", "stop_sequence")


def test_a_stop_sequence_is_named(served: Served) -> None:
    text = served.ask("/v1/messages", **ASKED)["content"][0]["text"]
    found = served.ask("/v1/messages", **ASKED | {"stop_sequences": [text[-1], "zzz"]})
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[-1])


def test_a_stream_is_the_same_answer_in_anthropic_s_events(served: Served) -> None:
    whole = served.ask("/v1/messages", **ASKED)
    streamed = served.stream("/v1/messages", **ASKED)
    events = [event.split("\n") for event in streamed.strip().split("\n\n")]
    names = [event[0].removeprefix("event: ") for event in events]
    found = [json.loads(event[1].removeprefix("data: ")) for event in events]
    assert [each["type"] for each in found] == names
    assert list(dict.fromkeys(names)) == EVENTS
    deltas = (each["delta"]["text"] for each in found if each["type"] == "content_block_delta")
    assert "".join(deltas) == whole["content"][0]["text"]
    delta = {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2] == {"type": "message_delta", "delta": delta, "usage": whole["usage"]}


def test_both_events_with_usage_leave_out_cached_tokens(folder: Path) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": "a question " * 20}], "max_tokens": 4, "stream": True}
    with LLM(folder, reuse_prefixes=True) as llm, serving(llm) as served:
        for is_cached in (False, True):
            streamed = served.stream("/v1/messages", **asked).split("\n")
            found = [json.loads(line.removeprefix("data: ")) for line in streamed if line.startswith("data: ")]
            first, last = found[0]["message"]["usage"], found[-2]["usage"]
            assert first == last | {"output_tokens": 0}
            assert (first["cache_read_input_tokens"] > 0) == is_cached
            assert "citations" not in found[1]["content_block"]


@cases(
    "change param",
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"max_token": 3}, "max_token"),
    ({"messages": [{"role": "user", "content": "a" * 900}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 900}], "stream": True}, "messages"),
)
def test_refusals_have_anthropic_s_shape(served: Served, change: Any, param: str) -> None:
    answer = served.client.post("/v1/messages", json=ASKED | change)
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert (found["error"]["param"], "message" in found["error"]) == (param, True)


# llama.cpp's routes


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
def infill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model that can fill in text."""
    config = LlamaConfig(
        vocab_size=258 + len(MARKS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    make_tiny(Tiny("infill", config), folder)
    write_byte_tokenizer(folder, added=MARKS)
    with LLM(folder) as llm, serving(llm, model="tiny") as infill:
        yield infill


def events(infill: Served, path: str, **body: Any) -> list[Any]:
    return [json.loads(each.removeprefix("data: ")) for each in infill.stream(path, **body).strip().split("\n\n")]


def test_a_completion_is_the_library_s_answer_whole_and_as_events(infill: Served) -> None:
    expected = infill.state.llm().llm.generate("hello", temperature=0, max_new_tokens=6)
    whole = infill.ask("/completion", prompt="hello", return_tokens=True, **GREEDY)
    *pieces, last = events(infill, "/completion", prompt="hello", **GREEDY)
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


def test_prompts_are_texts_ids_or_several_and_the_end_has_its_reason(infill: Served) -> None:
    text, ids = (infill.ask("/completion", prompt=prompt, **GREEDY) for prompt in ("ab", list(b"ab")))
    several = infill.ask("/completion", prompt=["ab", "c"], **GREEDY)
    assert text["content"] == ids["content"] == several[0]["content"]
    assert [each["index"] for each in several] == [0, 1]
    asked = {"n_predict": -2, "stop": ["qq"], "logit_bias": [[113, 100], [114, False]], "temperature": 0}
    word = infill.ask("/completion", prompt="ab", **asked)
    assert (word["content"], word["stop_type"], word["stopping_word"]) == ("", "word", "qq")
    end = infill.ask("/completion", prompt="ab", logit_bias=[[256, 100]])
    assert (end["stop_type"], end["tokens_predicted"]) == ("eos", 1)
    full = infill.ask("/completion", prompt="ab", ignore_eos=True)
    assert (full["stop_type"], full["tokens_cached"]) == ("limit", 96)


def test_probabilities_and_seeds_are_those_of_openai_s_route(infill: Served) -> None:
    found = infill.ask("/completion", prompt="ab", n_probs=2, **GREEDY)["completion_probabilities"]
    (choice,) = infill.ask("/v1/completions", prompt="ab", logprobs=2, temperature=0, max_tokens=6)["choices"]
    assert [each["logprob"] for each in found] == choice["logprobs"]["token_logprobs"]
    assert all(each["top_logprobs"][0]["id"] == each["id"] for each in found)
    *pieces, _ = events(infill, "/completion", prompt="ab", n_probs=2, **GREEDY)
    assert [each["completion_probabilities"] for each in pieces] == [[each] for each in found]
    drawn = [infill.ask("/completion", prompt="ab", seed=-1, n_predict=24) for _ in range(2)]
    assert len({each["generation_settings"]["seed"] for each in drawn}) == 2
    assert infill.ask("/completion", prompt="ab", seed=7, n_predict=4)["generation_settings"]["seed"] == 7


def test_an_editor_gets_the_text_between_two_texts(infill: Served) -> None:
    llm = infill.state.llm().llm
    ids = [PREFIX, *b"a\nb", SUFFIX, *b"z\n", MIDDLE]
    asked = EDITOR | {"temperature": 0}
    found = infill.ask("/infill", **asked)
    assert found["content"] == llm.generate(ids, temperature=0, max_new_tokens=6, top_k=40, top_p=0.99).text
    assert (found["tokens_evaluated"], found["truncated"]) == (len(ids), False)
    warm = infill.ask("/infill", **asked | {"n_predict": 0, "samplers": []})
    assert (warm["content"], warm["tokens_predicted"], warm["tokens_evaluated"]) == ("", 0, len(ids))
    extra = {"input_extra": [{"text": "x", "filename": "f"}], "n_predict": 90}
    assert infill.ask("/infill", **asked | extra)["prompt"] == (
        "<|repo_name|>project\n<|file_sep|>f\nx<|file_sep|>file\n<|fim_prefix|>a\nb<|fim_suffix|>z\n<|fim_middle|>"
    )
    ended = infill.ask("/infill", **asked | {"logit_bias": [[PAD, 100]]})
    assert (ended["content"], ended["stop_type"]) == ("", "eos")


def test_files_that_do_not_fit_are_left_out_the_first_ones_first(infill: Served) -> None:
    marks, files = InfillMarks(1, 2, 3, frozenset()), [("", text) for text in ("aaa", "b", "")]
    asked = [1, *b"x", 2, *b"y", 3]

    def prompt(marks: InfillMarks, files: list[tuple[str, str]], num_tokens: int | None) -> list[int]:
        return marks.prompt("x", "y", files, lambda text: list(text.encode()), num_tokens)

    for num_tokens, kept in ((10, b"b\n\n\n\n"), (9, b"\n\n"), (None, b"aaa\n\nb\n\n\n\n")):
        assert prompt(marks, files, num_tokens) == [*kept, *asked]
    named, project, file = marks._replace(repository=4, file=5), [4, *b"project\n"], [5, *b"file\n"]
    for num_tokens, kept in ((22, b""), (23, b"\x05f\n")):
        assert prompt(named, [("f", "")], num_tokens) == [*project, *kept, *file, *asked]
    extra = [{"text": name * 60} for name in "pq"]
    found = infill.ask("/infill", **EDITOR | {"input_extra": extra})["prompt"]
    assert "p" not in found.replace("repo_name", "").replace("project", "").replace("file_sep", "").replace("fim_p", "")


@cases(
    "path body message",
    ("completion", {"prompt": "a", "grammar": "root ::= 'a'"}, "Lark's syntax, got GBNF: rewrite it"),
    ("completion", {"prompt": "a", "logit_bias": [["a", 1]]}, "logit_bias[0] must be a token id"),
    ("completion", {"prompt": "a", "n_predict": "x"}, "n_predict is read as max_tokens: expected `int"),
    ("completion", {"prompt": "a", "dry_multiplier": 0.8}, "dry_multiplier must not be 0.8"),
    ("infill", {"input_suffix": "a"}, "input_prefix is missing"),
    ("infill", {"input_prefix": "a" * 100, "input_suffix": ""}, "103 tokens and the maximum context length is 96"),
)
def test_a_refusal_names_llama_cpp_s_field(infill: Served, path: str, body: dict[str, Any], message: str) -> None:
    assert message in infill.refusal(f"/{path}", **body)["message"]


def test_a_model_without_marks_says_so_in_one_line(tmp_path: Path) -> None:
    with LLM(make_model(tmp_path)) as llm, serving(llm) as infill:
        found = infill.refusal("/infill", **EDITOR)["message"]
    assert found == "the model has no tokens to fill in text: continue a prompt instead"
