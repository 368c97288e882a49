// Adam on device memory, and the partial sums of the gradient norm: the arithmetic of adam.rs, bf16.rs, quant.rs and norm.rs,
// operation by operation, so that the bits are those of the CPU. Compiled with --fmad=false; division and root are IEEE's.
//
// In front of this stand the tables of quant.rs, for first moments (SIGNED) and second ones (UNSIGNED):
// - VALUES[256]: what a code stands for, float32 bits; BOUNDS[256]: the largest quotient nearest to each, likewise;
// - LOWEST[]: the code of the lowest quotient of each bin, four to a word, and the numbers LOWEST_BIN, BINS and ZERO of both.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

#define THREADS 256
#define WARP 32
// Elements of a state block, of a scale, and bytes of a block of codes and scales.
#define BLOCK 16384
#define QUANT 256
#define INT8_BLOCK_BYTES (BLOCK + BLOCK / QUANT * 4)
// Elements of a partial sum, and its accumulators.
#define NORM_BLOCK 65536
#define LANES 1024
// Groups of four elements that a thread has under way.
#define UNROLL 2

struct Rule {
    float unscale, clip, shrink, l2, slope, beta2, mix2, step, correction, eps;
};

// One element.
__device__ __forceinline__ void advance(const Rule& rule, float grad, float& main, float& avg, float& sq) {
    float w = main * rule.shrink;
    float g = grad * rule.unscale * rule.clip + rule.l2 * main;
    float m = (rule.slope > 0.0f ? avg : g) + rule.slope * (g - avg);
    float v = sq * rule.beta2 + rule.mix2 * g * g;
    float denominator = sqrtf(v) * rule.correction + rule.eps;
    main = w + rule.step * m / denominator;
    avg = m;
    sq = v;
}

__device__ __forceinline__ float widen(float value) { return value; }

