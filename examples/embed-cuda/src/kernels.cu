// Layers y = x + w x x, element by element, and what a trainer needs around them.
#define EACH(i, n) for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)

extern "C" __global__ void input(float* out, unsigned n, unsigned step) {
    EACH(i, n) out[i] = (float)((i * 37 + step * 13) % 97) / 97.0f - 0.4f;
}

extern "C" __global__ void forward(const float* w, const float* x, float* y, unsigned n) {
    EACH(i, n) y[i] = x[i] + w[i] * x[i] * x[i];
}

extern "C" __global__ void backward(const float* w, const float* x, const float* dy, float* dx, float* dw, unsigned n) {
    EACH(i, n) {
        dw[i] += dy[i] * x[i] * x[i];
        dx[i] = dy[i] * (1.0f + 2.0f * w[i] * x[i]);
    }
}

// Half the sum of squares, by one thread: in the order in which a loop on the CPU adds.
extern "C" __global__ void loss(const float* x, float* dx, float* loss, unsigned n) {
    float sum = 0.0f;
    for (unsigned i = 0; i < n; ++i) {
        sum += 0.5f * x[i] * x[i];
        dx[i] = x[i];
    }
    *loss = sum;
}

extern "C" __global__ void descend(float* w, const float* g, float rate, unsigned n) {
    EACH(i, n) w[i] -= rate * g[i];
}
