"""Claims about GGUF files that break a rule: they are refused quickly, with the reason and no other exception."""

import struct
from contextlib import suppress
from pathlib import Path

import pytest

from gguf_files import ONE, TWO, U32, key_value, random_tensors, raw_file, read_bytes, tensor_entry, text, write_model
from infer.errors import ModelError, ModelFormatError, UnsupportedModelError
from infer.files import open_checkpoint
from infer.models.families import make_architecture
from processor_time import least_processor_seconds
from refusals import check_refused, refusal

HUGE = 2**64 - 1


def array(type_id: int, count: int, content: bytes = b"") -> bytes:
    """Return a file whose only value is an array."""
    return raw_file((key_value("k", 9, struct.pack("<IQ", type_id, count) + content),))


def tensors(*entries: bytes, size: int = 32) -> bytes:
    return raw_file((), entries, bytes(size))


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected at least 24 bytes, got 0"),
    "shorter than its header": (b"GGUF\3\0\0\0", "expected at least 24 bytes, got 8"),
    "bad magic": (raw_file(magic=b"GGML"), "magic at byte 0: expected b'GGUF', got b'GGML'"),
    "version 1": (raw_file(version=struct.pack("<I", 1)), "version at byte 4: expected 2 or 3, got 1"),
    "version 4": (raw_file(version=struct.pack("<I", 4)), "expected 2 or 3, got 4"),
    "big-endian": (raw_file(version=struct.pack(">I", 3)), "big-endian: only little-endian"),
    "tensor count of 2⁶⁴ − 1": (raw_file(num_tensors=HUGE), "tensor count at byte 8: expected at most 65536"),
    "more tensors than bytes": (raw_file(num_tensors=60_000), "60000 need 1980000 bytes or more, 0 remain"),
    "key-value count of 2⁶⁴ − 1": (raw_file(num_values=HUGE), "key-value count at byte 16: expected at most 65536"),
    "more key-values than bytes": (raw_file(num_values=5), "5 need 70 bytes or more, 0 remain"),
    "empty key": (raw_file((key_value("", 4, U32) + b"..",)), "a key at byte 24: is empty"),
    "key that is not UTF-8": (raw_file((key_value(b"\xff\xfe", 4, U32),)), "a key at byte 32: is not UTF-8"),
    "key of 65,537 bytes": (raw_file((key_value("k" * 65_537, 4, U32),)), "a string of 65537 bytes"),
    "key of 2⁶⁴ − 1 bytes": (raw_file((struct.pack("<Q", HUGE) + bytes(20),)), f"a string of {HUGE} bytes"),
    "duplicate key": (raw_file((key_value("k", 4, U32),) * 2), "key 'k' at byte 41: appears twice"),
    "unknown value type": (raw_file((key_value("k", 13, U32),)), "13 is not a value type"),
    "value beyond the end": (raw_file((key_value("key", 10, U32),)), "key 'key' at byte 39: needs 8 bytes, 4 remain"),
    "bool of 2": (raw_file((key_value("k", 7, b"\2"),)), "a bool is 0 or 1, got 2"),
    "bool of 2 in an array": (array(7, 2, b"\1\2"), "key 'k' at byte 50: a bool is 0 or 1, got 2"),
    "string that is not UTF-8": (raw_file((key_value("k", 8, text(b"ab\xff")),)), "key 'k' at byte 47: is not UTF-8"),
    "string of 2⁶⁴ − 1 bytes": (raw_file((key_value("k", 8, struct.pack("<Q", HUGE)),)), f"a string of {HUGE} bytes"),
    "array of 2⁶⁴ − 1 numbers": (array(4, HUGE), f"expected at most 4194304, got {HUGE}"),
    "more numbers than bytes": (array(4, 9), "9 need 36 bytes or more, 0 remain"),
    "array of two million strings": (array(8, 2_000_000), "expected at most 1000000, got 2000000"),
    "more strings than bytes": (array(8, 9), "9 need 72 bytes or more, 0 remain"),
    "string in an array beyond the end": (array(8, 1, struct.pack("<Q", HUGE)), f"a string of {HUGE} bytes"),
    "strings that use up the bytes": (array(8, 2, text("12345678")), "string 1 of 2 begins after the end"),
    "string in an array that is not UTF-8": (array(8, 2, text("a") + text(b"\xff")), "string 1 is not UTF-8"),
    "array of arrays": (array(9, 0), "arrays of arrays are not supported"),
    "no dimensions": (tensors(tensor_entry("abcdefghi", (), 0, 0)), "1 to 4 dimensions, got 0"),
    "five dimensions": (tensors(tensor_entry("a", (1,) * 5, 0, 0)), "1 to 4 dimensions, got 5"),
    "no elements": (tensors(tensor_entry("a", (8, 0), 0, 0)), "has no elements"),
    "a product that overflows": (
        tensors(tensor_entry("a", (2**32, 2**32), 0, 0)),
        f"{2**66} bytes at 0 of the data do not",
    ),
    "an offset that wraps": (tensors(tensor_entry("a", (8,), 0, HUGE)), f"32 bytes at {HUGE} of"),
    "unknown tensor type": (tensors(tensor_entry("a", (8,), 99, 0)), "99 is not a tensor type"),
    "row that is no multiple of its block": (
        raw_file((), (tensor_entry("a", (40,), 2, 0),), bytes(64)),
        "a row of 40 is not a multiple of Q4_0's block of 32",
    ),
    "duplicate tensor": (tensors(ONE, ONE, size=32), "tensor 'a': appears twice"),
    "empty tensor name": (tensors(tensor_entry("", (8,), 0, 0) + bytes(1)), "a tensor's name"),
    "overlap": (tensors(ONE, tensor_entry("b", (8,), 0, 0), size=64), "overlaps the tensor before it"),
    "hole": (tensors(ONE, tensor_entry("b", (8,), 0, 64), size=96), "leaves a hole before it"),
    "hole at the start": (tensors(tensor_entry("a", (8,), 0, 32), size=64), "leaves a hole before it"),
    "misaligned": (tensors(tensor_entry("a", (8,), 0, 4), size=64), "is not a multiple of 32"),
    "truncated data": (tensors(ONE, TWO, size=63), "truncated: expected 160 bytes, got 159: copy or download"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "is a pointer to a file of Git LFS"),
    "trailing bytes": (tensors(ONE, size=33), "trailing bytes: expected 96 bytes, got 97"),
    "trailing bytes without tensors": (raw_file((key_value("k", 4, U32),)) + bytes(40), "trailing bytes"),
    **{
        f"alignment {alignment}": (
            raw_file((key_value("general.alignment", 4, struct.pack("<I", alignment)),), (ONE,), bytes(32)),
            f"expected a power of two from 8 to 65536, got {alignment}",
        )
        for alignment in (0, 1, 13, 2**31)
    },
    "alignment in words": (raw_file((key_value("general.alignment", 8, text("32")),), (ONE,), bytes(32)), "got '32'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_refused_with_the_reason_and_at_once(tmp_path: Path, fault: str) -> None:
    content, reason = FAULTS[fault]
    assert reason in refusal(lambda: read_bytes(tmp_path, content), ModelFormatError)

    def refuse() -> None:
        with suppress(ModelFormatError):
            read_bytes(tmp_path, content)

    assert least_processor_seconds(refuse, 0.1) < 0.1


def test_a_type_of_ggml_that_we_do_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"tensor 'a' is Q8_K: supported are F32, .*Q6_K.*: use a file of the model in one of these",
    ):
        read_bytes(tmp_path, raw_file((), (tensor_entry("a", (256,), 15, 0),), bytes(136)))


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors("llama")
    tensors["blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"][:60]
    with pytest.raises(ModelFormatError, match="expected rows for 4 heads"):
        open_checkpoint(write_model(tmp_path / "m.gguf", "llama", tensors))


