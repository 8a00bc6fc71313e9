"""Tools and grammars with real vocabularies and templates: calls are the template's, and texts keep to schemas."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from constraint_walks import allowed_ids, schema_text, walk
from extent import usual_or_all
from infer import Tokenizer
from infer.engine.requests.prompt_encoding import Conversation, TemplateProbes
from infer.engine.step.request_options import RequestOptions
from infer.files import open_checkpoint
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler
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


@pytest.mark.slow(rest=2)
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


# Grammars


VOCAB_SIZE = 49_152 + 40


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(smollm2_path).metadata)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def compiler(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Compiler:
    pytest.importorskip(request.param)
    return Compiler(tokenizer, VOCAB_SIZE, backend=request.param)


def test_texts_of_random_schemas_parse_and_validate(compiler: Compiler, tokenizer: Tokenizer) -> None:
    for seed in range(usual_or_all(60, 500)):
        text = schema_text(1000 + seed, wide=compiler.backend == "llguidance")
        constraint = compiler.compile(Grammar("json_schema", text))
        written = walk(constraint, tokenizer, VOCAB_SIZE, random.Random(seed))
        jsonschema.validate(json.loads(written), json.loads(text))


@pytest.mark.slow(cases=1)
def test_forced_text_is_spelled_as_by_the_tokenizer(compiler: Compiler, tokenizer: Tokenizer) -> None:
    text = json.dumps({"first_name": "x", "last_name": "y", "date_of_birth": "z"})
    properties = {name: {"const": value} for name, value in json.loads(text).items()}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    constraint = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    written: list[int] = []
    num_sampled = 0
    while not constraint.done:
        ids = constraint.forced()
        if not ids:
            num_sampled += 1
            ids = [max(allowed_ids(constraint, VOCAB_SIZE), key=lambda i: len(tokenizer.token_bytes[i]))]
        assert constraint.accept(ids) == len(ids)
        written += ids
    assert tokenizer.decode(written) == text
    assert num_sampled <= 2
    assert written[:12] == tokenizer.encode(text)[:12]
