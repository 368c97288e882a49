// Norms, rotary embedding, SwiGLU, dropout, embedding and loss.

// y = x / rms(x) * w, a block for each row of n elements.
extern "C" __global__ void rms_forward(const real* x, const real* w, real* y, u32 n, float eps) {
    const u64 row = (u64)blockIdx.x * n;
    float sum = 0.0f;
    for (u32 i = threadIdx.x * VEC; i < n; i += blockDim.x * VEC) {
        const Pack p = load(x + row + i);
#pragma unroll
        for (u32 j = 0; j < VEC; ++j) sum += to_float(p.v[j]) * to_float(p.v[j]);
    }
    const float rrms = rsqrtf(block_sum(sum, 0.0f).x / (float)n + eps);
    for (u32 i = threadIdx.x * VEC; i < n; i += blockDim.x * VEC) {
        Pack p = load(x + row + i);
        const Pack scale = load(w + i);
#pragma unroll
        for (u32 j = 0; j < VEC; ++j) put(&p.v[j], to_float(p.v[j]) * rrms * to_float(scale.v[j]));
        store(y + row + i, p);
    }
}

// dx = residual + the gradient through y = x / rms(x) * w; residual may be absent, or dx itself. Each block leaves its rows' part of
// the weights' gradient at `parts`, a row of n floats a block.
extern "C" __global__ void rms_backward(
    const real* x, const real* w, const real* dy, const real* residual, real* dx, float* parts, u32 rows, u32 n, float eps
) {
    extern __shared__ float dw[];
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) dw[i] = 0.0f;
    __syncthreads();
    for (u32 r = blockIdx.x; r < rows; r += gridDim.x) {
        const u64 row = (u64)r * n;
        float squares = 0.0f, product = 0.0f;
        for (u32 i = threadIdx.x * VEC; i < n; i += blockDim.x * VEC) {
            const Pack p = load(x + row + i), d = load(dy + row + i), scale = load(w + i);
#pragma unroll
            for (u32 j = 0; j < VEC; ++j) {
                const float v = to_float(p.v[j]);
                squares += v * v;
                product += v * to_float(d.v[j]) * to_float(scale.v[j]);
            }
        }
        const float2 sums = block_sum(squares, product);
        const float rrms = rsqrtf(sums.x / (float)n + eps);
        const float slope = sums.y / (float)n * rrms * rrms * rrms;
        for (u32 i = threadIdx.x * VEC; i < n; i += blockDim.x * VEC) {
            const Pack p = load(x + row + i), d = load(dy + row + i), scale = load(w + i);
            Pack out;
            if (residual) out = load(residual + row + i);
#pragma unroll
            for (u32 j = 0; j < VEC; ++j) {
                const float v = to_float(p.v[j]), g = to_float(d.v[j]);
                const float through = g * to_float(scale.v[j]) * rrms - v * slope;
                put(&out.v[j], residual ? to_float(out.v[j]) + through : through);
                // These columns are this thread's in every row.
                dw[i + j] += g * v * rrms;
            }
            store(dx + row + i, out);
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) parts[(u64)blockIdx.x * n + i] = dw[i];
}

// Adds the sum of `count` rows of n floats to a gradient. Eight threads share a column.
extern "C" __global__ void add_parts(const float* parts, grad* gradient, u32 count, u32 n) {
    __shared__ float sums[8][32];
    const u32 column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < n)
        for (u32 i = threadIdx.y; i < count; i += 8) sum += parts[(u64)i * n + column];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < n) {
        for (u32 i = 1; i < 8; ++i) sum += sums[i][threadIdx.x];
        put(gradient + column, to_float(gradient[column]) + sum);
    }
}

// Cosine and sine of each position's angle for each of the HEAD_DIM / 2 pairs.
extern "C" __global__ void rotary_table(float2* table, u32 seq, float log2_theta) {
    const u32 half = HEAD_DIM / 2;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < seq * half; i += gridDim.x * blockDim.x) {
        const float frequency = exp2f(-log2_theta * (float)(2 * (i % half)) / (float)HEAD_DIM);
        float sine, cosine;
        sincosf((float)(i / half) * frequency, &sine, &cosine);
        table[i] = make_float2(cosine, sine);
    }
}

