"""`infer quantize` and `infer imatrix`: files keep a model's metadata, and matrices are sums that torch's hooks see."""

import errno
import re
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch

from cases import cases
from commands import refused, run
from converted import convert
from converted_encoders import write_gguf
from encoder_models import BY_NAME, make_encoder
from gguf_files import random_tensors, write_model
from infer.cli.bench.text_measures import squares_of_inputs
from infer.compute.backends.base import Backend
from infer.compute.operands.limits import HOST_STEP
from infer.files import open_checkpoint
from infer.files.gguf.gguf import read_gguf
from infer.files.gguf.importance_matrix import ImportanceMatrix, InputSquares, open_importance_matrix
from infer.files.tensors.lazy_weights import LazyWeights, as_float32
from test_session import make_model
from tiny import TINY, make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def extend(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["é", "b"])
        writer.add_chat_template("{{ messages }}")
        writer.add_file_type(0)

    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", extend=extend)


def test_a_written_file_has_the_metadata_and_nearly_the_values(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "q.gguf"
    found = run("quantize", model, output, "--type", "q4_k_m", "--tensor-type", "attn_k=f16")
    before, after = found.out.splitlines()
    assert before.split() == ["before", "0.1", "MB", "32.00", "bits", "per", "weight", "11", "F32"]
    assert after.endswith("4 Q5_0, 3 F32, 3 Q8_0, 1 F16")
    source, written = read_gguf(model), read_gguf(output)
    assert written.metadata == source.metadata | {"general.file_type": 15, "general.quantization_version": 2}
    version = {"general.quantization_version": written.value_types["general.quantization_version"]}
    assert written.value_types == source.value_types | version
    read = gguf.GGUFReader(output)
    values = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in read.tensors}
    for name, own in random_tensors("llama").items():
        error = np.square(values[name] - own).mean()
        assert error <= (0 if own.ndim == 1 else 1e-6 if name.endswith("attn_k.weight") else 0.003)
        assert own.ndim == 1 or error > 0


def test_a_folder_becomes_a_file_with_the_same_weights_and_chat_template(tmp_path: Path) -> None:
    folder, output = make_model(tmp_path / "folder"), tmp_path / "q.gguf"
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace('"use_regex": false', '"use_regex": true'))
    run("quantize", folder, output, "-t", "F32", "-q")
    source, written = (open_checkpoint(path) for path in (folder, output))
    assert written.metadata["tokenizer.chat_template"]
    before, after = LazyWeights(source.tensors), LazyWeights(written.tensors)
    assert sorted(before) == sorted(after)
    for name in before:
        first, second = (as_float32(each.rows(0, each.shape[0]) if len(each.shape) == 2 else each)
                         for each in (before[name], after[name]))  # fmt: skip
        assert torch.equal(first.data, second.data), name


def test_a_matrix_is_read_and_one_of_another_model_refused(model: Path, tmp_path: Path) -> None:
    matrix = ImportanceMatrix({"blk.0.ffn_up.weight": InputSquares(np.arange(64.0)[None] + 1, np.ones(1))})
    with_it, plain = tmp_path / "with.gguf", tmp_path / "plain.gguf"
    matrix.write(tmp_path / "i.gguf")
    for output, options in ((with_it, ["--imatrix", str(tmp_path / "i.gguf")]), (plain, [])):
        run("quantize", model, output, "-t", "Q4_0", "-q", *options)
    first, second = ({tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors}
                     for path in (with_it, plain))  # fmt: skip
    assert [name for name in first if first[name] != second[name]] == ["blk.0.ffn_up.weight"]
    assert read_gguf(with_it).metadata["quantize.imatrix.file"] == "i.gguf"
    ImportanceMatrix({"blk.9.ffn_up.weight": InputSquares(np.ones((1, 64)), np.ones(1))}).write(tmp_path / "i.gguf")
    told = refused("quantize", model, plain, "-f", "--imatrix", tmp_path / "i.gguf")
    assert "i.gguf has no tensor of m.gguf: make it with infer imatrix" in told


def test_outputs_are_only_replaced_on_demand_and_never_the_model(model: Path, tmp_path: Path) -> None:
    output, again = tmp_path / "q.gguf", tmp_path / "again.gguf"
    output.write_text("precious")
    asked = ["quantize", model, output, "-t", "Q8_0"]
    assert "exists: name another file, or give --force" in refused(*asked)
    assert "Q8_0" in run(*asked, "--dry-run").out
    assert output.read_text() == "precious"
    run(*asked, "--force", "-q")
    assert "is the input" in refused("quantize", output, output, "-t", "F16", "--force")
    assert "is already Q8_0" in refused("quantize", output, again, "-t", "Q4_0", status=3)
    run("quantize", output, again, "-t", "Q4_0", "--requantize")


