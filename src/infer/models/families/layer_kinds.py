"""Config → the kind of each layer's mixer, by Hugging Face's names, and the layers whose attention rotates."""

from collections.abc import Callable, Collection, Sequence

from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, count, flag, layer_numbers, of_layers, settings

FULL, SLIDING, CONVOLUTION, LINEAR = "full_attention", "sliding_attention", "conv", "linear_attention"
CHUNKED = "chunked_attention"


Kinds = Callable[[Config, int], Sequence[str]]  # (config, number of layers) → the kind of each layer


def all_full(config: Config, num_layers: int) -> Sequence[str]:
    return [FULL] * num_layers


def all_windowed(config: Config, num_layers: int) -> Sequence[str]:
    return [FULL if config.get("sliding_window") is None else SLIDING] * num_layers


def _listed(config: Config, num_layers: int, known: Collection[str] = (FULL, SLIDING)) -> Sequence[str] | None:
    given = of_layers(config, "layer_types", num_layers, f"num_hidden_layers={num_layers} names")
    for kind in given or ():
        if kind not in known:
            raise UnsupportedModelError(f"layer type {kind!r:.60} is not supported")
    return given


def unless_listed(usual: Kinds, known: Collection[str] = (FULL, SLIDING)) -> Kinds:
    """Return a reader of the kinds that `layer_types` lists; without the list, the usual ones."""
    return lambda config, num_layers: _listed(config, num_layers, known) or usual(config, num_layers)


def _but_every(period: int, setting: str, kind: str = SLIDING, *, is_first: bool = False) -> Kinds:
    """Return a reader of one kind for all layers, except for the last of each period, or for the first of each."""

    def kinds(config: Config, num_layers: int) -> Sequence[str]:
        every = count(config, setting, default=period)
        return [kind if (layer + (not is_first)) % every else FULL for layer in range(num_layers)]

    return kinds


def _by_place(kind_of: Callable[[int, int], str]) -> Kinds:
    """Return a reader of kinds that depend on the index of a layer and on the number of layers."""
    return lambda config, num_layers: [kind_of(layer, num_layers) for layer in range(num_layers)]


def all_windowed_but_every(period: int) -> Kinds:
    return unless_listed(_but_every(period, "sliding_window_pattern"))


full_unless_listed = unless_listed(all_full)
windowed_unless_listed = unless_listed(all_windowed)
windowed_but_every_nth_from_the_first = unless_listed(_but_every(3, "sliding_window_pattern", is_first=True))
windowed_but_every_fourth_from_the_first = unless_listed(_by_place(lambda layer, _: SLIDING if layer % 4 else FULL))
windowed_but_every_nth_from_the_end = unless_listed(
    _by_place(lambda layer, count: SLIDING if (count - 1 - layer) % 4 else FULL)
)
flint_kinds = unless_listed(
    _by_place(lambda layer, count: FULL if layer < 2 or layer % 4 == 1 or layer == count - 1 else SLIDING)
)
lfm3_kinds = unless_listed(
    _by_place(lambda layer, _: FULL if layer % 4 == 2 else CONVOLUTION if layer % 4 or not layer else SLIDING),
    (FULL, SLIDING, CONVOLUTION),
)
linear_but_every_nth = unless_listed(_but_every(4, "full_attention_interval", LINEAR), (FULL, LINEAR))


def windowed_from_a_layer_on(config: Config, num_layers: int) -> Sequence[str]:
    """Return windowed kinds from `max_window_layers` on, if windows are used at all."""
    kinds = _listed(config, num_layers)
    if not flag(config, "use_sliding_window") or config.get("sliding_window") is None:
        if kinds is not None and SLIDING in kinds:
            raise ModelError("layer_types has sliding_attention, but use_sliding_window and sliding_window are not set")
        return all_full(config, num_layers)
    first = config.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool):
        raise ModelError(f"max_window_layers must be a whole number, got {first!r:.60}")
    return kinds or [SLIDING if layer >= first else FULL for layer in range(num_layers)]


def gemma4_kinds(config: Config, num_layers: int) -> Sequence[str]:
    """Return windows for all layers except every sixth and the last, whatever a config has for the last."""
    return [*all_windowed_but_every(6)(config, num_layers)[:-1], FULL]


def chunked_where_rotated(config: Config, num_layers: int) -> Sequence[str]:
    """Return chunks for the layers that rotate, if there is an `attention_chunk_size`."""
    has_chunks = config.get("attention_chunk_size") is not None
    kinds = _listed(config, num_layers, (FULL, CHUNKED))
    if kinds is None:
        return [CHUNKED if rotates and has_chunks else FULL for rotates in llama4_rotated(config, num_layers)]
    if CHUNKED in kinds and not has_chunks:
        raise ModelError("layer_types has chunked_attention, but attention_chunk_size is not set")
    return kinds


