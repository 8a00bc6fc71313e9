"""Arguments of the ops' commands: plain records and sizes, apart from the code that reads them.

A process that finds its kernels on disk needs only these. Neither this module nor the code that builds commands loads a
compiler. Addresses and counts are int64. The sampler's and the threads' records are beside their code.
"""

from typing import Any

import numpy as np
import numpy.typing as npt


def pointer(element: npt.DTypeLike) -> np.dtype[Any]:
    """Return the type of a field with the address of an array. Kernels read the array by index: `record_types`."""
    return np.dtype(np.int64, metadata={"element": np.dtype(element)})


WORD = np.dtype((np.int64, (1,)))  # what threads change under each other's eyes: kernels have its address


# packing

PACK = np.dtype(
    [
        ("source", np.int64),
        ("source_row_bytes", np.int64),
        ("rows", np.int64),
        ("in_features", np.int64),
        ("out", np.int64),
        ("group_bytes", np.int64),
        ("thread", np.int64),  # that packs
    ]
)

EMBED = np.dtype(
    [
        ("table", np.int64),
        ("group_bytes", np.int64),
        ("in_features", np.int64),
        ("num_rows", np.int64),
        ("out", np.int64),
        ("scale", np.float32),
        ("norm_eps", np.float32),  # of a row, which is divided by its root mean square; −1: it is not
    ]
)

EMBED_FROM_FILE = np.dtype(
    [
        ("descriptor", np.int64),  # of the file
        ("offset", np.int64),  # of the table in it
        ("row_bytes", np.int64),
        ("in_features", np.int64),
        ("num_rows", np.int64),
        ("out", np.int64),  # f32 [tokens, in_features]
        ("scale", np.float32),
        ("padding", np.float32),
    ]
)

# activations

NORMALIZE = np.dtype(
    [
        ("x", np.int64),  # f32 [tokens, features]
        ("weight", np.int64),  # f32 [features]; 0: quantise only
        ("eps", np.float32),
        ("form", np.int32),  # of activation records: `layouts`; 0: keep floats
        ("features", np.int64),
        ("out", np.int64),
        ("private_bytes", np.int64),  # not 0: a single token is done by every thread, at out + thread × this
        ("of_logits", np.int64),  # only the tokens whose logits are computed
    ]
)

ADD_ROWS = np.dtype(
    [
        ("residual", np.int64),  # f32 [tokens, features], changed in place
        ("y", np.int64),
        ("weight", np.int64),  # 0: y is added as it is
        ("own_weight", np.int64),  # not 0: residual is normalised first, with this weight
        ("eps", np.float32),  # of both
        ("scale", np.float32),  # multiplies the sum
        ("features", np.int64),  # of a row
        ("rows_per_token", np.int64),
    ]
)

SUM_NORM = np.dtype(
    [
        ("x", np.int64),  # f32 [tokens, features], like y and out
        ("y", np.int64),  # 0: there is none
        ("out", np.int64),  # may be x
        ("weight", np.int64),  # f32 [features]; 0: no norm
        ("bias", np.int64),  # f32 [features], or 0
        ("features", np.int64),
        ("types", np.int64),  # f32 [last_type + 1, features], or 0
        ("last_type", np.int64),
        ("second_starts", pointer(np.int64)),  # [rows]: the position from which on a token's type is not 0
        ("embedded_positions", np.int64),  # f32 [positions, features], or 0
        ("eps", np.float32),
        ("is_centred", np.int32),  # the mean is subtracted first
    ]
)

# attention

CHUNK = 256  # slots that give one partial result
GROUPS_PER_THREAD = 8  # from here on, threads share out pairs of groups, which a tile does at once
SPLIT_TOKENS = 16  # up to this many tokens, the chunks may be shared out; beyond, the queries are
MAX_HEAD_DIM = 512
BUNDLE = 24  # queries with the same keys at once: their scores stay in a core's first cache
FEWEST_FOR_MANY = 40  # queries with the same keys: from here on their blocks are widened, unless they are f32
MOST_COLUMNS = 6 * BUNDLE  # queries with the same keys for which blocks are widened once
SCORE_BYTES = 4 * BUNDLE * CHUNK
WIDE_BYTES = 17 * CHUNK // 4  # of a chunk's keys in f32, with their scales, or values with scales and minima: of a dim


def attend_scratch_bytes(dim: int) -> int:
    """Return the scratch bytes per thread.

    They hold a bundle's scores and sums, widened keys and values, and the results so far of all columns.
    """
    return SCORE_BYTES + 2 * WIDE_BYTES * dim + 4 * (BUNDLE + MOST_COLUMNS) * (dim + 16)


