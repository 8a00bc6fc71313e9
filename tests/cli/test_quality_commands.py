"""Commands that read texts and generate none: perplexity, compare and their pages, embed, rerank and classify."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, kl_div

from cases import cases
from classifier_model import make_classifier
from commands import Ran, run
from infer import LLM, ModelError
from infer.cli import model_loading
from infer.cli.bench.text_measures import measure_divergence, measure_perplexity
from infer.cli.commands.text_commands import Progress
from quantised_folders import save, set_config
from test_doctor import NUM_LAYERS, write_file
from test_session import make_model

CONTEXT = 32
TEXT = "".join(chr(32 + (7 * index * index + index) % 90) for index in range(40 * CONTEXT)) + "the rest"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@torch.inference_mode()
def losses_of(folder: Path, windows: list[list[int]]) -> torch.Tensor:
    """Return the losses of the second half of each window by `transformers`."""
    from transformers import AutoModelForCausalLM

    model, half = AutoModelForCausalLM.from_pretrained(folder).eval(), CONTEXT // 2
    found = []
    for window in windows:
        logits = model(torch.tensor([window])).logits[0].double()
        found.append(cross_entropy(logits[half:-1], torch.tensor(window[half + 1 :]), reduction="none"))
    return torch.cat(found)


def windows_of(llm: LLM) -> list[list[int]]:
    ids = llm.tokenizer.encode(TEXT)
    return [ids[start : start + CONTEXT] for start in range(0, len(ids) // CONTEXT * CONTEXT, CONTEXT)]


def test_perplexity_is_that_of_transformers(folder: Path, file: Path) -> None:
    with LLM(folder, kv_type="f32") as llm:
        windows = windows_of(llm)
    losses = losses_of(folder, windows)
    asked = ["perplexity", folder, "-f", file, "--context", CONTEXT, "--kv-type", "f32"]
    found = run(*asked, "--json").json()
    expected = math.exp(losses.mean())
    error = expected * float(losses.std()) / math.sqrt(len(losses))
    assert found["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert found["standard_error"] == pytest.approx(error, rel=1e-4)
    assert (found["num_tokens"], found["num_windows"]) == (len(losses), len(windows))
    assert len(losses) == len(windows) * (CONTEXT // 2 - 1)
    first, second = run(*asked).out.splitlines()
    assert first == f"perplexity  {found['perplexity']:.4f} ± {found['standard_error']:.4f}"
    assert second.startswith("over ")


def test_windows_begin_with_the_token_that_begins_a_text(tmp_path: Path) -> None:
    folder = make_model(tmp_path, bos_token="<|im_end|>", add_bos_token=True)
    with LLM(folder, kv_type="f32") as llm:
        assert llm.tokenizer.adds_bos
        bos = llm.tokenizer.bos_token_id
        windows = [[bos, *window[1:]] for window in windows_of(llm)]
        found = measure_perplexity(llm, TEXT, CONTEXT)
    assert found.perplexity == pytest.approx(math.exp(losses_of(folder, windows).mean()), rel=1e-5)


def test_divergences_are_those_of_the_definition(folder: Path) -> None:
    with LLM(folder, kv_type="f32") as reference, LLM(folder) as other:
        done = list[tuple[int, int]]()
        found = measure_divergence(reference, other, TEXT, CONTEXT, lambda *counts: done.append(counts))
        windows, half = windows_of(reference), CONTEXT // 2
        both = [[llm.logits(ids)[half:-1].double().log_softmax(-1) for ids in windows] for llm in (reference, other)]
        errors = [(reference.logits(window) - other.logits(window))[half:-1].abs().max().item() for window in windows]
        alone = measure_perplexity(other, TEXT, CONTEXT)
    expected, of_other = map(torch.cat, both)
    ids = torch.cat([torch.tensor(window[half + 1 :]) for window in windows])[:, None]
    kl = kl_div(of_other, expected, log_target=True, reduction="none").sum(-1)
    change = of_other.exp().gather(-1, ids) - expected.exp().gather(-1, ids)
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-6)
    assert found.largest_kl == pytest.approx(float(kl.max()), rel=1e-6)
    assert found.median_kl == pytest.approx(float(kl.quantile(0.5)), rel=0.05)
    assert found.kl_99 == pytest.approx(float(kl.quantile(0.99)), rel=0.1)
    assert found.same_likeliest == float((expected.argmax(-1) == of_other.argmax(-1)).double().mean())
    assert found.rms_change == pytest.approx(float(change.square().mean().sqrt()), rel=1e-6)
    assert found.largest_logit_error == pytest.approx(max(errors))
    by_window = kl.view(len(windows), -1)
    assert found.kl_by_window == pytest.approx(by_window.mean(1).tolist(), rel=1e-4)
    assert found.kl_by_position == pytest.approx(by_window.mean(0).tolist(), rel=1e-4)
    assert found.other == alone
    assert 0 < found.mean_kl < found.largest_kl
    assert done == [(number, len(windows)) for number in range(1, len(windows) + 1)]


def test_a_model_is_compared_with_itself_under_other_settings(folder: Path, file: Path) -> None:
    asked = ["compare", folder, "-f", file, "--context", CONTEXT, "--kv-type", "f32"]
    found = run(*asked, "--json").json()
    with LLM(folder) as plain, LLM(folder, kv_type="f32") as other:
        expected = measure_divergence(plain, other, TEXT, CONTEXT)
    assert found == json.loads(json.dumps(asdict(expected)))
    rows = dict(line.split("  ", 1) for line in run(*asked).out.splitlines())
    assert rows["mean KL"].strip() == f"{expected.mean_kl:.3g} nats"
    assert rows["same likeliest"].strip() == f"{100 * expected.same_likeliest:.2f} % of the tokens"


def test_two_models_are_compared(folder: Path, file: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "two", num_layers=1)
    shared = ["-f", file, "--context", CONTEXT, "--json"]
    found = run("compare", folder, other, *shared).json()
    assert found["mean_kl"] > 0
    assert run("compare", folder, "-m", other, *shared).json() == found


def with_tensors(folder: Path, copy: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Return a copy of a model with changed tensors."""
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    save(copy, {name: change(name, tensor) for name, tensor in tensors.items()})
    return copy