@cases(
    "options message",
    (["-t", "Q4_X"], "--type must be one of F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S,"),
    (["--tensor-type", "ffn=Q4_X"], "--tensor-type ffn=Q4_X: the type must be one of F32, F16"),
    (["--tensor-type", "Q4_0"], "--tensor-type must be PATTERN=TYPE, such as ffn_down=Q6_K, got 'Q4_0'"),
    (["--tensor-type", "[=Q4_0"], "'[' is not a regular expression"),
    (["-t", "IQ2_XS"], "needs an importance matrix, which is not given"),
)
def test_a_wrong_option_is_refused_in_a_line(tmp_path: Path, options: list[str], message: str) -> None:
    wide = tmp_path / "wide.gguf"
    write_model(wide, tensors=random_tensors("llama") | {"blk.0.ffn_up.weight": np.ones((2, 256), np.float32)})
    assert message in refused("quantize", wide, tmp_path / "q.gguf", *options)
    assert not (tmp_path / "q.gguf").exists()


def test_a_full_disk_is_named_and_leaves_no_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("infer.system.atomic.os.fsync", full)
    told = run("quantize", model, tmp_path / "q.gguf", "-t", "Q8_0", status=1).err
    assert f"{tmp_path / 'q.gguf'}: No space left on device" in told
    assert list(tmp_path.iterdir()) == []
    told = refused("quantize", model, tmp_path / "no" / "q.gguf", "-t", "Q8_0")
    assert f"cannot be written: there is no folder {tmp_path / 'no'}" in told


# Importance matrices


CHUNKS = torch.randint(3, 96, (3, 24), generator=torch.manual_seed(1)).tolist()
NAMES = {"phi3": "PHI3", "gpt_oss": "GPT_OSS", "lfm2": "LFM2", "qwen3_5": "QWEN35"}


