// Feed-forward of a handful of tokens: router, routed experts, shared expert.
#pragma once

#include "elementwise.h"
#include "indexer.h"
#include "tiles.h"

// Router: logits [M, E] -> the `top` experts with the highest sigmoid + bias (ties to the lower number), ascending, and
// their sigmoids, divided by their sum if `normalise`, times `scaling`.
static void route(const Team& team, const float* logits, const float* bias, i64* experts, float* weights, i64 M, i64 E,
                  i64 top, i64 normalise, float scaling) {
    i64 Ep = up16(E);
    auto scores = floats(2 * M * Ep);
    std::unique_ptr<int32_t[]> orders(new int32_t[M * (2 * Ep + 32)]);
    team.each(M, 64 * E, [&](i64 m) {
        float *score = &scores[2 * m * Ep], *biased = score + Ep;
        for (i64 e = 0; e < E; e += 16) at(score + e) = 1.0f / (1.0f + exp16(-load16(logits + m * E + e, E - e)));
        for (i64 e = 0; e < E; e++) biased[e] = score[e] + bias[e];
        i64* to = experts + m * top;
        if (top < E)
            topk_row(biased, E, top, 0, to, &orders[m * (2 * Ep + 32)]);
        else
            for (i64 e = 0; e < E; e++) to[e] = e;
        float sum = 1e-20f;
        for (i64 k = 0; k < top; k++) sum += score[to[k]];
        for (i64 k = 0; k < top; k++) weights[m * top + k] = score[to[k]] * scaling / (normalise ? sum : 1.0f);
    });
}

// Weights of a feed-forward: stacks of gate_up [E, 2 I, D] and down [E, D, I] of the routed experts with their router
// [E, D] and bias, and the same two matrices, of inner width S, that every token passes. Either part may be absent.
template <class T>
struct FeedForward {
    const T* gate;
    const float* bias;
    Weight<T> up, down, shared_up, shared_down;
    i64 E, top, I, S, normalise;
    float scaling;
};

// Slots (token, choice) by expert: `order` lists them, those of group g from first[g] on.
struct Groups {
    std::vector<i64> order, first, expert;

    Groups(const i64* experts, i64 slots, i64 E) : order(slots) {
        std::vector<i64> at(E + 1, 0);
        for (i64 s = 0; s < slots; s++) at[experts[s] + 1]++;
        for (i64 e = 0; e < E; e++) {
            if (at[e + 1]) first.push_back(at[e]), expert.push_back(e);
            at[e + 1] += at[e];
        }
        first.push_back(slots);
        for (i64 s = 0; s < slots; s++) order[at[experts[s]]++] = s;
    }
};

// silu(gate) * up of columns i .. i + 15 for some rows x, to columns i of `inner`.
template <class T, class E>
static inline void gated16(const Weight<T>& gate_up, i64 i, i64 I, i64 D, const E* const* x, const IntegerRow* rounded,
                           i64 rows, E* inner, i64 line) {
    float y[16 * ROWS], z[16 * ROWS];
    i64 count = std::min<i64>(16, I - i);
    for (i64 m0 = 0; m0 < rows; m0 += ROWS) {
        i64 here = std::min(ROWS, rows - m0);
        tile16(gate_up, i, count, D, x + m0, rounded + m0, here, y);
        tile16(gate_up, I + i, count, D, x + m0, rounded + m0, here, z);
        for (i64 m = 0; m < here; m++) {
            v16 g = at(y + 16 * m), u = at(z + 16 * m);
            store16(inner + (m0 + m) * line + i, g / (1.0f + exp16(-g)) * u, count);
        }
    }
}

