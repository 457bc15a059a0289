// A tile of query rows against one group of positions in a run of pages of one KV head.
// Knows nothing of how tiles are chosen or run side by side.
#pragma once

#include "block.h"
#include "scratch.h"

namespace radixrt {

// One KV head's part of the cache, seen through a run of pages.
template <class Format>
struct Run {
    using Element = typename Format::Element;

    const Element *keys;    // [pages, heads, dim / PAIR, page_size, PAIR]
    const Element *values;  // [pages, heads, page_size / PAIR, dim, PAIR]
    const int64_t* pages;
    int64_t num_pages, num_heads, head, page_shift, dim;  // page_size is 1 << page_shift

    int64_t page_size() const { return int64_t{1} << page_shift; }

    // Where this position is, if each takes so many elements from the beginning of the head's part of its page on; past
    // the end of the run, somewhere in the last page.
    const Element* at(const Element* cache, int64_t position, int64_t elements) const {
        const int64_t page = pages[std::min(position >> page_shift, num_pages - 1)];
        const int64_t offset = position & (page_size() - 1);
        return cache + ((page * num_heads + head) << page_shift) * dim + offset * elements;
    }
};

// Positions of a run from one on.
template <class Format>
struct Positions {
    Run<Format> run;
    int64_t first;

    const typename Format::Element* at(const typename Format::Element* cache, int64_t i, int64_t elements) const {
        return run.at(cache, first + i, elements);
    }
};

// Add the weighted values of one panel to the outputs of a block: together where all of its rows read whole units, and
// row by row at the ends, so that each row takes its positions in order.
template <class Format, int C>
void weigh_panel(const Tile<Format>& tile, const Block& block, const typename Format::Element* const* values,
                 const Ahead& ahead, int panel, int64_t d, Partials out) {
    // Together in whole pairs, or in whole chunks where these are added up by themselves.
    constexpr int PAIR = Format::PAIR, LEAST = Format::CHAINS == 1 ? PAIR : CHUNK;
    const int first = panel / PAIR, last = first + PANEL / PAIR;
    const int begin = std::clamp((block.all_low + LEAST - 1) / LEAST * LEAST / PAIR, first, last);
    const int end = std::clamp(block.all_high / LEAST * LEAST / PAIR, begin, last);
    const auto alone = [&](int from, int to) {
        for (int row = block.first; from < to && row < block.first + block.rows; ++row) {
            const int a = std::max(from, tile.low[row] / PAIR), z = std::min(to, (tile.high[row] + PAIR - 1) / PAIR);
            if (a < z && tile.low[row] < tile.high[row])
                weigh_block<Format, 1, C, true>(tile, row, values, ahead, first, a, z, d, out);
        }
    };
    alone(first, begin);
    if (begin < end)
        with_constant<ROWS>(block.rows, [&](auto r) {
            weigh_block<Format, r, C, false>(tile, block.first, values, ahead, first, begin, end, d, out);
        });
    alone(end, last);
}

// Put a piece of 8 positions as float32 into a panel: keys [dim, PANEL] from pairs of bfloat16.
inline void widen_keys(float* to, const bfloat16* keys, int64_t page_size, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 2, to += 2 * PANEL) {
        const u32x8 pairs = load<u32x8>(keys + d * page_size);
        store(to, pairs << 16);
        store(to + PANEL, pairs & 0xFFFF0000u);
    }
}

// The same for values, [PIECE, dim].
inline void widen_values(float* to, const bfloat16* values, int64_t dim) {
    for (int i = 0; i < PIECE; i += 2, to += 2 * dim)
        for (int64_t d = 0; d < dim; d += LANES) {
            const u32x16 pairs = load<u32x16>(values + i * dim + d * 2);
            store(to + d, pairs << 16);
            store(to + dim + d, pairs & 0xFFFF0000u);
        }
}

