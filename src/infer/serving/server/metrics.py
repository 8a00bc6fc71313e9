"""Counters and histograms, named as vLLM's after the prefix `infer:`, and the lines of the access log.

Requests are counted when they end; steps are counted from the engine's log. `prometheus_client` takes 0.08 s to import,
so functions import it: the server listens before.

The access log has one JSON line per request, written at its end, with OpenTelemetry's names. It never contains the text
of a prompt or an answer. Lines of a log leave through a bounded queue and a thread, so that a reader of the log that
stalls stops nothing else.
"""

import json
import logging
import platform
import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from logging.handlers import QueueHandler
from operator import attrgetter
from os import write
from queue import Full, Queue
from select import select
from threading import Thread
from types import SimpleNamespace
from typing import Any, TextIO, final

import msgspec

import infer
from infer.engine.step.scheduler import StepTaken
from infer.outputs import GenerationResult
from infer.serving.server.connection import Call

log = logging.getLogger("infer.access")
_GAPS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WAITS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 30, 60)
_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_INFER_NAME = re.compile(r"^(# \w+ )?infer:(\w+)({)?", re.MULTILINE)
MOST_LINES = 10_000  # of a log, which wait for its reader
_FLUSH_SECONDS = 1.0
_SLOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_SUMS = (  # over the results of all answers: name, help, and the attribute of a result
    ("infer:prompt_tokens_total", "Tokens of prompts.", "prompt_tokens"),
    ("infer:prefix_cache_queries_total", "Tokens of prompts searched in the cache.", "prompt_tokens"),
    ("infer:prefix_cache_hits_total", "Tokens of prompts found in the cache.", "reused_tokens"),
    ("infer:prefix_disk_hits_total", "Tokens of prompts found in the cache on disk.", "disk_tokens"),
    ("infer:generation_tokens_total", "Tokens generated.", "generated_tokens"),
    ("infer:spec_decode_num_draft_tokens_total", "Drafted tokens.", "stats.drafts_proposed"),
    ("infer:spec_decode_num_accepted_tokens_total", "Drafted tokens that were accepted.", "stats.drafts_accepted"),
)


@final
class Tally:
    """A histogram. Some have many values: those of each token and of each step.

    `prometheus_client.Histogram` takes a lock and about 8 µs per value; this class takes 0.1 µs. With the former, an
    answer of 8,000 tokens would stop the event loop for 60 ms.
    """

    def __init__(self, registry: Any, name: str, help: str, bounds: Sequence[int | float], label: str = "") -> None:
        self._name, self._help, self._bounds, self._label = name, help, bounds, label
        self._counts = defaultdict[str, list[int]](lambda: [0] * (len(bounds) + 1))  # by the label's value
        self._sums = defaultdict[str, float](float)
        if not label:
            self.observe()
        registry.register(self)

    def observe(self, *values: int | float, label: str = "") -> None:
        counts = self._counts[label]
        for value in values:
            counts[bisect_left(self._bounds, value)] += 1
        self._sums[label] += sum(values)

    def collect(self) -> Iterator[Any]:
        """Yield the family, as collectors of `prometheus_client` do."""
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self._name, self._help, labels=[self._label] if self._label else [])
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for label, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([label] if self._label else [], buckets, self._sums[label])
        yield family


