// Kernels of the store's tests on a GPU.

// A value that tells which extent a word belongs to and where it lies in it.
__device__ unsigned word(unsigned tag, unsigned i) {
    unsigned x = tag * 2654435761u + i * 2246822519u;
    x ^= x >> 15;
    return x * 3266489917u;
}

extern "C" __global__ void fill(unsigned* out, unsigned words, unsigned tag) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
        out[i] = word(tag, i);
}

// Counts the words that are not as `fill` leaves them.
extern "C" __global__ void check(const unsigned* in, unsigned words, unsigned tag, unsigned* errors) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
        if (in[i] != word(tag, i)) atomicAdd(errors, 1u);
}

// Holds its stream up.
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