__device__ __forceinline__ float widen(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ void narrow(float value, float& out) { out = value; }

__device__ __forceinline__ void narrow(float value, u16& out) {
    u32 bits = __float_as_uint(value), high = bits >> 16;
    out = (bits & 0x7fffffffu) > 0x7f800000u ? high | 0x40 : (bits + 0x7fff + (high & 1)) >> 16;
}

__device__ __forceinline__ void load(const float* from, float (&to)[4]) {
    float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

__device__ __forceinline__ void load(const u16* from, float (&to)[4]) {
    ushort4 four = *reinterpret_cast<const ushort4*>(from);
    to[0] = widen(four.x), to[1] = widen(four.y), to[2] = widen(four.z), to[3] = widen(four.w);
}

__device__ __forceinline__ void store(float* to, const float (&from)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

__device__ __forceinline__ void store(u16* to, const float (&from)[4]) {
    ushort4 four;
    narrow(from[0], four.x), narrow(from[1], four.y), narrow(from[2], four.z), narrow(from[3], four.w);
    *reinterpret_cast<ushort4*>(to) = four;
}

// Elements `first..last` of something that element 0 of the section would stand at the start of. Gradients and weights are
// the caller's: their groups of four may lie across those that the memory is read in.
template <typename T>
struct Span {
    T* start;
    u64 first, last;
    bool aligned;

    __device__ Span(void* given, u64 first, u64 n, u64 counted_from)
        : start(reinterpret_cast<T*>(reinterpret_cast<u64>(given) - counted_from * sizeof(T))),
          first(first),
          last(first + n),
          aligned(reinterpret_cast<u64>(start) % (4 * sizeof(T)) == 0) {}

    __device__ __forceinline__ bool holds(u64 at) const { return at >= first && at < last; }

    __device__ __forceinline__ bool holds_all(u64 at) const { return at >= first && at + 4 <= last; }

    // Elements that are not there read as zero.
    __device__ __forceinline__ void get(u64 at, float (&to)[4]) const {
        if (aligned && holds_all(at)) {
            load(start + at, to);
        } else {
            #pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = holds(at + i) ? widen(start[at + i]) : 0.0f;
        }
    }

    // Elements that are not there stay.
    __device__ __forceinline__ void put(u64 at, const float (&from)[4]) const {
        if (aligned && holds_all(at)) {
            store(start + at, from);
        } else {
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                if (holds(at + i)) narrow(from[i], start[at + i]);
        }
    }
};

// Where updated weights go: nowhere, to float32 or to bfloat16.
enum Kind { NONE = 0, F32 = 1, BF16 = 2 };

struct Weights {
    void* start;
    u32 kind;
    u64 first, n;

    __device__ __forceinline__ void put(u64 at, const float (&main)[4]) const {
        if (kind == F32) Span<float>(start, first, n, first).put(at, main);
        if (kind == BF16) Span<u16>(start, first, n, first).put(at, main);
    }
};

// Moments as numbers of type M. A thread has groups of four elements, counted from the start of the section.
template <typename M, typename G>
__device__ __forceinline__ void adam_numbers(const Rule& rule, void* grads, void* mains, void* avgs, void* sqs,
                                             const Weights& weights, u64 first, u64 n) {
    Span<G> grad(grads, first, n, first);
    Span<float> main(mains, first, n, 0);
    Span<M> avg(avgs, first, n, 0), sq(sqs, first, n, 0);
    u64 end = (first + n + 3) / 4;
    u64 group = first / 4 + (u64)blockIdx.x * UNROLL * THREADS + threadIdx.x;
    for (; group < end; group += (u64)gridDim.x * UNROLL * THREADS) {
        float g[UNROLL][4], w[UNROLL][4], m[UNROLL][4], v[UNROLL][4];
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            u64 at = 4 * (group + u * THREADS);
            grad.get(at, g[u]);
            main.get(at, w[u]);
            avg.get(at, m[u]);
            sq.get(at, v[u]);
        }
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            u64 at = 4 * (group + u * THREADS);
            #pragma unroll
            for (int i = 0; i < 4; ++i) advance(rule, g[u][i], w[u][i], m[u][i], v[u][i]);
            main.put(at, w[u]);
            avg.put(at, m[u]);
            sq.put(at, v[u]);
            weights.put(at, w[u]);
        }
    }
}

// The tables of one map, in shared memory.
struct Map {
    float values[256], bounds[256];
    u8 lowest[BINS];

    __device__ void fill(const u32* from_values, const u32* from_bounds, const u32* from_lowest) {
        for (int i = threadIdx.x; i < 256; i += THREADS) {
            values[i] = __uint_as_float(from_values[i]);
            bounds[i] = __uint_as_float(from_bounds[i]);
        }
        for (int i = threadIdx.x; i < BINS / 4; i += THREADS) reinterpret_cast<u32*>(lowest)[i] = from_lowest[i];
    }

    // `HALF` bins of positive quotients, then as many of negative ones.
    __device__ __forceinline__ u8 code(float quotient) const {
        u32 bits = __float_as_uint(quotient), size = (bits >> 16) & 0x7fff;
        size = min(max(size, LOWEST_BIN), LOWEST_BIN + BINS / 2 - 1) - LOWEST_BIN;
        u8 code = lowest[(bits >> 31) * (BINS / 2) + size];
        return code + (quotient > bounds[code]);
    }
};

// One moment of a scale's elements, of which a thread of the warp has two groups of four.
struct Codes {
    u8* codes;
    float* scale;

    __device__ Codes(void* section, u64 at) {
        u8* block = static_cast<u8*>(section) + at / BLOCK * INT8_BLOCK_BYTES;
        codes = block + at % BLOCK;
        scale = reinterpret_cast<float*>(block + BLOCK) + at % BLOCK / QUANT;
    }

    __device__ __forceinline__ void get(const Map& map, int group, float (&to)[4]) const {
        float factor = *scale;
        uchar4 four = reinterpret_cast<const uchar4*>(codes)[group];
        to[0] = map.values[four.x] * factor, to[1] = map.values[four.y] * factor;
        to[2] = map.values[four.z] * factor, to[3] = map.values[four.w] * factor;
    }

    // Stores the groups `lane` and `lane + WARP`; `holds[i]` says whether element `i` of the eight is there. Every thread of
    // the warp has read the old scale by then.
    __device__ __forceinline__ void put(const Map& map, u8 zero, int lane, const bool (&holds)[8],
                                        const float (&values)[2][4]) const {
        u32 largest = 0;
        #pragma unroll
        for (int i = 0; i < 8; ++i)
            if (holds[i]) largest = max(largest, __float_as_uint(values[i / 4][i % 4]) & 0x7fffffffu);
        #pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2)
            largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        if (largest >= 0x7f800000u) largest = 0x7fc00000u;
        float factor = __uint_as_float(largest);
        bool holds_zero = largest == 0 || largest == 0x7fc00000u;
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            u8 four[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = holds_zero ? zero : map.code(values[u][i] / factor);
            int group = lane + u * WARP;
            if (holds[4 * u] && holds[4 * u + 3]) {
                reinterpret_cast<uchar4*>(codes)[group] = make_uchar4(four[0], four[1], four[2], four[3]);
            } else {
                #pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (holds[4 * u + i]) codes[4 * group + i] = four[i];
            }
        }
        if (lane == 0) *scale = factor;
    }
};

// Moments as 8-bit codes. A warp has all elements of a scale.
template <typename G>
__device__ __forceinline__ void adam_codes(const Rule& rule, void* grads, void* mains, void* avgs, void* sqs,
                                           const Weights& weights, u64 first, u64 n) {
    __shared__ Map signed_map, unsigned_map;
    signed_map.fill(SIGNED_VALUES, SIGNED_BOUNDS, SIGNED_LOWEST);
    unsigned_map.fill(UNSIGNED_VALUES, UNSIGNED_BOUNDS, UNSIGNED_LOWEST);
    __syncthreads();
    Span<G> grad(grads, first, n, first);
    Span<float> main(mains, first, n, 0);
    int lane = threadIdx.x % WARP;
    u64 end = (first + n + QUANT - 1) / QUANT;
    u64 quant = first / QUANT + (u64)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    for (; quant < end; quant += (u64)gridDim.x * (THREADS / WARP)) {
        Codes avg(avgs, quant * QUANT), sq(sqs, quant * QUANT);
        float g[2][4], w[2][4], m[2][4], v[2][4];
        bool holds[8];
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            int group = lane + u * WARP;
            u64 at = quant * QUANT + 4 * group;
            grad.get(at, g[u]);
            main.get(at, w[u]);
            avg.get(signed_map, group, m[u]);
            sq.get(unsigned_map, group, v[u]);
            #pragma unroll
            for (int i = 0; i < 4; ++i) holds[4 * u + i] = main.holds(at + i);
        }
        #pragma unroll
        for (int u = 0; u < 2; ++u) {
            u64 at = quant * QUANT + 4 * (lane + u * WARP);
            #pragma unroll
            for (int i = 0; i < 4; ++i) advance(rule, g[u][i], w[u][i], m[u][i], v[u][i]);
            main.put(at, w[u]);
            weights.put(at, w[u]);
        }
        __syncwarp();
        avg.put(signed_map, SIGNED_ZERO, lane, holds, m);
        sq.put(unsigned_map, UNSIGNED_ZERO, lane, holds, v);
    }
}

