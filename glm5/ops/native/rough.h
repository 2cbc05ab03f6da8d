// Scores of the indexer from int8 queries and keys, with a proven bound of their error: only keys that the bound leaves
// undecided need exact scores, so that the selected keys are those of exact scores for all.
//
// A query q of head j is s * q' with integers q' and a rest e = q - s q', a key k likewise with a rest f. ReLU never
// stretches a difference, so the score sum_j w_j relu(q_j . k) differs from that of the integers by
// sum_j m_j w_j (e_j . k + s_j q'_j . f) with all m_j in 0 .. 1, which is at most A |f| + B |k|. A is the largest length of
// sum_j m_j v_j with v_j = w_j s_j q'_j: its square is at most the sum of the positive products v_i . v_j. B is the same
// with v_j = w_j e_j. Both scores are computed in fp32; `slack` bounds the rounding of both.
#pragma once

#include "attention.h"
#include "integers.h"
#include "topk.h"

const int TILE = 64;  // keys that are scored together

#if defined(VNNI) || defined(__AVX2__)
#define ROUGH
const int KEY_MOST = PARTS == 1 ? 127 : 63;  // without VNNI, sums of two products must fit into 16 bits
const int KEY_SHIFT = KEY_MOST + 1;          // keys are stored as k' + KEY_SHIFT, which is never negative
const i64 ROUGH_DIM = 1024, ROUGH_HEADS = 128;  // limits within which the constants below hold

static inline i64 up4(i64 n) { return (n + 3) / 4 * 4; }

// A row x [width], a multiple of 16, as integers of at most `most` in x = scale * q + rest: the scale, and |x| and |rest|,
// rounded up.
struct Rounded {
    float scale, size, error;
};
static Rounded round_to(const float* x, i64 width, int most, int32_t* q) {
    Floats top = {}, size = {}, error = {};
    for (i64 i = 0; i < width; i += LANES) {
        Floats y = some(x + i), a = (Floats)((Ints)y & 0x7fffffff);
        top = a > top ? a : top;
        size += y * y;  // NaN and infinity end up here
    }
    float largest = 0.0f, sizes = 0.0f, errors = 0.0f;
    for (i64 i = 0; i < LANES; i++) largest = std::max(largest, top[i]);
    float scale = std::max(largest / float(most), 1e-30f), inverse = 1.0f / scale;
    for (i64 i = 0; i < width; i += LANES) {
        Floats y = some(x + i);
        Ints near = (Ints)(y * inverse + 12582912.0f) - 0x4b400000;  // as in `round_row`
        near = near > most ? Ints{} + most : near < -most ? Ints{} - most : near;
        Floats rest = y - __builtin_convertvector(near, Floats) * scale;
        error += rest * rest;
        *(Ints*)(q + i) = near;
    }
    for (i64 i = 0; i < LANES; i++) sizes += size[i], errors += error[i];
    // What squares lose to underflow is below 1e-17 in a sum of ROUGH_DIM.
    return {scale, std::sqrt(sizes) * 1.0005f + 1e-17f, std::sqrt(errors) * 1.0005f + 1e-17f};
}

// Keys of one sequence from a tile on: values [tiles][d / 4][64][4], and of each key its scale, |k| and |f|.
class RoughKeys {
    Memory<uint8_t> values_;
    Memory<float> numbers_;  // [tiles][3][64]
    i64 d_;

  public:
    i64 sequence, first, last, end;  // tiles, and the end of the last one's keys

    RoughKeys(i64 own, i64 low, i64 high, i64 d)
        : d_(d), sequence(own), first(low / TILE), last((high + TILE - 1) / TILE), end(high) {
        values_ = memory<uint8_t>((last - first) * up4(d) * TILE), numbers_ = floats((last - first) * 3 * TILE);
    }

    const uint8_t* values(i64 tile) const { return &values_[(tile - first) * up4(d_) * TILE]; }
    const float* numbers(i64 tile) const { return &numbers_[(tile - first) * 3 * TILE]; }

    // The first `count` keys of a tile.
    template <class T>
    void set(i64 tile, const Lines<T>& keys, i64 count) {
        uint8_t* to = &values_[(tile - first) * up4(d_) * TILE];
        float* number = &numbers_[(tile - first) * 3 * TILE];
        memset(to, KEY_SHIFT, up4(d_) * TILE);
        std::fill_n(number, 3 * TILE, 0.0f);
        float row[ROUGH_DIM];
        int32_t q[ROUGH_DIM];
        for (i64 r = 0; r < count; r++) {
            keys.read(sequence, tile * TILE + r, row, up16(d_));
            Rounded found = round_to(row, up16(d_), KEY_MOST, q);
            number[r] = found.scale, number[TILE + r] = found.size, number[2 * TILE + r] = found.error;
            for (i64 i = 0; i < d_; i += 4) {
                uint32_t four = 0;
                for (int k = 0; k < 4; k++) four |= uint32_t(q[i + k] + KEY_SHIFT) << 8 * k;
                memcpy(to + i * TILE + r * 4, &four, 4);
            }
        }
    }
};

