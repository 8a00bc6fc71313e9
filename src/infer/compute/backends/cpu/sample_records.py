"""Records of the sampler's commands, and the arrays to which their fields point: see `cpu.records`."""

import numpy as np

from infer.compute.backends.cpu.records import pointer
from infer.request_limits import MAX_LOGPROBS
from infer.sampling_params import FILTER_NAMES

SAMPLE_COLUMNS = {
    "temperature": np.float32,
    "is_filtered": np.uint8,
    **dict.fromkeys(FILTER_NAMES, np.float64),  # `row_stages.FILTERS` says what each number is
    "repetition_penalty": np.float32,
    "repetition_window": np.int64,
    "frequency_penalty": np.float32,
    "presence_penalty": np.float32,
    "temperature_last": np.uint8,
    "seed": np.int64,
    "num_prompt_tokens": np.int64,
    "min_new_tokens": np.int64,
    "history_slot": np.int64,
    "mask_index": np.int64,
    "top_logprobs": np.int64,
    "logprobs_processed": np.uint8,
    "bias_starts": np.int64,
    "end_starts": np.int64,
}
SAMPLE_LISTS = {"bias_ids": np.int64, "biases": np.float64, "end_ids": np.int64}  # another selection has others
SAMPLE_HISTORY = {"tokens": np.int32, "last": np.int32, "counts": np.int32, "lengths": np.int64}
SAMPLE_SCRATCH = {
    "maxima": np.float32,  # [rows, groups]
    "ends": np.float32,  # [end ids]: logits of the ends that are banned
    "found": np.int64,  # [rows, threads]: the best id of each thread's part, −1 for none
    "scores": np.float32,  # [rows, threads]: its logit with noise
    "totals": np.int64,  # [rows, threads]: sum of weights
    "num_candidates": np.int64,  # [rows, threads]
    "values": np.float32,  # [rows, padded vocab]: candidates, each thread's where its part begins
    "ids": np.int32,
    "weights": np.int64,
    "scored": np.float32,  # [rows, padded vocab]: the logits whose log-probabilities are asked for
    "peaks": np.float32,  # [rows, threads]: the largest of each thread's part; then, first, of the row
    "ahead": np.int64,  # [rows, threads]: tokens of each thread's part that rank before the sampled one
}
LOGPROB = np.dtype(
    [
        ("logits", np.float32, MAX_LOGPROBS),  # the largest of the row, in the total order
        ("ids", np.int32, MAX_LOGPROBS),
        ("logit", np.float32),  # of the token that was sampled
        ("largest", np.float32),
        ("total", np.int64),  # sum of weights
        ("rank", np.int64),
    ]
)
_SAMPLE_ARRAYS = SAMPLE_COLUMNS | SAMPLE_LISTS | SAMPLE_HISTORY | SAMPLE_SCRATCH

SAMPLE = np.dtype(
    [
        ("logits", pointer(np.float32)),  # [rows, row_stride]
        ("row_stride", np.int64),
        ("num_rows", np.int64),
        ("starts", pointer(np.int64)),  # [rows]: where each row's logits begin, one line for each of its entries
        ("entry", np.int64),  # which of them: 0, or the number of drafts before it
        ("alive", pointer(np.int64)),  # [rows]: 0 where a row samples nothing (any more)
        ("vocab", np.int64),
        ("num_groups", np.int64),
        ("group_vectors", np.int64),
        ("padded", np.int64),  # groups × their size
        ("mask_words", np.int64),
        ("allowed", np.int64),  # int32 [lines of logits, mask_words], or 0
        ("positions", pointer(np.int64)),  # [rows], of entry 0
        ("position_offset", np.int64),  # added to them: a multi-step's are those of the tokens before
        ("capacity", np.int64),  # of a history slot
        ("prompt_lengths", pointer(np.int64)),  # [slots]
        ("sampled", pointer(np.int64)),  # [rows]
        *((name, pointer(type_)) for name, type_ in _SAMPLE_ARRAYS.items()),
        ("masks", np.int64),  # int32 [masks, mask_words]
        ("generated", pointer(np.int64)),  # [repeats or entries, rows]: what was sampled
        ("logprobs", pointer(LOGPROB)),  # [repeats or entries, rows], of rows that ask for them; 0: none does
        ("num_generated", np.int64),
        ("stop", np.int64),  # 1: no more steps after this one
        ("interrupt", pointer(np.int64)),  # which any thread sets: no more steps after this one; or 0
        ("stop_ids", pointer(np.int64)),
        ("num_stop_ids", np.int64),
        ("ended", pointer(np.int64)),  # [rows]: rows that met a stop id
        ("drafts", pointer(np.int64)),  # [rows, draft_stride]
        ("draft_stride", np.int64),
        ("num_drafts", pointer(np.int64)),  # [rows]
        ("counts_sampled", pointer(np.int64)),  # [rows]: how many tokens a verified step gave
        ("mask_ready", pointer(np.int64)),  # not 0 when another thread has filled `allowed`; or 0
        ("after_step", np.int64),  # Python's, called after each step of several with the number so far, or 0
        ("stamps", pointer(np.int64)),  # nanoseconds; of a multi-step the end of each forward and of the sampling after
        # it, of a verified step the end of the forward, then of each entry
    ]
)