@final
class Metrics:
    """All counters and histograms of the server. For the event loop only.

    With the name of a model, names are vLLM's. Each process names its own samples, so that those of one family merge.
    """

    def __init__(self, vllm_model: str | None = None) -> None:
        import prometheus_client as prometheus

        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._http, self._engine = prometheus.CollectorRegistry(), prometheus.CollectorRegistry()
        labels = {"version": infer.__version__, "python": platform.python_version()}
        prometheus.Gauge("infer_build_info", "Version.", [*labels], registry=self._http).labels(**labels).set(1)
        prometheus.ProcessCollector(registry=self._http)
        count = partial(prometheus.Counter, registry=self._http)
        self._requests = count("infer:http_requests_total", "Requests by route and status.", ["path", "status"])
        self._refusals = count("infer:refusals_total", "Requests refused, by the error's code.", ["reason"])
        self._disconnects = count("infer:disconnects_total", "Clients that disconnected, by phase.", ["phase"])
        self.lag = Tally(self._http, "infer:event_loop_lag_seconds", "Delay of the event loop, seconds.", _GAPS)
        count, tally = partial(prometheus.Counter, registry=self._engine), partial(Tally, self._engine)
        self._successes = count("infer:request_success_total", "Answers by finish reason.", ["finished_reason"])
        self._failures = count("infer:row_failures_total", "Answers that failed, by the error's code.", ["code"])
        self._sums = [(count(name, help), attrgetter(value)) for name, help, value in _SUMS]
        self._first = tally("infer:time_to_first_token_seconds", "From request to first token, seconds.", _WAITS)
        self._per_token = tally(
            "infer:request_time_per_output_token_seconds", "Mean of an answer's tokens, seconds.", _GAPS
        )
        self._latency = tally("infer:e2e_request_latency_seconds", "From request to end, seconds.", _LATENCIES)
        self._queue = tally("infer:request_queue_time_seconds", "Waiting for a slot, seconds.", _WAITS)
        self._prefill = tally("infer:request_prefill_time_seconds", "From slot to first token, seconds.", _WAITS)
        self._decode = tally("infer:request_decode_time_seconds", "From first to last token, seconds.", _LATENCIES)
        self._handover = tally("infer:handover_seconds", "From the last token to the answer's end, seconds.", _GAPS)
        self._prompt_length = tally("infer:request_prompt_tokens", "Tokens of a prompt.", _COUNTS)
        self._answer_length = tally("infer:request_generation_tokens", "Tokens of an answer.", _COUNTS)
        self._most_tokens = tally("infer:request_params_max_tokens", "Limit of an answer's tokens.", _COUNTS)
        self._choices = tally("infer:request_params_n", "Answers of a request.", _COUNTS[:8])
        self._vllm_model = vllm_model
        self._gaps = tally("infer:inter_token_latency_seconds", "Between two tokens, seconds.", _GAPS)
        self._step_seconds = tally("infer:step_seconds", "A step of the engine, seconds.", _GAPS, "kind")
        self._step_tokens = tally("infer:iteration_tokens", "Tokens of a step.", _COUNTS)
        self._step_rows = tally("infer:rows_per_step", "Sequences of a step.", _SLOTS)

    def text(self, host: Any = None, snapshot: Any = None) -> str:
        """Return all metrics. The engine's current work needs its `Host` and an `EngineSnapshot`."""
        work = () if snapshot is None else _engine_families(snapshot)
        settings = () if host is None else _settings_families(host)
        return self._text_of([*self._engine.collect(), *self._http.collect(), *work, *settings])

    def _text_of(self, families: Iterable[Any]) -> str:
        """Return the families in version 0.0.4 of Prometheus' text format."""
        from prometheus_client import generate_latest

        registry: Any = SimpleNamespace(collect=lambda: families)
        text = generate_latest(registry).decode()
        return text if self._vllm_model is None else with_vllm_names(text, self._vllm_model)

    def merged(self, texts: Iterable[tuple[str, Mapping[str, str]]]) -> str:
        """Return the metrics of other processes and this process' metrics of HTTP, as one text.

        Samples of one family are next to each other. Each text's samples get its labels.
        """
        from prometheus_client import Metric
        from prometheus_client.parser import text_string_to_metric_families

        families: dict[str, Metric] = {}
        for text, labels in [*texts, (self._text_of(self._http.collect()), {"process": "front"})]:
            for found in text_string_to_metric_families(text):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {**labels, **sample.labels}, sample.value)
        return self._text_of(families.values())

    def count_call(self, call: Call) -> None:
        """Count a request that has ended."""
        now = time.perf_counter()
        if call.left_in:
            self._disconnects.labels(call.left_in).inc()
        self._requests.labels(call.route, str(call.status or 499)).inc()
        if call.status >= 400:
            self._refusals.labels(call.error_code or str(call.status)).inc()
        if call.answers:
            self._latency.observe(now - call.received_at)
            self._choices.observe(len(call.answers))
        for answer, result in zip(call.answers, call.results, strict=True):
            self._count_answer(answer.sequence, result, call.received_at, now)

    def _count_answer(self, sequence: Any, result: GenerationResult, received_at: float, now: float) -> None:
        arrivals = sequence.timer.arrivals
        if result.finish_reason == "error":
            self._failures.labels(str(result.stop_reason)).inc()
        elif result.finish_reason != "abort":
            self._successes.labels(result.finish_reason).inc()
        for counter, value_of in self._sums:
            counter.inc(value_of(result))
        self._prompt_length.observe(result.prompt_tokens)
        self._answer_length.observe(result.generated_tokens)
        if sequence.params.max_new_tokens is not None:
            self._most_tokens.observe(sequence.params.max_new_tokens)
        if not arrivals:
            return
        began = sequence.timer.began or arrivals[0]
        self._first.observe(arrivals[0] - received_at)
        self._queue.observe(max(0.0, began - sequence.submitted_at))
        self._prefill.observe(max(0.0, arrivals[0] - began))
        self._decode.observe(arrivals[-1] - arrivals[0])
        self._handover.observe(now - arrivals[-1])
        self._gaps.observe(*(after - before for before, after in pairwise(arrivals)))
        if len(arrivals) > 1:
            self._per_token.observe((arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))

    def count_steps(self, steps: Iterable[StepTaken]) -> None:
        for step in steps:
            self._step_seconds.observe(step.seconds, label=step.kind)
            self._step_tokens.observe(step.num_tokens)
            self._step_rows.observe(step.num_sequences)


