"""Claims about the command line: its streams, the precedence of values, errors, signals and pipes."""

import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import infer
from cases import cases
from commands import FAKE, fake_process, refused, run
from fake_cli import FakeModel
from infer.cli import model_loading, subcommands
from infer.cli.terminal import Spinner
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.sampling.keywords import SamplingDefaults
from infer.errors import InvalidRequestError
from infer.model_settings import ModelSettings
from infer.sampling_params import SamplingParams
from infer.system.cores import num_processors
from infer.system.status_line import write_notice
from watched import python_command

HEAVY = {
    *("torch", "numba", "numpy", "transformers", "tokenizers", "jinja2", "msgspec", "prompt_toolkit", "rich"),
    *("asyncio", "infer.cli.chat_loop", "infer.cli.chat_prompt"),
}


def run_fake(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FAKE, *arguments], input=text, capture_output=True, text=True, check=False)


# Help and version


def test_help_and_version_load_nothing_heavy() -> None:
    commands = [[name, "--help"] for name in ("generate", "chat", "bench", "sample-trace")]
    lines = [["--help"], ["--version"], *commands, []]
    program = "import sys; from infer.cli import main; main(['--help']); first = set(sys.modules)\n"
    program += f"print('told', *map(main, {lines}), *sys.modules, 'first', *first)"
    done = subprocess.run(python_command(program), capture_output=True, text=True, check=True)
    all_found, _, first = done.stdout.splitlines()[-1].partition(" first ")
    _, *found = all_found.split()
    assert found[: len(lines)] == ["0"] * len(lines)
    assert HEAVY & set(found) == set()
    packages = {name.partition(".")[0] for name in first.split() if not name.startswith("_")}
    assert packages - sys.stdlib_module_names == {"click", "infer"}


def test_a_report_names_the_machine_and_what_runs_on_it() -> None:
    lines = run("--version", "-v").out.splitlines()
    expected = [f"infer {infer.__version__}", f"Python {platform.python_version()}, ", f"torch {version('torch')}"]
    expected += [f"{num_processors()} processors", f"cpu: {instruction_set().name}"]
    assert [part in line for part, line in zip(expected, lines, strict=False)] == [True] * 5
    assert "infer models -v" in refused("-v", "models")


def test_help_names_every_option_and_its_default() -> None:
    shown = " ".join(run("generate", "--help").out.split())
    for option, default in {
        "-m, --model": "smollm2", "-n, --max-new-tokens": "512", "--temperature": "the model's, else 1, in a chat 0.7",
        "--top-p": "the model's, else 1, in a chat 0.95", "--top-k": "the model's, else 0",
        "--repetition-penalty": "the model's, else 1", "--repetition-window": "the model's, else -1",
        "--max-seq-len": "the model's own, at most 8192", "--device, --backend": "cpu",
        "--precision": "exact", "--weights": "auto", "--dtype": "auto",
    }.items():  # fmt: skip
        assert re.search(rf"{re.escape(option)}[^-].*?\[default: {re.escape(default)}\]", shown), option


# Generate


def test_text_goes_to_stdout_and_times_to_stderr(fake: FakeModel) -> None:
    out, err = run("generate", "--prompt", "hello")
    told = ["cut at 2 tokens (-n)", "TTFT: 245.32 ms", "Avg TBT: 36.50 ms (27.4 tokens/sec)"]
    assert (out, err.splitlines()) == ("echo: hello \n", told)


def test_quiet_is_nothing_but_text_and_verbose_tells_all(fake: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "a", "-q") == ("echo: a \n", "")
    write_notice("of another command")
    assert capsys.readouterr().err == "of another command\n"
    told = run("generate", "--prompt", "a", "-v").err
    assert all(part in told for part in ("3 prompt, 2 generated", "Seed: 7", "length ('max_new_tokens')", "p50"))


def test_json_is_one_object(fake: FakeModel) -> None:
    record = run("generate", "--prompt", "a", "--json").json()
    assert (record["text"], record["token_ids"], record["seed"], record["model"]) == ("echo: a ", [0, 1], 7, "smollm2")
    assert record["timing"]["ttft_s"] == 0.24532


