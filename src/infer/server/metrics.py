"""Counters and histograms under vLLM's names after `infer:`, of requests when they end, and of steps from the engine's
log.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, final

from infer.engine.scheduler import StepTaken
from infer.server.call import Call
from infer.server.exposition import Counter, Family, Histogram
from infer.server.process_metrics import process_families

_GAPS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WAITS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 30, 60)
_LATENCIES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_SLOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


@final
class Metrics:
    """All counters and histograms of the server. For the event loop only."""

    def __init__(self) -> None:
        self._http = Counter("infer:http_requests_total", "Requests by route and status.", "path", "status")
        self._successes = Counter("infer:request_success_total", "Answers by how they ended.", "finished_reason")
        self._failures = Counter("infer:row_failures_total", "Answers that failed, by why.", "code")
        self._refusals = Counter("infer:refusals_total", "Requests refused, by the error's code.", "reason")
        self._disconnects = Counter("infer:disconnects_total", "Clients that went away, by phase.", "phase")
        self._prompt_tokens = Counter("infer:prompt_tokens_total", "Tokens of prompts.")
        self._queried = Counter("infer:prefix_cache_queries_total", "Tokens of prompts looked for in the cache.")
        self._hits = Counter("infer:prefix_cache_hits_total", "Tokens of prompts found in the cache.")
        self._answer_tokens = Counter("infer:generation_tokens_total", "Tokens generated.")
        self._drafted = Counter("infer:spec_decode_num_draft_tokens_total", "Tokens guessed.")
        self._accepted = Counter("infer:spec_decode_num_accepted_tokens_total", "Tokens guessed right.")
        self._first = Histogram("infer:time_to_first_token_seconds", "From request to first token, seconds.", _WAITS)
        self._gaps = Histogram("infer:inter_token_latency_seconds", "Between two tokens, seconds.", _GAPS)
        self._per_token = Histogram("infer:request_time_per_output_token_seconds", "Mean of an answer, seconds.", _GAPS)
        self._latency = Histogram("infer:e2e_request_latency_seconds", "From request to end, seconds.", _LATENCIES)
        self._queue = Histogram("infer:request_queue_time_seconds", "Waiting for a slot, seconds.", _WAITS)
        self._prefill = Histogram("infer:request_prefill_time_seconds", "From slot to first token, seconds.", _WAITS)
        self._decode = Histogram("infer:request_decode_time_seconds", "From first to last token, seconds.", _LATENCIES)
        self._handover = Histogram("infer:handover_seconds", "From the last token to the answer's end, seconds.", _GAPS)
        self._prompt_length = Histogram("infer:request_prompt_tokens", "Tokens of a prompt.", _COUNTS)
        self._answer_length = Histogram("infer:request_generation_tokens", "Tokens of an answer.", _COUNTS)
        self._most_tokens = Histogram("infer:request_params_max_tokens", "Tokens that an answer may have.", _COUNTS)
        self._choices = Histogram("infer:request_params_n", "Answers of a request.", _COUNTS[:8])
        self._step_seconds = Histogram("infer:step_seconds", "A step of the engine, seconds.", _GAPS, "kind")
        self._step_tokens = Histogram("infer:iteration_tokens", "Tokens of a step.", _COUNTS)
        self._step_rows = Histogram("infer:rows_per_step", "Sequences of a step.", _SLOTS)
        self._lag = Histogram("infer:event_loop_lag_seconds", "How late the loop was, seconds.", _GAPS)

    def families(self) -> Iterator[Family]:
        return chain((each.family() for each in vars(self).values()), process_families())

    def families_of_http(self) -> list[Family]:
        """Return the families of HTTP and of the process, without those that need the engine."""
        counted = (self._http, self._refusals, self._disconnects, self._lag)
        return [*(each.family() for each in counted), *process_families()]

    def count_call(self, call: Call) -> None:
        """Count a request that has ended."""
        now = time.perf_counter()
        if call.left_in:
            self._disconnects.add(1, call.left_in)
        self._http.add(1, call.route, str(call.status or 499))
        if call.status >= 400:
            self._refusals.add(1, call.error_code or str(call.status))
        if call.sequences:
            self._latency.observe(now - call.received_at)
            self._choices.observe(len(call.sequences))
        for sequence in call.sequences:
            self._count_answer(sequence, call.received_at, now)

    def _count_answer(self, sequence: Any, received_at: float, now: float) -> None:
        result, arrivals = sequence.result(), sequence.timer.arrivals
        if result.finish_reason == "error":
            self._failures.add(1, str(result.stop_reason))
        elif result.finish_reason != "abort":
            self._successes.add(1, result.finish_reason)
        self._prompt_tokens.add(result.prompt_tokens)
        self._queried.add(result.prompt_tokens)
        self._hits.add(result.reused_tokens)
        self._answer_tokens.add(result.generated_tokens)
        self._drafted.add(result.stats.drafts_proposed)
        self._accepted.add(result.stats.drafts_accepted)
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
        self._gaps.observe_all([after - before for before, after in pairwise(arrivals)])
        if len(arrivals) > 1:
            self._per_token.observe((arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))

    def count_steps(self, steps: Iterable[StepTaken]) -> None:
        for step in steps:
            self._step_seconds.observe(step.seconds, step.kind)
            self._step_tokens.observe(step.num_tokens)
            self._step_rows.observe(step.num_sequences)

    def count_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)