// Reduce the first `length` positions, a group, for all rows of the tile, whose limits are set, and put the partials
// into `into`, or fold them. `next` will be reduced after them.
template <class Format, class Cache>
void reduce_group(const Tile<Format>& tile, const Positions<Cache>& here, int length, const Positions<Cache>& next,
                  Partials into, bool folds) {
    static thread_local Scratch scratch;
    const Partials own = {scratch.get<float>(Partials::floats(tile.num_rows, tile.dim)), tile.dim};
    const Partials out = folds ? own : into;
    constexpr bool IS_WIDENED = !std::is_same_v<Format, Cache>;
    constexpr int PIECES = PANEL / PIECE;
    const int width = tile.width();
    const typename Format::Element* pieces[PIECES];
    const int64_t page_size = IS_WIDENED ? PANEL : here.run.page_size();
    constexpr int64_t BYTES = sizeof(typename Cache::Element);
    Ahead ahead = {{}, BYTES, 0, 31 - __builtin_clz(tile.num_blocks), PANEL * tile.dim * BYTES > FIRST_CACHE / 2};
    // Fetch this panel next: within a page from its beginning on, whatever the order inside. And one line of each page
    // of the panel behind it, so that its address is translated by then (10 % where pages lie anywhere in memory).
    const auto fetch = [&](const Positions<Cache>& from, const typename Cache::Element* cache, int panel) {
        for (int i = 0; i < PIECES; ++i) {
            ahead.pieces[i] = (const char*)from.at(cache, panel + i * PIECE, tile.dim);
            __builtin_prefetch(from.at(cache, panel + PANEL + i * PIECE, tile.dim), 0, 2);
        }
    };
    for (int panel = 0; panel < length; panel += PANEL) {
        for (int i = 0; i < PIECES; ++i) {
            const auto* keys = here.at(here.run.keys, panel + i * PIECE, Cache::PAIR);
            if constexpr (IS_WIDENED) {
                widen_keys(tile.wide + i * PIECE, keys, here.run.page_size(), tile.dim);
                pieces[i] = tile.wide + i * PIECE;
            } else {
                pieces[i] = keys;
            }
        }
        const bool is_last = panel + PANEL >= length;
        fetch(here, is_last ? here.run.values : here.run.keys, is_last ? 0 : panel + PANEL);
        for (int b = 0; b < tile.num_blocks; ++b) {
            const Block& block = tile.blocks[b];
            if (block.low >= panel + PANEL || block.high <= panel) continue;
            ahead.set_slice(b);
            const int vectors = std::min((length - panel + LANES - 1) / LANES, COLS);
            with_constant<ROWS>(block.rows, [&](auto r) {
                for (int i = 0; i < vectors; i += width)
                    with_constant<COLS>(std::min(vectors - i, width), [&](auto c) {
                        if (page_size == PIECE)
                            score_block<Format, r, c, true>(tile, block.first, pieces, ahead, page_size, panel, i);
                        else
                            score_block<Format, r, c, false>(tile, block.first, pieces, ahead, page_size, panel, i);
                    });
            });
        }
    }
    for (int b = 0; b < tile.num_blocks; ++b) soften(tile, tile.blocks[b], out, [] {});
    for (int row = 0; row < tile.num_rows; ++row) std::fill_n(out[row].out, tile.dim, 0.0f);
    for (int panel = 0; panel < length; panel += PANEL) {
        for (int i = 0; i < PIECES; ++i) {
            const auto* values = here.at(here.run.values, panel + i * PIECE, tile.dim);
            if constexpr (IS_WIDENED) {
                widen_values(tile.wide + i * PIECE * tile.dim, values, tile.dim);
                pieces[i] = tile.wide + i * PIECE * tile.dim;
            } else {
                pieces[i] = values;
            }
        }
        const bool is_last = panel + PANEL >= length;
        if (is_last) fetch(next, next.run.keys, 0);
        else fetch(here, here.run.values, panel + PANEL);
        for (int64_t d = 0; d < tile.dim; d += width * LANES)
            with_constant<COLS>(std::min<int64_t>((tile.dim - d) / LANES, width), [&](auto c) {
                for (int b = 0; b < tile.num_blocks; ++b) {
                    ahead.set_slice(b);
                    weigh_panel<Format, c>(tile, tile.blocks[b], pieces, ahead, panel, d, out);
                }
            });
    }
    for (int row = 0; folds && row < tile.num_rows; ++row) fold(into[row], out[row], tile.dim);
}

}  // namespace radixrt
