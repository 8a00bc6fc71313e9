"""Others' clients from their packages against served models: conversations, schemas, tools, vectors and errors."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from assets import asset
from infer import LLM
from served import SECONDS, Served, serving

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
    assert isinstance(chain.with_structured_output(City, method="json_schema").invoke(QUESTION), City)
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
    turn = {"role": "assistant", "content": message.content}
    asked["messages"] = [*MESSAGES, turn, {"role": "user", "content": [result]}]
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
    model = f"- model_id: served\n  model_name: smollm2\n  api_base: {served.url}/v1\n  supports_schema: true\n"
    (home / "extra-openai-models.yaml").write_text(model)
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


# Helpers for tools


instructor = pytest.importorskip("instructor")
langchain_messages = pytest.importorskip("langchain_core.messages")
langchain_tools = pytest.importorskip("langchain_core.tools")
pydantic_ai = pytest.importorskip("pydantic_ai")
pydantic_ai_models = pytest.importorskip("pydantic_ai.models.openai")
pydantic_ai_providers = pytest.importorskip("pydantic_ai.providers.openai")


AI_SDK = Path(__file__).parent / "ai_sdk_client.mjs"
WEATHER = "What is the weather in Paris?"
ASKED: list[Any] = [{"role": "user", "content": WEATHER}]


class CountryCity(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    country: Literal["France", "Italy"]


class Weather:
    """A tool that records its arguments."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_weather(self, city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city.

        Args:
            city: Its name.
        """
        self.asked.append(city)
        return f"{city}: rain"


@pytest.fixture
def weather() -> Weather:
    return Weather()


# pydantic-ai


@pytest.fixture
def model(served: Served) -> Any:
    settings = {"temperature": 0.0, "max_tokens": 100, "parallel_tool_calls": False}
    provider = pydantic_ai_providers.OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    return pydantic_ai_models.OpenAIChatModel("smollm2", provider=provider, settings=settings)


def test_pydantic_ai_runs_a_tool_and_gets_a_text(model: Any, weather: Weather) -> None:
    def forced_at_first(context: Any) -> dict[str, Any]:
        return {"tool_choice": "none" if weather.asked else "required"}

    agent = pydantic_ai.Agent(model, tools=[weather.get_weather], model_settings=forced_at_first)
    found = agent.run_sync(WEATHER)
    assert weather.asked
    assert found.output


def test_pydantic_ai_gets_a_value_whole_and_streamed(model: Any) -> None:
    agent = pydantic_ai.Agent(model, output_type=CountryCity)
    found = agent.run_sync(WEATHER).output
    assert isinstance(found, CountryCity)
    assert agent.run_stream_sync(WEATHER).get_output() == found


# instructor


def test_instructor_gets_a_value_partial_ones_and_several(served: Served) -> None:
    openai_client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS)
    asked: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "temperature": 0, "max_tokens": 100}
    asked["max_retries"] = 0
    found = client.create(response_model=CountryCity, **asked)
    assert isinstance(found, CountryCity)
    *_, last = client.create_partial(response_model=CountryCity, **asked)
    assert (last.name, last.country) == (found.name, found.country)
    assert all(isinstance(each, CountryCity) for each in client.create_iterable(response_model=CountryCity, **asked))


# LangChain


def test_langchain_runs_a_tool_and_gives_its_result(served: Served, weather: Weather) -> None:
    tool = langchain_tools.tool(weather.get_weather)
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(model="smollm2", base_url=f"{served.url}/v1", api_key="none", **settings)
    messages = [langchain_messages.HumanMessage(WEATHER)]
    messages.append(chat.bind_tools([tool], tool_choice="any", parallel_tool_calls=False).invoke(messages))
    messages += [tool.invoke(call) for call in messages[-1].tool_calls]
    assert weather.asked
    assert messages[-1].content.endswith("rain")
    assert chat.bind_tools([tool], tool_choice="none").invoke(messages).content


# Anthropic's client


def test_anthropic_s_tool_runner_goes_on_with_results(served: Served, weather: Weather) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 100, "messages": ASKED, "max_iterations": 2}
    asked["tools"] = [anthropic.beta_tool(weather.get_weather)]
    asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    first, second = client.beta.messages.tool_runner(**asked)
    assert [first.stop_reason, second.stop_reason] == ["tool_use"] * 2
    assert len(weather.asked) == 2
    assert second.usage.input_tokens > first.usage.input_tokens
    *_, last = (stream.get_final_message() for stream in client.beta.messages.tool_runner(**asked, stream=True))
    assert last.content[0].name == "get_weather"


# Vercel's client


def test_vercel_s_ai_sdk_runs_tools_in_steps(served: Served, node: str) -> None:
    command = [node, str(AI_SDK), str(asset("clients/ai")), f"{served.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for way in ("generated", "streamed"):
        assert found[way]["cities"][0] in ("Paris", "Rome")
        assert found[way]["results"][0].endswith("rain")
        assert found[way]["text"]
        assert found[way]["reasons"] == ["tool-calls", found[way]["reasons"][1]]
    assert found["object"]["name"] in ("Paris", "Rome")


# Ollama's client


ollama = pytest.importorskip("ollama")

GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def ollama_client(served: Served) -> Iterator[Any]:
    with ollama.Client(served.url) as ollama_client:
        yield ollama_client


def test_ollama_s_answers_and_streams_are_the_library_s(ollama_client: Any, served: Served, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, temperature=0, max_new_tokens=24)
    whole = ollama_client.chat("smollm2", MESSAGES, options=GREEDY, logprobs=True, top_logprobs=2)
    assert (whole.message.content, whole.eval_count) == (expected.text, expected.generated_tokens)
    assert len(whole.logprobs[0].top_logprobs) == 2
    parts = ollama_client.chat("smollm2:latest", MESSAGES, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in parts) == expected.text
    text = llm.generate("Once upon a time", temperature=0, max_new_tokens=24).text
    assert ollama_client.generate("smollm2", "Once upon a time", raw=True, options=GREEDY).response == text

    async def read() -> str:
        async with ollama.AsyncClient(served.url) as ollama_client:
            stream = await ollama_client.chat("smollm2", MESSAGES, options=GREEDY, stream=True)
            return "".join([part.message.content async for part in stream])

    assert asyncio.run(read()) == expected.text


def test_formats_and_tools_are_followed(ollama_client: Any) -> None:
    def capital_of(country: str) -> str:
        """Look up a capital.

        Args:
            country: The country.
        """
        return {"France": "Paris"}.get(country, "Rome")

    found = ollama_client.chat("smollm2", MESSAGES, format=City.model_json_schema(), options={"temperature": 0})
    assert City.model_validate_json(found.message.content)
    options = GREEDY | {"num_predict": 200, "tool_choice": "required", "parallel_tool_calls": False}
    called = ollama_client.chat("smollm2", MESSAGES, tools=[capital_of], options=options).message
    (call,) = called.tool_calls
    result = {"role": "tool", "tool_name": call.function.name, "content": capital_of(**call.function.arguments)}
    last = ollama_client.chat("smollm2", [*MESSAGES, called, result], tools=[capital_of], options=GREEDY)
    assert last.message.content


def test_lists_vectors_and_refusals_have_its_shapes(ollama_client: Any) -> None:
    assert [model.model for model in ollama_client.list().models] == ["smollm2:latest"]
    (loaded,) = ollama_client.ps().models
    assert (loaded.context_length, loaded.size_vram) == (1024, 0)
    assert ollama_client.show("smollm2").modelinfo["general.parameter_count"] == 134_515_008
    assert len(ollama_client.embed("smollm2", ["a", "b"]).embeddings[1]) == 576
    assert [state.status for state in ollama_client.pull("smollm2", stream=True)][-1] == "success"
    assert ollama_client.generate("smollm2", "", keep_alive=0).done_reason == "unload"
    with pytest.raises(ollama.ResponseError, match="leave the image out"):
        ollama_client.chat("smollm2", [{"role": "user", "content": "x", "images": [b"png"]}])
    with pytest.raises(ollama.ResponseError, match="not a name on the hub"):
        list(ollama_client.pull("llama3.2", stream=True))


# Clients for vectors and ranks


cohere = pytest.importorskip("cohere")
langchain_cohere = pytest.importorskip("langchain_cohere")
langchain_documents = pytest.importorskip("langchain_core.documents")
llama_index = pytest.importorskip("llama_index.embeddings.openai_like")

TEXTS, QUERY = ["a roof", "a bridge", "a fire"], "cats"


@pytest.fixture(scope="module")
def vectors(embedder: LLM) -> Iterator[Served]:
    with serving(embedder, model="tiny") as served:
        yield served


@pytest.fixture(scope="module")
def ranks(judge: LLM) -> Iterator[Served]:
    with serving(judge, model="tiny") as served:
        yield served


def close_to(expected: Any) -> Any:
    return [pytest.approx(each, abs=1e-6) for each in expected.tolist()]


@pytest.mark.parametrize("asked", [{}, {"dimensions": 8}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_openai_s_client_gets_the_library_s_vectors(vectors: Served, embedder: LLM, asked: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"{vectors.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS, **asked)
    found = [each.embedding for each in answer.data]
    if asked.get("encoding_format") == "base64":  # the client does not decode it if a caller requested it
        assert all(isinstance(each, str) for each in found)
        return
    assert found == close_to(embedder.embed(TEXTS, dimensions=asked.get("dimensions")))
    assert answer.usage.prompt_tokens > 0


def test_langchain_embeds_documents_and_a_query(vectors: Served, embedder: LLM) -> None:
    # By default it sends ids of OpenAI's own tokenizer.
    settings: dict[str, Any] = {"api_key": "none", "dimensions": 16, "check_embedding_ctx_length": False}
    client = langchain_openai.OpenAIEmbeddings(model="tiny", base_url=f"{vectors.url}/v1", **settings)
    assert client.embed_documents(TEXTS) == close_to(embedder.embed(TEXTS, dimensions=16))
    (expected,) = close_to(embedder.embed([QUERY], dimensions=16))
    assert client.embed_query(QUERY) == expected
    assert asyncio.run(client.aembed_documents([QUERY])) == [expected]


def test_llama_index_embeds_texts_and_a_query(vectors: Served, embedder: LLM) -> None:
    client = llama_index.OpenAILikeEmbedding(model_name="tiny", api_base=f"{vectors.url}/v1", api_key="none")
    assert client.get_text_embedding_batch(TEXTS) == close_to(embedder.embed(TEXTS))
    assert [client.get_query_embedding(QUERY)] == close_to(embedder.embed([QUERY]))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cohere_s_clients_rank_documents(ranks: Served, judge: LLM, version: str) -> None:
    expected = judge.rerank(QUERY, TEXTS, top_n=2)
    if version == "v2":
        client = cohere.ClientV2(api_key="none", base_url=ranks.url)
        answer = client.rerank(model="tiny", query=QUERY, documents=TEXTS, top_n=2, max_tokens_per_doc=4096)
    else:
        client = cohere.Client(api_key="none", base_url=ranks.url)
        documents = [{"text": text, "title": "t"} for text in TEXTS]
        answer = client.rerank(model="tiny", query=QUERY, documents=documents, top_n=2, return_documents=True)
        assert [each.document.text for each in answer.results] == [each.document for each in expected]
    found = [(each.index, each.relevance_score) for each in answer.results]
    assert found == [(each.index, each.score) for each in expected]
    with pytest.raises(cohere.BadRequestError, match="documents"):
        client.rerank(model="tiny", query=QUERY, documents=[])


def test_langchain_s_reranker_keeps_the_best_documents(ranks: Served, judge: LLM) -> None:
    client = langchain_cohere.CohereRerank(model="tiny", base_url=ranks.url, cohere_api_key="none", top_n=2)
    documents = [langchain_documents.Document(page_content=text) for text in TEXTS]
    kept = client.compress_documents(documents, QUERY)
    found = [(each.page_content, each.metadata["relevance_score"]) for each in kept]
    assert found == [(each.document, each.score) for each in judge.rerank(QUERY, TEXTS, top_n=2)]
