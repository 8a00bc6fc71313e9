"""Prompts are read once: their beginnings are found in memory and on disk, and the answers are the same."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from infer import LLM, SamplingParams
from infer.cli.model_loading import bytes_for_prefixes
from infer.cli.option_fields import make_options
from infer.cli.server_options import ServeOptions
from infer.cli.subcommands import infer as commands
from infer.compute.backends.cpu import isa
from infer.compute.kvcache.page_exchange import PageExchange
from infer.compute.kvcache.prefix_store import PrefixStore
from infer.engine.prefixes.prefix_ends import prefix_end
from path_cases import EOS, make_folder
from programs import Programs
from refusals import check_refused
from served import serving

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
PROMPT = [(7 * index + index // 9) % EOS for index in range(220)]  # three pages of 64 tokens, and part of one


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a new folder for prefixes. Compiled kernels are still in the usual folder."""
    monkeypatch.setattr("infer.compute.kvcache.prefix_store.base_folder", lambda: tmp_path / "cache")


def long_model(name: str, folder: Path) -> Path:
    """Make a tiny model with a context of 512 tokens."""
    path = make_folder(name, folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 512}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model("llama", tmp_path_factory.mktemp("llama"))


def files_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "prefixes").glob("*/*"))


def answer(folder: Path, prompt: list[int] = PROMPT, **settings: object) -> tuple[list[int], int, int]:
    """Return the answer of a newly loaded model, and the numbers of tokens that it found in memory and on disk."""
    with LLM(folder, prefix_disk="1GB", **settings) as llm:
        result = llm.generate(prompt, GREEDY)
    return result.token_ids, result.reused_tokens, result.disk_tokens


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", ["wide", "windows", "chunks", "shared keys", "convolutions", "states"])
def test_a_second_process_finds_what_the_first_one_read(name: str, tmp_path: Path) -> None:
    kv_type = "q8" if name == "wide" else "f16"
    model = long_model(name, tmp_path / "model")
    plain = LLM(model, kv_type=kv_type).generate(PROMPT, GREEDY).token_ids
    assert answer(model, kv_type=kv_type) == (plain, 0, 0)
    assert answer(model, kv_type=kv_type) == (plain, 192, 192)


def test_the_answer_is_found_too_and_memory_comes_first(folder: Path) -> None:
    with LLM(folder, prefix_disk="1GB") as llm:
        said = llm.generate(PROMPT, replace(GREEDY, max_new_tokens=60)).token_ids
    with LLM(folder, prefix_disk="1GB") as llm:
        assert llm.generate(PROMPT[:140], GREEDY).disk_tokens == 128
        result = llm.generate([*PROMPT, *said, 1], GREEDY)
        assert (result.reused_tokens, result.disk_tokens) == (256, 128)
        again = llm.generate([*PROMPT, *said, 1], GREEDY)
        assert (again.reused_tokens, again.disk_tokens, again.token_ids) == (256, 0, result.token_ids)


@pytest.mark.slow  # other kernels are compiled
def test_another_type_or_precision_finds_nothing(folder: Path) -> None:
    assert [answer(folder, kv_type=each)[2] for each in ("f16", "bf16", "bf16")] == [0, 0, 192]
    assert [answer(folder, precision=each, weights="q8")[2] for each in ("exact", "fast", "fast")] == [0, 0, 192]


@pytest.mark.skipif(not isa.instruction_set().has_pairs, reason="hardware: a CPU with AVX512-BF16")
def test_a_cpu_without_bf16_products_finds_nothing_and_has_another_fingerprint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[tuple[int, str]]()
    for has_dots, precision in ((True, "fast"), (False, "fast"), (True, "exact"), (False, "exact")):
        monkeypatch.setenv("INFER_ISA", "avx512bf16" if has_dots else "avx512vnni")
        with LLM(folder, prefix_disk="1GB", kv_type="bf16", precision=precision) as llm:
            found.append((llm.generate(PROMPT, GREEDY).disk_tokens, llm.system_fingerprint))
    assert [num_tokens for num_tokens, _ in found] == [0, 0, 0, 0]
    assert len({fingerprint for _, fingerprint in found}) == 3
    assert found[2][1] == found[3][1]


