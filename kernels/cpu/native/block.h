// The inner loops: a few query rows against a panel of keys, scores into weights, weights times a panel of values.
// Knows nothing of pages: a panel is a list of pointers.
//
// A row's numbers depend on nothing but its query, its limits and what is cached between them: each (row, position)
// score is one chain of fused multiply-adds over the head's elements, each (row, element) output one chain over the
// positions, or such chains over fixed chunks (CHAINS), added up in order. Blocks and tiles only choose which chains
// run side by side.
#pragma once

#include <algorithm>
#include <cmath>

#include "partial.h"

namespace radixrt {

constexpr int GROUP = RADIXRT_GROUP_LEN;  // positions reduced alone; then groups are folded in order
constexpr int COLS = 4;                   // vectors of positions, or of output elements, in registers at a time
constexpr int PIECE = 8;                  // positions that lie together whatever the page size
constexpr int PANEL = COLS * LANES;       // positions that all rows of a tile use while they are in the first cache
constexpr int ROWS = REGISTER_ROWS;       // rows in registers at a time
constexpr int QUERY = 256 + CHUNK;        // from one query to the next: the largest head's elements, and a line or two
constexpr int FIRST_CACHE = 32 << 10;     // bytes, at least
constexpr int TILE = 128;  // rows of a tile: their scores of one group (128 KB) stay in the second cache

// The first position that a row reads.
inline int64_t first_read(int64_t position, int64_t window) {
    return position < window ? 0 : position - window + 1;
}

// Rows of a tile that are computed side by side, at most ROWS; of the group they read positions [low, high), and each
// of them reads [all_low, all_high).
struct Block {
    int first, rows;
    int low, high, all_low, all_high;
};

// The rows of a tile while one group is reduced, computed in `Format`.
template <class Format>
struct Tile {
    using Weight = typename Format::Weight;
    static constexpr int PAIR = Format::PAIR;
    static constexpr int STRIDE = GROUP * sizeof(float) / sizeof(Weight);  // of rows of `scores` seen as weights

    int num_rows, num_blocks;
    int64_t dim;
    float scale, softcap;     // softcap 0: none
    const int64_t* positions; // [num_rows]
    Block* blocks;            // [num_blocks]
    Weight* q;                // [padded rows, query_stride()], of which `depth()` are used
    float* wide;              // [PANEL * dim], for a panel whose cache is in another format
    float* scores;            // [padded rows, GROUP], each row overwritten by its weights: 2^(score - max)
    int *low, *high;          // [num_rows] the row reads positions [low, high) of the group

    int64_t padded_rows() const { return (num_rows + Format::ROW_UNIT - 1) / Format::ROW_UNIT * Format::ROW_UNIT; }
    int64_t depth() const { return (dim + Format::DEPTH_UNIT - 1) / Format::DEPTH_UNIT * Format::DEPTH_UNIT; }
    // A constant for vectors, which save registers by it; tiles are read by lines of their own.
    int64_t query_stride() const { return Format::ROW_UNIT > 1 ? depth() : QUERY; }
    // Vectors in registers at a time, beside at most ROWS rows.
    int width() const { return Format::CHAINS == 1 || num_rows <= ROWS / 2 ? COLS : COLS / 2; }
    static int blocks_of(int num_rows) { return (num_rows + ROWS - 1) / ROWS; }
    // The chunks of the group that hold what a row reads, if it reads any.
    int chunks_begin(int row) const { return low[row] / CHUNK * CHUNK; }
    int chunks_end(int row) const { return (high[row] + CHUNK - 1) / CHUNK * CHUNK; }
    Weight* weights(int64_t row) const { return (Weight*)(scores + row * GROUP); }

    // Cut the rows into blocks of about equal size; query(row) points to the row's, in the format of the cache.
    template <class Cache, class Query>
    void set_queries(const Query& query) {
        for (int b = 0; b < num_blocks; ++b) {
            const int first = num_rows * b / num_blocks;
            blocks[b] = {first, num_rows * (b + 1) / num_blocks - first, 0, 0, 0, 0};
        }
        for (int row = 0; row < num_rows; ++row) {
            const auto* from = query(row);
            Weight* to = q + row * query_stride();
            if constexpr (std::is_same_v<Weight, typename Cache::Element>) std::memcpy(to, from, dim * sizeof(Weight));
            else
                for (int64_t d = 0; d < dim; d += LANES) Format::to_weights(to + d, Cache::to_float(from + d));
            std::fill_n(to + dim, depth() - dim, Weight{});
        }
    }

