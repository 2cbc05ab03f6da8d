// Lightning indexer: scores of all keys in tiles, the top k of every query, and scores of chosen keys with gradients.
#pragma once

#include "attention.h"
#include "rough.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
// 8 x 8 transposition in registers: lanes of neighbouring rows, then pairs of them, then halves.
static ALWAYS_INLINE void transpose8(__m256* x) {
    __m256 y[8], z[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2)
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        z[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44), z[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
        z[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44), z[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        x[i] = _mm256_permute2f128_ps(z[i], z[i + 4], 0x20), x[i + 4] = _mm256_permute2f128_ps(z[i], z[i + 4], 0x31);
}

// `count` keys -> tile [d][64], missing keys as zeros; key(r) is the address of the r-th.
template <class F>
static inline void transpose_tile(const F& key, i64 count, i64 d, float* tile) {
    for (i64 s = 0; s < TILE; s += 8)
        for (i64 i = 0; i < d; i += 8) {
            __m256 x[8];
            i64 width = std::min<i64>(8, d - i);
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                float few[8] = {};
                if (width < 8 && s + r < count)
                    for (i64 c = 0; c < width; c++) few[c] = load(key(s + r) + i + c);
                x[r] = s + r >= count ? __m256{} : width < 8 ? _mm256_loadu_ps(few) : (__m256)half(key(s + r) + i);
            }
            transpose8(x);
            for (i64 c = 0; c < width; c++) _mm256_storeu_ps(tile + (i + c) * TILE + s, x[c]);
        }
}
#else
// Up to 16 rows of d numbers -> columns [d][16], which are `stride` apart; row(r) is the address of the r-th, those from
// `count` on are zeros.
template <class F>
static inline void transpose_rows(const F& row, i64 count, i64 d, float* to, i64 stride) {
    for (i64 i = 0; i < d; i += 16) {
        v16 x[16];
        i64 width = std::min<i64>(16, d - i);
        for (i64 r = 0; r < 16; r++) x[r] = r < count ? load16(row(r) + i, width) : v16{};
        transpose16(x);
        for (i64 c = 0; c < width; c++) at(to + (i + c) * stride) = x[c];
    }
}

// `count` keys -> tile [d][64], missing keys as zeros; key(r) is the address of the r-th.
template <class F>
static inline void transpose_tile(const F& key, i64 count, i64 d, float* tile) {
    for (i64 s = 0; s < TILE; s += 16) transpose_rows([&](i64 r) { return key(s + r); }, count - s, d, tile + s, TILE);
}

#endif

// Scores of one query against one transposed tile of 64 keys [d][64]: sum_j w[j] * relu(q[j] . key).
#ifdef __AVX512F__
static inline void tile_scores(const float* q, const float* w, const float* tile, i64 J, i64 d, float* out) {
    v16 total[4] = {};
    i64 j = 0;
    for (; j + 4 <= J; j += 4) {
        v16 acc[4][4] = {};
        for (i64 i = 0; i < d; i++) {
            const float* t = tile + i * TILE;
            v16 t0 = at(t), t1 = at(t + 16), t2 = at(t + 32), t3 = at(t + 48);
#pragma GCC unroll 4
            for (int h = 0; h < 4; h++) {
                v16 x = splat(q[(j + h) * d + i]);
                acc[h][0] += x * t0;
                acc[h][1] += x * t1;
                acc[h][2] += x * t2;
                acc[h][3] += x * t3;
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) total[c] += splat(w[j + h]) * (acc[h][c] < 0.0f ? v16{} : acc[h][c]);
    }
    for (; j < J; j++)
        for (int c = 0; c < 4; c++) {
            v16 acc = {};
            for (i64 i = 0; i < d; i++) acc += splat(q[j * d + i]) * at(tile + i * TILE + 16 * c);
            total[c] += splat(w[j]) * (acc < 0.0f ? v16{} : acc);
        }
    for (int c = 0; c < 4; c++) at(out + 16 * c) = total[c];
}
#else
// One head at a time against all keys: of what fits into 16 registers, this waits least for memory.
static inline void tile_scores(const float* q, const float* w, const float* tile, i64 J, i64 d, float* out) {
    v8 total[8] = {};
    for (i64 j = 0; j < J; j++) {
        v8 acc[8] = {};
        for (i64 i = 0; i < d; i++) {
            v8 x = q[j * d + i] - v8{};
#pragma GCC unroll 8
            for (int c = 0; c < 8; c++) acc[c] += x * half(tile + i * TILE + 8 * c);
        }
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) total[c] += w[j] * (acc[c] < 0.0f ? v8{} : acc[c]);
    }
    for (int c = 0; c < 8; c++) half(out + 8 * c) = total[c];
}
#endif

// `count` keys of a sequence from `s` on, in one page, as a transposed tile. `spare` [64, d rounded up to 16].
template <class T>
static inline void key_tile(const Lines<T>& keys, i64 sequence, i64 s, i64 count, float* spare, float* tile) {
    i64 d = keys.width, dp = up16(d);
    if (keys.packed) {
        for (i64 r = 0; r < count; r++) keys.read(sequence, s + r, spare + r * dp, dp);
        transpose_tile([&](i64 r) { return spare + r * dp; }, count, d, tile);
    } else {
        const T* from = keys.at(sequence, s);
        transpose_tile([&](i64 r) { return from + r * d; }, count, d, tile);
    }
}

// Neighbouring queries of one sequence that share the tiles of its keys.
struct Block {
    i64 first, last, sequence;
};

template <class T>
static std::vector<Block> blocks_of(const Lines<T>& keys, i64 queries, i64 most) {
    std::vector<Block> blocks;
    for (i64 r = 0; r < queries; r++) {
        i64 own = keys.sequence(r);
        if (!blocks.empty() && blocks.back().sequence == own && r - blocks.back().first < most)
            blocks.back().last = r + 1;
        else
            blocks.push_back({r, r + 1, own});
    }
    return blocks;
}

// The scores of a sequence's keys for a block of its queries, and the best of each.
template <class T>
class Selection {
    const T* q_;
    const Lines<T>& keys_;
    const float* w_;
    const i64 *start_, *end_;
    i64 J_, d_, K_;
    float scale_;
    Memory<float> tile_, spare_, qf_, wf_;
#ifdef ROUGH
    std::vector<Undecided> undecided_;
    std::vector<RoughQuery> rounded_;
#endif

  public:
    Selection(const T* q, const Lines<T>& keys, const float* w, const i64* start, const i64* end, i64 J, i64 d, i64 K,
              float scale, i64 lines)
        : q_(q), keys_(keys), w_(w), start_(start), end_(end), J_(J), d_(d), K_(K), scale_(scale), tile_(floats(d * TILE)),
          spare_(floats(up16(d) * TILE)), qf_(floats(lines * J * d)), wf_(floats(lines * J)) {}

    // The queries of a block, which the calls after this are about.
    void read(const Block& block) {
        for (i64 i = 0; i < (block.last - block.first) * J_ * d_; i++) qf_[i] = load(q_ + block.first * J_ * d_ + i);
        for (i64 i = 0; i < (block.last - block.first) * J_; i++) wf_[i] = w_[block.first * J_ + i] * scale_;
    }

    // Which of LANES keys from `s` on query r may see.
    unsigned seen(i64 r, i64 s) const {
        unsigned seen = end_[r] > s ? lanes(end_[r] - s) : 0;
        if (start_[r] > s) seen &= start_[r] - s < LANES ? EVERY << (start_[r] - s) : 0;
        return seen;
    }

    // Exact scores of part `part` of `parts` of the keys for queries `own`: those of own[i] go to best(i).
    template <class F>
    void exact(const Block& block, const std::vector<i64>& own, i64 part, i64 parts, const F& best) {
        i64 low = INT64_MAX, high = 0;
        for (i64 r : own) low = std::min(low, start_[r]), high = std::max(high, end_[r]);
        if (low >= high) return;
        i64 first = low / TILE, tiles = (high + TILE - 1) / TILE - first;
        for (i64 tl = first + tiles * part / parts; tl < first + tiles * (part + 1) / parts; tl++) {
            i64 s0 = tl * TILE;
            key_tile(keys_, block.sequence, s0, std::min<i64>(TILE, high - s0), spare_.get(), tile_.get());
            for (size_t i = 0; i < own.size(); i++) {
                i64 r = own[i], line = r - block.first;
                if (end_[r] <= s0 || start_[r] >= s0 + TILE) continue;
                float scores[TILE];
                tile_scores(&qf_[line * J_ * d_], &wf_[line * J_], tile_.get(), J_, d_, scores);
                for (i64 s = 0; s < TILE; s += LANES) best(i).add(some(scores + s), seen(r, s0 + s), s0 + s);
            }
        }
    }

#ifdef ROUGH
    // The keys of queries `own` by rough scores of all keys and exact ones of those that are left, into `out` [queries, K].
    // A query of which too many are left is moved to `hard`.
    void rough(const Block& block, const RoughKeys& keys, const std::vector<i64>& own, std::vector<i64>& hard, i64* out) {
        i64 low = keys.last, high = keys.first;
        while (rounded_.size() < own.size()) rounded_.emplace_back(), undecided_.emplace_back(K_);
        std::vector<char> going(own.size());
        for (size_t i = 0; i < own.size(); i++) {
            i64 line = own[i] - block.first;
            undecided_[i].clear();
            going[i] = rounded_[i].set(&qf_[line * J_ * d_], &wf_[line * J_], J_, d_);
            low = std::min(low, start_[own[i]] / TILE), high = std::max(high, (end_[own[i]] + TILE - 1) / TILE);
        }
        for (i64 tl = low; tl < high; tl++)
            for (size_t i = 0; i < own.size(); i++) {
                i64 r = own[i], s0 = tl * TILE;
                if (!going[i] || end_[r] <= s0 || start_[r] >= s0 + TILE) continue;
                float sums[TILE];
                rounded_[i].scores(keys.values(tl), J_, d_, sums);
                for (i64 s = 0; s < TILE && going[i]; s += LANES) {
                    Floats least, most;
                    rounded_[i].bounds(sums + s, keys.numbers(tl) + s, least, most);
                    going[i] = undecided_[i].add(least, most, seen(r, s0 + s), s0 + s);
                }
            }
        std::vector<int32_t> sure, open;
        for (size_t i = 0; i < own.size(); i++) {
            if (!going[i]) {
                hard.push_back(own[i]);
                continue;
            }
            undecided_[i].take(sure, open);
            settle(block, own[i], sure, open, out + own[i] * K_);
        }
    }

  private:
    // The keys of query r: those that are `sure`, and the best of those that are `open` by exact scores.
    void settle(const Block& block, i64 r, const std::vector<int32_t>& sure, const std::vector<int32_t>& open, i64* out) {
        i64 line = r - block.first, wanted = K_ - i64(sure.size()), n = open.size();
        std::vector<i64> chosen;
        if (n > wanted && wanted > 0) {
            Best found(wanted, n);
            std::vector<i64> places(wanted);
            for (i64 s0 = 0; s0 < n; s0 += TILE) {
                i64 count = std::min<i64>(TILE, n - s0);
                for (i64 s = 0; s < count; s++) keys_.read(block.sequence, open[s0 + s], &spare_[s * up16(d_)], up16(d_));
                transpose_tile([&](i64 s) { return &spare_[s * up16(d_)]; }, count, d_, tile_.get());
                float scores[TILE];
                tile_scores(&qf_[line * J_ * d_], &wf_[line * J_], tile_.get(), J_, d_, scores);
                for (i64 s = 0; s < count; s += LANES) found.add(some(scores + s), lanes(count - s), s0 + s);
            }
            found.take(places.data());
            for (i64 place : places) chosen.push_back(open[place]);
        } else if (wanted > 0) {
            chosen.assign(open.begin(), open.end());
        }
        std::merge(sure.begin(), sure.end(), chosen.begin(), chosen.end(), out);
    }
#endif
};

#ifdef ROUGH
// Whether rough scores of a query's keys first take less time.
static inline bool rough_pays(i64 keys, i64 K) { return K > 0 && keys >= 8 * K; }

// The keys of sequences that enough queries can use rough scores of, not filled in.
static std::vector<RoughKeys> rough_keys(const std::vector<Block>& blocks, const i64* start, const i64* end, i64 J, i64 d, i64 K) {
    std::vector<RoughKeys> found;
    if (d > ROUGH_DIM || J > ROUGH_HEADS) return found;
    for (size_t b = 0, next; b < blocks.size(); b = next) {
        i64 low = INT64_MAX, high = 0, queries = 0;
        for (next = b; next < blocks.size() && blocks[next].sequence == blocks[b].sequence; next++)
            for (i64 r = blocks[next].first; r < blocks[next].last; r++)
                if (rough_pays(end[r] - start[r], K)) low = std::min(low, start[r]), high = std::max(high, end[r]), queries++;
        if (queries >= 16) found.emplace_back(blocks[b].sequence, low, high, d);
    }
    return found;
}
#endif

template <class T>
static void select(const T* q, const Lines<T>& keys, const float* w, const i64* start, const i64* end, i64* out,
                   i64 queries, i64 J, i64 d, i64 K, float scale) {
    i64 S = 1, lines = 1;
    for (i64 i = 0; i < queries; i++) S = std::max(S, end[i]);
    // Queries that share a tile must fit into the cache beside it.
    i64 most = std::min<i64>(std::max<i64>(queries / 8, 8), J * d > 2048 ? 16 : 32);
    std::vector<Block> blocks = blocks_of(keys, queries, most);
    for (const Block& block : blocks) lines = std::max(lines, block.last - block.first);
    // Few queries against many keys (decode): the key tiles are what threads share.
    i64 tasks = blocks.size(), parts = tasks < 8 ? std::min<i64>((S + TILE - 1) / TILE, 8) : 1;
    std::vector<Best> shared;
    for (i64 i = 0; parts > 1 && i < tasks * lines * parts; i++) shared.emplace_back(K, S);
#ifdef ROUGH
    std::vector<RoughKeys> rough;
    if (parts == 1) rough = rough_keys(blocks, start, end, J, d, K);
#endif
#pragma omp parallel if (queries * S * J * d > SHARED)
    {
#ifdef ROUGH
        for (RoughKeys& own : rough) {
#pragma omp for schedule(static)
            for (i64 tile = own.first; tile < own.last; tile++)
                own.set(tile, keys, std::min<i64>(TILE, own.end - tile * TILE));
        }
#endif
        Selection<T> selection(q, keys, w, start, end, J, d, K, scale, lines);
        std::vector<i64> own, many;
        std::vector<Best> best;
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < tasks * parts; item++) {
            i64 task = item / parts, part = item % parts;
            Block block = blocks[task];
            own.clear(), many.clear();
#ifdef ROUGH
            const RoughKeys* first = nullptr;
            for (const RoughKeys& one : rough)
                if (one.sequence == block.sequence) first = &one;
            auto pays = [&](i64 n) { return first && rough_pays(n, K); };
#else
            auto pays = [](i64) { return false; };
#endif
            for (i64 r = block.first; r < block.last; r++) {
                i64 n = end[r] - start[r];
                if (n > K)
                    (pays(n) ? many : own).push_back(r);
                else if (part == 0)
                    for (i64 i = 0; i < K; i++) out[r * K + i] = i < n ? start[r] + i : -1;
            }
            if (own.empty() && many.empty()) continue;
            selection.read(block);
#ifdef ROUGH
            if (!many.empty()) selection.rough(block, *first, many, own, out);
#endif
            if (parts > 1) {
                selection.exact(block, own, part, parts, [&](size_t i) -> Best& {
                    return shared[(task * lines + own[i] - block.first) * parts + part];
                });
                continue;
            }
            while (best.size() < own.size()) best.emplace_back(K, S);
            for (Best& one : best) one.clear();
            selection.exact(block, own, 0, 1, [&](size_t i) -> Best& { return best[i]; });
            for (size_t i = 0; i < own.size(); i++) best[i].take(out + own[i] * K);
        }
#pragma omp for schedule(static)
        for (i64 item = 0; item < (parts > 1 ? tasks * lines : 0); item++) {
            Block block = blocks[item / lines];
            i64 r = block.first + item % lines;
            if (r >= block.last || end[r] - start[r] <= K) continue;
            for (i64 part = 1; part < parts; part++) shared[item * parts + part].give(shared[item * parts]);
            shared[item * parts].take(out + r * K);
        }
    }
}

