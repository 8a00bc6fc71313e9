"""OpenAI's routes over sockets: the answers of `LLM` to the token, in OpenAI's shapes, streamed or whole."""

import json
import random
import re
import threading
from typing import Any

import msgspec
import pytest

from cases import cases
from idle import until
from infer import LLM, SamplingParams
from infer.engine.step.answer_parts import TextOutput
from infer.serving.protocols.fields import BodyError, read_body
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody
from infer.serving.protocols.responses.ask import ResponseBody
from openai_shapes import DATA, check, counts_of, events, named_events, validator
from raw_http import Connection, post
from served import SECONDS, Served
from test_session import TEXT_IDS

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
PLAIN = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LOADED = {"reuse_prefixes": True}
# Requests over HTTP, and the same calls of the library.
SAMPLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"seed": -7, "max_tokens": 30}, {"seed": 2**64 - 7, "max_new_tokens": 30}),
    ({"seed": 1, "top_k": -1, "min_p": 0.01, "repetition_penalty": 1.3, "presence_penalty": 1, "stop": None},
     {"seed": 1, "min_p": 0.01, "repetition_penalty": 1.3, "presence_penalty": 1.0}),
    ({"seed": 2, "logit_bias": {"65": 100, "66": -100}}, {"seed": 2, "logit_bias": {65: 100, 66: -100}}),
    ({"seed": 3, "allowed_token_ids": TEXT_IDS, "stop": ["a", "b"], "min_tokens": 3},
     {"seed": 3, "allowed_token_ids": TEXT_IDS, "stop": ["a", "b"], "min_new_tokens": 3}),
    ({"seed": 4, "regex": "[a-f]{3,9}"}, {"seed": 4, "regex": "[a-f]{3,9}"}),
    ({"seed": 5, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
     {"seed": 5, "json_schema": SCHEMA}),
    ({"seed": 6, "response_format": {"type": "json_object"}, "max_tokens": 40},
     {"seed": 6, "json_schema": {"type": "object"}, "max_new_tokens": 40}),
]  # fmt: skip


