"""`draft_model`: in `LLM`, sessions, the command, a server and estimates; and the draft models that are refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from byte_tokenizer import write_byte_tokenizer
from draft_trials import Lavish, always_drafting
from infer import LLM, ModelError, SamplingParams
from infer.cli import main
from infer.cli.commands.serve_command import _lines
from infer.engine.requests.host import load_draft_model
from infer.engine.speculation.ngram import NgramDrafter
from infer.engine.step.model_drafter import ModelDrafter
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.catalog.header_facts import plan_served
from infer.models.draft_plan import DraftPlan
from refusals import check_refused
from served import serving
from test_session import NUM_TOKENS, TEMPLATE, check_turn, make_model
from tiny import Tiny, make_tiny

ASSETS = Path(__file__).parents[1] / "data"
PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=20),
    SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, stop=["zq"], logprobs=2, max_new_tokens=20),
    SamplingParams(regex="[a-f ]{12,30}", seed=1, temperature=0.9),
]


def make_draft(folder: Path, **tokenizer: Any) -> Path:
    """Return a model with the vocabulary of the fixture `folder` and up to 60 rows of embeddings without tokens."""
    folder.mkdir(exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": NUM_TOKENS + 60, "num_hidden_layers": 1, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=NUM_TOKENS - 2)
    make_tiny(Tiny("draft", config), folder)
    write_byte_tokenizer(folder, merges=[("a", "b"), ("e", " ")], chat_template=TEMPLATE, **tokenizer)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tmp_path_factory.mktemp("draft"))


def test_a_model_with_a_draft_model_gives_the_same_answers(llm: LLM, folder: Path, draft: Path) -> None:
    """In batches, streams and sessions. Its context is longer than the draft model's."""
    prompts = ["hello", "abc abc " * 12, "once upon a time"]
    expected = [llm.generate(prompt, params) for prompt, params in zip(prompts, PARAMS, strict=True)]
    with always_drafting(), LLM(folder, draft_model=draft) as other:
        assert other.system_fingerprint == llm.system_fingerprint
        results = other.generate_all(prompts, PARAMS)
        streamed = [other.stream(prompt, params).run() for prompt, params in zip(prompts, PARAMS, strict=True)]
        off = other.generate(prompts[0], PARAMS[0], speculation="off")
        session = other.session()
        for text in ("say ab ab ab", "and again"):
            check_turn(llm, session, text, PARAMS[0], speculation="draft")
        other.generate("a text whose rows take some pages of the draft model's cache", PARAMS[0])
        freed, again = other.trim(), other.trim()
        with serving(other, model="tiny") as served:
            assert served.client.get("/props").json()["draft_model"] == draft.name
            body = {"prompt": prompts[0], "temperature": 0, "max_tokens": 20, "speculation": "draft"}
            assert served.ask("/v1/completions", **body)["choices"][0]["text"] == expected[0].text
            lines = list(_lines(other, served.state.settings, "http://host"))
    assert f"drafts   {draft}, while they save time" in lines
    for found in (results, streamed):
        assert [(each.token_ids, each.text, each.logprobs) for each in found] == [
            (each.token_ids, each.text, each.logprobs) for each in expected
        ]
    assert freed > again == 0
    assert results[0].stats.drafts_proposed > 0 == off.stats.drafts_proposed


