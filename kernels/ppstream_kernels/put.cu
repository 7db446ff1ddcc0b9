// One message into another device's memory, and its count: a single launch.
// It includes nothing, so that NVRTC needs no headers. The structs are repeated in cuda_put.py.
//
// The receiver compares the counter with the count that it waits for, so every byte of the message has
// to be visible to the whole system before the counter is. What a message holds is not known here,
// but that its first words may come with the launch.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef char u8;
typedef long long i64;

constexpr int HEADER_WORDS = 16;
constexpr int VECTORS = 4;  // of 16 bytes, that a thread has under way at a time

struct Message {
    const u8* from;  // this device's
    u8* to;          // the receiver's
    u32* counter;    // the receiver's
    u32* arrived;    // this device's: blocks that are through; 0 between launches
    i64 bytes;
    i64 value;                 // of the counter: the lower 32 bits
    i64 header_words;          // sent in place of the first words at `from`
    i64 header[HEADER_WORDS];
};

__device__ __forceinline__ i64 first() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 step() { return (i64)gridDim.x * blockDim.x; }

__device__ __forceinline__ void copy_vectors(const uint4* from, uint4* to, i64 begin, i64 end) {
    i64 at = begin + first();
    for (; at + (VECTORS - 1) * step() < end; at += VECTORS * step()) {
        uint4 held[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) held[i] = from[at + i * step()];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) to[at + i * step()] = held[i];
    }
    for (; at < end; at += step()) to[at] = from[at];
}

__device__ __forceinline__ void copy_bytes(const u8* from, u8* to, i64 begin, i64 end) {
    for (i64 at = begin + first(); at < end; at += step()) to[at] = from[at];
}

__device__ __forceinline__ void write_header(const Message& message, i64 word) {
    u8* const to = message.to + threadIdx.x * 8;
    if ((u64)to % 8 == 0)
        *(i64*)to = word;
    else
        for (int i = 0; i < 8; ++i) to[i] = (u8)(word >> (8 * i));
}

__device__ __forceinline__ bool writes_header(const Message& message) {
    return blockIdx.x == 0 && threadIdx.x < message.header_words;
}

__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// All but the header.
__device__ __forceinline__ void move(const Message& message) {
    const i64 begin = message.header_words * 8;
    i64 vectors = (begin + 15) / 16, end = message.bytes / 16;
    if (((u64)message.from | (u64)message.to) % 16 == 0 && vectors < end)
        copy_vectors((const uint4*)message.from, (uint4*)message.to, vectors, end);
    else
        vectors = end = (begin + 15) / 16;  // none
    const i64 whole = vectors * 16 < message.bytes ? vectors * 16 : message.bytes;
    copy_bytes(message.from, message.to, begin, whole);
    copy_bytes(message.from, message.to, end * 16, message.bytes);
}

// True on the one thread that comes behind everything that all blocks wrote.
__device__ __forceinline__ bool is_behind_all(const Message& message) {
    __syncthreads();
    if (threadIdx.x != 0) return false;
    if (gridDim.x > 1) {
        fence();  // what this block wrote, which the barrier put before
        if (atomicAdd(message.arrived, 1u) != gridDim.x - 1) return false;
        *message.arrived = 0;
        fence();  // what the other blocks wrote, seen through their count
    }
    return true;
}

// Releases all that this thread knows to be written: that of its block by the barrier.
__device__ __forceinline__ void count(const Message& message, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(message.counter), "r"(value) : "memory");
}

extern "C" __global__ void __launch_bounds__(1024) put(const __grid_constant__ Message message) {
    move(message);
    if (writes_header(message)) write_header(message, message.header[threadIdx.x]);
    if (is_behind_all(message)) count(message, (u32)message.value);
}

// ---- The same with arguments that never change, so that a graph can hold it, and with its times.

struct Stamped {
    Message message;   // its value and header are not read
    const i64* now;    // the host's: value, then the header
    i64* began;        // the host's: when this kernel began, and so whatever came before it ended
    i64* ended;        // the host's, or null: when all was counted; written last
    const i64* named;  // words that the host is to see with it
    i64* names;        // the host's
    i64 name_words;
};

__device__ __forceinline__ i64 device_ns() {
    i64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

extern "C" __global__ void __launch_bounds__(1024) put_stamped(const __grid_constant__ Stamped call) {
    const Message& message = call.message;
    const volatile i64* const now = call.now;
    i64 value = 0, word = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) *(volatile i64*)call.began = device_ns();
    if (threadIdx.x == 0) value = now[0];  // host memory: on its way while the message moves
    if (writes_header(message)) word = now[1 + threadIdx.x];
    move(message);
    if (writes_header(message)) write_header(message, word);
    if (blockIdx.x == 0 && threadIdx.x < call.name_words)
        *(volatile i64*)(call.names + threadIdx.x) = call.named[threadIdx.x];
    if (!is_behind_all(message)) return;
    count(message, (u32)value);
    if (call.ended == nullptr) return;
    asm volatile("st.release.sys.global.s64 [%0], %1;" :: "l"(call.ended), "l"(device_ns()) : "memory");
}
