"""The targets of the fuzzer: the seeds of each, and its reader. A file of any bytes must be read or refused.

A target takes the bytes of one header or one file of JSON, puts them where a model has them, and reads the model.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import hostile_files
from hostile_files import CONFIG, LLAMA3, read_everything, read_network, use, write_folder, write_gguf
from infer.errors import InferError
from infer.text.templates import chat_template
from infer.text.templates.chat_template import ChatTemplate
from infer.text.templates.template_child import make_environment
from infer.text.tokenizer import Tokenizer
from test_chat import CHATML
from test_gguf_faults import FAULTS as GGUF_FAULTS
from test_safetensors import FAULTS as SAFETENSORS_FAULTS
from test_templates import TEMPLATES

MAX_MESSAGE = 2000
PLACE = Path(mkdtemp(prefix="fuzz-"))
RENDER_SECONDS = 0.2  # so little because many templates loop for ever


@dataclass(frozen=True)
class Target:
    seeds: Callable[[], Iterable[bytes]]
    read: Callable[[bytes], Any]
    is_json: bool = False


def check(target: Target, content: bytes) -> None:
    """Raise any error that is not infer's own, and AssertionError if infer's message is not a short line."""
    try:
        target.read(content)
    except InferError as error:
        message = str(error)
    else:
        return
    assert "\n" not in message, message
    assert len(message) < MAX_MESSAGE, message[:MAX_MESSAGE]


def _dumped(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


# A seed is a header. Zeros follow it, as many as the good model has bytes of data.
_GOOD_GGUF = write_gguf(PLACE / "good.gguf", hostile_files.SMALL_VOCABULARY).read_bytes()
_GGUF_HEADER = _GOOD_GGUF.index(bytes(32))
_FOLDER = write_folder(PLACE / "model")
_WEIGHTS = (_FOLDER / "model.safetensors").read_bytes()
_WEIGHTS_HEADER = 8 + int.from_bytes(_WEIGHTS[:8], "little")


def _gguf_seeds() -> Iterable[bytes]:
    yield _GOOD_GGUF[:_GGUF_HEADER]
    yield from (content for content, _ in GGUF_FAULTS.values() if len(content) < 4096)


def _read_gguf(content: bytes) -> None:
    path = PLACE / "fuzzed.gguf"
    with path.open("wb") as file:
        file.write(content)
        file.truncate(-(-len(content) // 32) * 32 + len(_GOOD_GGUF) - -(-_GGUF_HEADER // 32) * 32)
    read_everything(path)


def _safetensors_seeds() -> Iterable[bytes]:
    yield _WEIGHTS[8:_WEIGHTS_HEADER]
    yield from (content[8:] for content, _ in SAFETENSORS_FAULTS.values() if len(content) < 4096)


def _read_safetensors(content: bytes) -> None:
    with (_FOLDER / "model.safetensors").open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + len(_WEIGHTS) - _WEIGHTS_HEADER)
    read_network(_FOLDER)


def _config_seeds() -> Iterable[bytes]:
    ropes: list[dict[str, Any]] = [
        {"rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        LLAMA3 | {"high_freq_factor": 4.0},
        {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ]
    yield from _dumped(CONFIG, *(CONFIG | {"rope_scaling": rope} for rope in ropes))
    others = {"sliding_window": 16, "layer_types": ["sliding_attention"], "no_rope_layers": [1], "attention_bias": True}
    older = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "granite")
    for family in (*older, "olmo3", "exaone4", "seed_oss"):
        yield from _dumped(CONFIG | others | {"model_type": family, "partial_rotary_factor": 0.5})
    yield from _dumped({"model_type": "gemma3", "text_config": CONFIG | {"query_pre_attn_scalar": 256}})
    yield from _dumped(CONFIG | {"rope_parameters": {"full_attention": ropes[0], "sliding_attention": ropes[1]}})


def _read_config(content: bytes) -> None:
    (_FOLDER / "config.json").write_bytes(content)
    read_network(_FOLDER)


def _tokenizer_seeds() -> Iterable[bytes]:
    """Return tokenizers with a vocabulary of eight: one for each part that the library has."""
    parts = json.loads(Path(__file__).with_name("tokenizer_parts.json").read_text(encoding="utf-8"))
    good = parts.pop("good")
    return _dumped(good, *(good | {part: other} for part, others in parts.items() for other in others))


def _read_tokenizer(content: bytes) -> None:
    (_FOLDER / "tokenizer.json").write_bytes(content)
    use(Tokenizer.from_folder(_FOLDER))


_ENVIRONMENT = make_environment()


def _template_seeds() -> Iterable[bytes]:
    bombs = ("{{ 2 ** (2 ** 33) }}", "{% for a in range(10 ** 9) %}{% endfor %}", "{{ 'a' * 2 ** 40 }}")
    return [text.encode() for text in (CHATML, *TEMPLATES.values(), *bombs)]


def _read_template(content: bytes) -> None:
    """Parse a template in this process, where the fuzzer sees the coverage. Render it in a separate process."""
    source = content.decode("utf-8", "replace")
    with suppress(Exception):
        _ENVIRONMENT.parse(source)
    messages = [{"role": "user", "content": "hi <|im_end|>"}, {"role": "assistant", "content": [{"text": "{{ x }}"}]}]
    ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


chat_template.RENDER_SECONDS = RENDER_SECONDS
TARGETS = {
    "gguf": Target(_gguf_seeds, _read_gguf),
    "safetensors": Target(_safetensors_seeds, _read_safetensors, is_json=True),
    "config": Target(_config_seeds, _read_config, is_json=True),
    "tokenizer": Target(_tokenizer_seeds, _read_tokenizer, is_json=True),
    "template": Target(_template_seeds, _read_template),
}