def test_heads_that_are_padded_to_different_sizes_are_compared(folder: Path, tmp_path: Path) -> None:
    """Rows after the last token of both are ignored."""

    def padded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        has_tokens = name in ("lm_head.weight", "model.embed_tokens.weight")
        return torch.cat([tensor, torch.ones(16, tensor.shape[1])]) if has_tokens else tensor

    other = with_tensors(folder, tmp_path / "padded", padded)
    set_config(other, "vocab_size", json.loads((other / "config.json").read_text())["vocab_size"] + 16)
    with LLM(folder) as plain, LLM(other) as wider:
        expected = measure_perplexity(plain, TEXT, CONTEXT)
        for pair in ((plain, wider), (wider, plain)):
            found = measure_divergence(*pair, TEXT, CONTEXT)
            assert (found.reference, found.other) == (expected, expected)
            assert found.largest_kl == found.largest_logit_error == 0


@pytest.mark.slow
@cases(
    "name factor message",
    ("lm_head.weight", math.nan, "logits of the model are not finite: its weights are damaged"),
    ("model.norm.weight", 1e5, r"perplexity must be at most e\^700, got e\^.*: its weights are damaged"),
)
def test_bad_weights_have_no_perplexity(folder: Path, tmp_path: Path, name: str, factor: float, message: str) -> None:
    other = with_tensors(folder, tmp_path / "broken", lambda each, tensor: tensor * factor if each == name else tensor)
    with LLM(other) as llm, pytest.raises(ModelError, match=message):
        measure_perplexity(llm, TEXT, CONTEXT)


