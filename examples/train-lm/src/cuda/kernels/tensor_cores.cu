// Causal attention on tensor cores: bfloat16, heads of a multiple of 16 up to 128. Shapes as in attention.cu. Products are
// m16n8k16 with float32 sums; tiles lie in shared memory with rows PITCH apart, which spreads eight rows over all banks; the next
// tile comes in while one is worked on. The two gradients are two kernels, so that no sum is made by atomics.
#define PITCH (HEAD_DIM + 8)
#define CHUNKS (HEAD_DIM / 8)
#define KEYS 64

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void copy4(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address(to)), "l"(from), "r"(there ? 4 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int left>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left));
}

// `count` rows from row `first` on, each `stride` elements after the one before; zeros from row `end` on.
template <int count, int threads>
__device__ __forceinline__ void load_tile(bf16* to, const bf16* from, u32 first, u32 end, u64 stride) {
#pragma unroll
    for (u32 i = threadIdx.x; i < count * CHUNKS; i += threads) {
        const u32 row = i / CHUNKS, chunk = i % CHUNKS, at = first + row;
        copy16(to + row * PITCH + chunk * 8, from + (at < end ? at : 0) * stride + chunk * 8, at < end);
    }
}

__device__ __forceinline__ void load4(u32 (&r)[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address(p)));
}
__device__ __forceinline__ void load4_transposed(u32 (&r)[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address(p)));
}

