"""Claims about tokenizers in GGUF's format: they have the ids of the `tokenizers` library, or are refused in a line."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from encoder_tokenizers import SENTENCES
from infer.errors import UnsupportedModelError
from infer.models.gguf_export.pre_tokenizer_names import _TEXTS, _all_triples
from infer.models.gguf_export.tokenizer_values import tokenizer_values
from infer.text.tokenizer import Tokenizer as OurTokenizer
from infer.text.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from refusals import refusal

_ENDS = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
_TWO_BEGINNINGS = processors.TemplateProcessing(single="<s> </s> $A", special_tokens=[("<s>", 0), ("</s>", 1)])


def byte_level(pre: str = "qwen2") -> Tokenizer:
    rules = PRE_TOKENIZERS[pre]
    backend = Tokenizer(models.BPE(ignore_merges=rules.ignore_merges))
    backend.normalizer = normalizers.NFC() if rules.composes else None
    backend.pre_tokenizer, backend.decoder = rules.make(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(SENTENCES, trained)
    backend.add_special_tokens(["<|turn_end|>", "<|call_end|>"])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return backend


def marked(*, has_prefix: bool) -> Tokenizer:
    """Return a tokenizer in SentencePiece's format, like that of Llama 2 with a prefix, or like Gemma's."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    to_mark = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_mark]) if has_prefix else to_mark
    trained = trainers.BpeTrainer(vocab_size=500, special_tokens=names, limit_alphabet=60)
    backend.train_from_iterator((word for text in SENTENCES for word in text.split()), trained)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    vocabulary, made = state["model"]["vocab"], ["".join(merge) for merge in state["model"]["merges"]]
    splits = [[(text[:at], text[at:]) for at in range(len(text) - 1, 0, -1)] for text in made]
    state["model"]["merges"] = [pair for pairs in splits for pair in pairs if {*pair} <= set(vocabulary)]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_tokens([AddedToken("▁▁▁", normalized=False)])
    return backend


def save(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return folder


def assert_same_ids(backend: Tokenizer, values: dict[str, Any]) -> None:
    again = OurTokenizer.from_gguf(values)
    for text in (*SENTENCES, "  a   b <tool_call>c", "\n\n\t x", ""):
        assert again.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-4o", "deepseek-v3", "smollm"])
def test_byte_level_bpe_is_written_under_the_name_of_its_rules(tmp_path: Path, pre: str) -> None:
    backend = byte_level(pre)
    backend.post_processor = _ENDS
    values = tokenizer_values(save(tmp_path, backend), "llama", 420)
    assert (values["tokenizer.ggml.pre"], values["tokenizer.ggml.model"]) == (pre, "gpt2")
    assert (values["tokenizer.ggml.add_bos_token"], values["tokenizer.ggml.add_eos_token"]) == (True, True)
    assert len(values["tokenizer.ggml.tokens"]) == len(values["tokenizer.ggml.token_type"]) == 420
    assert values["tokenizer.ggml.tokens"][-1] == "[PAD419]"
    assert_same_ids(backend, values)


@pytest.mark.parametrize(("has_prefix", "name"), [(True, "llama"), (False, "gemma3"), (False, "gemma4")])
def test_sentencepieces_form_has_scores_that_stand_for_the_merges(tmp_path: Path, has_prefix: bool, name: str) -> None:
    backend = marked(has_prefix=has_prefix)
    values = tokenizer_values(save(tmp_path, backend, unk_token="<unk>"), name, 510)
    assert values["tokenizer.ggml.model"] == ("gemma4" if name == "gemma4" else "llama")
    assert values["tokenizer.ggml.add_space_prefix"] is has_prefix
    types = values["tokenizer.ggml.token_type"]
    assert (types[:4], types.count(6), types.count(4), types[-1]) == ([2, 3, 3, 6], 256, 1, 5)
    assert values["tokenizer.ggml.tokens"][types.index(4)] == ("▁▁▁" if name == "gemma4" else "   ")
    assert_same_ids(backend, values)


def test_ids_that_end_an_answer_and_all_templates_are_written(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    save(tmp_path, byte_level(), chat_template=templates, pad_token="<tool_call>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 401, 400, 0]}')
    with pytest.warns(UserWarning, match=r"three tokens that end an answer: \['<s>'\] will not end one"):
        values = tokenizer_values(tmp_path, "qwen2", 403)
    ids = {key.split(".")[-1]: value for key, value in values.items() if key.endswith("_id")}
    assert ids == {
        "bos_token_id": 0, "eos_token_id": 1, "eot_token_id": 401, "eom_token_id": 400, "padding_token_id": 402,
    }  # fmt: skip
    assert (values["tokenizer.ggml.add_bos_token"], values["tokenizer.chat_template"]) == (False, "{{ 1 }}")
    assert values["tokenizer.chat_templates"] == ["tool_use"]
    assert values["tokenizer.chat_template.tool_use"] == "{{ 2 }}"


def without_a_merge(backend: Tokenizer) -> Tokenizer:
    state = json.loads(backend.to_str())
    del state["model"]["merges"][5]
    return Tokenizer.from_str(json.dumps(state))


def changed(**parts: Any) -> Tokenizer:
    backend = byte_level()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(pre_tokenizer=pre_tokenizers.Split(Regex(r"\d{2}"), "isolated")), r"no pre-tokeni.*\\d\{2\}"),
        (lambda: changed(normalizer=normalizers.Lowercase()), "with the normalizer Lowercase has no form in GGUF"),
        (lambda: changed(post_processor=_TWO_BEGINNINGS), r"from \['</s>', "),
        (lambda: without_a_merge(marked(has_prefix=False)), "cannot be written as SentencePiece's scores"),
        (lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "no form for the tokenizer of llama: WordLevel"),
    ],
    ids=["pattern", "normalizer", "two beginnings", "merges", "model"],
)
def test_a_tokenizer_unknown_to_gguf_is_refused(tmp_path: Path, make: Callable[[], Tokenizer], message: str) -> None:
    folder = save(tmp_path, make())
    assert re.search(message, refusal(lambda: tokenizer_values(folder, "llama", 500), UnsupportedModelError))


def test_a_flag_that_changes_no_token_does_not_matter(tmp_path: Path) -> None:
    backend = byte_level("gpt-4o")
    assert isinstance(backend.model, models.BPE)
    backend.model.ignore_merges = True
    assert tokenizer_values(save(tmp_path, backend), "gpt-oss", 403)["tokenizer.ggml.pre"] == "gpt-4o"
    unreachable = json.loads(backend.to_str())
    unreachable["model"]["vocab"] |= {"zzq": 450}
    with pytest.raises(UnsupportedModelError, match="with ignore_merges=True merges text"):
        tokenizer_values(save(tmp_path, Tokenizer.from_str(json.dumps(unreachable))), "gpt-oss", 451)


@pytest.mark.slow
def test_the_probe_has_all_triples_and_tells_all_rules_apart() -> None:
    probe = _all_triples()
    assert len({probe[at : at + 3] for at in range(len(probe))}) == len(probe) == len(set(probe)) ** 3
    cuts: dict[str, PreTokenizer] = {}
    for name, rules in PRE_TOKENIZERS.items():
        if not rules.marks_spaces and rules != PRE_TOKENIZERS["bailingmoe"]:  # the rules of qwen2 in other words
            shown = replace(rules, composes=False, ignore_merges=False, adds_bos=False, num_separators=0)
            cut = str([shown.make().pre_tokenize_str(text) for text in _TEXTS])
            assert cuts.setdefault(cut, shown) == shown, name
