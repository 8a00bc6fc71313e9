"""Routes answer conversations that a template does not take as they are, and refuse those that it would lose."""

from typing import Any

import pytest

from infer import LLM
from served import Served

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
)
LOOP = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}{{ '\\n' }}{% endfor %}"
)
MODEL = {"context": 1024}
ROUTES = {
    "/v1/chat/completions": ("messages", {"max_tokens": 1}),
    "/v1/responses": ("input", {"max_output_tokens": 1}),
    "/v1/messages": ("messages", {"max_tokens": 1}),
    "/api/chat": ("messages", {"stream": False, "options": {"num_predict": 1}}),
}


def turns(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in pairs]


LEADING = turns(("system", "a"), ("system", "b"), ("user", "c"))
LATE = turns(("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"))


def body_of(path: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    name, limits = ROUTES[path]
    return {name: messages, **limits}


def num_prompt_tokens(served: Served, path: str, messages: list[dict[str, Any]]) -> int:
    answer = served.ask(path, **body_of(path, messages))
    usage = answer.get("usage", answer)
    return next(usage[name] for name in ("prompt_tokens", "input_tokens", "prompt_eval_count") if name in usage)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("messages", [LEADING, LATE], ids=["leading", "late"])
def test_system_messages_in_odd_places_are_repaired_alike(served: Served, llm: LLM, path: str, messages: Any) -> None:
    llm.tokenizer.replace_chat_template(STRICT)
    assert num_prompt_tokens(served, path, messages) == len(llm.tokenizer.encode_chat(messages))


@pytest.mark.parametrize("path", ROUTES)
def test_a_template_that_reads_parts_sees_the_question(served: Served, llm: LLM, path: str) -> None:
    llm.tokenizer.replace_chat_template(LOOP)
    prompt = "user: Is this safe?\n"
    parts = [{"type": "text", "text": "Is this"}, {"type": "text", "text": " safe?"}]
    for content in ("Is this safe?", *([parts] if path != "/api/chat" else [])):  # Ollama's contents are texts
        messages = [{"role": "user", "content": content}]
        assert num_prompt_tokens(served, path, messages) == len(llm.tokenizer.encode(prompt))
        assert served.ask("/apply-template", messages=messages)["prompt"] == prompt
    assert llm.chat(turns(("user", "Is this safe?")), max_new_tokens=1).prompt_tokens == len(
        llm.tokenizer.encode(prompt)
    )


@pytest.mark.parametrize("path", ROUTES)
def test_a_question_that_the_template_loses_is_refused(served: Served, llm: LLM, path: str) -> None:
    llm.tokenizer.replace_chat_template("{{ messages[0].content }}")
    refused = served.refusal(path, **body_of(path, turns(("user", "Hello"), ("assistant", "Yes"), ("user", "e"))))
    assert "leaves out the text of the user's last message" in str(refused)


def test_parts_of_a_request_keep_their_own_keys(served: Served, llm: LLM) -> None:
    llm.tokenizer.replace_chat_template("{% set part = messages[0].content[0] %}{{ part.language }}: {{ part.text }}")
    part = {"type": "text", "language": "en", "text": "Hello"}
    assert served.ask("/apply-template", messages=[{"role": "user", "content": [part]}])["prompt"] == "en: Hello"
