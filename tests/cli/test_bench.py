"""`infer bench` on a tiny random model: its measurements, their sums, and its pictures."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, Lfm2Config, Qwen3_5TextConfig

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from cases import cases
from commands import refused, run
from encoder_models import BY_NAME, make_encoder
from infer import LLM, GenerationResult, SamplingParams
from infer.cli.bench.memory_probe import MemoryProbe
from infer.cli.bench.profile import mixer_bytes, mixer_flops, profile, summarize
from infer.cli.bench.speed import Workload, kv_bytes, measure, weight_bytes_by_kind, workloads
from infer.cli.commands.bench_command import comparison_lines, profile_lines, speed_lines
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.mixers import GatedDeltaNet
from infer.engine.runner.runner import Runner
from infer.models.families import make_architecture
from infer.system.status_line import bar
from tiny import Tiny, make_tiny

WORKLOAD = Workload(prompt_tokens=12, new_tokens=6, repeats=2)
WINDOW = 8
READ_BYTES = 1 << 20  # so few that the bandwidth is not accurate
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": VOCAB_SIZE, "intermediate_size": 96, "bos_token_id": None, "eos_token_id": 256}
SMALL = ["-p", "12", "-n", "4", "--repeats", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of two layers, the second of which has a window."""
    folder = tmp_path_factory.mktemp("model")
    kinds = ["sliding_attention", "full_attention"]
    own = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": kinds, "max_position_embeddings": 128}
    make_tiny(Tiny("bytes", Gemma3TextConfig(**SIZES, **own, pad_token_id=0)), folder)
    write_byte_tokenizer(folder)
    return folder


# Speed


