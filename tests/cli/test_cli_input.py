"""Claims about the input of commands: prompts from every source, names of other programs, and files of wrong kinds."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fake_cli import FakeModel
from infer.cli import main, subcommands
from infer.cli.options.other_programs import INSTEAD
from infer.sampling_params import SamplingParams
from test_cli import FAKE, Screen, run_fake
from watched import python_command

Capture = pytest.CaptureFixture[str]


# Prompts


def test_a_word_an_option_and_a_pipe_are_prompts() -> None:
    assert run_fake("generate", "-q", "hello you").stdout == "echo: hello you \n"
    assert run_fake("generate", "hello", "-q", "-n", "3").stdout == "echo: hello \n"
    assert run_fake("generate", "-q", "-p", "hello").stdout == "echo: hello \n"
    assert run_fake("generate", "-q", text="from a\npipe\n").stdout == "echo: from a\npipe \n"
    assert run_fake("generate", "-q", "--chat", text="from a pipe").stdout == "echo: 1 from a pipe \n"
    assert run_fake("sample-trace", "hello").stdout.startswith("step 1, after 'hello'")


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


@pytest.mark.parametrize("text", ["", "\n", "  \n"])
def test_an_empty_pipe_is_bad_input(text: str) -> None:
    done = run_fake("generate", text=text)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'infer: no prompt: stdin is empty; give one, as in infer generate "Once upon a time"\n'


def test_a_closed_stdin_is_bad_input_without_a_prompt_and_no_matter_with_one() -> None:
    for arguments, status in (("generate", 2), ("generate hello", 0), ("generate -p hello", 0)):
        command = f"{sys.executable} {FAKE[1]} {arguments} <&-"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert "our own failure" not in done.stderr


def test_on_a_terminal_a_prompt_is_asked_for() -> None:
    parent, child = pty.openpty()
    process = subprocess.Popen([*FAKE, "generate"], stdin=child, stdout=child, stderr=child)
    os.close(child)
    try:
        screen = Screen(parent)
        screen.until("prompt: ")
        os.write(parent, b"typed here\n")
        screen.until("echo: typed here")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


# Files that options name


@pytest.mark.parametrize("option", ["--prompt-file", "--prompts-file", "--chat-template", "--grammar", "--json-schema"])
def test_devices_folders_and_endless_files_are_refused(
    option: str, fake: FakeModel, tmp_path: Path, capsys: Capture
) -> None:
    fifo, sparse = tmp_path / "fifo", tmp_path / "sparse"
    os.mkfifo(fifo)
    sparse.touch()
    os.truncate(sparse, 10 << 30)
    prompt = [] if option.startswith("--prompt") else ["x"]
    for path, why in {
        "/dev/zero": "it must be a regular file, a pipe or - for stdin",
        "/dev/null": "it must be a regular file, a pipe or - for stdin",
        str(tmp_path): "it is a folder",
        str(fifo): "it is a pipe without a writer",
        str(sparse): "is too long",
        f"{tmp_path}/none": "No such file",
    }.items():
        assert main(["generate", *prompt, option, path]) == 2
        told = capsys.readouterr().err
        assert why in told, path
        assert told.count("\n") == 1


def test_an_endless_stdin_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ["sh", "-c", f"yes | {sys.executable} {' '.join(FAKE[1:])} generate --grammar - x"]
    done = subprocess.run(endless, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "infer: the file of --grammar - is too long: it must have at most 1 MiB\n"


@pytest.mark.parametrize("num_words", [1, 50_000])
def test_a_shells_pipe_is_a_file(num_words: int) -> None:
    command = f"{sys.executable} {FAKE[1]} generate -q --prompt-file <(yes hello | head -n {num_words})"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("echo: " + "hello\n" * num_words + " \n", "")


def test_two_options_cannot_both_read_stdin() -> None:
    done = run_fake("generate", "--grammar", "-", "--prompt-file", "-", text='start: "a"')
    assert done.returncode == 2
    assert "are both stdin (-): put one of them into a file" in done.stderr


# Names of other programs


@pytest.mark.parametrize("word", sorted(INSTEAD))
def test_commands_of_other_programs_are_answered_with_ours(word: str, capsys: Capture) -> None:
    assert main([word, "smollm2"]) == 2
    told = capsys.readouterr().err
    assert f"no such command '{word}'; instead: {INSTEAD[word]}" in told
    assert told.count("\n") == 1
    for name in re.findall(r"infer ([a-z-]+)", INSTEAD[word]):
        assert name in subcommands.infer.commands or name.startswith("--")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("smollm2", "to name a model: infer chat smollm2"),
        ("org/repo:Q4_K_M", "infer chat org/repo:Q4_K_M"),
        ("./a.gguf", "infer chat ./a.gguf"),
        ("Once upon a time", 'to give a prompt: infer generate "TEXT"'),
        ("Generate", "did you mean 'generate'?"),
        ("chatt", "did you mean 'chat'?"),
        ("pulll", "did you mean 'pull'?"),
        ("xyzzy", "use one of batch, bench, chat"),
    ],
)
def test_a_first_word_that_is_no_command_says_what_to_type(word: str, message: str, capsys: Capture) -> None:
    assert main([word]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def shown_params(fake: FakeModel, capsys: Capture, *options: str) -> tuple[str, str]:
    assert main(["generate", "params", *options]) == 0
    captured = capsys.readouterr()
    return captured.out.strip(), captured.err


def test_options_of_other_programs_are_taken(fake: FakeModel, capsys: Capture) -> None:
    for name in ("--max-tokens", "--num-tokens", "--num-predict", "--n-predict"):
        assert shown_params(fake, capsys, name, "7")[0] == str(SamplingParams(max_new_tokens=7))
        assert shown_params(fake, capsys, f"{name}=7")[0] == str(SamplingParams(max_new_tokens=7))
    assert shown_params(fake, capsys, "--temp", "0.5", "--repeat-penalty", "1.2")[0] == str(
        SamplingParams(max_new_tokens=512, temperature=0.5, repetition_penalty=1.2)
    )
    assert main(["generate", "--help"]) == 0
    assert "--max-tokens" not in capsys.readouterr().out


def test_the_command_lines_of_document_003_run(fake: FakeModel, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "long_prompt.txt"
    path.write_text("params")
    for line in (
        "--model-path models/x --prompt params -n 128",
        "--kv-type q4 --eviction-policy sliding --eviction-window 512 --max-seq-len 2048 --num-tokens 256 -p params",
        f"--prompt-file {path} --num-tokens 512",
    ):
        assert main(["generate", "-q", "--no-generation-config", *line.replace("models/x", "smollm2").split()]) == 0
        assert capsys.readouterr().err == ""
    assert main(["generate", "-p", "a", "--zero-copy", "--gpu-attn"]) == 0
    told = capsys.readouterr().err
    assert "infer: --zero-copy is always on if a device has the host's memory: nothing is copied" in told
    assert "infer: --gpu-attn is not needed: attention runs on the model's device (--device)" in told
    assert main(["generate", "-q", "-p", "a", "--zero-copy"]) == 0
    assert capsys.readouterr().err == ""


def test_the_remaining_fields_of_the_parameters_have_options(fake: FakeModel, capsys: Capture) -> None:
    options = ["--min-new-tokens", "2", "--stop-token-ids", "4,5", "--stop-token-ids", "6", "--temperature-last"]
    options += ["--allowed-token-ids", "7 8", "--include-stop-str-in-output", "--logprobs", "3", "--json"]
    assert main(["generate", "params", *options, "--logprobs-mode", "processed"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text.strip() == str(
        SamplingParams(
            max_new_tokens=512, min_new_tokens=2, stop_token_ids=[4, 5, 6], temperature_last=True,
            allowed_token_ids=[7, 8], include_stop_str_in_output=True, logprobs=3, logprobs_mode="processed",
        )
    )  # fmt: skip


# JSON lines


def test_json_lines_are_a_token_each_and_then_the_result(fake: FakeModel, capsys: Capture) -> None:
    assert main(["generate", "-q", "a b", "--json-lines"]) == 0
    *pieces, result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert pieces == [{"token_id": index, "text": text} for index, text in enumerate(["echo: ", "a ", "b "])]
    assert result["text"] == "".join(piece["text"] for piece in pieces)
    assert result["finish_reason"] == "length"


def test_json_lines_of_many_prompts_have_their_index(fake: FakeModel, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    assert main(["generate", "-q", "--json-lines", "--prompts-file", str(path)]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["index"], record["text"]) for record in records] == [(0, "echo: one "), (1, "echo: two ")]


def test_json_lines_come_as_they_are_made() -> None:
    process = subprocess.Popen(
        [*FAKE, "generate", "-q", "slow", "--json-lines"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"token_id": 0, "text": "echo: "}
    assert process.poll() is None
    process.terminate()
    rest, errors = process.communicate(timeout=20)
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


def test_errors_that_need_no_model_are_found_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").symlink_to("missing")
    lines = [["generate", *([] if "file" in line else ["hello"]), *line.split()] for line in REFUSED]
    lines += [[command, "-m", "nope"] for command in ("chat", "bench", "sample-trace")]
    code = """
import json, sys
from infer.cli import main
print(*map(main, json.load(sys.stdin)), "torch" in sys.modules)
"""
    done = subprocess.run(
        python_command(code), input=json.dumps(lines), capture_output=True, text=True, check=True, cwd=tmp_path
    )
    *statuses, has_torch = done.stdout.split()
    told = done.stderr.splitlines()
    assert has_torch == "False"
    assert len(told) == len(lines)
    for line, status, message in zip(lines, statuses, told, strict=True):
        assert status in ("2", "3"), line
        assert message.startswith("infer: "), line
        assert "our own failure" not in message
    assert "there is no model 'nope'. Tried: " in told[0]
    assert "broken.gguf is a broken link" in told[2]
