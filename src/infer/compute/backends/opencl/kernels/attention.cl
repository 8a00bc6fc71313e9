// Attention over cached blocks of 16 positions, whose bytes `quantization.kv_layout` defines, in chunks of 256 slots: a
// chunk gives (largest score m, Σ e^(s − m), Σ e^(s − m) v), and these are merged in the order of the chunks. So a
// token's bits depend on nothing but the token; the order of all sums is that of `backends.cpu.attention.attention`.
//
// A work group has a head of a token. Its work items divide the slots of a chunk for scores, and the elements for values.

#define CHUNK 256
#define RECORDS (HEAD_DIM / BLOCK)
#define OWN_DIMS ((HEAD_DIM + ITEMS - 1) / ITEMS)  // elements of a head that a work item has
#define KEY_RECORD (LANES * BLOCK + 2 * LANES)  // bytes of q4: codes of 16 positions in 8 bits, then their scales
#define VALUE_CODES (LANES * BLOCK / 2)
#define VALUE_RECORD (VALUE_CODES + 4 * LANES)  // codes in 4 bits, scales, minima
#ifdef KV_f32
#define FLOAT_AT(at, i) ((global const float *)(at))[i]
#else
#define FLOAT_AT half_of
#endif

typedef struct {
    long first, page, head, block;  // in bytes: where the layer begins, and from each to the next
} Blocks;

typedef struct {
    Blocks keys, values;
    long far_at;  // in floats: from queries to those that see the sinks; 0: the same ones
    int heads, kv_heads, table_stride, page_bits, half_dim, rope_positions, rope_sets, last_position;
    int q_norm_stride, k_norm_stride;  // 0: each head by itself
    float scale, softcap, q_eps, k_eps;
} Layer;

// Where a head's block begins that has the slot.
inline long block_at(
    const Layer *layer, const Blocks *blocks, global const long *table, long row, long slot, int head)
{
    long page = table[row * layer->table_stride + (slot >> layer->page_bits)];
    long block = (slot & (1L << layer->page_bits) - 1) / LANES;
    return blocks->first + page * blocks->page + head * blocks->head + block * blocks->block;
}

inline void put_half(float x, global half *at)
{
    vstore_half_rte(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x, 0, at);
}

inline void put_float(float x, global uchar *block, int i)
{
#ifdef KV_f32
    ((global float *)block)[i] = x;
#else
    put_half(x, (global half *)block + i);
#endif
}

inline int steps_of(float x, float scale, float low, float high)
{
    x = x / (scale == 0.0f ? 1.0f : scale);
    return nearest(x < low ? low : x > high ? high : x);
}

// 32 elements × the Hadamard matrix / √32
inline void mix(float *x)
{
    for (int apart = BLOCK / 2; apart > 0; apart /= 2)
        for (int i = 0; i < BLOCK; i++)
            if (!(i & apart)) {
                float first = x[i], second = x[i + apart];
                x[i] = first + second;
                x[i + apart] = first - second;
            }
    for (int i = 0; i < BLOCK; i++)
        x[i] *= 0.17677669529663687f;
}

inline void put_key(const float *x, global uchar *record, int lane)
{
    global half *scale = (global half *)(record + LANES * BLOCK) + lane;
    float most = 0.0f;
    for (int i = 0; i < BLOCK; i++)
        most = larger(most, fabs(x[i]));
    put_half(most / 127.0f, scale);
    for (int i = 0; i < BLOCK; i++)
        record[LANES * i + lane] = (uchar)steps_of(x[i], vload_half(0, scale), -127.0f, 127.0f);
}

inline void put_value(const float *x, global uchar *record, int lane)
{
    global half *scale = (global half *)(record + VALUE_CODES) + lane, *minimum = scale + LANES;
    float most = x[0], least = x[0];
    for (int i = 1; i < BLOCK; i++) {
        most = larger(most, x[i]);
        least = -larger(-least, -x[i]);
    }
    put_half((most - least) / 15.0f, scale);
    put_half(least, minimum);
    float rounded = vload_half(0, scale), from = vload_half(0, minimum);
    for (int i = 0; i < BLOCK / 2; i++) {
        int low = steps_of(x[i] - from, rounded, 0.0f, 15.0f);
        int high = steps_of(x[i + BLOCK / 2] - from, rounded, 0.0f, 15.0f);
        record[BLOCK / 2 * lane + i] = (uchar)(low + high * 16);
    }
}