// Scores of chosen keys: out[r, k] = sum_j w[r, j] * relu(q[r, j] . key * scale); empty slots give 0.
template <class T>
static void selected(const T* q, const T* keys, const float* w, const i64* indices, float* out, i64 B, i64 Q, i64 S,
                     i64 J, i64 d, i64 K, float scale) {
    i64 dp = up16(d), Kp = up16(K), Jp = (J + 3) / 4 * 4;
#pragma omp parallel
    {
        Zeros qf(Jp * dp), picked(Kp * dp), dots(Jp * Kp);
#pragma omp for schedule(dynamic, 8)
        for (i64 r = 0; r < B * Q; r++) {
            const i64* index = indices + r * K;
            i64 n = filled(index, K);
            for (i64 j = 0; j < J; j++) widen(q + (r * J + j) * d, &qf[j * dp], d, dp);
            gather(keys + r / Q * S * d, index, n, d, dp, picked.data());
            for (i64 k = 0; k < n; k += 4)
                for (i64 j = 0; j < Jp; j += 4) dots4x4(&qf[j * dp], &picked[k * dp], dp, dp, scale, &dots[j * Kp + k], Kp);
            for (i64 k = 0; k < K; k += 16) {
                v16 sum = {};
                for (i64 j = 0; j < J; j++) {
                    v16 x = at(&dots[j * Kp + k]);
                    sum += w[r * J + j] * (x < 0.0f ? v16{} : x);
                }
                for (i64 i = 0; i < 16 && k + i < K; i++) out[r * K + k + i] = k + i < n ? sum[i] : 0.0f;
            }
        }
    }
}

