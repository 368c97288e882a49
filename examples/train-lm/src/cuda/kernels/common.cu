#define INFINITY __int_as_float(0x7f800000)
// What all kernels of the decoder share. `real` is the type of activations and weights, `grad` that of the gradients of weights:
// float, or bfloat16 as its bits. Arithmetic is float32 throughout, and every sum has one order.
typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;
#ifdef REAL_BF16
typedef bf16 real;
#else
typedef float real;
#endif
#ifdef GRAD_BF16
typedef bf16 grad;
#else
typedef float grad;
#endif

// Elements of one 16-byte access.
#define VEC (16 / (u32)sizeof(real))

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ void put(float* p, float v) { *p = v; }
__device__ __forceinline__ void put(bf16* p, float v) {
    bf16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    *p = bits;
}

struct __align__(16) Pack {
    real v[16 / sizeof(real)];
};
__device__ __forceinline__ Pack load(const real* p) { return *(const Pack*)p; }
__device__ __forceinline__ void store(real* p, const Pack& pack) { *(Pack*)p = pack; }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) v += __shfl_xor_sync(~0u, v, lane);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, lane));
    return v;
}

// The sums of two numbers of each thread of a block, for all its threads.
__device__ __forceinline__ float2 block_sum(float a, float b) {
    __shared__ float2 parts[32];
    a = warp_sum(a);
    b = warp_sum(b);
    const u32 warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads();
    if ((threadIdx.x & 31) == 0) parts[warp] = make_float2(a, b);
    __syncthreads();
    float2 sum = parts[0];
    for (u32 i = 1; i < warps; ++i) {
        sum.x += parts[i].x;
        sum.y += parts[i].y;
    }
    return sum;
}
