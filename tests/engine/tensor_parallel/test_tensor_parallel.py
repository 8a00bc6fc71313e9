"""Ranks as processes have the bits of one process, recorded and op by op, through shared memory and through gloo."""

import gc
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2MoeConfig

from classifier_model import make_classifier
from extent import IS_WHOLE
from infer import LLM, InvalidRequestError
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.limits import HOST_STEP
from infer.compute.operands.step import Chunk
from infer.compute.ops import SampledStep
from infer.compute.sampling.columns import SamplingColumns
from infer.engine.engine import Engine
from infer.engine.requests.prompt_batch import answer_all
from infer.engine.runner.runner import Runner
from infer.engine.tensor_parallel.leading import LeadingRunner
from infer.engine.tensor_parallel.ranks import ModelSource, Ranks, Transport, digest_of
from infer.errors import InferError
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_checked
from infer.sampling_params import SamplingParams
from looping import loop_of
from path_cases import CASES, CONFIGS, CONTEXT, Outcome, Way, World, make_sequence, make_world
from refusals import check_refused
from reranker_model import make_reranker_model
from served import serving
from tiny import GATED, GEMMA4, LONGROPE, ONE_EACH, TINY, Tiny, make_tiny

pytestmark = pytest.mark.slow

CAPACITY, NUM_SLOTS = 96, 4
SOME = {3: ("olmo2",), 4: ("qwen2_moe",)}  # by the number of ranks
# The ranks have room for the first family, and heads of GATED[0] are wider. It has a separate test.
WITH_MORE = [tiny for tiny in GEMMA4 if tiny.name in ("gemma4_per_layer", "gemma4_moe")]
FAMILIES = [*([tiny for tiny in TINY if tiny is not GATED[0]] if IS_WHOLE else [*ONE_EACH, *WITH_MORE]), LONGROPE]
FIRST = FAMILIES[0].name


@pytest.fixture(scope="module", autouse=True)
def _one_thread_a_rank() -> None:
    set_num_threads(1)


