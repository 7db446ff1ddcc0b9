// Holds a stream until another device has counted: a kernel that looks at the counter.
// It includes nothing, so that NVRTC needs no headers.
//
// The acquire makes everything that the peer wrote before its count visible to what comes behind.

typedef unsigned int u32;

constexpr u32 EAGER = 2048;     // looks without a pause, some 1.5 ms: longer waits are not in a hurry
constexpr u32 PAUSE_NS = 1000;  // between later ones, at most twice that

extern "C" __global__ void wait_for_count(const u32* counter, u32 value) {
    for (u32 looks = 0;; ++looks) {
        u32 found;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        if ((int)(found - value) >= 0) return;  // counters compare cyclically
        if (looks >= EAGER) asm volatile("nanosleep.u32 %0;" ::"r"(PAUSE_NS));
    }
}
