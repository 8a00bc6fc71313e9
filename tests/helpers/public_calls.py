"""Every public call, for mypy alone: nothing here is run. `assert_type` fails if a result has become Any.

A call with `type: ignore` is wrong: mypy reports the comment as unused if the parameter's type has become Any.
tests/project/test_public_calls.py compares the names with tests/data/surface.json.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, Literal, assert_type

import tokenizers
from torch import Tensor

from infer import (
    LLM,
    AsyncLLM,
    AsyncStream,
    BatchEngine,
    Classification,
    GenerationResult,
    GenerationTiming,
    InferError,
    InvalidRequestError,
    ModelError,
    Piece,
    RankedDocument,
    ReasoningDelta,
    RequestOptions,
    SamplingParams,
    Session,
    Stream,
    Tokenizer,
    ToolCall,
    ToolCallDelta,
    __version__,
    apply_frequency_penalty,
    apply_logit_bias,
    apply_min_p,
    apply_presence_penalty,
    apply_repetition_penalty,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    load_model,
    load_tokenizer,
    sample_token,
    sample_trace,
)
from infer.compute.operands.architecture import Architecture
from infer.compute.sampling.defaults import SamplingDefaults
from infer.engine.requests.host import Host
from infer.engine.requests.prompt_batch import Ended
from infer.engine.requests.stream import OpenAnswer
from infer.engine.step.request import Request
from infer.engine.step.sequence import Sequence as Answer
from infer.engine.texts.vector_options import Computed, VectorOptions
from infer.models.transformer import Transformer
from infer.outputs import GenerationStats, SampleTrace, TokenLogprob, TraceCandidate, TraceStage
from infer.parameters import HasJsonSchema
from infer.text.tokenizer.detokenizer import Detokenizer
from infer.text.tokenizer.infill import InfillMarks
from infer.text.tokenizer.pairs import EncodedPair

Messages = Sequence[Mapping[str, Any]]
Json = dict[str, Any]
FinishReason = Literal["eos", "stop", "length", "abort", "error"]
assert_type(__version__, str)


def make_values() -> None:
    assert_type(LLM("smollm2", device="cpu", kv_type="q8", eviction_policy="sliding", prefix_disk="8GB"), LLM)
    assert_type(AsyncLLM(Path("model"), threads=2), AsyncLLM)
    assert_type(BatchEngine("smollm2", seed=1, values={"temperature": 0}, finished=["a"], threads=2), BatchEngine)
    assert_type(SamplingParams(temperature=0, top_k=5, stop=["\n"], logit_bias={1: 2.0}), SamplingParams)
    assert_type(RequestOptions(timeout=2.0, speculation="ngram", tools=[{}], answer_prefix=[1, 2]), RequestOptions)
    assert_type(load_model("smollm2", dtype="float32", device="cpu"), tuple[Transformer, Architecture])
    assert_type(load_tokenizer("smollm2", allow_special=True), Tokenizer)


def fail(error: InferError, refusal: InvalidRequestError, broken: ModelError) -> None:
    for each in (InferError("text"), InvalidRequestError("text", param="top_p"), ModelError("text")):
        assert_type(str(each), str)
    assert_type(error.exit_status, int)
    assert_type(refusal.exit_status, int)
    assert_type(refusal.param, str | None)
    assert_type(broken.exit_status, int)


def sample(logits: Tensor, params: SamplingParams) -> None:
    assert_type(sample_token(logits, [1, 2], params, num_prompt_tokens=1, eos_token_ids={2}, allowed=[3]), int)
    assert_type(sample_trace(logits, params, [1, 2], num_candidates=5), SampleTrace)
    assert_type(apply_repetition_penalty(logits, [1], 1.1), Tensor)
    assert_type(apply_frequency_penalty(logits, [1], 0.1), Tensor)
    assert_type(apply_presence_penalty(logits, [1], 0.1), Tensor)
    assert_type(apply_logit_bias(logits, {1: 0.5}), Tensor)
    assert_type(apply_temperature(logits, 0.7), Tensor)
    assert_type(apply_top_k(logits, 40), Tensor)
    assert_type(apply_top_p(logits, 0.9), Tensor)
    assert_type(apply_min_p(logits, 0.05), Tensor)


def use_llm(llm: LLM, params: SamplingParams, options: RequestOptions, messages: Messages) -> None:
    with llm as entered:
        assert_type(entered, LLM)
    assert_type(llm.generate("text", params, options=options, on_token=lambda token_id, text: True), GenerationResult)
    assert_type(llm.generate(["one", "two"], [params, params], temperature=0), list[GenerationResult])
    assert_type(llm.generate_all(["one", [1, 2]], params, batch_size=4, options=options), list[GenerationResult])
    assert_type(llm.generate_iter(iter(["one"]), params, batch_size=4), Iterator[Ended])
    assert_type(llm.chat(messages, params, options=options, tools=[{}]), GenerationResult)
    assert_type(llm.stream("text", params, on_prefill=lambda done, all_tokens: None), Stream)
    assert_type(llm.stream_chat(messages, max_new_tokens=5), Stream)
    assert_type(llm.astream([1, 2], params), AsyncStream)
    assert_type(llm.session(system="Be brief.", tools=[{}]), Session)
    assert_type(llm.load_session("saved"), Session)
    assert_type(llm.prompt_logprobs("text", num=3), list[TokenLogprob | None])
    assert_type(llm.sample_trace("text", params, step=2, num_candidates=5), SampleTrace)
    assert_type(llm.embed(["text"], "mean", dimensions=8, normalize=True), Tensor)
    assert_type(llm.rerank("query", ["text"], 1, truncate=True), list[RankedDocument])
    assert_type(llm.classify(["text", ("one", "two")]), list[Classification])
    assert_type(llm.logits([1, 2], last=1), Tensor)
    assert_type(llm.default_params(is_chat=True), SamplingParams)
    assert_type(llm.trim(), int)
    llm.close()


def look_at_llm(llm: LLM, later: AsyncLLM, stream: Stream) -> None:
    assert_type(llm.sampling_defaults, SamplingDefaults)
    assert_type(later.llm, LLM)
    assert_type(stream.answer, OpenAnswer)
    assert_type(llm.model, Transformer)
    assert_type(llm.tokenizer, Tokenizer)
    assert_type(llm.architecture, Architecture)
    assert_type(llm.max_seq_len, int)
    assert_type(llm.can_chat, bool)
    assert_type(llm.prompt_names, tuple[str, ...])
    assert_type(llm.system_fingerprint, str)


async def use_async_llm(llm: AsyncLLM, params: SamplingParams, options: RequestOptions, messages: Messages) -> None:
    async with llm as entered:
        assert_type(entered, AsyncLLM)
    assert_type(await llm.generate("text", params, options=options), GenerationResult)
    assert_type(await llm.generate(["one", "two"], params, temperature=0), list[GenerationResult])
    assert_type(await llm.generate_all(["one"], params, batch_size=4), list[GenerationResult])
    assert_type(await llm.chat(messages, params, options=options), GenerationResult)
    assert_type(await llm.choices("text", [params, params]), list[AsyncStream])
    assert_type(llm.stream("text", params, seed=1), AsyncStream)
    assert_type(llm.stream_chat(messages, params), AsyncStream)
    assert_type(await llm.prompt_logprobs("text", num=1), list[TokenLogprob | None])
    assert_type(await llm.embed(["text"], "last", prompt_name="query"), Tensor)
    assert_type(await llm.rerank("query", ["text"], 1), list[RankedDocument])
    assert_type(await llm.classify(["text"], truncate=True), list[Classification])
    assert_type(await llm.trace("text", params, num_candidates=5), tuple[GenerationResult, list[SampleTrace]])
    assert_type(llm.host, Host)
    await llm.close()


async def use_calls_of_the_server(llm: AsyncLLM, request: Request, options: VectorOptions) -> None:
    assert_type(await llm.compute_vectors(["text"], options), Computed)
    assert_type(await llm.compute_labels(["text"], truncate=True), Computed)
    assert_type(await llm.score_pairs([("one", "two")], may_compare=True), Computed)
    assert_type(await llm.trace_answer(request, [1], first=1, last=1), list[SampleTrace])


def use_session(session: Session, params: SamplingParams, options: RequestOptions, messages: Messages) -> None:
    with session as entered:
        assert_type(entered, Session)
    assert_type(session.send("text", params, options=options), GenerationResult)
    assert_type(session.stream({"role": "user", "content": "text"}, temperature=0), Stream)
    assert_type(session.answer(messages, params), GenerationResult)
    assert_type(session.generate(params, on_token=lambda token_id, text: None), GenerationResult)
    assert_type(session.fork(), Session)
    assert_type(session.load(Path("saved")), Json)
    assert_type(session.token_ids, list[int])
    assert_type(session.messages, list[Json])
    assert_type(session.num_cached_tokens, int)
    session.append("text")
    session.rewind(1)
    session.save("saved", note={"title": "a"})
    session.close()


def use_stream(stream: Stream, answer: OpenAnswer) -> None:
    assert_type(Stream(answer), Stream)
    with stream as entered:
        assert_type(entered, Stream)
    for piece in stream:
        assert_type(piece, Piece)
    assert_type(stream.run(lambda token_id, text: None), GenerationResult)
    assert_type(stream.result, GenerationResult)
    assert_type(stream.sequence, Answer)
    stream.cancel()
    stream.close()


async def use_async_stream(stream: AsyncStream, answer: OpenAnswer) -> None:
    assert_type(AsyncStream.of(answer), AsyncStream)
    async with stream as entered:
        assert_type(entered, AsyncStream)
    async for piece in stream:
        assert_type(piece, Piece)
    assert_type(await stream.begin(), AsyncStream)
    assert_type(await stream.take(), list[Piece])
    assert_type(await stream.result(), GenerationResult)
    assert_type(stream.sequence, Answer)
    stream.cancel()
    await stream.close()


def use_tokenizer(tokenizer: Tokenizer, messages: Messages) -> None:
    assert_type(Tokenizer.from_folder(Path("model")), Tokenizer)
    assert_type(Tokenizer.from_gguf({}, num_rows=5), Tokenizer)
    assert_type(tokenizer.encode("text", False, parse_special=False), list[int])
    assert_type(tokenizer.encode_pair("one", "two"), EncodedPair)
    assert_type(tokenizer.encode_infill("before", "after", [("name", "text")], 100), list[int])
    assert_type(tokenizer.encode_chat(messages, tools=[]), list[int])
    assert_type(tokenizer.render_chat_template(messages, chat_template="tool_use"), str)
    assert_type(tokenizer.decode([1, 2], False), str)
    assert_type(tokenizer.make_detokenizer(prompt_ids=[1]), Detokenizer)
    assert_type(tokenizer.least_num_tokens("text"), int)
    assert_type(tokenizer.template_source(None, has_tools=True), str)
    assert_type(tokenizer.special_ids_in(["text"]), dict[str, int])
    tokenizer.replace_chat_template("{{ messages }}")
    tokenizer.check_chat_template()


def look_at_tokenizer(tokenizer: Tokenizer) -> None:
    assert_type(tokenizer.bos_token_id, int | None)
    assert_type(tokenizer.eos_token_ids, frozenset[int])
    assert_type(tokenizer.special_token_ids, frozenset[int])
    assert_type(tokenizer.ending_ids, list[int])
    assert_type(tokenizer.adds_bos, bool)
    assert_type(tokenizer.allow_special, bool)
    assert_type(tokenizer.backend, tokenizers.Tokenizer)
    assert_type(tokenizer.eos_token_id, int | None)
    assert_type(tokenizer.token_bytes, tuple[bytes, ...])
    assert_type(tokenizer.rewrites_text, bool)
    assert_type(tokenizer.vocab_size, int)
    assert_type(tokenizer.chat_template, str | None)
    assert_type(tokenizer.chat_templates, tuple[str, ...])
    assert_type(tokenizer.chat_template_names, tuple[str, ...])
    assert_type(tokenizer.infill_marks, InfillMarks | None)


def look_at_params(params: SamplingParams) -> None:
    assert_type(SamplingParams.from_mapping({"top_p": 0.9}), SamplingParams)
    assert_type(params.is_greedy, bool)
    assert_type(params.temperature, float)
    assert_type(params.temperature_last, bool)
    assert_type(params.top_k, int | None)
    assert_type(params.top_p, float)
    assert_type(params.min_p, float)
    assert_type(params.repetition_penalty, float)
    assert_type(params.repetition_window, int | None)
    assert_type(params.frequency_penalty, float)
    assert_type(params.presence_penalty, float)
    assert_type(params.logit_bias, Mapping[int, float] | None)
    assert_type(params.allowed_token_ids, Collection[int] | None)
    assert_type(params.max_new_tokens, int | None)
    assert_type(params.min_new_tokens, int)
    assert_type(params.stop, str | Sequence[str] | None)
    assert_type(params.stop_token_ids, Collection[int] | None)
    assert_type(params.include_stop_str_in_output, bool)
    assert_type(params.ignore_eos, bool)
    assert_type(params.seed, int | None)
    assert_type(params.logprobs, int | None)
    assert_type(params.logprobs_mode, Literal["raw", "processed"])
    assert_type(params.json_schema, str | Mapping[str, Any] | HasJsonSchema | None)
    assert_type(params.regex, str | None)
    assert_type(params.grammar, str | None)
    assert_type(params.choice, Sequence[str] | None)


def look_at_options(options: RequestOptions) -> None:
    assert_type(options.cancel, Event | None)
    assert_type(options.speculation, Literal["ngram"] | None)
    assert_type(options.num_draft_tokens, int)
    assert_type(options.prefill_chunk, int | None)
    assert_type(options.overflow, Literal["error", "truncate_left"])
    assert_type(options.tenant, str)
    assert_type(options.priority, int)
    assert_type(options.timeout, float | None)
    assert_type(options.cache_salt, str)
    assert_type(options.answer_prefix, Sequence[int])
    assert_type(options.tools, Sequence[Mapping[str, Any] | Callable[..., Any]] | None)
    assert_type(options.tool_choice, Any)
    assert_type(options.parallel_tool_calls, bool | None)
    assert_type(options.tool_format, str | None)
    assert_type(options.reasoning_format, Literal["auto", "none"])
    assert_type(options.reasoning_budget, int | None)


def look_at_result(result: GenerationResult) -> None:
    assert_type(result.token_ids, list[int])
    assert_type(result.text, str)
    assert_type(result.finish_reason, FinishReason)
    assert_type(result.prompt_tokens, int)
    assert_type(result.generated_tokens, int)
    assert_type(result.timing, GenerationTiming)
    assert_type(result.stop_reason, str | int | None)
    assert_type(result.seed, int | None)
    assert_type(result.logprobs, list[TokenLogprob] | None)
    assert_type(result.grammar_complete, bool | None)
    assert_type(result.reused_tokens, int)
    assert_type(result.disk_tokens, int)
    assert_type(result.dropped_tokens, int)
    assert_type(result.truncated_tokens, int)
    assert_type(result.stats, GenerationStats)
    assert_type(result.error, str | None)
    assert_type(result.reasoning, str | None)
    assert_type(result.reasoning_tokens, int)
    assert_type(result.tool_calls, tuple[ToolCall, ...])
    assert_type(result.warnings, tuple[str, ...])
    assert_type(result.to_message(), Json)
    assert_type(result.to_json(), Json)


def look_at_timing(timing: GenerationTiming, stats: GenerationStats) -> None:
    assert_type((timing.prefill_time_s, timing.ttft_s, timing.decode_time_s), tuple[float, float, float])
    assert_type(timing.sampling_time_s, float)
    assert_type(timing.total_time_s, float)
    assert_type(timing.decode_times_s, list[float])
    assert_type(timing.sampling_times_s, list[float])
    assert_type(timing.arrival_times_s, list[float])
    assert_type(timing.arrival_gaps_s, list[float])
    assert_type(timing.inter_token_times_s, list[float])
    assert_type(timing.inter_token_p50_s, float | None)
    assert_type(timing.inter_token_p95_s, float | None)
    assert_type(timing.inter_token_p99_s, float | None)
    assert_type(timing.decode_tokens_per_second, float | None)
    assert_type(timing.to_json(), Json)
    assert_type((stats.prefill_steps, stats.single_steps, stats.multi_steps), tuple[int, int, int])
    assert_type((stats.multi_step_tokens, stats.masks_filled, stats.tokens_forced), tuple[int, int, int])
    assert_type((stats.drafts_proposed, stats.drafts_accepted, stats.preemptions), tuple[int, int, int])


def look_at_piece(piece: Piece, call: ToolCall, delta: ToolCallDelta, reasoning: ReasoningDelta) -> None:
    assert_type(piece.token_id, int)
    assert_type(piece.text, str)
    assert_type(piece.logprob, TokenLogprob | None)
    assert_type(piece.finish_reason, FinishReason | None)
    assert_type(piece.deltas, tuple[ReasoningDelta | ToolCallDelta, ...])
    assert_type(piece.origin, Literal["sampled", "draft", "forced", "given"])
    assert_type((call.id, call.name, call.arguments), tuple[str, str, str])
    assert_type(call.parsed(), Json)
    assert_type(call.to_json(), Json)
    assert_type((delta.index, delta.id, delta.name, delta.arguments), tuple[int, str | None, str | None, str])
    assert_type(reasoning.text, str)


def look_at_texts(label: Classification, document: RankedDocument, logprob: TokenLogprob) -> None:
    assert_type((label.label, label.probability), tuple[str, float])
    assert_type((label.labels, label.probabilities), tuple[tuple[str, ...], tuple[float, ...]])
    assert_type(label.to_json(), Json)
    assert_type((document.index, document.score, document.document), tuple[int, float, str])
    assert_type((logprob.token_id, logprob.logprob, logprob.rank), tuple[int, float, int])
    assert_type(logprob.top, tuple[tuple[int, float], ...])


def look_at_trace(trace: SampleTrace, stage: TraceStage, candidate: TraceCandidate) -> None:
    assert_type((trace.token_id, trace.position, trace.step), tuple[int, int, int])
    assert_type((trace.seed, trace.text_before), tuple[int | None, str])
    assert_type(trace.stages, tuple[TraceStage, ...])
    assert_type(trace.candidates, tuple[TraceCandidate, ...])
    assert_type(trace.chosen, TraceCandidate)
    assert_type(trace.to_json(), Json)
    assert_type((stage.name, stage.value, stage.num_kept), tuple[str, int | float | None, int])
    assert_type((stage.removed, stage.moved, stage.others), tuple[float, float, float])
    assert_type((candidate.token_id, candidate.text, candidate.rank), tuple[int, str, int])
    assert_type((candidate.logits, candidate.probabilities), tuple[tuple[float | None, ...], tuple[float, ...]])
    assert_type((candidate.noise, candidate.score), tuple[float | None, float | None])
    assert_type(candidate.dropped_by, str | None)


def answer_a_table(engine: BatchEngine, table: object) -> object:
    return engine(table)


def call_with_wrong_types(llm: LLM, later: AsyncLLM, session: Session, tokenizer: Tokenizer, logits: Tensor) -> None:
    wrong = object()
    LLM(wrong)  # type: ignore[arg-type]
    AsyncLLM(wrong)  # type: ignore[arg-type]
    SamplingParams(temperature=wrong)  # type: ignore[arg-type]
    RequestOptions(timeout=wrong)  # type: ignore[arg-type]
    llm.generate(wrong)  # type: ignore[call-overload]
    llm.generate("text", top_k=wrong)  # type: ignore[call-overload]
    llm.generate_all(wrong)  # type: ignore[arg-type]
    llm.chat(wrong)  # type: ignore[arg-type]
    llm.stream(wrong)  # type: ignore[arg-type]
    llm.stream("text", top_k=wrong)  # type: ignore[arg-type]
    llm.embed(wrong)  # type: ignore[arg-type]
    llm.logits(wrong)  # type: ignore[arg-type]
    later.stream(wrong)  # type: ignore[arg-type]
    session.stream(wrong)  # type: ignore[arg-type]
    session.rewind(wrong)  # type: ignore[arg-type]
    tokenizer.encode(wrong)  # type: ignore[arg-type]
    tokenizer.decode(wrong)  # type: ignore[arg-type]
    load_tokenizer(wrong)  # type: ignore[arg-type]
    sample_token(logits, wrong, SamplingParams())  # type: ignore[arg-type]
    sample_trace(logits, wrong, [1])  # type: ignore[arg-type]
    apply_top_k(logits, wrong)  # type: ignore[arg-type]
