// RoPE, RMSNorm, SwiGLU, the way back from experts to tokens, and softmax over a vocabulary.
#pragma once

#include "vectors.h"

// Rotates interleaved pairs of dimensions [at_, at_ + R) of [M, H, D] (row and head strides given for the input); the
// rest is copied. cos and sin [M, R / 2]; sign -1 is the transposed rotation (backward).
template <class T>
static inline void turn_row(const T* from, T* to, const float* cos, const float* sin, i64 D, i64 R, i64 offset = 0,
                            float sign = 1.0f) {
    memcpy(to, from, D * sizeof(T));
    for (i64 i = 0; i < R / 2; i++) {
        float c = cos[i], s = sign * sin[i];
        float even = load(from + offset + 2 * i), odd = load(from + offset + 2 * i + 1);
        store(to + offset + 2 * i, even * c - odd * s);
        store(to + offset + 2 * i + 1, even * s + odd * c);
    }
}

template <class T>
static void rope(const T* x, T* out, const float* cos, const float* sin, i64 M, i64 H, i64 D, i64 row_stride,
                 i64 head_stride, i64 offset, i64 R, float sign) {
#pragma omp parallel for schedule(static) if (M * H * D > 16384)
    for (i64 m = 0; m < M; m++)
        for (i64 h = 0; h < H; h++)
            turn_row(x + m * row_stride + h * head_stride, out + (m * H + h) * D, cos + m * (R / 2), sin + m * (R / 2), D, R,
                     offset, sign);
}

// Returns the inverse of the root mean square.
template <class T>
static inline float norm_row(const T* row, const T* weight, T* out, i64 D, float eps) {
    v16 square = {};
    for (i64 i = 0; i < D; i += 16) {
        v16 v = load16(row + i, D - i);
        square += v * v;
    }
    float r = 1.0f / std::sqrt(hsum(square) / float(D) + eps);
    for (i64 i = 0; i < D; i += 16)
        store16(out + i, rounded16(load16(row + i, D - i) * r, row) * load16(weight + i, D - i), D - i);
    return r;
}

template <class T>
static void rms_norm(const T* x, const T* weight, T* out, float* inverse, i64 M, i64 D, i64 stride, float eps) {
#pragma omp parallel for schedule(static) if (M * D > 16384)
    for (i64 m = 0; m < M; m++) {
        float r = norm_row(x + m * stride, weight, out + m * D, D, eps);
        if (inverse) inverse[m] = r;
    }
}

const i64 NORM_PARTS = 16;  // fixed, so that the weight's gradient does not depend on the number of threads

template <class T>
static void rms_norm_backward(const T* x, const T* weight, const T* grad, const float* inverse, T* grad_x,
                              float* grad_weight, i64 M, i64 D, i64 stride) {
    i64 Dp = up16(D);
    Zeros sums(NORM_PARTS * Dp);
#pragma omp parallel for schedule(static) if (M * D > 16384)
    for (i64 part = 0; part < NORM_PARTS; part++) {
        float* sum = &sums[part * Dp];
        for (i64 m = M * part / NORM_PARTS; m < M * (part + 1) / NORM_PARTS; m++) {
            const T *row = x + m * stride, *g = grad + m * D;
            v16 along = {};
            for (i64 i = 0; i < D; i += 16)
                along += load16(g + i, D - i) * load16(weight + i, D - i) * load16(row + i, D - i);
            float r = inverse[m], mean = hsum(along) * r * r * r / float(D);
            for (i64 i = 0; i < D; i += 16) {
                v16 v = load16(row + i, D - i), gi = load16(g + i, D - i);
                store16(grad_x + m * D + i, gi * load16(weight + i, D - i) * r - v * mean, D - i);
                at(sum + i) += gi * v * r;
            }
        }
    }
    for (i64 j = 0; j < D; j++) {
        float total = 0.0f;
        for (i64 part = 0; part < NORM_PARTS; part++) total += sums[part * Dp + j];
        grad_weight[j] = total;
    }
}

// silu(gate) * up for rows [gate (I) | up (I)].
template <class T>
static void swiglu(const T* gate_up, T* out, i64 M, i64 I) {
#pragma omp parallel for schedule(static) if (M * I > 8192)
    for (i64 m = 0; m < M; m++) {
        const T *gate = gate_up + m * 2 * I, *up = gate + I;
        for (i64 i = 0; i < I; i += 16) {
            v16 g = load16(gate + i, I - i);
            store16(out + m * I + i, g / (1.0f + exp16(-g)) * load16(up + i, I - i), I - i);
        }
    }
}

