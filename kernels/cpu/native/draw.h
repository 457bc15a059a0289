// Draws of tokens from rows of logits: what ../../draws.py does, with its noise and its order of equals. Knows nothing
// of tensors or of requests.
//
// The noise of an id depends on the key and the id alone, so a row's token depends on that row alone. Why few ids have
// to be scored, and why what top_p keeps need not be sorted, is told there.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "scratch.h"
#include "simd.h"

namespace radixrt {

struct Draw {
    const float* logits;  // [count], at least one
    const int64_t* ids;   // [count], or null for 0..count
    int64_t count;
    double temperature;   // 0 takes the largest
    double top_p, min_p;
    uint64_t key_low, key_high;
};

constexpr double LOG2 = 0.6931471805599453;
constexpr int RARE_BITS = 8;
constexpr uint8_t RARE = 256 - (1 << (8 - RARE_BITS));  // first bytes from here on begin with so many ones
constexpr double NEAR_BOUNDARY = 1e-4;  // weights and sums in float32 are nearer than a third of it

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) at a step, with half of the key before it and half in its middle.
template <class Word>
inline Word mixed(const Draw& draw, Word step) {
    Word word = step + draw.key_high;
    word ^= word >> 30;
    word *= 0xBF58476D1CE4E5B9u;
    word ^= draw.key_low;
    word ^= word >> 27;
    word *= 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

constexpr uint64_t STEP = 0x9E3779B97F4A7C15u;

typedef uint64_t u64x8 __attribute__((vector_size(64), may_alias));

// The first byte of the noise of an id: ids 8i to 8i + 7 have theirs in one word.
inline uint8_t first_byte(const Draw& draw, uint64_t id) { return mixed(draw, ~(id / 8) * STEP) >> id % 8 * 8; }

// Those of ids 0..count, and of some more up to a whole vector.
inline void first_bytes(const Draw& draw, uint8_t* to, int64_t count) {
    u64x8 steps = ~u64x8{0, 1, 2, 3, 4, 5, 6, 7} * STEP;
    for (int64_t i = 0; i < count; i += sizeof steps, steps -= 8 * STEP) store(to + i, mixed(draw, steps));
}

// The word behind the noise of an id. Its bits are those of a uniform number u, and the noise is -log(-log u).
inline uint64_t word_of(const Draw& draw, uint64_t id, uint8_t first) {
    return (uint64_t)first << 56 | mixed(draw, id * STEP) >> 8;
}

inline double noise(uint64_t word) { return -std::log(-std::log(((double)(word >> 12) + 0.5) * 0x1p-52)); }

// At most so much noise: -log u >= 1 - u, and that is 2^-(n + 1) at least where u begins with n ones.
inline double most_noise(uint64_t word) { return (__builtin_clzll(~word | 1) + 1) * LOG2 + 1e-6; }

// Some of a draw's ids: logits, first bytes, and where they are among all.
struct Some {
    const float* logits;
    const uint8_t* first;
    const int32_t* places;  // null for 0..count
    int64_t count;

    int64_t place(int64_t i) const { return places ? places[i] : i; }
};

inline int64_t id_at(const Draw& draw, int64_t place) { return draw.ids ? draw.ids[place] : place; }

// The largest of at least one number, and the first place where it is.
struct Peak {
    float value;
    int64_t place;
};

inline Peak peak_of(const float* x, int64_t count) {
    constexpr int SIDES = 4;  // maxima that do not wait for each other
    constexpr int64_t BLOCK = 32 * SIDES * LANES;
    Peak peak = {-std::numeric_limits<float>::infinity(), 0};
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t end = std::min(count, begin + BLOCK);
        f32x16 most[SIDES];
        std::fill_n(most, SIDES, splat(peak.value));
        int64_t i = begin;
        for (; i + SIDES * LANES <= end; i += SIDES * LANES)
            UNROLL for (int s = 0; s < SIDES; ++s) most[s] = larger(most[s], load<f32x16>(x + i + s * LANES));
        const f32x16 all = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        float found = across(all, [](auto a, auto b) { return larger(a, b); });
        for (; i < end; ++i) found = larger(found, x[i]);
        if (found > peak.value) peak = {found, begin};
    }
    peak.place = std::find(x + peak.place, x + count, peak.value) - x;
    return peak;
}

// Call f for each bit that is set, in order.
template <class F>
inline void each_set(uint64_t bits, const F& f) {
    for (; bits; bits &= bits - 1) f(__builtin_ctzll(bits));
}

// The first index of the largest of logits / temperature + noise.
inline int64_t noisy_argmax(const Draw& draw, const Some& some, const Peak& peak) {
    constexpr double MOST = std::numeric_limits<float>::max();
    int64_t best = peak.place;
    double score = -std::numeric_limits<double>::infinity();
    float least = 0;  // of logits that can win with the noise of first bytes that are not rare
    const auto try_out = [&](int64_t i) {
        const double size = ((double)some.logits[i] - peak.value) / draw.temperature;
        const uint64_t word = word_of(draw, id_at(draw, some.place(i)), some.first[i]);
        if (size + most_noise(word) < score) return;
        const double its = size + noise(word);
        if (its < score || (its == score && i > best)) return;
        score = its;
        best = i;
        const double enough = peak.value + draw.temperature * (score - RARE_BITS * LOG2 - 1e-6);
        least = std::nextafter((float)std::clamp(enough, -MOST, MOST), (float)-MOST);
    };
    try_out(best);
    for (int64_t begin = 0; begin < some.count; begin += BITS) {
        const int64_t length = std::min(BITS, some.count - begin);
        const uint64_t able = at_least(some.logits + begin, length, least) | at_least(some.first + begin, length, RARE);
        each_set(able, [&](int64_t i) { try_out(begin + i); });
    }
    return best;
}

