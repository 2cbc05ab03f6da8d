// Softmax over a range of keys per query, in place on a block of scores: what dense attention does between its matrix
// products. Row (g, i) of scores [G, t, n] is query i of sequence and head g; it may see keys start - low .. end - low.
#pragma once

#include "vectors.h"

struct Span {
    i64 from, to;
};

// Keys of query i of the block that lie inside the block's n keys; heads of one sequence share them. A range that ends
// before it begins is empty.
static inline Span span(const i64* start, const i64* end, i64 row, i64 low, i64 n) {
    i64 from = std::clamp<i64>(start[row] - low, 0, n);
    return {from, std::clamp(end[row] - low, from, n)};
}

template <class T>
static inline void clear(T* row, i64 from, i64 to) {
    if (to > from) memset((void*)(row + from), 0, (to - from) * sizeof(T));
}

// Scores become probabilities. Rows of start and end are [B, T], g = b * heads + head. lse [2, G, T] keeps the largest
// score and the log of the sum relative to it: their sum would round large scores away.
template <class T>
static void range_softmax(T* scores, const i64* start, const i64* end, float* lse, i64 G, i64 heads, i64 t, i64 n,
                          i64 length, i64 first, i64 low, float scale) {
#pragma omp parallel for schedule(static) collapse(2) if (G * t * n > 16384)
    for (i64 g = 0; g < G; g++)
        for (i64 i = 0; i < t; i++) {
            T* row = scores + (g * t + i) * n;
            Span s = span(start, end, g / heads * length + first + i, low, n);
            v16 most = splat(-INFINITY);
            for (i64 j = s.from; j < s.to; j += 16) {
                v16 v = load16(row + j, s.to - j, -INFINITY);
                most = v > most ? v : most;
            }
            float top = most[0];
            for (int j = 1; j < 16; j++) top = most[j] > top ? most[j] : top;
            v16 sum = {};
            for (i64 j = s.from; j < s.to; j += 16)
                sum += exp16((load16(row + j, s.to - j, -INFINITY) - top) * scale);
            float log_total = std::log(hsum(sum));
            for (i64 j = s.from; j < s.to; j += 16)
                store16(row + j, exp16((load16(row + j, s.to - j) - top) * scale - log_total), s.to - j);
            clear(row, 0, s.from);
            clear(row, s.to, n);
            lse[g * length + first + i] = top;
            lse[(G + g) * length + first + i] = log_total;
        }
}

// Scores become probabilities again, and grad (of the probabilities) becomes the gradient of the scores.
template <class T>
static void range_softmax_backward(T* scores, T* grad, const i64* start, const i64* end, const float* lse, i64 G,
                                   i64 heads, i64 t, i64 n, i64 length, i64 first, i64 low, float scale) {
#pragma omp parallel for schedule(static) collapse(2) if (G * t * n > 16384)
    for (i64 g = 0; g < G; g++)
        for (i64 i = 0; i < t; i++) {
            T *row = scores + (g * t + i) * n, *d = grad + (g * t + i) * n;
            Span s = span(start, end, g / heads * length + first + i, low, n);
            float top = lse[g * length + first + i], log_total = lse[(G + g) * length + first + i];
            v16 along = {};
            for (i64 j = s.from; j < s.to; j += 16) {
                v16 p = exp16((load16(row + j, s.to - j, -INFINITY) - top) * scale - log_total);
                along += p * load16(d + j, s.to - j);
                store16(row + j, p, s.to - j);
            }
            float mean = hsum(along);
            for (i64 j = s.from; j < s.to; j += 16)
                store16(d + j, load16(row + j, s.to - j) * (load16(d + j, s.to - j) - mean) * scale, s.to - j);
            clear(row, 0, s.from), clear(row, s.to, n);
            clear(d, 0, s.from), clear(d, s.to, n);
        }
}