@torch.inference_mode()
def seen_by_hooks(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Return the mean squares of each linear layer's inputs over the chunks, by the gguf package's names."""
    sums = defaultdict[str, torch.Tensor](lambda: torch.zeros(()))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], model.config.num_hidden_layers)
    for path, module in model.named_modules():
        if re.search(r"\blayers?\.", path) and isinstance(module, torch.nn.Linear):
            name = names.get_name(path)
            assert name is not None, path

            def add(module: torch.nn.Module, inputs: tuple[torch.Tensor], name: str = name) -> None:
                sums[name] = sums[name] + inputs[0].double().square().flatten(0, -2).sum(0)

            module.register_forward_pre_hook(add)
    for chunk in CHUNKS:
        model(torch.tensor([chunk]))
    return {f"{name}.weight": (total / sum(map(len, CHUNKS))).numpy() for name, total in sums.items()}


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", NAMES)
def test_squares_are_those_of_hooks_on_transformers_whatever_the_file(name: str, tmp_path: Path) -> None:
    tiny = next(each for each in TINY if each.name == name)
    expected = seen_by_hooks(make_tiny(tiny, tmp_path), NAMES[name])
    found = [
        squares_of_inputs(open_checkpoint(path), None, CHUNKS, lambda done, total: None)
        for path in (tmp_path, convert(tmp_path, tmp_path / "model.gguf"))
    ]
    assert found[0].keys() == found[1].keys()
    others = {each for each in found[0] if "_exps." in each or "ffn_gate_inp" in each or "ssm_" in each}
    assert found[0].keys() - expected.keys() <= others
    for key, own in found[1].items():
        np.testing.assert_allclose(found[0][key].sums, own.sums, rtol=1e-3, atol=1e-4)
        assert found[0][key].counts.tolist() == own.counts.tolist()
        if key in expected and "ssm_out" not in key:
            np.testing.assert_allclose(own.means, expected[key], rtol=1e-3, atol=1e-5)
        if "gate_exps" in key:  # each token is an input of the experts that it chooses
            assert own.counts.sum() == tiny.config.num_experts_per_tok * sum(map(len, CHUNKS))
            assert len(set(own.counts)) > 1
    assert ("blk.0.ffn_down_exps.weight" in found[0]) == tiny.has_experts


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("name", "architecture"), [("bert", "BERT"), ("modernbert", "MODERN_BERT")])
def test_squares_of_encoders_are_those_of_hooks(name: str, architecture: str, tmp_path: Path, monkeypatch: Any) -> None:
    model = make_encoder(BY_NAME[name], tmp_path)
    expected, path = seen_by_hooks(model, architecture), tmp_path / "model.gguf"
    write_gguf(model, path, {"tokenizer.ggml.tokens": [f"[{index}]" for index in range(300)]}, pooling=1)
    monkeypatch.setattr(Backend, "step_limits", HOST_STEP._replace(tokens=2 * len(CHUNKS[0])))
    for files in (tmp_path, path):
        steps: list[int] = []
        found = squares_of_inputs(open_checkpoint(files), None, CHUNKS, lambda done, total, to=steps: to.append(done))
        assert steps == [2, 3]
        assert {key: each.counts.tolist() for key, each in found.items()} == {key: [3 * 24] for key in expected}
        for key, own in found.items():
            np.testing.assert_allclose(own.means, expected[key], rtol=1e-3, atol=1e-5)


def test_the_command_writes_what_it_collected_added_to_earlier_matrices(tmp_path: Path) -> None:
    folder, text, output = make_model(tmp_path / "one"), tmp_path / "text.txt", tmp_path / "out.gguf"
    text.write_text("".join(chr(32 + (7 * index * index + index) % 90) for index in range(100)))
    asked = ["imatrix", folder, text, "-c", "32", "-q", "-o", output]
    run(*asked)
    once = open_importance_matrix(output)
    assert (once.num_chunks, once.chunk_size, once.datasets) == (3, 32, (str(text),))
    assert all(each.counts.tolist() == [96] for each in once.squares.values())
    refused(*asked, "--in-file", output)  # the file exists
    run(*asked, "--in-file", output, "--force")
    twice = open_importance_matrix(output)
    assert (twice.num_chunks, twice.datasets) == (6, (str(text),) * 2)
    for name, each in twice.squares.items():
        np.testing.assert_allclose(each.sums, 2 * once.squares[name].sums, rtol=1e-6)
    run("imatrix", folder, text, "-c", "101", "-o", tmp_path / "none", status=2)
    assert not (tmp_path / "none").exists()


def matrix(**squares: InputSquares) -> ImportanceMatrix:
    return ImportanceMatrix(squares, ("a", "b"), 7, 64)


EXPERTS = InputSquares(np.array([[2.0, 4.0], [0.0, 0.0], [9.0, 3.0]]), np.array([2.0, 0.0, 3.0]))
DENSE = InputSquares(np.array([[128.0, 64.0, 32.0]]), np.array([128.0]))


def test_a_file_has_the_tensors_of_llama_cpp_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    matrix(experts=EXPERTS, dense=DENSE).write(path)
    reader = gguf.GGUFReader(path)
    tensors = {each.name: each.data for each in reader.tensors}
    assert tensors["experts.in_sum2"].tolist() == EXPERTS.sums.tolist()
    assert tensors["experts.counts"].tolist() == [[2], [0], [3]]
    assert tensors["dense.in_sum2"].tolist() == DENSE.sums.tolist()
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert (values["general.type"], values["imatrix.datasets"]) == ("imatrix", ["a", "b"])
    assert (values["imatrix.chunk_count"], values["imatrix.chunk_size"]) == (7, 64)
    found = open_importance_matrix(path)
    assert found.squares["experts"].means.tolist() == [[1, 2], [1, 1], [3, 1]], "an expert without inputs has ones"
    assert found.squares["dense"].means.tolist() == [1, 0.5, 0.25]
    assert (found.datasets, found.num_chunks, found.chunk_size) == (("a", "b"), 7, 64)


def test_the_older_format_has_means_times_calls(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    matrix(dense=DENSE).write(path)
    numbers = np.array([2.0, 1.0, 0.5], "<f4").tobytes()  # two calls of 64 inputs
    expected = b"\1\0\0\0" + b"\5\0\0\0dense" + b"\2\0\0\0" + b"\3\0\0\0" + numbers + b"\7\0\0\0" + b"\1\0\0\0b"
    assert path.read_bytes() == expected
    assert open_importance_matrix(path).squares["dense"].means.tolist() == [1, 0.5, 0.25]
    path.write_bytes(expected[:-9])  # without the optional end
    assert open_importance_matrix(path).squares["dense"].means.tolist() == [1, 0.5, 0.25]
    matrix(experts=EXPERTS).write(path)
    merged = matrix(experts=EXPERTS).merged(open_importance_matrix(path)).squares["experts"]
    assert (merged.means[0].tolist(), merged.counts.shape) == ([1, 2], (3,))


@pytest.mark.parametrize("cut_at", [0, 6, 11, 19, 30])
def test_a_file_that_ends_early_is_refused_in_one_line(cut_at: int, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    matrix(dense=DENSE).write(path)
    path.write_bytes(path.read_bytes()[:cut_at])
    refused("imatrix", "none", "--in-file", path, "-o", tmp_path / "out.gguf", status=3)
    assert not (tmp_path / "out.gguf").exists()


def test_matrices_of_different_models_are_not_added() -> None:
    other = InputSquares(np.ones((1, 5)), np.ones(1))
    with pytest.raises(ValueError, match="merge matrices of the same model"):
        matrix(dense=DENSE).merged(matrix(dense=other))