def ask(served: Served, path: str, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = served.ask(path, **{"model": "tiny", "return_token_ids": True} | body)
    check("CreateChatCompletionResponse" if path == CHAT else "CreateCompletionResponse", found)
    return found


def stream(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    found = list(events(served.stream(path, **{"return_token_ids": True} | body)))
    for chunk in found:
        check("CreateChatCompletionStreamResponse" if path == CHAT else "CompletionChunk", chunk)
    return found


def test_every_answer_and_chunk_has_the_model_s_fingerprint(served: Served, llm: LLM) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "seed": 1}
    found = [ask(served, COMPLETIONS, prompt="hello", **asked), *stream(served, CHAT, messages=PLAIN, **asked)]
    assert {each["system_fingerprint"] for each in found} == {llm.system_fingerprint}


@pytest.mark.parametrize("path", [COMPLETIONS, "/completion", CHAT, "/v1/responses", "/api/chat"])
def test_no_log_probabilities_are_read_that_nobody_asked_for(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = property(lambda delta: pytest.fail("they were read"))
    monkeypatch.setattr("infer.serving.protocols.events.Delta.logprobs", fail)
    given = {"prompt": "hello"} if "completion" in path.split("/")[-1] else {"messages": PLAIN}
    given = {"input": "hello"} if path == "/v1/responses" else {"messages": PLAIN} if path == CHAT else given
    assert '"error":{' not in served.stream(path, **given)


# Answers


@pytest.mark.parametrize(("asked", "values"), SAMPLED)
def test_an_answer_is_that_of_the_library(served: Served, llm: LLM, asked: Any, values: Any) -> None:
    chatted = llm.chat(PLAIN, values)
    answer = ask(served, CHAT, messages=MESSAGES, **asked)
    choice, (num_prompt, num_answered, _) = answer["choices"][0], counts_of(answer["usage"])
    assert (choice["message"]["content"], choice["token_ids"]) == (chatted.text, chatted.token_ids)
    assert (num_prompt, num_answered) == (chatted.prompt_tokens, chatted.generated_tokens)
    assert len(answer["prompt_token_ids"]) == num_prompt
    expected = llm.generate("hello", {"max_new_tokens": 16} | values)
    choice = ask(served, COMPLETIONS, prompt="hello", **asked)["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (expected.text, expected.token_ids)


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("asked", "values"), SAMPLED[1:6])
def test_a_stream_is_the_whole_answer_in_pieces(served: Served, path: str, asked: Any, values: Any) -> None:
    is_chat = path == CHAT
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    prompt: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": [[104, 101], [104, 105]], "echo": True}
    body = {"n": 3} | prompt | logprobs | asked
    answer, chunks = ask(served, path, **body), stream(served, path, **body)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    found = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {choice["index"] for choice in found} == set(range(3 if is_chat else 6))
    for choice in answer["choices"]:
        parts = [part for part in found if part["index"] == choice["index"]]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert [i for part in parts for i in part.get("token_ids", ())] == choice["token_ids"]
        scored = [part["logprobs"] for part in parts if part["logprobs"]]
        if is_chat:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
            assert [entry for each in scored for entry in each["content"]] == choice["logprobs"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            for name, column in choice["logprobs"].items():
                assert [entry for each in scored for entry in each[name]] == column


def test_usage_comes_once_in_a_last_chunk_without_choices_where_it_is_asked_for(served: Served) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "hello"})):
        body = {"n": 2, "seed": 3, "max_tokens": 5, **prompt}
        *chunks, last = stream(served, path, stream_options={"include_usage": True}, **body)
        assert ([chunk["usage"] for chunk in chunks], last["choices"]) == ([None] * len(chunks), [])
        assert counts_of(last["usage"]) == counts_of(ask(served, path, **body)["usage"])


def test_each_choice_has_a_seed_of_its_own_that_gives_it_again(served: Served, llm: LLM) -> None:
    answer = ask(served, CHAT, messages=MESSAGES, n=4, max_tokens=20)
    seeds = [each["seed"] for each in answer["infer"]["choices"]]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**53 for seed in seeds)
    for choice, seed in zip(answer["choices"], seeds, strict=True):
        assert choice["token_ids"] == llm.chat(PLAIN, seed=seed, max_new_tokens=20).token_ids
    again = ask(served, CHAT, messages=MESSAGES, n=4, max_tokens=20, seed=seeds[0])
    assert [choice["token_ids"] for choice in again["choices"]] == [c["token_ids"] for c in answer["choices"]]
    prompts = ask(served, COMPLETIONS, prompt=["hello", "abc"], n=2, seed=9)["choices"]
    assert [choice["index"] for choice in prompts] == [0, 1, 2, 3]
    assert prompts[2]["token_ids"] == llm.generate("abc", seed=9, max_new_tokens=16).token_ids