// e^((logit - peak) / temperature).
inline double weight_of(const Draw& draw, float logit, double peak) {
    return std::exp(((double)logit - peak) / draw.temperature);
}

// Weights of all, and their sum: in float32, or rounded from float64 where the temperature is extreme.
inline double weigh(const Draw& draw, double peak, float* weights) {
    constexpr int64_t BLOCK = 4096;
    const bool is_extreme = !(1e-6 < draw.temperature && draw.temperature < 1e6);
    const float factor = 1.4426950408889634 / draw.temperature, top = peak;
    double total = 0;
    for (int64_t begin = 0; begin < draw.count; begin += BLOCK) {
        const int64_t end = std::min(draw.count, begin + BLOCK);
        if (is_extreme) {
            for (int64_t i = begin; i < end; ++i) total += weights[i] = weight_of(draw, draw.logits[i], peak);
            continue;
        }
        f32x16 sums = {};
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) {
            const f32x16 its = exp2((load<f32x16>(draw.logits + i) - top) * factor);
            store(weights + i, its);
            sums = sums + its;
        }
        total += across(sums, [](auto a, auto b) { return a + b; });
        for (; i < end; ++i) total += weights[i] = exp2((splat(draw.logits[i]) - top) * factor)[0];
    }
    return total;
}

// The place drawn from what top_p (Holtzman et al., 2020) and then min_p keep: drawn from ever fewer until it is kept.
inline int64_t draw_from_top(const Draw& draw, double peak) {
    static thread_local Scratch all_weights, places_left, weights_left, logits_left, first_left;
    float* weights = all_weights.get<float>(draw.count);
    const double total = weigh(draw, peak, weights);
    // All below hold less than 1 - top_p together.
    const double floor = std::max(draw.min_p, (1 - draw.top_p) * total / draw.count) * (1 - NEAR_BOUNDARY);
    int32_t* places = places_left.get<int32_t>(draw.count);
    float *left = weights_left.get<float>(draw.count), *logits = logits_left.get<float>(draw.count);
    uint8_t* bytes = first_left.get<uint8_t>(draw.count);
    int64_t count = 0;
    const auto keep = [&](int64_t place, float weight, float logit, uint8_t byte) {
        places[count] = place;
        left[count] = weight;
        logits[count] = logit;
        bytes[count++] = byte;
    };
    const float least = std::nextafter((float)floor, 0.0f);
    for (int64_t begin = 0; begin < draw.count; begin += BITS)
        each_set(at_least(weights + begin, std::min(BITS, draw.count - begin), least), [&](int64_t i) {
            const int64_t place = begin + i;
            keep(place, weights[place], draw.logits[place], first_byte(draw, id_at(draw, place)));
        });
    for (;;) {
        const int64_t at = noisy_argmax(draw, {logits, bytes, places, count}, peak_of(logits, count));
        const float logit = logits[at];
        const auto is_ahead = [&](int64_t i) { return logits[i] > logit || (logits[i] == logit && i < at); };
        double before = 0, limit = draw.top_p * total;
        for (int64_t i = 0; i < count; ++i) before += is_ahead(i) ? left[i] : 0;
        if (std::abs(before - limit) <= NEAR_BOUNDARY * limit) {
            double exact = 0;
            before = 0;
            for (int64_t i = 0; i < draw.count; ++i) exact += weight_of(draw, draw.logits[i], peak);
            for (int64_t i = 0; i < count; ++i) before += is_ahead(i) ? weight_of(draw, logits[i], peak) : 0;
            limit = draw.top_p * exact;
        }
        if (before < limit && weight_of(draw, logit, peak) >= draw.min_p) return places[at];
        const int64_t had = std::exchange(count, 0);
        for (int64_t i = 0; i < had; ++i)
            if (is_ahead(i)) keep(places[i], left[i], logits[i], bytes[i]);
    }
}

// The place drawn; -1 where the largest logit is not finite.
inline int64_t drawn(const Draw& draw) {
    static thread_local Scratch scratch;
    const Peak peak = peak_of(draw.logits, draw.count);
    if (!std::isfinite(peak.value)) return -1;
    if (draw.temperature == 0) return peak.place;
    if (draw.top_p < 1 || draw.min_p > 0) return draw_from_top(draw, peak.value);
    uint8_t* first = scratch.get<uint8_t>(draw.count + sizeof(u64x8));
    if (draw.ids) {
        for (int64_t i = 0; i < draw.count; ++i) first[i] = first_byte(draw, draw.ids[i]);
    } else {
        first_bytes(draw, first, draw.count);
    }
    return noisy_argmax(draw, {draw.logits, first, nullptr, draw.count}, peak);
}

}  // namespace radixrt
