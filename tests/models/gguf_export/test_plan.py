"""Claims about exported GGUF files: a file has the folder's model, ids and vectors, or one line names what it lacks."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from embedding_model import write_dense, write_modules
from encoder_models import BY_NAME as ENCODERS
from encoder_models import make_encoder
from encoder_tokenizers import SENTENCES, make_bert_folder, make_xlmr_folder
from head_models import make_headed
from infer import LLM
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.weights import StoredWeight
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.errors import UnsupportedModelError
from infer.files import Checkpoint, open_checkpoint
from infer.files.gguf.gguf_writer import TensorPlan, write_gguf
from infer.files.gguf.keys import DRAFTING_LAYERS
from infer.files.gguf.quantised_file import QuantisableModel, SourceTensor
from infer.files.tensors.lazy_weights import LazyWeights, as_float32
from infer.models.draft_plan import head_of
from infer.models.families import make_architecture
from infer.models.gguf_export.plan import export_plan, network_plan
from infer.models.gguf_export.tokenizer_values import _SPLIT_TEXTS, _all_triples, tokenizer_values
from infer.text.tokenizer import Tokenizer as OurTokenizer
from infer.text.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from quantised_folders import by_name, write_quantised
from refusals import check_refused, refusal
from reranker_model import make_logit_score, make_reranker_model
from tiny import BY_NAME, change_tensors, make_tiny


def write(plan: QuantisableModel, path: Path, rows: int = 7) -> Path:
    """Write the file, some rows at a time."""

    def pieces(tensor: SourceTensor) -> Iterator[bytes]:
        for first in range(0, tensor.num_rows, rows):
            part = tensor.read(first, min(first + rows, tensor.num_rows)).contiguous()
            yield part.view(torch.uint8).numpy().tobytes()

    plans = [TensorPlan(each.name, each.type, each.shape, lambda each=each: pieces(each)) for each in plan.tensors]
    write_gguf(path, plan.values, plans)
    return path


def cut_words(folder: Path) -> None:
    """Let the byte tokenizer cut words by GPT-2's rules, for which GGUF has a name."""
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace('"use_regex": false', '"use_regex": true'))


DIFFERENCES = [
    ("llama_relu", r"llama cannot say that layers\[0\]\.feed_forward\.activation is 'relu': .* read as 'silu'"),
    ("llama4_chunks", r"layers\[0\]\.mixer\.chunk is 23: it would be read as 8192"),
    ("qwen3_moe_mixed", r"router\.is_normalized is False: it would be read as True"),
    ("llama_yarn_mscale", r"rope\.frequency_factors\[1\] is 1\.326"),
    ("gpt_oss_plain", "gpt-oss cannot describe the network: config: sliding_window must be"),
    ("lfm2_biases", r"the tensor 'model\.layers\.0\.conv\.bias' has no name in a GGUF file of lfm2"),
    ("olmo_hybrid", "GGUF has no architecture for model_type 'olmo_hybrid'"),
]


@pytest.mark.parametrize(("name", "message"), DIFFERENCES)
def test_a_network_unknown_to_gguf_is_refused_by_its_difference(tmp_path: Path, name: str, message: str) -> None:
    make_tiny(BY_NAME[name], tmp_path)
    assert re.search(message, refusal(lambda: network_plan(open_checkpoint(tmp_path)), UnsupportedModelError))


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("name", ["smollm3", "gemma3"])
def test_a_written_file_answers_as_the_folder_to_the_bit(tmp_path: Path, name: str) -> None:
    config = copy.deepcopy(BY_NAME[name].config)
    config.vocab_size = VOCAB_SIZE
    if name == "gemma3":
        config.query_pre_attn_scalar = config.head_dim  # a constant of llama.cpp
    make_tiny(replace(BY_NAME[name], config=config), tmp_path)
    write_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}")
    cut_words(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 5, "eos_token_id": 256}')
    path = write(export_plan(open_checkpoint(tmp_path)), tmp_path / "model.gguf")
    with LLM(tmp_path) as folder, LLM(path) as file:
        answers = [llm.generate("né 12", max_tokens=6, seed=3, logprobs=2) for llm in (folder, file)]
        assert (answers[0].token_ids, answers[0].logprobs) == (answers[1].token_ids, answers[1].logprobs)
        assert folder.tokenizer.chat_templates == file.tokenizer.chat_templates == ("{{ messages[0].content }}",)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe"])
