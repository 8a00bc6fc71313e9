"""`infer.serving.server` over real sockets: the rules for every request."""

import itertools
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector

import infer
from cases import cases
from idle import until
from infer import LLM, InvalidRequestError
from infer.serving.protocols.events import event
from infer.serving.server.metrics import Tally
from infer.serving.server.process import bind, check_certificate
from infer.serving.server_settings import ServerSettings, read_keys
from openai_shapes import check
from raw_http import Connection, post
from served import Served, served_model, serving

SERVED = {"aliases": ("small",)}
PATH = "/v1/completions"
ASKED: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LIMITS: dict[str, Any] = {
    "header_seconds": 0.5, "body_seconds": 0.5, "max_body_bytes": 1000, "max_header_bytes": 2000, "max_headers": 20,
    "keep_alive_seconds": 1, "reader_seconds": 1.0, "stall_seconds": 0.3, "max_unsent_bytes": 20_000,
    "comment_seconds": 0.05,
}  # fmt: skip
KEYS = {"secret-of-ann": "ann", "secret-of-bob": "bob"}
ORIGIN = "https://page.example"
DATA = Path(__file__).parents[2] / "data"
CERT, KEY = DATA / "tls-cert.pem", DATA / "tls-key.pem"  # for 127.0.0.1


strict = served_model("llm", **LIMITS)  # a busy machine may break the short limits in tests of other things
guarded = served_model("llm", api_keys=KEYS, cors_origins=(f"app://other, {ORIGIN.upper()}/",))


@pytest.fixture
def slow_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let each step take 50 ms until the event is set."""
    engine, ended = llm.host.engine, threading.Event()
    step = engine.step

    def slow_step() -> Any:
        ended.wait(0.05)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    return ended


def ask(served: Served, **asked: Any) -> httpx.Response:
    return served.client.post(PATH, json=ASKED | asked)


def send_text(served: Served, content_type: str, **headers: str) -> httpx.Response:
    return served.client.post(PATH, content=b'{"prompt": "hello"}', headers={"content-type": content_type, **headers})


def metrics_of(served: Served) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text)
    return {each.name + str(each.labels): each.value for family in families for each in family.samples}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the error that a client gets. It always has OpenAI's four fields and no other."""
    found: dict[str, Any] = answer.json()
    assert (set(found), set(found["error"])) == ({"error"}, {"message", "type", "param", "code"})
    assert answer.headers["content-type"] == "application/json"
    return found["error"]  # type: ignore[no-any-return]


# Routes, ids and errors


def test_a_model_answers_to_each_of_its_names(served: Served) -> None:
    assert [model["id"] for model in served.client.get("/v1/models").json()["data"]] == ["tiny", "small"]
    assert served.client.get("/v1/models/small").json()["id"] == "small"
    assert served.client.get("/v1/models/large").status_code == 404
    for name, told in (("small", "small"), ("tiny", "tiny"), (None, "tiny")):
        assert ask(served, model=name).json()["model"] == told


@cases("method path status",
    ("GET", "/nothing", 404), ("GET", "/v1/unknown", 404), ("PUT", "/v1/models", 405), ("DELETE", "/health", 405),
    ("PATCH", "/v1/models", 405), ("BREW", "/health", 400), ("GET", "/health%0a", 404),
)  # fmt: skip
def test_what_no_route_takes_is_refused_in_openai_s_shape(served: Served, method: str, path: str, status: int) -> None:
    answer = served.client.request(method, path)
    assert (answer.status_code, error_of(answer)["type"]) == (status, "invalid_request_error")


def test_a_request_has_an_id_and_a_clean_one_of_the_client_is_echoed(served: Served) -> None:
    assert served.client.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    own = [served.client.get("/health", headers={"x-request-id": each}).headers["x-request-id"] for each in ("", "a b")]
    assert len(set(own)) == 2
    assert all(each.startswith("req-") for each in own)


def test_a_model_that_is_loading_is_neither_ready_nor_asked() -> None:
    with serving(None) as served:
        served.state.progress = 0.25
        answer = served.client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading", "progress": 0.25})
        assert served.client.get("/ready").status_code == 503
        refused = ask(served)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "loading")
        assert refused.headers["retry-after"] == "1"


# Bytes that arrive


