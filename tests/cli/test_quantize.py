"""`infer quantize`: its files keep the model's metadata, and each refusal is a line that names the fix."""

import errno
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch

from cases import cases
from commands import refused, run
from gguf_files import random_tensors, write_model
from infer.files import open_checkpoint
from infer.files.gguf.gguf import read_gguf
from infer.files.gguf.importance_matrix import ImportanceMatrix, InputSquares
from infer.files.tensors.lazy_weights import LazyWeights, as_float32
from test_session import make_model


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
    changed = {"general.file_type": 15, "general.quantization_version": 2}
    assert written.metadata == source.metadata | changed
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
    monkeypatch.setattr("infer.system.files.atomic.os.fsync", full)
    told = run("quantize", model, tmp_path / "q.gguf", "-t", "Q8_0", status=1).err
    assert f"{tmp_path / 'q.gguf'}: No space left on device" in told
    assert list(tmp_path.iterdir()) == []
    told = refused("quantize", model, tmp_path / "no" / "q.gguf", "-t", "Q8_0")
    assert "cannot be written: No such file or directory" in told
