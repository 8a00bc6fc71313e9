"""Pages of `infer doctor --html` and `infer compare --html`: one file, with a bar for each value."""

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import run
from test_doctor import NUM_LAYERS, write_file
from test_quality_commands import CONTEXT, TEXT
from test_session import make_model

SPIKE = "blk.3.ffn_down.weight"


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
        tensors[SPIKE] *= 1000

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
