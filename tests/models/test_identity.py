"""The identity of an architecture changes with each of its values, and with nothing else."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from infer.compute.operands import identity
from infer.compute.operands.architecture import Architecture, Layer, Norms
from infer.compute.operands.feed_forwards import Dense, Experts, Router
from infer.compute.operands.identity import NAMES, Names, identity_of
from infer.compute.operands.mixers import Attention, LongRope, QueryScale, Rope, ShortConv


def reachable(hint: Any, found: dict[type, None] | None = None) -> dict[type, None]:
    """Return the dataclasses that a type and its fields name."""
    found = {} if found is None else found
    if is_dataclass(hint):
        assert isinstance(hint, type)
        if hint not in found:
            found[hint] = None
            for inner in get_type_hints(hint).values():
                reachable(inner, found)
    elif get_origin(hint) is not Literal:
        for inner in get_args(hint):
            reachable(inner, found)
    return found


def samples(hint: Any) -> Iterator[Any]:
    """Yield some different values of a type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif isinstance(hint, UnionType) or get_origin(hint) is Union:
        for inner in get_args(hint):
            yield from samples(inner)
    elif get_origin(hint) is tuple:
        inner = list(samples(get_args(hint)[0]))
        yield from ((), (inner[0],), tuple(inner))
    elif is_dataclass(hint):
        hints = get_type_hints(hint)
        first: Any = hint(**{name: next(samples(inner)) for name, inner in hints.items()})
        yield first
        for name, inner in hints.items():
            yield from (replace(first, **{name: value}) for value in list(samples(inner))[1:2])
    else:
        plain = {int: (1, 2), float: (1.0, 0.1, float("inf")), str: ("a", "b"), bool: (False, True), NoneType: (None,)}
        yield from plain[hint]


CLASSES = list(reachable(Architecture))


def test_every_part_of_an_architecture_has_names() -> None:
    assert set(CLASSES) == set(NAMES)
    assert len({names.kind for names in NAMES.values()}) == len(NAMES)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_attribute_has_one_name(kind: type) -> None:
    names = NAMES[kind]
    attributes = [*names.first.values(), *names.later.values()]
    assert sorted(attributes) == sorted(get_type_hints(kind))
    assert not set(names.first) & set(names.later)


@pytest.mark.parametrize("kind", CLASSES)
def test_no_later_attribute_lacks_a_default(kind: type) -> None:
    """Without a default, each architecture would have another identity than before."""
    defaults = {field.name: field.default for field in fields(kind)}
    assert [name for name in NAMES[kind].later.values() if defaults[name] is MISSING] == []


@pytest.mark.parametrize("kind", CLASSES)
def test_each_value_changes_the_identity(kind: type) -> None:
    first = next(samples(kind))
    for name, hint in get_type_hints(kind).items():
        values = list(samples(hint))
        texts = [identity_of(replace(first, **{name: value})) for value in values]
        assert len(values) > 1
        assert len(set(texts)) == len(set(values)) == len(values), name


def test_an_inner_value_changes_the_identity_of_the_whole() -> None:
    def network(theta: float) -> Architecture:
        layer = Layer(Attention(4, 2, 16, Rope(theta, 16), 0.25), Dense(96))
        return Architecture("llama", 99, 64, (layer, layer), 1e-6, 256)

    assert identity_of(network(1e4)) == identity_of(network(1e4)) != identity_of(network(1e6))


def test_a_text_is_the_one_of_files_that_exist() -> None:
    """The first sessions have the digest of this text. So a change of the text refuses each saved session."""
    rope = Rope(10000.0, 16, (1.0, 2.0), long=LongRope(64, growth=0.1))
    attention = Attention(4, 2, 16, rope, 0.25, window=8, query_scale=QueryScale(0.5, 8), qk_norm="head")
    experts = Experts(Router(8, 2, "softmax"), 32)
    layers = Layer(attention, experts, Norms(after=True)), Layer(ShortConv(64, 3), Dense(96, "gelu"), has_scale=True)
    found = identity_of(Architecture("a", 99, 64, layers, 1e-6, 256))
    norms = "eps_after=None, are_centred=False, have_bias=False, skip_mixer=False)"
    assert found == (
        "Architecture(family='a', vocab_size=99, hidden_size=64, layers=(Layer(mixer=Attention(num_heads=4, "
        "num_kv_heads=2, head_dim=16, rope=Rope(theta=10000.0, dim=16, frequency_factors=(1.0, 2.0), "
        "attention_factor=1.0, long=LongRope(beyond=64, frequency_factors=None, growth=0.1)), scale=0.25, window=8, "
        "chunk=None, softcap=None, has_qkv_bias=False, has_output_bias=False, qk_norm='head', has_sinks=False, "
        "has_gate=False, gate_curve='sigmoid', are_gates_of_heads=False, has_v_norm=False, are_values_keys=False, "
        "shared_from=None, query_scale=QueryScale(growth=0.5, period=8, offset=0), is_causal=True), "
        "feed_forward=Experts(router=Router(num_experts=8, num_chosen=2, scores='softmax', is_normalized=False, "
        "floor=0.0, scale=1.0, has_bias=False, has_correction=False, has_expert_scales=False, weighs_inputs=False), "
        "intermediate_size=32, activation='silu', has_bias=False, shared_size=0, has_shared_gate=False, "
        f"has_norms=False), norms=Norms(before=True, after=True, of_sum=False, {norms}, per_layer_input=None, "
        "has_scale=False), Layer(mixer=ShortConv(num_channels=64, num_taps=3, has_bias=False), "
        "feed_forward=Dense(intermediate_size=96, activation='gelu', has_bias=False, is_gated=True), "
        f"norms=Norms(before=True, after=False, of_sum=False, {norms}, per_layer_input=None, has_scale=True)), "
        "norm_eps=1e-06, max_positions=256, embedding_scale=1.0, has_embedding_norm=False, logit_scale=1.0, "
        "logit_softcap=None, tied_embeddings=False, text_inputs=None, has_last_norm=True)"
    )


@dataclass(frozen=True)
class ReorderedDense:
    """`Dense` with other names, in another order, and with a new value."""

    act: str = "silu"
    size: int = 0
    clamp: float | None = None
    gated: bool = True
    biased: bool = False


def test_a_rename_another_order_and_a_new_default_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"intermediate_size": "size", "activation": "act", "has_bias": "biased", "is_gated": "gated"}
    monkeypatch.setitem(identity.NAMES, ReorderedDense, Names("Dense", first, {"clamp": "clamp"}))
    assert identity_of(ReorderedDense("gelu", 96)) == identity_of(Dense(96, "gelu"))
    clamped = identity_of(ReorderedDense("gelu", 96, 7.0))
    assert clamped == identity_of(Dense(96, "gelu")).replace(")", ", clamp=7.0)")


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize("value", [Colour.RED, len, [1], object(), ReorderedDense()])
def test_a_value_without_a_lasting_text_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=f"a {type(value).__name__} has no identity"):
        identity_of(value)