def test_a_prompt_is_computed_once_for_all_its_choices(served: Served, llm: LLM) -> None:
    messages = [{"role": "user", "content": "a long prompt that nobody else has sent, " * 5}]
    before = llm.host.engine.snapshot().reused_tokens
    usage = ask(served, CHAT, messages=messages, n=3, max_tokens=4)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert llm.host.engine.snapshot().reused_tokens - before == 2 * (usage["prompt_tokens"] // 64 * 64)
    again = ask(served, CHAT, messages=messages, max_tokens=4)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > 0


# Log-probabilities


def test_the_bytes_of_log_probabilities_are_those_of_the_text(served: Served, llm: LLM) -> None:
    for seed in range(8):
        answer = ask(served, CHAT, messages=MESSAGES, logprobs=True, max_tokens=30, seed=seed)
        choice = answer["choices"][0]
        spelt = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert spelt.decode(errors="replace") == choice["message"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
        expected = llm.chat(PLAIN, logprobs=0, max_new_tokens=30, seed=seed)
        num_shown = len(choice["logprobs"]["content"])
        assert num_shown == expected.generated_tokens - (expected.finish_reason == "eos")
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert found == [each.logprob for each in expected.logprobs[:num_shown]]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echoed_prompt_is_scored_as_the_library_does(served: Served, llm: LLM, max_tokens: int) -> None:
    ids = [104, 101, 108, 256, 111]
    scored = llm.prompt_logprobs(ids, num=3)
    body = {"max_tokens": max_tokens, "echo": True, "logprobs": 3, "prompt_logprobs": 3, "temperature": 0}
    first, second = (ask(served, COMPLETIONS, prompt=each, **body)["choices"][0] for each in (ids, "hello"))
    columns = first["logprobs"]
    assert [columns["token_logprobs"][0], columns["top_logprobs"][0]] == [None, None]
    assert columns["token_logprobs"][1:5] == [each.logprob for each in scored[1:] if each]
    best = [each.top[0][1] for each in scored[1:] if each]
    assert [max(top.values()) for top in columns["top_logprobs"][1:5]] == best
    assert {len(column) for column in columns.values()} == {5 + max_tokens}
    assert (first["prompt_token_ids"], len(first["token_ids"])) == (ids, max_tokens)
    assert [None if each is None else len(each) >= 3 for each in first["prompt_logprobs"]] == [None] + [True] * 4
    assert (second["text"][:5], second["logprobs"]["text_offset"][:5]) == ("hello", [0, 1, 2, 3, 4])


# Responses

EVENTS = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
ENDS = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def schema_of(event: str) -> str:
    """Return the name of the schema of an event, such as "ResponseTextDoneEvent" of `response.output_text.done`."""
    words = event.replace("output_text", "text").replace(".", "_").split("_")
    return "".join(map(str.capitalize, words)) + "Event"


def respond(served: Served, **body: Any) -> Any:
    asked = {"model": "tiny", "store": True} | body
    if not body.get("stream"):
        answer = served.ask("/v1/responses", **asked)
        check("Response", answer)
        return answer
    found = list(named_events(served.stream("/v1/responses", **asked)))
    for each in found:
        check(schema_of(each["type"]), each)
    return found


@pytest.mark.parametrize("max_tokens", [30, 400])
def test_a_response_is_the_chat_of_its_input_whole_and_in_events(served: Served, llm: LLM, max_tokens: int) -> None:
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
             {"role": "assistant", "id": "m", "type": "message", "content": [{"type": "output_text", "text": "hi"}]},
             {"role": "user", "content": "go on"}]  # fmt: skip
    body = {"instructions": "be brief", "input": turns, "seed": 12, "max_output_tokens": max_tokens}
    logprobs: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    asked = [PLAIN[0], *asked, {"role": "user", "content": "go on"}]
    expected = llm.chat(asked, seed=12, max_new_tokens=max_tokens)
    whole = respond(served, **body, **logprobs)
    (item,) = whole["output"]
    (part,) = item["content"]
    num_tokens = whole["usage"]["output_tokens"]
    assert (part["text"], whole["store"], num_tokens) == (expected.text, False, len(expected.token_ids))
    status = "incomplete" if expected.finish_reason == "length" else "completed"
    assert (whole["status"], item["status"]) == (status, status)
    found = respond(served, **body, **logprobs, stream=True)
    names = [each["type"] for each in found]
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    assert names == [*EVENTS, *["response.output_text.delta"] * len(deltas), *ENDS, f"response.{status}"]
    assert "".join(each["delta"] for each in deltas) == expected.text
    assert [entry for each in deltas for entry in each["logprobs"]] == part["logprobs"] != []
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == expected.text


def test_a_response_is_held_to_the_format_of_its_text(served: Served, llm: LLM) -> None:
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    answer = respond(served, input="hello", text=text, seed=1)
    expected = llm.chat(PLAIN[1:], seed=1, json_schema=SCHEMA)
    assert (answer["output"][0]["content"][0]["text"], answer["text"]) == (expected.text, text)
    long = [{"role": role, "content": "hello " * 30} for role in ("user", "assistant", "user", "assistant", "user")]
    assert served.refusal("/v1/responses", input=long)["param"] == "input"
    assert respond(served, input=long, truncation="auto", max_output_tokens=4)["truncation"] == "auto"


# Failures after the headers


def test_a_choice_that_fails_lets_the_others_end_and_is_told_of_last(served: Served, monkeypatch: Any) -> None:
    push = TextOutput.push
    seeds = [each["seed"] for each in ask(served, CHAT, messages=MESSAGES, n=3, seed=5)["infer"]["choices"]]

    def fail(text: TextOutput, token_id: int, **given: Any) -> Any:
        if text._params.seed == seeds[1] and text.num_tokens == 3:
            raise RuntimeError("planted")
        return push(text, token_id, **given)

    monkeypatch.setattr(TextOutput, "push", fail)
    body = {"messages": MESSAGES, "n": 3, "seed": 5, "max_tokens": 8}
    *chunks, last = events(served.stream(CHAT, **body))
    check("ErrorResponse", last)
    assert last["error"]["message"].startswith("choice 1: ")
    ended = {choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]}
    assert ended == {0, 2}
    *_, failed = named_events(served.stream("/v1/responses", input="hello", seed=seeds[1]))
    check("ResponseFailedEvent", failed)
    whole = served.client.post(CHAT, json=body)
    assert (whole.status_code, whole.headers["x-should-retry"]) == (500, "false")
    check("ErrorResponse", whole.json())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_all_choices_end_with_their_client(served: Served, llm: LLM, monkeypatch: Any, is_streamed: bool) -> None:
    """The step that computes all choices waits until they are cancelled."""
    engine, step, seen, all_seen = llm.host.engine, llm.host.engine.step, set[Any](), threading.Event()

    def waiting_step() -> Any:
        seen.update(engine.sequences)
        if len(seen) == 3:
            all_seen.set()
            until(lambda: all(each._is_cancelled for each in seen))
        return step()

    monkeypatch.setattr(engine, "step", waiting_step)
    asked = {"messages": MESSAGES, "n": 3, "max_tokens": 300, "ignore_eos": True, "stop": "never said"}
    with Connection(served.port) as connection:
        connection.send(post(CHAT, asked | {"stream": is_streamed}))
        assert all_seen.wait(SECONDS)
    until(lambda: not engine.sequences)
    assert [each.finish_reason for each in seen] == ["abort"] * 3


