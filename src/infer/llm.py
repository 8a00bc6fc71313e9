"""`LLM`: a model, its tokenizer and its cache behind the few calls that most programs need."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.architecture import Architecture
from infer.batch import Step
from infer.checkpoint import Checkpoint, open_checkpoint
from infer.constraint import grammar_of, make_compiler
from infer.context import PREFILL_CHUNK, CachedContext, make_cache
from infer.decode import Batch, OnPrefill, OnToken, Stream, begin, check_prompt, run_all, vocab_size_of
from infer.errors import InferError, InvalidRequestError, ModelError
from infer.model.families import make_architecture
from infer.model.load import FloatsAs, OnProgress, load_transformer
from infer.model.transformer import Transformer
from infer.ops import Precision
from infer.params import SamplingParams
from infer.results import GenerationResult, SampleTrace
from infer.running import Running
from infer.sampling import trace
from infer.tokenizer import Tokenizer

BATCH_SIZE = 8  # prompts in one step
NUM_DRAFT_TOKENS = 8
MAX_DRAFT_TOKENS = 32
DEFAULT_MAX_SEQ_LEN = 8192  # of a model made for more, unless asked for

Message = Mapping[str, Any]
Prompt = str | Sequence[int]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@final
class LLM:
    """A loaded model. `model` is a folder, a `.gguf` file or the name of an installed package (`smollm2`).

    `dtype="auto"` keeps the weights as their file stores them; a float type dequantises them at load.
    `weights="q8"` or `"q4"` quantises float weights at load, `"bf16"` rounds them. `precision` is that of the
    activations beside quantised weights on a CPU: "exact" (16 bits) or "fast" (8). `max_seq_len` None is the model's
    own context, 8,192 tokens at most. `threads` counts for the whole process. `capture=False` runs each op by itself:
    slower, with the same tokens. Safe to call from several threads.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "auto",
        weights: str = "auto",
        precision: str = "exact",
        max_seq_len: int | None = None,
        threads: int | None = None,
        capture: bool = True,
        on_progress: OnProgress | None = None,
    ) -> None:
        checkpoint = open_checkpoint(model)
        if threads is not None:
            set_num_threads(threads)
        self.tokenizer = load_tokenizer(checkpoint)
        self.sampling_defaults = sampling_defaults(checkpoint.generation_config)
        self.model = _load(checkpoint, self.tokenizer, device, dtype, weights, precision, max_seq_len, on_progress)
        self._capture = capture
        self._compiler = make_compiler(self.tokenizer, vocab_size_of(self.model, self.tokenizer))
        self._idle: list[CachedContext] = []

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def max_seq_len(self) -> int:
        return self.model.max_seq_len

    @property
    def can_chat(self) -> bool:
        """Whether the model brings a chat template."""
        return self.tokenizer.chat_template is not None

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
    ) -> GenerationResult:
        """The whole answer. `params` None takes the model's own sampling defaults.

        `on_token(token_id, text)` sees each token as it comes and cancels by returning False, `cancel` from another
        thread; both end with finish_reason "abort". For `speculation` see `stream`.
        """
        stream = self.stream(prompt, params, cancel=cancel, speculation=speculation, num_draft_tokens=num_draft_tokens)
        return stream.run(on_token)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        prefill_chunk: int = PREFILL_CHUNK,
        on_prefill: OnPrefill | None = None,
    ) -> Stream:
        """Pieces of text as they come; `.result` is there when they end.

        `speculation="ngram"` verifies guesses of up to `num_draft_tokens` in one step: the same tokens, sooner where
        the text repeats. A prompt is run `prefill_chunk` tokens at a time, after each of which
        `on_prefill(done, total)` is called and `cancel` looked at.
        """
        if not 1 <= prefill_chunk <= PREFILL_CHUNK:
            raise InvalidRequestError(f"prefill_chunk must be in [1, {PREFILL_CHUNK}], got {prefill_chunk}")
        running = self._begin(prompt, params, 0, speculation, num_draft_tokens, cancel)
        context = self._take_context()
        batch = Batch(context, self.model.device, prefill_chunk=prefill_chunk)
        return Stream(running, batch, on_prefill=on_prefill, on_end=lambda: self._give_back(context))

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        batch_size: int = BATCH_SIZE,
        speculation: str | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[GenerationResult]:
        """The answers to several prompts, in their order, up to `batch_size` of them in one step.

        Each is what `generate` gives for its prompt and parameters, one set for all or one a prompt. An answer that
        ends makes room for the next prompt. All are checked before the first begins.
        """
        if batch_size < 1:
            raise InvalidRequestError(f"batch_size must be at least 1, got {batch_size}")
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"params must be one or one a prompt: {len(prompts)} prompts, {len(each)} params")
        waiting = []
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                waiting.append(self._begin(prompt, own, 0, speculation, num_draft_tokens, None))
            except InvalidRequestError as error:
                raise type(error)(f"prompt {index}: {error}") from error
        return run_all(self.model, waiting, batch_size, on_progress, capture=self._capture)

    def _begin(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        row: int,
        speculation: str | None,
        num_draft_tokens: int,
        cancel: threading.Event | None,
    ) -> Running:
        if speculation not in (None, "ngram"):
            raise InvalidRequestError(f"speculation must be 'ngram' or None, got {speculation!r}")
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidRequestError(f"num_draft_tokens must be in [1, {MAX_DRAFT_TOKENS}], got {num_draft_tokens}")
        params = SamplingParams(**self.sampling_defaults) if params is None else params
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        generation = begin(self.model, self.tokenizer, token_ids, params)
        grammar = grammar_of(params)
        return Running(
            generation,
            row=row,
            constraint=None if grammar is None else self._compiler.compile(grammar),
            num_draft_tokens=num_draft_tokens if speculation else 0,
            cancel=cancel,
        )

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        **template_variables: Any,
    ) -> GenerationResult:
        """Answer a conversation, rendered by the model's own template; extra names go to the template."""
        token_ids = self.tokenizer.encode_chat(messages, **template_variables)
        return self.generate(token_ids, params, on_token=on_token, cancel=cancel)

    def sample_trace(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        step: int = 1,
        num_candidates: int = 10,
    ) -> SampleTrace:
        """How the token of this step (1 follows the prompt) is sampled, stage by stage: the one `generate` gives.

        A prompt of messages is rendered as `chat` does. Raises InvalidRequestError where the answer ends before.
        """
        if step < 1:
            raise InvalidRequestError(f"step must be at least 1, the first token after the prompt, got {step}")
        params = SamplingParams(**self.sampling_defaults) if params is None else params
        params = replace(params, max_new_tokens=step, min_new_tokens=min(params.min_new_tokens, step))
        token_ids = check_prompt(self.model, self.tokenizer, self._encode(prompt), room=1)
        result = self.generate(token_ids, params)
        if result.error is not None:
            raise InvalidRequestError(f"the generation ended early: {result.error}")
        if len(result.token_ids) < step:
            why = f"{result.finish_reason}, {result.stop_reason!r}"
            raise InvalidRequestError(
                f"step must be at most {len(result.token_ids)}, where the answer ends ({why}), got {step}"
            )
        context = token_ids + result.token_ids[: step - 1]
        found = trace.sample_trace(
            self.logits(context, last=1)[0, : vocab_size_of(self.model, self.tokenizer)],
            replace(params, seed=result.seed),
            context,
            num_prompt_tokens=len(token_ids),
            eos_token_ids=self.tokenizer.eos_token_ids,
            num_candidates=num_candidates,
        )
        if found.token_id != result.token_ids[-1]:
            raise InferError(f"the trace ends in token {found.token_id}, the answer in {result.token_ids[-1]}")
        texts = self.tokenizer.token_bytes
        return replace(
            found,
            text_before=self.tokenizer.decode(context, skip_special_tokens=False),
            candidates=tuple(
                replace(candidate, text=texts[candidate.token_id].decode("utf-8", errors="backslashreplace"))
                for candidate in found.candidates
            ),
        )

    def _encode(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        messages = [each for each in prompt if isinstance(each, Mapping)]
        ids = [each for each in prompt if not isinstance(each, Mapping)]
        return self.tokenizer.encode_chat(messages) if messages else ids

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], *, last: int | None = None) -> Float[Tensor, "tokens vocab"]:
        """float32 logits after every token, or after the last few: `[tokens, vocab]` takes 4 bytes × vocab a token."""
        token_ids = check_prompt(self.model, self.tokenizer, token_ids, room=0)
        cache = make_cache(self.model, len(token_ids))
        first = 0 if last is None else max(len(token_ids) - last, 0)
        chunks = []
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[start : start + PREFILL_CHUNK]
            step = Step.of(chunk, start, wanted=range(max(first - start, 0), len(chunk))).to(self.model.device)
            chunks.append(self.model.forward(step, cache))
            cache.commit([len(chunk)])
        return torch.cat(chunks)

    def _take_context(self) -> CachedContext:
        """An empty sequence, one that was given back if there is one: its cache is there and its step recorded."""
        try:
            return self._idle.pop()
        except IndexError:
            return CachedContext(self.model, self.max_seq_len, capture=self._capture)

    def _give_back(self, context: CachedContext) -> None:
        context.clear()
        self._idle.append(context)