@cases(
    "sent status code",
    (b"no request\r\n\r\n", 400, "bad_request"),
    (b"GET /health HTTP/1.1\r\n\r\n", 400, "bad_request"),
    (b"GET /health HTTP/1.1\r\nx-endless: " + b"y" * 5000, 431, "headers_too_large"),
    (b"GET /health HTTP/1.1\r\n", 408, "timeout"),
    (b"", 408, None),  # browsers open connections before they need them
)
def test_early_refusals_are_logged_and_counted(strict: Served, caplog: Any, sent: Any, status: int, code: Any) -> None:
    def counted() -> float:
        return metrics_of(strict).get(f"infer:refusals_total{ {'reason': code} }", 0)

    before = counted()
    with caplog.at_level(logging.INFO, "infer.access"), Connection(strict.port) as connection:
        connection.send(sent)
        answer = connection.answer()
        assert connection.is_closed()
    assert answer.status == status
    entries = [json.loads(record.getMessage()) for record in caplog.records if record.name == "infer.access"]
    entries = [entry for entry in entries if entry["http.request.method"] == "_OTHER"]
    found = [(each["http.response.status_code"], each["error.type"], each["infer.request.id"]) for each in entries]
    assert found == [(status, code, answer.headers.get("x-request-id"))] * bool(code)
    assert counted() - before == bool(code)


def test_a_body_of_as_many_bytes_as_are_allowed_is_read(llm: LLM) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode().ljust(1000)

    def chunks() -> Iterator[bytes]:
        yield body[:600]
        yield body[600:]

    with serving(llm, max_body_bytes=len(body)) as served:
        for content in (body, chunks()):
            answer = served.client.post(PATH, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("num_bytes", [1001, 100_000])
def test_a_body_that_is_too_large_is_refused_counted_or_announced(strict: Served, num_bytes: int) -> None:
    def chunks() -> Iterator[bytes]:
        yield b" " * num_bytes

    for content in (b" " * num_bytes, chunks()):
        with httpx.Client(base_url=strict.url) as client:
            refused = client.post(PATH, content=content, headers={"content-type": "application/json"})
            assert (refused.status_code, error_of(refused)["code"]) == (413, "body_too_large")


CURLS = ["application/x-www-form-urlencoded", ""]


@cases(
    "sent by_page",
    *((sent, {}) for sent in ("text/plain", "application/json; charset=utf-16")),
    *((sent, {"origin": "null"}) for sent in ("text/plain", *CURLS)),
    *((sent, {"sec-fetch-site": "cross-site"}) for sent in CURLS),
)
def test_a_body_of_another_type_is_refused(served: Served, sent: str, by_page: dict[str, str]) -> None:
    refused = send_text(served, sent, **by_page)
    assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_media_type")


JSONS = ["Application/JSON;charset=UTF-8", 'application/json; charset="utf-8"; x=1']


@pytest.mark.parametrize("sent", [*CURLS, *JSONS])
def test_a_program_may_leave_the_type_to_curl_or_name_a_charset(served: Served, sent: str) -> None:
    assert send_text(served, sent).status_code == 200


def test_one_connection_too_many_is_told_so_but_may_ask_for_health() -> None:
    with serving(None, max_connections=2) as served, Connection(served.port), Connection(served.port):
        assert served.client.get("/health").status_code == 503
        refused = served.client.get("/v1/models")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "too_many_connections")


def test_an_idle_connection_is_closed(strict: Served) -> None:
    with Connection(strict.port) as connection:
        connection.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.answer().status == 200
        assert connection.is_closed()


# Clients that disconnect, and slow readers


def slow_request(*, stream: bool) -> bytes:
    return post(PATH, ASKED | {"max_tokens": 380, "stream": stream})


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(served: Served, llm: LLM, stream: bool) -> None:
    engine = llm.host.engine
    with Connection(served.port) as connection:
        connection.send(slow_request(stream=stream))
        until(lambda: bool(engine.sequences))
        (sequence,) = engine.sequences
    until(lambda: not engine.sequences)
    assert len(sequence.pieces) < 380
    until(lambda: not served.state.calls)
    phase = "streaming" if stream else "answering"
    assert f'infer:disconnects_total{{phase="{phase}"}} 1' in served.client.get("/metrics").text


