// Says what time it is: the host asks by a word in pinned memory, and the device answers there.
// It includes nothing, so that NVRTC needs no headers. The struct is repeated in cuda_clock.py.
//
// It runs for a few questions only, and ends by itself when none comes.

typedef long long i64;

struct Answers {
    const i64* asked;   // the host's: the newest question
    i64* answered;      // the host's: the newest that was answered; behind it the time
    i64* ended;         // the host's: the number of the newest launch that is over
    const i64* now;     // the host's: the first question of this launch, the last, its number
    i64 limit_ns;       // without a question
};

__device__ __forceinline__ i64 device_ns() {
    i64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

extern "C" __global__ void answer(const Answers call) {
    const volatile i64* const now = call.now;
    const i64 first = now[0], last = now[1], number = now[2];
    for (i64 question = first; question <= last; ++question) {
        const i64 until_ns = device_ns() + call.limit_ns;
        i64 ns, found;
        do {
            asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(found) : "l"(call.asked) : "memory");
            ns = device_ns();
        } while (found < question && ns < until_ns);
        if (found < question) break;
        *(volatile i64*)(call.answered + 1) = ns;
        asm volatile("st.release.sys.global.s64 [%0], %1;" :: "l"(call.answered), "l"(question) : "memory");
    }
    asm volatile("st.release.sys.global.s64 [%0], %1;" :: "l"(call.ended), "l"(number) : "memory");
}