def load_model(
    model_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    weights: str = "auto",
    precision: str = "exact",
    max_seq_len: int | None = None,
) -> tuple[Transformer, Architecture]:
    """The network alone, for programs that bring their own loop: `(model, config)`."""
    checkpoint = open_checkpoint(model_id)
    model = _load(checkpoint, load_tokenizer(checkpoint), device, dtype, weights, precision, max_seq_len, None)
    return model, model.architecture


def load_tokenizer(model: str | Path | Checkpoint) -> Tokenizer:
    """The tokenizer of a model, without its weights."""
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    if checkpoint.metadata:
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_folder(checkpoint.path)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's own generation config asks for, in the names of SamplingParams: only keys that it has."""
    given = {name: generation_config[name] for name in _SAMPLING_NAMES if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        given = {name: value for name, value in given.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    if given.get("top_k") in (0, -1):
        del given["top_k"]
    return given


def _load(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    device: str | torch.device,
    dtype: str | torch.dtype,
    weights: str,
    precision: str,
    max_seq_len: int | None,
    on_progress: OnProgress | None,
) -> Transformer:
    architecture = make_architecture(checkpoint.config)
    # Special tokens of a larger relative (Gemma's image token) may lie beyond the embedding: no text encodes to them.
    beyond = set(range(architecture.vocab_size, tokenizer.vocab_size)) - tokenizer.special_token_ids
    if beyond:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {architecture.vocab_size} rows: "
            "they are of different models"
        )
    chosen_dtype = _dtype(dtype)
    if chosen_dtype is not None and weights != "auto":
        raise InvalidRequestError(f"dtype={dtype} and weights={weights} contradict each other: give one of them")

    def on_block(num_done: int, num_blocks: int) -> None:
        checkpoint.release_pages()
        if on_progress is not None:
            on_progress(num_done, num_blocks)

    chosen_device = _device(device)
    with ops.threads_for(chosen_device):
        model = load_transformer(
            architecture,
            checkpoint.weights,
            device=chosen_device,
            dtype=chosen_dtype,
            keep_floats_as=_choice("weights", weights, get_args(FloatsAs)),
            precision=_choice("precision", precision, get_args(Precision)),
            max_seq_len=_context(max_seq_len, architecture),
            on_progress=on_block,
        )
    checkpoint.release_pages()
    return model


def set_num_threads(threads: int) -> None:
    """How many threads the process computes with, in our kernels and in torch's."""
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InvalidRequestError(f"threads must be a whole number from 1, got {threads!r}")
    torch.set_num_threads(threads)
    ops.set_num_threads(threads)


def _choice(name: str, value: str, choices: Sequence[Any]) -> Any:
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InvalidRequestError(f"device must be cpu or cuda, got {device!r}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidRequestError(f"device must be cpu or cuda, got {device!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequestError("device is cuda, but torch sees no CUDA device here: use device='cpu'")
    return chosen


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in _DTYPES.values():
        raise InvalidRequestError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype!r}")
    return chosen


def _context(max_seq_len: int | None, architecture: Architecture) -> int:
    if max_seq_len is None:
        return min(architecture.max_positions, DEFAULT_MAX_SEQ_LEN)
    if not 1 < max_seq_len <= architecture.max_positions:
        raise InvalidRequestError(
            f"max_seq_len must be from 2 to the model's own {architecture.max_positions}, got {max_seq_len}"
        )
    return max_seq_len