    // The group has positions [start, start + length).
    void set_limits(int64_t start, int64_t length, int64_t window) {
        for (Block* block = blocks; block < blocks + num_blocks; ++block) {
            block->low = block->all_high = length;
            block->high = block->all_low = 0;
            for (int row = block->first; row < block->first + block->rows; ++row) {
                low[row] = std::clamp<int64_t>(first_read(positions[row], window) - start, 0, length);
                high[row] = std::clamp<int64_t>(positions[row] + 1 - start, 0, length);
                block->low = std::min(block->low, low[row]);
                block->high = std::max(block->high, high[row]);
                block->all_low = std::max(block->all_low, low[row]);
                block->all_high = std::min(block->all_high, high[row]);
            }
        }
    }
};

// The next panel, fetched while a tile works on one: pages lie far apart, and no prefetcher of a CPU follows them. Each
// block fetches a slice of it, since all at once would keep the first block waiting (10 % of a large tile's time). Into
// the first cache if two panels fit there, else into the second (0.92 to 0.97 of the time of few rows).
struct Ahead {
    const char* pieces[PANEL / PIECE];
    int64_t bytes;     // of a cached element
    int slice, shift;  // which of 2^shift slices
    bool is_large;     // two panels do not fit into the first cache

    void set_slice(int block) { slice = block & ((1 << shift) - 1); }
    // What to fetch from piece i on, which has `count` elements, when a block has used `done` of this panel's.
    const char* at(int i, int64_t count, int64_t done) const {
        return pieces[i] + ((slice * count + done) * bytes >> shift);
    }
    void fetch(const char* line) const {
        if (is_large) __builtin_prefetch(line, 0, 2);
        else __builtin_prefetch(line);
    }
};

// Scores of R rows from `row` on, a block, against C vectors of positions, from vector `first` of the panel at `panel`
// on. keys[i] points to the first of 8 positions; where HALVES, pages of 8, a vector is two such pieces, else it lies
// together.
template <class Format, int R, int C, bool HALVES>
[[gnu::noinline]] void score_block(const Tile<Format>& tile, int64_t row, const typename Format::Element* const* keys,
                                   const Ahead& ahead, int64_t page_size, int64_t panel, int first) {
    constexpr int PAIR = Format::PAIR;
    using Cached = typename Format::Cached;
    constexpr int64_t LINE = sizeof(Cached);
    const char* fetch[C];
    for (int c = 0; c < C; ++c) fetch[c] = ahead.at(2 * (first + c), tile.dim * LANES, 0);
    const auto *q = tile.q + row * QUERY, *end = q + tile.dim;
    const int64_t fetch_step = LANES * PAIR * ahead.bytes >> ahead.shift;
    float* scores = tile.scores + row * GROUP + panel + first * LANES;
    int64_t at = 0, line = 0;
    keys += 2 * first;
    do {
        const auto* stop = Format::CHAINS == 1 ? end : std::min(end, q + CHUNK);
        f32x16 sums[Format::CHAINS][R][C] = {};
        do {
            Cached cached[C];
            UNROLL for (int c = 0; c < C; ++c) {
                if constexpr (HALVES) {
                    std::memcpy(&cached[c], keys[2 * c] + at, LINE / 2);
                    std::memcpy((char*)&cached[c] + LINE / 2, keys[2 * c + 1] + at, LINE / 2);
                } else {
                    cached[c] = load<Cached>(keys[2 * c] + at);
                }
                ahead.fetch(fetch[c] + line);
            }
            Format::dot(q, QUERY, cached, sums);
            at += page_size * PAIR;
            line += fetch_step;
        } while ((q += PAIR) < stop);
        const bool is_first = at == page_size * CHUNK || Format::CHAINS == 1;
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < C; ++c) {
                float* to = scores + r * GROUP + c * LANES;
                store(to, total<Format, R, C>(is_first ? f32x16{} : load<f32x16>(to), sums, r, c));
            }
    } while (q < end);
}