# Refusals

BAD_REQUESTS = [json.loads(line) for line in (DATA.parent / "bad_requests.jsonl").read_text().splitlines()]


def test_each_of_many_bad_requests_is_refused_by_what_is_bad_in_it(served: Served) -> None:
    wrong = list[Any]()
    for bad in BAD_REQUESTS:
        answer = served.client.post(bad["path"], json=bad["body"])
        error = answer.json()["error"]
        found = {"status": answer.status_code, **{name: error[name] for name in ("type", "param", "code")}}
        if found != {name: bad[name] for name in found} or not validator("ErrorResponse").is_valid(answer.json()):
            wrong.append((bad, answer.text))
    assert wrong == []
    assert len(BAD_REQUESTS) > 250


@cases("name hint",
    ("temprature", "temperature"), ("guided_json", "response_format"), ("guided_grammar", "grammar"),
    ("n_probs", "top_logprobs"), ("messsages", "messages"), ("top_logprob", "top_logprobs"),
)  # fmt: skip
def test_an_unknown_field_is_answered_with_the_one_that_is_meant(served: Served, name: str, hint: str) -> None:
    assert re.search(f"{name}.*{hint}", served.refusal(CHAT, **{"messages": PLAIN, name: 1})["message"])


def test_a_refusal_has_its_own_status_where_a_stream_was_asked_for(served: Served) -> None:
    long = [{"role": "user", "content": "x" * 500}]
    for body in ({"messages": long}, {"messages": PLAIN, "regex": "("}, {"messages": PLAIN, "n": 2, "stop": 1}):
        answer = served.client.post(CHAT, json=body | {"stream": True})
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")


