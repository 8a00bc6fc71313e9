"""Texts as vectors: the hidden states of their tokens after the last norm, pooled.

They are computed between the engine's steps, over a cache of their own. While the engine has work, their steps are as
short as the engine's. A text's vector has the same bits, whatever its neighbours and its steps are.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from infer.engine.requests.host import Host
from infer.engine.requests.loop_messages import GIVE_WAY, Work
from infer.engine.requests.prompt_encoding import Prompt, pairs_of, prompt_ids
from infer.engine.requests.text_heads import Embedder
from infer.engine.step.request import check_prompt
from infer.engine.texts.pooled_states import PooledStates
from infer.engine.texts.text_states import text_states
from infer.engine.texts.vector_options import TextIds, VectorOptions
from infer.errors import ContextLengthError, InvalidRequestError, ModelError
from infer.outputs import Pooling

_Found = TypeVar("_Found")


def texts_to_embed(
    host: Host, texts: Sequence[Prompt], options: VectorOptions, check: Callable[[], None] = lambda: None
) -> TextIds:
    """Return the ids of texts, with their prompt before them. `check` is called before each, and may raise.

    Raises InvalidRequestError for an option that cannot be served, and for a text that is no prompt or is too long.
    """
    embedder = embedder_of(host)
    options.check(embedder.size)
    host.check_has_states()
    before, most = host.facts.heads.prompts.text_of(options.prompt_name), host.requests.limits.max_seq_len
    num_first = _num_prompt_tokens(host, before) if embedder.skips_prompt else 0
    found, num_cut, num_skipped = list[list[int]](), 0, list[int]()
    for index, (text, _) in enumerate(pairs_of(texts, None)):
        check()
        try:
            if isinstance(text, str):
                text = before + text
            elif options.prompt_name is not None:
                raise InvalidRequestError("prompt_name needs texts, got ids or messages: leave it out")
            ids, is_cut = ids_within(host, text, truncate=options.truncate)
            num_cut += is_cut
            found.append(check_prompt(host.requests.limits, ids, room=0))
            num_skipped.append(num_first if isinstance(text, str) and num_first < len(found[-1]) else 0)
        except InvalidRequestError as error:
            raise type(error)(f"text {index}: {error}") from error
    return TextIds(found, most, num_cut, num_skipped)


def embedder_of(host: Host) -> Embedder:
    """Return how the model makes vectors. The default is the mean, if the model's files have no setting."""
    return host.facts.heads.embedder or Embedder(host.model.architecture.hidden_size)


def _num_prompt_tokens(host: Host, before: str) -> int:
    """Return the number of a prompt's tokens, without a special token at its end, like sentence-transformers."""
    ids = host.tokenizer.encode(before) if before else []
    return len(ids[:-1] if ids and ids[-1] in host.tokenizer.special_token_ids else ids)


def ids_within(host: Host, text: Prompt, *, truncate: bool) -> tuple[list[int], bool]:
    """Return the ids of a text, and True if they were cut to the context.

    The tokens that the tokenizer adds after each text stay at the end. Raises ContextLengthError without `truncate`.
    """
    most = host.requests.limits.max_seq_len
    if not truncate and isinstance(text, str) and (least := host.tokenizer.least_num_tokens(text)) > most:
        raise too_long(f"at least {least}", most)
    ids = prompt_ids(text, host.tokenizer, None)
    if len(ids) <= most:
        return ids, False
    if not truncate:
        raise too_long(str(len(ids)), most)
    end = host.tokenizer.ending_ids if isinstance(text, str) else []
    return ids[: most - len(end)] + end, True


def too_long(count: str, most: int) -> ContextLengthError:
    """Return the error about a text with this number of tokens, which `truncate` would cut."""
    message = f"the text has {count} tokens and the context holds {most}"
    return ContextLengthError(f"{message}: shorten it, raise max_seq_len or pass truncate=True")


def embed(host: Host, texts: TextIds, options: VectorOptions) -> Work[Float[Tensor, "texts size"]]:
    """Return one float32 vector per text. It is work for the loop, step by step.

    After pooling, the vectors pass the layers in the model's files. Then they are cut to `dimensions` and normalised.
    """
    embedder = embedder_of(host)
    pooled = yield from pool(host, texts, options.pooling or embedder.pooling)
    found = yield from of_each(pooled, embedder.head.of)
    vectors = torch.stack(found) if found else pooled.new_zeros(0, embedder.size)
    vectors = vectors[:, : options.dimensions]
    is_normalized = embedder.normalizes if options.normalize is None else options.normalize
    return (torch.nn.functional.normalize(vectors) if is_normalized else vectors).float()


def pool(host: Host, texts: TextIds, pooling: Pooling) -> Work[Float[Tensor, "texts hidden"]]:
    """Return the pooled states of each text in float64.

    It is work for the loop, step by step, and lets other calls run after each batch of texts. The last token is the
    only one that attends to the whole text. Raises ModelError for states that are not finite.
    """
    size = host.model.architecture.hidden_size
    pooled = PooledStates(pooling, len(texts.token_ids), size, texts.num_skipped)

    yield GIVE_WAY  # before this, the running batch needs the whole cache
    for step in text_states(host, texts, only_last=pooling == "last"):
        for text, states in step.found:
            pooled.add(text, states.cpu())
        yield step.ends_batch
    vectors = pooled.vectors()
    _check_finite(vectors)
    return vectors


def of_each(states: Float[Tensor, "texts hidden"], call: Callable[[Tensor], _Found]) -> Work[list[_Found]]:
    """Return the result of `call` for each state. A head may be slow, so other calls may run after each state."""
    found = list[_Found]()
    for state in states:
        found.append(call(state))
        yield GIVE_WAY
    return found


def _check_finite(vectors: Float[Tensor, "texts size"]) -> None:
    """Raise ModelError for states that are not finite, because they give no vector, score or label."""
    broken = (~vectors.isfinite().all(1)).nonzero().flatten().tolist()
    if broken:
        raise ModelError(
            f"text {broken[0]}: the model's states are not finite: its weights are damaged, or its keys and values do "
            "not fit the cache: download it again, or use kv_type f32"
        )
