// A row's largest logit, or the largest sum of its logits over the temperature and Gumbel noise, of `sampling.noise`
// in the same order. A row's vocabulary is cut into PARTS, which are merged in order: of equal ones the lowest id wins.

#define LARGEST 3.402823466e38f

constant float log_coefficients[] = LOG_COEFFICIENTS;

inline ulong mix64(ulong x)
{
    x += 0x9E3779B97F4A7C15UL;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9UL;
    x = (x ^ x >> 27) * 0x94D049BB133111EBUL;
    return x ^ x >> 31;
}

inline uint16 mix32(uint16 x)
{
    x = (x ^ x >> 16) * 0x7FEB352DU;
    x = (x ^ x >> 15) * 0x846CA68BU;
    return x ^ x >> 16;
}

inline float16 log_of(float16 x, float16 near, bool has_near)
{
    int16 bits = as_int16(x) + (ONE_BITS - SQRT_HALF_BITS), power = (bits >> 23) - 127;
    float16 exponent = convert_float16(power), fraction = as_float16((bits & 0x7FFFFF) + SQRT_HALF_BITS) - 1.0f;
    if (has_near)
        fraction = select(fraction, near, power == 0);
    float16 polynomial = fraction * log_coefficients[0] + log_coefficients[1];
    for (int i = 2; i < 9; i++)
        polynomial = polynomial * fraction + log_coefficients[i];
    float16 square = fraction * fraction;
    float16 tail = polynomial * fraction * square + exponent * LN2_LOW_32 - square * 0.5f;
    return fraction + tail + exponent * LN2_HIGH_32;
}

// −ln(−ln(1 − V)), V = (h + ½) / 2³², of 16 tokens' hashes.
inline float16 gumbel_of(uint16 h)
{
    const float unit = 2.3283064365386963e-10f;
    float16 near = (convert_float16(h) + 0.5f) * -unit, surprise = log_of((convert_float16(~h) + 0.5f) * unit, near, true);
    return -log_of(-surprise, near, false);
}

// Logits of 16 tokens as they are; *x: −∞ where a mask, or the end of the vocabulary, leaves nothing.
inline float16 load_logits(global const float *logits, global const uint *allowed, int first, int vocab, float16 *x)
{
    float16 raw = load_upto(logits + first, vocab - first);
    int16 is_kept = LANE_NUMBERS < vocab - first;
    if (allowed)
        is_kept = is_kept && ((int16)(allowed[first / 32] >> first % 32) >> LANE_NUMBERS & 1) != 0;
    *x = select((float16)-INFINITY, raw, is_kept);
    return raw;
}

inline int2 part_of(int vocab)
{
    int size = (vocab + PARTS * 16 - 1) / (PARTS * 16) * 16, first = get_global_id(0) * size;
    return (int2)(first, min(first + size, vocab));
}

// Of each part; NaN where any logit is NaN or +∞, allowed or not.
kernel void find_largest(
    global const float *logits, int stride, int vocab, global const uint *masks, int mask_words,
    global const long *control, global float *largest)
{
    int line = get_global_id(1);
    int2 part = part_of(vocab);
    global const uint *allowed = control[3] ? masks + line * mask_words : 0;
    float16 most = -INFINITY, x;
    int16 has_failed = 0;
    for (int first = part.x; first < part.y; first += 16) {
        float16 raw = load_logits(logits + line * (long)stride, allowed, first, vocab, &x);
        has_failed |= !(raw < INFINITY);
        most = larger(x, most);
    }
    largest[line * PARTS + get_global_id(0)] = sum_of_ints(has_failed) ? NAN : largest_of(most);
}

// Each part's best token and its score; a negative code where there is none.
kernel void score(
    global const float *logits, int stride, int vocab, global const uint *masks, int mask_words,
    global const long *control, global const float *largest, global const float *temperatures,
    global const long *seeds, global const long *positions, global const long *logit_indices, global float *scores,
    global int *found)
{
    int line = get_global_id(1), at = line * PARTS + get_global_id(0);
    int2 part = part_of(vocab);
    global const uint *allowed = control[3] ? masks + line * mask_words : 0;
    float top = -INFINITY, best = -INFINITY, temperature = temperatures[line];
    for (int i = 0; i < PARTS; i++)
        top = top >= largest[line * PARTS + i] ? top : isnan(top) ? top : largest[line * PARTS + i];
    scores[at] = best;
    found[at] = isnan(top) ? NOT_A_NUMBER : NOTHING_ALLOWED;
    if (!(top > -INFINITY) || temperature == 0.0f && largest[at] != top)
        return;
    float quotient = top / temperature, shift = quotient > LARGEST || quotient < -LARGEST ? top : 0.0f;
    ulong key = mix64(mix64(seeds[line]) + positions[logit_indices[line]] + 1);
    for (int first = part.x; first < part.y; first += 16) {
        float16 x, y;
        load_logits(logits + line * (long)stride, allowed, first, vocab, &x);
        if (temperature == 0.0f)
            y = x;
        else {
            y = temperature == 1.0f ? x : (x - shift) / temperature;
            y = select(min(max(y, (float16)-LARGEST), (float16)LARGEST), x, x == -INFINITY);
            if (largest_of(y) + MAX_NOISE < best)
                continue;
            y = y + gumbel_of(mix32(mix32((as_uint16(LANE_NUMBERS) + (uint)first) ^ (uint)key) + (uint)(key >> 32)));
        }
        float score = largest_of(y);
        if (score > best) {
            float each[16];
            vstore16(y, 0, each);
            int lane = 0;
            while (each[lane] != score)
                lane++;
            best = score;
            found[at] = first + lane;
        }
    }
    scores[at] = best;
}

// The token of a row.
kernel void choose(global const float *scores, global const int *found, global long *sampled)
{
    int line = get_global_id(1), token = NOTHING_ALLOWED;
    float best = -INFINITY;
    for (int at = line * PARTS; at < (line + 1) * PARTS && token != NOT_A_NUMBER; at++)
        if (found[at] == NOT_A_NUMBER || found[at] >= 0 && scores[at] > best) {
            token = found[at];
            best = scores[at];
        }
    sampled[line] = token;
}

// Of tokens the next step's input. `control`: steps that count, whether they are over, how many stop ids there are,
// whether there are masks.
kernel void advance(
    global const long *sampled, global const int *count, global long *tokens, global long *positions,
    global long *control, global long *has_ended, global const long *stop_ids, global long *generated)
{
    if (control[1])
        return;
    int num_rows = *count, num_ended = 0, has_failed = 0;
    for (int row = 0; row < num_rows; row++) {
        long token = sampled[row];
        generated[control[0] * num_rows + row] = token;
        for (int i = 0; i < control[2]; i++)
            has_ended[row] |= stop_ids[i] == token;
        num_ended += has_ended[row];
        has_failed |= token < 0;
        tokens[row] = max(token, 0L);
        positions[row]++;
    }
    control[0]++;
    control[1] = has_failed || num_ended == num_rows;
}