def test_another_salt_or_model_finds_nothing(folder: Path, tmp_path: Path) -> None:
    answer(folder)
    assert answer(folder)[2] == 192
    assert answer(folder, max_seq_len=400, pool_pages=9)[2] == 192  # another size of the cache
    assert answer(long_model("llama", tmp_path / "copy"))[2] == 0  # written at another time
    with LLM(folder, prefix_disk="1GB") as llm:
        assert llm.generate(PROMPT, GREEDY, cache_salt="another").disk_tokens == 0
        assert llm.generate(PROMPT, GREEDY).disk_tokens == 192


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_damaged_file_costs_a_reading_and_a_line_but_no_token(
    index: int, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = answer(folder)[0]
    path = files_of(tmp_path)[index]
    content = bytearray(path.read_bytes())
    content[random.Random(index).randrange(len(content))] ^= 16
    path.write_bytes(content)
    token_ids, _, num_from_disk = answer(folder)
    assert token_ids == plain
    assert num_from_disk < 192
    assert [record.getMessage() for record in caplog.records if "digest differs" in record.getMessage()]
    assert answer(folder) == (plain, 192, 192)  # it was stored again


def test_pages_that_cannot_be_stored_or_read_fail_no_answer(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LLM(folder).generate(PROMPT, GREEDY).token_ids
    with monkeypatch.context() as patched:
        patched.setattr("infer.compute.kvcache.prefix_store._SPARE_BYTES", 1 << 62)
        for _ in range(2):
            assert answer(folder) == (plain, 0, 0)
    assert "less than 1 GB free" in caplog.text
    answer(folder)

    monkeypatch.setattr(PrefixStore, "read", Mock(side_effect=OSError(5, "Input/output error")))
    assert answer(folder) == (plain, 0, 0)
    assert "cannot be read (Input/output error)" in caplog.text


def test_pages_that_do_not_fit_the_pool_are_read_again(folder: Path) -> None:
    plain = answer(folder)[0]
    with LLM(folder, prefix_disk="1GB", max_seq_len=256, pool_pages=4) as llm:
        held = llm.session()
        held.append(PROMPT[100:200])  # two of the four pages
        result = llm.generate(PROMPT, GREEDY)
        assert result.token_ids == plain
        llm.host.runner.cache.check_integrity()


def test_concurrent_and_cancelled_prompts_find_the_stored_pages(folder: Path) -> None:
    prompts = [[*PROMPT[: 70 + 10 * index], *range(index)] for index in range(12)]
    plain = [result.token_ids for result in LLM(folder).generate_all(prompts, GREEDY)]
    for _ in range(2):
        with LLM(folder, prefix_disk="1GB") as llm:
            with llm.stream(PROMPT, GREEDY):
                pass  # the context ends immediately
            assert [result.token_ids for result in llm.generate_all(prompts, GREEDY, batch_size=8)] == plain


def test_sizes_are_texts_or_numbers_and_others_are_refused(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, prefix_disk=0) as llm:
        llm.generate(PROMPT, GREEDY)
    assert not files_of(tmp_path)
    for wrong in ("much", -1, True, 1.5):
        check_refused(partial(LLM, folder, prefix_disk=wrong), "prefix_disk must be a number of bytes or a size")


def test_a_prompt_that_changes_near_its_start_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    generator = random.Random(3)
    text = [generator.randrange(3, EOS) for _ in range(400)]
    with LLM(folder, reuse_prefixes=True) as llm:
        for count in range(3):
            llm.generate([*text[:79], *[5] * count, *text[90:]], GREEDY)  # only a counter differs
            llm.generate([*text[:100], *text[200:]], GREEDY)  # from here on, the text differs
    told = [record.getMessage() for record in caplog.records if "differs from an earlier one" in record.getMessage()]
    assert ["differs from an earlier one at token 79, and" in each for each in told] == [True]
    assert str(text[90:95]) not in caplog.text


@pytest.mark.parametrize(("num_gone", "num_new"), [(0, 1), (1, 0), (5, 5), (30, 3), (3, 200)])
def test_the_place_of_a_change_is_found_and_a_new_ending_is_none(num_gone: int, num_new: int) -> None:
    ids = np.random.default_rng(4).integers(0, 30_000, 2000, np.int32)
    new = np.arange(30_000, 30_000 + num_new, dtype=np.int32)
    end = prefix_end(ids, np.concatenate([ids[:300], new, ids[300 + num_gone :]]))
    assert end.position == 300
    assert end.num_again >= 2000 - 300 - max(num_gone, 32)
    # A prompt that continues a shorter one has no such place, and neither has one that lacks too much.
    for one, other in ((ids[:900], ids), (ids, ids[:900]), (ids, np.concatenate([ids[:300], ids[1000:]]))):
        assert prefix_end(one, other) is None


def test_a_disk_that_is_slower_than_the_model_is_left(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answer(folder)[0]
    monkeypatch.setattr("infer.engine.prefixes.prefix_disk._SLICE_BYTES", 1)  # a page at a time
    for seconds, num_loaded in ((60.0, 192), (1e-9, 64), (0.0, 192)):
        with LLM(folder, prefix_disk="1GB") as llm:
            prefixes = llm.host.engine.prefixes
            monkeypatch.setattr(prefixes, "seconds_to_compute", lambda num_tokens, start, found=seconds: found)
            result = llm.generate(PROMPT, GREEDY)
        assert (result.token_ids, result.disk_tokens) == (plain, num_loaded)
        assert ("takes longer than computing prompts" in caplog.text) == (num_loaded == 64)
        caplog.clear()


def test_a_fault_of_the_thread_leaves_no_prompt_waiting(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answer(folder)[0]

    monkeypatch.setattr(PageExchange, "put", Mock(side_effect=ValueError("a fault")))
    with LLM(folder, prefix_disk="1GB") as llm:
        for _ in range(2):
            assert llm.generate(PROMPT, GREEDY, timeout=60).token_ids == plain
    assert caplog.text.count("this is a fault of infer") == 1


def test_a_server_counts_what_came_from_disk(folder: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    for expected in ({"cached_tokens": 0}, {"cached_tokens": 192, "disk_tokens": 192}):
        with LLM(folder, prefix_disk="1GB") as llm, serving(llm) as served:
            usage = served.client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            metrics = served.client.get("/metrics").text
        assert usage["prompt_tokens_details"] == expected
        assert f"infer:prefix_disk_hits_total {expected.get('disk_tokens', 0)}.0" in metrics
        assert "infer:prefix_disk_stored_bytes_total" in metrics


SIZES = {"": 8 * 10**9, "--prefix-disk 1.5GiB": 3 << 29, "--prefix-disk 0": 0, "--api-key-file F": 0}


@pytest.mark.parametrize(("arguments", "expected"), SIZES.items())
def test_a_server_keeps_prefixes_without_keys(arguments: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFER_PREFIX_DISK")
    assert bytes_for_prefixes(parsed(arguments.split())) == expected
    with_keys = parsed(["--api-key-file", "F", "--prefix-disk", "1GB"])
    check_refused(lambda: bytes_for_prefixes(with_keys), "--prefix-disk stores the prompts of all users")


def parsed(arguments: list[str]) -> ServeOptions:
    values = commands.commands["serve"].make_context("serve", arguments).params
    return make_options(ServeOptions, values)


_UNCLOSED = """
import sys
from pathlib import Path
from infer import LLM
from infer.compute.kvcache import prefix_store
prefix_store.base_folder = lambda: Path(sys.argv[1])
llm = LLM(sys.argv[2], prefix_disk="1GB")
llm.generate([(7 * index + index // 9) % int(sys.argv[3]) for index in range(220)], max_tokens=1)
"""


@pytest.mark.slow
def test_a_program_that_closes_nothing_stores_all_at_its_end(folder: Path, tmp_path: Path, programs: Programs) -> None:
    ended = programs.run(_UNCLOSED, tmp_path / "cache", folder, EOS)
    assert ended.returncode == 0, ended.stderr
    assert (len(files_of(tmp_path)), answer(folder)[2]) == (3, 192)


# Beginnings in memory


COMMON = [(7 * index + index // 9) % EOS for index in range(100)]  # a page of 64 tokens, and part of one
PROMPTS = [[*COMMON, *range(index, index + 10)] for index in range(4)]


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_prompts_that_begin_alike_share_whole_pages_with_the_same_answers(name: str, tmp_path: Path) -> None:
    folder = make_folder(name, tmp_path)
    plain, sharing = LLM(folder), LLM(folder, reuse_prefixes=True)
    expected = [plain.generate(prompt, GREEDY) for prompt in PROMPTS]
    assert [result.reused_tokens for result in expected] == [0] * 4

    alone = [sharing.generate(prompt, GREEDY) for prompt in PROMPTS]
    assert sharing.generate(COMMON[:64], GREEDY).reused_tokens == 0  # its last token has to be run

    together = sharing.generate_all(PROMPTS, GREEDY, batch_size=2)
    for found, num_reused in ((alone, [0, 64, 64, 64]), (together, [64] * 4)):
        assert [result.token_ids for result in found] == [result.token_ids for result in expected]
        assert [result.reused_tokens for result in found] == num_reused

    further = [*PROMPTS[0], *alone[0].token_ids[:6], *range(12)]  # 128 tokens, and the cache has those of the answer
    result = sharing.generate(further, GREEDY)
    assert (result.reused_tokens, result.token_ids) == (64, plain.generate(further, GREEDY).token_ids)


def test_a_session_that_goes_back_writes_over_no_page_that_others_find(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    plain, sharing = LLM(folder), LLM(folder, reuse_prefixes=True)
    session = sharing.session()
    session.append(COMMON)
    session.rewind(60)
    session.append(PROMPTS[1][90:])
    del session  # its pages can now be used by others
    for prompt in (PROMPTS[0], [*COMMON[:40], *PROMPTS[1][90:], *COMMON[:30]]):
        assert sharing.generate(prompt, GREEDY).token_ids == plain.generate(prompt, GREEDY).token_ids