def test_a_head_that_drafts_is_exported_with_its_model(tmp_path: Path, name: str) -> None:
    """Under llama.cpp's names, as a layer after the others. The file's head and network are those of the folder."""
    make_headed(BY_NAME[name], tmp_path)
    source = open_checkpoint(tmp_path)
    plan = network_plan(source)
    again = open_checkpoint(write(plan, tmp_path / "model.gguf"))
    number, architecture = source.config["num_hidden_layers"], plan.values["general.architecture"].value
    assert plan.values[f"{architecture}.block_count"].value == number + 1
    assert plan.values[f"{architecture}.nextn_predict_layers"].value == 1
    names = {f"blk.{number}.nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
    assert names == {each.name for each in plan.tensors if ".nextn." in each.name}
    (own, tensors), (read, in_file) = (_head_of(each) for each in (source, again))
    assert again.config["num_hidden_layers"] == number
    assert (own.layers[0].mixer, own.layers[0].feed_forward) == (read.layers[0].mixer, read.layers[0].feed_forward)
    assert tensors.keys() == in_file.keys()
    for each in source.drafting.keys() & tensors.keys():
        assert torch.equal(tensors[each].data.float(), in_file[each].data.float()), each


def _head_of(checkpoint: Checkpoint) -> tuple[Architecture, LazyWeights]:
    head = head_of(checkpoint, make_architecture(checkpoint.config))
    assert head is not None
    return head[0], LazyWeights(head[1])


def test_a_drafting_layer_that_gguf_cannot_have_is_left_out_with_a_warning(tmp_path: Path) -> None:
    for name, lacking in (("qwen3", "files of qwen3 have no such layer"), ("qwen3_5", "infer does not know its form")):
        make_headed(BY_NAME[name], tmp_path)
        if name == "qwen3_5":
            change_tensors(tmp_path, lambda tensors: tensors.pop("mtp.fc.weight"))
        with pytest.warns(UserWarning, match=f"the layer that drafts tokens is left out, because {lacking}"):
            plan = network_plan(open_checkpoint(tmp_path))
        assert not any(".nextn." in each.name for each in plan.tensors)
        assert not any(key.endswith(DRAFTING_LAYERS) for key in plan.values)


@pytest.mark.parametrize(
    ("name", "method"), [("llama", "gptq 2 bits"), ("phi3", "mxfp4-pack-quantized"), ("qwen3_5", "fbgemm_fp8")]
)
def test_quantised_matrices_keep_the_values_that_the_folder_has(tmp_path: Path, name: str, method: str) -> None:
    made, floats, folder = by_name(method), tmp_path / "floats", tmp_path / "folder"
    floats.mkdir()
    make_tiny(BY_NAME[name], floats)
    write_quantised(floats, folder, made.pack, made.config, made.key)
    source = open_checkpoint(folder)
    again = open_checkpoint(write(network_plan(source), tmp_path / "model.gguf"))
    types = {info.type for each, info in again.tensors.items() if each.endswith("o_proj.weight")}
    assert types == {made.type if BLOCK_TYPES[made.type].ggml_id is not None else "F32"}
    for each, weight in LazyWeights(source.tensors).items():
        if ".linear_attn." not in each:  # their value heads have another order, which test_family_files checks
            read = LazyWeights(again.tensors)[each]
            own, other = (as_float32(StoredWeight(w.type, w.shape, w.data)).data for w in (weight, read))
            assert torch.equal(own, other), each


@pytest.mark.parametrize("name", ["lfm2_moe", "qwen3_next"])
def test_routers_and_convolutions_are_float32_whatever_the_folder_has(tmp_path: Path, name: str) -> None:
    make_tiny(BY_NAME[name], tmp_path)
    floats = load_file(tmp_path / "model.safetensors")
    halves = {each: tensor.to(torch.bfloat16) for each, tensor in floats.items()}
    save_file(halves, tmp_path / "model.safetensors")
    tensors = network_plan(open_checkpoint(tmp_path)).tensors
    types = {each.name: each.type for each in tensors if len(each.shape) > 1}
    kept = {each for each, type in types.items() if type == "F32"}
    assert kept == {each for each in types if "ffn_gate_inp" in each or "conv.weight" in each or "conv1d" in each}
    assert set(types.values()) == {"F32", "BF16"}
    assert {each.type for each in tensors if len(each.shape) == 1} == {"F32"}


LABELS = {0: "bad", 1: "good", 2: "so-so"}


def make_folder(folder: Path, name: str, labels: dict[int, str] | None) -> Path:
    tokenizer = make_xlmr_folder(folder) if "roberta" in name else make_bert_folder(folder)
    settings = {} if labels is None else {"id2label": labels}
    make_encoder(ENCODERS[name], folder, vocab_size=len(tokenizer) + 1, num_hidden_layers=2, **settings)
    return folder


def add_modules(folder: Path, pooling: str, *sizes: int) -> None:
    """Add the files of sentence-transformers: a pooling, and dense layers between vectors of these sizes."""
    write_modules(folder, ["Transformer", "Pooling", *["Dense"] * (len(sizes) - 1), "Normalize"])
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    for place, (columns, rows) in enumerate(pairwise(sizes), 2):
        write_dense(folder / f"{place}_Dense", columns, rows, False, "Identity")


def test_the_size_of_vectors_that_gguf_has_no_key_for_is_named(tmp_path: Path) -> None:
    add_modules(make_folder(tmp_path, "bert", None), "mean_tokens")
    (tmp_path / "config_sentence_transformers.json").write_text('{"truncate_dim": 24}')
    with pytest.warns(UserWarning, match="no key for truncate_dim: pass dimensions=24 for vectors as of the folder"):
        export_plan(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("name", "pooling", "num_types"),
    [("bert", "mean_tokens", 2), ("distilbert", "mean_tokens", 1), ("xlm-roberta", "cls_token", 2)],
)
def test_an_exported_encoder_has_the_folders_vectors(tmp_path: Path, name: str, pooling: str, num_types: int) -> None:
    add_modules(make_folder(tmp_path, name, None), pooling)
    if name != "distilbert":
        path, own = tmp_path / "1_Pooling" / "config.json", {"include_prompt": name == "bert"}
        path.write_text(json.dumps(json.loads(path.read_text()) | own))
        prompts = {"prompts": {"query": "search: ", "text": ""}, "default_prompt_name": "query"}
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 60}))
    plan = export_plan(open_checkpoint(tmp_path))
    assert plan.values["tokenizer.ggml.token_type_count"].value == num_types, "llama.cpp needs it"
    path = write(plan, tmp_path / "model.gguf")
    with LLM(tmp_path) as folder, LLM(path) as file:
        assert folder.prompt_names == file.prompt_names
        assert folder.max_seq_len == file.max_seq_len == 60
        for prompt in (None, *folder.prompt_names):
            assert torch.equal(folder.embed(SENTENCES, prompt_name=prompt), file.embed(SENTENCES, prompt_name=prompt))