// The heads of a query q [J, d] with weights w [J].
class RoughQuery {
    std::vector<int8_t> q_;   // [J, d / 4 * 4]
    std::vector<int> start_;  // minus what KEY_SHIFT adds to a sum
    std::vector<float> w_;
    float a_ = 0.0f, b_ = 0.0f, slack_ = 0.0f, reach_ = 0.0f;

    // Largest length of a sum of some of v [Jp, dp], which is padded with zeros to multiples of 4 and 16; rounded up.
    static float longest(const float* v, i64 Jp, i64 dp) {
        float total = 0.0f;
        for (i64 i = 0; i < Jp; i += 4)
            for (i64 j = 0; j <= i; j += 4) {
                float products[16], sum = 0.0f;
                dots4x4(v + i * dp, v + j * dp, dp, dp, 1.0f, products, 4);
                for (float x : products) sum += x > 0.0f || x != x ? x : 0.0f;
                total += i == j ? sum : 2.0f * sum;
            }
        return std::sqrt(total) * 1.001f + 1e-15f;
    }

  public:
    // Query q [J, d] with weights w [J]. False if the numbers are too large for the bound.
    bool set(const float* q, const float* w, i64 J, i64 d) {
        i64 line = up4(d), dp = up16(d), Jp = up4(J);
        q_.assign(J * line, 0), start_.assign(J, 0), w_.assign(J, 0.0f);
        auto room = floats(2 * Jp * dp + dp);
        float *whole = room.get(), *rest = whole + Jp * dp, *row = rest + Jp * dp;
        std::fill_n(whole + J * dp, (Jp - J) * dp, 0.0f), std::fill_n(rest + J * dp, (Jp - J) * dp, 0.0f);
        int32_t near[ROUGH_DIM];
        float weights = 0.0f, sizes = 0.0f, largest = 0.0f;
        for (i64 j = 0; j < J; j++) {
            widen(q + j * d, row, d, dp);
            Rounded found = round_to(row, dp, 127, near);
            w_[j] = w[j] * found.scale;
            for (i64 i = 0; i < dp; i += LANES) {
                Floats part = __builtin_convertvector(ints(near + i), Floats) * found.scale;
                *(Floats*)(whole + j * dp + i) = w[j] * part, *(Floats*)(rest + j * dp + i) = w[j] * (some(row + i) - part);
            }
            int sum = 0;
            for (i64 i = 0; i < d; i++) q_[j * line + i] = int8_t(near[i]), sum += near[i];
            start_[j] = -KEY_SHIFT * sum;
            weights += std::fabs(w[j]), sizes += std::fabs(w[j]) * found.size, largest = std::max(largest, found.size);
        }
        a_ = longest(whole, Jp, dp), b_ = longest(rest, Jp, dp);
        // Dot products and sums: at most so many roundings of 2^-24, each of at most twice |w| |q| |k|.
        slack_ = sizes * float(d + 2 * J + 16) * 1.2e-7f + 1e-17f;
        reach_ = sizes + largest + a_ + b_;
        return weights <= 1e12f && reach_ <= 1e18f;  // false for NaN
    }

    // Of 64 keys of a tile: sums of products and weights, to be multiplied with the scales of the keys.
    void scores(const uint8_t* values, i64 J, i64 d, float* total) const {
        constexpr int HEADS = PARTS == 1 ? 4 : 2, STEP = 4 * 16 / PARTS;
        for (i64 s = 0; s < TILE; s += STEP) {
            std::fill_n(total + s, STEP, 0.0f);
            i64 j = 0;
            for (; j + HEADS <= J; j += HEADS) heads<HEADS>(values + 4 * s, j, d, total + s);
            for (; j < J; j++) heads<1>(values + 4 * s, j, d, total + s);
        }
    }

    // Bounds of the scores of LANES keys from these sums and the numbers of the keys (see `RoughKeys`).
    ALWAYS_INLINE void bounds(const float* total, const float* number, Floats& low, Floats& high) const {
        Floats size = some(number + TILE), score = some(total) * some(number);
        Floats bound = (a_ * some(number + 2 * TILE) + (b_ + slack_) * size) * 1.001f + 1e-30f;
        low = score - bound, high = score + bound;
        // Larger numbers might overflow in one of the two computations. NaN compares as false.
        Ints known = (size * reach_ <= 1e30f) & (low <= high);
        low = known ? low : Floats{} - INFINITY, high = known ? high : Floats{} + INFINITY;
    }