// Pairs of a head that one lane holds.
#define PAIRS ((HEAD_DIM / 2 + 31) / 32)

// One head of queries or keys, normed and then rotated: a warp for each. `table` is that of rotary_table.
extern "C" __global__ void qk_forward(
    const real* x, const real* w, const float2* table, real* y, u32 rows, u32 heads, u32 seq, float eps
) {
    const u32 half = HEAD_DIM / 2, lane = threadIdx.x & 31;
    const u32 row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= rows) return;
    const real* from = x + (u64)row * HEAD_DIM;
    real* to = y + (u64)row * HEAD_DIM;
    table += (u64)(row / heads % seq) * half;
    float a[PAIRS], b[PAIRS], sum = 0.0f;
#pragma unroll
    for (u32 k = 0; k < PAIRS; ++k) {
        const u32 i = lane + 32 * k;
        a[k] = i < half ? to_float(from[i]) : 0.0f;
        b[k] = i < half ? to_float(from[i + half]) : 0.0f;
        sum += a[k] * a[k] + b[k] * b[k];
    }
    const float rrms = rsqrtf(warp_sum(sum) / (float)HEAD_DIM + eps);
#pragma unroll
    for (u32 k = 0; k < PAIRS; ++k) {
        const u32 i = lane + 32 * k;
        if (i >= half) continue;
        const float first = a[k] * rrms * to_float(w[i]), second = b[k] * rrms * to_float(w[i + half]);
        const float2 turn = table[i];
        put(to + i, first * turn.x - second * turn.y);
        put(to + i + half, second * turn.x + first * turn.y);
    }
}

// The gradient through qk_forward, in place: d becomes that of x. Each block leaves its part of the weights' gradient at `parts`.
extern "C" __global__ void qk_backward(
    const real* x, const real* w, const float2* table, real* d, float* parts, u32 rows, u32 heads, u32 seq, float eps
) {
    __shared__ float shared[8][HEAD_DIM];
    const u32 half = HEAD_DIM / 2, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float dw_a[PAIRS], dw_b[PAIRS];
#pragma unroll
    for (u32 k = 0; k < PAIRS; ++k) dw_a[k] = dw_b[k] = 0.0f;
    for (u32 row = blockIdx.x * 8 + warp; row < rows; row += gridDim.x * 8) {
        const real* from = x + (u64)row * HEAD_DIM;
        real* gradient = d + (u64)row * HEAD_DIM;
        const float2* turns = table + (u64)(row / heads % seq) * half;
        float a[PAIRS], b[PAIRS], da[PAIRS], db[PAIRS], squares = 0.0f, product = 0.0f;
#pragma unroll
        for (u32 k = 0; k < PAIRS; ++k) {
            const u32 i = lane + 32 * k;
            a[k] = b[k] = da[k] = db[k] = 0.0f;
            if (i >= half) continue;
            a[k] = to_float(from[i]);
            b[k] = to_float(from[i + half]);
            const float2 turn = turns[i];
            const float first = to_float(gradient[i]), second = to_float(gradient[i + half]);
            da[k] = first * turn.x + second * turn.y;
            db[k] = second * turn.x - first * turn.y;
            squares += a[k] * a[k] + b[k] * b[k];
            product += a[k] * da[k] * to_float(w[i]) + b[k] * db[k] * to_float(w[i + half]);
        }
        const float rrms = rsqrtf(warp_sum(squares) / (float)HEAD_DIM + eps);
        const float slope = warp_sum(product) / (float)HEAD_DIM * rrms * rrms * rrms;
#pragma unroll
        for (u32 k = 0; k < PAIRS; ++k) {
            const u32 i = lane + 32 * k;
            if (i >= half) continue;
            dw_a[k] += da[k] * a[k] * rrms;
            dw_b[k] += db[k] * b[k] * rrms;
            put(gradient + i, da[k] * to_float(w[i]) * rrms - a[k] * slope);
            put(gradient + i + half, db[k] * to_float(w[i + half]) * rrms - b[k] * slope);
        }
    }
#pragma unroll
    for (u32 k = 0; k < PAIRS; ++k) {
        const u32 i = lane + 32 * k;
        if (i >= half) continue;
        shared[warp][i] = dw_a[k];
        shared[warp][i + half] = dw_b[k];
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < HEAD_DIM; i += blockDim.x) {
        float sum = shared[0][i];
        for (u32 j = 1; j < 8; ++j) sum += shared[j][i];
        parts[(u64)blockIdx.x * HEAD_DIM + i] = sum;
    }
}

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

