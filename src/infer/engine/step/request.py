"""A user's request, checked and immutable."""

import operator
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, final

from infer.compute.operands.limits import StepLimits
from infer.engine.step.request_options import RequestOptions
from infer.errors import ContextLengthError, InvalidRequestError
from infer.models.transformer import Transformer
from infer.sampling_params import SEED_BITS, SamplingParams
from infer.text.grammar.constraint import Constraint
from infer.text.grammar.grammar import grammar_of
from infer.text.tokenizer import Tokenizer
from infer.text.toolcalls.answer_format import AnswerFormat


@final
@dataclass(frozen=True)
class Request:
    """A checked request. Ids from `vocab_size` on are never sampled."""

    tokenizer: Tokenizer
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    vocab_size: int
    options: RequestOptions = field(default_factory=RequestOptions)
    make_constraint: Callable[[], Constraint] | None = None  # makes the grammar's matcher, at the grammar's start
    num_truncated: int = 0  # tokens that were truncated on the left of the prompt
    answer_format: AnswerFormat | None = None  # the answer's parts besides text
    messages: Sequence[Mapping[str, Any]] = ()  # of the conversation, as far as the prompt has them
    # Ascending positions, before which chunks of the prompt end if the model has states.
    checkpoints: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()  # parts of tools and messages that were left out or changed

    @property
    def has_user_grammar(self) -> bool:
        """True if the text must follow a grammar of the user's."""
        return grammar_of(self.params) is not None

    @cached_property
    def salt(self) -> bytes:
        salt = self.options.cache_salt
        return blake2b(salt.encode(), digest_size=16).digest() if salt else b""

    @cached_property
    def call_salt(self) -> bytes:
        """Salt of the ids of tool calls: equal for the same prompt and seed."""
        return blake2b(repr((self.prompt_token_ids, self.params.seed)).encode(), digest_size=16).digest()


class Limits(NamedTuple):
    """The range of ids and the number of tokens that a model and its tokenizer accept, and the limits of a step."""

    vocab_size: int
    max_seq_len: int
    bos_token_id: int | None
    step: StepLimits


def limits_of(model: Transformer, tokenizer: Tokenizer) -> Limits:
    """Return the limits of a model. Either the model or the tokenizer may have more ids."""
    vocab_size = min(model.architecture.vocab_size, tokenizer.vocab_size)
    return Limits(vocab_size, model.max_seq_len, tokenizer.bos_token_id, model.backend.step_limits)


def checked_params(limits: Limits, params: SamplingParams) -> SamplingParams:
    """Return the parameters with a seed, which is random if none is given.

    Raises InvalidRequestError for ids outside the vocabulary.
    """
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        check_ids(name, getattr(params, name) or (), limits.vocab_size)
    return params if params.seed is not None else replace(params, seed=secrets.randbits(SEED_BITS))


def check_prompt(limits: Limits, token_ids: Sequence[int], *, room: int) -> list[int]:
    """Return the prompt, or only BOS if it is empty and the model has one.

    Raises InvalidRequestError for an empty prompt without BOS or an id outside the vocabulary, and ContextLengthError
    if the context is too short for the prompt and `room` further tokens.
    """
    token_ids = list(token_ids)
    if not token_ids:
        if limits.bos_token_id is None:
            raise InvalidRequestError("the prompt is empty, and the model has no BOS token to begin with: pass a text")
        token_ids = [limits.bos_token_id]
    check_ids("the prompt", token_ids, limits.vocab_size)
    if len(token_ids) + room > limits.max_seq_len:
        answer = ", the answer included" if room else ""
        raise ContextLengthError(
            f"the prompt is too long: it has {len(token_ids)} tokens and the maximum context length is "
            f"{limits.max_seq_len} tokens{answer}: shorten it, raise max_seq_len or pass overflow='truncate_left'"
        )
    return token_ids


def whole_id(source: str, token_id: Any) -> int:
    """Return an id as an int. Raises InvalidRequestError for anything that is not a whole number."""
    if not isinstance(token_id, bool):
        with suppress(TypeError):
            return operator.index(token_id)
    message = f"{source}: token ids must be whole numbers, got {token_id!r:.60}"
    raise InvalidRequestError(message, param=source)


def check_ids(source: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for anything that is not an id of the vocabulary."""
    for token_id in token_ids:
        if type(token_id) is not int:
            whole_id(source, token_id)
        if not 0 <= token_id < vocab_size:
            message = f"{source}: token ids must be from 0 to {vocab_size - 1}, got {token_id}"
            raise InvalidRequestError(message, param=source)