def with_vllm_names(text: str, model: str) -> str:
    """Return metrics with vLLM's prefix, and its label `model_name` on each sample, for vLLM's dashboards."""

    def renamed(found: re.Match[str]) -> str:
        comment, name, begins_labels = found.groups()
        if comment:
            return f"{comment}vllm:{name}"
        return f"vllm:{name}{{model_name={json.dumps(model)}{',' if begins_labels else '}'}"

    return _INFER_NAME.sub(renamed, text)


def _engine_families(now: Any) -> Iterator[Any]:
    """Yield the families of an `step.snapshot.EngineSnapshot`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    free = sum(pool.num_free for pool in now.pools) / max(1, sum(pool.num_pages for pool in now.pools))
    yield GaugeMetricFamily("infer:num_requests_running", "Answers that have a slot.", len(now.running))
    yield GaugeMetricFamily("infer:num_requests_waiting", "Answers that wait for a slot.", len(now.waiting))
    yield GaugeMetricFamily("infer:kv_cache_usage_perc", "Share of the cache's pages in use, from 0 to 1.", 1 - free)
    yield GaugeMetricFamily("infer:max_num_requests_running", "Slots.", now.max_running)
    preempted = "Answers whose pages were freed and computed again."
    yield CounterMetricFamily("infer:num_preemptions_total", preempted, now.num_preemptions)


def _settings_families(host: Any) -> Iterator[Any]:
    """Yield the families of an `requests.host.Host`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    yield GaugeMetricFamily("infer:threads", "Threads that compute.", host.model.backend.num_threads())
    if host.engine_if_any is None:
        return
    prefixes = host.engine_if_any.prefixes
    stored, refused = (0, 0) if prefixes is None else (prefixes.bytes_stored, prefixes.files_refused)
    yield CounterMetricFamily("infer:prefix_disk_stored_bytes_total", "Bytes of prefixes written to disk.", stored)
    yield CounterMetricFamily("infer:prefix_disk_refused_total", "Damaged files that were removed.", refused)
    cache = host.settings.cache
    labels = {
        "page_tokens": str(cache.page_tokens),
        "num_pages": str(sum(host.runner.cache.pool_pages)),
        "kv_type": host.model.kv_type if cache.kv_type == "auto" else cache.kv_type,
        "eviction_policy": cache.eviction_policy,
        "reuse_prefixes": str(cache.reuse_prefixes).lower(),
    }
    info = GaugeMetricFamily("infer:cache_config_info", "How keys and values are stored, as labels.", labels=[*labels])
    info.add_metric([*labels.values()], 1)
    yield info


