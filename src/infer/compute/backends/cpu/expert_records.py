"""Records of the commands of experts: see `cpu.records`."""

import numpy as np

from infer.compute.backends.cpu.records import WORD, pointer

ROUTING = np.dtype(
    [
        ("scores", np.int64),  # f32 [tokens, experts]: logits at first
        ("keys", np.int64),  # f32 [tokens, experts]: what experts are chosen by
        ("correction", np.int64),  # f32 [experts], added to the scores to choose; 0: none
        ("num_experts", np.int64),
        ("num_chosen", np.int64),
        ("is_normalized", np.int64),
        ("floor", np.float32),
        ("scale", np.float32),
        ("expert_scales", np.int64),  # f32 [experts], multiplies an expert's weights; 0: none
        ("chosen", pointer(np.int64)),  # [tokens, num_chosen], ascending
        ("chosen_weights", pointer(np.float32)),  # [tokens, num_chosen]
        ("counts", pointer(np.int64)),  # [experts]: tokens that chose it
        ("starts", pointer(np.int64)),  # [experts]: its first slot. A slot is a token of an expert
        ("active", pointer(np.int64)),  # the experts with tokens, ascending
        ("num_active", pointer(np.int64)),  # one number
        ("tokens", pointer(np.int64)),  # [slots]
        ("weights", pointer(np.float32)),  # [slots]
    ]
)

EXPERT_INPUTS = np.dtype(
    [
        ("x", np.int64),  # f32 [rows, features]
        ("weight", np.int64),  # f32 [features]; 0: quantise only
        ("eps", np.float32),
        ("form", np.int32),
        ("features", np.int64),
        ("out", np.int64),  # activation records of each slot, expert after expert
        ("token_bytes", np.int64),
        ("tokens", pointer(np.int64)),  # [slots]: the row of x; 0: row and slot are the same
        ("weights", pointer(np.float32)),  # [slots], multiplies normalised x; 0: ones
        ("counts", pointer(np.int64)),  # `ROUTING`
        ("starts", pointer(np.int64)),
        ("active", pointer(np.int64)),
        ("num_active", pointer(np.int64)),
    ]
)

# Experts that are read from a file. A frame is the memory of one expert.

EXPERT_POOL = np.dtype(
    [
        ("memory", np.int64),  # the frames, one after another
        ("record_bytes", np.int64),  # of an expert, in the file and in memory
        ("part_bytes", np.int64),  # that are read at once, and have a checksum
        ("num_parts", np.int64),  # of an expert
        ("num_frames", np.int64),
        ("num_used", np.int64),  # frames that have held an expert
        ("descriptor", np.int64),  # of the file; below 0: nothing is read, and checksums are stored
        ("offset", np.int64),  # of the pool's first expert in the file
        ("checksums", pointer(np.int64)),  # [experts, num_parts]
        ("frames", pointer(np.int64)),  # [experts]: its frame, or -1
        ("uses", pointer(np.int64)),  # [experts]: how often it was used; it halves with time
        ("last_used", pointer(np.int64)),  # [experts]: in `time`
        ("owners", pointer(np.int64)),  # [num_frames]: the expert in it
        ("needed", pointer(np.int64)),  # [num_frames]: the time of the last commands that need it
        ("is_unread", pointer(np.int64)),  # [num_frames]: 1 if reading it failed
        ("time", np.int64),  # layers that were computed
        ("half_life", np.int64),  # in powers of two
        ("num_hits", np.int64),
        ("num_misses", np.int64),
        ("failure", WORD),  # 0, or 2 × the number of the first part that failed + 1, and + 1 if it is damaged
    ]
)

EXPERT_FETCH = np.dtype(
    [
        ("pool", pointer(EXPERT_POOL)),
        ("first_expert", np.int64),  # of the layer, in the pool
        ("active", pointer(np.int64)),  # `ROUTING`
        ("num_active", pointer(np.int64)),
        ("first", np.int64),  # of `active` that the next commands need
        ("most", np.int64),
        ("num_needed", pointer(np.int64)),  # one number
        ("missing", pointer(np.int64)),  # [most]: experts to read
        ("num_missing", pointer(np.int64)),  # one number
    ]
)
