// Pairs of bfloat16 in the tile registers of AMX, which multiply them at several times the rate of vectors: formats,
// and how registers are set. Knows nothing of what is multiplied.
//
// An instruction adds to each of 16 x 16 sums the products of one chunk, 32 elements or positions, in an order of its
// own, which vectors can follow. Semantics of TDPBF16PS: Intel's instruction set reference.
#pragma once

#include <algorithm>

#include "simd.h"

namespace radixrt {

#if defined(RADIXRT_AMX) && defined(__AMX_BF16__)

// What was written before is in memory: compilers do not know that tiles are read from there. (Nor do the headers of
// some put brackets around the addresses that they cast, so these have their own.)
inline void settle(const void* at) { asm volatile("" : : "r"(at) : "memory"); }

// Pairs of bfloat16 multiplied in tiles.
struct TiledBFloat16 : BFloat16 {
    using Weight = bfloat16;
    static constexpr int ROW_UNIT = 16, DEPTH_UNIT = CHUNK;

    static void to_weights(Weight* to, f32x16 v) { narrow(to, v); }
    static f32x16 exp2(f32x16 x) { return coarse_exp2(x); }
};

// The same bits by vectors, for tiles of few rows: these keep up with memory, where 16 rows at a time do not.
struct PairedBFloat16 : BFloat16 {
    using Wide = TiledBFloat16;
    static constexpr int CHAINS = 2, MANY = 4;

    // Numbers below 2^-126 count as zero, given or found, as in tiles.
    class Mode {
       public:
        Mode() : before_(_mm_getcsr()) { set(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
        ~Mode() { set(before_); }

       private:
        static void set(unsigned mode) {
            settle(nullptr);  // compilers do not know that arithmetic depends on it
            _mm_setcsr(mode);
            settle(nullptr);
        }
        unsigned before_;
    };

    static void to_weights(Weight* to, f32x16 v) {
        bfloat16 rounded[LANES];
        narrow(rounded, v);
        store(to, widen(rounded));
    }
    static f32x16 exp2(f32x16 x) { return coarse_exp2(x); }
};

constexpr int EDGE = TiledBFloat16::ROW_UNIT;  // rows of a tile register, and sums in each

// Tile registers of 64 bytes a row: `count` of them for at most `num_rows` rows and their sums, the others for what
// these are multiplied with. In the end they are set as before: other libraries remember what they set.
class Registers {
   public:
    Registers(int num_rows, int count) {
        _tile_storeconfig(&before_);
        Config ours = {};
        ours.palette = 1;
        std::fill_n(ours.row_bytes, 8, 64);
        std::fill_n(ours.rows, 8, EDGE);
        std::fill_n(ours.rows, count, std::min(num_rows, EDGE));
        settle(&ours);
        _tile_loadconfig(&ours);
    }
    ~Registers() {
        if (before_.palette) _tile_loadconfig(&before_);
        else _tile_release();
    }

   private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    Config before_;
};

#else

using PairedBFloat16 = BFloat16;

#endif

}  // namespace radixrt
