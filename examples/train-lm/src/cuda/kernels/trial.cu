// What tests need beside the decoder.

// w -= rate * g, each step rounded, so that a CPU gets the same bits.
extern "C" __global__ void descend(real* w, const grad* g, float rate, u64 n) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        put(w + i, __fsub_rn(to_float(w[i]), __fmul_rn(rate, to_float(g[i]))));
}

// Holds its stream up for so many nanoseconds.
extern "C" __global__ void spin(u64 nanoseconds) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