ATTEND = np.dtype(
    [
        ("q", np.int64),  # f32 [heads × dim] of the first token
        ("k", np.int64),
        ("v", np.int64),
        ("qkv_bytes", np.int64),  # from token to token
        ("num_heads", np.int64),
        ("num_kv_heads", np.int64),
        ("num_new_heads", np.int64),  # whose k and v are stored: as many, or 0 if they are in the cache
        ("only_stores", np.int64),  # 1: there are no queries
        ("dim", np.int64),
        ("scale", np.float32),
        ("eps", np.float32, 2),  # of q's and k's norm
        ("v_eps", np.float32),  # of each head of v, which is divided by its root mean square; −1: it is not
        ("softcap", np.float32),  # 0: none
        ("norm_form", np.int32),  # of q and k: `NORM_AFTER` multiplies by weights after the rotation; or `NORM_CENTRED`
        ("sink_logits", np.int64),  # f32 [heads], or 0
        ("query_scales", np.int64),  # f32 [positions], or 0
        ("gates", np.int64),  # f32 [heads × dim] of the first token, qkv_bytes from token to token, or 0
        ("are_gates_of_heads", np.int64),  # so there are f32 [heads] of a token
        ("is_gate_softplus", np.int64),  # otherwise sigmoid
        ("norms", np.int64, 2),  # their weights, or 0
        ("norm_strides", np.int64, 2),  # bytes of weight from head to head; 0: a head is normalised by itself
        ("cos", np.int64),  # f32 [sets, positions, half], or 0
        ("sin", np.int64),
        ("set_bytes", np.int64),  # from set to set; 0: there is one
        ("half", np.int64),
        ("keys", np.int64),
        ("values", np.int64),
        ("key_page_stride", np.int64),  # bytes from page to page
        ("value_page_stride", np.int64),
        ("key_stride", np.int64),  # from kv head to kv head
        ("value_stride", np.int64),
        ("table", pointer(np.int64)),  # [rows, table_stride]: `kv_layout.Pages`
        ("table_stride", np.int64),
        ("page_bits", np.int64),  # a page has 2 to this many slots
        ("shifts", pointer(np.int64)),  # [rows] each
        ("sinks", pointer(np.int64)),
        ("windows", pointer(np.int64)),
        ("num_ahead", np.int64),  # slots after its own that a token sees, before the end of its row
        ("ends", pointer(np.int64)),  # likewise, of rows; read if num_ahead is not 0
        ("rope_sets", pointer(np.int64)),
        ("last_position", np.int64),  # of the model's context: later queries see the sinks as if from there; or −1
        ("queries", np.int64),  # f32, as above
        ("sink_queries_at", np.int64),  # bytes from the queries to those for the sinks; 0: they are the same
        ("partials", np.int64),  # f32 [heads, SPLIT_TOKENS, num_chunks, dim + 16], as queries
        ("num_chunks", np.int64),
        ("fewest_for_many", np.int64),  # queries with the same keys that `attend_many` takes; 0: it takes none
        ("scratch", np.int64),  # of a thread, at scratch + thread × scratch_bytes
        ("scratch_bytes", np.int64),
        ("out", np.int64),  # f32 [tokens, out_heads × dim]
        ("out_heads", np.int64),  # of all ranks
        ("first_head", np.int64),  # which of them is the first here
        ("quantized", np.int64),  # activation records of out, or 0
        ("form", np.int64),
    ]
)

NORM_AFTER, NORM_CENTRED = 1, 2  # the second subtracts each head's mean, and has weights for each head

# short convolutions

SHORT_CONV = np.dtype(
    [
        ("projected", np.int64),  # f32 [tokens, 3 × features]: B, C and u
        ("taps", np.int64),  # f32 [num_taps, features]
        ("num_taps", np.int64),
        ("bias", np.int64),  # f32 [features]; 0: none
        ("features", np.int64),
        ("inputs", np.int64),  # f32 [page_tokens, features] in each page
        ("page_bytes", np.int64),  # from page to page
        ("page_bits", np.int64),  # a page has 2 to this many tokens
        ("table", pointer(np.int64)),  # [rows, table_stride]: `kv_layout.Pages`
        ("table_stride", np.int64),
        ("out", np.int64),  # f32 [tokens, features]
        ("quantized", np.int64),  # activation records of out, or 0
        ("form", np.int64),
    ]
)

# gated delta nets

MAX_TAPS = 16


def delta_net_scratch_bytes(key_dim: int, value_dim: int, page_tokens: int) -> int:
    """Return the scratch bytes per thread. `Scratch` says what they hold."""
    return 4 * page_tokens * (2 * max(key_dim, page_tokens) + 2 * page_tokens + 3 * value_dim + 12)


