"""Others' clients from their published packages against a served SmolLM2: each a conversation, a stream, a schema, an
error and a cancel.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from served import SECONDS, Served

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it requests prices from the network
anthropic = pytest.importorskip("anthropic")
langchain_openai = pytest.importorskip("langchain_openai")
litellm = pytest.importorskip("litellm")
llm_package = pytest.importorskip("llm")

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
LONG = "Tell me a very long story."

pytestmark = [pytest.mark.usefixtures("idle_afterwards"), pytest.mark.filterwarnings("ignore")]  # theirs


class City(BaseModel):
    """The schema of the requested answer."""

    name: Literal["Paris", "Rome"]


SCHEMA = {**City.model_json_schema(), "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "City", "strict": True, "schema": SCHEMA}}


# litellm


@pytest.fixture
def lite(served: Served) -> dict[str, Any]:
    return {"model": "openai/smollm2", "api_base": f"{served.url}/v1", "api_key": "none", "temperature": 0,
            "max_tokens": 24, "num_retries": 0}  # fmt: skip


def test_litellm_converses_and_streams(lite: dict[str, Any], expected: str) -> None:
    assert litellm.completion(messages=MESSAGES, **lite).choices[0].message.content == expected
    chunks = litellm.completion(messages=MESSAGES, stream=True, **lite)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_litellm_gets_a_schema_and_an_error(lite: dict[str, Any]) -> None:
    found = litellm.completion(messages=MESSAGES, response_format=FORMAT, **lite)
    City.model_validate_json(found.choices[0].message.content)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **lite | {"temperature": 9})


def test_litellm_leaves_a_stream(lite: dict[str, Any]) -> None:
    stream = litellm.completion(messages=[{"role": "user", "content": LONG}], stream=True, **lite | {"max_tokens": 900})
    next(iter(stream))
    stream.completion_stream.response.close()


# LangChain


@pytest.fixture
def chain(served: Served) -> Any:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "max_retries": 0}
    return langchain_openai.ChatOpenAI(model="smollm2", base_url=f"{served.url}/v1", api_key="none", **settings)


def test_langchain_converses_and_streams(chain: Any, expected: str) -> None:
    assert chain.invoke(QUESTION).content == expected
    assert "".join(chunk.content for chunk in chain.stream(QUESTION)) == expected
    assert chain.invoke([("system", "Answer."), ("human", QUESTION)]).usage_metadata["output_tokens"] > 0


def test_langchain_gets_a_schema_and_an_error(chain: Any) -> None:
    structured = chain.with_structured_output(City, method="json_schema")
    assert isinstance(structured.invoke(QUESTION), City)
    with pytest.raises(Exception, match="temperature"):
        chain.bind(temperature=9).invoke(QUESTION)


def test_langchain_binds_a_tool(chain: Any) -> None:
    bound = chain.bind_tools([City], tool_choice="any").bind(max_tokens=200)
    (call, *_) = bound.invoke(QUESTION).tool_calls
    assert City(**call["args"])
    streamed = list(bound.stream(QUESTION))
    assert sum(streamed[1:], streamed[0]).tool_calls[0]["args"] == call["args"]


def test_langchain_leaves_a_stream(chain: Any) -> None:
    stream = chain.bind(max_tokens=900).stream(LONG)
    next(stream)
    stream.close()


# Anthropic's client


@pytest.fixture
def claude(served: Served) -> Any:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def test_anthropic_s_client_converses_and_streams(claude: Any, expected: str) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 24, "messages": MESSAGES}
    asked["extra_body"] = {"temperature": 0}  # newer clients have no keyword for it
    message = claude.messages.create(**asked)
    assert message.content[0].text == expected
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().usage == message.usage
    counted = claude.messages.count_tokens(model="smollm2", messages=MESSAGES)
    assert counted.input_tokens == message.usage.input_tokens


def test_anthropic_s_client_calls_a_tool_and_gives_its_result(claude: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 200, "messages": MESSAGES}
    asked |= {"tools": [{"name": "get_weather", "input_schema": schema}], "extra_body": {"temperature": 0}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = claude.messages.create(**asked, tool_choice=choice)
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert isinstance(block.input["city"], str)
    with claude.messages.stream(**asked, tool_choice=choice) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (block.name, block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    asked["messages"] = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(**asked, tool_choice={"type": "none"}).content[0].type == "text"


def test_anthropic_s_client_gets_an_error_and_leaves_a_stream(claude: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        claude.messages.create(model="smollm2", max_tokens=0, messages=MESSAGES)
    assert caught.value.body["type"] == "error"
    long = [{"role": "user", "content": LONG}]
    with claude.messages.stream(model="smollm2", max_tokens=900, messages=long) as stream:
        next(iter(stream.text_stream))


# llm


def run_llm(served: Served, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: served\n  model_name: smollm2\n  api_base: {served.url}/v1\n  supports_schema: true\n"
    )
    environment = os.environ | {"LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": ""}
    command = [sys.executable, "-m", "llm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)


def test_llm_converses_with_and_without_a_stream(served: Served, expected: str, tmp_path: Path) -> None:
    options = ("-m", "served", "-o", "temperature", "0", "-o", "max_tokens", "24", "--key", "none")
    for way in ((), ("--no-stream",)):
        done = run_llm(served, tmp_path, "prompt", *options, *way, QUESTION)
        assert done.stdout.rstrip("\n") == expected.rstrip("\n"), done.stderr


def test_llm_gets_a_schema_and_an_error(served: Served, tmp_path: Path) -> None:
    options = ("--schema", json.dumps(SCHEMA), QUESTION)
    done = run_llm(served, tmp_path, "prompt", "-m", "served", "--key", "none", *options)
    City.model_validate_json(done.stdout)
    done = run_llm(served, tmp_path, "prompt", "-m", "served", "--key", "none", "word " * 2000)
    assert done.returncode != 0
    assert "tokens" in done.stderr