template <class T>
static void swiglu_backward(const T* gate_up, const T* grad, T* out, i64 M, i64 I) {
#pragma omp parallel for schedule(static) if (M * I > 8192)
    for (i64 m = 0; m < M; m++) {
        const T *gate = gate_up + m * 2 * I, *up = gate + I;
        T *left = out + m * 2 * I, *right = left + I;
        for (i64 i = 0; i < I; i += 16) {
            v16 g = load16(gate + i, I - i), d = load16(grad + m * I + i, I - i);
            v16 sig = 1.0f / (1.0f + exp16(-g)), silu = g * sig;
            store16(left + i, d * load16(up + i, I - i) * (sig + silu * (1.0f - sig)), I - i);
            store16(right + i, d * silu, I - i);
        }
    }
}

// out[t] = sum over k of weights[t, k] * y[slots[t, k]]: expert rows back in token order, weighted and added.
template <class T>
static void combine(const T* y, const i64* slots, const float* weights, T* out, i64 M, i64 K, i64 D) {
#pragma omp parallel for schedule(static) if (M * K * D > 16384)
    for (i64 t = 0; t < M; t++)
        for (i64 i = 0; i < D; i += 16) {
            v16 sum = {};
            for (i64 k = 0; k < K; k++) sum += weights[t * K + k] * load16(y + slots[t * K + k] * D + i, D - i);
            store16(out + t * D + i, sum, D - i);
        }
}

// Gradients of `combine`; rows of grad_y that no slot names are left alone.
template <class T>
static void combine_backward(const T* y, const i64* slots, const float* weights, const T* grad, T* grad_y,
                             float* grad_weights, i64 M, i64 K, i64 D) {
#pragma omp parallel for schedule(static) if (M * K * D > 16384)
    for (i64 t = 0; t < M; t++)
        for (i64 k = 0; k < K; k++) {
            i64 at_ = slots[t * K + k] * D;
            v16 along = {};
            for (i64 i = 0; i < D; i += 16) {
                v16 g = load16(grad + t * D + i, D - i);
                along += g * load16(y + at_ + i, D - i);
                store16(grad_y + at_ + i, weights[t * K + k] * g, D - i);
            }
            grad_weights[t * K + k] = hsum(along);
        }
}

// log(sum exp(scale * x)) of every row, and optionally the entropy of that distribution.
template <class T>
static void logsumexp(const T* x, float* out, float* entropy, i64 M, i64 V, float scale) {
#pragma omp parallel for schedule(static) if (M * V > 8192)
    for (i64 m = 0; m < M; m++) {
        const T* row = x + m * V;
        v16 most = splat(-INFINITY);
        for (i64 i = 0; i < V; i += 16) {
            v16 v = load16(row + i, V - i, -INFINITY);
            most = v > most ? v : most;
        }
        float top = most[0];
        for (int i = 1; i < 16; i++) top = most[i] > top ? most[i] : top;
        // Rounded like the caller's product: fused with a sum it would not be, which shows where it is large.
        volatile float scaled = top * scale;
        v16 sum = {}, weighted = {};
        for (i64 i = 0; i < V; i += 16) {
            v16 v = (load16(row + i, V - i, -INFINITY) - top) * scale;
            v16 e = exp16(v);
            sum += e;
            weighted += e > 0.0f ? e * v : v16{};
        }
        float total = hsum(sum), log_total = std::log(total);
        out[m] = scaled + log_total;
        if (entropy) entropy[m] = log_total - hsum(weighted) / total;
    }
}

// In place: logits -> gradient of g * log p[target] with respect to them.
template <class T>
static void nll_backward(T* x, const float* lse, const i64* targets, const float* grad, i64 M, i64 V, float scale) {
#pragma omp parallel for schedule(static) if (M * V > 8192)
    for (i64 m = 0; m < M; m++) {
        T* row = x + m * V;
        float g = grad[m] * scale;
        v16 hit = exp16(splat(load(row + targets[m]) * scale - lse[m]));
        for (i64 i = 0; i < V; i += 16)
            store16(row + i, -g * exp16(load16(row + i, V - i, -INFINITY) * scale - lse[m]), V - i);
        store(row + targets[m], g * (1.0f - hit[0]));
    }
}
