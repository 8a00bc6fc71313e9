// Attention over cached blocks of 16 positions, whose bytes `quantization.kv_layout` defines, in chunks of 256 slots: a
// chunk gives (largest score m, Σ e^(s − m), Σ e^(s − m) v), and these are merged in the order of the chunks. So a
// token's bits depend on nothing but the token; the order of all sums is that of `backends.cpu.attention.attention`.

#define CHUNK 256
#define ROOM ((HEAD_DIM + 15) / 16 * 16)
#define RECORDS (HEAD_DIM / BLOCK)
#if defined(KV_q8) || defined(KV_q4)
#define IS_CODED
#endif
#define KEY_RECORD (16 * BLOCK + 32)  // bytes: codes of 16 positions, then their scales
#ifdef KV_q4
#define VALUE_CODES (16 * 16)
#define VALUE_RECORD (VALUE_CODES + 64)  // with minima
#else
#define VALUE_CODES (16 * BLOCK)
#define VALUE_RECORD (VALUE_CODES + 32)
#endif
#if defined(KV_f32)
#define SIZE 4  // bytes of a float
#define LOAD_16(at) vload16(0, (global const float *)(at))
#define LOAD_1(at) (*(global const float *)(at))
#elif defined(KV_f16)
#define SIZE 2
#define LOAD_16(at) vload_half16(0, (global const half *)(at))
#define LOAD_1(at) vload_half(0, (global const half *)(at))
#else
#define SIZE 2
#define LOAD_16(at) as_float16(convert_uint16(vload16(0, (global const ushort *)(at))) << 16)
#define LOAD_1(at) as_float((uint)*(global const ushort *)(at) << 16)
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
    long block = (slot & (1L << layer->page_bits) - 1) / 16;
    return blocks->first + page * blocks->page + head * blocks->head + block * blocks->block;
}

// 1, or NaN if an element of a key or of its value is not finite.
inline float one_or_nan(global const float *key, global const float *value)
{
    float zero = 0.0f;
    for (int i = 0; i < HEAD_DIM; i++)
        zero += key[i] * 0.0f + value[i] * 0.0f;
    return zero + 1.0f;
}

// scale × rotate(x × factor × weight), mixed where codes are. `mark` multiplies the first element before it is mixed.
inline void rotate_head(
    global const float *x, global const float *weight, float factor, global const float *cosines,
    global const float *sines, int half_dim, float scale, float mark, float *out)
{
    for (int i = 0; i < HEAD_DIM; i++)
        out[i] = weight ? x[i] * factor * weight[i] : x[i];
    for (int i = 0; i < half_dim; i++) {
        float first = out[i], second = out[half_dim + i];
        out[i] = first * cosines[i] - second * sines[i];
        out[half_dim + i] = second * cosines[i] + first * sines[i];
    }
    for (int i = 0; i < HEAD_DIM && scale != 1.0f; i++)
        out[i] *= scale;
    out[0] *= mark;
#ifdef IS_CODED
    for (int at = 0; at < HEAD_DIM; at += BLOCK) {
        for (int apart = 16; apart > 0; apart /= 2)
            for (int i = at; i < at + BLOCK; i++)
                if (!(i & apart)) {
                    float first = out[i], second = out[i + apart];
                    out[i] = first + second;
                    out[i + apart] = first - second;
                }
        for (int i = at; i < at + BLOCK; i++)
            out[i] *= 0.17677669529663687f;  // 1 / √32
    }
#endif
}

inline float saturated(float x, float largest)
{
    return x > largest ? largest : x < -largest ? -largest : x;
}

inline void put_half(float x, global half *at)
{
    vstore_half_rte(saturated(x, 65504.0f), 0, at);
}

inline int16 steps_of(float16 x, float scale, float low, float high)
{
    return nearest(clamp(x / (scale == 0.0f ? 1.0f : scale), low, high));
}