  private:
    template <int HEADS>
    ALWAYS_INLINE void heads(const uint8_t* values, i64 j, i64 d, float* total) const {
        i64 quads = up4(d) / 4;
        Sums acc[HEADS][4];
        for (int h = 0; h < HEADS; h++)
            for (int c = 0; c < 4; c++) acc[h][c] = same(start_[j + h]);
        for (i64 i = 0; i < quads; i++) {
            const uint8_t* from = values + i * 4 * TILE;
            Sums t[4];
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) t[c] = line(from + c * (64 / PARTS));
#pragma GCC unroll 4
            for (int h = 0; h < HEADS; h++) {
                Sums x = fours(&q_[((j + h) * quads + i) * 4]);
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) acc[h][c] = add_products(acc[h][c], t[c], x);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) add_positive(acc[h][c], w_[j + h], total + c * (16 / PARTS));
    }

#ifdef VNNI
    static Sums same(int x) { return _mm512_set1_epi32(x); }
    static ALWAYS_INLINE Sums add_products(Sums acc, Sums t, Sums x) { return _mm512_dpbusd_epi32(acc, t, x); }
    static ALWAYS_INLINE void add_positive(Sums acc, float w, float* to) {
        at(to) += w * (v16)_mm512_cvtepi32_ps(_mm512_max_epi32(acc, _mm512_setzero_si512()));
    }
#else
    static Sums same(int x) { return _mm256_set1_epi32(x); }
    static ALWAYS_INLINE Sums add_products(Sums acc, Sums t, Sums x) { return add_pairs(acc, _mm256_maddubs_epi16(t, x)); }
    static ALWAYS_INLINE void add_positive(Sums acc, float w, float* to) {
        half(to) += w * (v8)_mm256_cvtepi32_ps(_mm256_max_epi32(acc, _mm256_setzero_si256()));
    }
#endif
};

// Keys of a query, at rising positions, that are not known to be worse than k others.
class Undecided {
    Memory<float> low_, high_;
    Memory<int32_t> where_, order_, rest_;
    i64 k_, room_, n_ = 0;
    float least_ = -INFINITY;  // k keys have at least this score

    void orders(const float* x) {
        for (i64 i = 0; i < n_; i += LANES) *(Ints*)&order_[i] = order_of(some(x + i));
    }
    void shrink() {
        orders(low_.get());
        least_ = float_of(kth_largest(order_.get(), rest_.get(), n_, k_));
        i64 kept = 0;
        for (i64 i = 0; i < n_; i += LANES) {
            Floats low = some(&low_[i]), high = some(&high_[i]);
            Ints where = ints(&where_[i]);
            unsigned own = bits(high >= least_) & lanes(n_ - i);
            compress((Ints)low, own, &low_[kept]), compress((Ints)high, own, &high_[kept]);
            compress(where, own, &where_[kept]);
            kept += __builtin_popcount(own);
        }
        n_ = kept;
    }
    static float float_of(int32_t order) {
        int32_t bits = order ^ ((order >> 31) & 0x7fffffff);
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }

  public:
    explicit Undecided(i64 k)
        : low_(floats(room(k) + 32)), high_(floats(room(k) + 32)), where_(memory<int32_t>(room(k) + 32)),
          order_(memory<int32_t>(room(k) + 32)), rest_(memory<int32_t>(room(k) + 32)), k_(k), room_(room(k)) {}

    static i64 room(i64 k) { return up16(6 * k + 256); }

    void clear() { n_ = 0, least_ = -INFINITY; }

    // Bounds of LANES scores from position `at` on; those whose bits are set are valid. False if too many are undecided.
    ALWAYS_INLINE bool add(Floats low, Floats high, unsigned valid, i64 at) {
        unsigned keep = bits(high >= least_) & valid;
        if (!keep) return true;
        if (n_ + LANES > room_) {
            shrink();
            if (n_ > room_ * 2 / 3) return false;
        }
        compress((Ints)low, keep, &low_[n_]), compress((Ints)high, keep, &high_[n_]);
        compress(counting() + int32_t(at), keep, &where_[n_]);
        n_ += __builtin_popcount(keep);
        return true;
    }

    // `sure` takes the positions of keys that are among the k best whatever the scores within the bounds, `open` those that
    // may be; both ascending. More than k keys have been added.
    void take(std::vector<int32_t>& sure, std::vector<int32_t>& open) {
        shrink();
        sure.clear(), open.clear();
        float most = INFINITY;  // the k-th best score is no higher
        if (n_ > k_) orders(high_.get()), most = float_of(kth_largest(order_.get(), rest_.get(), n_, k_));
        for (i64 i = 0; i < n_; i++) (n_ <= k_ || low_[i] > most ? sure : open).push_back(where_[i]);
    }
};
#endif
