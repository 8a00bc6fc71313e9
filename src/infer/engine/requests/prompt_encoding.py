"""Prompts and their ids. A prompt is text, ids or messages, and can be truncated on the left.

A prompt that is far too long is refused before it is tokenized.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infer.compute.sampling.keywords import Params
from infer.engine.step.request import Limits
from infer.errors import ContextLengthError, InvalidRequestError
from infer.model_settings import Overflow
from infer.request_limits import NUM_TOKENS_OF_CALLS
from infer.sampling_params import SamplingParams
from infer.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
IdArray = torch.Tensor | npt.NDArray[Any]
Prompt = str | Sequence[int] | Sequence[Message] | IdArray  # a text, ids, or messages for the model's chat template

_SYSTEM_ROLES = ("system", "developer")


def prompt_ids(prompt: Any, tokenizer: Tokenizer, max_seq_len: int | None, *, add_special: bool = True) -> list[int]:
    """Return the ids of a prompt that is text or ids.

    If `max_seq_len` is None, a text may have any length. `add_special` puts BOS before a text if the model needs it.
    Raises InvalidRequestError for anything else, and ContextLengthError for a text that cannot fit.
    """
    if isinstance(prompt, str):
        if max_seq_len is not None and (least := tokenizer.least_num_tokens(prompt)) > max_seq_len:
            raise ContextLengthError(
                f"the prompt has at least {least} tokens and the context holds {max_seq_len}: shorten the prompt or "
                "raise max_seq_len"
            )
        return tokenizer.encode(prompt, add_special_tokens=add_special)
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidRequestError("a prompt must be a text, ids or messages, got bytes: decode them first")
    if isinstance(prompt, Mapping):
        raise InvalidRequestError("a prompt must be a text, ids or messages, got one message: put it into a list")
    if not isinstance(prompt, Iterable):
        raise InvalidRequestError(f"a prompt must be a text, ids or messages, got {type(prompt).__name__}")
    given: list[Any] = _whole_numbers(prompt) if isinstance(prompt, torch.Tensor | np.ndarray) else list(prompt)
    if any(isinstance(each, Mapping) for each in given):
        return tokenizer.encode_chat(given)
    texts = [each for each in given if isinstance(each, str)]
    if texts:
        raise InvalidRequestError(
            f"a prompt must be one text, got a list with {texts[0]!r:.60}: generate_all() answers several prompts"
        )
    return [_id_of(each) for each in given]


def pairs_of(prompts: Iterable[Prompt], params: Any) -> list[tuple[Prompt, Params | None]]:
    """Return each prompt with its parameters: the same for all, or one per prompt. Raises InvalidRequestError."""
    pairs_as_needed(prompts, params)  # checks both
    given = list(prompts)
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [(prompt, params) for prompt in given]
    each = list(params)
    if len(each) != len(given):
        raise InvalidRequestError(f"params must be one or one per prompt, got {len(each)} for {len(given)} prompts")
    return list(zip(given, each, strict=True))


def pairs_as_needed(prompts: Iterable[Prompt], params: Any) -> Iterator[tuple[Prompt, Params | None]]:
    """Return an iterator of such pairs, for any number of prompts. Raises InvalidRequestError."""
    if isinstance(prompts, str | bytes | bytearray | memoryview | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be a list or an iterable of prompts, got {type(prompts).__name__}: generate() answers one "
            "prompt"
        )
    if params is None or isinstance(params, SamplingParams | Mapping):
        return zip(prompts, repeat(params))
    if isinstance(params, str | bytes) or not isinstance(params, Iterable):
        raise InvalidRequestError(f"params must be one, or a list with one per prompt, got {params!r:.80}")
    return zip(prompts, params, strict=True)


def is_list_of_texts(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and all(isinstance(each, str) for each in prompt)


def is_conversation(prompt: Any) -> bool:
    """Return True for a list of messages, from which single turns can be dropped."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and any(isinstance(m, Mapping) for m in prompt)


def system_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the system messages at the beginning of a conversation."""
    return list(takewhile(lambda message: message.get("role") in _SYSTEM_ROLES, messages))


def fitted(
    prompt: Prompt, encode: Callable[[Prompt], list[int]], limits: Limits, params: SamplingParams, overflow: Overflow
) -> tuple[list[int], int, Sequence[Message]]:
    """Return the ids of a prompt, the number of truncated ids, and the messages that remain of a conversation.

    `overflow="truncate_left"` truncates a prompt so that there is room for the answer.

    For a text or ids, the last tokens are kept, after BOS if the prompt begins with it. For messages, the last turns
    are kept, after the system message. The answer's room is max_new_tokens (512 without a limit), but at most half of
    the context.
    """
    token_ids = encode(prompt)
    messages: list[Any] = list(prompt) if is_conversation(prompt) else []
    room = params.max_new_tokens or NUM_TOKENS_OF_CALLS
    most = limits.max_seq_len - min(room, limits.max_seq_len // 2)
    if overflow == "error" or len(token_ids) <= most:
        return token_ids, 0, messages
    if messages:
        return _last_turns(messages, encode, len(token_ids), most)
    head = token_ids[:1] if token_ids[0] == limits.bos_token_id else []
    kept = [*head, *token_ids[len(token_ids) - most + len(head) :]]
    return kept, len(token_ids) - len(kept), ()


def _last_turns(
    messages: Sequence[Any], encode: Callable[[Prompt], list[int]], num_tokens: int, most: int
) -> tuple[list[int], int, Sequence[Message]]:
    """Return what `fitted` does, without the oldest turns.

    A turn is a user's message and all messages up to the next one. System messages stay.
    """
    head = system_messages(messages)
    num_system = len(head)
    starts = [index for index in range(num_system, len(messages)) if messages[index].get("role") == "user"]
    starts = starts or [num_system]

    def ids_from(start: int) -> list[int]:
        return encode([*head, *messages[start:]])

    last = ids_from(starts[-1])
    if len(last) > most:
        raise ContextLengthError(
            f"the last turn has {len(last)} tokens with the system message, but only {most} fit before the answer: "
            "shorten it, raise max_seq_len or lower max_new_tokens"
        )
    found = bisect_left(starts[:-1], True, key=lambda start: len(ids_from(start)) <= most)
    kept = ids_from(starts[found])
    return kept, num_tokens - len(kept), [*head, *messages[starts[found] :]]


def _whole_numbers(ids: IdArray) -> list[int]:
    if ids.ndim != 1:
        raise InvalidRequestError(f"ids must have one dimension, got shape {tuple(ids.shape)}: pass one row")
    is_whole = ids.dtype.kind in "iu" if isinstance(ids, np.ndarray) else "int" in str(ids.dtype)
    if not is_whole:
        raise InvalidRequestError(f"token ids must be whole numbers, got an array of {ids.dtype}")
    whole: list[int] = ids.tolist()
    return whole


def _id_of(value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidRequestError(f"the prompt: token ids must be whole numbers, got {value!r:.60}")
