// Products of bf16 matrices with sums in fp32, for processors that multiply floats faster than pairs of bf16.
//
// Every element is the sum of sums over `DEEP` k each, all in ascending order: bits depend neither on the other rows nor on
// the threads.
#pragma once

#include "vectors.h"

// Element (row, k) lies at data[row * step + k * along]; one of the strides is 1.
template <class T>
struct Strided {
    const T* data;
    i64 step, along;
};

#ifdef __AVX512F__
const i64 TALL = 12;  // rows whose sums stay in registers
#else
const i64 TALL = 6;
#endif
const i64 WIDE = 2 * LANES;  // columns whose sums do
const i64 MOST_TALL = 192, MOST_WIDE = 512, DEEP = 512;  // of a block: what is widened stays in the cache

#ifdef __AVX512F__
static ALWAYS_INLINE void put(float* to, i64, v16 words, const float*) { at(to) = words; }
static ALWAYS_INLINE void put(float* to, i64 stride, v16 words, const bf16*) {  // two neighbours in every word
    at(to) = (v16)((u16v)words << 16), at(to + stride) = (v16)((u16v)words & 0xffff0000u);
}
#endif

// Columns [first, first + WIDE) of b [N, K] for k in [low, low + depth) as floats: panel[k][column].
template <class T>
static void widen_panel(const Strided<T>& b, i64 first, i64 columns, i64 low, i64 depth, float* panel) {
    const T* from = b.data + first * b.step + low * b.along;
    if (b.step == 1) {
        for (i64 k = 0; k < depth; k++)
            for (i64 i = 0; i < WIDE; i += 16) at(panel + k * WIDE + i) = load16(from + k * b.along + i, columns - i);
        return;
    }
#ifdef __AVX512F__
    const i64 STEP = 64 / sizeof(T);
    for (i64 i = 0; i < WIDE; i += 16)
        for (i64 k = 0; k < depth; k += STEP) {
            v16 words[16];
            const T* own = from + i * b.step + k;
            if (columns - i >= 16 && depth - k >= STEP)
                for (i64 n = 0; n < 16; n++) memcpy(&words[n], own + n * b.step, 64);
            else
                for (i64 n = 0; n < 16; n++) {
                    words[n] = v16{};
                    if (n < columns - i) memcpy(&words[n], own + n * b.step, std::min(STEP, depth - k) * sizeof(T));
                }
            transpose16(words);
            for (i64 j = 0; j < 16; j++) put(panel + (k + j * (STEP / 16)) * WIDE + i, WIDE, words[j], from);
        }
#else
    for (i64 n = 0; n < WIDE; n++)
        for (i64 k = 0; k < depth; k++) panel[k * WIDE + n] = n < columns ? load(from + n * b.step + k) : 0.0f;
#endif
}

// sums [R, WIDE] = a [R, depth] times a panel; with `more` that is added to what is there. Not inlined: it needs all
// registers.
template <int R>
static __attribute__((noinline)) void multiply(const float* a, i64 step, i64 along, const float* panel, i64 depth,
                                               float* sums, bool more) {
    Floats acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) acc[r][v] = Floats{};
    for (i64 k = 0; k < depth; k++, panel += WIDE, a += along) {
        Floats left = *(const Floats*)panel, right = *(const Floats*)(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            Floats x = a[r * step] - Floats{};
            acc[r][0] += x * left, acc[r][1] += x * right;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) {
            Floats& sum = *(Floats*)(sums + r * WIDE + v * LANES);
            sum = more ? sum + acc[r][v] : acc[r][v];
        }
}

// Rows [first, last) of a times columns [left, right) of b^T -> out, whose rows are N apart.
template <class T>
static void product_block(const Strided<T>& a, const Strided<T>& b, T* out, i64 first, i64 last, i64 left, i64 right, i64 K,
                          i64 N) {
    static thread_local Zeros rows(MOST_TALL * (DEEP + 16)), panel((DEEP + 32) * WIDE), sums;
    i64 tall = last - first, padded = (tall + TALL - 1) / TALL * TALL, panels = (right - left + WIDE - 1) / WIDE;
    if (K > DEEP) sums.resize(std::max<size_t>(sums.size(), padded * panels * WIDE));
    alignas(64) float own[TALL * WIDE];
    for (i64 low = 0; low < K || !low; low += DEEP) {
        bool by_rows = a.along == 1;
        i64 depth = std::min(DEEP, K - low), step = by_rows ? up16(depth) : 1, along = by_rows ? 1 : MOST_TALL;
        if (by_rows)
            for (i64 r = 0; r < tall; r++) widen(a.data + (first + r) * a.step + low, &rows[r * step], depth, step);
        else
            for (i64 k = 0; k < depth; k++)
                widen(a.data + first + (low + k) * a.along, &rows[k * along], tall, up16(tall));
        for (i64 p = 0; p < panels; p++) {
            i64 column = left + p * WIDE, columns = std::min(WIDE, right - column);
            widen_panel(b, column, columns, low, depth, panel.data());
            for (i64 r = 0; r < tall; r += TALL) {
                float* sum = K > DEEP ? &sums[(p * padded + r) * WIDE] : own;
                const float* from = &rows[r * step];
                if (tall - r > TALL / 3 * 2)
                    multiply<TALL>(from, step, along, panel.data(), depth, sum, low > 0);
                else if (tall - r > TALL / 3)
                    multiply<TALL / 3 * 2>(from, step, along, panel.data(), depth, sum, low > 0);
                else
                    multiply<TALL / 3>(from, step, along, panel.data(), depth, sum, low > 0);
                if (low + DEEP < K) continue;
                for (i64 i = r; i < std::min(r + TALL, tall); i++)
                    for (i64 j = 0; j < columns; j += 16)
                        store16(out + (first + i) * N + column + j, at(sum + (i - r) * WIDE + j), columns - j);
            }
        }
    }
}

// out = a times b^T for `groups` pairs: a [M, K] and b [N, K] -> [M, N], all next to each other in out. With `bounds`
// [groups + 1] there is one a, and group g has its rows bounds[g] .. bounds[g + 1] - 1.
template <class T>
static void product(const T* a, const T* b, T* out, const i64* bounds, i64 groups, i64 M, i64 N, i64 K, i64 a_group, i64 a_step,
                    i64 a_along, i64 b_group, i64 b_step, i64 b_along, i64 threads) {
    struct Block {
        i64 group, first, last, left;
    };
    // Threads share the columns of few rows: all of `b` is widened for every block of rows.
    i64 share = groups == 1 && M < 2 * threads * MOST_TALL ? threads : 1;
    i64 wide = std::min(MOST_WIDE, ((N + share - 1) / share + WIDE - 1) / WIDE * WIDE);
    std::vector<Block> blocks;
    for (i64 g = 0; g < groups; g++) {
        i64 first = bounds ? bounds[g] : 0, last = bounds ? bounds[g + 1] : M;
        for (i64 row = first; row < last; row += MOST_TALL)
            for (i64 left = 0; left < N; left += wide) blocks.push_back({g, row, std::min(row + MOST_TALL, last), left});
    }
#pragma omp parallel for schedule(dynamic) if (threads > 1 && (bounds ? 1 : groups) * M * N * K > SHARED)
    for (size_t i = 0; i < blocks.size(); i++) {
        Block c = blocks[i];
        product_block<T>({a + (bounds ? 0 : c.group * a_group), a_step, a_along}, {b + c.group * b_group, b_step, b_along},
                         out + (bounds ? 0 : c.group * M * N), c.first, c.last, c.left, std::min(c.left + wide, N), K, N);
    }
}