// y of every token x [M, D]: sink(m, d, y, count) takes up to 16 elements of its row from column d on. Weights of an
// expert are fetched once for all its tokens.
template <class T, class F>
static void feed_forward(const Team& team, const T* x, const FeedForward<T>& f, i64 M, i64 D, const F& sink) {
    typedef typename Operand<T>::E E;
    Input<T> in(x, M, D);
    round_for(team, {f.up, f.shared_up}, in, D);
    i64 slots = f.gate ? M * f.top : 0, Ip = padded<T>(f.I), Sp = padded<T>(f.S), ups = (f.S + 15) / 16;
    auto inner = elements<T>(slots, f.I), passed = elements<T>(M, f.S);
    auto logits = floats(M * f.E + 16), weights = floats(slots);
    std::vector<i64> chosen(slots);
    i64 gates = f.gate ? (f.E + 15) / 16 : 0;
    team.each(gates + ups, 32 * M * D, [&](i64 item) {
        if (item >= gates) {
            gated16(f.shared_up, (item - gates) * 16, f.S, D, in.rows.data(), in.integers.rows.data(), M, passed.get(), Sp);
            return;
        }
        float y[16 * ROWS];
        i64 e = 16 * item, count = std::min<i64>(16, f.E - e);
        for (i64 m0 = 0; m0 < M; m0 += ROWS) {
            i64 rows = std::min(ROWS, M - m0);
            tile16(f.gate + e * D, count, D, &in.rows[m0], rows, y);
            for (i64 m = 0; m < rows; m++) store16(&logits[(m0 + m) * f.E + e], at(y + 16 * m), count);
        }
    });
    if (f.gate) route(team, logits.get(), f.bias, chosen.data(), weights.get(), M, f.E, f.top, f.normalise, f.scaling);
    Groups groups(chosen.data(), slots, f.E);
    std::vector<const E*> of_slot(slots), middle(slots), through(M);
    std::vector<IntegerRow> rounded(f.up.rounds() ? slots : 0);
    for (i64 s = 0; s < slots; s++) {
        i64 m = groups.order[s] / f.top;
        of_slot[s] = in.rows[m], middle[s] = &inner[s * Ip];
        if (f.up.rounds()) rounded[s] = in.integers.rows[m];
    }
    for (i64 m = 0; m < M; m++) through[m] = &passed[m * Sp];
    i64 count = groups.expert.size();
    ups = (f.I + 15) / 16;
    team.each(count * ups, 32 * D * (slots / std::max<i64>(1, count)), [&](i64 item) {
        i64 g = item / ups, begin = groups.first[g], rows = groups.first[g + 1] - begin;
        Weight<T> own = f.up.of(groups.expert[g], 2 * f.I, D);
        gated16(own, item % ups * 16, f.I, D, &of_slot[begin], rounded.data() + begin, rows, &inner[begin * Ip], Ip);
    });
    IntegerRows middle_rounded, through_rounded;
    if (f.down.rounds()) middle_rounded.round(team, [&](i64 s) { return middle[s]; }, slots, f.I);
    if (f.shared_down.rounds()) through_rounded.round(team, [&](i64 m) { return through[m]; }, M, f.S);
    team.each((D + 15) / 16, 16 * (slots * f.I + M * f.S), [&](i64 item) {
        i64 d = 16 * item, wide = std::min<i64>(16, D - d);
        auto sums = floats(16 * M);
        std::fill_n(sums.get(), 16 * M, 0.0f);
        float y[16 * ROWS];
        for (i64 g = 0; g < count; g++)
            for (i64 s0 = groups.first[g]; s0 < groups.first[g + 1]; s0 += ROWS) {
                i64 rows = std::min(ROWS, groups.first[g + 1] - s0);
                Weight<T> own = f.down.of(groups.expert[g], D, f.I);
                tile16(own, d, wide, f.I, &middle[s0], middle_rounded.rows.data() + s0, rows, y);
                for (i64 r = 0; r < rows; r++) {
                    i64 slot = groups.order[s0 + r];
                    at(&sums[16 * (slot / f.top)]) += weights[slot] * at(y + 16 * r);
                }
            }
        for (i64 m0 = 0; m0 < M && f.S; m0 += ROWS) {
            i64 rows = std::min(ROWS, M - m0);
            tile16(f.shared_down, d, wide, f.S, &through[m0], through_rounded.rows.data() + m0, rows, y);
            for (i64 r = 0; r < rows; r++) at(&sums[16 * (m0 + r)]) += at(y + 16 * r);
        }
        for (i64 m = 0; m < M; m++) sink(m, d, at(&sums[16 * m]), wide);
    });
}