def test_two_names_for_one_weight_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors("llama")
    tensors["model.norm.weight"] = tensors["output_norm.weight"]
    with pytest.raises(ModelFormatError, match=r"is the same weight as 'output_norm\.weight'"):
        open_checkpoint(write_model(tmp_path / "m.gguf", "llama", tensors))


def test_a_vocabulary_without_weights_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="expected weights, got only a vocabulary"):
        open_checkpoint(write_model(tmp_path / "m.gguf", tensors={}))


def test_a_long_name_is_cut_in_the_message(tmp_path: Path) -> None:
    content = raw_file((key_value("k" * 60_000, 4, U32),) * 2)
    assert len(refusal(lambda: read_bytes(tmp_path, content), ModelFormatError)) < 200


@pytest.mark.parametrize("architecture", ["", "\nlama", "l" * 1000])
def test_an_architecture_that_is_no_name_is_refused(tmp_path: Path, architecture: str) -> None:
    content = raw_file((key_value("general.architecture", 8, text(architecture)),), (ONE,), bytes(32))
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"general\.architecture: expected a name, got '") as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert len(str(caught.value)) < 200


OUT_OF_RANGE = [
    ("llama.rope.dimension_count", 2**31, "expected an integer from 1 to 2147483647, got 2147483648"),
    ("llama.vocab_size", 0, "expected an integer from 1"),
    ("llama.attention.value_length", 8, "different length"),
    ("llama.attention.causal", 0, r"llama\.attention\.causal: expected true or false, got 0"),
]


@pytest.mark.parametrize(("key", "value", "reason"), OUT_OF_RANGE)
def test_hyperparameters_out_of_range_are_refused(tmp_path: Path, key: str, value: int, reason: str) -> None:
    path = write_model(tmp_path / "m.gguf", extend=lambda writer: writer.add_uint32(key, value))
    check_refused(lambda: open_checkpoint(path), reason, ModelError)


def test_an_array_with_more_values_than_a_model_has_layers_makes_no_tensors(tmp_path: Path) -> None:
    values = struct.pack("<IQ", 6, 4000) + bytes(16_000)
    content = raw_file(
        (key_value("general.architecture", 8, text("apertus")), key_value("apertus.xielu.eps", 9, values))
    )
    file = read_bytes(tmp_path, content)
    check_refused(lambda: file.values_of_layers(["xielu.eps"]), "at most 1024 values, one per layer", ModelFormatError)


def test_a_model_with_more_heads_than_any_has_makes_no_names_for_them() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 1 << 20, "intermediate_size": 64, "num_hidden_layers": 1}
    config = {"model_type": "stablelm", **sizes, "num_attention_heads": 1 << 20, "qk_layernorm": True}
    check_refused(lambda: make_architecture(config), "num_attention_heads must be .* from 1 to 4096", ModelError)