// Updates elements `first..first + n` of the sections that start at `main`, `avg` and `sq`, with a gradient and, where `kind`
// says so, weights that start at element `first`.
#define ADAM(NAME, BODY)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                                \
        NAME(float unscale, float clip, float shrink, float l2, float slope, float beta2, float mix2, float step,           \
             float correction, float eps, void* grad, void* main, void* avg, void* sq, void* out, u32 kind, u64 first,      \
             u64 n) {                                                                                                       \
        Rule rule = {unscale, clip, shrink, l2, slope, beta2, mix2, step, correction, eps};                                 \
        Weights weights = {out, kind, first, n};                                                                            \
        BODY(rule, grad, main, avg, sq, weights, first, n);                                                                 \
    }

#define COMMA ,
ADAM(adam_f32_f32, adam_numbers<float COMMA float>)
ADAM(adam_f32_bf16, adam_numbers<float COMMA u16>)
ADAM(adam_bf16_f32, adam_numbers<u16 COMMA float>)
ADAM(adam_bf16_bf16, adam_numbers<u16 COMMA u16>)
ADAM(adam_int8_f32, adam_codes<float>)
ADAM(adam_int8_bf16, adam_codes<u16>)

// `sums[b]`: the sum of squares of the part in block `b` of a parameter of `n` gradients, of which `skipped` elements of the
// first block are not at hand. Element `i` of a part goes to lane `i % LANES`, of which a thread has four; then halves of the
// lanes are added until one is left.
template <typename G>
__device__ __forceinline__ void squares(G* grads, u64 skipped, u64 n, float unscale, double* sums) {
    __shared__ double lanes[LANES];
    u64 begin = max((u64)blockIdx.x * NORM_BLOCK, skipped) - skipped;
    u64 end = min((u64)(blockIdx.x + 1) * NORM_BLOCK - skipped, n);
    Span<G> part(grads + begin, 0, end - begin, 0);
    double mine[4] = {};
    #pragma unroll 8
    for (u64 at = 4 * threadIdx.x; at < part.last; at += LANES) {
        float g[4];
        part.get(at, g);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            double wide = g[i] * unscale;
            // A square is exact, so that the sum is the same in one rounding as in two.
            mine[i] = fma(wide, wide, mine[i]);
        }
    }
    for (int i = 0; i < 4; ++i) lanes[4 * threadIdx.x + i] = mine[i];
    for (int width = LANES / 2; width > 0; width /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < width; i += THREADS) lanes[i] += lanes[i + width];
    }
    __syncthreads();
    if (threadIdx.x == 0) sums[blockIdx.x] = lanes[0];
}

extern "C" __global__ void __launch_bounds__(THREADS)
squares_f32(float* grad, u64 skipped, u64 n, float unscale, double* sums) {
    squares(grad, skipped, n, unscale, sums);
}

extern "C" __global__ void __launch_bounds__(THREADS)
squares_bf16(u16* grad, u64 skipped, u64 n, float unscale, double* sums) {
    squares(grad, skipped, n, unscale, sums);
}
