"""Routes that OpenAI does not have, and embeddings: tokens, templates, traces, ranks, labels, the engine's state."""

import base64
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from starlette.requests import Request
from torch.nn.functional import cosine_similarity

import embedding_model
from cases import cases
from classifier_model import LABELS
from infer import LLM
from infer.serving.protocols.fields import BodyError
from infer.serving.protocols.retrieval import EmbeddingsBody
from infer.serving.server.app import ROUTES
from infer.serving.server.routes.openapi import document
from infer.serving.server.routes.status import OTHERS, interval_of, seen_by
from openai_shapes import events
from reranker_model import CONTEXT
from served import Served, served_model, serving

MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
VALUES = {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.7}
SAMPLED = VALUES | {"max_tokens": 12}
SERVED = {"allow_embeddings": True}


# Tokens


def test_tokens_are_the_tokenizers_in_both_shapes(served: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode("hé ab")
    assert served.ask("/tokenize", content="hé ab") == {"tokens": ids}
    assert served.ask("/tokenize", prompt="hé ab") == {"count": len(ids), "max_model_len": 400, "tokens": ids}
    pieces = served.ask("/tokenize", content="hé ab", with_pieces=True)["tokens"]
    assert [each["id"] for each in pieces] == ids
    spelled = (each["piece"] for each in pieces)
    assert b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in spelled) == "hé ab".encode()
    assert served.ask("/tokenize", prompt="hé", return_token_strs=True)["token_strs"] == ["h", "\\xc3", "\\xa9"]
    assert served.ask("/detokenize", tokens=ids) == {"content": "hé ab", "prompt": "hé ab"}


def test_special_tokens_are_text_where_asked(served: Served, llm: LLM) -> None:
    text = "a<|im_end|>"
    control, plain = (served.ask("/tokenize", content=text, parse_special=each)["tokens"] for each in (True, False))
    assert control == llm.tokenizer.encode(text)
    assert not set(plain) & llm.tokenizer.special_token_ids
    assert served.ask("/detokenize", tokens=control)["content"] == text == bytes(plain).decode()


