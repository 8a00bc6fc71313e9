"""The table of hostile files: each row names its tests, and each named test exists."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Of a file that breaks its format (GGUF, safetensors), of a model whose parts disagree, of code, and of saved sessions.
ROWS: dict[str, tuple[str, ...]] = {
    "bad magic, version or byte order": ("gguf_faults: bad magic", "gguf_faults: version 4", "gguf_faults: big-endian"),
    "empty, or shorter than its header": (
        "gguf_faults: empty", "gguf_faults: shorter than its header", "safetensors: shorter than its header",
    ),
    "truncated anywhere": (
        "gguf_faults: truncated data", "safetensors: truncated",
        "hostile_files: test_a_header_that_is_cut_anywhere_is_refused",
        "gguf_faults: test_a_file_truncated_anywhere_is_refused",
    ),
    "trailing bytes": ("gguf_faults: trailing bytes", "safetensors: trailing bytes"),
    "any bit flipped": ("hostile_files: test_thousands_of_flips_of_random_bits_are_read_or_refused",),
    "counts and lengths of 2⁶⁴ − 1": (
        "gguf_faults: tensor count of 2⁶⁴ − 1", "gguf_faults: key-value count of 2⁶⁴ − 1",
        "gguf_faults: key of 2⁶⁴ − 1 bytes", "gguf_faults: string of 2⁶⁴ − 1 bytes",
        "gguf_faults: array of 2⁶⁴ − 1 numbers", "safetensors: header length of 2⁶⁴ − 1",
    ),
    "products that overflow, padding that wraps": (
        "gguf_faults: a product that overflows", "gguf_faults: an offset that wraps",
        "safetensors: a product that overflows",
    ),
    "a row that is no multiple of its block": ("gguf_faults: row that is no multiple of its block",),
    "unknown type": (
        "gguf_faults: unknown tensor type", "gguf_faults: unknown value type", "safetensors: unknown dtype",
    ),
    "a bool that is not 0 or 1": ("gguf_faults: bool of 2", "gguf_faults: bool of 2 in an array"),
    "a key that is not UTF-8, or empty": (
        "gguf_faults: key that is not UTF-8", "gguf_faults: empty key", "safetensors: header that is not UTF-8",
    ),
    "a key or a tensor twice": (
        "gguf_faults: duplicate key", "gguf_faults: duplicate tensor", "safetensors: duplicate tensor",
        "safetensors: duplicate field", "hostile_files: a key twice",
    ),
    "overlap and hole": ("gguf_faults: overlap", "gguf_faults: hole", "safetensors: overlap", "safetensors: hole"),
    "a misaligned offset": ("gguf_faults: misaligned",),
    "alignment 0, 13, 2³¹": ("gguf_faults: alignment that is a string",),
    "an index that names what is not there, or lies outside": (
        "safetensors: test_an_index_stays_in_the_models_folder",
        "safetensors: test_an_index_may_not_promise_tensors_that_are_not_there",
    ),
    "missing, extra and misshapen tensors": (
        "hostile_files: a tensor that is missing", "hostile_files: a tensor too many",
        "hostile_files: a tensor of another shape", "hostile_files: two layers of which one is there",
    ),
    "layers 0, −1, a billion, in words": (
        "hostile_files: no layers", "hostile_files: minus one layer", "hostile_files: a billion layers",
        "hostile_files: layers in words",
    ),
    "rope_theta of 0, eps that is NaN": ("hostile_files: rope_theta of 0", "hostile_files: eps that is NaN"),
    "a vocabulary larger than the embedding, and a smaller one": (
        "hostile_files: a vocabulary larger than the embedding",
        "hostile_files: test_rows_of_the_embedding_that_no_token_names_are_never_said",
    ),
    "settings of any kind in any place": (
        "hostile_files: test_a_value_of_any_kind_in_any_place_is_read_or_refused",
    ),
    "pickle": ("safetensors: test_pickled_weights_are_never_opened_and_the_message_says_what_to_do",),
    "auto_map and code in the folder": (
        "runtime_imports: test_of_a_folder_only_what_is_read_is_opened",
        "runtime_imports: test_a_model_that_needs_code_of_its_own_is_told_that_none_is_run",
    ),
    "no pickle, evaluation or network": (
        "runtime_imports: test_our_source_has_no_pickle_no_evaluation_and_no_network",
        "runtime_imports: test_running_a_model_unpickles_nothing_and_uses_no_network",
    ),
    "a tokenizer that breaks the library": (
        "hostile_files: test_what_breaks_the_tokenizers_library_does_not_break_us",
    ),
    "a saved session that is damaged, cut, foreign or old": (
        "saved_session: test_every_flipped_byte_and_every_cut_is_found",
        "saved_session: test_a_file_of_another_model_names_what_differs",
        "saved_session: test_a_file_that_is_no_session_is_refused",
    ),
    "a disk that is full": (
        "saved_session: test_a_disk_that_is_full_keeps_the_old_file",
        "saved_session: test_a_save_that_fails_keeps_the_old_file",
    ),
    "killed while saving": (
        "hostile_files: test_a_process_that_is_killed_while_it_writes_leaves_the_old_file_or_the_new_one",
    ),
    "nothing is left behind, and nobody else disturbed": (
        "hostile_files: test_a_thousand_refused_files_leave_nothing_behind",
        "hostile_files: test_bad_files_disturb_no_other_request",
    ),
}  # fmt: skip


def proofs(module: str) -> set[str]:
    """The tests of a module, and the names of the faults in its tables."""
    (path,) = TESTS.rglob(f"test_{module}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)]
    keys = [key for table in tables if isinstance(table.value, ast.Dict) for key in table.value.keys]
    return names | {key.value for key in keys if isinstance(key, ast.Constant)}


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_are_there(row: str) -> None:
    for proof in ROWS[row]:
        module, _, name = proof.partition(": ")
        assert name in proofs(module), proof