template <class T>
static void selected_backward(const T* q, const T* keys, const float* w, const i64* indices, const float* grad,
                              T* grad_q, float* grad_keys, float* grad_w, i64 B, i64 Q, i64 S, i64 J, i64 d, i64 K,
                              float scale) {
    i64 dp = up16(d), Kp = up16(K), Jp = (J + 3) / 4 * 4, parts = parts_of(B);
    Zeros sums(B * parts * S * dp);
#pragma omp parallel
    {
        Zeros qf(Jp * dp), picked(Kp * dp), dots(Jp * Kp), acc(Jp * dp), g(Kp);
#pragma omp for schedule(dynamic, 1)
        for (i64 item = 0; item < B * parts; item++) {
            i64 b = item / parts, part = item % parts;
            float* sum = &sums[item * S * dp];
            for (i64 t = Q * part / parts; t < Q * (part + 1) / parts; t++) {
                i64 r = b * Q + t;
                const i64* index = indices + r * K;
                i64 n = filled(index, K);
                for (i64 k = 0; k < Kp; k++) g[k] = k < n ? grad[r * K + k] : 0.0f;
                for (i64 j = 0; j < J; j++) widen(q + (r * J + j) * d, &qf[j * dp], d, dp);
                gather(keys + b * S * d, index, n, d, dp, picked.data());
                for (i64 k = 0; k < n; k += 4)
                    for (i64 j = 0; j < Jp; j += 4)
                        dots4x4(&qf[j * dp], &picked[k * dp], dp, dp, scale, &dots[j * Kp + k], Kp);
                for (i64 j = 0; j < J; j++) {  // dots become their own gradients
                    v16 along = {}, weight = splat(w[r * J + j] * scale);
                    for (i64 k = 0; k < up16(n); k += 16) {
                        v16 x = at(&dots[j * Kp + k]), gk = at(&g[k]);
                        along += x > 0.0f ? gk * x : v16{};
                        at(&dots[j * Kp + k]) = x > 0.0f ? gk * weight : v16{};
                    }
                    grad_w[r * J + j] = hsum(along);
                }
                mix(dots.data(), Kp, picked.data(), dp, n, acc.data(), J, dp);
                for (i64 j = 0; j < J; j++)
                    for (i64 i = 0; i < d; i += 16) store16(grad_q + (r * J + j) * d + i, at(&acc[j * dp + i]), d - i);
                for (i64 k = 0; k < n; k += 4) {
                    float* to[4];  // slots behind the last one have no gradient: adding them to row 0 changes nothing
                    for (i64 s = 0; s < 4; s++) to[s] = sum + index[k + s < n ? k + s : 0] * dp;
                    for (i64 i = 0; i < dp; i += 16) {
                        v16 x[4] = {};
                        for (i64 j = 0; j < J; j++) {
                            v16 qj = at(&qf[j * dp + i]);
                            const float* dj = &dots[j * Kp + k];
#pragma GCC unroll 4
                            for (int s = 0; s < 4; s++) x[s] += dj[s] * qj;
                        }
                        for (int s = 0; s < 4; s++) at(to[s] + i) += x[s];
                    }
                }
            }
        }
#pragma omp for schedule(static)
        for (i64 line = 0; line < B * S; line++)
            for (i64 i = 0; i < d; i++) {
                float total = 0.0f;
                for (i64 part = 0; part < parts; part++)
                    total += sums[((line / S * parts + part) * S + line % S) * dp + i];
                grad_keys[line * d + i] = total;
            }
    }
}
