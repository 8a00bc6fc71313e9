"""Ollama's API: requests and answers, and the models that a server of several models loads and unloads for it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases import cases
from fake_hub import FakeHub
from fake_hub import serving as serving_hub
from infer import LLM
from infer.cli.commands.serve_command import make_settings
from infer.cli.option_fields import make_options
from infer.cli.server_options import ServeOptions
from infer.cli.subcommands import infer
from infer.serving.protocols.fields import BodyError
from infer.serving.protocols.ollama import seconds_of
from served import Served
from test_tool_calls import THINKING

MESSAGES = [{"role": "user", "content": "hello"}]
SERVED = {"allow_embeddings": True}
MODEL, LOADED = {"context": 1_500}, {"chat_template": THINKING, "reuse_prefixes": True}


GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}
ENDS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}
ENDS |= {"prompt_eval_cached_count"}
BOOLEAN = {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]}
TOOLS = [{"type": "function", "function": {"name": "is_on", "parameters": BOOLEAN | {"additionalProperties": False}}}]


def post(served: Served, path: str, status: int = 200, **body: Any) -> Any:
    """Return the answer as one object, or the lines of a stream."""
    answer = served.client.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == status, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.content.endswith(b"\n")
    return [json.loads(each) for each in answer.content.splitlines()]


def test_a_chat_is_the_library_s_answer_whole_and_as_lines(served: Served, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, temperature=0, max_new_tokens=12)
    whole = post(served, "/api/chat", messages=MESSAGES, options=GREEDY, stream=False)
    *lines, last = post(served, "/api/chat", messages=MESSAGES, options=GREEDY)
    for found in (whole, last):
        assert (found["model"], found["done"], found["done_reason"]) == ("tiny", True, "length")
        assert found.keys() >= ENDS
        assert (found["prompt_eval_count"], found["eval_count"]) == (expected.prompt_tokens, expected.generated_tokens)
        assert 0 < found["eval_duration"] < found["total_duration"]
    thoughts = [whole["message"].get("thinking", ""), "".join(each["message"].get("thinking", "") for each in lines)]
    texts = [whole["message"]["content"], "".join(each["message"]["content"] for each in lines)]
    assert (thoughts, texts) == ([expected.reasoning or ""] * 2, [expected.text] * 2)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert not any(each["done"] or each.keys() & ENDS for each in lines)


def test_a_prompt_is_a_message_unless_it_is_raw(served: Served, llm: LLM) -> None:
    chat = llm.chat([{"role": "system", "content": "be"}, *MESSAGES], temperature=0, max_new_tokens=12)
    found = post(served, "/api/generate", prompt="hello", system="be", options=GREEDY, stream=False)
    assert (found["response"], found.get("thinking")) == (chat.text, chat.reasoning)
    text = llm.generate("hello", temperature=0, max_new_tokens=12)
    lines = post(served, "/api/generate", prompt="hello", raw=True, options=GREEDY)
    assert "".join(each["response"] for each in lines) == text.text
    assert lines[-1]["prompt_eval_count"] == text.prompt_tokens


def test_options_are_those_of_the_other_routes_by_ollama_s_names(served: Served, llm: LLM) -> None:
    options = {"seed": 5, "temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.3,
               "repeat_last_n": 8, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_predict": 20, "stop": ["q"],
               "num_gpu": 1, "mirostat": 0, "tfs_z": 1.0}  # fmt: skip
    found = post(served, "/api/generate", prompt="hello", raw=True, options=options, stream=False)
    expected = llm.generate(
        "hello", seed=5, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3, repetition_window=8,
        presence_penalty=0.5, frequency_penalty=0.25, max_new_tokens=20, stop=["q"],
    )  # fmt: skip
    assert (found["response"], found["eval_count"]) == (expected.text, expected.generated_tokens)
    assert "infer" not in found
    noted = post(served, "/api/generate", prompt="a", raw=True, options=GREEDY | {"num_ctx": 4096}, stream=False)
    assert "--max-seq-len" in noted["infer"]["warnings"][0]
    for limit in (-2, 0):
        options = {"seed": -1, "num_predict": limit}
        whole = post(served, "/api/generate", prompt="hello", raw=True, options=options, stream=False)
        assert whole["eval_count"] > 12 or whole["done_reason"] == "stop"


def test_an_answer_follows_a_format_and_calls_have_their_arguments_as_objects(served: Served) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "think": False, "options": {"seed": 1}, "stream": False}
    found = post(served, "/api/chat", format=BOOLEAN | {"additionalProperties": False}, **asked)
    assert json.loads(found["message"]["content"]).keys() == {"flag"}
    forced = asked | {"tools": TOOLS, "options": {"seed": 1, "tool_choice": "required", "parallel_tool_calls": False}}
    (call,) = post(served, "/api/chat", **forced)["message"]["tool_calls"]
    assert call["function"]["name"] == "is_on"
    assert isinstance(call["function"]["arguments"]["flag"], bool)
    lines = post(served, "/api/chat", **forced | {"stream": True})
    (streamed,) = (each["message"]["tool_calls"] for each in lines if "tool_calls" in each["message"])
    assert streamed == [call]
    past = [*MESSAGES, {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_name": "is_on", "content": "true"}, *MESSAGES]  # fmt: skip
    later = post(served, "/api/chat", messages=past, tools=TOOLS, options=GREEDY, stream=False)
    assert later["prompt_eval_count"] > 0
    assert "warnings" not in later.get("infer", {})


def test_log_probabilities_are_those_of_a_chat_on_openai_s_route(served: Served) -> None:
    ours = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    expected = served.ask("/v1/chat/completions", **ours, temperature=0, max_tokens=6)
    scored = expected["choices"][0]["logprobs"]["content"]
    options = {"temperature": 0, "num_predict": 6}
    assert post(served, "/api/chat", **ours, options=options, stream=False)["logprobs"] == scored
    lines = post(served, "/api/chat", **ours, options=options)
    assert [each for line in lines for each in line.get("logprobs", ())] == scored


def test_an_option_replaces_no_field_of_the_body(served: Served) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "stream": False}
    other = {"messages": [{"role": "user", "content": "another question"}], "tools": TOOLS}
    plain, found = (post(served, "/api/chat", **asked, options=GREEDY | more) for more in ({}, other))
    assert (found["message"], found["prompt_eval_count"]) == (plain["message"], plain["prompt_eval_count"])


@cases("path body",
    # Open WebUI: utils/payload.py, routers/tasks.py, routers/ollama.py and retrieval/utils.py of its backend
    ("chat", {"model": "tiny:latest", "stream": True, "tools": TOOLS, "format": "json", "keep_alive": "5m",
              "think": False, "options": {"temperature": 0.8, "top_p": 0.9, "num_predict": 4, "stop": ["\n\n"],
                                          "repeat_last_n": 64, "num_gpu": 0, "use_mmap": True, "num_thread": 2},
              "messages": [
                  {"role": "user", "content": "hi"},
                  {"role": "assistant", "content": "", "tool_calls": [{"index": 0, "id": "call_1", "function": {
                      "name": "is_on", "arguments": {"flag": True}}}]},
                  {"role": "tool", "content": "true", "tool_call_id": "call_1"}]}),
    ("chat", {"model": "tiny:latest", "messages": MESSAGES, "stream": False, "num_predict": 4}),
    ("generate", {"model": "tiny:latest", "keep_alive": 0, "prompt": ""}),
    ("embed", {"input": ["hello", "ab"], "model": "tiny:latest"}),
    ("show", {"name": "tiny:latest", "model": "tiny:latest"}),
    ("pull", {"name": "tiny:latest", "model": "tiny:latest", "insecure": True}),
    # Continue
    ("chat", {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}], "stream": False,
              "options": {"temperature": 0.5, "num_predict": 4, "num_thread": 8, "mirostat": 0}, "keep_alive": 1800,
              "tools": TOOLS}),
    ("generate", {"prompt": "a", "suffix": "", "raw": True, "options": {"temperature": 0.01, "num_predict": 4,
                  "stop": ["\n"], "use_mmap": False}, "keep_alive": 1800, "stream": True}),
    ("show", {"model": None, "name": "tiny"}),
)  # fmt: skip
def test_bodies_of_other_programs_are_answered_without_a_warning(served: Served, path: str, body: Any) -> None:
    found = post(served, f"/api/{path}", **body)
    assert "infer" not in (found[-1] if isinstance(found, list) else found)


@cases(
    "path body message",
    ("chat", {"messages": [{"role": "user", "content": "", "images": ["aa"]}]}, "leave the image out"),
    ("chat", {"messages": MESSAGES, "format": "xml"}, 'format must be "json" or a schema'),
    ("chat", {"messages": MESSAGES, "options": {"temprature": 1}}, "did you mean temperature?"),
    ("chat", {"messages": MESSAGES, "options": {"n": 2}}, "n must not be 2 here"),
    ("chat", {"messages": MESSAGES, "options": {"mirostat": 2}}, "mirostat must not be 2"),
    ("chat", {"keep_alive": "5 minutes"}, 'a duration such as "5m"'),
    ("generate", {"prompt": "a", "images": ["aa"]}, "the model reads only text"),
    ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "raw: true"),
    ("generate", {"prompt": "a", "context": [1]}, "/api/chat"),
    ("generate", {"prompt": "a", "raw": True, "system": "b"}, "put the text into prompt"),
    ("pull", {"model": "llama3.2"}, "org/repo"),
    ("copy", {"source": "tiny", "destination": "b"}, "--served-model-name"),
    ("create", {"from": "tiny"}, "infer quantize"),
    ("push", {}, "not uploaded"),
)
def test_a_refusal_is_one_line_in_ollama_s_shape(served: Served, path: str, body: dict[str, Any], message: str) -> None:
    found = post(served, f"/api/{path}", status=400, **body)
    assert (found.keys(), message in found["error"], "\n" in found["error"]) == ({"error", "code"}, True, False), found


def test_texts_become_vectors_of_length_1_and_the_older_route_s_as_they_are(served: Served, llm: LLM) -> None:
    found = post(served, "/api/embed", input=["hello", "ab"])
    plain = post(served, "/api/embeddings", prompt="hello")["embedding"]
    length = math.hypot(*plain)
    assert length > 1.1
    assert found["embeddings"][0] == pytest.approx([value / length for value in plain], abs=1e-6)
    assert found["prompt_eval_count"] == len(llm.tokenizer.encode("hello") + llm.tokenizer.encode("ab"))
    assert len(found["embeddings"]) == 2
    assert post(served, "/api/embed", input="a" * 2_000)["prompt_eval_count"] == 1_500
    assert "error" in post(served, "/api/embed", status=400, input="a" * 2_000, truncate=False)


def test_lists_describe_the_files_of_the_model(served: Served, folder: Path) -> None:
    (model,) = served.client.get("/api/tags").json()["models"]
    (loaded,) = served.client.get("/api/ps").json()["models"]
    assert model["name"] == model["model"] == loaded["name"] == "tiny:latest"
    assert model["size"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    details = model["details"]
    assert (details, details["format"], details["family"]) == (loaded["details"], "safetensors", "llama")
    assert (len(model["digest"]), loaded["size_vram"], loaded["context_length"]) == (64, 0, 1_500)
    assert loaded["size"] > model["size"]
    shown = post(served, "/api/show", model="tiny:latest")
    assert shown["model_info"]["llama.context_length"] == 1_500
    (entry,) = served.client.get("/v1/models").json()["data"]
    for each in (shown, entry):
        assert (each["capabilities"], each["input_modalities"]) == (
            ["completion", "tools"],
            ["text"],
        )  # /api/chat answers tools, with a prompt of ours
    version = served.client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)  # Codex refuses older ones
    assert "not served here" in post(served, "/api/show", status=404, model="other")["error"]
    deleted = served.client.request("DELETE", "/api/delete", json={"model": "tiny"})
    assert (deleted.status_code, deleted.json()["code"]) == (400, "unsupported")


def test_another_model_s_name_is_answered_with_a_warning_and_a_tag_is_none(served: Served) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "options": GREEDY, "stream": False}
    plain, tagged, other = (post(served, "/api/chat", model=name, **asked) for name in ("tiny", "tiny:latest", "x"))
    assert plain["message"] == tagged["message"] == other["message"]
    assert "infer" not in tagged
    assert "'tiny' answers" in other["infer"]["warnings"][0]


def test_a_request_without_a_prompt_only_says_what_became_of_the_model(served: Served) -> None:
    loaded = post(served, "/api/generate")
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    assert post(served, "/api/chat", messages=[], keep_alive=0)["done_reason"] == "unload"


@cases("given seconds",
    (None, None), (0.0, 0), (2.5, 2.5), (-1.0, math.inf), ("0", 0), ("5m", 300), ("300s", 300), ("1h1.5m", 3690),
    ("-1s", math.inf), ("-1", math.inf), ("90", 90), ("250ms", 0.25),
)  # fmt: skip
def test_a_keep_alive_is_seconds_or_a_duration(given: float | str | None, seconds: float | None) -> None:
    assert seconds_of(given) == seconds
    with pytest.raises(BodyError, match="keep_alive must be a number of seconds"):
        seconds_of("5m later")


@cases("given port", ([], 8000), (["--ollama"], 11434), (["--port", "8000", "--ollama"], 8000), (["--port", "0"], 0))
def test_the_port_is_ollama_s_unless_another_one_is_given(given: list[str], port: int) -> None:
    values = infer.commands["serve"].make_context("serve", given).params
    options = make_options(ServeOptions, values)
    assert make_settings(options).port == port


def test_a_model_is_pulled_with_progress_or_is_at_hand(served: Served, monkeypatch: Any, tmp_path: Path) -> None:
    import huggingface_hub

    assert [each["status"] for each in post(served, "/api/pull")] == ["pulling manifest", "success"]
    with serving_hub(FakeHub({"org/quants": {"m-Q4_K_M.gguf": b"GGUF" * 1000}})) as hub:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in (("ENDPOINT", hub.url), ("HF_HUB_OFFLINE", False), ("HUGGINGFACE_CO_URL_TEMPLATE", files)):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        refused = post(served, "/api/pull", status=403, model="org/quants:Q4_K_M")
        assert "start the server with --allow-pull" in refused["error"]
        monkeypatch.setattr(served.state, "settings", replace(served.state.settings, allow_pull=True))
        found = post(served, "/api/pull", model="hf.co/org/quants:Q4_K_M")
        assert found[-1] == {"status": "success"}
        assert {each["total"] for each in found if "total" in each} == {4_000}
        assert hub.downloads.count("m-Q4_K_M.gguf") == 1
        again = post(served, "/api/pull", model="org/quants:Q4_K_M", stream=False)
        assert (again, hub.downloads.count("m-Q4_K_M.gguf")) == ({"status": "success"}, 1)
        (*_, failed) = post(served, "/api/pull", model="org/none")
        assert "the hub has no such repository" in failed["error"]
