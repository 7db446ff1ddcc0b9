// Holds a stream until another device has counted: a kernel that looks at the counter.
// It includes nothing, so that NVRTC needs no headers. The struct is repeated in cuda_wait.py.
//
// The acquire makes everything that the peer wrote before its count visible to what comes behind.

typedef unsigned int u32;
typedef long long i64;

constexpr u32 EAGER = 2048;     // looks without a pause, some 1.5 ms: longer waits are not in a hurry
constexpr u32 PAUSE_NS = 1000;  // between later ones, at most twice that

__device__ __forceinline__ void wait_until(const u32* counter, u32 value) {
    for (u32 looks = 0;; ++looks) {
        u32 found;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        if ((int)(found - value) >= 0) return;  // counters compare cyclically
        if (looks >= EAGER) asm volatile("nanosleep.u32 %0;" ::"r"(PAUSE_NS));
    }
}

extern "C" __global__ void wait_for_count(const u32* counter, u32 value) {
    wait_until(counter, value);
}

// ---- The same with arguments that never change, so that a graph can hold it, and with its time.

struct Stamped {
    const u32* counter;
    const u32* other;  // a counter of this device's own, which is waited for, too; or null
    const i64* now;    // the host's: the values of both
    i64* ended;        // the host's: when what is behind may begin
};

extern "C" __global__ void wait_stamped(const Stamped call) {
    const volatile i64* const now = call.now;
    const u32 value = (u32)now[0];
    if (call.other != nullptr) {
        const u32 other = (u32)now[1];
        wait_until(call.other, other);
    }
    wait_until(call.counter, value);
    if (threadIdx.x != 0) return;
    i64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    *(volatile i64*)call.ended = ns;
}
