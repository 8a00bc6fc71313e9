"""Every public call and attribute, for mypy alone: `assert_type` fails if a result has become Any.

Fields and properties have their types in tests/data/surface.json. Some are here too, so that no class becomes Any.
A call with `type: ignore` is wrong: mypy reports the comment as unused if the parameter's type has become Any.
tests/project/test_surface.py compares the names with tests/data/surface.json.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
from infer.compute.sampling.keywords import SamplingDefaults
from infer.engine.requests.answer import Answer
from infer.engine.requests.host import Host
from infer.engine.requests.prompt_batch import Ended
from infer.engine.step.request import Request
from infer.engine.step.sequence import Sequence as Answering
from infer.engine.texts.text_ids import Computed, VectorOptions
from infer.models.transformer import Transformer
from infer.outputs import SampleTrace, TokenLogprob, TraceCandidate, TraceStage
from infer.text.tokenizer.detokenizer import Detokenizer
from infer.text.tokenizer.tokenizers_library import EncodedPair

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
    assert_type(stream.answer, Answer)


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
    assert_type(await llm.score_pairs([("one", "two")], may_compare=True, is_raw=True), Computed)
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
    session.append("text")
    session.rewind(1)
    session.save("saved", note={"title": "a"})
    session.close()


def use_stream(stream: Stream, answer: Answer) -> None:
    assert_type(Stream(answer), Stream)
    with stream as entered:
        assert_type(entered, Stream)
    for piece in stream:
        assert_type(piece, Piece)
    assert_type(stream.run(lambda token_id, text: None), GenerationResult)
    assert_type(stream.result, GenerationResult)
    assert_type(stream.sequence, Answering)
    stream.cancel()
    stream.close()


async def use_async_stream(stream: AsyncStream, answer: Answer) -> None:
    assert_type(AsyncStream.of(answer), AsyncStream)
    assert_type(stream.answer, Answer)
    async with stream as entered:
        assert_type(entered, AsyncStream)
    async for piece in stream:
        assert_type(piece, Piece)
    assert_type(await stream.begin(), AsyncStream)
    assert_type(await stream.take(), list[Piece])
    assert_type(await stream.result(), GenerationResult)
    assert_type(stream.sequence, Answering)
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


def look_at_results(
    params: SamplingParams, options: RequestOptions, result: GenerationResult, timing: GenerationTiming, piece: Piece
) -> None:
    assert_type(SamplingParams.from_mapping({"top_p": 0.9}), SamplingParams)
    assert_type(params.top_k, int | None)
    assert_type(options.overflow, Literal["error", "truncate_left"])
    assert_type(result.finish_reason, FinishReason)
    assert_type(result.to_message(), Json)
    assert_type(result.to_json(), Json)
    assert_type(timing.inter_token_p50_s, float | None)
    assert_type(timing.to_json(), Json)
    assert_type(piece.deltas, tuple[ReasoningDelta | ToolCallDelta, ...])


def look_at_parts(
    call: ToolCall, label: Classification, document: RankedDocument, logprob: TokenLogprob, trace: SampleTrace
) -> None:
    assert_type(call.parsed(), Json)
    assert_type(call.to_json(), Json)
    assert_type(label.to_json(), Json)
    assert_type((label.label, label.probability), tuple[str, float])
    assert_type(document.document, str)
    assert_type(logprob.top, tuple[tuple[int, float], ...])
    assert_type(trace.stages, tuple[TraceStage, ...])
    assert_type(trace.chosen, TraceCandidate)
    assert_type(trace.to_json(), Json)


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