class Families(dict[str, Path]):
    """The folders of models by their families' names. Each is made when it is first used."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder

    def __missing__(self, name: str) -> Path:
        self[name] = self._make_folder(name)
        make_tiny(next(tiny for tiny in FAMILIES if tiny.name == name), self[name])
        return self[name]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp)


def ranks_of(folder: Path, size: int, transport: Transport = "memory") -> Ranks:
    return Ranks(source_of(folder), make_architecture(open_checkpoint(folder).config), size, transport)


def source_of(folder: Path, settings: ModelSettings | None = None) -> ModelSource:
    return ModelSource(folder, open_checkpoint(folder).fingerprint(), settings or ModelSettings(), 1)


def runner_of(
    folder: Path,
    ranks: Ranks | None = None,
    *,
    capture: bool = True,
    settings: CacheSettings | None = None,
    capacity: int = CAPACITY,
    weights: str = "auto",
) -> Runner:
    """Return the runner of one process, or of rank 0."""
    cache = settings or CacheSettings()
    of_cache = {name: getattr(cache, name) for name in ("kv_type", "eviction_policy", "eviction_window")}
    given = ModelSettings.of({"weights": weights, "max_seq_len": capacity, **of_cache})
    model = load_checked(open_checkpoint(folder), None, given, group=None if ranks is None else ranks.group)
    arguments: dict[str, Any] = {"capacity": capacity, "settings": cache, "num_slots": NUM_SLOTS, "capture": capture}
    if ranks is None:
        return Runner(model, **arguments)
    ranks.source = source_of(folder, given)
    return LeadingRunner(ranks, model, **arguments)


def columns_of(runner: Runner) -> SamplingColumns:
    columns = SamplingColumns(NUM_SLOTS, 96, end_ids=[], device=torch.device("cpu"))
    for slot in range(NUM_SLOTS):
        columns.write(slot, SamplingParams(temperature=0.9, seed=slot), 0)
    columns.select(range(NUM_SLOTS))
    return columns


def steps(runner: Runner, num_sampled: int = 8) -> tuple[list[Tensor], list[list[int]]]:
    """Return the logits of prompts and of a dropped draft, and the tokens after them, in steps and multi-steps."""
    ids = torch.randint(3, 96, (NUM_SLOTS, 40), generator=torch.Generator().manual_seed(0)).tolist()
    logits, columns, sampled = list[Tensor](), columns_of(runner), [list[int]() for _ in ids]

    def run(lengths: Sequence[int], num_drafts: int = 0) -> list[Chunk]:
        chunks = []
        for slot, length in enumerate(lengths):
            runner.choose_rope(slot, CAPACITY if slot % 2 else 40)
            runner.cache.reserve(slot, length)
            start = runner.lengths[slot]
            chunks.append(Chunk(slot, ids[slot][start : start + length], num_drafts))
        with torch.inference_mode():
            logits.append(runner.forward(chunks).clone())
        return chunks

    for lengths, num_drafts, count in (((9, 1, 20, 5), 0, None), ((3, 3, 3, 3), 2, 1), ((1, 1, 1, 1), 0, None)):
        run(lengths, num_drafts)
        for slot, length in enumerate(lengths):
            runner.commit(slot, length if count is None else count)
    chunks = [Chunk(slot, [7]) for slot in range(NUM_SLOTS)]
    for slot in range(NUM_SLOTS):
        runner.cache.reserve(slot, num_sampled + 1)
    while len(sampled[0]) < num_sampled:
        step = SampledStep(chunks, runner.starts(chunks), columns)
        found = runner.multi_step(step, num_sampled).token_ids
        for slot, token_ids in enumerate(found or runner.launch(step).wait().token_ids):
            runner.commit(slot, len(token_ids))
            sampled[slot] += token_ids
        chunks = [Chunk(slot, [token_ids[-1]]) for slot, token_ids in enumerate(sampled)]
    with torch.inference_mode():
        for slot in range(NUM_SLOTS):
            runner.cache.reserve(slot, 1)
        logits.append(runner.forward(chunks).clone())
    runner.cache.reset()
    return logits, sampled


def check_same(runner: Runner, expected: tuple[list[Tensor], list[list[int]]]) -> None:
    logits, sampled = steps(runner, len(expected[1][0]))
    assert sampled == expected[1]
    assert all(map(torch.equal, logits, expected[0]))


@pytest.fixture(scope="module")
def pair(families: Families) -> Iterator[Ranks]:
    ranks = ranks_of(families[FIRST], 2)
    yield ranks
    ranks.close()


def test_every_family_has_the_bits_of_one_rank(families: Families, pair: Ranks) -> None:
    for tiny in FAMILIES:
        folder = families[tiny.name]
        check_same(runner_of(folder, pair), steps(runner_of(folder)))


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize(("size", "transport"), [(3, "memory"), (4, "gloo"), (4, "memory")][: 3 if IS_WHOLE else 2])
def test_more_ranks_have_the_bits_of_one(families: Families, size: int, transport: Transport, tmp_path: Path) -> None:
    """Few families are tried with ranks that compete for the cores: one has output gates and the widest heads, one has
    norms over all heads, and one has experts beside a shared expert. Each rank computes the logits in its own memory.
    """
    make_tiny(GATED[0], tmp_path)
    ranks = ranks_of(tmp_path, size, transport)
    names = [tiny.name for tiny in FAMILIES] if IS_WHOLE else SOME[size]
    try:
        for folder in (tmp_path, *map(families.__getitem__, names)):
            runner = runner_of(folder, ranks, capture=transport == "memory")
            check_same(runner, steps(runner_of(folder)))
        runner.cache.reserve(0, 3)
        with torch.inference_mode():
            logits = runner.forward([Chunk(0, [5, 6, 7], num_drafts=2)])
        assert ranks.digests() == [digest_of(logits)] * (size - 1)
        ranks.source = source_of(tmp_path)._replace(fingerprint="another")
        with pytest.raises(InferError, match="changed while its ranks were loading it"):
            ranks.load({"capacity": CAPACITY, "num_slots": NUM_SLOTS})
    finally:
        ranks.close()


EXPERTS = [("qwen2_moe", "q8", True), ("qwen2_moe", "q4", False), ("qwen3_moe", "q4", True)]
KINDS: list[tuple[str, dict[str, Any], bool]] = [(name, {"weights": each}, capture) for name, each, capture in EXPERTS]
for each, capture in (("f32", False), ("q8", True), ("q4", False)):
    KINDS.append(("gemma3", {"settings": CacheSettings(kv_type=each)}, capture))  # heads of 32


@pytest.mark.slow(rest=2)
@pytest.mark.parametrize(("family", "kind", "capture"), KINDS, ids=str)
def test_every_cache_and_quantised_experts_have_the_bits_of_one_rank(
    families: Families, pair: Ranks, family: str, kind: dict[str, Any], capture: bool
) -> None:
    expected = steps(runner_of(families[family], **kind))
    check_same(runner_of(families[family], pair, capture=capture, **kind), expected)


def test_each_rank_has_its_share_of_each_expert(families: Families, pair: Ranks) -> None:
    whole, own = (runner_of(families["qwen2_moe"], ranks).model.layers[0] for ranks in (None, pair))
    parts = [(layer.experts, layer.experts.shared) for layer in (whole.feed_forward, own.feed_forward)]
    sizes = [[each.out_features for each in (x.gate, x.up, x.down, y.gate_up, y.down)] for x, y in parts]
    assert parts[1][0].router_logits.out_features == parts[0][0].router_logits.out_features
    assert sizes[1] == [rows // 2 for rows in sizes[0]]


@pytest.mark.slow(rest=0)
def test_shared_memory_has_room_for_a_whole_step_of_experts(tmp_path: Path) -> None:
    """The shared expert is as wide as all chosen experts together, as in Qwen1.5-MoE."""
    sizes = {"num_experts_per_tok": 6, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 6 * 256}
    make_tiny(Tiny("experts", Qwen2MoeConfig.from_dict(CONFIGS["experts"].to_dict() | sizes)), tmp_path)
    length = HOST_STEP.tokens // NUM_SLOTS
    ids = torch.randint(3, 96, (NUM_SLOTS, length), generator=torch.Generator().manual_seed(0)).tolist()

    def logits_of(ranks: Ranks | None) -> Tensor:
        runner = runner_of(tmp_path, ranks, capacity=length, weights="q8")
        for slot in range(NUM_SLOTS):
            runner.cache.reserve(slot, length)
        with torch.inference_mode():
            found = runner.forward([Chunk(slot, ids[slot]) for slot in range(NUM_SLOTS)]).clone()
        runner.cache.reset()
        return found

    ranks = ranks_of(tmp_path, 2)
    try:
        assert torch.equal(logits_of(ranks), logits_of(None))
    finally:
        ranks.close()


POLICIES = {
    "sliding": CacheSettings(eviction_policy="sliding", eviction_window=24, page_tokens=16),
    "snapkv": CacheSettings(eviction_policy="snapkv", eviction_window=48, page_tokens=16),
    "prefixes": CacheSettings(reuse_prefixes=True, page_tokens=16),
}


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_those_of_one_rank(world: World, pair: Ranks, policy: str) -> None:
    """Batches have drafts, grammars and all samplers, and the cache evicts or shares."""
    check_answers(world, pair, POLICIES[policy])


def test_answers_of_experts_are_those_of_one_rank(pair: Ranks, tmp_path: Path) -> None:
    check_answers(make_world("experts", tmp_path), pair, POLICIES["prefixes"])


def check_answers(world: World, pair: Ranks, settings: CacheSettings) -> None:
    cases = CASES[:: 1 if IS_WHOLE else 3]

    def run(runner: Runner) -> list[Outcome]:
        engine, ways = Engine(runner, max_steps=8), [Way("none"), Way("ngram")]
        made = [make_sequence(world, case, ways[index % 2]) for index, case in enumerate(cases)]
        ended = dict(answer_all(loop_of(engine), enumerate(made), NUM_SLOTS))
        return [Outcome.of(ended[number]) for number in range(len(cases))]

    expected = run(runner_of(world.folder, settings=settings, capacity=CONTEXT))
    assert run(runner_of(world.folder, pair, settings=settings, capacity=CONTEXT)) == expected


def test_a_step_that_an_exception_left_midway_is_followed_by_right_ones(families: Families, pair: Ranks) -> None:
    expected, runner = steps(runner_of(families[FIRST])), runner_of(families[FIRST], pair)
    chunks: tuple[Any, ...] = ([Chunk(0, [5])], [0])
    for name, given in (("forward", chunks), ("multi_step", (*chunks, 4)), ("extend", (0, [5]))):
        pair.lead(name, *given)
        runner.cache.reset()  # rank 0 runs nothing of the step
        check_same(runner, expected)


def test_no_rank_restarts_while_another_waits(families: Families, pair: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slower rank may be in a step that rank 0 has finished, until it reports that it has left the step."""
    runner, told = runner_of(families[FIRST], pair), list[str]()
    send, begin_anew = Ranks._send, type(pair.group).begin_anew
    monkeypatch.setattr(Ranks, "_send", lambda self, calls: [told.append(calls[0][0]), send(self, calls)])
    answers = Ranks._answers
    monkeypatch.setattr(Ranks, "_answers", lambda self: (told.append("answered"), answers(self))[1])
    monkeypatch.setattr(type(pair.group), "begin_anew", lambda self: [told.append("rank 0"), begin_anew(self)])
    runner.cache.reset()
    assert told == ["leave", "answered", "rank 0", "begin_anew", "answered"]


