// Partial results over some of the positions that a row reads, and how they are folded into its output.
// Knows nothing of how they are computed.
#pragma once

#include "simd.h"

namespace radixrt {

// A partial result: the softmax of some positions' scores, as exponents of 2.
struct Partial {
    static constexpr int HEADER = LANES;  // floats before `out`

    float max, sum;           // of the scores; of 2^(score - max). sum is 0 where there were no positions
    alignas(64) float out[];  // [dim] sum over positions of 2^(score - max) * value
};

// Partials side by side, each `dim` wide.
struct Partials {
    float* data;
    int64_t dim;

    Partial& operator[](int64_t i) const { return *(Partial*)(data + i * (Partial::HEADER + dim)); }
    Partials from(int64_t i) const { return {data + i * (Partial::HEADER + dim), dim}; }
    static int64_t floats(int64_t count, int64_t dim) { return count * (Partial::HEADER + dim); }
};

// Fold `next`, of later positions, into `into`. Folding in order of position from the left gives the same bits
// wherever the fold is done.
inline void fold(Partial& into, const Partial& next, int64_t dim) {
    if (next.sum == 0) return;
    if (into.sum == 0) {
        std::memcpy(&into, &next, sizeof(float) * (Partial::HEADER + dim));
        return;
    }
    const float max = into.max > next.max ? into.max : next.max;
    const f32x16 shares = exp2(f32x16{into.max - max, next.max - max});
    const float keep = shares[0], add = shares[1];
    into.max = max;
    into.sum = __builtin_fmaf(next.sum, add, into.sum * keep);
    for (int64_t d = 0; d < dim; d += LANES) {
        const f32x16 kept = load<f32x16>(into.out + d) * keep;
        store(into.out + d, fma(load<f32x16>(next.out + d), splat(add), kept));
    }
}

// A row's output. The sign of a zero may depend on how many zeros were added to it, so zeros are positive.
template <class Format>
inline void finish(typename Format::Element* to, const Partial& result, int64_t dim) {
    const float share = 1.0f / result.sum;
    for (int64_t d = 0; d < dim; d += LANES) Format::from_float(to + d, load<f32x16>(result.out + d) * share + 0.0f);
}

}  // namespace radixrt
