"""The parts of layers, loaded: one module per kind of mixer and feed-forward.

A part has one method for the forward, `add`: it returns the residual stream with the part's result added, and the
stream before it must not be used afterwards. `load_layer`
is the only place that knows which class loads which part.
"""

from dataclasses import dataclass, replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.architecture import Layer
from infer.compute.operands.feed_forwards import Dense, Experts
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.models.layers.attention import LoadedAttention as LoadedAttention
from infer.models.layers.extra_inputs import LoadedPerLayerInput as LoadedPerLayerInput
from infer.models.layers.feed_forward import LoadedDense as LoadedDense
from infer.models.layers.feed_forward import LoadedExperts as LoadedExperts
from infer.models.layers.recurrent import LoadedRecurrent as LoadedRecurrent
from infer.models.weight_loader import WeightLoader

LoadedMixer = LoadedAttention | LoadedRecurrent
LoadedFeedForward = LoadedDense | LoadedExperts


@final
@dataclass(frozen=True)
class LoadedLayer:
    """A layer of a loaded model: the mixer and the feed-forward of `Layer`, with their weights."""

    mixer: LoadedMixer | None
    feed_forward: LoadedFeedForward | None
    per_layer_input: LoadedPerLayerInput | None = None
    is_parallel: bool = False  # both parts read the residual stream as it is before the layer

    def add(self, x: Float[Tensor, "tokens hidden"], cache: PagedCache, step: Step) -> Float[Tensor, "tokens hidden"]:
        """Return the residual stream x with the results of the mixer and the feed-forward added."""
        if self.is_parallel:
            assert self.mixer is not None
            assert isinstance(self.feed_forward, LoadedDense)
            hidden = self.feed_forward.hidden(x)
            return self.feed_forward.add_down(self.mixer.add(x, cache, step), hidden)
        for part in self.parts:
            x = part.add(x, cache, step)
        return x

    @property
    def parts(self) -> tuple[LoadedMixer | LoadedFeedForward, ...]:
        """The mixer and the feed-forward, if they exist."""
        return tuple(part for part in (self.mixer, self.feed_forward) if part is not None)

    @property
    def text_parts(self) -> tuple[LoadedAttention | LoadedDense, ...]:
        """The parts of a layer of an encoder."""
        parts = (self.mixer, self.feed_forward)
        return tuple(part for part in parts if isinstance(part, LoadedAttention | LoadedDense))


def load_layer(layer: Layer, index: int, loader: WeightLoader, cache_index: int | None) -> LoadedLayer:
    """Return the layer with this index; `loader` is for that layer. Its mixer uses `cache_index` of the cache."""
    mixer: LoadedMixer | None = None
    feed_forward: LoadedFeedForward | None = None
    if layer.mixer is not None:
        assert cache_index is not None
        if isinstance(layer.mixer, Attention):
            mixer = LoadedAttention.load(layer.mixer, layer.norms, loader, cache_index)
        else:
            mixer = LoadedRecurrent.load(layer.mixer, layer.norms, loader, cache_index)
    per_layer_input: LoadedPerLayerInput | None = None
    scale = float(loader.vector("layer_scalar")[0]) if layer.has_scale else 1.0
    if layer.per_layer_input is not None:  # the last part applies the scale
        per_layer_input = LoadedPerLayerInput.load(layer.per_layer_input, index, loader, scale)
        scale = 1.0
    if isinstance(layer.feed_forward, Dense):
        feed_forward = LoadedDense.load(layer.feed_forward, layer.norms, loader, scale)
        if layer.norms.parallel == "one" and mixer is not None:
            feed_forward = replace(feed_forward, norm=mixer.norm)
    elif isinstance(layer.feed_forward, Experts):
        feed_forward = LoadedExperts.load(layer.feed_forward, layer.norms, loader, scale)
    return LoadedLayer(mixer, feed_forward, per_layer_input, is_parallel=layer.norms.parallel is not None)