def test_a_rank_that_dies_within_a_step_ends_the_group_with_one_error(families: Families) -> None:
    ranks = ranks_of(families[FIRST], 3)
    try:
        runner = runner_of(families[FIRST], ranks)
        runner.cache.reserve(0, 1)
        process = ranks._processes[1]
        process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor() as threads:
            step = threads.submit(runner.forward, [Chunk(0, [5])])
            process.kill()
            check_refused(step.result, r"^rank 2 of the model's 3 ended by signal 9: load the model again$", InferError)
        check_refused(runner.cache.reset, "rank 2", InferError)
    finally:
        ranks.close()


@pytest.mark.slow(cases=1)
def test_answers_of_a_dead_rank_print_nothing(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unraisable, reported = list[Any](), list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda found: unraisable.append(found.exc_value))
    monkeypatch.setattr("threading.excepthook", lambda found: reported.append(str(found.exc_value)))
    with LLM(world.folder, threads=1, tensor_parallel=2) as llm:
        stream, session = llm.stream("abc abc", max_new_tokens=50, ignore_eos=True), llm.session()
        session.append([5, 6, 7])
        next(stream)
        (process,) = llm.host._ranks._processes
        process.kill()
        for ask in (lambda: list(stream), lambda: llm.generate("abc"), lambda: session.append([8])):
            with pytest.raises(InferError, match="rank 1"):
                ask()
        del stream, session, ask
        gc.collect()
        assert list(tmp_path.iterdir()) == []  # a killed process would leave files
    assert unraisable == []
    assert reported == ["rank 1 of the model's 2 ended by signal 9: load the model again"], "its end, and that once"