// Add to R rows' outputs, C vectors of elements from `d` on, the weighted values of units [begin, end) (a unit is PAIR
// positions of the group). values[i] points to the first of 8 positions, counted from `panel`. Where MASKED, only the
// positions of a unit that the (one) row reads.
template <class Format, int R, int C, bool MASKED>
[[gnu::noinline]] void weigh_block(const Tile<Format>& tile, int64_t row, const typename Format::Element* const* values,
                                   const Ahead& ahead, int64_t panel, int64_t begin, int64_t end, int64_t d,
                                   Partials out) {
    constexpr int PAIR = Format::PAIR, STRIDE = Tile<Format>::STRIDE, UNITS = PIECE / PAIR, CHUNK_UNITS = CHUNK / PAIR;
    using Cached = typename Format::Cached;
    const auto* weights = tile.weights(row);
    const int64_t stride = tile.dim * PAIR, fetch_step = stride * ahead.bytes >> ahead.shift;
    int64_t unit = begin;
    do {
        const int64_t until = Format::CHAINS == 1 ? end : std::min(end, (unit / CHUNK_UNITS + 1) * CHUNK_UNITS);
        f32x16 sums[Format::CHAINS][R][C] = {};
        if constexpr (Format::CHAINS == 1)
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int c = 0; c < C; ++c) sums[0][r][c] = load<f32x16>(out[row + r].out + d + c * LANES);
        do {
            const int64_t piece = (unit - panel) / UNITS, offset = unit % UNITS * stride + d * PAIR;
            const auto* cache = values[piece] + offset;
            const char* fetch = ahead.at(piece, UNITS * stride, offset);
            const int64_t stop = std::min(until, unit + UNITS - unit % UNITS);
            do {
                Cached cached[C];
                UNROLL for (int c = 0; c < C; ++c) {
                    cached[c] = load<Cached>(cache + c * LANES * PAIR);
                    ahead.fetch(fetch + c * sizeof(Cached));
                }
                if constexpr (MASKED && PAIR == 2) {
                    const uint32_t first = tile.low[row] <= unit * 2 ? 0x0000FFFFu : 0u;
                    const uint32_t second = tile.high[row] > unit * 2 + 1 ? 0xFFFF0000u : 0u;
                    for (int c = 0; c < C; ++c) cached[c] &= first | second;
                }
                Format::dot(weights + unit * PAIR, STRIDE, cached, sums);
                cache += stride;
                fetch += fetch_step;
            } while (++unit < stop);
        } while (unit < until);
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < C; ++c) {
                float* to = out[row + r].out + d + c * LANES;
                store(to, total<Format, R, C>(load<f32x16>(to), sums, r, c));
            }
    } while (unit < end);
}

// Turn the scores of a block into weights, and set the maxima and sums of its partials; `next()` is called after each
// row. Rows go together through each of the loops, so that none waits for what is reduced across the lanes of another.
template <class Format, class Next>
void soften(const Tile<Format>& tile, const Block& block, Partials out, Next&& next) {
    constexpr float LOG2E = 1.44269504f;
    constexpr int VECTORS = CHUNK / LANES;
    const float scale = (tile.softcap > 0 ? tile.softcap : tile.scale) * LOG2E;
    for (int first = block.first; first < block.first + block.rows; first += LANES) {
        const int rows = std::min(LANES, block.first + block.rows - first);
        f32x16 lanes[LANES];
        float largest[LANES], sums[LANES];
        for (int r = 0, row = first; r < rows; ++r, ++row) {
            lanes[r] = splat(-INFINITY);
            if (tile.low[row] >= tile.high[row]) continue;
            float* scores = tile.scores + int64_t{row} * GROUP;
            const int begin = tile.chunks_begin(row), end = tile.chunks_end(row);
            if (tile.softcap > 0)
                for (int i = begin; i < end; i += LANES)
                    store(scores + i, tanh(load<f32x16>(scores + i) * (tile.scale / tile.softcap)));
            // In whole vectors, as they are read next.
            const auto hide = [&](int chunk) {
                for (int i = chunk; i < chunk + CHUNK; i += LANES) {
                    const i32x16 at = i + LANE;
                    const auto is_hidden = (at < tile.low[row]) | (at >= tile.high[row]);
                    store(scores + i, is_hidden ? splat(-INFINITY) : load<f32x16>(scores + i));
                }
            };
            if (begin < tile.low[row]) hide(begin);
            if (tile.high[row] < end) hide(end - CHUNK);
            f32x16 most[VECTORS] = {splat(-INFINITY), splat(-INFINITY)};
            for (int i = begin; i < end; i += CHUNK)
                UNROLL for (int j = 0; j < VECTORS; ++j) most[j] = larger(load<f32x16>(scores + i + j * LANES), most[j]);
            lanes[r] = larger(most[0], most[1]);
        }
        across(lanes, rows, largest, [](auto a, auto b) { return larger(a, b); });
        for (int r = 0, row = first; r < rows; ++r, ++row, next()) {
            lanes[r] = f32x16{};
            if (tile.low[row] >= tile.high[row]) continue;
            const float* scores = tile.scores + int64_t{row} * GROUP;
            auto* weights = tile.weights(row);
            const f32x16 most = splat(largest[r]);
            f32x16 sum = {};
            for (int i = tile.chunks_begin(row), end = tile.chunks_end(row); i < end; i += CHUNK) {
                f32x16 its[VECTORS];
                // Subtracted first: rounding score * scale alone would pass 2^127 for scores from 2^31 on.
                UNROLL for (int j = 0; j < VECTORS; ++j)
                    sum += its[j] = Format::exp2((load<f32x16>(scores + i + j * LANES) - most) * scale);
                to_weights<Format>(weights + i, its[0], its[1]);
            }
            lanes[r] = sum;
        }
        across(lanes, rows, sums, [](auto a, auto b) { return a + b; });
        for (int r = 0; r < rows; ++r) {
            out[first + r].max = largest[r] * scale;
            out[first + r].sum = sums[r];
        }
    }
}

}  // namespace radixrt