def sources_of_keys(config: Config, kinds: Sequence[str]) -> Sequence[int | None]:
    """Return, for each of the last `num_kv_shared_layers` layers, the last layer of its kind before all of these."""
    num_shared = config.get("num_kv_shared_layers", 0)
    if type(num_shared) is not int or not 0 <= num_shared < len(kinds):
        raise ModelError(f"num_kv_shared_layers must be from 0 to {len(kinds) - 1}, got {num_shared!r:.60}")
    own = kinds[: len(kinds) - num_shared]
    sources = {kind: index for index, kind in enumerate(own)}
    if missing := set(kinds) - set(sources):
        raise ModelError(f"num_kv_shared_layers={num_shared} leaves no layer with keys of kind {min(missing)}")
    return [None] * len(own) + [sources[kind] for kind in kinds[len(own) :]]


def exaone4_kinds(config: Config, num_layers: int) -> Sequence[str]:
    has_windows = config.get("sliding_window") is not None
    return (all_windowed_but_every(4) if has_windows else full_unless_listed)(config, num_layers)


@unless_listed
def windowed_where_not_rotated(config: Config, num_layers: int) -> Sequence[str]:
    is_used = flag(config, "use_sliding_window") and config.get("sliding_window") is not None
    return [SLIDING if is_used and not rotates else FULL for rotates in rotated_but_every_nth(config, num_layers)]


def _convolutions(config: Config, num_layers: int) -> Sequence[str]:
    """Return convolutions for the layers that `full_attn_idxs` does not list; without the list, all layers attend."""
    attending = layer_numbers(config, "full_attn_idxs") if "full_attn_idxs" in config else range(num_layers)
    return [FULL if layer in attending else CONVOLUTION for layer in range(num_layers)]


convolutions_but_listed = unless_listed(_convolutions, (FULL, CONVOLUTION))


def linear_but_every_fourth_or_the_last(config: Config, num_layers: int) -> Sequence[str]:
    """Return attention for every fourth layer, or for the last one of fewer than four."""
    kinds = list(linear_but_every_nth(config, num_layers))
    return kinds if FULL in kinds or config.get("layer_types") is not None else [*kinds[:-1], FULL]


def rotated_unless_theta_is_null(config: Config, num_layers: int) -> Sequence[bool]:
    """Return False for every layer if a config's theta is null, as in those of published models."""
    given = settings(config, "rope_parameters") or config
    return [given.get("rope_theta", 0) is not None] * num_layers


def none_rotated(config: Config, num_layers: int) -> Sequence[bool]:
    return [False] * num_layers


def all_rotated(config: Config, num_layers: int) -> Sequence[bool]:
    return [True] * num_layers


def rotated_where_windowed(config: Config, num_layers: int) -> Sequence[bool]:
    """Return True for each layer with a window, and for every layer if the model has no windows."""
    has_windows = config.get("sliding_window") is not None
    return [kind == SLIDING or not has_windows for kind in exaone4_kinds(config, num_layers)]


def rotated_where(kinds: Kinds) -> Callable[[Config, int], Sequence[bool]]:
    """Return a reader of the layers that rotate: those with a window."""
    return lambda config, num_layers: [kind == SLIDING for kind in kinds(config, num_layers)]


rotated_where_listed_as_windowed = rotated_where(all_windowed_but_every(4))


def rotated_unless_listed_without_theta(config: Config, num_layers: int) -> Sequence[bool]:
    """Return True for each layer with a theta in `layer_rope_theta`; without the list, for every layer."""
    is_listed = config.get("layer_rope_theta") is not None
    return (rotated_with_a_theta if is_listed else all_rotated)(config, num_layers)


def rotated_with_a_theta(config: Config, num_layers: int) -> Sequence[bool]:
    """Return True for each layer with a theta in `layer_rope_theta`. Only zeros matter: all thetas are equal."""
    rule = f"num_hidden_layers={num_layers} numbers"
    given = of_layers(config, "layer_rope_theta", num_layers, rule, lambda each: type(each) in (int, float))
    if given is None:
        return [(num_layers - 1 - layer) % 4 != 0 for layer in range(num_layers)]
    return [each != 0 for each in given]


def rotated_but_every_nth(config: Config, num_layers: int) -> Sequence[bool]:
    """Return True for each layer that rotates. Despite its name, `no_rope_layers` has a 1 for these layers."""
    rule = f"num_hidden_layers={num_layers} zeros and ones"
    given = of_layers(config, "no_rope_layers", num_layers, rule, lambda each: each in (0, 1))
    if given is None:
        period = count(config, "no_rope_layer_interval", default=4)
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    return list(map(bool, given))


def llama4_rotated(config: Config, num_layers: int) -> Sequence[bool]:
    """Return True for each layer that rotates. An empty list of published configs means all but every fourth."""
    return rotated_but_every_nth({**config, "no_rope_layers": config.get("no_rope_layers") or None}, num_layers)