def test_ranks_end_with_rank_0(families: Families) -> None:
    ranks = ranks_of(families[FIRST], 2)
    process = ranks._processes[0]
    runner_of(families[FIRST], ranks)
    ranks.lead("forward", [Chunk(0, [5])], [0])  # the other rank waits for this one in the call
    ranks._pipes[0].close()
    assert process.wait() == 0
    ranks.close()


def test_a_model_that_is_shared_out_answers_converses_and_is_closed(world: World, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.8, "seed": 1}
    with LLM(world.folder, threads=1) as one, LLM(world.folder, threads=1, tensor_parallel=2) as two:
        assert two.generate("abc abc", **asked).token_ids == one.generate("abc abc", **asked).token_ids
        ids = one.tokenizer.encode("abc bar abc")
        assert torch.equal(two.logits(ids), one.logits(ids))
        assert two.prompt_logprobs(ids) == one.prompt_logprobs(ids)
        path, found = tmp_path / "session", list[list[int]]()
        for saving, loading in ((one, two), (two, one), (two, two)):
            session = saving.session()
            session.append(ids)
            session.generate(**asked)
            session.save(path)
            found.append(loading.load_session(path).generate(**asked).token_ids)
        assert found == [found[0]] * 3
        processes = two.host._ranks._processes
    assert [process.poll() for process in processes] == [-signal.SIGKILL]


def test_texts_are_for_models_of_one_process(tmp_path: Path) -> None:
    make_classifier(tmp_path / "a")
    make_reranker_model(tmp_path / "Qwen3-Reranker-tiny")
    with LLM(tmp_path / "a", threads=1, tensor_parallel=2) as shared, serving(shared, allow_embeddings=True) as served:
        for call in (shared.embed, shared.classify):
            with pytest.raises(InvalidRequestError, match=r"vectors, scores and labels .* load it without"):
                call(["abc"])
        for path in ("/v1/embeddings", "/v1/classify"):
            answer = served.client.post(path, json={"input": "abc"})
            assert (answer.status_code, "tensor_parallel" in answer.json()["error"]["message"]) == (400, True)
    with LLM(tmp_path / "Qwen3-Reranker-tiny", threads=1, tensor_parallel=2) as shared:
        check_refused(lambda: shared.rerank("a", ["b"]), "load it without tensor_parallel")
        assert shared.generate("a", temperature=0, max_new_tokens=2).token_ids