@pytest.mark.usefixtures("slow_steps")
def test_a_slow_reader_loses_its_answer_and_then_its_connection(strict: Served, monkeypatch: Any) -> None:
    comment = b":" + bytes(2_000_000) + b"\n"
    monkeypatch.setattr("infer.serving.server.routes.protocols.event", lambda *given: comment + event(*given))
    with Connection(strict.port, receive_bytes=4096) as connection:
        connection.send(slow_request(stream=True))
        until(lambda: bool(strict.state.calls))
        (call,) = strict.state.calls
        until(lambda: not strict.state.calls)
    assert call.error_code == "slow_reader"


def test_a_silent_stream_is_kept_open_by_comments(llm: LLM, slow_steps: None) -> None:
    """Steps take five times as long as the silence that a comment ends."""
    with serving(llm, comment_seconds=0.01) as served:
        lines = served.stream(PATH, **ASKED).splitlines()
    assert any(line.startswith(":") for line in lines)
    assert lines[-2:] == ["data: [DONE]", ""]


# Keys, origins and TLS


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic c2VjcmV0"},
                                     {"x-api-key": ""}, {"authorization": "Bearer"}])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nothing"])
def test_nothing_is_revealed_without_a_key(guarded: Served, headers: dict[str, str], path: str) -> None:
    refused = guarded.client.get(path, headers=headers)
    assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{"authorization": "Bearer secret-of-ann"}, {"x-api-key": "secret-of-bob"}])
def test_a_key_opens_every_route(guarded: Served, headers: dict[str, str]) -> None:
    assert guarded.client.get("/v1/models", headers=headers).status_code == 200