def test_rates_and_latencies_are_positive_and_ordered_and_the_share_is_that_of_decode(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    speed = measure(llm, WORKLOAD, lambda done, total: told.append((done, total)), read_bytes=READ_BYTES)
    assert min(speed.prefill_tokens_per_second, speed.ttft_s, speed.decode_tokens_per_second) > 0
    assert 0 < speed.inter_token_p50_s <= speed.inter_token_p95_s <= speed.inter_token_p99_s
    assert speed.read_bandwidth > 0
    assert speed.peak_resident_bytes > speed.weight_bytes
    assert told == [(1, 3), (2, 3), (3, 3)]
    num_bytes = speed.weight_bytes + speed.kv_bytes
    assert speed.achieved_bandwidth == pytest.approx(num_bytes * speed.decode_tokens_per_second)
    assert speed.bandwidth_share == pytest.approx(speed.achieved_bandwidth / speed.read_bandwidth)
    assert json.loads(json.dumps(speed.to_json()))["bandwidth_share"] == speed.bandwidth_share


@pytest.mark.parametrize(("rate", "words"), [(1.0, "decode itself"), (1e15, "% used")])
def test_no_share_is_above_the_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch, rate: float, words: str) -> None:
    """The probe reads as many bytes as a token reads, so that weights in a cache are compared with the cache."""
    sizes = list[int]()

    def read_rate(probe: MemoryProbe) -> float:
        sizes.append(probe.num_bytes)
        return rate

    monkeypatch.setattr(MemoryProbe, "read_rate", read_rate)
    speed = measure(llm, WORKLOAD)
    assert 0 < speed.bandwidth_share <= 1
    assert set(sizes) == {(speed.weight_bytes + speed.kv_bytes) // 8 * 8}
    assert words in next(line for line in speed_lines(speed) if line.startswith("bandwidth"))


def test_a_rate_above_the_limit_is_that_of_a_cache(llm: LLM) -> None:
    found = summarize(llm.model, "decode", [("L0.qkv.matmul F32", 1e-5)], 1, 12, 1.0)
    [line] = (line for line in profile_lines(found, 100) if line.split()[0] == "qkv")
    assert "a cache" in line
    assert line.count("%") == 1


def test_decode_reads_every_matrix_once_and_one_row_of_the_embedding(llm: LLM) -> None:
    model = llm.model
    matrices = [part for projection in model.projections for part in projection.parts]
    table = model.embedding.parts[0]
    expected = sum(part.num_bytes for part in (*matrices, *model.head.parts)) + table.num_bytes // table.out_features
    assert sum(weight_bytes_by_kind(model).values()) == expected


@pytest.mark.parametrize("context", [3, WINDOW, 50])
def test_a_window_bounds_the_bytes_read_of_the_cache(llm: LLM, context: int) -> None:
    a_position = 2 * 2 * 16 * 2  # keys and values of two heads, in f16
    assert kv_bytes(llm.model, context) == a_position * (context + min(context, WINDOW))


def test_a_context_of_its_own_leaves_the_prefill_as_it_is(llm: LLM) -> None:
    speed = measure(llm, Workload(prompt_tokens=5, new_tokens=3, context=20, repeats=1), read_bytes=READ_BYTES)
    assert speed.kv_bytes == kv_bytes(llm.model, 21)
    assert "3 tokens at 20" in "\n".join(speed_lines(speed))


def test_a_run_generates_the_asked_number_of_tokens_each_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, generate = list[tuple[int, int | None]](), llm.generate

    def counted(prompt: list[int], params: SamplingParams) -> GenerationResult:
        result = generate(prompt, params)
        asked.append((result.generated_tokens, params.seed))
        return result

    monkeypatch.setattr(llm, "generate", counted)
    speed = measure(llm, Workload(prompt_tokens=12, new_tokens=6, repeats=3), read_bytes=READ_BYTES)
    assert asked == [(6, seed) for seed in (42, 43, 44, 45, 46)]  # two warm-ups, three trials
    fastest, slowest = speed.fastest_step, speed.slowest_step
    assert fastest.seconds <= speed.inter_token_p50_s <= slowest.seconds
    assert (1 <= fastest.step <= 5, fastest.seq_len, speed.wall_s > speed.ttft_s) == (True, 12 + fastest.step, True)


def test_an_answer_of_one_token_has_no_decode_step(llm: LLM) -> None:
    """Without the host's bandwidth, its rows are left out."""
    speed = measure(llm, Workload(prompt_tokens=12, new_tokens=1, repeats=1, warmups=0), read_bytes=0)
    assert (speed.decode_tokens_per_second, speed.fastest_step, speed.bandwidth_share) == (0.0, None, 0.0)
    shown = "\n".join(speed_lines(speed))
    assert ("min –" in shown, "decode" in shown, "GB/s" in shown) == (True, True, False)


# Suites

CANONICAL = {
    "short-greedy": (64, 64), "medium-greedy": (256, 256), "prefill-heavy": (1024, 64), "decode-heavy": (64, 1024),
    "medium-sampled": (256, 256), "long-context": (1024, 1024), "medium-full-pipeline": (256, 256),
}  # fmt: skip
SUITE = ["--suite", "quick", "--trials", "1", "--warmup", "0", "--seed", "5"]


def test_a_suite_has_its_canonical_configs() -> None:
    found = {name: workloads(name, repeats=3, warmups=2, seed=42) for name in ("quick", "standard", "full")}
    assert len(found["quick"]) == 2
    assert {name: (each.prompt_tokens, each.new_tokens) for name, each in found["full"].items()} == CANONICAL
    assert found["standard"].keys() == CANONICAL.keys() - {"long-context", "medium-full-pipeline"}
    sampled = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    assert found["full"]["medium-sampled"].sampling == sampled
    assert found["full"]["medium-full-pipeline"].sampling == sampled | {"repetition_penalty": 1.1}


def test_a_suite_prints_a_row_per_config_and_skips_what_does_not_fit(folder: Path) -> None:
    rows = [" ".join(row.split()) for row in run("bench", "--model", folder, *SUITE).out.splitlines()]
    assert rows[2].startswith("short-greedy 64 64 ")
    assert rows[3].startswith("steps in ms: mean ")
    assert rows[4] == "medium-greedy skipped: needs 512 tokens, and the model's context has 128"


def test_a_report_has_the_figures_of_each_config_and_the_machine(folder: Path, tmp_path: Path) -> None:
    shown = run("bench", "--model", folder, *SUITE, "--json", "--report", tmp_path).json()
    (file,) = tmp_path.glob("bench-*-quick-*.json")
    assert json.loads(file.read_text()) == shown
    assert (shown["model"], shown["device"], shown["gpu_name"], shown["seed"]) == (str(folder), "cpu", None, 5)
    assert (shown["trials"], shown["warmups"], shown["suite"]) == (1, 0, "quick")
    for key in ("dtype", "timestamp", "infer_version", "torch_version", "numba_version", "cpu_name", "threads"):
        assert shown[key]
    (config,) = shown["configs"]
    assert (config["name"], config["prompt_tokens"], config["generated_tokens"]) == ("short-greedy", 64, 64)
    for key in (
        *("ttft_median_ms", "prompt_throughput_median_tps", "decode_throughput_median_tps", "wall_time_median_s"),
        *(f"per_step_latency_{name}_ms" for name in ("mean", "p50", "p95", "p99", "min", "max")),
        *("post_load_memory_gb", "peak_memory_gb", "end_to_end_throughput_median_tps"),
    ):
        assert config[key] > 0
    assert config["per_step_latency_max_seq_len"] == 64 + config["per_step_latency_max_step"]
    assert (config["peak_gpu_memory_gb"], shown["skipped"][0]["name"]) == (None, "medium-greedy")


def test_a_comparison_shows_ratios_and_the_conditions_that_differ(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    run("bench", "--model", folder, *SMALL, "--report", path)
    before = json.loads(path.read_text())
    before["configs"].append(before["configs"][0] | {"name": "other"})
    path.write_text(json.dumps(before | {"threads": 99}))
    shown = run("bench", "--model", folder, *SMALL, "--compare", path, "--json").json()
    assert (shown["compared"]["12/4"]["ttft_median_ms"] > 0, shown["compared"]["other"]) == (True, "only in the report")
    assert shown["differences"] == [f"threads differs: 99 before, {before['threads']} now"]
    report = before | {"configs": [before["configs"][0] | {"ttft_median_ms": 1.0, "decode_throughput_median_tps": 0}]}
    lines = list(comparison_lines(report, before))
    assert lines[2].split()[:3] == ["12/4", f"{before['configs'][0]['ttft_median_ms']:.2f}", "×"]
    assert "–" in lines[2]


@cases(
    "options message",
    (["--suite", "quick", "-p", "12"], "--suite and --prompt-tokens are both given"),
    (["--suite", "quick", "--profile"], "--profile and --suite are both given"),
    (["--suite", "huge"], "'huge' is not one of 'quick', 'standard', 'full'"),
    (["--compare", "none.json"], "the report none.json cannot be read: No such file or directory"),
    (["--compare", __file__], "is not a report of infer bench: write one with --report"),
    (["--report", "no/folder/x.json"], "there is no folder no/folder"),
    (["--warmup", "-1"], "-1 is not in the range"),
    (["--repeats", "x"], "'x' is not a valid integer"),
    (["--dtype", "float32", "--weights", "q8"], "contradict"),
)
def test_a_wrong_option_or_report_is_one_line(folder: Path, monkeypatch: Any, options: list[str], message: str) -> None:
    monkeypatch.setattr("infer.cli.commands.bench_command.LLM", None)
    assert message in refused("bench", "--model", folder, *options)


# Profile


def test_a_profile_has_every_operation_and_layer_and_both_add_up_to_the_same_time(llm: LLM) -> None:
    _, decode = found_all = profile(llm, WORKLOAD, read_bytes=READ_BYTES)
    expected = sum(weight_bytes_by_kind(llm.model).values()) + kv_bytes(llm.model, 12)
    assert sum(operation.num_bytes for operation in decode.operations) == expected
    for found in found_all:
        assert sum(seconds for _, seconds in found.layers) == pytest.approx(found.seconds)
        for width in (80, 120):
            lines = list(profile_lines(found, width))
            assert max(len(line) for line in lines) == width
            assert any("L0" in line and "L1" in line for line in lines)
        kinds = {operation.kind for operation in found.operations if operation.seconds > 0}
        assert kinds == {"embed", "qkv", "attend", "output", "gate_up", "down", "head", "norm"}
        assert [name for name, _ in found.layers] == ["embed", "L0", "L1", "head"]


def test_a_profile_has_keys_and_values_of_the_requested_type(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners = list[Runner]()

    def make_runner(*args: Any) -> Runner:
        runners.append(Runner(*args))
        return runners[-1]

    monkeypatch.setattr("infer.cli.bench.profile.Runner", make_runner)
    llm = LLM(folder, kv_type="f32")
    _, decode = profile(llm, WORKLOAD, read_bytes=READ_BYTES)
    [runner] = runners
    assert runner.cache.kind == "paged f32"
    expected = sum(weight_bytes_by_kind(llm.model).values()) + kv_bytes(llm.model, 12, "f32")
    assert sum(operation.num_bytes for operation in decode.operations) == expected
    assert measure(llm, WORKLOAD, read_bytes=0).kv_bytes == kv_bytes(llm.model, WORKLOAD.depth + 3, "f32")


def test_a_prefills_times_and_multiplications_are_a_tokens(llm: LLM) -> None:
    model, commands = llm.model, [("L0.qkv.matmul F32", 8.0), ("L0.attend.chunks", 4.0), ("head.matmul F32", 2.0)]
    one, four = (summarize(model, "prefill", commands, count, 0, 1e9) for count in (1, 4))
    assert four.seconds == one.seconds / 4
    flops = [{operation.kind: operation.num_flops for operation in found.operations} for found in (one, four)]
    assert flops[1]["qkv"] == flops[0]["qkv"] == 2 * 2 * 64 * (4 + 2 + 2) * 16
    assert flops[1]["head"] == flops[0]["head"] // 4
    assert (flops[0]["attend"], flops[1]["attend"]) == (2 * 4 * 4 * 16, 2 * 4 * 4 * 16 * (1 + 2 + 3 + 4) // 4)


# Layers with a state

NET = GatedDeltaNet(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, num_taps=4)
CHANNELS, ENTRY, STATE = 2 * 32 + 128, 2 * 16 + 4 * 32 + 4, 4 * 16 * 32  # floats of a token's input and log, and of S
HYBRIDS = {
    "delta_net": Qwen3_5TextConfig(
        layer_types=["linear_attention", "full_attention"], head_dim=16, **SIZES,
        linear_num_key_heads=NET.num_key_heads, linear_num_value_heads=NET.num_value_heads,
        linear_key_head_dim=NET.key_dim, linear_value_head_dim=NET.value_dim,
    ),
    "conv": Lfm2Config(layer_types=["conv", "full_attention"], conv_L_cache=3, **SIZES),
}  # fmt: skip


def architecture_of(kind: str) -> Architecture:
    architecture = make_architecture(HYBRIDS[kind].to_dict())
    assert kind != "delta_net" or architecture.mixers[0] == NET
    return architecture


@cases(
    "context floats",
    (0, STATE + CHANNELS + ENTRY),  # a state of zeros, the token's input and its entry of the log are written
    (1, STATE + ENTRY + CHANNELS + (CHANNELS + ENTRY)),
    (100, STATE + 36 * ENTRY + 3 * CHANNELS + (CHANNELS + ENTRY)),  # place 36 of the second page
    (128, STATE + 64 * ENTRY + 3 * CHANNELS + (STATE + CHANNELS + ENTRY)),  # the third page's state is written
)
def test_a_delta_net_moves_a_state_its_log_and_inputs_of_its_convolution(context: int, floats: int) -> None:
    assert mixer_bytes(architecture_of("delta_net"), "f16", context)["delta_net"] == 4 * floats


@cases(
    "context of_log of_states",
    (0, 1, 2),  # q with its own k; k and q with the state
    (1, 3, 2),
    (100, 2 * 36 + 1, 2),
    (128, 1, 2 + 64),  # each token of the page before is added to the state
)
def test_a_delta_net_multiplies_with_its_state_and_its_log(context: int, of_log: int, of_states: int) -> None:
    found = mixer_flops(architecture_of("delta_net"), 1, context)["delta_net"]
    of_each_token = 2 * 16 + 4 * 32  # k of the key heads, u of the value heads
    assert found == 2 * (4 * CHANNELS + of_log * of_each_token + of_states * STATE)


def test_a_short_convolution_moves_inputs_and_multiplies_with_its_taps() -> None:
    architecture = architecture_of("conv")
    for context, count in ((0, 1), (1, 2), (2, 3), (9, 3)):
        assert mixer_bytes(architecture, "f16", context)["conv"] == 4 * 64 * count
    assert mixer_flops(architecture, 1, 9)["conv"] == 2 * 3 * 64


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_prefills_operations_are_a_tokens_share(kind: str) -> None:
    architecture = architecture_of(kind)
    each = [mixer_flops(architecture, 1, position) for position in range(70)]
    found = mixer_flops(architecture, 70, 0)
    assert found.keys() == {kind, "attend"}
    for name, flops in found.items():
        assert flops == sum(one[name] for one in each) // 70


@pytest.mark.slow
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_profile_shows_the_costs_of_layers_with_a_state(kind: str, tmp_path: Path) -> None:
    make_tiny(Tiny(kind, HYBRIDS[kind]), tmp_path)
    write_byte_tokenizer(tmp_path)
    llm = LLM(tmp_path)
    model = llm.model
    workload = Workload(prompt_tokens=512, new_tokens=1, context=100)  # more pages than are free after the calibration
    prefill, decode = profile(llm, workload, read_bytes=READ_BYTES)
    by_kind = {operation.kind: operation for operation in decode.operations}
    assert by_kind[kind].num_bytes == mixer_bytes(model.architecture, model.kv_type, 100)[kind]
    assert by_kind["attend"].num_bytes == 100 * 2 * 2 * 16 * 2  # keys and values of two heads, in f16
    for found, amount in ((prefill, "num_flops"), (decode, "num_bytes")):
        operation = next(each for each in found.operations if each.kind == kind)
        rate = f"{getattr(operation, amount) / operation.seconds / 1e9:.1f}"
        line = next(line for line in profile_lines(found, 100) if line.split()[0] == kind)
        assert line.split()[5] == rate
        assert operation.num_flops == mixer_flops(model.architecture, found.num_tokens, found.context)[kind]


# Pictures


@cases("share expected",
    (0.0, ""), (1.0, "████"), (0.5, "██"), (1 / 32, "▏"), (0.375, "█▌"), (2.0, "████"), (-1.0, ""), (31 / 32, "███▉"),
)  # fmt: skip
def test_a_bar_is_exact_to_an_eighth_of_a_character(share: float, expected: str) -> None:
    assert bar(share, 4) == expected


# The command


def test_the_command_prints_a_table_and_its_progress_only_on_a_terminal(folder: Path) -> None:
    out, err = run("bench", "--model", folder, *SMALL)
    for part in ("prefill", "TTFT", "decode", "4 tokens at 12", "p95", "GB/s", "bandwidth", "peak resident", "exact"):
        assert part in out
    assert f" {instruction_set().name}, " in out
    assert err == ""
    assert "max_seq_len must be from 2 to the model's own 128" in refused("bench", "--model", folder, "-n", "1000")
    assert "loading" in run("bench", "--model", folder, *SMALL, is_terminal=True).err


@pytest.mark.slow
def test_the_command_prints_json(folder: Path) -> None:
    asked = ["bench", "--model", folder, *SMALL, "--weights", "q8", "--json"]
    record = run(*asked, "--precision", "fast").json()
    assert (record["weights"], record["precision"], record["speed"]["workload"]["new_tokens"]) == ("q8", "fast", 4)
    assert [found["name"] for found in run(*asked, "--profile").json()["profile"]] == ["prefill", "decode"]


def test_an_encoder_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_encoder(BY_NAME["bert"], tmp_path)
    monkeypatch.setattr("infer.cli.commands.bench_command.LLM", None)
    for options in ([], ["--suite", "quick"]):
        told = refused("bench", "--model", tmp_path, *options)
        assert "is an encoder and generates no text: name a decoder" in told
