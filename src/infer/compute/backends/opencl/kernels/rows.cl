// What is done to a row of activations: normalised and quantised, gated, added. A work group has a row, or a part of it.

#ifdef GATED
// activation(gate) × up
#define TIMES_UP(activation) inline float gated_##activation(float gate, float up) { return activation(gate) * up; }
TIMES_UP(silu)
TIMES_UP(gelu_tanh)
TIMES_UP(gelu)
TIMES_UP(gelu_sigmoid)
TIMES_UP(relu)
TIMES_UP(relu_squared)

// (up + 1) × gate × sigmoid(1.702 gate), with gate at most 7 and up between −7 and 7, as in gpt-oss
inline float gated_clamped_swiglu(float gate, float up)
{
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return (up + 1.0f) * gelu_sigmoid(gate > 7.0f ? 7.0f : gate);
}

// Rows [gate, up] → GATED(gate, up)
KERNEL gate_rows(global const float *both, global float *out, int columns)
{
    int column = get_global_id(0);
    both += get_global_id(1) * 2L * columns;
    if (column < columns)
        out[get_global_id(1) * (long)columns + column] = GATED(both[column], both[columns + column]);
}
#endif

// x × weight / rms(x) as records of activations; x itself where there is no weight. Of the rows at `indices`, if given.
// A form is the number of int8 planes; 0 keeps floats, padded to a multiple of BLOCK.
KERNEL normalize_rows(
    global const float *x, global const float *weight, global int *out, global const long *indices, int features,
    float eps, int form)
{
    local float sums[LANES];
    int token = get_global_id(1), first = get_local_id(0);
    x += (indices ? indices[token] : token) * features;
    float factor = inverse_rms(x, weight ? features : 0, eps, sums);
    if (form == 0) {
        int padded = (features + BLOCK - 1) / BLOCK * BLOCK;
        for (int i = first; i < padded; i += ITEMS) {
            float value = i < features ? x[i] : 0.0f;
            out[token * (long)padded + i] = as_int(weight && i < features ? value * factor * weight[i] : value);
        }
        return;
    }
    for (int at = first * BLOCK; at < features; at += ITEMS * BLOCK) {
        float normed[BLOCK];
        for (int i = 0; i < BLOCK; i++)
            normed[i] = weight ? x[at + i] * factor * weight[at + i] : x[at + i];
        quantize_block(normed, form, out + (token * (long)features + at) / BLOCK * RECORD_INTS(form));
    }
}

// residual += y × weight / rms(y)
KERNEL add_normalized(
    global float *residual, global const float *y, global const float *weight, int features, float eps)
{
    local float sums[LANES];
    residual += get_global_id(1) * (long)features;
    y += get_global_id(1) * (long)features;
    float factor = inverse_rms(y, features, eps, sums);
    for (int i = get_local_id(0); i < features; i += ITEMS)
        residual[i] += y[i] * factor * weight[i];
}
