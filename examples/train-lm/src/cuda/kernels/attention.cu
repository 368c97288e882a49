// Causal attention of any head width and either type, a warp for each row: for float32, and for heads that the tensor cores' kernels
// do not take. Queries and outputs are [batch * seq, heads, HEAD_DIM], keys and values the same with kv_heads; the log-sum-exps, in
// units of log 2, and delta are [batch, heads, seq]. `scale` is that of the scores.
#define LANE_DIMS ((HEAD_DIM + 31) / 32)
#define LOG2E 1.44269504f

struct Row {
    float v[LANE_DIMS];
};

__device__ __forceinline__ Row zero_row() {
    Row row;
#pragma unroll
    for (u32 k = 0; k < LANE_DIMS; ++k) row.v[k] = 0.0f;
    return row;
}

__device__ __forceinline__ Row load_row(const real* p) {
    Row row;
#pragma unroll
    for (u32 k = 0; k < LANE_DIMS; ++k) {
        const u32 i = (threadIdx.x & 31) + 32 * k;
        row.v[k] = i < HEAD_DIM ? to_float(p[i]) : 0.0f;
    }
    return row;
}

__device__ __forceinline__ void store_row(real* p, const Row& row, float scale) {
#pragma unroll
    for (u32 k = 0; k < LANE_DIMS; ++k) {
        const u32 i = (threadIdx.x & 31) + 32 * k;
        if (i < HEAD_DIM) put(p + i, row.v[k] * scale);
    }
}

__device__ __forceinline__ float dot(const Row& a, const Row& b) {
    float sum = 0.0f;
#pragma unroll
    for (u32 k = 0; k < LANE_DIMS; ++k) sum += a.v[k] * b.v[k];
    return warp_sum(sum);
}

__device__ __forceinline__ void add(Row& to, const Row& from, float scale) {
#pragma unroll
    for (u32 k = 0; k < LANE_DIMS; ++k) to.v[k] += from.v[k] * scale;
}

// The row of a warp, its head and its batch: blocks (rows / 4, heads, batch) of 128 threads.
#define WARP_ROW (blockIdx.x * 4 + (threadIdx.x >> 5))
#define AT(row, head, count) (((u64)(blockIdx.z * seq + (row)) * (count) + (head)) * HEAD_DIM)

extern "C" __global__ void attention_forward_rows(
    const real* q, const real* k, const real* v, real* out, float* lse, u32 seq, u32 heads, u32 kv_heads, float scale
) {
    const u32 row = WARP_ROW, head = blockIdx.y, kv = head / (heads / kv_heads);
    if (row >= seq) return;
    const Row query = load_row(q + AT(row, head, heads));
    Row sum = zero_row();
    float top = -INFINITY, total = 0.0f;
    for (u32 key = 0; key <= row; ++key) {
        const float score = dot(query, load_row(k + AT(key, kv, kv_heads))) * scale * LOG2E;
        const float best = fmaxf(top, score), shrink = exp2f(top - best), weight = exp2f(score - best);
        const Row value = load_row(v + AT(key, kv, kv_heads));
#pragma unroll
        for (u32 i = 0; i < LANE_DIMS; ++i) sum.v[i] = sum.v[i] * shrink + value.v[i] * weight;
        total = total * shrink + weight;
        top = best;
    }
    store_row(out + AT(row, head, heads), sum, 1.0f / total);
    if ((threadIdx.x & 31) == 0) lse[((u64)blockIdx.z * heads + head) * seq + row] = top + log2f(total);
}

extern "C" __global__ void attention_query_rows(
    const real* q, const real* k, const real* v, const real* dout, const float* lse, const float* delta, real* dq, u32 seq, u32 heads,
    u32 kv_heads, float scale
) {
    const u32 row = WARP_ROW, head = blockIdx.y, kv = head / (heads / kv_heads);
    if (row >= seq) return;
    const Row query = load_row(q + AT(row, head, heads)), d = load_row(dout + AT(row, head, heads));
    const u64 at = ((u64)blockIdx.z * heads + head) * seq + row;
    Row sum = zero_row();
    for (u32 key = 0; key <= row; ++key) {
        const Row other = load_row(k + AT(key, kv, kv_heads));
        const float weight = exp2f(dot(query, other) * scale * LOG2E - lse[at]);
        add(sum, other, weight * (dot(d, load_row(v + AT(key, kv, kv_heads))) - delta[at]));
    }
    store_row(dq + AT(row, head, heads), sum, scale);
}

extern "C" __global__ void attention_key_rows(
    const real* q, const real* k, const real* v, const real* dout, const float* lse, const float* delta, real* dk, real* dv, u32 seq,
    u32 heads, u32 kv_heads, float scale
) {
    const u32 row = WARP_ROW, kv = blockIdx.y, group = heads / kv_heads;
    if (row >= seq) return;
    const Row key = load_row(k + AT(row, kv, kv_heads)), value = load_row(v + AT(row, kv, kv_heads));
    Row sum_k = zero_row(), sum_v = zero_row();
    for (u32 head = kv * group; head < (kv + 1) * group; ++head) {
        for (u32 other = row; other < seq; ++other) {
            const Row query = load_row(q + AT(other, head, heads)), d = load_row(dout + AT(other, head, heads));
            const u64 at = ((u64)blockIdx.z * heads + head) * seq + other;
            const float weight = exp2f(dot(query, key) * scale * LOG2E - lse[at]);
            add(sum_v, d, weight);
            add(sum_k, query, weight * (dot(d, value) - delta[at]));
        }
    }
    store_row(dk + AT(row, kv, kv_heads), sum_k, scale);
    store_row(dv + AT(row, kv, kv_heads), sum_v, 1.0f);
}
