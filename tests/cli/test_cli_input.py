"""Claims about the input of commands: prompts, files of wrong kinds and names of other programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cases import cases
from commands import FAKE, fake_process, refused, run
from fake_cli import FakeModel
from infer.cli.subcommands import infer
from infer.sampling_params import SamplingParams
from terminals import terminal
from test_cli import run_fake, used_params
from watched import python_command

# Prompts


def test_a_word_an_option_and_a_pipe_are_prompts(fake: FakeModel) -> None:
    with open(os.devnull) as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", nothing)
        assert run("generate", "-q", "hello you").out == "echo: hello you \n"
        assert run("generate", "hello", "-q", "-n", "3").out == "echo: hello \n"
        assert run("generate", "-q", "-p", "hello").out == "echo: hello \n"
        assert run("sample-trace", "hello").out.startswith("step 1, after 'hello'")
    assert run_fake("generate", "-q", text="from a\npipe\n").stdout == "echo: from a\npipe \n"
    assert run_fake("generate", "-q", "--chat", text="from a pipe").stdout == "echo: 1 from a pipe \n"


def test_a_piped_text_goes_after_the_word_and_not_after_the_option() -> None:
    assert run_fake("generate", "-q", "Sum up:", text="an article\n").stdout == "echo: Sum up:\n\nan article \n"
    done = run_fake("generate", "--prompt", "Sum up:", text="an article\n")
    assert done.stdout == "echo: Sum up: \n"
    assert "stdin is not read with --prompt" in done.stderr


def test_a_file_redirected_to_stdin_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_text("from a file\r\n")
    with path.open() as file:
        done = subprocess.run([*FAKE, "generate", "-q"], stdin=file, capture_output=True, text=True, check=True)
    assert done.stdout == "echo: from a file \n"


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("text", ["", "\n", "  \n"])
def test_an_empty_pipe_is_bad_input(text: str) -> None:
    done = run_fake("generate", text=text)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'infer: no prompt: stdin is empty; give one, as in infer generate "Once upon a time"\n'


@pytest.mark.slow
def test_a_closed_stdin_is_bad_input_without_a_prompt_and_no_matter_with_one() -> None:
    for arguments, status in (("generate", 2), ("generate hello", 0), ("generate -p hello", 0)):
        command = f"{sys.executable} {FAKE[1]} {arguments} <&-"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert "our own failure" not in done.stderr


def test_on_a_terminal_a_prompt_is_asked_for() -> None:
    with terminal([*FAKE, "generate"]) as screen:
        screen.until("prompt: ")
        screen.press(b"typed here\n", "echo: typed here")
        screen.ended(0)


# Files that options name


@pytest.mark.parametrize("option", ["--prompt-file", "--prompts-file", "--chat-template", "--grammar", "--json-schema"])
def test_devices_folders_and_endless_files_are_refused(option: str, fake: FakeModel, tmp_path: Path) -> None:
    fifo, sparse = tmp_path / "fifo", tmp_path / "sparse"
    os.mkfifo(fifo)
    sparse.touch()
    os.truncate(sparse, 10 << 30)
    prompt = [] if option.startswith("--prompt") else ["x"]
    reasons = dict.fromkeys(("/dev/zero", "/dev/null"), "it must be a regular file, a pipe or - for stdin")
    reasons |= {str(tmp_path): "it is a folder", str(fifo): "it is a pipe without a writer"}
    for path, why in (reasons | {str(sparse): "is too long", f"{tmp_path}/none": "No such file"}).items():
        assert why in refused("generate", *prompt, option, path), path


def test_an_endless_stdin_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ["sh", "-c", f"yes | {sys.executable} {' '.join(FAKE[1:])} generate --grammar - x"]
    done = subprocess.run(endless, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "infer: the file of --grammar - is too long: it must have at most 1 MiB\n"


@pytest.mark.slow
@pytest.mark.parametrize("num_words", [1, 50_000])
def test_a_shells_pipe_is_a_file(num_words: int) -> None:
    command = f"{sys.executable} {FAKE[1]} generate -q --prompt-file <(yes hello | head -n {num_words})"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("echo: " + "hello\n" * num_words + " \n", "")


@pytest.mark.slow
def test_two_options_cannot_both_read_stdin() -> None:
    done = run_fake("generate", "--grammar", "-", "--prompt-file", "-", text='start: "a"')
    assert done.returncode == 2
    assert "are both stdin (-): put one of them into a file" in done.stderr


# Names of other programs


@cases(
    "word message",
    ("smollm2", "to name a model: infer chat smollm2"),
    ("org/repo:Q4_K_M", "infer chat org/repo:Q4_K_M"),
    ("./a.gguf", "infer chat ./a.gguf"),
    ("Once upon a time", 'to give a prompt: infer generate "TEXT"'),
    ("Generate", "did you mean 'generate'?"),
    ("chatt", "did you mean 'chat'?"),
    ("pulll", "did you mean 'pull'?"),
    ("xyzzy", "use one of batch, bench, chat"),
)
def test_a_first_word_that_is_no_command_says_what_to_type(word: str, message: str) -> None:
    assert message in refused(word)


def test_options_of_other_programs_are_taken(fake: FakeModel) -> None:
    for name in ("--max-tokens", "--num-tokens", "--num-predict", "--n-predict"):
        for options in ([name, "7"], [f"{name}=7"]):
            assert used_params(*options)[0] == str(SamplingParams(max_new_tokens=7))
    expected = SamplingParams(max_new_tokens=512, temperature=0.5, repetition_penalty=1.2)
    assert used_params("--temp", "0.5", "--repeat-penalty", "1.2")[0] == str(expected)
    assert "--max-tokens" not in run("generate", "--help").out


def test_the_command_lines_of_document_003_run(fake: FakeModel, tmp_path: Path) -> None:
    path = tmp_path / "long_prompt.txt"
    path.write_text("params")
    window = "--kv-type q4 --eviction-policy sliding --eviction-window 512 --max-seq-len 2048 --num-tokens 256 -p a"
    model = "--model-path smollm2 --prompt params -n 128"
    for line in (model, window, f"--prompt-file {path} --num-tokens 512"):
        assert run("generate", "-q", "--no-generation-config", *line.split()).err == ""
    told = run("generate", "-p", "a", "--zero-copy", "--gpu-attn").err
    assert "infer: --zero-copy is always on if a device has the host's memory: nothing is copied" in told
    assert "infer: --gpu-attn is not needed: attention runs on the model's device (--device)" in told
    assert run("generate", "-q", "-p", "a", "--zero-copy").err == ""


def test_the_remaining_fields_of_the_parameters_have_options(fake: FakeModel) -> None:
    options = ["--min-new-tokens", "2", "--stop-token-ids", "4,5", "--stop-token-ids", "6", "--temperature-last"]
    options += ["--allowed-token-ids", "7 8", "--include-stop-str-in-output", "--logprobs", "3", "--json"]
    text = run("generate", "-p", "params", *options, "--logprobs-mode", "processed").json()["text"]
    expected = SamplingParams(
        max_new_tokens=512, min_new_tokens=2, stop_token_ids=[4, 5, 6], temperature_last=True,
        allowed_token_ids=[7, 8], include_stop_str_in_output=True, logprobs=3, logprobs_mode="processed",
    )  # fmt: skip
    assert text.strip() == str(expected)


# JSON lines


def test_json_lines_are_a_token_each_and_then_the_result(fake: FakeModel) -> None:
    *pieces, result = run("generate", "-q", "-p", "a b", "--json-lines").records()
    assert pieces == [{"token_id": index, "text": text} for index, text in enumerate(["echo: ", "a ", "b "])]
    assert result["text"] == "".join(piece["text"] for piece in pieces)
    assert result["finish_reason"] == "length"


def test_json_lines_come_as_they_are_made() -> None:
    with fake_process("generate", "-q", "-p", "slow", "--json-lines") as process:
        assert json.loads(process.stdout.readline()) == {"token_id": 0, "text": "echo: "}
        assert process.poll() is None
        process.terminate()
        rest, errors = process.communicate()
    assert (process.returncode, errors) == (143, b"")
    assert json.loads(rest.splitlines()[-1])["stop_reason"] == "cancelled"


# Refused before torch is loaded

REFUSED = [
    *["-m nope", "-m /no/such.gguf", "-m broken.gguf", "--threads 0", "--max-seq-len 0", "--max-seq-len 99999999"],
    *["--max-seq-len many", "--kv-type q3", "--eviction-policy sliding --eviction-window 2", "--device tpu"],
    *["--eviction-policy snapkv --eviction-window 30", "--memory-threshold-mb 0", "--protected-prefix -1"],
    *["--logit-bias 99999999=3", "--stop-token-ids 99999999", "--allowed-token-ids 49152", "--top-p 2", "-n 0"],
    *["--min-new-tokens 9 -n 3", "--seed -1", "--draft-tokens 0", "--prefill-chunk 0", "--regex a(b", "--preset none"],
    *["--prefill-chunk 513", "--device opencl --prefill-chunk 513", "--device cuda --prefill-chunk 8193"],
    *["--dtype float16 --weights q8", "--prompt-file /no/such", "--prompts-file /dev/zero", "--system x"],
]


@pytest.mark.slow
def test_errors_that_need_no_model_are_found_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").symlink_to("missing")
    lines = [["generate", *([] if "file" in line else ["hello"]), *line.split()] for line in REFUSED]
    lines += [[command, "-m", "nope"] for command in ("chat", "bench", "sample-trace")]
    code = "import json, sys; from infer.cli import main\n"
    command = python_command(f'{code}print(*map(main, json.load(sys.stdin)), "torch" in sys.modules)')
    done = subprocess.run(command, input=json.dumps(lines), capture_output=True, text=True, check=True, cwd=tmp_path)
    *statuses, has_torch = done.stdout.split()
    told = done.stderr.splitlines()
    assert has_torch == "False"
    for line, status, message in zip(lines, statuses, told, strict=True):
        assert (status in ("2", "3"), message[:7], "our own failure" in message) == (True, "infer: ", False), line
    assert "there is no model 'nope'. Tried: " in told[0]
    assert "broken.gguf is a broken link" in told[2]


def test_no_command_declares_an_option_twice() -> None:
    for each in infer.commands.values():
        names = [name for parameter in each.params for name in (*parameter.opts, *parameter.secondary_opts)]
        assert len(names) == len(set(names)), each.name
