"""OpenAI's own Python client against a served model of random weights returns the library's results."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from idle import until_idle
from infer import LLM
from served import Served, serving
from test_session import make_model

pytestmark = pytest.mark.usefixtures("idle_afterwards")

openai = pytest.importorskip("openai")

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool
    founded: Annotated[int, Field(ge=1, le=2026)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_model(tmp_path_factory.mktemp("model"), context=1024)
    with LLM(folder) as llm, serving(llm, model="tiny", allow_embeddings=True) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_conversation_has_the_library_s_answers(client: Any, llm: LLM) -> None:
    messages = list(MESSAGES)
    for question in ("And of Italy?", "Is it large?"):
        answer = client.chat.completions.create(messages=messages, max_tokens=24, **GREEDY)
        expected = llm.chat(messages, temperature=0, max_new_tokens=24)
        assert answer.choices[0].message.content == expected.text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == expected.prompt_tokens
        assert answer.usage.completion_tokens == expected.generated_tokens
        messages += [{"role": "assistant", "content": expected.text}, {"role": "user", "content": question}]


def test_a_stream_joins_to_the_whole_answer_and_has_its_usage_last(client: Any) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, max_tokens=24, **GREEDY)
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(messages=MESSAGES, max_tokens=24, **asked, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert list(filter(None, reasons)) == [whole.choices[0].finish_reason]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert {chunk.id for chunk in chunks} == {last.id}


def test_log_probabilities_join_to_the_text(client: Any) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=3, **GREEDY)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    text = b"".join(bytes(entry.bytes or []) for entry in entries).decode("utf-8", "replace")
    assert text.startswith(choice.message.content or "")
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)  # greedy takes the likeliest
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_a_schema_is_parsed_whole_and_in_a_stream(client: Any) -> None:
    asked = {"messages": MESSAGES, "response_format": City, "max_completion_tokens": 200}  # more than any takes
    assert isinstance(client.chat.completions.parse(**asked, **GREEDY).choices[0].message.parsed, City)
    with client.chat.completions.stream(**asked, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_a_tool_is_called_parsed_and_heard(client: Any) -> None:
    tools = [openai.pydantic_function_tool(City)]
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 200}
    asked["parallel_tool_calls"] = False
    choice = client.chat.completions.parse(**asked, **GREEDY).choices[0]
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, City)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    with client.chat.completions.stream(**asked, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments
    assert "tool_calls.function.arguments.done" in kinds
    result = {"role": "tool", "tool_call_id": call.id, "content": "yes"}
    past = [*MESSAGES, choice.message.model_dump(exclude_none=True, exclude={"parsed"}), result]
    past[-2]["tool_calls"][0]["function"].pop("parsed_arguments")
    answer = client.chat.completions.create(messages=past, tools=tools, tool_choice="none", max_tokens=8, **GREEDY)
    assert answer.choices[0].message.content


def test_a_response_calls_a_tool(client: Any) -> None:
    parameters = {"type": "object", "properties": {"name": {"enum": ["Paris", "Rome"]}}, "required": ["name"]}
    tools = [{"type": "function", "name": "look_up", "parameters": parameters, "strict": False}]
    asked: dict[str, Any] = {"input": "Look up Paris.", "tools": tools, "tool_choice": "required", "temperature": 0}
    response = client.responses.create(model="tiny", parallel_tool_calls=False, max_output_tokens=100, **asked)
    (item,) = response.output
    assert (item.type, item.name) == ("function_call", "look_up")
    with client.responses.stream(model="tiny", parallel_tool_calls=False, max_output_tokens=100, **asked) as stream:
        assert any(event.type == "response.function_call_arguments.delta" for event in stream)
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (item.name, item.arguments)


def test_a_wrong_value_is_an_error_that_names_it(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, top_logprobs=21, logprobs=True)
    assert (caught.value.param, caught.value.type) == ("top_logprobs", "invalid_request_error")


def test_a_prompt_that_does_not_fit_is_an_error_with_the_code_that_clients_know(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="word " * 2000)
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_leaves_a_stream_frees_its_slot(client: Any, served: Served) -> None:
    asked = {"prompt": "Once", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with client.completions.create(stream=True, **asked, **GREEDY) as stream:
        next(iter(stream))
    until_idle(served)


def test_completions_take_texts_and_ids(client: Any, llm: LLM) -> None:
    texts = ["Once upon a time", "The capital of France is"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    expected = [llm.generate(text, temperature=0, max_new_tokens=16).text for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(prompt=prompt, **GREEDY)  # 16 tokens is OpenAI's default
        assert [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)] == expected


def test_responses_have_the_answer_of_chat(client: Any) -> None:
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=16, **GREEDY)
    response = client.responses.create(input=MESSAGES[0]["content"], max_output_tokens=16, **GREEDY)
    assert response.output_text == chat.choices[0].message.content
    with client.responses.stream(input=MESSAGES[0]["content"], max_output_tokens=16, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == response.output_text


def test_embeddings_are_the_same_as_floats_and_packed(client: Any, llm: LLM) -> None:
    texts = ["Once upon a time", "Far away"]
    packed = client.embeddings.create(model="tiny", input=texts)  # base64 on the wire
    floats = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for one, other in zip(packed.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
    assert len({len(each.embedding) for each in packed.data}) == 1


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