// 32 floats → codes `step` bytes apart, and the scale.
inline void put_8(const float *x, global char *codes, int step, global half *scale)
{
    float16 first = vload16(0, x), second = vload16(1, x);
    put_half(largest_of(larger(fabs(first), fabs(second))) / 127.0f, scale);
    float rounded = vload_half(0, scale);
    int each[BLOCK];
    vstore16(steps_of(first, rounded, -127.0f, 127.0f), 0, each);
    vstore16(steps_of(second, rounded, -127.0f, 127.0f), 1, each);
    for (int i = 0; i < BLOCK; i++)
        codes[i * step] = each[i];
}

// 32 floats → 16 bytes of codes, scale and minimum.
inline void put_4(const float *x, global uchar *codes, global half *scale, global half *minimum)
{
    float16 first = vload16(0, x), second = vload16(1, x);
    float most = largest_of(larger(first, second)), least = -largest_of(larger(-first, -second));
    put_half((most - least) / 15.0f, scale);
    put_half(least, minimum);
    float rounded = vload_half(0, scale), from = vload_half(0, minimum);
    int16 low = steps_of(first - from, rounded, 0.0f, 15.0f), high = steps_of(second - from, rounded, 0.0f, 15.0f);
    vstore16(convert_uchar16(low + high * 16), 0, codes);
}

inline void put_float(global uchar *at, float x)
{
#if defined(KV_f32)
    *(global float *)at = x;
#elif defined(KV_f16)
    put_half(x, (global half *)at);
#else
    uint bits = as_uint(saturated(x, 0x1.FEp127f));
    *(global ushort *)at = isnan(x) ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#endif
}

inline void put_key(const float *x, global uchar *block, int lane)
{
#ifdef IS_CODED
    for (int r = 0; r < RECORDS; r++, block += KEY_RECORD)
        put_8(x + BLOCK * r, (global char *)block + lane, 16, (global half *)(block + 16 * BLOCK) + lane);
#else
    for (int i = 0; i < HEAD_DIM; i++)
        put_float(block + (16 * i + lane) * SIZE, x[i]);
#endif
}

inline void put_value(const float *x, global uchar *block, int lane)
{
#ifdef IS_CODED
    for (int r = 0; r < RECORDS; r++, block += VALUE_RECORD) {
        global half *scale = (global half *)(block + VALUE_CODES) + lane;
#ifdef KV_q4
        put_4(x + BLOCK * r, block + 16 * lane, scale, scale + 16);
#else
        put_8(x + BLOCK * r, (global char *)block + BLOCK * lane, 1, scale);
#endif
    }
#else
    for (int i = 0; i < HEAD_DIM; i++)
        put_float(block + (lane * HEAD_DIM + i) * SIZE, x[i]);
#endif
}

// A head of q → queries; of k, v → cache. A value is finite there; if it or its key is not, the key is NaN
// (`kv_layout.storable`).
kernel void rotate_append(
    global const float *qkv, global const float *q_norm, global const float *k_norm, global const float *cosines,
    global const float *sines, global const long *table, global const long *shifts, global const long *rope_sets,
    global const long *rows, global const long *positions, global float *queries, global uchar *keys,
    global uchar *values, Layer layer)
{
    int head = get_global_id(0), token = get_global_id(1), kv = head - layer.heads;
    long row = rows[token], position = positions[token], slot = position - shifts[row];
    int width = layer.heads + 2 * layer.kv_heads;
    global const float *of_token = qkv + (long)token * width * HEAD_DIM, *x = of_token + head * HEAD_DIM;
    float rotated[ROOM];
    if (kv >= layer.kv_heads) {
        for (int i = 0; i < HEAD_DIM; i++)
            rotated[i] = isfinite(x[i]) ? x[i] : 0.0f;
        kv -= layer.kv_heads;
        put_value(rotated, values + block_at(&layer, &layer.values, table, row, slot, kv), slot % 16);
        return;
    }
    int is_key = kv >= 0, stride = is_key ? layer.k_norm_stride : layer.q_norm_stride;
    global const float *weight = is_key ? k_norm : q_norm;
    float eps = is_key ? layer.k_eps : layer.q_eps, factor = 1.0f;
    if (weight && stride == 0)
        factor = inverse_rms(x, HEAD_DIM, eps);
    else if (weight) {
        factor = inverse_rms(is_key ? of_token + layer.heads * HEAD_DIM : of_token,
                             HEAD_DIM * (is_key ? layer.kv_heads : layer.heads), eps);
        weight += stride * (is_key ? kv : head);
    }
    long set = layer.rope_sets > 1 ? rope_sets[row] : 0;
    long at = (set * layer.rope_positions + position) * layer.half_dim;
    float mark = is_key ? one_or_nan(x, x + layer.kv_heads * HEAD_DIM) : 1.0f;
    rotate_head(
        x, weight, factor, cosines + at, sines + at, layer.half_dim, is_key ? 1.0f : layer.scale, mark, rotated);
    if (is_key) {
        put_key(rotated, keys + block_at(&layer, &layer.keys, table, row, slot, kv), slot % 16);
        return;
    }
    queries += ((long)token * layer.heads + head) * HEAD_DIM;
    for (int i = 0; i < HEAD_DIM; i++)
        queries[i] = rotated[i];
    if (layer.far_at) {
        at += min(0L, layer.last_position - position) * layer.half_dim;
        rotate_head(x, weight, factor, cosines + at, sines + at, layer.half_dim, layer.scale, mark, rotated);
        for (int i = 0; i < HEAD_DIM; i++)
            queries[layer.far_at + i] = rotated[i];
    }
}

