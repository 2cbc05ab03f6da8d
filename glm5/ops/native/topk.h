// The k largest of many scores: higher score first, then lower position; NaN is a tie with -infinity, -0 with 0.
#pragma once

#include "vectors.h"

const unsigned EVERY = (1u << LANES) - 1;

static inline Ints ints(const void* p) { return *(const Ints*)p; }
static inline Floats some(const float* p) { return *(const Floats*)p; }
static inline Ints counting() {
    const i16v numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return ints(&numbers);
}
// The first n lanes.
static inline unsigned lanes(i64 n) { return n >= LANES ? EVERY : (1u << n) - 1; }

// A bit for each lane of a comparison's result.
static ALWAYS_INLINE unsigned bits(Ints lanes) {
#if defined(__AVX512F__)
    return _mm512_cmplt_epi32_mask((__m512i)lanes, _mm512_setzero_si512());
#elif defined(__AVX2__)
    return unsigned(_mm256_movemask_ps((__m256)lanes));
#else
    unsigned found = 0;
    for (i64 i = 0; i < LANES; i++) found |= (lanes[i] ? 1u : 0u) << i;
    return found;
#endif
}

// Writes the lanes of x whose bits are set one after the other, and anything behind them, LANES elements in all.
template <class T>
static ALWAYS_INLINE void compress(Ints x, unsigned bits, T* to) {
    static_assert(sizeof(T) == 4, "lanes are moved as they are");
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(bits), (__m512i)x));
#elif defined(__AVX2__) && defined(__BMI2__)
    uint64_t places = _pext_u64(0x0706050403020100, _pdep_u64(bits, 0x0101010101010101) * 255);
    __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(places)));
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32((__m256i)x, order));
#else
    for (i64 i = 0; i < LANES; i++)
        if (bits >> i & 1) memcpy(to++, (const char*)&x + 4 * i, 4);
#endif
}

// Integers in the order of scores.
static ALWAYS_INLINE Ints order_of(Floats x) {
    Ints u = (Ints)(x + 0.0f);  // -0 becomes +0
    u = u ^ ((u >> 31) & 0x7fffffff);
    return x == x ? u : Ints{} + int32_t(0x807fffff);  // that of -infinity
}

// The k-th largest of n > k integers, bit by bit from the highest. Each bit halves those that may be it, so all passes
// together read about twice n. `rest` has room for n and 16 more.
static int32_t kth_largest(const int32_t* from, int32_t* rest, i64 n, i64 k) {
    int32_t threshold = INT32_MIN;  // `rest` gets those between threshold and threshold + 2^(bit + 1)
    for (int bit = 31; bit >= 0; bit--) {
        int32_t candidate = int32_t(uint32_t(threshold) + (1u << bit));
        const Ints below = Ints{} + candidate - 1;
        i64 total = 0, i = 0;
        for (; i + LANES <= n; i += LANES) total += __builtin_popcount(bits(ints(from + i) > below));
        for (; i < n; i++) total += from[i] >= candidate;
        bool raise = total >= k;
        if (raise)
            threshold = candidate;
        else
            k -= total;
        if (total == (raise ? n : 0)) continue;  // the bit is the same in all: that of the sign, or of the exponent
        i64 kept = 0;
        i = 0;
        for (; i + LANES <= n; i += LANES) {
            Ints x = ints(from + i);
            unsigned keep = bits(x > below) ^ (raise ? 0 : EVERY);
            compress(x, keep, rest + kept);
            kept += __builtin_popcount(keep);
        }
        for (; i < n; i++) {
            int32_t x = from[i];
            rest[kept] = x;
            kept += (x >= candidate) == raise;
        }
        from = rest, n = kept;
    }
    return threshold;
}

// Positions of the k largest of n > k integers, ascending: sink(i) takes each. Ties go to the lower position. `rest` has
// room for n and 16 more. Returns the k-th largest.
template <class F>
static inline int32_t choose(const int32_t* order, i64 n, i64 k, int32_t* rest, const F& sink) {
    int32_t threshold = kth_largest(order, rest, n, k);
    i64 above = 0;
    for (i64 i = 0; i < n; i++) above += order[i] > threshold;
    i64 ties = k - above;
    for (i64 i = 0; i < n; i += LANES) {
        Ints x = {};
        memcpy(&x, order + i, std::min(LANES, n - i) * 4);
        unsigned greater = bits(x > threshold) & lanes(n - i), equal = bits(x == threshold) & lanes(n - i);
        for (unsigned left = greater | equal; left; left &= left - 1) {
            int lane = __builtin_ctz(left);
            if (!(greater >> lane & 1) && ties-- <= 0) continue;
            sink(i + lane);
        }
    }
    return threshold;
}

// Positions of the k largest of n > k scores from position `first` on, ascending. `order` has room for twice n and 32 more.
static void topk_row(const float* scores, i64 n, i64 k, i64 first, i64* out, int32_t* order) {
    for (i64 i = 0; i < n; i += LANES) {
        float few[LANES];
        if (n - i < LANES) std::copy_n(scores + i, n - i, few);
        Ints x = order_of(some(n - i < LANES ? few : scores + i));
        memcpy(order + i, &x, std::min(LANES, n - i) * 4);
    }
    choose(order, n, k, order + up16(n), [&](i64 i) { *out++ = first + i; });
}

// The k best of the scores that have been added, at rising positions. No score is kept that cannot be among them: one that
// is no larger than k earlier ones has lost, a tie too.
class Best {
    Memory<int32_t> order_, rest_;
    Memory<int32_t> where_;
    i64 k_, room_, n_ = 0;
    int32_t least_ = INT32_MIN;  // a score in `order` must be above it

    void shrink() {
        i64 n = 0;
        least_ = choose(order_.get(), n_, k_, rest_.get(), [&](i64 i) { order_[n] = order_[i], where_[n++] = where_[i]; });
        n_ = n;
    }

  public:
    Best(i64 k, i64 keys)
        : order_(memory<int32_t>(room(k, keys) + 32)), rest_(memory<int32_t>(room(k, keys) + 32)),
          where_(memory<int32_t>(room(k, keys) + 32)), k_(k), room_(room(k, keys)) {}

    static i64 room(i64 k, i64 keys) { return std::min(up16(keys), up16(std::max(2 * k, k + 512))); }

    void clear() { n_ = 0, least_ = INT32_MIN; }

    // LANES scores from position `at` on; those whose bits are set are valid.
    ALWAYS_INLINE void add(Floats scores, unsigned valid, i64 at) {
        Ints order = order_of(scores);
        unsigned keep = bits(order > least_) & valid;
        if (!keep) return;
        if (n_ + LANES > room_ && n_ > k_) {
            shrink();
            keep = bits(order > least_) & valid;
        }
        compress(order, keep, &order_[n_]);
        compress(counting() + int32_t(at), keep, &where_[n_]);
        n_ += __builtin_popcount(keep);
    }

    // Their positions, ascending; how many.
    i64 take(i64* out) {
        if (n_ > k_) shrink();
        for (i64 i = 0; i < n_; i++) out[i] = where_[i];
        return n_;
    }

    // All that are kept move to the end of another: those here are at higher positions.
    void give(Best& to) const {
        for (i64 i = 0; i < n_; i += LANES) {
            if (to.n_ + LANES > to.room_ && to.n_ > to.k_) to.shrink();
            Ints order = ints(&order_[i]);
            unsigned own = bits(order > to.least_) & lanes(n_ - i);
            compress(order, own, &to.order_[to.n_]);
            compress(ints(&where_[i]), own, &to.where_[to.n_]);
            to.n_ += __builtin_popcount(own);
        }
    }
};