@cases("name kind",
    ("CreateChatCompletionRequest", ChatBody), ("CreateCompletionRequest", CompletionBody),
    ("CreateResponse", ResponseBody),
)  # fmt: skip
def test_every_field_of_openai_s_is_known(name: str, kind: Any) -> None:
    schemas = json.loads(DATA.read_text(encoding="utf-8"))["components"]["schemas"]

    def fields_of(schema: dict[str, Any]) -> set[str]:
        inner = [schemas[each["$ref"].split("/")[-1]] if "$ref" in each else each for each in schema.get("allOf", [])]
        return set(schema.get("properties", {})).union(*map(fields_of, inner))

    assert fields_of(schemas[name]) - set(kind.__struct_fields__) - set(kind.foreign) == set()


VALUES = [None, True, 0, -1, 10**30, 0.5, "", "a", [], ["a"], [1], [[]], {}, {"a": 1}, {"type": "text"}]


def objects(draw: random.Random, names: list[str]) -> dict[str, Any]:
    """Draw objects with up to three fields of any value."""
    return {name: draw.choice(VALUES) for name in draw.sample(names, draw.randrange(4))}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponseBody])
def test_a_body_is_read_or_refused_by_a_path_that_it_has(kind: Any, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(250):
        fields = objects(draw, [*ChatBody.__struct_fields__, "input", "prompt", "x"])
        messages = [objects(draw, ["role", "content", "name", "x"]) for _ in range(draw.randrange(3))]
        check_read_or_refused(kind, {"messages": messages, "input": messages} | fields)


def check_read_or_refused(kind: Any, body: dict[str, Any]) -> None:
    try:
        read_body(msgspec.json.encode(body), kind)
        return
    except BodyError as found:
        error = found
    assert error.code
    steps = re.findall(r"[^.\[\]]+", error.param or "")
    place: Any = body
    for step in steps[:-1]:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if steps and error.code != "missing_required_parameter":
        assert int(steps[-1]) < len(place) if isinstance(place, list) else steps[-1] in place


# Models


def test_the_model_is_found_by_its_name_alone(served: Served) -> None:
    models, found = (served.client.get(path).json() for path in ("/v1/models", "/v1/models/tiny"))
    check("ListModelsResponse", models)
    check("Model", found)
    assert models["data"] == [found]
    answer = served.client.get("/v1/models/a/b")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    check("ErrorResponse", answer.json())
    assert served.ask(CHAT, messages=PLAIN, max_tokens=1)["model"] == "tiny"


def test_params_of_the_model_hold_where_a_body_has_none(served: Served, llm: LLM) -> None:
    assert llm.default_params(is_chat=True) == SamplingParams(max_new_tokens=512, temperature=0.7, top_p=0.95)
    answer = ask(served, CHAT, messages=MESSAGES, seed=8)
    assert answer["choices"][0]["token_ids"] == llm.chat(PLAIN, seed=8).token_ids


def test_no_character_of_a_text_ends_a_line_of_a_stream(served: Served) -> None:
    """httpx's `iter_lines` ends a line at each of these characters, as `str.splitlines` does."""
    text = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i"
    assert len(text.splitlines()) == 9
    body = {"messages": PLAIN, "max_tokens": 60, "choice": [text], "stream": True}
    with served.client.stream("POST", CHAT, json=body) as answer:
        chunks = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]) == text
