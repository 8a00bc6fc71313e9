"""Convert options of other programs to our own, and suggest what to type for an unknown command."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import click

ALIASES = {  # accepted if the command has the option that they mean
    "--max-tokens": "--max-new-tokens",
    "--num-tokens": "--max-new-tokens",
    "--num-predict": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "--max-completion-tokens": "--max-new-tokens",
    "--model-path": "--model",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--repeat-last-n": "--repetition-window",
    "--ctx-size": "--max-seq-len",
    "--n-ctx": "--max-seq-len",
    "--max-model-len": "--max-seq-len",
    "--system-prompt": "--system",
    "--file": "--prompt-file",
    "--num-threads": "--threads",
}
REPLACED = {  # flags without effect
    "--zero-copy": "--zero-copy is always on if a device has the host's memory: nothing is copied",
    "--gpu-attn": "--gpu-attn is not needed: attention runs on the model's device (--device)",
}


def what_to_type(word: str, commands: Collection[str]) -> str:
    """Return the message for an unknown first word."""
    near = difflib.get_close_matches(word.lower(), commands, n=1)
    if near:
        return f"no such command {word!r}: did you mean {near[0]!r}?"
    from infer.files.hub.find import INSTALLED_MODELS

    if word in INSTALLED_MODELS or "/" in word or word.lower().endswith(".gguf"):
        return f"no such command {word!r:.200}; to name a model: infer chat {word:.200}"
    if " " in word:
        return f'no such command {word!r:.60}; to give a prompt: infer generate "TEXT"'
    return f"no such command {word!r:.200}: use one of {', '.join(sorted(commands))}"


class TolerantCommand(click.Command):
    """A command that also accepts option names of other programs, and several words after `--choice`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        return super().parse_args(ctx, list(_spelled(args, known)))


def _spelled(arguments: Sequence[str], known: Collection[str]) -> Iterable[str]:
    """Yield the arguments under the names that the command knows.

    `--choice A B` becomes `--choice A --choice B`, up to the next option.
    """
    is_over, may_be_choice, is_first = False, False, False
    is_quiet = "-q" in arguments or "--quiet" in arguments
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if is_over or argument == "--":
            is_over = True
            yield argument
        elif is_first:
            is_first = False
            yield argument
        elif argument.startswith("-") and argument != "-":
            may_be_choice = name == "--choice" and name in known
            is_first = may_be_choice and not equals
            if name not in known and ALIASES.get(name) in known:
                yield ALIASES[name] + equals + value
            elif name not in known and name in REPLACED:
                if not is_quiet:
                    click.echo(f"infer: {REPLACED[name]}", err=True)
            else:
                yield argument
        else:
            if may_be_choice:
                yield "--choice"
            yield argument


class Device(click.ParamType):  # type: ignore[type-arg]  # only new versions of click are generic
    """auto, cpu, cuda, cuda:N, cuda:N,N, opencl or opencl:NAME. The error for another name lists the known kinds."""

    name = "device"
    _ELSEWHERE: Mapping[str, str] = {
        "vulkan": "Vulkan is not supported",
        "metal": "Metal is not supported",
        "mps": "Metal is not supported",
        "gpu": "a GPU is named cuda",
        "rocm": "ROCm is not supported",
    }

    def get_metavar(self, *arguments: Any, **named: Any) -> str:
        return "[auto|cpu|cuda|opencl[:NAME]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind, colon, index = str(value).partition(":")
        if kind in ("cpu", "cuda") and (not colon or index.isdecimal()):
            return str(value)
        if kind == "cuda" and all(each.isdecimal() for each in index.split(",")):
            return str(value)
        if kind == "opencl" or value == "auto":
            return str(value)
        why = self._ELSEWHERE.get(kind.lower())
        message = f"{value!r} is not one of 'auto', 'cpu', 'cuda', 'opencl'" + (f": {why}" if why else "")
        raise click.BadParameter(message, ctx, param)
