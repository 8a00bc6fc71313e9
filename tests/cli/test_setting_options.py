"""A setting of a model is the same as a keyword, as an option and in a rank: its values, its default, its messages."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import click
import pytest

from infer import LLM
from infer.cli.command_options import BenchOptions, ChatOptions, GenerateOptions
from infer.cli.option_fields import make_options
from infer.cli.server_options import ServeOptions
from infer.cli.subcommands import infer as program
from infer.engine.tensor_parallel.ranks import ModelSource
from infer.errors import InvalidRequestError
from infer.model_settings import SETTINGS, ModelSettings
from infer.parameters import parameters_of
from infer.serving.server_settings import ServerSettings
from refusals import refusal

KINDS: dict[str, Any] = {"generate": GenerateOptions, "chat": ChatOptions, "bench": BenchOptions, "serve": ServeOptions}
# What to type for each setting, its value, and a value that is refused.
TYPED: dict[str, tuple[str, Any, Any]] = {
    "threads": ("--threads 3", 3, 0), "precision": ("--precision fast", "fast", "slow"),
    "weights": ("--weights q8", "q8", "q2"), "dtype": ("--dtype float16", "float16", "float8"),
    "reuse_prefixes": ("--reuse-prefixes", True, None), "kv_type": ("--kv-type q4", "q4", "q3"),
    "eviction_policy": ("--eviction-policy snapkv", "snapkv", "all"),
    "eviction_window": ("--eviction-window 512", 512, 0), "protected_prefix": ("--protected-prefix 2", 2, -1),
    "memory_threshold_mb": ("--memory-threshold-mb 7", 7, 0), "state_memory_mb": ("--state-memory-mb 900", 900, 0),
    "max_seq_len": ("--max-seq-len 99", 99, 1), "grammar_backend": ("--grammar-backend xgrammar", "xgrammar", "none"),
    "tensor_parallel": ("--tensor-parallel 2", 2, 0), "capture": ("--no-capture", False, None),
    "chat_template": ("--chat-template FILE", "{{ messages }}", None), "allow_special": ("--allow-special", True, None),
    "device": ("--device cuda:1", "cuda:1", None), "reranker": ("--reranker qwen3", "qwen3", "any"),
    "draft_model": ("--draft-model small", "small", None), "draft_head": ("--no-draft-head", False, None),
    "pool_pages": ("--pool-pages 20", 20, 0), "prefix_disk": ("--prefix-disk 2GB", 2 * 10**9, "much"),
    "experts_memory": ("--experts-memory 6GB", 6 * 10**9, "much"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFER_PREFIX_DISK")


def options_of(command: str, typed: str = "") -> Any:
    return make_options(KINDS[command], program.commands[command].make_context(command, typed.split()).params)


def commands_with(name: str) -> list[str]:
    """Return the commands that have a setting's option. There is at least one."""
    names = {name, f"no_{name}"}
    found = [each for each in KINDS if names & {option.name for option in program.commands[each].params}]
    assert found
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_has_one_value_as_a_keyword_as_an_option_and_in_a_rank(name: str, tmp_path: Path) -> None:
    typed, value, _ = TYPED[name]
    (tmp_path / "t").write_text("{{ messages }}")
    settings = ModelSettings.of({name: value})
    in_rank = pickle.loads(pickle.dumps(ModelSource(tmp_path, "fingerprint", settings, 1))).settings
    assert getattr(settings, name) == value != getattr(ModelSettings(), name)
    assert (in_rank, in_rank.cache) == (settings, settings.cache)
    for command in commands_with(name):
        assert options_of(command, typed.replace("FILE", str(tmp_path / "t"))).settings == settings


@pytest.mark.parametrize("name", [name for name, (_, _, bad) in TYPED.items() if bad is not None])
def test_a_keyword_and_an_option_refuse_the_same_values(name: str) -> None:
    flag, bad = TYPED[name][0].partition(" ")[0], TYPED[name][2]
    policy = {} if name == "eviction_policy" else {"eviction_policy": "sliding"}
    message = refusal(lambda: ModelSettings.of({name: bad, **policy}))
    assert message.startswith(f"{name} must be")
    typed = " ".join([f"--eviction-policy {each}" for each in policy.values()] + [f"{flag} {bad}"])
    for command in commands_with(name):
        with pytest.raises((InvalidRequestError, click.BadParameter)) as refused:
            options_of(command, typed)
        if isinstance(refused.value, click.BadParameter):  # click knows the choices and ranges of options
            assert f"for '{flag}'" in refused.value.format_message()
        else:
            assert str(refused.value) == message


def test_defaults_are_those_of_the_declaration() -> None:
    shown = {name: each.default for name, each in inspect.signature(LLM).parameters.items()}
    assert shown == {"model": "smollm2", "on_progress": None, **vars(ModelSettings())}
    assert [options_of(command).settings for command in KINDS] == [ModelSettings()] * len(KINDS)
    assert options_of("serve").server == ServerSettings()


def test_each_setting_of_document_003_has_its_name_there() -> None:
    cache = {"kv_type": "q4", "eviction_policy": "sliding", "eviction_window": 1024, "protected_prefix": 0}
    given = {"max_seq_len": 2048, **cache, "memory_threshold_mb": 256}
    typed = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    options = options_of("generate", f"--model-path m --backend opencl --gpu-attn --zero-copy {typed}")
    assert (options.model, options.settings) == ("m", ModelSettings.of(given | {"device": "opencl"}))


@pytest.mark.parametrize("name", parameters_of(ServerSettings))
def test_a_setting_of_a_server_is_an_option_with_its_default(name: str) -> None:
    (option,) = (each for each in program.commands["serve"].params if each.name == name)
    default = getattr(ServerSettings(), name)
    if not isinstance(default, bool) and default not in (None, ()):
        assert getattr(options_of("serve", f"{option.opts[0]} {default}").server, name) == default