// Of 16 positions.
inline float16 scores_of(global const float *query, global const uchar *block)
{
    float16 total = 0.0f;
#ifdef IS_CODED
    for (int r = 0; r < RECORDS; r++, block += KEY_RECORD) {
        float16 sum = 0.0f;
        for (int i = 0; i < BLOCK; i++)
            sum = fma((float16)query[BLOCK * r + i], convert_float16(vload16(i, (global const char *)block)), sum);
        total = fma(sum, vload_half16(0, (global const half *)(block + 16 * BLOCK)), total);
    }
#else
    for (int i = 0; i < HEAD_DIM; i++)
        total = fma((float16)query[i], LOAD_16(block + 16 * i * SIZE), total);
#endif
    return total;
}

// sums += Σ p × value of a block's first positions, in their order.
inline void add_values(const float *p, global const uchar *block, int positions, float *sums)
{
#ifdef IS_CODED
    for (int r = 0; r < RECORDS; r++, block += VALUE_RECORD) {
        global const half *scales = (global const half *)(block + VALUE_CODES);
        float scaled[16];
        vstore16(vload16(0, p) * vload_half16(0, scales), 0, scaled);
        float16 left = vload16(2 * r, sums), right = vload16(2 * r + 1, sums);
        for (int i = 0; i < positions; i++) {
#ifdef KV_q4
            int16 both = convert_int16(vload16(i, block)), first = both & 15, second = both >> 4;
#else
            int16 first = convert_int16(vload16(2 * i, (global const char *)block));
            int16 second = convert_int16(vload16(2 * i + 1, (global const char *)block));
#endif
            left = fma((float16)scaled[i], convert_float16(first), left);
            right = fma((float16)scaled[i], convert_float16(second), right);
        }
#ifdef KV_q4
        float minima = sum_of(select((float16)0.0f, vload16(0, p) * vload_half16(1, scales), LANE_NUMBERS < positions));
        left += minima;
        right += minima;
#endif
        vstore16(left, 2 * r, sums);
        vstore16(right, 2 * r + 1, sums);
    }
#else
    for (int v = 0; v < HEAD_DIM / 16; v++) {
        float16 sum = vload16(v, sums);
        for (int i = 0; i < positions; i++)
            sum = fma((float16)p[i], LOAD_16(block + (i * HEAD_DIM + 16 * v) * SIZE), sum);
        vstore16(sum, v, sums);
    }
    for (int d = HEAD_DIM / 16 * 16; d < HEAD_DIM; d++)
        for (int i = 0; i < positions; i++)
            sums[d] += p[i] * LOAD_1(block + (i * HEAD_DIM + d) * SIZE);
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
    seen.gap = (seen.sinks + 15) / 16 * 16;
    seen.first = max(seen.gap, seen.low / 16 * 16);
    seen.end = max(seen.gap, (seen.high + 15) / 16 * 16);
    return seen;
}