def log_call(call: Call) -> None:
    """Write the line of a request in the access log."""
    if not log.isEnabledFor(logging.INFO):
        return
    entry: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "http.request.method": call.method,
        "http.route": call.route,
        "http.response.status_code": call.status or 499,
        "http.server.request.duration": round(time.perf_counter() - call.received_at, 6),
        "infer.request.id": call.id,
    }
    optional = {
        "infer.request.client_id": call.client_id,
        "enduser.id": call.key_name,
        "error.type": call.error_code,
        "infer.disconnect_phase": call.left_in,
    }
    entry |= {name: value for name, value in optional.items() if value}
    if call.results:
        entry |= _answers(call, call.results)
    log.info(msgspec.json.encode(entry).decode())


def _answers(call: Call, results: Sequence[GenerationResult]) -> dict[str, Any]:
    timers = [answer.sequence.timer for answer in call.answers]
    entry = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.request.model": call.model,
        "gen_ai.usage.input_tokens": results[0].prompt_tokens,
        "gen_ai.usage.output_tokens": sum(result.generated_tokens for result in results),
        "gen_ai.usage.cache_read.input_tokens": results[0].reused_tokens,
        "gen_ai.response.finish_reasons": [result.finish_reason for result in results],
    }
    if results[0].disk_tokens:
        entry["infer.usage.disk_read.input_tokens"] = results[0].disk_tokens
    if began := [timer.began for timer in timers if timer.began is not None]:
        entry["infer.queue_seconds"] = round(min(began) - call.answers[0].sequence.submitted_at, 6)
    if arrivals := [timer.arrivals[0] for timer in timers if timer.arrivals]:
        entry["gen_ai.server.time_to_first_token"] = round(min(arrivals) - call.received_at, 6)
    return entry


@final
class LogLines(QueueHandler):
    """Writes whole lines to a stream. Lines beyond `MOST_LINES` unwritten ones are dropped, and the next line says so.

    At the end of the process, `logging` flushes the handler, which waits for at most a second.
    """

    def __init__(self, stream: TextIO) -> None:
        self._lines = Queue[str](MOST_LINES)
        super().__init__(self._lines)
        # Not through the stream: the end of the process would wait for the lock of its buffer.
        self._descriptor, self._encoding = stream.fileno(), stream.encoding
        self._num_dropped = 0
        Thread(target=self._write, name="infer-log", daemon=True).start()

    prepare = QueueHandler.format

    def enqueue(self, line: Any) -> None:
        notice = f"{self._num_dropped} lines of the log were dropped: its reader is too slow\n"
        try:
            self._lines.put_nowait(f"{notice if self._num_dropped else ''}{line}\n")
            self._num_dropped = 0
        except Full:
            self._num_dropped += 1

    def flush(self) -> None:
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_SECONDS)

    def _write(self) -> None:
        while True:
            content = self._lines.get().encode(self._encoding, "backslashreplace")
            with suppress(OSError):  # the reader has closed the pipe
                while content:
                    try:
                        content = content[write(self._descriptor, content) :]
                    except BlockingIOError:  # another process made the pipe non-blocking
                        select([], [self._descriptor], [])
            self._lines.task_done()
