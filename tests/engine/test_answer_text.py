"""An answer's text is the decoded prompt and answer without the decoded prompt, with a decoder that drops a space."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from hostile_files import VOCAB_SIZE, gguf_number, gguf_numbers, gguf_text, gguf_texts, write_folder, write_gguf
from infer import LLM
from infer.outputs import GenerationResult
from refusals import check_refused
from served import Served

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "Hello", "▁Hello"]
HELLO = 261
NO_SCORES = struct.pack(f"<IIQ{VOCAB_SIZE}f", 9, 6, VOCAB_SIZE, *[0.0] * VOCAB_SIZE)  # an array of f32 in GGUF
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_tokenizer(folder: Path, *last_steps: decoders.Decoder) -> None:
    vocabulary = {text: i for i, text in enumerate(PIECES)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[("▁", "Hello")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last_steps]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in PIECES[:3]])
    backend.add_tokens([AddedToken("Hello", normalized=False)])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["folder", "gguf"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("models")
    assert len(PIECES) == VOCAB_SIZE
    if request.param == "folder":
        path = write_folder(folder / "tiny", generation_config_json={"eos_token_id": 2})
        write_tokenizer(path, decoders.Strip(" ", 1, 0))
    else:
        values = {
            "model": gguf_text("llama"), "tokens": gguf_texts(PIECES), "merges": None, "pre": None,
            "token_type": gguf_numbers([2, 3, 3, *[6] * 256, 1, 1, 1]), "scores": NO_SCORES,
            "bos_token_id": gguf_number(1), "eos_token_id": gguf_number(2), "unknown_token_id": gguf_number(0),
        }  # fmt: skip
        changes = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
        path = write_gguf(folder / "tiny.gguf", changes | {"tokenizer.chat_template": gguf_text(TEMPLATE)})
    with LLM(path) as llm:
        yield llm


ONLY = {"allowed_token_ids": [HELLO]}
RIGHT = " Hello" * 3


@pytest.mark.parametrize("prompt", ["Hello", "", [1], [1, HELLO], [HELLO], [259]])
def test_an_answer_keeps_its_first_space_after_any_prompt(llm: LLM, prompt: str | list[int]) -> None:
    """BOS is a token of the prompt, so an answer after only BOS is not the beginning of the text either."""
    answer = llm.generate(prompt, max_new_tokens=3, logprobs=0, **ONLY)
    ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    decode = llm.tokenizer.backend.decode
    whole = decode([*ids, *answer.token_ids], skip_special_tokens=False)
    assert answer.text == RIGHT == whole.removeprefix(decode(ids, skip_special_tokens=False))
    assert answer.text == b"".join(llm.tokenizer.token_bytes[each] for each in answer.token_ids).decode()
    assert [event.text for event in llm.stream(prompt, max_new_tokens=3, **ONLY) if event.text] == [" Hello"] * 3


def test_batches_chats_sessions_and_forks_keep_it_too(llm: LLM) -> None:
    settings = {"max_new_tokens": 3, **ONLY}
    batch = llm.generate(["Hello", "", "Hello Hello"], **settings)
    going_on = {"continue_final_message": True, "add_generation_prompt": False, **settings}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Hello"}]
    found: list[GenerationResult] = [*batch, llm.chat(turns, **going_on), llm.chat(turns[:1], **settings)]
    with llm.session() as session:
        found.append(session.send("Hello", **settings))
        with session.fork() as fork:
            found.append(fork.send("Hello", **settings))
    assert [answer.text for answer in found] == [RIGHT] * len(found)


@pytest.mark.parametrize("prompt", ["Hello", ""])
def test_grammars_and_stop_strings_see_the_text_that_is_returned(llm: LLM, prompt: str) -> None:
    assert llm.generate(prompt, regex=" Hello", max_new_tokens=9).text == " Hello"
    assert llm.generate(prompt, regex="Hello", max_new_tokens=9).text == "Hello"
    assert llm.generate(prompt, choice=[" Hello", " Hi"], max_new_tokens=9).text in (" Hello", " Hi")
    stopped = llm.generate(prompt, stop=[" Hello"], max_new_tokens=3, **ONLY)
    assert (stopped.text, stopped.finish_reason, len(stopped.token_ids)) == ("", "stop", 1)


def test_every_route_returns_it(served: Served) -> None:
    def post(path: str, **body: object) -> dict[str, object]:
        return served.client.post(path, json={"model": "tiny", **body}).json()

    asked = {"prompt": "Hello", "max_tokens": 3, **ONLY}
    echoed = post("/v1/completions", **asked, echo=True, logprobs=0)["choices"][0]
    assert (echoed["text"], "".join(echoed["logprobs"]["tokens"][-3:])) == ("Hello" + RIGHT, RIGHT)
    assert echoed["logprobs"]["text_offset"][-3:] == [5, 11, 17]
    assert post("/v1/completions", **asked)["choices"][0]["text"] == RIGHT
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, **ONLY}
    assert post("/v1/chat/completions", **chat)["choices"][0]["message"]["content"] == RIGHT
    options = {"num_predict": 3, **ONLY}
    assert post("/api/generate", prompt="Hello", raw=True, stream=False, options=options)["response"] == RIGHT
    assert post("/completion", prompt="Hello", n_predict=3, **ONLY)["content"] == RIGHT


def test_text_that_the_decoder_replaces_across_tokens_is_that_of_the_whole(tmp_path: Path) -> None:
    """Lucie's decoder drops the space after a line end. A grammar cannot hold such a text, and says so."""
    write_tokenizer(write_folder(tmp_path), decoders.Replace("\n ", "\n"), decoders.Replace("' ", "'"))
    newline = 3 + 10
    with LLM(tmp_path) as llm:
        assert llm.generate([1, newline], max_new_tokens=2, **ONLY).text == "Hello Hello"
        assert llm.generate([1, HELLO], max_new_tokens=2, **ONLY).text == " Hello Hello"
        asked = {"allowed_token_ids": [newline, HELLO], "temperature": 1.0, "max_new_tokens": 40}
        for seed in range(5):
            answer = llm.generate([1, newline], seed=seed, **asked)
            whole = llm.tokenizer.backend.decode([newline, *answer.token_ids])
            assert answer.text == whole[1:]
            assert "".join(event.text for event in llm.stream([1, newline], seed=seed, **asked)) == answer.text
        check_refused(lambda: llm.generate("a", regex="Hello"), "replaces text across tokens")