@pytest.mark.parametrize("name", ["distilbert", "electra"])
def test_a_classifier_whose_activation_gguf_cannot_say_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot say that the layers of its classifier are"):
        network_plan(open_checkpoint(make_folder(tmp_path, name, LABELS)))


def test_an_exported_classifier_has_the_labels_of_the_folder(tmp_path: Path) -> None:
    make_folder(tmp_path, "modernbert-biased", LABELS)
    path = write(export_plan(open_checkpoint(tmp_path)), tmp_path / "model.gguf")
    with LLM(tmp_path) as folder, LLM(path) as file:
        assert folder.classify(SENTENCES) == file.classify(SENTENCES)


def test_an_exported_cross_encoder_scores_pairs_as_the_folder(tmp_path: Path) -> None:
    path = write(export_plan(open_checkpoint(make_folder(tmp_path, "roberta", {0: "score"}))), tmp_path / "model.gguf")
    with LLM(tmp_path) as folder, LLM(path) as file:
        assert folder.rerank(SENTENCES[0], SENTENCES) == file.rerank(SENTENCES[0], SENTENCES)


def test_the_pooling_and_dense_layers_of_a_decoder_are_exported(tmp_path: Path) -> None:
    make_encoder(ENCODERS["embedding-gemma"], tmp_path)
    add_modules(tmp_path, "mean_tokens", 96, 40, 24)
    plan = network_plan(open_checkpoint(tmp_path))
    values = {key.partition(".")[2]: value.value for key, value in plan.values.items() if "gemma-embedding" in key}
    sizes = {key: value for key, value in values.items() if "dense" in key}
    assert (values["pooling_type"], values["attention.causal"], values["attention.sliding_window"]) == (1, False, 40)
    assert sizes == {"dense_2_feat_in": 96, "dense_2_feat_out": 40, "dense_3_feat_in": 40, "dense_3_feat_out": 24}
    again = open_checkpoint(write(plan, tmp_path / "model.gguf")).embedding
    own = open_checkpoint(tmp_path).embedding
    assert own is not None
    assert again is not None
    assert (again.pooling, again.normalizes, len(again.head)) == (own.pooling, True, 2)