def test_a_conversation_is_rendered_and_tokenised_as_it_is_answered(served: Served, llm: LLM) -> None:
    rendered = served.ask("/apply-template", messages=MESSAGES)["prompt"]
    assert rendered == llm.tokenizer.render_chat_template(MESSAGES)
    ids = served.ask("/tokenize", messages=MESSAGES)["tokens"]
    answer = served.ask("/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert len(ids) == answer["usage"]["prompt_tokens"]
    shorter = served.ask("/apply-template", messages=MESSAGES, add_generation_prompt=False)["prompt"]
    assert rendered == f"{shorter}[assistant]"
    prefixed = served.ask("/apply-template", messages=MESSAGES, chat_template_kwargs={"prefix": "!"})["prompt"]
    assert prefixed == f"{rendered}!"


# Embeddings


def test_vectors_are_the_library_s_in_both_encodings(served: Served, llm: LLM) -> None:
    texts = ["hello", "a", "hello"]
    for pooling in ("mean", "last"):
        expected = llm.embed(texts, pooling)  # type: ignore[arg-type]
        answer = served.ask("/v1/embeddings", input=texts, pooling=pooling)
        assert torch.equal(torch.tensor([each["embedding"] for each in answer["data"]]), expected)
        answer = served.ask("/v1/embeddings", input=texts, pooling=pooling, encoding_format="base64")
        encoded = [struct.unpack(f"<{expected.shape[1]}f", base64.b64decode(x["embedding"])) for x in answer["data"]]
        assert torch.equal(torch.tensor(encoded), expected)
        assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    num_tokens = sum(len(llm.tokenizer.encode(text)) for text in texts)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_one_text_and_ids_are_inputs_too(served: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    one, as_ids, listed = (served.ask("/v1/embeddings", input=each)["data"] for each in ("hello", ids, [ids]))
    assert one == as_ids == listed


def test_fewer_dimensions_are_the_first_ones_at_length_1(served: Served, llm: LLM) -> None:
    (found,) = served.ask("/v1/embeddings", input="hello", dimensions=5)["data"]
    expected = torch.nn.functional.normalize(llm.embed(["hello"])[0, :5], dim=0)
    assert torch.allclose(torch.tensor(found["embedding"]), expected, atol=1e-6)


def test_a_model_that_is_not_for_embeddings_says_what_to_do(llm: LLM) -> None:
    with serving(llm, model="tiny") as served:
        error = served.refusal("/v1/embeddings", input="a")
    assert (error["param"], "--embeddings" in error["message"]) == ("model", True)


def test_a_vector_of_zeros_stays_zero() -> None:
    assert EmbeddingsBody(input="a").items(torch.zeros(1, 4).numpy())[0].embedding == [0.0] * 4
    assert EmbeddingsBody(input=[[1, 2], [3]]).texts() == [[1, 2], [3]]
    with pytest.raises(BodyError, match=r"input\[0\]\[1\]"):
        EmbeddingsBody(input=[[1, "a"]]).texts()


# Traces and branches


@pytest.mark.parametrize("prompt", [{"prompt": "hello"}, {"messages": MESSAGES}])
def test_a_trace_is_the_answer_with_the_funnel_of_each_token(served: Served, llm: LLM, prompt: Any) -> None:
    found = served.ask("/v1/trace", **prompt, **SAMPLED, num_candidates=4)
    top_p = 1.0 if "prompt" in prompt else 0.95
    expected = llm.generate(found["prompt_token_ids"], **VALUES, max_new_tokens=12, top_p=top_p)
    assert (found["token_ids"], found["text"], found["seed"]) == (expected.token_ids, expected.text, 5)
    assert [each["token_id"] for each in found["tokens"]] == expected.token_ids
    third = llm.sample_trace(found["prompt_token_ids"], step=3, num_candidates=4, **VALUES, top_p=top_p).to_json()
    del third["text_before"], found["tokens"][2]["bytes"]
    assert found["tokens"][2] == json.loads(json.dumps(third))
    assert b"".join(map(bytes, found["prompt_bytes"])).endswith(b"hello" if "prompt" in prompt else b"[assistant]")


def test_a_given_answer_is_traced_from_any_place(served: Served) -> None:
    asked = {"prompt": "hello", **SAMPLED, "num_candidates": 3}
    answer = served.ask("/v1/trace", **asked)
    ids = answer["token_ids"]
    part = served.ask("/v1/trace", **asked, answer_token_ids=ids, position=4, num_tokens=3)
    assert (part["tokens"], part["prompt_token_ids"]) == (answer["tokens"][4:7], answer["prompt_token_ids"])
    other = [*ids[:4], ids[4] ^ 1, *ids[5:]]
    first, second = served.ask("/v1/trace", **asked, answer_token_ids=other, position=4, num_tokens=2)["tokens"]
    assert first["token_id"] == ids[4]
    assert {ids[4], other[4]} <= {each["token_id"] for each in first["candidates"]}
    assert second["stages"] != answer["tokens"][5]["stages"]


def test_the_mask_of_a_grammar_is_a_stage(served: Served, llm: LLM) -> None:
    answer = served.ask("/v1/trace", prompt="hello", **SAMPLED, regex="abc[d-f]{5}")
    assert answer["text"] == llm.generate("hello", **VALUES, max_new_tokens=12, regex="abc[d-f]{5}").text
    kept = [[stage["num_kept"] for stage in each["stages"] if stage["name"] == "allowed"] for each in answer["tokens"]]
    assert kept[0] == [1]
    assert all(1 <= each[0] < 260 for each in kept)


def test_the_origin_of_a_token_is_reported(served: Served, llm: LLM) -> None:
    body = {"prompt": "hello", "regex": "abc[d-f]{3}xyz", "max_tokens": 40, "seed": 1, "return_token_ids": True}
    told = list[tuple[Any, str]]()
    for choice in (chunk["choices"][0] for chunk in events(served.stream("/v1/completions", **body))):
        told += zip(choice.get("token_bytes", []), choice.get("token_origins", []), strict=True)
    assert bytes(byte for spelt, _ in told for byte in spelt).startswith(b"abc")
    assert {origin for spelt, origin in told if bytes(spelt) in b"xyz"} == {"forced"}
    assert {origin for spelt, origin in told if bytes(spelt) in (b"d", b"e", b"f")} == {"sampled"}


def test_right_drafts_and_given_tokens_are_distinguished(llm: LLM) -> None:
    prompt = "abcabcabcabcabcabc"
    stream = llm.stream(prompt, temperature=0, max_new_tokens=40, speculation="ngram", answer_prefix=[97, 98])
    origins = [piece.origin for piece in stream]
    assert origins[:2] == ["given", "given"]
    assert origins.count("draft") == stream.result.stats.drafts_accepted > 0


def test_the_fingerprint_covers_everything_that_answers_depend_on(served: Served, llm: LLM, folder: Path) -> None:
    found = served.ask("/v1/completions", prompt="a", max_tokens=1)["system_fingerprint"]
    facts = served.client.get("/props").json()
    assert found == facts["system_fingerprint"]
    assert (facts["max_model_len"], facts["can_chat"], facts["num_layers"]) == (400, True, 2)
    assert facts["default_sampling"]["chat"]["top_p"] == 0.95
    with LLM(folder) as same, LLM(folder, kv_type="f32") as other:
        assert same.system_fingerprint == llm.system_fingerprint
        assert other.system_fingerprint != found


def test_a_branch_has_the_bits_of_its_answer_up_to_the_other_token(served: Served) -> None:
    asked = {"prompt": "hello", **SAMPLED}
    answer = served.ask("/v1/trace", **asked)
    ids = answer["token_ids"]
    for position in (0, 4, 11):
        same = served.ask("/v1/branch", **asked, answer_token_ids=ids, position=position)
        assert (same["token_ids"], same["text"], same["num_given"]) == (ids, answer["text"], position)
    other = served.ask("/v1/branch", **asked, answer_token_ids=ids, position=4, token_id=ids[4] ^ 1)
    assert other["token_ids"][:5] == [*ids[:4], ids[4] ^ 1]
    assert (len(other["token_ids"]), other["usage"]["completion_tokens"], other["num_given"]) == (12, 12, 5)
    read = list(events(served.stream("/v1/branch", **asked, answer_token_ids=ids, position=4, token_id=ids[4] ^ 1)))
    assert "".join(chunk["text"] for chunk in read) == other["text"]
    assert [token_id for chunk in read for token_id in chunk["token_ids"]] == other["token_ids"]
    assert read[-1]["finish_reason"] == "length"


# Refusals


@cases("path body param message",
    ("/tokenize", {}, "content", "give one of content, prompt and messages"),
    ("/tokenize", {"content": "a", "prompt": "b"}, "prompt", "give one of"),
    ("/tokenize", {"content": "a", "add_special_tokens": True}, "add_special_tokens", "belongs to prompt, not"),
    ("/tokenize", {"prompt": "a", "with_pieces": False}, "with_pieces", "belongs to content, not to prompt"),
    ("/tokenize", {"messages": []}, "messages", "length >= 1"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "model", "not served here"),
    ("/tokenize", {"contents": "a"}, "contents", "did you mean content?"),
    ("/detokenize", {"tokens": [97, 9999]}, "tokens[1]", "from 0 to"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "must not be empty"),
    ("/v1/embeddings", {"input": ""}, "input", "must not be empty"),
    ("/v1/embeddings", {"input": []}, "input", "length >= 1"),
    ("/v1/embeddings", {"input": [1, "a"]}, "input[0]", "token ids"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "length <= 2048"),
    ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "in [1, 64]"),
    ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name", "the model's files have no prompts"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'base64' or 'float'"),
    ("/v1/embeddings", {"input": [[1], [9999]]}, "input", "text 1: the prompt: token ids"),
    ("/v1/embeddings", {"input": "a" * 500}, "input", "holds 400"),
    ("/v1/trace", {"prompt": "a", "max_tokens": 257}, "max_tokens", "at most 256"),
    ("/v1/trace", {"prompt": "a", "num_candidates": 65}, "num_candidates", "`int` <= 64"),
    ("/v1/trace", {"prompt": "a", "position": 1}, "position", "belongs to answer_token_ids"),
    ("/v1/trace", {"prompt": "a", "answer_token_ids": [97], "position": 1}, "position", "below 1"),
    ("/v1/trace", {"prompt": "a", "answer_token_ids": [97] * 300}, "num_tokens", "at most 256 tokens"),
    ("/v1/trace", {"prompt": "a", "answer_token_ids": [97] * 400, "num_tokens": 1}, "answer_token_ids", "400"),
    ("/v1/trace", {"prompt": "a", "answer_token_ids": [97, 9999]}, "answer_token_ids[1]", "from 0 to"),
    ("/v1/trace", {"prompt": "a", "answer_token_ids": [98, 97], "position": 1, "regex": "a+"}, "answer_token_ids",
     "the grammar does not allow token 98"),
    ("/v1/trace", {"prompt": "a", "stream": True}, "stream", "not streamed"),
    ("/v1/trace", {"prompt": "a", "n": 2}, "n", "must not be 2"),
    ("/v1/trace", {}, "prompt", "one of prompt and messages"),
    ("/v1/trace", {"prompt": "a", "messages": MESSAGES}, "prompt", "one of prompt and messages"),
    ("/v1/trace", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "belongs to messages"),
    ("/v1/branch", {"prompt": "a", "position": 0}, "answer_token_ids", "required"),
    ("/v1/branch", {"prompt": "a", "answer_token_ids": [97], "position": 2}, "position", "at most 1"),
    ("/v1/branch", {"prompt": "a", "answer_token_ids": [], "position": 0, "token_id": 999}, "answer_token_ids", ""),
    ("/v1/branch", {"prompt": "a", "answer_token_ids": [97], "position": 1, "max_tokens": 1}, "answer_token_ids",
     "the answer ends with this token"),
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(served: Served, path: str, body: Any, param: str, message: str) -> None:
    error = served.refusal(path, status=404 if param == "model" else 400, **body)
    assert (error["param"], message in error["message"]) == (param, True), error


# State of the engine


def test_a_listener_sees_the_engine_s_steps(served: Served) -> None:
    with served.client.stream("GET", "/v1/engine/events?interval=0.1") as listened:
        lines = (line.removeprefix("data: ") for line in listened.iter_lines() if line.startswith("data"))
        before = json.loads(next(lines))
        served.ask("/v1/completions", prompt="hello", max_tokens=5)
        after = json.loads(next(lines))
    assert listened.headers["content-type"].startswith("text/event-stream")
    assert after["num_steps"] > before["num_steps"]
    assert {"sequences", "pools", "costs", "max_running"} <= set(after)


@pytest.mark.parametrize("query", ["interval=0", "interval=x", "interval=nan", "interval=61", "interval="])
def test_an_interval_is_a_number_of_seconds(served: Served, query: str) -> None:
    with pytest.raises(BodyError, match="interval must be"):
        interval_of(Request({"type": "http", "query_string": query.encode(), "headers": []}))


def test_other_tenants_have_no_names() -> None:
    sequences = [{"number": 1, "tenant": "me"}, {"number": 2, "tenant": "her"}]
    found = seen_by("me", {"sequences": sequences, "work_by_tenant": {"me": 1.0, "her": 2.0}, "num_steps": 3})
    seen = [{"number": 1, "tenant": "me"}, {"number": 2, "tenant": OTHERS}]
    assert found == {"sequences": seen, "work_by_tenant": {"me": 1.0}, "num_steps": 3}


# Ranks and labels


QUERY, DOCUMENTS = "cats", ["a roof", "a bridge", "a fire"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"query": "a", "documents": ["b"], "return_documents": True},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


ranked = served_model("judge")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("models") / "embedder"
    embedding_model.make_embedding_model(folder, dense=[(40, True, "Tanh")], is_normalized=False)
    with LLM(folder, kv_type="f32") as llm:
        yield llm


compared = served_model("embedder")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize("documents", [DOCUMENTS, [{"text": each, "id": 3} for each in DOCUMENTS]])
def test_documents_come_by_relevance(ranked: Served, judge: LLM, path: str, documents: list[Any]) -> None:
    body = {"model": "tiny", "query": QUERY, "documents": documents, "top_n": 2}
    answer = ranked.ask(path, **body)
    expected = judge.rerank(QUERY, DOCUMENTS, top_n=2)
    assert answer["results"] == [{"index": each.index, "relevance_score": each.score} for each in expected]
    assert answer["model"] == "tiny"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    whole = ranked.ask(path, **body, return_documents=True)
    assert [each["document"]["text"] for each in whole["results"]] == [each.document for each in expected]


def test_names_of_other_servers_are_taken(ranked: Served, judge: LLM) -> None:
    own = {"top_k": 1, "return_text": True, "instruct": "find", "max_chunks": 3}
    answer = ranked.ask("/rerank", query=QUERY, documents=DOCUMENTS, **own)
    (expected,) = judge.rerank(QUERY, DOCUMENTS, 1, "find")
    found = {"index": expected.index, "relevance_score": expected.score, "document": {"text": expected.document}}
    assert answer["results"] == [found]
    assert "max_chunks" in answer["infer"]["warnings"][0]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_texts_are_documents_at_the_paths_of_cohere(ranked: Served, path: str) -> None:
    answers = [ranked.ask(path, query=QUERY, **{name: DOCUMENTS}) for name in ("texts", "documents")]
    assert answers[0]["results"] == answers[1]["results"] != []


def test_a_body_of_text_embeddings_inference_gets_its_list(ranked: Served, judge: LLM) -> None:
    path = "/rerank"
    body = {"query": QUERY, "texts": DOCUMENTS, "truncate": False, "raw_scores": False, "return_text": False}
    expected = judge.rerank(QUERY, DOCUMENTS)
    assert ranked.ask(path, **body) == [{"index": each.index, "score": each.score} for each in expected]
    whole = ranked.ask(path, **body | {"return_text": True})
    assert [each["text"] for each in whole] == [each.document for each in expected]
    raw = ranked.ask(path, **body | {"raw_scores": True})
    assert [each["index"] for each in raw] == [each.index for each in expected]
    for one, other in zip(raw, expected, strict=True):
        assert 1 / (1 + math.exp(-one["score"])) == pytest.approx(other.score, rel=1e-12)
    answer = ranked.ask(path, query=QUERY, documents=DOCUMENTS, raw_scores=True)
    assert [each["relevance_score"] for each in answer["results"]] == [each["score"] for each in raw]


def test_raw_scores_of_vectors_are_their_cosines(compared: Served) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS}
    assert compared.ask("/rerank", **body, raw_scores=True) == compared.ask("/rerank", **body)


def test_pairs_are_scored_in_their_order(ranked: Served, judge: LLM) -> None:
    scores = {each.document: each.score for each in judge.rerank(QUERY, DOCUMENTS)}
    expected = [scores[each] for each in DOCUMENTS]
    for first in (QUERY, [QUERY], [QUERY] * 3):
        answer = ranked.ask("/v1/score", text_1=first, text_2=DOCUMENTS)
        assert [each["score"] for each in answer["data"]] == expected
        assert [each["index"] for each in answer["data"]] == [0, 1, 2]


def test_an_embedder_scores_by_the_cosine_of_its_vectors(compared: Served, embedder: LLM) -> None:
    texts = [*DOCUMENTS, QUERY, DOCUMENTS[0]]
    vectors = embedder.embed(texts)
    assert not torch.allclose(vectors.norm(dim=1), torch.ones(len(texts)))
    expected = cosine_similarity(vectors, vectors[3][None])
    for first in (QUERY, [QUERY], [QUERY] * 5):
        answer = compared.ask("/v1/score", text_1=first, text_2=texts)
        found = torch.tensor([each["score"] for each in answer["data"]])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert answer["usage"]["prompt_tokens"] == sum(len(text) + 1 for text in [*texts, QUERY])  # a byte is a token
    others = [QUERY, "", *DOCUMENTS]
    pairs = compared.ask("/v1/score", text_1=others, text_2=texts)
    expected = cosine_similarity(vectors, embedder.embed(others))
    found = torch.tensor([each["score"] for each in pairs["data"]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    alone = [compared.ask("/v1/score", text_1=a, text_2=b) for a, b in zip(others, texts, strict=True)]
    assert [each["data"][0]["score"] for each in alone] == [each["score"] for each in pairs["data"]]


def test_an_embedder_ranks_by_the_cosine_of_its_vectors(compared: Served, embedder: LLM) -> None:
    query, *vectors = embedder.embed([QUERY, *DOCUMENTS])
    cosines = cosine_similarity(torch.stack(vectors), query[None])
    scores, best = cosines.sort(descending=True)
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    for score, index, found in zip(scores[:2], best[:2], compared.ask("/v1/rerank", **body)["results"], strict=True):
        assert (found["index"], found["document"]["text"]) == (index, DOCUMENTS[index])
        assert found["relevance_score"] == pytest.approx(score.item(), abs=1e-5)


def test_an_embedder_refuses_what_only_rerankers_read(compared: Served) -> None:
    for path, body in BODIES.items():
        assert compared.refusal(path, **body, instruction="find")["param"] == "instruction"
    long = {"text_1": "a", "text_2": ["b", "x" * 999]}
    refused = compared.refusal("/v1/score", **long)
    assert (refused["code"], refused["message"][:12]) == ("context_length_exceeded", "document 1: ")
    refused = compared.refusal("/v1/rerank", query="x" * 999, documents=["a", "b"])
    assert (refused["param"], refused["code"]) == ("query", "context_length_exceeded")
    assert refused["message"].startswith("query: the text has ")
    refused = compared.refusal("/v1/score", text_1="x" * 999, text_2="a")
    assert (refused["param"], refused["message"][:8]) == ("text_1", "text_1: ")
    answer = compared.ask("/v1/score", **long, truncate=True)
    assert answer["infer"]["warnings"] == [f"1 of 3 texts were cut to {embedding_model.CONTEXT} tokens"]


def test_a_model_with_other_uses_is_compared_if_the_server_may_and_no_cosine_is_above_1(llm: LLM) -> None:
    texts = [f"{'again ' * (number % 7)}{number}" for number in range(30)]
    with serving(llm, model="tiny", allow_embeddings=True) as ranked:
        pairs = ranked.ask("/v1/score", text_1=texts, text_2=texts)["data"]
    assert all(1 - 1e-6 < each["score"] <= 1 for each in pairs)


def test_answers_are_as_described(ranked: Served) -> None:
    described = document(ROUTES)
    for path, body in BODIES.items():
        place = f"#/paths/{path.replace('/', '~1')}/post/responses/200/content/application~1json/schema"
        Draft202012Validator({**described, "$ref": place}).validate(ranked.ask(path, **body))


def test_a_long_document_is_refused_or_cut(ranked: Served) -> None:
    body = {"query": QUERY, "documents": ["a", "x" * 9999]}
    assert ranked.refusal("/v1/rerank", **body)["code"] == "context_length_exceeded"
    answer = ranked.ask("/v1/rerank", **body, truncate=True)
    assert answer["infer"]["warnings"] == [f"1 of 2 texts were cut to {CONTEXT} tokens"]


@cases(
    "path change param",
    ("/v1/rerank", {"documents": None}, "documents"),
    ("/v1/rerank", {"documents": []}, "documents"),
    ("/v1/rerank", {"documents": "b"}, "documents"),
    ("/v1/rerank", {"documents": [5]}, "documents[0]"),
    ("/v1/rerank", {"documents": None, "texts": []}, "texts"),
    ("/v1/rerank", {"documents": None, "texts": ["b", 5]}, "texts[1]"),
    ("/v1/rerank", {"texts": ["b"]}, "texts"),
    ("/v1/rerank", {"documents": None, "texts": ["x" * 9999]}, "texts"),
    ("/v1/rerank", {"top_n": 0}, "top_n"),
    ("/v1/rerank", {"query": None}, "query"),
    ("/v1/rerank", {"query": 5}, "query"),
    ("/v1/rerank", {"query": "x" * 9999}, "query"),
    ("/v1/rerank", {"query": "x" * 9999, "truncate": True}, "query"),
    ("/v1/rerank", {"model": "other"}, "model"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/v1/score", {"text_1": "x" * 9999}, "text_1"),
    ("/v1/score", {"text_2": "x" * 9999}, "text_2"),
    ("/v1/score", {"model": "other"}, "model"),
)
def test_documents_that_cannot_be_ranked_are_refused(ranked: Served, path: str, change: Any, param: str) -> None:
    refused = ranked.refusal(path, status=404 if param == "model" else 400, **BODIES[path] | change)
    assert refused["param"] == param
    if param in ("query", "text_1"):
        assert refused["message"].startswith(param)


def test_a_model_for_neither_says_what_to_do(llm: LLM) -> None:
    with serving(llm, model="tiny") as ranked:
        assert "--reranker" in ranked.refusal("/v1/rerank", query="a", documents=["b"])["message"]


# `/v1/classify`


LABELLED_TEXTS = ["a roof", "a bridge"]


labelled = served_model("labeller")


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
@pytest.mark.parametrize("given", [LABELLED_TEXTS, LABELLED_TEXTS[0], [list(b"a roof")], [["a roof", "a bridge"]]])
def test_texts_ids_and_pairs_have_their_labels(labelled: Served, labeller: LLM, path: str, given: Any) -> None:
    answer = labelled.ask(path, model="tiny", input=given)
    expected = labeller.classify([given] if isinstance(given, str) else given)
    for index, (found, each) in enumerate(zip(answer["data"], expected, strict=True)):
        assert (found["index"], found["label"], found["num_classes"]) == (index, each.label, 3)
        assert dict(zip(LABELS, found["probs"], strict=True)) == dict(zip(each.labels, each.probabilities, strict=True))
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    described = document(ROUTES)
    place = "#/paths/~1v1~1classify/post/responses/200/content/application~1json/schema"
    Draft202012Validator({**described, "$ref": place}).validate(answer)


def test_a_long_text_is_refused_or_cut(labelled: Served) -> None:
    texts = ["a", "x" * 9999]
    assert labelled.refusal("/v1/classify", input=texts)["code"] == "context_length_exceeded"
    answer = labelled.ask("/v1/classify", input=texts, truncate=True)
    assert answer["infer"]["warnings"] == ["1 of 2 texts were cut to 256 tokens"]


@cases(
    "body status param",
    ({}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": [""]}, 400, "input[0]"),
    ({"input": [["a", "b", "c"]]}, 400, "input[0][0]"),
    ({"input": "a", "model": "other"}, 404, "model"),
)
def test_texts_that_cannot_be_classified_are_refused(labelled: Served, body: Any, status: int, param: str) -> None:
    assert labelled.refusal("/v1/classify", status=status, **body)["param"] == param


def test_a_model_that_is_no_classifier_says_so(embedder: LLM) -> None:
    with serving(embedder, model="tiny") as labelled:
        assert labelled.refusal("/v1/classify", input="a")["code"] == "unsupported_model"


@cases(
    "path body",
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/completions", {"prompt": "a"}),
    ("/api/embed", {"model": "tiny", "input": "a"}),
)
def test_a_closed_model_is_no_fault_of_the_request(path: str, body: Any, folder: Path) -> None:
    with serving(llm := LLM(folder), **SERVED) as served:
        llm.close()
        assert served.client.post(path, json=body).status_code == 503
