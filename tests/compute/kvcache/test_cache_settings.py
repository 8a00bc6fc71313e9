"""Refused settings of the cache, and the messages."""

from typing import Any

import pytest

from cases import cases
from infer.compute.kvcache import cache_settings as settings_module
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import check_layers
from infer.compute.operands.mixers import Attention
from infer.compute.quantization.kv_formats import check_kv_type
from infer.errors import InvalidRequestError
from watched import run_python


def make_layer(head_dim: int = 64, window: int | None = None) -> Attention:
    return Attention(4, 2, head_dim, None, 0.125, window)


def test_the_settings_load_no_torch() -> None:
    code = "import sys, infer.compute.kvcache.cache_settings; print('torch' in sys.modules)"
    assert run_python(code).stdout == "False\n"


@cases(
    "values said",
    ({"kv_type": "q5"}, "kv_type must be one of auto, f32, f16, bf16, q8, q4, got 'q5'"),
    ({"eviction_policy": "lru"}, "eviction_policy must be one of none, sliding, snapkv, got 'lru'"),
    ({"eviction_window": 0}, "eviction_window must be a whole number of at least 1, got 0"),
    ({"eviction_window": True}, "eviction_window must be a whole number of at least 1, got True"),
    ({"protected_prefix": -1}, "protected_prefix must be a whole number of at least 0, got -1"),
    ({"memory_threshold_mb": 0}, "must be a whole number of at least 1, got 0"),
    ({"memory_threshold_mb": 2**40, "eviction_policy": "sliding"}, "_mb must be below this machine's"),
    ({"memory_threshold_mb": 0, "eviction_policy": "snapkv"}, "must be a whole number of at least 1, got 0"),
    ({"page_tokens": 48}, "page_tokens must be 16, 32, 64, 128 or 256, got 48"),
    (
        {"eviction_policy": "sliding", "eviction_window": 4},
        "larger than protected_prefix=4, which it inclu",
    ),
)
def test_bad_settings_are_refused_with_value_rule_and_fix(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        CacheSettings(**values)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_may_not_have_what_its_heads_or_windows_forbid() -> None:
    check_layers(CacheSettings(kv_type="q8", eviction_policy="sliding"), [make_layer(), make_layer(window=8)])
    with pytest.raises(InvalidRequestError, match="needs a head size that 32 divides, got 80: use f16"):
        check_layers(CacheSettings(kv_type="q4"), [make_layer(80)])
    with pytest.raises(InvalidRequestError, match="kv_type must be one of f32, f16, bf16, q8, q4, got 'q5'"):
        check_kv_type("q5", 64)
    check_layers(CacheSettings(kv_type="f16"), [make_layer(80)])
    with pytest.raises(InvalidRequestError, match="every layer of this model has its own window or chunks: use none"):
        check_layers(CacheSettings(eviction_policy="sliding"), [make_layer(window=8)])
    check_layers(CacheSettings(), [make_layer(window=8)])


def test_a_threshold_needs_a_system_that_says_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "available_memory_bytes", lambda: None)
    with pytest.raises(InvalidRequestError, match="does not report its available memory"):
        CacheSettings(eviction_policy="sliding", memory_threshold_mb=1)