def test_the_command_and_a_served_model_take_a_draft_model(
    folder: Path, draft: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[int]()
    begin = ModelDrafter.begin
    monkeypatch.setattr(
        ModelDrafter, "begin", lambda self, slot, *other: (begun.append(slot), begin(self, slot, *other))
    )
    for flags in (["--draft-model", str(draft)], ["-md", str(draft), "--stats"], []):
        assert main(["generate", "-m", str(folder), "-p", "hello", "--temperature", "0", "-n", "8", "-q", *flags]) == 0
    printed = capsys.readouterr()
    first, second, plain = printed.out.splitlines()
    assert "path          greedy, draft speculation" in printed.err
    assert (first, second, len(begun)) == (plain, plain, 2)
    alone, beside = (
        plan_served(str(folder), ModelSettings(draft_model=name), most_bytes=10**10, share_bytes=10**9)
        for name in (None, str(draft))
    )
    assert (
        main(["estimate", str(folder), "--json"]) == main(["estimate", str(folder), "-md", str(draft), "--json"]) == 0
    )
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    own = found[1]["draft_bytes"]
    assert own > 4 * 32 * (NUM_TOKENS + 60)
    assert (found[1]["total_bytes"], beside.num_bytes) == (found[0]["total_bytes"] + own, alone.num_bytes + own)
    assert main(["estimate", str(folder), "-md", str(draft)]) == 0
    assert "of the draft model" in capsys.readouterr().out


def test_a_draft_model_that_cannot_draft_is_refused(folder: Path, draft: Path, tmp_path: Path) -> None:
    merges: list[Any] = [("a", "b"), ("t", " ")]
    other = make_model(tmp_path / "other")
    write_byte_tokenizer(other, merges=merges, chat_template=TEMPLATE)
    larger = make_draft(tmp_path / "larger", controls=[f"<|{number}|>" for number in range(9)])
    same = "name a smaller model of the same family"
    message = "other' has another vocabulary than the model: 260 tokens, not 260, and token 257 is b't ', not b'e ': "
    check_refused(lambda: LLM(folder, draft_model=other), message + same)
    check_refused(
        lambda: LLM(folder, draft_model=str(larger)), "larger' has another vocabulary .*: 269 tokens, not 260"
    )
    check_refused(lambda: LLM(folder, draft_model=draft, tensor_parallel=2), "needs a model in one process")
    encoder = make_draft(tmp_path / "encoder")
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    check_refused(lambda: LLM(folder, draft_model=encoder), "encoder' generates no text: name a smaller decoder")
    check_refused(lambda: LLM(encoder, draft_model=draft), "draft_model: .* is an encoder and generates no text")
    check_refused(lambda: LLM(folder, draft_model=3), "draft_model must be a model's name or path, or None, got 3")


def test_without_a_draft_model_only_n_grams_are_drafted(llm: LLM) -> None:
    check_refused(lambda: llm.generate("a", speculation="draft"), "load the model with draft_model, or use 'ngram'")
    assert llm.generate("abab abab", PARAMS[0]).stats.drafts_proposed == 0


def test_a_draft_model_that_does_not_fit_names_itself(
    folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([10**10])
    monkeypatch.setattr(
        "infer.compute.backends.torch_backend.TorchBackend.available_bytes", lambda self: next(sizes, 40_000)
    )
    check_refused(lambda: LLM(folder, draft_model=draft), f"{draft.name} needs", ModelError)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model with a head that `benchmarks/train_draft_head.py` trained."""
    folder = tmp_path_factory.mktemp("headed")
    for file in (ASSETS / "draft-head").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    write_byte_tokenizer(folder, chat_template=TEMPLATE)
    return folder


def test_a_model_drafts_with_its_own_head(headed: Path) -> None:
    """In batches, streams and sessions."""
    prompts = ["The quiet river ", "No teacher paints those bridges. Every ", "Another"]
    params = [
        SamplingParams(temperature=0, max_new_tokens=60),
        SamplingParams(temperature=0.7, seed=3, max_new_tokens=60),
        SamplingParams(regex="[a-z .]{30,50}", seed=1, temperature=0.9),
    ]
    with LLM(headed, draft_head=False) as plain:
        expected = [plain.generate(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        with always_drafting(), LLM(headed) as own:
            assert own.system_fingerprint == plain.system_fingerprint
            results = own.generate_all(prompts, params)
            streamed = [own.stream(prompt, each).run() for prompt, each in zip(prompts, params, strict=True)]
            off = own.generate(prompts[0], params[0], speculation="off")
            session = own.session()
            for text in ("The small ", "engine"):
                check_turn(plain, session, text, params[0], speculation="draft")
            with serving(own, model="tiny") as served:
                lines = list(_lines(own, served.state.settings, "http://host"))
        check_refused(lambda: plain.generate("a", speculation="draft"), "needs a draft model")
    assert "drafts   by the model's own head, while they save time (--no-draft-head)" in lines
    for answers in (results, streamed, [off]):
        assert [each.token_ids for each in answers] == [each.token_ids for each in expected][: len(answers)]
    assert off.stats.drafts_proposed == 0
    assert min(result.stats.drafts_accepted for result in streamed[:2]) > 10


def test_a_head_drafts_in_steps_without_a_recording(headed: Path) -> None:
    """Rows of one batch ask for different numbers of drafts. Eager steps check that their positions are reserved."""
    prompts = ["The quiet river ", "No teacher paints those bridges. Every ", "Another"]
    params = SamplingParams(temperature=0.7, seed=5, max_new_tokens=80)
    with LLM(headed, draft_head=False) as plain:
        expected = [plain.generate(prompt, params).token_ids for prompt in prompts]
    with always_drafting(), LLM(headed, capture=False) as own:
        results = own.generate_all(prompts, params)
    assert [result.token_ids for result in results] == expected
    assert min(result.stats.drafts_accepted for result in results) > 20


class OneDraft(Lavish):
    """A policy that drafts one token in each step."""

    def num_draft_tokens(self, *arguments: Any) -> int:
        return 1


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_trained_head_is_nearly_always_right(
    temperature: float, headed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a temperature, too: its noise is that of the answer. Random words follow, but few letters decide them."""
    monkeypatch.setattr(NgramDrafter, "confidence", lambda drafter, slot: 0)
    with always_drafting(), LLM(headed) as llm:
        monkeypatch.setattr("infer.engine.step.drafting.DraftPolicy", OneDraft)
        stats = llm.generate("The quiet river ", temperature=temperature, seed=2, max_new_tokens=150).stats
    assert stats.drafts_proposed > 60
    assert stats.drafts_accepted > 0.85 * stats.drafts_proposed


def test_estimates_count_the_models_own_head(headed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--no-draft-head"]):
        assert main(["estimate", str(headed), "--json", *flags]) == 0
    own, without = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert own["draft_bytes"] > 4 * 64 * 64 == 4 * 64 * 64 + without["draft_bytes"]
    assert own["total_bytes"] == without["total_bytes"] + own["draft_bytes"]


@pytest.mark.parametrize("settings", [ModelSettings(device="cuda"), ModelSettings(tensor_parallel=2)])
def test_a_head_is_left_out_elsewhere_than_in_one_process_on_a_cpu(
    settings: ModelSettings, headed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = SimpleNamespace(max_seq_len=64)
    assert load_draft_model(settings, open_checkpoint(headed), model, model) is None
    assert [record.getMessage() for record in caplog.records] == [
        "the model's own head drafts only on a CPU, in one process: it is left out"
    ]


def test_a_head_that_does_not_fit_is_left_out(headed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftPlan, "num_bytes", lambda plan, load: 1 << 60)
    with LLM(headed) as llm:
        assert llm.generate("The", temperature=0, max_new_tokens=3).stats.drafts_proposed == 0
        assert not llm.host.has_draft_head