GATED_DELTA_NET = np.dtype(
    [
        ("projected", np.int64),  # f32 [tokens, num_columns]: qkv, z, b and a side by side
        ("num_columns", np.int64),
        ("num_channels", np.int64),  # of qkv
        ("num_key_heads", np.int64),
        ("num_value_heads", np.int64),
        ("key_dim", np.int64),  # a multiple of 16, like value_dim
        ("value_dim", np.int64),
        ("are_heads_tiled", np.int64),
        ("taps", np.int64),  # f32 [num_taps, num_channels]
        ("num_taps", np.int64),
        ("dt_bias", np.int64),  # f32 [num_value_heads]
        ("decay", np.int64),  # f32 [num_value_heads]
        ("norm", np.int64),  # f32 [value_dim]
        ("eps", np.float32),
        ("beta_scale", np.float32),
        ("inputs", np.int64),  # of page 0, like the next four: `DeltaNetCache`
        ("states", np.int64),
        ("keys", np.int64),
        ("updates", np.int64),
        ("decays", np.int64),
        ("page_bytes", np.int64),  # from page to page
        ("page_tokens", np.int64),  # a power of 2, and a multiple of 16
        ("table", pointer(np.int64)),  # [rows, table_stride]: `kv_layout.Pages`
        ("table_stride", np.int64),
        ("scratch", np.int64),  # of a thread, at scratch + thread × scratch_bytes
        ("scratch_bytes", np.int64),
        ("out", np.int64),  # f32 [tokens, num_value_heads × value_dim]
        ("quantized", np.int64),  # activation records of out, or 0
        ("form", np.int64),
    ]
)

# matmul

_MATMUL = [
    ("first_weights", np.int64),  # the groups of the projection, or of gate
    ("second_weights", np.int64),  # 0, or the groups of up
    ("group_bytes", np.int64),
    ("num_groups", np.int64),
    ("groups_per_unit", np.int64),
    ("num_records", np.int64),
    ("activations", np.int64),
    ("private_bytes", np.int64),  # not 0: a single token's activations lie at activations + thread × this
    ("of_logits", np.int64),
    ("tokens_per_block", np.int64),  # activations that stay in the cache while the weights stream by
    ("unpacked", np.int64),  # a unit's weights as `matrix_tiles` take them, at unpacked + thread × unpacked_bytes
    ("unpacked_bytes", np.int64),
    ("epilogue", np.int64),
    ("epilogue_arguments", np.int64),
]
MATMUL = np.dtype(_MATMUL)

EXPERT_MATMUL = np.dtype(
    [
        *_MATMUL,
        ("counts", pointer(np.int64)),  # [experts]: `ROUTING`
        ("starts", pointer(np.int64)),
        ("active", pointer(np.int64)),
        ("num_active", pointer(np.int64)),
        ("expert_bytes", np.int64),  # from expert to expert, of the weights
        ("expert_rows", np.int64),
        ("frames", pointer(np.int64)),  # [experts]: where an expert's weights are, counted in experts; 0: in order
    ]
)

EPILOGUE = np.dtype(
    [
        ("out", np.int64),  # f32 [tokens, row_stride]; 0: not asked for
        ("row_stride", np.int64),
        ("first_column", np.int64),
        ("num_columns", np.int64),
        ("bias", np.int64),  # f32 [num_columns] or 0; of gate when gating
        ("second_bias", np.int64),  # of `gate`: up's
        ("quantized", np.int64),  # of `gate` only: activation records of what goes to `out`, or 0
        ("form", np.int64),
        ("softcap", np.float32),  # of `store`, where it caps
        ("padding", np.float32),
        ("factors", np.int64),  # of `store`, where it gates them: f32 [tokens, factor_stride], from its first column on
        ("factor_stride", np.int64),
        (
            "tokens",
            pointer(np.int64),
        ),  # of `store`, where it adds to tokens: the row of `out` for each row here; 0: the same
        ("weights", pointer(np.float32)),  # of `store`, where it weighs: what each row is multiplied by
        ("curve", pointer(np.float32)),  # of `store`, if it computes xIELU: the four values of `Projection.curve`
    ]
)

# ranks

_OF_COPY = ("source", "source_stride", "target", "target_stride", "num_columns")  # source, target: f32 [tokens, stride]
COPY_COLUMNS = np.dtype([(name, np.int64) for name in _OF_COPY])

EXCHANGE = np.dtype(
    [
        ("done", np.int64),  # barriers passed, counted alike in all ranks
        ("rank", np.int64),
        ("size", np.int64),
        ("failed", pointer(np.int64)),  # what all ranks see: 1 where nobody waits any more
        ("arrivals", pointer(np.int64)),  # likewise: the barrier that each rank has reached, a line each
        ("buffers", pointer(np.int64)),  # likewise, two, used in turn
        ("buffer_words", np.int64),
    ]
)

TRANSFER = np.dtype([("exchange", pointer(EXCHANGE)), ("stop", pointer(np.int64))])  # stop: what ends a multi-step
