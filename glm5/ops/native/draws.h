// Tokens from logits: the likeliest, drawn ones, and verified drafts. glm5/engine/speculative.py has the same rules.
#pragma once

#include "pool.h"

// softmax(factor * x) of n logits. `best` is the first of the likeliest, or of those that are NaN.
struct Softmax {
    float factor, top, total, log_total;
    i64 best = 0;

    Softmax(const float* x, i64 n, float by) : factor(by) {
        v16 most = splat(-INFINITY), sum = {};
        for (i64 i = 0; i < n; i += 16) {
            v16 v = load16(x + i, n - i, -INFINITY);
            most = v > most ? v : most;
        }
        float highest = most[0];
        for (int i = 1; i < 16; i++) highest = std::max(highest, most[i]);
        top = factor * highest;
        for (i64 i = 0; i < n; i += 16) sum += exp16(factor * load16(x + i, n - i, -INFINITY) - top);
        total = hsum(sum), log_total = std::log(total);
        while (best < n - 1 && x[best] != highest && (total == total || x[best] == x[best])) best++;
    }

    float logprob(float x) const { return factor * x - top - log_total; }
    v16 weight(const float* x, i64 n) const { return exp16(factor * load16(x, n, -INFINITY) - top); }
};

// The first of n tokens whose cumulative weight exceeds `end`; the last one that is possible if rounding prevents it.
// weights(i) are those of sixteen tokens.
template <class F>
static inline i64 search(i64 n, float end, i64 otherwise, const F& weights) {
    float along = 0.0f;
    i64 last = otherwise;
    for (i64 i = 0; i < n; i += 16) {
        v16 w = weights(i);
        float here = hsum(w);
        if (along + here <= end && i + 16 < n) {
            along += here;
            continue;
        }
        for (i64 j = 0; j < std::min<i64>(16, n - i); j++) {
            if (!(w[j] > 0.0f)) continue;
            last = i + j, along += w[j];
            if (along > end) return last;
        }
    }
    return last;
}

// A token of softmax(factor * x): the first whose cumulative probability exceeds `uniform`.
static inline i64 drawn(const float* x, i64 n, const Softmax& all, float uniform) {
    return search(n, uniform * all.total, all.best, [&](i64 i) { return all.weight(x + i, n - i); });
}

// A token of max(p - q, 0), normalised; of p if every difference rounds to 0.
static inline i64 drawn_rest(const float* x, const Softmax& p, const float* y, const Softmax& q, i64 n, float uniform) {
    auto rest = [&](i64 i) {
        v16 more = p.weight(x + i, n - i) / p.total - q.weight(y + i, n - i) / q.total;
        return more > 0.0f ? more : v16{};
    };
    v16 sum = {};
    for (i64 i = 0; i < n; i += 16) sum += rest(i);
    float whole = hsum(sum);
    return whole > 0.0f ? search(n, uniform * whole, p.best, rest) : drawn(x, n, p, uniform);
}

// Verifies `count` drafts [B, count] of B requests. p are the logits [B * (count + 1), V] after the last known token and
// after each draft, q [count, B, V] those that the drafts were drawn from. scale [B]: factor of the logits, 0 for the
// likeliest tokens. uniforms [B, 2 * count + 1]: to accept each draft, then to draw the token after so many. Results:
// the number of accepted drafts [B], and tokens and log-probabilities [B, count + 1], meaningless after the drawn one.
static void verify(const float* p, const float* q, const i64* drafts, const float* scale, const float* uniforms,
                   i64* accepted, i64* tokens, float* logprobs, i64 B, i64 count, i64 V, i64 threads) {
    Team(threads).each(B, 64 * V, [&](i64 b) {
        bool greedy = scale[b] == 0.0f;
        const float* own = uniforms + b * (2 * count + 1);
        for (i64 k = 0; k <= count; k++) {
            i64 at = b * (count + 1) + k, draft = k < count ? drafts[b * count + k] : -1;
            const float *x = p + at * V, *y = q + (k * B + b) * V;
            Softmax all(x, V, greedy ? 1.0f : scale[b]);
            i64 token = draft;
            bool keep = false;
            if (greedy) {
                token = all.best, keep = token == draft;
            } else if (draft < 0) {
                token = drawn(x, V, all, own[2 * count]);
            } else {
                Softmax before(y, V, scale[b]);
                keep = own[k] < std::exp(all.logprob(x[draft]) - before.logprob(y[draft]));
                if (!keep) token = drawn_rest(x, all, y, before, V, own[count + k]);
            }
            accepted[b] = k, tokens[at] = token, logprobs[at] = all.logprob(x[token]);
            if (!keep) break;
        }
    });
}
