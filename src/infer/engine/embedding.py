"""Texts as vectors: the hidden states of their tokens after the last norm, pooled.

They are computed between the engine's steps, over a cache of their own, in steps as short as the engine's while it has
work. A text's vector has the same bits whatever its neighbours and its steps are.
"""

import warnings
from collections.abc import Callable, Generator, Sequence
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from infer.engine.host import Host
from infer.engine.prompt_encoding import Prompt, pairs_of, prompt_ids
from infer.engine.request import check_prompt
from infer.engine.text_states import text_states
from infer.engine.vector_options import TextIds, VectorOptions
from infer.errors import ContextLengthError, InvalidRequestError, TruncationWarning


def texts_to_embed(
    host: Host, texts: Sequence[Prompt], options: VectorOptions, check: Callable[[], None] = lambda: None
) -> TextIds:
    """Return the ids of texts, with their prompt before them. `check` is called before each, and may raise.

    Raises InvalidRequestError for an option that cannot be served, and for a text that is no prompt or is too long.
    """
    options.check(host.model.architecture.hidden_size)
    before, most = host.settings.prompts.text_of(options.prompt_name), host.requests.limits.max_seq_len
    found, num_cut = list[list[int]](), 0
    for index, (text, _) in enumerate(pairs_of(texts, None)):
        check()
        try:
            if isinstance(text, str):
                text = before + text
            elif options.prompt_name is not None:
                raise InvalidRequestError("prompt_name is for texts, got ids or messages: leave it out")
            ids = _ids_of(host, text, most, may_cut=options.truncate)
            num_cut += len(ids) > most
            found.append(check_prompt(host.requests.limits, _cut(host, text, ids, most), room=0))
        except InvalidRequestError as error:
            raise type(error)(f"text {index}: {error}") from error
    return TextIds(found, most, num_cut)


def _ids_of(host: Host, text: Prompt, most: int, *, may_cut: bool) -> list[int]:
    """Raises ContextLengthError for a text of more than `most` tokens, unless it may be cut."""
    if not may_cut and isinstance(text, str) and (least := host.tokenizer.least_num_tokens(text)) > most:
        raise too_long(f"at least {least}", most)
    ids = prompt_ids(text, host.tokenizer, None)
    if not may_cut and len(ids) > most:
        raise too_long(str(len(ids)), most)
    return ids


def _cut(host: Host, text: Prompt, ids: list[int], most: int) -> list[int]:
    """Return the first `most` ids. The tokens with which the tokenizer ends each text stay at the end."""
    if len(ids) <= most:
        return ids
    end = host.tokenizer.ending_ids if isinstance(text, str) else []
    return ids[: most - len(end)] + end


def too_long(count: str, most: int) -> ContextLengthError:
    """Return the error about a text with this number of tokens."""
    message = f"the text has {count} tokens and the context holds {most}"
    return ContextLengthError(f"{message}: shorten it, raise max_seq_len or pass truncate=True")


def warn_if_cut(ids: TextIds) -> None:
    """Warn the caller of a method of `LLM` if texts were cut."""
    if ids.warning:
        warnings.warn(ids.warning, TruncationWarning, stacklevel=3)


def embed(
    host: Host, texts: Sequence[list[int]], options: VectorOptions
) -> Generator[None, None, Float[Tensor, "texts size"]]:
    """Return one float32 vector per text of ids. Work for the loop, a step at a time.

    Without a pooling, the model's own is used, or the mean if it has none. The mean is of all tokens; the last token is
    the only one that has seen the whole text. Vectors are cut to `dimensions`, then normalised.
    """
    pooling = options.pooling or host.settings.pooling or "mean"
    pooled = torch.zeros(len(texts), host.model.architecture.hidden_size, dtype=torch.float64)

    yield  # the texts of the calls before have the cache for themselves
    for step in text_states(host, texts, only_last=pooling == "last"):
        for text, states in step:
            found = states.double().cpu()
            # Token by token, as the steps may be any.
            pooled[text] = reduce(torch.add, found, pooled[text]) if pooling == "mean" else found[-1]
        yield
    if pooling == "mean":
        pooled /= torch.tensor([[len(text)] for text in texts]).reshape(-1, 1)
    pooled = pooled[:, : options.dimensions]
    return (torch.nn.functional.normalize(pooled) if options.normalize else pooled).float()
