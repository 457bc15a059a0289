// Rotary position embedding (Su et al., 2021) of rows in place. Knows nothing of tensors.
#pragma once

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace radixrt {

struct Rotation {
    void* x;                 // [num_rows, num_heads, dim], rows x_stride elements apart
    const void *cos, *sin;   // [num_rows, dim]; the first half of sin is negated
    int64_t num_rows, num_heads, dim, x_stride;
    int64_t threads;

    int64_t work() const { return num_rows * num_heads * dim; }
};

// x = x * cos + roll(x, dim / 2) * sin, each operation rounded to an Element as a model's own code does.
template <class Element>
void rotate(const Rotation& rotation, Worker& worker) {
    const int64_t dim = rotation.dim, half = dim / 2;
    const auto turned = [](f32x16 x, f32x16 cos, f32x16 other, f32x16 sin) {
        return rounded<Element>(x * cos) + rounded<Element>(other * sin);
    };
    worker.share(rotation.num_rows, part_of(rotation.num_heads * dim), [&](int64_t row) {
        const Element *cos = (const Element*)rotation.cos + row * dim, *sin = (const Element*)rotation.sin + row * dim;
        Element* x = (Element*)rotation.x + row * rotation.x_stride;
        for (Element* end = x + rotation.num_heads * dim; x < end; x += dim)
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t count = std::min<int64_t>(LANES, half - i), j = i + half;
                const f32x16 low = load_some(x + i, count), high = load_some(x + j, count);
                store_some(x + i, turned(low, load_some(cos + i, count), high, load_some(sin + i, count)), count);
                store_some(x + j, turned(high, load_some(cos + j, count), low, load_some(sin + j, count)), count);
            }
    });
}

}  // namespace radixrt
