// Products with bfloat16 weights in the tile registers of AMX, in the order of product.h's chains over chunks.
// Knows nothing of tensors or of how a weight came to be packed.
#pragma once

#include "amx.h"
#include "product.h"

namespace radixrt {

#if defined(RADIXRT_AMX) && defined(__AMX_BF16__)

// Sides of 32 rows meet the panels of a group in turn, so that the panels stay in the second cache: as fast as oneDNN at
// 512 rows, where sides one after the other take 1.2 to 1.6 times as long.
constexpr int GROUP_BYTES = 1 << 20;  // of the panels of a group
static_assert(COLUMNS == 3);

// The sums [16 R, WIDTH] of 16 R rows, or of one register of fewer, with all `depth` inputs of a panel; what lies
// `ahead` bytes behind it is fetched.
template <int R>
void multiply_side(const bfloat16* x, int64_t x_stride, const bfloat16* panel, int64_t depth, int64_t ahead,
                   float* sums) {
    constexpr int64_t ROW = WIDTH * 4, STRIDE = WIDTH * sizeof(float);
    float* below = sums + EDGE * WIDTH;
    settle(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    const char *left = (const char*)x, *right = (const char*)panel;
    for (int64_t k = 0; k < depth; k += CHUNK) {
        for (int i = 0; ahead && i < CHUNK / 2 * ROW; i += 64) __builtin_prefetch(right + ahead + i, 0, 2);
        _tile_loadd(6, left, x_stride);
        _tile_loadd(7, right, ROW);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, (right + 64), ROW);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, (right + 128), ROW);
        _tile_dpbf16ps(2, 6, 7);
        if constexpr (R == 2) {
            _tile_loadd(6, (left + EDGE * x_stride), x_stride);
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(7, (right + 64), ROW);
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(7, right, ROW);
            _tile_dpbf16ps(3, 6, 7);
        }
        left += CHUNK * sizeof(bfloat16);
        right += CHUNK / 2 * ROW;
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, (sums + EDGE), STRIDE);
    _tile_stored(2, (sums + 2 * EDGE), STRIDE);
    if constexpr (R == 2) {
        _tile_stored(3, below, STRIDE);
        _tile_stored(4, (below + EDGE), STRIDE);
        _tile_stored(5, (below + 2 * EDGE), STRIDE);
    }
}

// Outputs of rows [row, row + num_rows), a side of 32 or at most 16, and panels [first, last), which may be near.
inline void multiply_group(const Product& product, Inputs<TiledBFloat16> inputs, int64_t row, int64_t num_rows,
                           int64_t first, int64_t last, bool is_near) {
    alignas(64) float sums[2 * EDGE * WIDTH];
    const int64_t k = product.num_inputs, stride = inputs.stride * sizeof(bfloat16), ahead = is_near ? 0 : NEAR;
    const bfloat16* x = inputs.data + row * inputs.stride;
    for (int64_t panel = first; panel < last; ++panel) {
        const bfloat16* weights = (const bfloat16*)product.weight + panel * k * WIDTH;
        if (num_rows > EDGE) multiply_side<2>(x, stride, weights, k, ahead, sums);
        else multiply_side<1>(x, stride, weights, k, ahead, sums);
        for (int64_t r = 0; r < num_rows; ++r)
            UNROLL for (int c = 0; c < COLUMNS; ++c)
                put<bfloat16>(product, row + r, panel * WIDTH + c * LANES, load<f32x16>(sums + r * WIDTH + c * LANES));
    }
}

// All rows [begin, end) and panels [first, last): whole registers, and in the end one of fewer rows, since no tile may
// read behind the inputs.
inline void multiply_sides(const Product& product, Inputs<TiledBFloat16> x, int64_t begin, int64_t end, int64_t first,
                           int64_t last) {
    const PairedBFloat16::Mode mode;
    const Registers registers(std::min<int64_t>(end - begin, EDGE), 7);
    for (int64_t row = begin; row < end;) {
        const int64_t left = end - row, count = left >= 2 * EDGE ? 2 * EDGE : std::min<int64_t>(left, EDGE);
        if (count < EDGE && row > begin) {
            const Registers few(count, 7);
            multiply_group(product, x, row, count, first, last, true);
        } else {
            multiply_group(product, x, row, count, first, last, row > begin);
        }
        row += count;
    }
}

inline void multiply_in_tiles(const Product& product, void* copy, Worker& worker) {
    constexpr int64_t HIGH = 2 * EDGE;
    const int64_t num_rows = product.num_rows, k = product.num_inputs, threads = product.threads;
    const Inputs<TiledBFloat16> x = prepare_inputs<TiledBFloat16>(product, copy, worker);
    const int64_t panels = (product.num_outputs + WIDTH - 1) / WIDTH, sides = (num_rows + HIGH - 1) / HIGH;
    const int64_t most = sides == 1 ? 1 : std::max<int64_t>(GROUP_BYTES / (k * WIDTH * 2), 1);  // panels of a group
    const int64_t groups = std::max((panels + most - 1) / most, std::min(4 * threads, panels));
    // A part of the rows for each thread, which has them in its caches, where it is enough to read all weights for.
    const int64_t least = sides >= 4 * threads ? threads : 1;
    const int64_t parts = std::max(least, std::min((4 * threads + groups - 1) / std::max<int64_t>(groups, 1), sides));
    worker.share(groups * parts, 1, [&](int64_t i) {
        const int64_t group = i % groups, part = i / groups;
        multiply_sides(product, x, sides * part / parts * HIGH, std::min(sides * (part + 1) / parts * HIGH, num_rows),
                       panels * group / groups, panels * (group + 1) / groups);
    });
}

#endif

// How attention of these elements multiplies, and products that are not tiled.
template <class Element>
using Vectors = std::conditional_t<std::is_same_v<Element, float>, Float32, PairedBFloat16>;

template <class Element>
bool is_tiled([[maybe_unused]] const Product& product) {
#if defined(RADIXRT_AMX) && defined(__AMX_BF16__)
    if (std::is_same_v<Element, bfloat16>)
        return product.num_rows > PairedBFloat16::MANY && product.num_inputs % CHUNK == 0;
#endif
    return false;
}

// The memory that `multiply` needs for a copy of the inputs.
template <class Element>
int64_t copy_bytes(const Product& product) {
#if defined(RADIXRT_AMX) && defined(__AMX_BF16__)
    if (is_tiled<Element>(product)) return layout_of<TiledBFloat16>(product).copy_bytes;
#endif
    return slab_bytes<Vectors<Element>>(product);
}

template <class Element>
void multiply(const Product& product, void* copy, Worker& worker) {
#if defined(RADIXRT_AMX) && defined(__AMX_BF16__)
    if (is_tiled<Element>(product)) return multiply_in_tiles(product, copy, worker);
#endif
    multiply_slabs<Vectors<Element>>(product, copy, worker);
}

}  // namespace radixrt