def test_keys_are_tenants_that_share_no_prefixes(guarded: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, submit = list[Any](), llm.host.engine.submit

    def noting(sequence: Any, lease: Any) -> Any:
        requests.append(sequence.request)
        return submit(sequence, lease)

    monkeypatch.setattr(llm.host.engine, "submit", noting)
    for key in KEYS:
        answer = guarded.client.post(PATH, json={"prompt": "hello"}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    assert [request.options.tenant for request in requests] == ["ann", "bob"]
    assert len({request.salt for request in requests}) == 2


def test_a_file_of_keys_names_them(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("plain\n# who else may ask\nann secret  # hers\n\n", encoding="utf-8-sig")
    assert read_keys(file) == {"plain": "key-1", "secret": "ann"}
    for content in (b"", b"# none", b"too many words", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(InvalidRequestError):
            read_keys(file)
    places = {file: "the file is not UTF-8", tmp_path: "Is a directory", tmp_path / "none": "No such file"}
    for path, told in places.items():
        with pytest.raises(InvalidRequestError, match=f"cannot be read: {told}"):
            read_keys(path)


def test_a_page_of_another_origin_may_call_only_if_it_was_named(guarded: Served, served: Served) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-stainless-os, content-type"}
    allowed = guarded.client.options("/v1/models", headers={"origin": ORIGIN, **asked})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert allowed.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    asked |= {"access-control-request-private-network": "true"}
    for path in ("/v1/models", "/api/chat"):
        private = guarded.client.options(path, headers={"origin": ORIGIN, **asked})
        assert (private.status_code, private.headers["access-control-allow-private-network"]) == (200, "true")
    refused = guarded.client.get("/v1/models", headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    others = [guarded.client.options("/v1/models", headers={"origin": "https://other.example", **asked}),
              served.client.options("/v1/models", headers={"origin": ORIGIN, **asked}),
              served.client.get("/v1/models", headers={"origin": ORIGIN})]  # fmt: skip
    found = [name for answer in (allowed, refused, *others) for name in answer.headers]
    assert [each.headers.get("access-control-allow-origin") for each in others] == [None] * 3
    assert "access-control-allow-credentials" not in found


# Logs and metrics


def test_a_request_is_one_line_without_its_texts(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infer.access"):
        ask(served, max_tokens=7, prompt="a very secret prompt")
        served.client.get("/nothing?secret=1", headers={"x-request-id": "mine"})
        until(lambda: "mine" in caplog.text)
    answered, refused = (json.loads(record.getMessage()) for record in caplog.records[-2:])
    assert (answered["gen_ai.usage.output_tokens"], answered["gen_ai.response.finish_reasons"]) == (7, ["length"])
    assert answered["gen_ai.server.time_to_first_token"] <= answered["http.server.request.duration"]
    assert (refused["http.response.status_code"], refused["error.type"]) == (404, "unknown_url")
    assert refused["infer.request.client_id"] == "mine"
    assert "secret" not in caplog.text


def test_metrics_are_prometheus_text_and_count_requests_tokens_and_steps(served: Served) -> None:
    before = metrics_of(served)
    ask(served, max_tokens=20)
    until(lambda: metrics_of(served)["infer:num_requests_running{}"] == 0)
    after = metrics_of(served)
    grown = {"generation_tokens_total": 20, "inter_token_latency_seconds_count": 19}
    grown |= {"time_to_first_token_seconds_count": 1, "e2e_request_latency_seconds_count": 1}
    more = {name: after[name] - before.get(name, 0) for name in after}
    assert {name: more[f"infer:{name}{{}}"] for name in grown} == grown
    times = ("request_queue_time", "request_prefill_time", "time_to_first_token")
    times += ("request_decode_time", "request_time_per_output_token")
    waited, read, first, others, mean = (more[f"infer:{name}_seconds_sum{{}}"] for name in times)
    assert 0 < waited < waited + read < first
    assert others == pytest.approx(19 * mean)
    # Another server of this model may have counted the steps of a request, so more than one is tried.
    prompts = map(str, itertools.count())
    until(
        lambda: (
            bool(ask(served, prompt=next(prompts)))
            and "infer:step_seconds_count{'kind': 'prompt'}" in metrics_of(served)
        )
    )


def test_only_counters_are_called_total(served: Served) -> None:
    ask(served, max_tokens=2)
    lines = served.client.get("/metrics").text.splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    totals = {name for name in kinds if name.endswith("_total")}
    assert totals == {name for name, kind in kinds.items() if kind == "counter"}


def test_a_scaler_made_for_vllm_finds_its_metrics(llm: LLM) -> None:
    with serving(llm, model='a "b"', metrics_names="vllm") as served:
        ask(served, max_tokens=2)
        found = metrics_of(served)
    assert found["vllm:num_requests_waiting{'model_name': 'a \"b\"'}"] == 0
    assert found["vllm:request_success_total{'model_name': 'a \"b\"', 'finished_reason': 'length'}"] == 1


def test_metrics_are_shown_while_the_engine_hangs(llm: LLM) -> None:
    ended = threading.Event()
    with serving(llm) as served, ThreadPoolExecutor(1) as pool:
        before = metrics_of(served)["infer:max_num_requests_running{}"]
        pool.submit(llm.host.loop.run, lambda: ended.wait(20))
        time.sleep(0.2)  # a snapshot is used again for a shorter time
        assert metrics_of(served)["infer:max_num_requests_running{}"] == before
        ended.set()


def test_the_process_is_measured_as_prometheus_client_does(served: Served) -> None:
    expected = {each.name: each.samples[0].value for each in ProcessCollector(registry=None).collect()}
    text = served.client.get("/metrics").text
    samples = {s.name: s for f in text_string_to_metric_families(text) for s in f.samples}
    found = {name: samples[name if name in samples else f"{name}_total"].value for name in expected}
    for name in ("process_start_time_seconds", "process_max_fds"):
        assert found[name] == expected[name]
    for name in ("process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds"):
        assert 0.5 < found[name] / expected[name] < 2, name
    assert found["process_cpu_seconds"] >= expected["process_cpu_seconds"] - 0.02  # a clock tick is 0.01 s
    assert samples["infer_build_info"].labels["version"] == infer.__version__


def test_a_client_beyond_the_queue_is_told_to_return(llm: LLM, slow_steps: threading.Event, monkeypatch: Any) -> None:
    monkeypatch.setattr(llm.host.engine.scheduler, "_max_steps", 1)
    with serving(llm, slots=1, max_queue=1) as served, ThreadPoolExecutor(2) as pool:
        body = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True}
        engine = served.state.llm().host.engine
        taken = [pool.submit(served.client.post, PATH, json=body)]
        until(lambda: [each.has_slot for each in engine.sequences] == [True])
        taken.append(pool.submit(served.client.post, PATH, json=body))
        until(lambda: len(engine.sequences) == 2)
        assert served.client.get("/ready").status_code == 200  # the server is busy but healthy
        refused = served.client.post(PATH, json=body)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        slow_steps.set()
        assert [each.result().status_code for each in taken] == [200, 200]
        assert served.client.post(PATH, json=body).status_code == 200


# TLS


def test_https_answers_with_its_certificate(llm: LLM) -> None:
    with serving(llm, tls_cert=CERT, tls_key=KEY) as served:
        context = ssl.create_default_context(cafile=CERT)
        with httpx.Client(base_url=f"https://127.0.0.1:{served.port}", verify=context) as client:
            assert client.get("/health").json() == {"status": "ok"}
            lines = client.post(PATH, json={"prompt": [5], "max_tokens": 2, "stream": True}).text
        assert lines.endswith("data: [DONE]\n\n")


def test_a_certificate_that_cannot_serve_is_refused_in_one_line(tmp_path: Path) -> None:
    other, told = tmp_path / "other.pem", "must be a certificate and its key in PEM"
    other.write_text("no key")
    check_certificate(CERT, KEY)
    encrypted = (CERT, DATA / "tls-key-encrypted.pem", "is encrypted")
    for cert, key, message in [(other, KEY, told), (CERT, other, told), encrypted, (tmp_path, KEY, "cannot be read")]:
        with pytest.raises(InvalidRequestError, match=message):
            check_certificate(cert, key)


@pytest.mark.parametrize("host", ["127.0.0.1", *["::", "[::]"] * socket.has_dualstack_ipv6()])
def test_no_connection_holds_small_writes_back(host: str) -> None:
    """The address `::` is for IPv4, too."""
    with bind(ServerSettings(host=host, port=0)) as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


# Tallies

BOUNDS = (0.0005, 0.25, 1, 131072)


@pytest.mark.parametrize("label", ["", "kind"])
@given(values=st.lists(st.sampled_from([0.0, *BOUNDS]) | st.floats(0, 1e6), max_size=20))
def test_a_tally_is_written_as_a_histogram_of_the_same_values(label: str, values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally(ours, "infer:seconds", "Of a step.", BOUNDS, label)
    histogram = Histogram("infer:seconds", "Of a step.", [label] if label else [], buckets=BOUNDS, registry=theirs)
    tally.observe(*values, label="decode" if label else "")
    labelled = histogram.labels("decode") if label else histogram
    for value in values:
        labelled.observe(value)

    def lines(registry: CollectorRegistry) -> list[str]:
        found = generate_latest(registry).decode().splitlines()
        return [line for line in found if "_created" not in line and "_sum" not in line]

    assert lines(ours) == lines(theirs)
    (total,) = (each.value for family in ours.collect() for each in family.samples if each.name.endswith("_sum"))
    assert total == pytest.approx(sum(values))


# Names of hosts: no web page can rebind its own name to this machine


LOCAL_NAMES = ["localhost", "LOCALHOST:8000", "a.localhost", "localhost.", "127.0.0.1:1", "[::1]:8000", "192.168.1.5"]
FOREIGN_NAMES = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil", "mylocalhost"]


unnamed = served_model(None)


@pytest.mark.parametrize("name", LOCAL_NAMES)
def test_a_local_name_is_served(unnamed: Served, name: str) -> None:
    assert unnamed.client.get("/nowhere", headers={"host": name}).status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/health", "/nowhere"])
@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_a_name_that_a_web_page_can_rebind_is_refused(unnamed: Served, name: str, path: str) -> None:
    headers = {"host": name, "origin": f"http://{name}", "sec-fetch-site": "same-origin"}
    refused = unnamed.client.get(path, headers=headers)
    check("ErrorResponse", refused.json())
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (403, "host_not_allowed")
    assert f"--allowed-host {name.partition(':')[0]}" in error["message"]


@cases("settings",
    {"api_keys": {"secret": "ann"}}, {"host": "0.0.0.0"}, {"allowed_hosts": ("Evil.example",)},
    {"allowed_hosts": ("*",)}, {"is_child": True},
)  # fmt: skip
def test_names_are_free_with_keys_and_at_other_addresses_and_if_they_are_given(settings: dict[str, Any]) -> None:
    headers = {"host": "evil.example", "authorization": "Bearer secret"}
    with serving(None, **settings) as unnamed:
        assert unnamed.client.get("/nowhere", headers=headers).status_code == 404