def test_chat_wraps_the_prompt_with_a_system_message_before_it(fake: FakeModel) -> None:
    found = run("generate", "-q", "--chat", "--system", "be brief", "--prompt", "hi")
    assert found.out == "echo: [be brief] 2 hi \n"


def test_a_prompt_comes_from_a_file_or_stdin(fake: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("à\nb", encoding="utf-8-sig")
    assert run("generate", "-q", "--prompt-file", path).out == "echo: à\nb \n"
    assert run_fake("generate", "-q", "--prompt-file", "-", text="xyz").stdout == "echo: xyz \n"


def used_params(*options: object) -> tuple[str, str]:
    """Return the parameters that the fake model gets, and the notes."""
    found = run("generate", "--prompt", "params", *options)
    return found.out.strip(), found.err


def test_every_option_has_an_effect(fake: FakeModel) -> None:
    options = [
        *["-n", "5", "--temperature", "0.5", "--top-p", "0.6", "--top-k", "7", "--min-p", "0.1", "--seed", "11"],
        *["--repetition-penalty", "1.3", "--repetition-window", "9", "--frequency-penalty", "0.2"],
        *["--presence-penalty", "0.3", "--logit-bias", "5=-inf", "--logit-bias", "6=2"],
        *["--stop", "a", "--stop", "b", "--ignore-eos"],
    ]
    expected = SamplingParams(
        max_new_tokens=5, temperature=0.5, top_p=0.6, top_k=7, min_p=0.1, repetition_penalty=1.3, repetition_window=9,
        frequency_penalty=0.2, presence_penalty=0.3, logit_bias={5: -float("inf"), 6: 2}, stop=["a", "b"], seed=11,
        ignore_eos=True,
    )  # fmt: skip
    assert used_params(*options)[0] == str(expected)


def test_without_options_the_table_of_defaults_holds(fake: FakeModel) -> None:
    assert used_params()[0] == str(SamplingParams(max_new_tokens=512))
    assert used_params("--chat")[0] == str(SamplingParams(max_new_tokens=512, temperature=0.7, top_p=0.95))


def test_the_seeds_defaults_are_a_preset_that_options_change(fake: FakeModel) -> None:
    expected = SamplingParams(
        max_new_tokens=512, temperature=0.8, top_p=0.9, top_k=7, repetition_penalty=1.1, repetition_window=64
    )
    fake.sampling_defaults = SamplingDefaults({"temperature": 0.3}, {"top_p": 0.5})
    shown, told = used_params("--preset", "seed", "--top-k", "7")
    assert shown == str(expected)
    assert "from the model" not in told


def test_the_command_line_goes_before_the_model_and_the_model_before_the_table(fake: FakeModel) -> None:
    fake.sampling_defaults = SamplingDefaults({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.2, "top_k": 9})
    shown, told = used_params("--chat", "--top-p", "0.9")
    assert shown == str(SamplingParams(max_new_tokens=512, temperature=0.6, top_p=0.9, top_k=9))
    source = "from the model: temperature 0.6; from the model's card: top_k 9"
    assert told.splitlines()[0] == f"{source} (--no-generation-config ignores them)"
    shown, told = used_params("--no-generation-config")
    assert shown == str(SamplingParams(max_new_tokens=512))
    assert "from the model" not in told
    assert "from the model" not in used_params("--temperature", "0")[1]


def test_a_warning_is_one_line_on_stderr(fake: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(options: Any) -> FakeModel:
        warnings.warn("its template\nis broken", stacklevel=1)
        return fake

    monkeypatch.setattr(model_loading, "load_model", load)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert run("generate", "-q", "a").err == "infer: its template is broken\n"


def test_off_is_zero_for_top_k_and_minus_one_for_the_window(fake: FakeModel) -> None:
    fake.sampling_defaults = SamplingDefaults({"top_k": 5, "repetition_penalty": 2.0, "repetition_window": 5})
    shown, _ = used_params("--top-k", "0", "--repetition-window", "-1", "-n", "-1")
    assert shown == str(SamplingParams(repetition_penalty=2.0, max_new_tokens=None))


# Constraints, paths, many prompts


def test_each_constraint_reaches_the_model(fake: FakeModel, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text('{"type": "integer"}', encoding="utf-8-sig")
    grammar.write_text('start: "a" | "b"')
    assert """json_schema='{"type": "integer"}'""" in used_params("--json-schema", schema)[0]
    inline = ' {"$id": "https://a//b"}'
    assert f"json_schema={inline!r}" in used_params("--json-schema", inline)[0]
    assert "regex='[ab]+'" in used_params("--regex", "[ab]+")[0]
    assert """grammar='start: "a" | "b"'""" in used_params("--grammar", grammar)[0]
    for options in (["--choice", "a b", "--choice", "c"], ["--choice", "a b", "c"], ["--choice=a b", "c", "-n", "3"]):
        assert "choice=('a b', 'c')" in used_params(*options)[0]
    assert "choice" not in used_params()[0]


@cases(
    "schema message",
    ("{", "json_schema is not JSON"),
    ('{"type": "string", "not": {"pattern": "a"}}', "json_schema at /not: the negation of 'pattern' cannot"),
    ('{"type": "text"}', "'type' must be one of"),
)
def test_bad_schemas_load_no_model(tmp_path: Path, schema: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "load_model", lambda options: pytest.fail("loaded"))
    path = tmp_path / "schema.json"
    path.write_text(schema)
    assert re.search(message, refused("generate", "--json-schema", path))


def test_the_path_is_chosen_by_options(fake: FakeModel) -> None:
    assert run("generate", "-q", "--prompt", "path").out == "echo: None 15 None error \n"
    options = ["--speculation", "ngram", "--draft-tokens", "3", "--prefill-chunk", "7", "--overflow", "truncate_left"]
    assert run("generate", "-q", "--prompt", "path", *options).out == "echo: ngram 3 7 truncate_left \n"


def test_stats_tell_which_path_ran(fake: FakeModel) -> None:
    options = ["--stats", "--speculation", "ngram", "--temperature", "0", "--choice", "a", "b"]
    assert run("generate", "-q", "--prompt", "a", *options).err.splitlines() == [
        "path          greedy, ngram speculation, choice",
        "prompt        3 tokens in 2 steps",
        "answer        2 tokens",
        "multi-steps   3 of 6.0 tokens, 18 in all",
        "single steps  2",
        "drafts        8 proposed, 4 accepted (50%)",
        "masks         5 filled",
        "forced        6 tokens not sampled",
        "first token   245.32 ms",
        "decode        73.00 ms, 27.4 tokens/sec, 3.00 ms of it sampling",
        "between       p50 36.50 ms, p95 41.45 ms, p99 41.89 ms",
        "arrival       –",
    ]


def test_many_prompts_are_answered_in_their_order(fake: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    out, err = run("generate", "--prompts-file", path)
    assert out == "echo: one \n\necho: two \n"
    assert re.fullmatch(r"2 of 2 answers cut at 2 tokens \(-n\)\n2 answers: 4 tokens in .* s \(.* tokens/sec\)\n", err)
    records = run("generate", "-q", "--chat", "--json", "--prompts-file", path).records()
    assert [each["text"] for each in records] == ["echo: 1 one ", "echo: 1 two "]
    records = run("generate", "-q", "--json-lines", "--prompts-file", path).records()
    assert [(each["index"], each["text"]) for each in records] == [(0, "echo: one "), (1, "echo: two ")]
    assert run_fake("generate", "-q", "--prompts-file", "-", text="a\nb").stdout == "echo: a \n\necho: b \n"


def test_json_lines_bring_their_own_parameters(fake: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"plain"\n{"prompt": "params", "temperature": 0.25, "max_tokens": 3}\n', "utf-8-sig")
    fake.sampling_defaults = SamplingDefaults({"temperature": 0.6, "top_p": 0.95})
    first, _, second = run("generate", "-q", "--top-k", "9", "--prompts-file", path).out.splitlines()
    assert first == "echo: plain "
    assert all(part in second for part in ("temperature=0.25", "max_new_tokens=3", "top_k=9", "top_p=0.95"))


@cases(
    "line message",
    ("{", "is not JSON"),
    ("3", 'must be a string or an object with "prompt", got 3'),
    ('{"text": "a"}', 'must be a string or an object with "prompt"'),
    ('{"prompt": "a", "top_q": 1}', "line 2: .*top_q.*did you mean"),
    ('{"prompt": "a", "regex": "(a"}', "regex, column 1"),
    ('{"prompt": "too long"}', "the context holds 100"),
)
def test_a_bad_line_is_named(fake: FakeModel, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    told = run("generate", "--prompts-file", path, status=2).err
    assert re.search(message, told)
    assert told.count("\n") == 1


def test_a_file_without_prompts_is_bad_input(fake: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n \n")
    assert "has no prompt" in refused("generate", "--prompts-file", path)


def test_a_long_prompt_shows_its_progress_on_a_terminal_alone(fake: FakeModel) -> None:
    assert run("generate", "-q", "--prompt", "read") == ("echo: read \n", "")
    shown = run("generate", "--prompt", "read", is_terminal=True).err
    assert "\rprompt ██████████           50 %\x1b[K\r\x1b[K" in shown


# Loading


class EveryModel(type):
    """The type of a class that annotations may keep after a test, so that each model must be an instance of it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return True


@pytest.fixture
def loaded_with(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments with which the last command made its `LLM`."""
    given: dict[str, Any] = {}

    class FakeLLM(FakeModel, metaclass=EveryModel):
        def __init__(self, model: str, **values: Any) -> None:
            super().__init__()
            values.pop("on_progress")(1, 3)
            given.update(values, model=model)

    monkeypatch.setattr("infer.llm.LLM", FakeLLM)
    return given


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_model_is_loaded_as_the_options_say(command: str, loaded_with: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for module in ("model_loading", "chat_loop"):
        monkeypatch.setattr(f"infer.cli.{module}.check_options", lambda options, params: None)
    prompt, is_chat = ["-p", "a"] if command == "generate" else [], command == "chat"
    run(command, "-q", *prompt)
    assert loaded_with == {"model": "smollm2", **vars(ModelSettings(prefix_disk=0))}
    disk = ["--prefix-disk", "2GB"] if is_chat else []
    run(command, "-q", *prompt, "-m", "m", "--kv-type", "q8", "--no-capture", "--max-seq-len", "99", *disk)
    given = {"kv_type": "q8", "capture": False, "max_seq_len": 99, "prefix_disk": 2 * 10**9 if is_chat else 0}
    assert loaded_with == {"model": "m", **vars(ModelSettings.of(given))}


def test_loading_shows_a_bar_on_a_terminal_alone(loaded_with: Any, capsys: Any, monkeypatch: Any) -> None:
    assert run("generate", "-q", "a").err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    run("generate", "a")  # -q has no effect on the next command
    with Spinner("loading m") as spinner:
        spinner.progress(1, 4)
        shown, ends = "", time.monotonic() + 60
        while "25 %" not in shown and time.monotonic() < ends:
            time.sleep(0.02)
            shown += capsys.readouterr().err
    assert "loading m █████                25 %" in shown


# Errors


@cases(
    "arguments message",
    (["generate", "--top-p", "1.5"], r"top_p must be in \(0, 1\], got 1.5"),
    (["generate", "--temperature", "nan"], "temperature must be in"),
    (["generate", "-n", "0"], "max_new_tokens must be at least 1"),
    (["generate", "--top-k", "many"], "'many' is not a valid integer"),
    (["generate", "once", "upon"], "the prompt must be one argument, got 2: put it in quotes"),
    (["generate", "a", "-p", "b"], "PROMPT and --prompt are both given"),
    (["generate", "a", "--logprobs", "2"], "--logprobs needs --json or --json-lines"),
    (["generate", "a", "--stop-token-ids", "x"], "'x' is not a list of ids"),
    (["generate", "a", "--batch-size", "65"], "--batch-size must be at most 64 with --device cpu, got 65"),
    (["generate", "--tempature", "1"], "Did you mean.*--temperature"),
    (["generate", "--logit-bias", "x=1"], "not ID=VALUE"),
    (["generate", "--logit-bias", "1=nan"], "logit_bias"),
    (["generate", "--prompt", "a", "--prompt-file", "b"], "both"),
    (["generate", "--system", "a"], "--chat"),
    (["generate", "--backend", "tpu"], "'tpu' is not one of"),
    (["chat", "--device", "cuda:x"], "'cuda:x' is not one of"),
    (["generate", "--backend", "vulkan"], "'vulkan' is not one of 'auto', .*: Vulkan is not supported"),
    (["generate", "--precision", "vague"], "--precision.*'vague' is not one of"),
    (["chat", "--weights", "q3"], "--weights.*'q3' is not one of"),
    (["bench", "-n", "0"], "-n.*0 is not in the range"),
    (["generate", "--regex", "a", "--grammar", __file__], "--regex and --grammar are both given: give one"),
    (["generate", "--regex", "a(b"], r"regex, column 2: .\(. is never closed"),
    (["generate", "--grammar", __file__], r"grammar, line \d+, column"),
    (["generate", "--speculation", "medusa"], "'medusa' is not"),
    (["generate", "--prompts-file", "a", "--prompt", "b"], "--prompt and --prompts-file are both given"),
    (["sample-trace", "a", "--prompt", "b"], "PROMPT and --prompt are both given"),
    (["sample-trace", "too long"], "the context holds 100"),
    (["sample-trace", "a", "--step", "0"], "--step.*0 is not in the range"),
    (["sample-trace", "a", "--num-candidates", "0"], "--num-candidates.*0 is not in the range"),
    (["sample-trace", "a", "-n", "3"], "No such option.*-n"),
    (["generte"], "did you mean 'generate'"),
    (["--nonsense"], "No such option"),
    (["generate", "--prompt", "too long"], "the context holds 100"),
)
def test_bad_input_is_one_line_and_status_2(fake: FakeModel, arguments: list[str], message: str) -> None:
    assert re.search(message, refused(*arguments))


def test_a_prompt_that_is_not_utf8_is_bad_input(fake: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"abc\xff")
    assert "not UTF-8: byte 3" in refused("generate", "--prompt-file", path)


def test_our_own_failure_is_status_1_and_verbose_shows_the_traceback(fake: FakeModel) -> None:
    told = refused("generate", "--prompt", "broken", status=1)
    assert told == "our own failure, RuntimeError: the model fell over (-v shows a traceback)"
    assert "Traceback" in run("generate", "--prompt", "broken", "-v", status=1).err


# Signals and pipes


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["generate", "json"])
def test_a_signal_ends_quietly_with_the_text(number: signal.Signals, status: int, command: str, tmp_path: Path) -> None:
    options = ["generate", "--prompt", "slow"] + (["--json"] if command == "json" else [])
    begun = tmp_path / "begun"
    with fake_process(*options, FAKE_BEGUN=str(begun)) as process:
        begin = os.read(process.stdout.fileno(), 100) if command == "generate" else b""
        while not begun.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        rest, errors = process.communicate()
    assert (process.returncode, errors) == (status, b"")
    assert json.loads(rest)["stop_reason"] == "cancelled" if command == "json" else begin.startswith(b"echo: ")


# Chat


def test_a_piped_chat_prints_answers_alone() -> None:
    done = run_fake("chat", "-q", text='one\ntwo \\\nlines\n"""\nx\ny\n"""\n//slash\n\n')
    assert done.returncode == 0
    assert done.stdout == "echo: 1 one \necho: 3 two \nlines \necho: 5 x\ny \necho: 7 /slash \n"


def test_an_error_keeps_the_session() -> None:
    text = "one\n/set temperature 9\n/nope\n/hlep\ntoo long\n/set top_pp 1\nthree\n/quit\nnever\n"
    done = run_fake("chat", text=text)
    assert done.stdout == "echo: 1 one \necho: 3 three \n"
    told = ["temperature must be in [0, 2], got 9", "there is no command /nope", "no longer fits"]
    told += ["did you mean /help", "did you mean top_p"]
    assert ([part for part in (*told, "Traceback") if part in done.stderr], done.returncode) == (told, 0)


def test_a_chat_with_a_model_that_has_no_template_ends_before_the_first_question(monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeModel, "can_chat", False)
    monkeypatch.setattr(model_loading, "load_model", lambda options: FakeModel())
    told = {False: "no chat template", True: "is an encoder and generates no text: use infer embed"}
    for reads_texts, message in told.items():
        monkeypatch.setattr(FakeModel, "architecture", SimpleNamespace(reads_whole_texts=reads_texts))
        with pytest.raises(InvalidRequestError, match=message):
            subcommands.infer.main(["chat"], standalone_mode=False)
