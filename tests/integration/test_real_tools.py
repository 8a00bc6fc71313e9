"""Tools with real vocabularies and templates: the format is the template's, and a small model's calls are right."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from infer import Tokenizer
from infer.engine.requests.conversation import Conversation, TemplateProbes
from infer.engine.requests.request_options import RequestOptions
from test_tool_formats import allows, marked, parsed
from watched import script_command

pytestmark = pytest.mark.slow

CHECK = Path(__file__).parents[2] / "benchmarks" / "check_tool_calls.py"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "get_weather", "description": "Of a city.", "parameters": SCHEMA}]
ASKED = {"role": "user", "content": "weather?"}
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
CALL = {"id": "abcdefghi", "type": "function", "function": FUNCTION}
PAST: list[dict[str, Any]] = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
PAST += [{"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"}]
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
CASES = [
    ("deepseek_v3", "deepseek-v3", DEEPSEEK),  # its template shows no tools, so the format must be named
    ("qwen3", "hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'),
    ("gemma3", "json", '{"name": "get_weather", "arguments": {"city": "Paris"}}'),
    ("llama3_1", "json", '{"name": "get_weather", "arguments": {"city": "Paris"}}'),
]


def conversation(tokenizer: Tokenizer, **options: Any) -> Conversation:
    return Conversation(tokenizer, TemplateProbes(tokenizer), RequestOptions(tools=TOOLS, **options), {})


@pytest.mark.parametrize(("name", "form", "call"), CASES)
def test_a_template_shows_a_call_as_its_grammar_does(name: str, form: str, call: str, tokenizers_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(tokenizers_folder / name)
    named = {"tool_format": form} if name == "deepseek_v3" else {}
    found = conversation(tokenizer, tool_choice="required", **named)
    assert found.formats.calls.name == form
    prompt = tokenizer.decode(found.encode(PAST), skip_special_tokens=False)
    assert [part for part in (call, "rain", "Of a city.") if part not in prompt] == []
    answer = found.answer_format(found.encode([ASKED]))
    assert answer is not None
    assert allows(tokenizer, answer, call)
    *_, (read,) = parsed(answer, marked(answer, tokenizer, call))
    assert read.arguments == '{"city": "Paris"}'


def test_reasoning_of_qwen3_is_opened_by_the_model_and_switched_off_by_its_template(tokenizers_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(tokenizers_folder / "qwen3")
    on = conversation(tokenizer)
    answer = on.answer_format(on.encode([ASKED]))
    assert answer
    assert answer.reasoning
    assert (answer.reasoning.opening, answer.is_open) == ("<think>", False)
    off = Conversation(tokenizer, on.probes, RequestOptions(), {"enable_thinking": False})
    assert tokenizer.decode(off.encode([ASKED]), skip_special_tokens=False).endswith("<think>\n\n</think>\n\n")


def test_a_small_model_makes_no_malformed_call(smollm2_path: Path) -> None:
    command = script_command(CHECK, "--model", smollm2_path, "--count", 30)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
