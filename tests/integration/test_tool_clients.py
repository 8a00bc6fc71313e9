"""Tool helpers of others against a served SmolLM2: each asks, runs the called tool, and answers with its result."""

import json
import subprocess
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from assets import asset
from served import Served

anthropic = pytest.importorskip("anthropic")
instructor = pytest.importorskip("instructor")
langchain_messages = pytest.importorskip("langchain_core.messages")
langchain_tools = pytest.importorskip("langchain_core.tools")
langchain_openai = pytest.importorskip("langchain_openai")
pydantic_ai = pytest.importorskip("pydantic_ai")

from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

AI_SDK = Path(__file__).parent / "ai_sdk_client.mjs"
QUESTION = "What is the weather in Paris?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]

pytestmark = [pytest.mark.usefixtures("idle_afterwards"), pytest.mark.filterwarnings("ignore")]  # theirs


class City(BaseModel):
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
    provider = OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    return OpenAIChatModel("smollm2", provider=provider, settings=settings)


def test_pydantic_ai_runs_a_tool_and_gets_a_text(model: Any, weather: Weather) -> None:
    def forced_at_first(context: Any) -> dict[str, Any]:
        return {"tool_choice": "none" if weather.asked else "required"}

    agent = pydantic_ai.Agent(model, tools=[weather.get_weather], model_settings=forced_at_first)
    found = agent.run_sync(QUESTION)
    assert weather.asked
    assert found.output


def test_pydantic_ai_gets_a_value_whole_and_streamed(model: Any) -> None:
    agent = pydantic_ai.Agent(model, output_type=City)
    found = agent.run_sync(QUESTION).output
    assert isinstance(found, City)
    assert agent.run_stream_sync(QUESTION).get_output() == found


# instructor


def test_instructor_gets_a_value_partial_ones_and_several(served: Served) -> None:
    openai_client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS)
    asked: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "temperature": 0, "max_tokens": 100}
    asked["max_retries"] = 0
    found = client.create(response_model=City, **asked)
    assert isinstance(found, City)
    *_, last = client.create_partial(response_model=City, **asked)
    assert (last.name, last.country) == (found.name, found.country)
    assert all(isinstance(each, City) for each in client.create_iterable(response_model=City, **asked))


# LangChain


def test_langchain_runs_a_tool_and_gives_its_result(served: Served, weather: Weather) -> None:
    tool = langchain_tools.tool(weather.get_weather)
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(model="smollm2", base_url=f"{served.url}/v1", api_key="none", **settings)
    messages = [langchain_messages.HumanMessage(QUESTION)]
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