// y = silu(gate) * up, n elements.
extern "C" __global__ void swiglu_forward(const real* gate, const real* up, real* y, u64 n) {
    for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * VEC; i < n; i += (u64)gridDim.x * blockDim.x * VEC) {
        const Pack g = load(gate + i), u = load(up + i);
        Pack out;
#pragma unroll
        for (u32 j = 0; j < VEC; ++j) {
            const float v = to_float(g.v[j]);
            put(&out.v[j], v * sigmoid(v) * to_float(u.v[j]));
        }
        store(y + i, out);
    }
}

// From the gradient of y to those of gate and of up, the latter in its place; and y again.
extern "C" __global__ void swiglu_backward(const real* gate, const real* up, real* dy_dup, real* dgate, real* y, u64 n) {
    for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * VEC; i < n; i += (u64)gridDim.x * blockDim.x * VEC) {
        const Pack g = load(gate + i), u = load(up + i);
        Pack d = load(dy_dup + i), dg, out;
#pragma unroll
        for (u32 j = 0; j < VEC; ++j) {
            const float v = to_float(g.v[j]), w = to_float(u.v[j]), dv = to_float(d.v[j]);
            const float s = sigmoid(v), silu = v * s;
            put(&out.v[j], silu * w);
            put(&dg.v[j], dv * w * s * (1.0f + v * (1.0f - s)));
            put(&d.v[j], dv * silu);
        }
        store(y + i, out);
        store(dgate + i, dg);
        store(dy_dup + i, d);
    }
}

// SplitMix64's output function.
__device__ __forceinline__ u64 finalise(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// y = residual + mask * branch, or mask * branch where residual is absent. Elements share words of the stream that starts at
// `state`, two each; see dropout.rs.
extern "C" __global__ void dropout(const real* branch, const real* residual, real* y, u64 n, u64 state, u64 threshold, float scale) {
    for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * VEC; i < n; i += (u64)gridDim.x * blockDim.x * VEC) {
        const Pack b = load(branch + i);
        Pack out;
        if (residual) out = load(residual + i);
#pragma unroll
        for (u32 j = 0; j < VEC; j += 2) {
            const u64 word = finalise(state + ((i + j) / 2 + 1) * 0x9e3779b97f4a7c15ull);
#pragma unroll
            for (u32 k = 0; k < 2; ++k) {
                const u64 half = k ? word >> 32 : word & 0xffffffffull;
                const float v = half < threshold ? 0.0f : to_float(b.v[j + k]) * scale;
                put(&out.v[j + k], residual ? to_float(out.v[j + k]) + v : v);
            }
        }
        store(y + i, out);
    }
}

// Row t of y is the embedding of ids[t]: a block each.
extern "C" __global__ void embed_forward(const u32* ids, const real* w, real* y, u32 n) {
    const u64 from = (u64)ids[blockIdx.x] * n, to = (u64)blockIdx.x * n;
    for (u32 i = threadIdx.x * VEC; i < n; i += blockDim.x * VEC) store(y + to + i, load(w + from + i));
}