@cases(
    "asked message",
    (["perplexity", "{one}", "--context", "9999"], "context must be from 4 to"),
    (["perplexity", "{one}", "-f", "{short}", "--context", "32"], "the text has 5 tokens, and a window has 32"),
    (["perplexity", "{one}", "-f", "/no/such/file"], "/no/such/file"),
    (["compare", "{one}", "-f", "{file}"], "the two models are the same: name another model after the first"),
    (["compare", "{one}", "{other}", "-f", "{file}", "--context", "8"], "the models have different vocabularies"),
)
def test_unmeasured_models_are_named(folder: Path, file: Path, tmp_path: Path, asked: list[str], message: str) -> None:
    (tmp_path / "short.txt").write_text("short")
    other = tmp_path / "other"
    if "{other}" in asked:
        make_classifier(other)
    places: dict[str, Any] = {"one": folder, "file": file, "short": tmp_path / "short.txt", "other": other}
    if "-f" not in asked:
        asked = [*asked, "-f", str(file)]
    *_, line = run(*(each.format(**places) for each in asked), status=2).err.splitlines()
    assert line.startswith("infer: ")
    assert message in line


# Pages


def read_page(path: Path) -> str:
    """Return a page that names no other file or host, and runs no script."""
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|\bsrc=", page)
    assert "light-dark(" in page
    return page


def bars(page: str, name: str) -> list[list[tuple[bool, str, float]]]:
    """Return the bars of each chart in the row of a kind. A bar has a mark or none, a label and a value."""
    (row,) = re.findall(rf'<div class="row"><div><b>{name}</b>(.*?)</figure></div>', page, re.DOTALL)
    return [charted(chart) for chart in row.split("<svg")[1:]]


def charted(chart: str) -> list[tuple[bool, str, float]]:
    found = re.findall(r"<rect( class=\"marked\")? [^>]*><title>(.*?): (.*?)</title>", chart)
    return [(bool(mark), label, float(value)) for mark, label, value in found]