// The 16 x 16 part of a left operand at (row, column) of a tile.
__device__ __forceinline__ void left(u32 (&a)[4], const bf16* tile, u32 row, u32 column) {
    const u32 lane = threadIdx.x & 31;
    load4(a, tile + (row + (lane & 15)) * PITCH + column + (lane >> 4) * 8);
}
// A right operand of 16 columns and depth 16, columns being rows of the tile: two of the products' operands.
__device__ __forceinline__ void right(u32 (&b)[4], const bf16* tile, u32 row, u32 column) {
    const u32 lane = threadIdx.x & 31;
    load4(b, tile + (row + (lane & 7) + (lane >> 4) * 8) * PITCH + column + (lane >> 3 & 1) * 8);
}
// The same, depth being rows of the tile.
__device__ __forceinline__ void right_transposed(u32 (&b)[4], const bf16* tile, u32 row, u32 column) {
    const u32 lane = threadIdx.x & 31;
    load4_transposed(b, tile + (row + (lane & 15)) * PITCH + column + (lane >> 4) * 8);
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
// Two neighbouring sums of products as the left operand of depth 16 of another product.
__device__ __forceinline__ void as_left(u32 (&a)[4], const float (&c0)[4], const float (&c1)[4]) {
    a[0] = pair(c0[0], c0[1]);
    a[1] = pair(c0[2], c0[3]);
    a[2] = pair(c1[0], c1[1]);
    a[3] = pair(c1[2], c1[3]);
}

// 16 rows of sums, times a factor a row half, through the warp's own rows of a tile to memory.
__device__ __forceinline__ void store_rows(
    bf16* tile, u32 row, const float (&sums)[HEAD_DIM / 8][4], float low, float high, bf16* to, u32 first, u32 end, u64 stride
) {
    const u32 lane = threadIdx.x & 31;
    bf16* own = tile + row * PITCH;
#pragma unroll
    for (u32 n = 0; n < HEAD_DIM / 8; ++n) {
        *(u32*)(own + (lane >> 2) * PITCH + n * 8 + (lane & 3) * 2) = pair(sums[n][0] * low, sums[n][1] * low);
        *(u32*)(own + ((lane >> 2) + 8) * PITCH + n * 8 + (lane & 3) * 2) = pair(sums[n][2] * high, sums[n][3] * high);
    }
    __syncwarp();
#pragma unroll
    for (u32 i = lane; i < 16 * CHUNKS; i += 32) {
        const u32 at = first + i / CHUNKS;
        if (at < end) *(uint4*)(to + at * stride + i % CHUNKS * 8) = *(const uint4*)(own + i / CHUNKS * PITCH + i % CHUNKS * 8);
    }
}

#define FORWARD_ROWS 128

// Blocks (tiles of FORWARD_ROWS queries, heads, batch) of four warps of 32 queries each. The longest rows start first.
extern "C" __global__ void __launch_bounds__(128) attention_forward(
    const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, u32 seq, u32 heads, u32 kv_heads, float scale
) {
    extern __shared__ __align__(16) bf16 tiles[];
    bf16* queries = tiles;
    bf16* keys = queries + FORWARD_ROWS * PITCH;
    bf16* values = keys + 2 * KEYS * PITCH;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 first = (gridDim.x - 1 - blockIdx.x) * FORWARD_ROWS, head = blockIdx.y, kv = head / (heads / kv_heads);
    const u64 q_stride = (u64)heads * HEAD_DIM, kv_stride = (u64)kv_heads * HEAD_DIM, start = (u64)blockIdx.z * seq;
    q += start * q_stride + head * HEAD_DIM;
    out += start * q_stride + head * HEAD_DIM;
    k += start * kv_stride + kv * HEAD_DIM;
    v += start * kv_stride + kv * HEAD_DIM;
    const float log_scale = scale * LOG2E;

    float sums[2][HEAD_DIM / 8][4] = {}, top[2][2], total[2][2] = {};
    top[0][0] = top[0][1] = top[1][0] = top[1][1] = -INFINITY;
    load_tile<FORWARD_ROWS, 128>(queries, q, first, seq, q_stride);
    load_tile<KEYS, 128>(keys, k, 0, seq, kv_stride);
    load_tile<KEYS, 128>(values, v, 0, seq, kv_stride);
    commit();
    const u32 count = (min(seq, first + FORWARD_ROWS) + KEYS - 1) / KEYS;
    for (u32 tile = 0; tile < count; ++tile) {
        if (tile + 1 < count) {
            const u32 at = (tile + 1 & 1) * KEYS * PITCH;
            load_tile<KEYS, 128>(keys + at, k, (tile + 1) * KEYS, seq, kv_stride);
            load_tile<KEYS, 128>(values + at, v, (tile + 1) * KEYS, seq, kv_stride);
            commit();
            wait<1>();
        } else {
            wait<0>();
        }
        __syncthreads();
        const bf16* key_tile = keys + (tile & 1) * KEYS * PITCH;
        const bf16* value_tile = values + (tile & 1) * KEYS * PITCH;
        // Nothing here is for rows that end before the tile.
        if (tile * KEYS <= first + warp * 32 + 31) {
            float scores[2][KEYS / 8][4] = {};
#pragma unroll
            for (u32 depth = 0; depth < HEAD_DIM; depth += 16) {
                u32 a[2][4];
                left(a[0], queries, warp * 32, depth);
                left(a[1], queries, warp * 32 + 16, depth);
#pragma unroll
                for (u32 n = 0; n < KEYS / 16; ++n) {
                    u32 b[4];
                    right(b, key_tile, n * 16, depth);
#pragma unroll
                    for (u32 m = 0; m < 2; ++m) {
                        multiply(scores[m][2 * n], a[m], b[0], b[1]);
                        multiply(scores[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
            if ((tile + 1) * KEYS > first + warp * 32) {
#pragma unroll
                for (u32 m = 0; m < 2; ++m)
#pragma unroll
                    for (u32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
                        for (u32 i = 0; i < 4; ++i) {
                            const u32 key = tile * KEYS + n * 8 + (lane & 3) * 2 + (i & 1);
                            const u32 row = first + warp * 32 + m * 16 + (lane >> 2) + (i >> 1) * 8;
                            if (key > row) scores[m][n][i] = -INFINITY;
                        }
            }
#pragma unroll
            for (u32 m = 0; m < 2; ++m)
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    float best = top[m][half];
#pragma unroll
                    for (u32 n = 0; n < KEYS / 8; ++n)
                        best = fmaxf(best, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
                    best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
                    best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
                    // Every row has key 0, which is in the first tile: the largest score is a number from there on.
                    const float shrink = exp2f((top[m][half] - best) * log_scale), shift = best * log_scale;
                    top[m][half] = best;
                    float sum = 0.0f;
#pragma unroll
                    for (u32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
                        for (u32 i = 0; i < 2; ++i) {
                            const float weight = exp2f(fmaf(scores[m][n][2 * half + i], log_scale, -shift));
                            scores[m][n][2 * half + i] = weight;
                            sum += weight;
                        }
                    total[m][half] = total[m][half] * shrink + sum;
#pragma unroll
                    for (u32 n = 0; n < HEAD_DIM / 8; ++n) {
                        sums[m][n][2 * half] *= shrink;
                        sums[m][n][2 * half + 1] *= shrink;
                    }
                }
#pragma unroll
            for (u32 depth = 0; depth < KEYS; depth += 16) {
                u32 a[2][4];
                as_left(a[0], scores[0][depth / 8], scores[0][depth / 8 + 1]);
                as_left(a[1], scores[1][depth / 8], scores[1][depth / 8 + 1]);
#pragma unroll
                for (u32 n = 0; n < HEAD_DIM / 16; ++n) {
                    u32 b[4];
                    right_transposed(b, value_tile, depth, n * 16);
#pragma unroll
                    for (u32 m = 0; m < 2; ++m) {
                        multiply(sums[m][2 * n], a[m], b[0], b[1]);
                        multiply(sums[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 m = 0; m < 2; ++m) {
        const u32 row = warp * 32 + m * 16;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            float& sum = total[m][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const u32 at = first + row + (lane >> 2) + half * 8;
            if ((lane & 3) == 0 && at < seq) lse[(blockIdx.z * (u64)heads + head) * seq + at] = top[m][half] * log_scale + log2f(sum);
        }
        store_rows(queries, row, sums[m], 1.0f / total[m][0], 1.0f / total[m][1], out, first + row, seq, q_stride);
    }
}

#define BACKWARD_ROWS 64

// Blocks (tiles of KEYS keys, kv_heads, batch) of four warps of 16 keys each: over all queries that see them, of all heads that share
// them. Scores are held with a row for each key, so that they are left operands as they are.
extern "C" __global__ void __launch_bounds__(128) attention_keys(
    const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* lse, const float* delta, bf16* dk, bf16* dv, u32 seq,
    u32 heads, u32 kv_heads, float scale
) {
    extern __shared__ __align__(16) bf16 tiles[];
    bf16* keys = tiles;
    bf16* values = keys + KEYS * PITCH;
    bf16* queries = values + KEYS * PITCH;
    bf16* gradients = queries + 2 * BACKWARD_ROWS * PITCH;
    float* logs = (float*)(gradients + 2 * BACKWARD_ROWS * PITCH);
    float* deltas = logs + 2 * BACKWARD_ROWS;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 first = blockIdx.x * KEYS, kv = blockIdx.y, group = heads / kv_heads;
    const u64 q_stride = (u64)heads * HEAD_DIM, kv_stride = (u64)kv_heads * HEAD_DIM, start = (u64)blockIdx.z * seq;
    q += start * q_stride + kv * group * HEAD_DIM;
    dout += start * q_stride + kv * group * HEAD_DIM;
    k += start * kv_stride + kv * HEAD_DIM;
    v += start * kv_stride + kv * HEAD_DIM;
    dk += start * kv_stride + kv * HEAD_DIM;
    dv += start * kv_stride + kv * HEAD_DIM;
    lse += (blockIdx.z * (u64)heads + kv * group) * seq;
    delta += (blockIdx.z * (u64)heads + kv * group) * seq;
    const float log_scale = scale * LOG2E;

    float sums_k[HEAD_DIM / 8][4] = {}, sums_v[HEAD_DIM / 8][4] = {};
    const u32 skipped = first / BACKWARD_ROWS, tiles_each = (seq + BACKWARD_ROWS - 1) / BACKWARD_ROWS - skipped;
    const u32 count = group * tiles_each;
    auto fetch = [&](u32 i) {
        const u32 head = i / tiles_each, row = (skipped + i % tiles_each) * BACKWARD_ROWS, at = (i & 1) * BACKWARD_ROWS;
        load_tile<BACKWARD_ROWS, 128>(queries + at * PITCH, q + head * HEAD_DIM, row, seq, q_stride);
        load_tile<BACKWARD_ROWS, 128>(gradients + at * PITCH, dout + head * HEAD_DIM, row, seq, q_stride);
        const u32 own = threadIdx.x % BACKWARD_ROWS;
        const bool there = row + own < seq;
        const u64 from = (u64)head * seq + (there ? row + own : 0);
        // Absent queries get zeros everywhere, and so do their gradients.
        if (threadIdx.x < BACKWARD_ROWS) copy4(logs + at + own, lse + from, there);
        else copy4(deltas + at + own, delta + from, there);
        commit();
    };
    load_tile<KEYS, 128>(keys, k, first, seq, kv_stride);
    load_tile<KEYS, 128>(values, v, first, seq, kv_stride);
    fetch(0);
    for (u32 i = 0; i < count; ++i) {
        if (i + 1 < count) {
            fetch(i + 1);
            wait<1>();
        } else {
            wait<0>();
        }
        __syncthreads();
        const u32 at = (i & 1) * BACKWARD_ROWS, row = (skipped + i % tiles_each) * BACKWARD_ROWS;
        const bf16 *query_tile = queries + at * PITCH, *gradient_tile = gradients + at * PITCH;
        float scores[BACKWARD_ROWS / 8][4] = {}, slopes[BACKWARD_ROWS / 8][4] = {};
#pragma unroll
        for (u32 depth = 0; depth < HEAD_DIM; depth += 16) {
            u32 a[4], c[4];
            left(a, keys, warp * 16, depth);
            left(c, values, warp * 16, depth);
#pragma unroll
            for (u32 n = 0; n < BACKWARD_ROWS / 16; ++n) {
                u32 b[4];
                right(b, query_tile, n * 16, depth);
                multiply(scores[2 * n], a, b[0], b[1]);
                multiply(scores[2 * n + 1], a, b[2], b[3]);
                right(b, gradient_tile, n * 16, depth);
                multiply(slopes[2 * n], c, b[0], b[1]);
                multiply(slopes[2 * n + 1], c, b[2], b[3]);
            }
        }
        const bool masked = first + KEYS > row;
#pragma unroll
        for (u32 n = 0; n < BACKWARD_ROWS / 8; ++n) {
            const float2 log = *(const float2*)(logs + at + n * 8 + (lane & 3) * 2);
            const float2 rest = *(const float2*)(deltas + at + n * 8 + (lane & 3) * 2);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                float weight = exp2f(fmaf(scores[n][j], log_scale, -(j & 1 ? log.y : log.x)));
                const u32 query = row + n * 8 + (lane & 3) * 2 + (j & 1), key = first + warp * 16 + (lane >> 2) + (j >> 1) * 8;
                if (masked && key > query) weight = 0.0f;
                scores[n][j] = weight;
                slopes[n][j] = weight * (slopes[n][j] - (j & 1 ? rest.y : rest.x));
            }
        }
#pragma unroll
        for (u32 depth = 0; depth < BACKWARD_ROWS; depth += 16) {
            u32 a[4], c[4];
            as_left(a, scores[depth / 8], scores[depth / 8 + 1]);
            as_left(c, slopes[depth / 8], slopes[depth / 8 + 1]);
#pragma unroll
            for (u32 n = 0; n < HEAD_DIM / 16; ++n) {
                u32 b[4];
                right_transposed(b, gradient_tile, depth, n * 16);
                multiply(sums_v[2 * n], a, b[0], b[1]);
                multiply(sums_v[2 * n + 1], a, b[2], b[3]);
                right_transposed(b, query_tile, depth, n * 16);
                multiply(sums_k[2 * n], c, b[0], b[1]);
                multiply(sums_k[2 * n + 1], c, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    store_rows(keys, warp * 16, sums_k, scale, scale, dk, first + warp * 16, seq, kv_stride);
    store_rows(values, warp * 16, sums_v, 1.0f, 1.0f, dv, first + warp * 16, seq, kv_stride);
}

// Blocks (tiles of BACKWARD_ROWS queries, heads, batch) of four warps of 16 queries each.
extern "C" __global__ void __launch_bounds__(128) attention_queries(
    const bf16* q, const bf16* k, const bf16* v, const bf16* dout, const float* lse, const float* delta, bf16* dq, u32 seq, u32 heads,
    u32 kv_heads, float scale
) {
    extern __shared__ __align__(16) bf16 tiles[];
    bf16* queries = tiles;
    bf16* gradients = queries + BACKWARD_ROWS * PITCH;
    bf16* keys = gradients + BACKWARD_ROWS * PITCH;
    bf16* values = keys + 2 * KEYS * PITCH;
    const u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 first = (gridDim.x - 1 - blockIdx.x) * BACKWARD_ROWS, head = blockIdx.y, kv = head / (heads / kv_heads);
    const u64 q_stride = (u64)heads * HEAD_DIM, kv_stride = (u64)kv_heads * HEAD_DIM, start = (u64)blockIdx.z * seq;
    q += start * q_stride + head * HEAD_DIM;
    dout += start * q_stride + head * HEAD_DIM;
    dq += start * q_stride + head * HEAD_DIM;
    k += start * kv_stride + kv * HEAD_DIM;
    v += start * kv_stride + kv * HEAD_DIM;
    const float log_scale = scale * LOG2E;

    float log[2], rest[2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 row = first + warp * 16 + (lane >> 2) + half * 8;
        const u64 at = (blockIdx.z * (u64)heads + head) * seq + row;
        log[half] = row < seq ? lse[at] : 0.0f;
        rest[half] = row < seq ? delta[at] : 0.0f;
    }
    float sums[HEAD_DIM / 8][4] = {};
    const u32 count = (min(seq, first + BACKWARD_ROWS) + KEYS - 1) / KEYS;
    auto fetch = [&](u32 i) {
        const u32 at = (i & 1) * KEYS * PITCH;
        load_tile<KEYS, 128>(keys + at, k, i * KEYS, seq, kv_stride);
        load_tile<KEYS, 128>(values + at, v, i * KEYS, seq, kv_stride);
        commit();
    };
    load_tile<BACKWARD_ROWS, 128>(queries, q, first, seq, q_stride);
    load_tile<BACKWARD_ROWS, 128>(gradients, dout, first, seq, q_stride);
    fetch(0);
    for (u32 i = 0; i < count; ++i) {
        if (i + 1 < count) {
            fetch(i + 1);
            wait<1>();
        } else {
            wait<0>();
        }
        __syncthreads();
        const bf16 *key_tile = keys + (i & 1) * KEYS * PITCH, *value_tile = values + (i & 1) * KEYS * PITCH;
        float scores[KEYS / 8][4] = {}, slopes[KEYS / 8][4] = {};
#pragma unroll
        for (u32 depth = 0; depth < HEAD_DIM; depth += 16) {
            u32 a[4], c[4];
            left(a, queries, warp * 16, depth);
            left(c, gradients, warp * 16, depth);
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; ++n) {
                u32 b[4];
                right(b, key_tile, n * 16, depth);
                multiply(scores[2 * n], a, b[0], b[1]);
                multiply(scores[2 * n + 1], a, b[2], b[3]);
                right(b, value_tile, n * 16, depth);
                multiply(slopes[2 * n], c, b[0], b[1]);
                multiply(slopes[2 * n + 1], c, b[2], b[3]);
            }
        }
        const bool masked = (i + 1) * KEYS > first + warp * 16;
#pragma unroll
        for (u32 n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                float weight = exp2f(fmaf(scores[n][j], log_scale, -log[j >> 1]));
                const u32 key = i * KEYS + n * 8 + (lane & 3) * 2 + (j & 1), query = first + warp * 16 + (lane >> 2) + (j >> 1) * 8;
                if (masked && key > query) weight = 0.0f;
                slopes[n][j] = weight * (slopes[n][j] - rest[j >> 1]);
            }
#pragma unroll
        for (u32 depth = 0; depth < KEYS; depth += 16) {
            u32 a[4];
            as_left(a, slopes[depth / 8], slopes[depth / 8 + 1]);
#pragma unroll
            for (u32 n = 0; n < HEAD_DIM / 16; ++n) {
                u32 b[4];
                right_transposed(b, key_tile, depth, n * 16);
                multiply(sums[2 * n], a, b[0], b[1]);
                multiply(sums[2 * n + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    store_rows(queries, warp * 16, sums, scale, scale, dq, first + warp * 16, seq, q_stride);
}