// Adds dy's rows to the gradient of the embedding. The block of the first token with an id adds all of that id, in their order.
extern "C" __global__ void embed_backward(const u32* ids, const real* dy, grad* gradient, u32 tokens, u32 n) {
    extern __shared__ float sums[];
    __shared__ u32 matches[8];
    const u32 first = blockIdx.x, id = ids[first];
    int seen = 0;
    for (u32 i = threadIdx.x; i < first; i += blockDim.x) seen |= ids[i] == id;
    if (__syncthreads_or(seen)) return;
    grad* row = gradient + (u64)id * n;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) sums[i] = to_float(row[i]);
    for (u32 start = first; start < tokens; start += blockDim.x) {
        const u32 token = start + threadIdx.x;
        const u32 found = __ballot_sync(~0u, token < tokens && ids[token] == id);
        __syncthreads();
        if ((threadIdx.x & 31) == 0) matches[threadIdx.x >> 5] = found;
        __syncthreads();
        for (u32 warp = 0; warp < 8; ++warp) {
            for (u32 rest = matches[warp]; rest; rest &= rest - 1) {
                const u64 from = (u64)(start + warp * 32 + __ffs(rest) - 1) * n;
                // These columns are this thread's for every token.
                for (u32 i = threadIdx.x; i < n; i += blockDim.x) sums[i] += to_float(dy[from + i]);
            }
        }
    }
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) put(row + i, sums[i]);
}

#define IGNORED 0xffffffffu

// The cross entropy of each row of logits against its target, a block each; with `scale` not zero the logits become their gradient
// times that. Rows are `pitch` elements apart.
extern "C" __global__ void cross_entropy(real* logits, const u32* targets, float* losses, u32 vocab, u32 pitch, float scale) {
    real* row = logits + (u64)blockIdx.x * pitch;
    const u32 target = targets[blockIdx.x];
    float top = -INFINITY, sum = 0.0f;
    for (u32 i = threadIdx.x * VEC; i < vocab; i += blockDim.x * VEC) {
        const Pack p = load(row + i);
        float best = top;
#pragma unroll
        for (u32 j = 0; j < VEC; ++j)
            if (i + j < vocab) best = fmaxf(best, to_float(p.v[j]));
        sum *= best == top ? 1.0f : exp2f((top - best) * 1.44269504f);
        top = best;
#pragma unroll
        for (u32 j = 0; j < VEC; ++j)
            if (i + j < vocab) sum += exp2f((to_float(p.v[j]) - top) * 1.44269504f);
    }
    // Each thread's largest, then the largest of all, then the sums on its scale.
    __shared__ float tops[32];
    const float warp_top = warp_max(top);
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = warp_top;
    __syncthreads();
    float best = tops[0];
    for (u32 i = 1; i < blockDim.x >> 5; ++i) best = fmaxf(best, tops[i]);
    const float total = block_sum(top == -INFINITY ? 0.0f : sum * exp2f((top - best) * 1.44269504f), 0.0f).x;
    if (threadIdx.x == 0) losses[blockIdx.x] = target == IGNORED ? 0.0f : logf(total) + best - to_float(row[target]);
    if (scale == 0.0f) return;
    // The loss above is read before the logits change.
    __syncthreads();
    const float weight = target == IGNORED ? 0.0f : scale, part = weight / total;
    for (u32 i = threadIdx.x * VEC; i < vocab; i += blockDim.x * VEC) {
        Pack p = load(row + i);
#pragma unroll
        for (u32 j = 0; j < VEC; ++j) {
            const float share = weight == 0.0f ? 0.0f : part * exp2f((to_float(p.v[j]) - best) * 1.44269504f);
            put(&p.v[j], i + j == target ? share - weight : share);
        }
        store(row + i, p);
    }
}

// The sum of n losses times scale, by one block.
extern "C" __global__ void sum_losses(const float* losses, float* out, u32 n, float scale) {
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) sum += losses[i];
    sum = block_sum(sum, 0.0f).x;
    if (threadIdx.x == 0) *out = sum * scale;
}

// The sum of dout * out over each head of each token: a warp for each. [batch, heads, seq] as the log-sum-exps.
extern "C" __global__ void attention_delta(const real* dout, const real* out, float* delta, u32 rows, u32 heads, u32 seq) {
    const u32 row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (row >= rows) return;
    float sum = 0.0f;
    for (u32 i = threadIdx.x & 31; i < HEAD_DIM; i += 32)
        sum += to_float(dout[(u64)row * HEAD_DIM + i]) * to_float(out[(u64)row * HEAD_DIM + i]);
    sum = warp_sum(sum);
    const u32 token = row / heads, head = row % heads;
    if ((threadIdx.x & 31) == 0) delta[((u64)(token / seq) * heads + head) * seq + token % seq] = sum;
}