// A head of q → queries; of k, v → cache; after these the heads of q once more, as they see the sinks. A value is finite
// in the cache; if it or its key is not, the key is NaN (`kv_layout.storable`).
KERNEL rotate_append(
    global const float *qkv, global const float *q_norm, global const float *k_norm, global const float *cosines,
    global const float *sines, global const long *table, global const long *shifts, global const long *rope_sets,
    global const long *rows, global const long *positions, global float *queries, global uchar *keys,
    global uchar *values, Layer layer)
{
    local float sums[LANES], normed[HEAD_DIM], rotated[HEAD_DIM];
    local int has_failed;
    int width = layer.heads + 2 * layer.kv_heads, head = get_group_id(0), token = get_group_id(1), item = get_local_id(0);
    bool is_far = head >= width;
    head = is_far ? head - width : head;
    int kv = head - layer.heads;
    bool is_key = kv >= 0 && kv < layer.kv_heads, is_value = kv >= layer.kv_heads;
    long row = rows[token], position = positions[token], slot = position - shifts[row];
    global const float *of_token = qkv + (long)token * width * HEAD_DIM, *x = of_token + head * HEAD_DIM;

    int stride = is_key ? layer.k_norm_stride : layer.q_norm_stride, features = HEAD_DIM;
    global const float *weight = is_value ? 0 : is_key ? k_norm : q_norm, *of_norm = x;
    if (stride) {  // all heads together
        features *= is_key ? layer.kv_heads : layer.heads;
        of_norm = is_key ? of_token + layer.heads * HEAD_DIM : of_token;
    }
    if (item == 0)
        has_failed = 0;
    float factor = inverse_rms(of_norm, weight ? features : 0, is_key ? layer.k_eps : layer.q_eps, sums);
    weight = weight ? weight + stride * (is_key ? kv : head) : 0;
    for (int i = item; i < HEAD_DIM; i += ITEMS) {
        normed[i] = weight ? x[i] * factor * weight[i] : x[i];
        if (is_key && !(isfinite(x[i]) && isfinite(x[layer.kv_heads * HEAD_DIM + i])))
            atomic_or(&has_failed, 1);
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    int half_dim = is_value ? 0 : layer.half_dim;
    long turned = is_far ? min(position, (long)layer.last_position) : position;
    long at = ((layer.rope_sets > 1 ? rope_sets[row] : 0) * layer.rope_positions + turned) * half_dim;
    for (int i = item; i < HEAD_DIM; i += ITEMS) {
        float y = normed[i];
        if (i < half_dim)
            y = y * cosines[at + i] - normed[half_dim + i] * sines[at + i];
        else if (i < 2 * half_dim)
            y = y * cosines[at + i - half_dim] + normed[i - half_dim] * sines[at + i - half_dim];
        if (!is_key && !is_value && layer.scale != 1.0f)
            y *= layer.scale;
        if (is_value)
            y = isfinite(y) ? y : 0.0f;
        rotated[i] = is_key && i == 0 && has_failed ? NAN : y;
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    const Blocks *blocks = is_value ? &layer.values : &layer.keys;
    global uchar *block = is_value ? values : keys;
    queries += (is_far ? layer.far_at : 0) + ((long)token * layer.heads + head) * HEAD_DIM;
    int lane = slot % LANES;
    if (is_key || is_value)
        block += block_at(&layer, blocks, table, row, slot, is_value ? kv - layer.kv_heads : kv);
#ifdef KV_q4
    for (int r = item; r < RECORDS; r += ITEMS) {
        float own[BLOCK];
        for (int i = 0; i < BLOCK; i++)
            own[i] = rotated[BLOCK * r + i];
        if (is_value) {
            put_value(own, block + r * VALUE_RECORD, lane);
            continue;
        }
        mix(own);
        if (is_key)
            put_key(own, block + r * KEY_RECORD, lane);
        else
            for (int i = 0; i < BLOCK; i++)
                queries[BLOCK * r + i] = own[i];
    }
#else
    for (int i = item; i < HEAD_DIM; i += ITEMS)
        if (is_key)
            put_float(rotated[i], block, LANES * i + lane);
        else if (is_value)
            put_float(rotated[i], block, lane * HEAD_DIM + i);
        else
            queries[i] = rotated[i];
#endif
}

inline float score_of(global const float *query, global const uchar *block, int lane)
{
    float total = 0.0f;
#ifdef KV_q4
    for (int r = 0; r < RECORDS; r++, block += KEY_RECORD) {
        float sum = 0.0f;
        for (int i = 0; i < BLOCK; i++)
            sum = fused(query[BLOCK * r + i], (float)((global const char *)block)[LANES * i + lane], sum);
        total = fused(sum, half_of(block + LANES * BLOCK, lane), total);
    }
#else
    for (int i = 0; i < HEAD_DIM; i++)
        total = fused(query[i], FLOAT_AT(block, LANES * i + lane), total);
#endif
    return total;
}

// sum + Σ p × element d of the values of a block's first positions, in their order.
inline float add_values(local const float *p, global const uchar *block, int positions, int d, float sum)
{
#ifdef KV_q4
    block += d / BLOCK * VALUE_RECORD;
    global const uchar *scales = block + VALUE_CODES, *codes = block + d % (BLOCK / 2);
    float minima[LANES];
    for (int i = 0; i < positions; i++) {
        int code = codes[BLOCK / 2 * i] >> (d % BLOCK / 16 * 4) & 15;
        sum = fused(p[i] * half_of(scales, i), (float)code, sum);
    }
    for (int i = 0; i < LANES; i++)
        minima[i] = i < positions ? p[i] * half_of(scales, LANES + i) : 0.0f;
    for (int left = LANES / 2; left > 0; left /= 2)
        for (int i = 0; i < left; i++)
            minima[i] += minima[i + left];
    return sum + minima[0];
#else
    for (int i = 0; i < positions; i++) {
        float value = FLOAT_AT(block, i * HEAD_DIM + d);
        sum = d < HEAD_DIM / LANES * LANES ? fused(p[i], value, sum) : sum + p[i] * value;
    }
    return sum;
#endif
}

// A token sees [0, sinks) and [low, high) of a chunk; their blocks are [0, gap) and [first, end).
typedef struct {
    int sinks, low, high, gap, first, end;
} Seen;

inline Seen seen_of(long start, long slot, long sinks, long first_seen)
{
    Seen seen = {min(sinks - start, (long)CHUNK), max(0L, first_seen - start), min((long)CHUNK, slot + 1 - start)};
    if (seen.sinks >= seen.low)
        seen.sinks = seen.low = 0;
    seen.sinks = max(seen.sinks, 0);
    seen.low = min(seen.low, seen.high);
    seen.gap = (seen.sinks + LANES - 1) / LANES * LANES;
    seen.first = max(seen.gap, seen.low / LANES * LANES);
    seen.end = max(seen.gap, (seen.high + LANES - 1) / LANES * LANES);
    return seen;
}

inline bool is_read(Seen seen, int slot)
{
    return slot < seen.gap || slot >= seen.first && slot < seen.end;
}

// The chunk after this one of which a token sees a slot.
inline long next_chunk(long start, long sinks, long first_seen)
{
    start += CHUNK;
    return start < sinks ? start : max(start, first_seen / CHUNK * CHUNK);
}

// A head of a token.
KERNEL attend(
    global const float *queries, global const uchar *keys, global const uchar *values, global const long *table,
    global const long *shifts, global const long *sinks, global const long *windows, global const long *rows,
    global const long *positions, global float *out, Layer layer)
{
    local float p[CHUNK], largest[ITEMS], sums[LANES];
    int head = get_group_id(0), token = get_group_id(1), item = get_local_id(0), kv = head / (layer.heads / layer.kv_heads);
    long row = rows[token], slot = positions[token] - shifts[row], window = windows[row];
    long first_seen = window == 0 ? 0 : max(0L, slot + 1 - window), at_head = ((long)token * layer.heads + head) * HEAD_DIM;
    float merged[OWN_DIMS], merged_m = -INFINITY, merged_sum = 0.0f;
    for (int own = 0; own < OWN_DIMS; own++)
        merged[own] = 0.0f;
    for (long start = next_chunk(-CHUNK, sinks[row], first_seen); start <= slot;
         start = next_chunk(start, sinks[row], first_seen)) {
        Seen seen = seen_of(start, slot, sinks[row], first_seen);
        float m = -INFINITY;
        for (int at = item; at < CHUNK; at += ITEMS) {
            p[at] = -INFINITY;
            if (at < seen.sinks || at >= seen.low && at < seen.high) {
                global const float *query = queries + at_head + (at < seen.gap ? layer.far_at : 0);
                float score = score_of(query, keys + block_at(&layer, &layer.keys, table, row, start + at, kv), at % LANES);
                p[at] = layer.softcap == 0.0f ? score : softcapped(score, layer.softcap);
            }
            m = larger(m, p[at]);
        }
        largest[item] = m;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int other = 0; other < ITEMS; other++)
            m = larger(m, largest[other]);
        for (int at = item; at < CHUNK; at += ITEMS)
            p[at] = m == -INFINITY || !is_read(seen, at) ? 0.0f : exp_below_88(p[at] - m);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < LANES) {
            float sum = 0.0f;
            for (int at = 0; at < CHUNK; at += LANES)  // from `item` on, Intel's compiler may add in another order
                sum += p[at + item];
            sums[item] = sum;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        bool is_less = merged_m > m;
        float left = is_less ? 1.0f : exp_below_88(merged_m - m), right = is_less ? exp_below_88(m - merged_m) : 1.0f;
        int near = seen.gap < seen.first ? seen.sinks : min(seen.gap, seen.high);
        for (int own = 0, d = item; d < HEAD_DIM && m != -INFINITY; own++, d += ITEMS) {
            float part = 0.0f;
            for (int at = 0; at < seen.end; at += LANES)
                if (is_read(seen, at)) {
                    global const uchar *block = values + block_at(&layer, &layer.values, table, row, start + at, kv);
                    part = add_values(p + at, block, min(LANES, (at < seen.gap ? near : seen.high) - at), d, part);
                }
            merged[own] = merged[own] * left + part * right;
        }
        if (m != -INFINITY) {
            merged_sum = merged_sum * left + sum_of(sums) * right;
            merged_m = is_less ? merged_m : m;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int own = 0, d = item; d < HEAD_DIM; own++, d += ITEMS)
        out[at_head + d] = merged[own] / merged_sum;
}