inline int next_block(Seen seen, int at)
{
    return at < seen.gap && at + 16 >= seen.gap ? seen.first : at + 16;
}

// Scores of a chunk → e^(s − m); m and their sum.
inline float2 softmax_chunk(
    global const float *query, const Layer *layer, global const uchar *keys, global const long *table, long row, int kv,
    long start, Seen seen, float *p)
{
    float16 most = -INFINITY, total = 0.0f;
    int begin = seen.gap > 0 ? 0 : seen.first;
    for (int at = begin; at < seen.end; at = next_block(seen, at)) {
        global const uchar *block = keys + block_at(layer, &layer->keys, table, row, start + at, kv);
        float16 scores = scores_of(query + (at < seen.gap ? layer->far_at : 0), block);
        if (layer->softcap != 0.0f)
            scores = softcapped(scores, layer->softcap);
        int16 slots = LANE_NUMBERS + at;
        int16 is_seen = slots < seen.sinks || slots >= seen.low && slots < seen.high;
        scores = select((float16)-INFINITY, scores, is_seen);
        vstore16(scores, 0, p + at);
        most = larger(scores, most);
    }
    float m = largest_of(most);
    if (m == -INFINITY)
        return (float2)(m, 0.0f);
    for (int at = begin; at < seen.end; at = next_block(seen, at)) {
        float16 e = exp16(vload16(0, p + at) - m);
        vstore16(e, 0, p + at);
        total += e;
    }
    return (float2)(m, sum_of(total));
}

inline float exp_1(float x)
{
    return exp16((float16)x).s0;
}

// A head of a token: floats, or quantised records.
kernel void attend(
    global const float *queries, global const uchar *keys, global const uchar *values, global const long *table,
    global const long *shifts, global const long *sinks, global const long *windows, global const long *rows,
    global const long *positions, global float *out, global int *quantized, int planes, Layer layer)
{
    int head = get_global_id(0), token = get_global_id(1), kv = head / (layer.heads / layer.kv_heads);
    long row = rows[token], slot = positions[token] - shifts[row], window = windows[row];
    long first_seen = window == 0 ? 0 : max(0L, slot + 1 - window), at_head = ((long)token * layer.heads + head) * HEAD_DIM;
    float p[CHUNK], part[ROOM], sums[ROOM];
    float2 merged = (float2)(-INFINITY, 0.0f);
    for (int i = 0; i < ROOM; i++)
        sums[i] = 0.0f;
    for (long start = 0; start <= slot; start += CHUNK) {
        Seen seen = seen_of(start, slot, sinks[row], first_seen);
        if (seen.sinks == 0 && seen.low >= seen.high)
            continue;
        float2 own = softmax_chunk(queries + at_head, &layer, keys, table, row, kv, start, seen, p);
        if (own.x == -INFINITY)
            continue;
        for (int i = 0; i < ROOM; i++)
            part[i] = 0.0f;
        int near = seen.gap < seen.first ? seen.sinks : min(seen.gap, seen.high);
        for (int at = seen.gap > 0 ? 0 : seen.first; at < seen.end; at = next_block(seen, at)) {
            int inside = min(16, (at < seen.gap ? near : seen.high) - at);
            add_values(p + at, values + block_at(&layer, &layer.values, table, row, start + at, kv), inside, part);
        }
        bool is_less = merged.x > own.x;
        float left = is_less ? 1.0f : exp_1(merged.x - own.x), right = is_less ? exp_1(own.x - merged.x) : 1.0f;
        for (int i = 0; i < ROOM; i++)
            sums[i] = sums[i] * left + part[i] * right;
        merged = (float2)(is_less ? merged.x : own.x, merged.y * left + own.y * right);
    }
    for (int i = 0; i < ROOM; i++)
        sums[i] /= merged.y;
    for (int r = 0; quantized && r < RECORDS; r++)
        quantize_block(vload16(2 * r, sums), vload16(2 * r + 1, sums), planes,
                       quantized + (at_head / BLOCK + r) * RECORD_INTS(planes));
    for (int i = 0; !quantized && i < HEAD_DIM; i++)
        out[at_head + i] = sums[i];
}
