"""Ollama's own Python client against a served SmolLM2 returns the library's results."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from infer import LLM
from served import Served

pytestmark = pytest.mark.slow

ollama = pytest.importorskip("ollama")

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 24}


class City(BaseModel):
    """The schema of the requested answer."""

    name: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with ollama.Client(served.url) as client:
        yield client


def test_answers_and_streams_are_the_library_s(client: Any, served: Served, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, temperature=0, max_new_tokens=24)
    whole = client.chat("smollm2", MESSAGES, options=GREEDY, logprobs=True, top_logprobs=2)
    assert (whole.message.content, whole.eval_count) == (expected.text, expected.generated_tokens)
    assert len(whole.logprobs[0].top_logprobs) == 2
    parts = client.chat("smollm2:latest", MESSAGES, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in parts) == expected.text
    text = llm.generate("Once upon a time", temperature=0, max_new_tokens=24).text
    assert client.generate("smollm2", "Once upon a time", raw=True, options=GREEDY).response == text

    async def read() -> str:
        async with ollama.AsyncClient(served.url) as client:
            stream = await client.chat("smollm2", MESSAGES, options=GREEDY, stream=True)
            return "".join([part.message.content async for part in stream])

    assert asyncio.run(read()) == expected.text


def test_formats_and_tools_are_followed(client: Any) -> None:
    def capital_of(country: str) -> str:
        """Look up a capital.

        Args:
            country: The country.
        """
        return {"France": "Paris"}.get(country, "Rome")

    found = client.chat("smollm2", MESSAGES, format=City.model_json_schema(), options={"temperature": 0})
    assert City.model_validate_json(found.message.content)
    options = GREEDY | {"num_predict": 200, "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat("smollm2", MESSAGES, tools=[capital_of], options=options).message
    (call,) = called.tool_calls
    result = {"role": "tool", "tool_name": call.function.name, "content": capital_of(**call.function.arguments)}
    last = client.chat("smollm2", [*MESSAGES, called, result], tools=[capital_of], options=GREEDY)
    assert last.message.content


def test_lists_vectors_and_refusals_have_its_shapes(client: Any) -> None:
    assert [model.model for model in client.list().models] == ["smollm2:latest"]
    (loaded,) = client.ps().models
    assert (loaded.context_length, loaded.size_vram) == (1024, 0)
    assert client.show("smollm2").modelinfo["general.parameter_count"] == 134_515_008
    assert len(client.embed("smollm2", ["a", "b"]).embeddings[1]) == 576
    assert [state.status for state in client.pull("smollm2", stream=True)][-1] == "success"
    assert client.generate("smollm2", "", keep_alive=0).done_reason == "unload"
    with pytest.raises(ollama.ResponseError, match="leave the image out"):
        client.chat("smollm2", [{"role": "user", "content": "x", "images": [b"png"]}])
    with pytest.raises(ollama.ResponseError, match="not a name on the hub"):
        list(client.pull("llama3.2", stream=True))