def test_the_page_of_a_diagnosis_has_the_findings_and_marks_their_bars(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.3.ffn_down.weight"] *= 1000

    folder = tmp_path / "<b>&"
    folder.mkdir()
    page_path, model = tmp_path / "page.html", write_file(folder, change=spoil)
    line = run("doctor", model, "--html", page_path, status=1).out.splitlines()[0]
    page = read_page(page_path)
    assert "<b>&" not in page, "names are escaped"
    (finding,) = re.findall(r"<li><b>(.*?)</b> (.*?)</li>", page)
    assert unescape(": ".join(finding)) == line
    bits, rms, peaks = bars(page, "mlp.down_proj")
    assert [each[:2] for each in bits] == [(layer == 3, f"layer {layer}") for layer in range(NUM_LAYERS)]
    assert all(value == 32 for _, _, value in bits)
    assert rms[3][2] == pytest.approx(1000 * rms[2][2], rel=0.2)
    assert all(1 < value < 10 for _, _, value in peaks)
    assert not any(marked for chart in bars(page, "mlp.up_proj") for marked, _, _ in chart)
    run("doctor", model, "--html", tmp_path / "none" / "page.html", status=2)


def test_the_page_of_a_comparison_has_divergences_and_errors_by_layer(tmp_path: Path) -> None:
    first, second = (make_model(tmp_path / name) for name in ("one", "two"))
    tensors = load_file(second / "model.safetensors")
    changed = "model.layers.1.mlp.up_proj.weight"
    noise = torch.randn(tensors[changed].shape, generator=torch.manual_seed(1)) * 0.1
    save_file(tensors | {changed: tensors[changed] + noise}, second / "model.safetensors", {"format": "pt"})
    text, page_path = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text(TEXT[: 3 * CONTEXT])
    asked = ["compare", first, second, "-f", text, "--context", CONTEXT, "--html", page_path]
    found = run(*asked, "--json").json()
    by_position, by_window = found["kl_by_position"], found["kl_by_window"]
    assert (len(by_position), len(by_window)) == (CONTEXT // 2 - 1, found["other"]["num_windows"])
    page = read_page(page_path)
    position_chart, window_chart = (charted(chart) for chart in page.split("<svg")[1:3])
    assert [value for _, _, value in position_chart] == pytest.approx(by_position, rel=1e-3)
    assert [value for _, _, value in window_chart] == pytest.approx(by_window, rel=1e-3)
    assert position_chart[0][1] == f"position {CONTEXT // 2 + 1}"
    (errors,) = bars(page, "mlp.up_proj")
    expected = [0, 100 * float(noise.norm() / tensors[changed].norm())]
    assert [value for _, _, value in errors] == pytest.approx(expected, rel=1e-3)


# Vectors, ranks and labels


LINES = ["hello", "", "a longer text"]


def run_with(llm: LLM, *arguments: object, status: int = 0) -> Ran:
    """Run a command with a model that is loaded already, and any options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loading, "load_model", lambda options: llm)
        patch.setattr(model_loading, "check_options", lambda options, params: None)
        return run(*arguments, status=status)


def test_lines_become_json_lines_or_an_array(embedder: LLM, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(LINES) + "\n")
    expected = embedder.embed(LINES, prompt_name="query", dimensions=8)
    asked = ["embed", tmp_path / "texts.txt", "--prompt-name", "query", "--dimensions", "8"]
    found = run_with(embedder, *asked).records()
    assert found == [{"index": index, "embedding": each.tolist()} for index, each in enumerate(expected)]
    run_with(embedder, *asked, "-o", tmp_path / "vectors.npy")
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), expected.numpy())
    run_with(embedder, *asked, "-o", tmp_path / "vectors.jsonl")
    assert len((tmp_path / "vectors.jsonl").read_text().splitlines()) == 3


def test_json_lines_keep_their_ids(embedder: LLM, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "hello", "id": 0, "other": 1}\n"plain"\n')
    first, second = run_with(embedder, "embed", tmp_path / "texts.jsonl").records()
    assert (first["id"], first["index"], second["index"], "id" in second) == (0, 0, 1, False)


def test_the_time_that_is_left_has_two_digits_after_the_first_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("infer.cli.commands.text_commands.time.monotonic", lambda: clock[0])
    progress, clock[0] = Progress(40), 100.0
    progress.count(has_failed=True)
    assert capsys.readouterr().err == "1 of 40 rows, 0.0 rows/s, 1:05:00 left, 1 failed\n"


def test_documents_are_printed_by_relevance(judge: LLM, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(LINES))
    expected = judge.rerank("cats", LINES)
    asked = ["rerank", "cats", tmp_path / "texts.txt"]
    assert run_with(judge, *asked).out.splitlines() == [f"{each.score:.4f}  {each.document}" for each in expected]
    found = run_with(judge, *asked, "--json", "-n", "2").records()
    assert found == [{"index": x.index, "score": x.score, "document": x.document} for x in expected[:2]]


def test_lines_have_their_labels(labeller: LLM, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a", "text_pair": "b", "id": "x"}\n"a"\n')
    (pair, text) = labeller.classify([("a", "b"), "a"])
    expected = [{"index": 0, "id": "x"} | pair.to_json(), {"index": 1} | text.to_json()]
    assert run_with(labeller, "classify", tmp_path / "texts.jsonl").records() == expected
    run_with(labeller, "classify", tmp_path / "texts.jsonl", "-o", tmp_path / "labels.jsonl")
    assert [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()] == expected


@cases(
    "name content options message",
    ("t.txt", "", [], "has no texts: write one per line"),
    ("t.jsonl", '{"text": 5}', [], 'line 1 must be a string or an object with "text"'),
    ("t.jsonl", '"a"\n{', [], "line 2 is not JSON"),
    ("t.txt", "a\n" * 70 + "x" * 999, [], "text 70: the text has 1000 tokens"),
    ("t.txt", "a", ["--prompt-name", "odd"], "prompt_name must be one of 'query', 'document'"),
    ("t.txt", "a", ["-o", "/no/such/folder/a.npy"], "the output /no/such/folder/a.npy cannot be written"),
)
def test_texts_that_cannot_be_embedded_give_one_line(
    embedder: LLM, tmp_path: Path, name: str, content: str, options: Any, message: str
) -> None:
    (tmp_path / name).write_text(content)
    found = run_with(embedder, "embed", tmp_path / name, *options, status=2)
    assert (found.out, found.err[:7], found.err.count("\n"), message in found.err) == ("", "infer: ", 1, True)


@pytest.mark.slow
def test_a_cut_is_noted(embedder: LLM, judge: LLM, labeller: LLM, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a\n" + "x" * 9999)
    for llm, command, limit in ((embedder, "embed", 256), (judge, "rerank q", 1024), (labeller, "classify", 256)):
        told = run_with(llm, *command.split(), path, "--truncate").err
        assert f"1 of 2 texts were cut to {limit} tokens" in told
