// Iterations that the threads of a parallel region share. Knows nothing of what they do.
//
// OpenMP's own loops end with barriers at which waiting threads sleep where the wait policy is passive, and a sleep
// takes 10 to 15 us to end: as long as a small layer's attention.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace radixrt {

class Loop {
   public:
    explicit Loop(int64_t count) : count_(count) {}

    // Called by each thread, or by those that have woken up: do iterations, `chunk` at a time, until none is left, and
    // wait for those that others are at.
    template <class F>
    void run(int64_t chunk, const F& f) {
        for (int64_t begin; (begin = next_.fetch_add(chunk, std::memory_order_relaxed)) < count_;) {
            const int64_t end = std::min(count_, begin + chunk);
            for (int64_t i = begin; i < end; ++i) f(i);
            done_.fetch_add(end - begin, std::memory_order_release);
        }
        for (int i = 0; done_.load(std::memory_order_acquire) < count_; ++i) {
            if (i < SPINS) pause();
            else std::this_thread::yield();  // the other may need this core
        }
    }

   private:
    static constexpr int SPINS = 2000;  // about 50 us

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    const int64_t count_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace radixrt
