// A tile of query rows against one group of positions, in the tile registers of AMX. Knows nothing of how tiles are
// chosen or run side by side.
//
// Chunks begin at the head's first element and at the group's first position, so that a row's numbers depend on nothing
// but that row, as in block.h.
#pragma once

#include "amx.h"
#include "scratch.h"
#include "tile.h"

namespace radixrt {

#if defined(RADIXRT_AMX) && defined(__AMX_BF16__)

static_assert(2 * EDGE == CHUNK && GROUP % CHUNK == 0 && PANEL % CHUNK == 0);

// Rows that lie `stride` bytes apart: of left operands [rows, CHUNK], of right ones [CHUNK / 2, columns, 2].
struct Operand {
    const bfloat16* data;
    int64_t stride;
};

// to = from + a b, for 16 R rows, or one register of fewer, and 16 columns of each b, over so many chunks one after the
// other. Null `from` is zero.
template <int R, int C>
inline void multiply_tiles(Operand a, const Operand (&b)[C], int num_chunks, const float* from, float* to,
                           int64_t stride) {
    settle(a.data);
    if (from) {
        _tile_loadd(0, from, stride);
        if constexpr (C == 2) _tile_loadd(1, (from + EDGE), stride);
        if constexpr (R == 2) _tile_loadd(2, ((const char*)from + EDGE * stride), stride);
        if constexpr (R == 2 && C == 2) _tile_loadd(3, ((const char*)(from + EDGE) + EDGE * stride), stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    const char *left = (const char*)a.data, *first = (const char*)b[0].data, *second = (const char*)b[C - 1].data;
    for (int i = 0; i < num_chunks; ++i) {
        _tile_loadd(6, first, b[0].stride);
        _tile_loadd(4, left, a.stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (C == 2) {
            _tile_loadd(7, second, b[1].stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (R == 2) {
            _tile_loadd(5, (left + EDGE * a.stride), a.stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (C == 2) _tile_dpbf16ps(3, 5, 7);
        }
        left += CHUNK * sizeof(bfloat16);
        first += CHUNK / 2 * b[0].stride;
        second += CHUNK / 2 * b[C - 1].stride;
    }
    _tile_stored(0, to, stride);
    if constexpr (C == 2) _tile_stored(1, (to + EDGE), stride);
    if constexpr (R == 2) _tile_stored(2, ((char*)to + EDGE * stride), stride);
    if constexpr (R == 2 && C == 2) _tile_stored(3, ((char*)(to + EDGE) + EDGE * stride), stride);
}

// A group's keys or values of one head, as tiles are read: with one stride, whatever the page size. Keys are copied
// where a page is narrower than a tile or the head no multiple of a chunk; values always.
struct Group {
    const Positions<PairedBFloat16>& positions;
    int64_t depth;     // the head's dimension filled up to whole chunks
    bfloat16 *values;  // [GROUP / 2, dim, 2]
    bfloat16 *keys;    // [depth / 2, GROUP, 2], where they are copied

    const Run<PairedBFloat16>& run() const { return positions.run; }
    int64_t dim() const { return run().dim; }
    bool copies_keys() const { return run().page_size() < EDGE || dim() < depth; }

    Operand keys_at(int position) const {
        if (copies_keys()) return {keys + position * 2, GROUP * 4};
        return {positions.at(run().keys, position, 2), run().page_size() * 4};
    }
    Operand values_at(int position, int64_t d) const { return {values + position * dim() + d * 2, dim() * 4}; }

    // Copy what has to be, of positions [0, end), with zeros behind the values up to the end of a chunk.
    void copy(int end) const {
        const int64_t page_size = run().page_size();
        for (int at = 0; at < end; at += page_size) {
            const bfloat16* from = positions.at(run().values, at, dim());
            for (int64_t i = 0; i < page_size * dim(); i += CHUNK)
                store(values + at * dim() + i, load<u32x16>(from + i));
        }
        clear(end, (end + CHUNK - 1) / CHUNK * CHUNK);
        if (!copies_keys()) return;
        for (int at = 0; at < end; at += PIECE) {
            const bfloat16* from = positions.at(run().keys, at, 2);
            for (int64_t d = 0; d < dim(); d += 2)
                store(keys + d * GROUP + at * 2, load<u32x8>(from + d * page_size));
        }
        std::fill_n(keys + dim() * GROUP, (depth - dim()) * GROUP, bfloat16{});
    }

    // Zeros in place of the values of positions [begin, end).
    void clear(int begin, int end) const {
        for (int i = begin; i < end; ++i)
            for (int64_t d = 0; d < dim(); ++d) values[i / 2 * 2 * dim() + d * 2 + i % 2] = {};
    }

    // No value of the chunk at this position is infinite or NaN.
    bool is_finite(int position) const {
        uint32_t broken = 0;
        for (const bfloat16 *i = values + position * dim(), *end = i + CHUNK * dim(); i < end; ++i)
            broken |= (i->bits & 0x7F80u) == 0x7F80u;
        return !broken;
    }
};

// Fetches the positions that are reduced next, a few lines at a time while vectors turn scores into weights: all at
// once, their lines keep those waiting that tiles are loaded from.
class NextGroup {
   public:
    NextGroup(const Positions<PairedBFloat16>& next, int64_t num_calls) : next_(next) {
        const Run<PairedBFloat16>& run = next.run;
        lines_ = std::min<int64_t>((run.num_pages << run.page_shift) - next.first, GROUP) * run.dim / CHUNK;
        share_ = (lines_ + num_calls - 1) / num_calls;
    }

    // A share of them: one of `num_calls` calls.
    void operator()() {
        const Run<PairedBFloat16>& run = next_.run;
        for (int64_t left = std::min(share_, lines_); left > 0;) {
            if (on_page_ == 0) {
                keys_ = next_.at(run.keys, position_, 2);
                values_ = next_.at(run.values, position_, run.dim);
                position_ += run.page_size();
                on_page_ = run.page_size() * run.dim / CHUNK;
            }
            const int64_t count = std::min(left, on_page_);
            for (int64_t i = 0; i < count; ++i, keys_ += CHUNK, values_ += CHUNK) {
                __builtin_prefetch(keys_, 0, 2);
                __builtin_prefetch(values_, 0, 2);
            }
            left -= count;
            lines_ -= count;
            on_page_ -= count;
        }
    }

   private:
    const Positions<PairedBFloat16>& next_;
    int64_t lines_, share_, on_page_ = 0, position_ = 0;  // lines of keys that are left, of a call, left on this page
    const bfloat16 *keys_, *values_;
};

// Rows [first, first + num_rows) of a tile, at most 32. Their partials are `sums`, with as many to spare behind them.
struct Side {
    const Tile<TiledBFloat16> tile;  // whose scores and weights are those of the side alone
    const Group& group;
    int first, num_rows;
    Partials sums;

    Side(const Tile<TiledBFloat16>& all, const Group& group, int first, float* memory)
        : tile(with_scores(all, all.scores - first * GROUP)), group(group), first(first),
          num_rows(std::min(2 * EDGE, all.num_rows - first)), sums{memory, all.dim} {}

    static int64_t floats(int64_t dim) { return Partials::floats(4 * EDGE, dim); }
    static Tile<TiledBFloat16> with_scores(Tile<TiledBFloat16> tile, float* scores) {
        tile.scores = scores;
        return tile;
    }
    int64_t dim() const { return tile.dim; }
    int64_t stride() const { return Partials::floats(1, dim()) * sizeof(float); }
    // Call f(R) for R = 2 or 1 registers of rows.
    template <class F>
    void with_registers(const F& f) const { with_constant<2>((num_rows + EDGE - 1) / EDGE, f); }

    // Scores of chunks [begin, end) of positions.
    void score(int begin, int end) const {
        const Operand q = {tile.q + first * group.depth, group.depth * 2};
        for (int at = begin; at < end; at += CHUNK) {
            const Operand keys[] = {group.keys_at(at), group.keys_at(at + EDGE)};
            float* to = tile.scores + first * GROUP + at;
            with_registers([&](auto r) {
                multiply_tiles<r, 2>(q, keys, group.depth / CHUNK, nullptr, to, GROUP * sizeof(float));
            });
        }
    }

    // Zero weights for what a row does not read of [begin, end).
    void clear(int begin, int end) const {
        for (int row = first; row < first + num_rows; ++row) {
            const bool reads = tile.low[row] < tile.high[row];
            const int low = reads ? std::max(begin, tile.chunks_begin(row)) : end;
            const int high = reads ? std::min(end, tile.chunks_end(row)) : end;
            std::fill(tile.weights(row) + begin, tile.weights(row) + low, bfloat16{});
            std::fill(tile.weights(row) + high, tile.weights(row) + end, bfloat16{});
        }
    }

    // Add the weighted values of chunks [begin, end) to what the chunks before came to: `from`, null for nothing.
    void weigh(int begin, int end, const Partial* from) const {
        const Operand weights = {tile.weights(first) + begin, GROUP * sizeof(float)};
        const int num_chunks = (end - begin) / CHUNK;
        for (int64_t d = 0; d < dim(); d += 2 * EDGE) {
            const Operand values[] = {group.values_at(begin, d), group.values_at(begin, d + EDGE)};
            const float* before = from ? from->out + d : nullptr;
            float* to = sums[0].out + d;
            with_registers([&](auto r) {
                if (d + EDGE < dim()) multiply_tiles<r, 2>(weights, values, num_chunks, before, to, stride());
                else multiply_tiles<r, 1>(weights, {values[0]}, num_chunks, before, to, stride());
            });
        }
    }

    // The same for one chunk in which a number is not finite that some rows do not read, since zero times that is NaN:
    // each row alone, with zeros in place of what it does not read.
    void weigh_apart(int position, bfloat16* spare) const {
        const Group own = {group.positions, group.depth, spare, nullptr};
        const Partials apart = sums.from(2 * EDGE);
        for (int row = 0; row < num_rows; ++row) {
            const int low = std::clamp(tile.low[first + row] - position, 0, CHUNK);
            const int high = std::clamp(tile.high[first + row] - position, low, CHUNK);
            if (low == high) continue;
            std::memcpy(spare, group.values + position * dim(), CHUNK * dim() * sizeof(bfloat16));
            own.clear(0, low);
            own.clear(high, CHUNK);
            for (int64_t d = 0; d < dim(); d += EDGE) {
                const Operand weights = {tile.weights(first) + position, GROUP * sizeof(float)};
                const Operand values[] = {own.values_at(0, d)};
                with_registers([&](auto r) {
                    multiply_tiles<r, 1>(weights, values, 1, sums[0].out + d, apart[0].out + d, stride());
                });
            }
            std::memcpy(sums[row].out, apart[row].out, dim() * sizeof(float));
        }
    }
};

// As for other formats (tile.h).
inline void reduce_group(const Tile<TiledBFloat16>& tile, const Positions<PairedBFloat16>& here, int length,
                         const Positions<PairedBFloat16>& next, Partials into, bool folds) {
    static thread_local Scratch scratch, partials;
    const int64_t dim = tile.dim, depth = tile.depth();
    bfloat16* values = scratch.get<bfloat16>(GROUP * dim + GROUP * depth + CHUNK * dim);
    const Group group = {here, depth, values, values + GROUP * dim};
    float* sums = partials.get<float>(Side::floats(dim));
    int all_low = 0, all_high = length, most = 0;
    for (int row = 0; row < tile.num_rows; ++row) {
        all_low = std::max(all_low, tile.low[row]);
        all_high = std::min(all_high, tile.high[row]);
        most = std::max(most, tile.high[row]);
    }
    group.copy(most);
    bool is_broken[GROUP / CHUNK] = {};
    for (int at = 0; at < most; at += CHUNK)
        if (all_low > at || all_high < std::min(at + CHUNK, most)) is_broken[at / CHUNK] = !group.is_finite(at);

    const Registers registers(tile.num_rows, 6);
    NextGroup fetch(next, tile.num_rows);
    for (int row = 0; row < tile.num_rows; row += 2 * EDGE) {
        const Side side(tile, group, row, sums);
        int begin = GROUP, end = 0;
        for (int i = row; i < row + side.num_rows; ++i) {
            if (tile.low[i] >= tile.high[i]) continue;
            begin = std::min(begin, tile.chunks_begin(i));
            end = std::max(end, tile.chunks_end(i));
        }
        side.score(begin, end);
        soften(side.tile, {row, side.num_rows, 0, 0, 0, 0}, side.sums.from(-row), fetch);
        if (begin < end) {
            if (all_low > begin || all_high < end) side.clear(begin, end);
            const Partial* before = nullptr;
            for (int at = begin; at < end; at += CHUNK) {
                if (!is_broken[at / CHUNK]) continue;
                side.weigh(begin, at, before);
                side.weigh_apart(at, values + GROUP * (dim + depth));
                begin = at + CHUNK;
                before = &side.sums[0];
            }
            side.weigh(begin, end, before);
        }
        for (int i = 0; i < side.num_rows; ++i) {
            if (folds) fold(into[row + i], side.sums[i], dim);
            else std::memcpy(&into[row + i], &side.sums[i], side.stride());
        }
    }
}

#endif

}  // namespace radixrt
