"""The one loop: forward, sample, accept, commit; then the same again with what was accepted.

It knows neither text nor caches: a `Generation` is what one request has said, a `Context` where its logits come from.
"""

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final

import torch

from infer import ops
from infer.context import PREFILL_CHUNK, CachedContext, Context, RecomputedContext
from infer.errors import ContextLengthError, InvalidRequestError
from infer.generation import Generation
from infer.model.transformer import Transformer
from infer.params import CONSTRAINTS, SamplingParams
from infer.results import GenerationResult, GenerationTiming, Piece
from infer.sampling.sampler import message_of
from infer.tokenizer import Tokenizer

CHAIN = 8  # tokens per return to Python

OnToken = Callable[[int, str], bool | None]


@final
@dataclass
class Clock:
    """Where the time of a generation goes: the first token's, then each step's forward and sampling."""

    device: torch.device
    prefill_time_s: float = 0.0
    decode_times_s: list[float] = field(default_factory=list)
    sampling_times_s: list[float] = field(default_factory=list)
    is_first: bool = True

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def add(self, forward_s: float, sampling_s: float) -> None:
        if self.is_first:
            self.prefill_time_s, self.is_first = forward_s + sampling_s, False
        else:
            self.decode_times_s.append(forward_s)
            self.sampling_times_s.append(sampling_s)

    def timing(self) -> GenerationTiming:
        return GenerationTiming(self.prefill_time_s, self.decode_times_s, self.sampling_times_s)


def decode(
    generation: Generation,
    context: Context,
    *,
    device: torch.device,
    prefill_chunk: int = PREFILL_CHUNK,
    chain: int = CHAIN,
    cancel: threading.Event | None = None,
) -> Generator[Piece, None, GenerationResult]:
    """Yield each token as it is accepted; return the result.

    `cancel` is looked at before every forward and after every token; what a chain computed beyond it is dropped.
    """
    clock = Clock(device)
    pending: Sequence[int] = generation.prompt_token_ids
    while generation.finish_reason is None:
        with ops.threads_for(device):
            token_ids = _launch(generation, context, pending, prefill_chunk, chain, cancel, clock)
        for index, token_id in enumerate(token_ids):
            if token_id < 0:
                generation.fail("logits", message_of(token_id))
                break
            yield generation.accept(token_id)
            if cancel is not None and cancel.is_set():
                generation.cancel()
            if generation.is_finished():
                context.drop(len(token_ids) - 1 - index)
                break
        pending = token_ids[-1:]
    return generation.result(clock.timing())


@torch.inference_mode()
def _launch(
    generation: Generation,
    context: Context,
    pending: Sequence[int],
    prefill_chunk: int,
    chain: int,
    cancel: threading.Event | None,
    clock: Clock,
) -> list[int]:
    """Run the pending tokens and sample what follows: one token or, where the device can go on alone, a chain."""
    started = clock.now()
    count = min(chain, generation.chain_room)
    if len(pending) == 1 and count > 1:
        rows, history = generation.rows, generation.history
        token_ids = context.chain(pending[0], count, rows, history, generation.stop_ids)
        if token_ids:
            elapsed = clock.now() - started
            for _ in token_ids:
                clock.add(elapsed / len(token_ids), 0.0)  # sampling is part of the step
            return token_ids
    for start in range(0, len(pending), prefill_chunk):
        if cancel is not None and cancel.is_set():
            generation.cancel()
            return []
        chunk = pending[start : start + prefill_chunk]
        if start + prefill_chunk < len(pending):
            context.feed(chunk)
    logits = context.extend(chunk)
    computed = clock.now()
    token_id = generation.sample(logits)
    clock.add(computed - started, clock.now() - computed)
    return [token_id]