@pytest.mark.parametrize("make", [make_reranker_model, make_logit_score], ids=["qwen3", "logit score"])
def test_an_exported_reranker_scores_as_the_folder(tmp_path: Path, make: Callable[..., Any]) -> None:
    source = tmp_path / ("Qwen3-Reranker-0.6B" if make is make_reranker_model else "ranker")
    prompts = {"prompts": {"judge": "Is it about it?"}, "default_prompt_name": "judge"}
    make(source, **({} if make is make_reranker_model else prompts))
    cut_words(source)
    plan = export_plan(open_checkpoint(source))
    assert ("tokenizer.chat_template.rerank" in plan.values) == (make is make_reranker_model)
    with LLM(source) as folder, LLM(write(plan, tmp_path / "model.gguf")) as file:
        found = [[each.score for each in llm.rerank("a", ["b", "yes no", "c"])] for llm in (folder, file)]
    assert found[0] == pytest.approx(found[1], abs=1e-12)


REFUSED_LAYERS = [
    ("max_tokens", (), "GGUF has no form for the pooling max"),
    ("mean_tokens", (96, 40, 30, 20), "no form for the layers after the pooling: it has two matrices"),
]


@pytest.mark.parametrize(("pooling", "sizes", "message"), REFUSED_LAYERS)
def test_layers_after_the_states_are_refused_if_gguf_lacks_them(
    tmp_path: Path, pooling: str, sizes: tuple[int, ...], message: str
) -> None:
    make_encoder(ENCODERS["qwen3"], tmp_path)
    add_modules(tmp_path, pooling, *sizes)
    check_refused(lambda: network_plan(open_checkpoint(tmp_path)), message, UnsupportedModelError)


def test_an_encoder_with_another_activation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="activation is 'relu': it would be read as 'gelu'"):
        export_plan(open_checkpoint(make_folder(tmp_path, "bert-relu", None)))


# Tokenizers in GGUF's format


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


@pytest.mark.slow(cases=2)
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
            cut = str([shown.make().pre_tokenize_str(text) for text in _SPLIT_TEXTS])
            assert cuts.setdefault(cut, shown) == shown, name
