// CRC-32C (Castagnoli) of equal pieces of device memory, one block a piece.

#define POLYNOMIAL 0x82f63b78u
#define THREADS 256

// Product of two polynomials modulo the CRC's, bits reflected: the highest bit is x^0.
__device__ unsigned multiply(unsigned a, unsigned b) {
    unsigned product = 0;
    for (unsigned bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = b & 1 ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

// `crc` as `bytes` zeros behind it leave it.
__device__ unsigned shift(unsigned crc, unsigned bytes, const unsigned* powers) {
    for (int k = 0; bytes != 0; ++k, bytes >>= 1)
        if (bytes & 1) crc = multiply(powers[k], crc);
    return crc;
}

// `out[i]`: the checksum of the `i`-th `piece` bytes of `data`; the last piece may be shorter. `data` is 16-byte aligned and
// `piece` a multiple of 16.
extern "C" __global__ void __launch_bounds__(THREADS)
crc32c(const unsigned char* data, unsigned long long bytes, unsigned piece, unsigned* out) {
    __shared__ unsigned table[256];
    __shared__ unsigned powers[32];
    __shared__ unsigned sum;
    unsigned entry = threadIdx.x;
    for (int i = 0; i < 8; ++i) entry = entry & 1 ? (entry >> 1) ^ POLYNOMIAL : entry >> 1;
    table[threadIdx.x] = entry;
    if (threadIdx.x == 0) {
        // x^8, the shift by one byte, and its repeated squares.
        unsigned power = 1u << 23;
        for (int k = 0; k < 32; ++k) {
            powers[k] = power;
            power = multiply(power, power);
        }
        sum = 0;
    }
    __syncthreads();

    unsigned long long begin = (unsigned long long)blockIdx.x * piece;
    unsigned len = bytes - begin < piece ? (unsigned)(bytes - begin) : piece;
    const unsigned char* mine = data + begin;
    // Each thread takes a slice that starts at a multiple of 16; the last slices are short or empty.
    unsigned slice = ((len + THREADS - 1) / THREADS + 15) / 16 * 16;
    unsigned at = min(threadIdx.x * slice, len), end = min(at + slice, len);
    unsigned crc = 0;
    for (; at + 16 <= end; at += 16) {
        uint4 words = *reinterpret_cast<const uint4*>(mine + at);
        unsigned four[4] = {words.x, words.y, words.z, words.w};
        #pragma unroll
        for (int w = 0; w < 4; ++w) {
            crc ^= four[w];
            #pragma unroll
            for (int i = 0; i < 4; ++i) crc = table[crc & 0xff] ^ (crc >> 8);
        }
    }
    for (; at < end; ++at) crc = table[(crc ^ mine[at]) & 0xff] ^ (crc >> 8);

    // A checksum is linear: the whole is the sum of the slices, each shifted by what lies behind it. The preset ones are
    // a part of their own.
    unsigned part = shift(crc, len - end, powers);
    if (threadIdx.x == 0) part ^= shift(0xffffffffu, len, powers) ^ 0xffffffffu;
    atomicXor(&sum, part);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