@final
class Stream(Iterator[Piece]):
    """An answer as it comes: iterate for its pieces, then read `result`."""

    def __init__(
        self,
        generation: Generation,
        context: Context,
        device: torch.device,
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        cancel: threading.Event | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._generation = generation
        self._pieces = decode(generation, context, device=device, prefill_chunk=prefill_chunk, cancel=cancel)
        self._result: GenerationResult | None = None
        self._end = weakref.finalize(self, on_end)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except StopIteration as finished:
            self._result = self._result or finished.value
            self.close()
            raise StopIteration from None

    def cancel(self) -> None:
        """No further token: finish_reason is "abort", unless the answer had already ended."""
        self._generation.cancel()

    def close(self) -> None:
        """Give back what the answer held; happens by itself at its end and when it is dropped."""
        self._pieces.close()
        self._end()

    @property
    def result(self) -> GenerationResult:
        """How the answer ended; runs to its end first."""
        return self.run()

    def run(self, on_token: OnToken | None = None) -> GenerationResult:
        for piece in self:
            if on_token is not None and on_token(piece.token_id, piece.text) is False:
                self.cancel()
        if self._result is None:
            raise InvalidRequestError("the stream was closed before its end, so it has no result")
        return self._result


def begin(
    model: Transformer, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Generation:
    """Check a request against the model and draw a seed where none was given.

    Raises InvalidRequestError for what `check_prompt` refuses and for parameters that name ids outside the vocabulary.
    """
    token_ids = check_prompt(model, tokenizer, prompt_token_ids, room=1)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        _check_ids(name, getattr(params, name) or (), model.architecture.vocab_size)
    for name in CONSTRAINTS:
        if getattr(params, name) is not None:
            raise InvalidRequestError(f"{name}: constrained decoding is not supported yet")
    if params.seed is None:
        params = replace(params, seed=secrets.randbits(64))
    return Generation(tokenizer, token_ids, params, model.max_seq_len, model.device)


def check_prompt(model: Transformer, tokenizer: Tokenizer, token_ids: Sequence[int], *, room: int) -> list[int]:
    """The prompt, or BOS alone where it is empty and the model has one.

    Raises InvalidRequestError for an empty prompt without BOS or an id outside the vocabulary, ContextLengthError where
    the context does not hold it and `room` tokens more.
    """
    token_ids = list(token_ids)
    if not token_ids:
        if tokenizer.bos_token_id is None:
            raise InvalidRequestError("the prompt is empty and the model has no BOS token to begin with: give it text")
        token_ids = [tokenizer.bos_token_id]
    _check_ids("the prompt", token_ids, model.architecture.vocab_size)
    if len(token_ids) + room > model.max_seq_len:
        answer = ", the answer included" if room else ""
        raise ContextLengthError(
            f"the prompt has {len(token_ids)} tokens and the context holds {model.max_seq_len}{answer}: "
            "shorten the prompt or raise max_seq_len"
        )
    return token_ids


def _check_ids(source: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"{source}: token ids must be from 0 to {vocab_size - 1}, got {token_id}")


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    device: str | torch.device | None = None,
    use_cache: bool = True,
    on_token: OnToken | None = None,
    cancel: threading.Event | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    capture: bool = True,
) -> GenerationResult:
    """Generate from a prompt of ids, with the parameters exactly as given.

    `on_token(token_id, text)` sees every token as it comes; returning False cancels. `use_cache=False` runs the whole
    sequence again for each token, `capture=False` runs its ops one by one: both slower, with the same tokens.
    `device`, where given, must be the model's.
    """
    if device is not None and torch.device(device).type != model.device.type:
        raise InvalidRequestError(f"device={device} but the model lies on {model.device}: load it there")
    generation = begin(model, tokenizer, prompt_token_ids, params)
    context: Context = RecomputedContext(model)
    chunk = model.max_seq_len
    if use_cache:
        room = model.max_seq_len - len(generation.prompt_token_ids)
        new_tokens = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        context = CachedContext(model, len(generation.prompt_token_ids) + new_tokens, capture=capture)
        chunk = prefill_chunk
    return Stream(generation, context, model.device, prefill_chunk=chunk, cancel=cancel).run(on_token)
