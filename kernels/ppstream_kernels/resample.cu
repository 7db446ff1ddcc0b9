// Resamples the streams of a batch in one launch, rings read in place. What the numbers mean stands
// in resampling.py; this file is only how. It includes nothing, so that NVRTC needs no headers.
//
// A block writes one tile: some targets of one stream of one row of the batch, all its dimensions.
//   1. All threads bring the ring's stamps to shared memory; one thread per target brings the target.
//   2. The thread of a target searches, judges (valid, age) and notes the two samples and a weight.
//   3. All threads read those samples, blend and write: several values each, side by side.
// Where a row of the batch is one tile whose narrow samples are nearly all wanted, all of them come
// to shared memory beside the stamps; a thread per target blends there, and all write the results.
//
// Compiled with: STREAMS (most per launch), OUT (DTYPE_* of the values written), SOURCES (bits: the
// DTYPE_* that are read), MODES (bits: the MODE_* that occur), RINGS (bits: RING_*). What a launch
// does not need is left out: where everything fits on the GPU at once, instructions are the time.
// The layouts of Call and Stream are repeated in cuda_call.py.

#define DTYPE_FLOAT32 0
#define DTYPE_BFLOAT16 1
#define DTYPE_FLOAT16 2
#define DTYPE_FLOAT64 3
#define DTYPE_INT8 4     // of the output alone, as the next
#define DTYPE_FLOAT8 5   // e4m3fn: no infinities

#define MODE_LINEAR 0
#define MODE_PREVIOUS 1
#define MODE_NEAREST 2
#define MODE_SLERP 3
#define MODE_ANGLE 4
#define MODE_CUBIC 5

#define RING_TURNED 0  // some stream has counts or heads
#define RING_LONG 1    // some ring has more stamps than are staged
#define RING_WHOLE 2   // the samples of some ring are staged, too

#define HAS(bits, bit) (((bits) >> (bit)) & 1)
#define TURNS (HAS(MODES, MODE_SLERP) || HAS(MODES, MODE_ANGLE))
#define IS_SCALED (OUT >= DTYPE_INT8)

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int MOST_THREADS = 256;  // cuda_tiling.py asks for no more

struct Stream {
    const void* values;    // [B, N, D]
    const i64* stamps_ns;  // [B, N]
    const i64* counts;     // [B] or null: N
    const i64* heads;      // [B] or null: 0
    i64 row_stride, slot_stride, dim_stride;  // of values, in elements
    i64 stamp_row_stride, stamp_slot_stride, count_stride, head_stride;
    i64 max_gap_ns, max_age_ns;               // no limit: -1, the largest when unsigned
    int slots, dim, mode, dtype;
    int stage_shift;   // of every 2^n samples the first one's stamp is staged
    int column;        // of the output where this stream begins
    int first_tile;    // of this stream among those of a row of the batch
    int tile_targets;  // at most the threads of a block
    int pack;          // values that a thread reads and writes at once
    int across;        // packs of a sample
    int store_bytes;   // widest store that the output's alignment allows; of whole rings a row's
    int ahead_bytes;   // of the ring that a tile asks for before it is known what is needed
    int ahead_end;     // bytes of a ring that may be asked for
    int whole_bytes;   // of a ring whose samples are all staged; otherwise 0
};

struct Call {
    void* values;         // [B, T, width]
    bool* valid;          // [B, T, trust_width]
    float* age_s;         // [B, T, trust_width]
    const i64* tgt_ns;    // [B, T]
    const float* scale;   // [width] of values in 8 bits: what one step stands for
    i64 tgt_row_stride, tgt_stride;
    int rows, targets, width, trust_width;
    int trust_column;     // of this launch's first stream
    int streams;          // of this launch
    Stream stream[STREAMS];
};
static_assert(sizeof(Stream) == 160 && sizeof(Call) == 80 + 160 * STREAMS, "as in cuda_call.py");

// ---- Number formats: float32 and float64 as they are, halves by their bits.

struct bf16 { u16 bits; };
struct fp16 { u16 bits; };
struct int8 { u8 bits; };
struct fp8 { u8 bits; };

template <class T> struct Wide { typedef float type; };  // what arithmetic is done in
template <> struct Wide<double> { typedef double type; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(fp16 x) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

// A float64 keeps in the last bit that it was cut: the next rounding is then the only one.
__device__ __forceinline__ float cut_to_odd(double x) {
    const float cut = __double2float_rz(x);
    return (double)cut == x ? cut : __uint_as_float(__float_as_uint(cut) | 1u);
}

template <class To> struct Narrow;
template <> struct Narrow<float> {
    static __device__ __forceinline__ float of(float x) { return x; }
    static __device__ __forceinline__ float of(double x) { return (float)x; }
};
template <> struct Narrow<double> {
    static __device__ __forceinline__ double of(double x) { return x; }
};
template <> struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
#if __CUDA_ARCH__ >= 800
        bf16 narrow;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
        return narrow;
#else
        const u32 bits = __float_as_uint(x);  // finite: to nearest, ties to even
        return bf16{(u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
    }
    static __device__ __forceinline__ bf16 of(double x) { return of(cut_to_odd(x)); }
};
template <> struct Narrow<fp16> {
    static __device__ __forceinline__ fp16 of(float x) {
        fp16 narrow;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
        return narrow;
    }
    static __device__ __forceinline__ fp16 of(double x) { return of(cut_to_odd(x)); }
};

template <> struct Narrow<int8> {  // -127..127, to nearest, ties to even; NaN is 0
    static __device__ __forceinline__ int8 of(float x) {
        return int8{(u8)max(-127, min(__float2int_rn(x), 127))};
    }
};
template <> struct Narrow<fp8> {  // -448..448, to nearest, ties to even; NaN stays NaN
    static __device__ __forceinline__ u16 of(float low, float high) {
#if __CUDA_ARCH__ >= 890
        u16 both;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
        return both;
#else
        return (u16)(bits_of(low) | bits_of(high) << 8);
#endif
    }
    static __device__ __forceinline__ fp8 of(float x) { return fp8{(u8)of(x, 0.0f)}; }

  private:
    static __device__ __forceinline__ u32 bits_of(float x) {
        const u32 all = __float_as_uint(x), sign = all >> 24 & 0x80u, size = all & 0x7fffffffu;
        if (size > 0x7f800000u) return sign | 0x7fu;
        if (size >= 0x43e00000u) return sign | 0x7eu;  // 448
        if (size < 0x3c800000u)                        // 2^-6: steps of 2^-9, as of 2^14 in float32
            return sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u);
        return sign | (size - 0x3c000000u + 0x7ffffu + (size >> 20 & 1u)) >> 20;
    }
};

#if OUT == DTYPE_FLOAT32
typedef float Out;
#elif OUT == DTYPE_BFLOAT16
typedef bf16 Out;
#elif OUT == DTYPE_FLOAT16
typedef fp16 Out;
#elif OUT == DTYPE_INT8
typedef int8 Out;
#elif OUT == DTYPE_FLOAT8
typedef fp8 Out;
#else
typedef double Out;
#endif

// ---- Several values side by side, read and written in words as wide as they are aligned.

template <int BYTES> struct Word;
template <> struct Word<1> { typedef u8 type; };
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T at[N];
};

template <class T, int N> __device__ __forceinline__ Pack<T, N> read(const T* from) {
    static_assert(sizeof(T) * N <= 16, "one word");
    typedef typename Word<sizeof(T) * N>::type W;
    union { W word; Pack<T, N> pack; } both = {*(const W*)from};
    return both.pack;
}

template <int BYTES, class T, int N>
__device__ __forceinline__ void write_words(T* to, const Pack<T, N>& pack) {
    typedef typename Word<BYTES>::type W;
#pragma unroll
    for (int k = 0; k < (int)sizeof(T) * N / BYTES; k++) ((W*)to)[k] = ((const W*)pack.at)[k];
}

template <class T, int N>
__device__ __forceinline__ void write(T* to, const Pack<T, N>& pack, int store_bytes) {
    constexpr int all = sizeof(T) * N;
    if constexpr (all >= 16) if (store_bytes == 16) return write_words<16>(to, pack);
    if constexpr (all >= 8) if (store_bytes >= 8) return write_words<8>(to, pack);
    if constexpr (all >= 4) if (store_bytes >= 4) return write_words<4>(to, pack);
    if constexpr (all >= 2 && sizeof(T) <= 2) if (store_bytes >= 2) return write_words<2>(to, pack);
    if constexpr (sizeof(T) == 1) write_words<1>(to, pack);
}

// ---- Beside other launches.

// Launched to overlap the end of what was queued before it (cuda_launch.py): nothing of that may be
// read, and nothing that it may read be written, before this returns. Otherwise it does nothing.
// That one may still have been writing when this launch began: it is no case for read-only loads
// (__ldg, ld.global.nc), whose memory has to stay as it is for as long as a kernel runs.
__device__ __forceinline__ void wait_for_forerunner() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next launch may take the room that this one leaves; it still waits as above. Any
// earlier, and its blocks crowd where this one's have yet to be spread.
__device__ __forceinline__ void let_successor_in() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- Step 1: the ring.

struct Ring {
    const i64* stamps_ns;  // of this row of the batch
    i64 stride;
    int slots, count, head;

    __device__ __forceinline__ int slot(int k) const {  // of the k-th sample, counted from the oldest
        if (!HAS(RINGS, RING_TURNED)) return k;
        const int at = head + k;
        return at < slots ? at : at - slots;
    }
    __device__ __forceinline__ i64 stamp_ns(int k) const { return stamps_ns[slot(k) * stride]; }
};

__device__ __forceinline__ int held_within(i64 number, int most) {
    return number < 0 ? 0 : number > most ? most : (int)number;  // bad numbers stay inside the ring
}

__device__ __forceinline__ Ring open_ring(const Stream& s, u32 row) {
    Ring ring = {s.stamps_ns + row * s.stamp_row_stride, s.stamp_slot_stride, s.slots, s.slots, 0};
    if (!HAS(RINGS, RING_TURNED)) return ring;
    if (s.counts) ring.count = held_within(s.counts[row * s.count_stride], s.slots);
    if (s.heads) ring.head = held_within(s.heads[row * s.head_stride], s.slots - 1);
    return ring;
}

// Starts to bring 8 or 16 bytes from global to shared memory; all_here waits for them.
__device__ __forceinline__ void bring(i64* to, const i64* from) {
#if __CUDA_ARCH__ >= 800
    const u32 shared_to = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_to), "l"(from) : "memory");
#else
    *to = *from;
#endif
}

__device__ __forceinline__ void bring(uint4* to, const uint4* from) {
#if __CUDA_ARCH__ >= 800
    const u32 shared_to = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_to), "l"(from) : "memory");
#else
    *to = *from;
#endif
}

// What this thread has begun to bring so far is one group.
__device__ __forceinline__ void close_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// All groups of all threads but the newest are here.
__device__ __forceinline__ void older_here() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    __syncthreads();
}

// All that this thread brought is here; the others see it behind the next __syncthreads.
__device__ __forceinline__ void mine_here() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ __forceinline__ void all_here() {
    mine_here();
    __syncthreads();
}

// A short ring arrives slot by slot, which waits for no head; of a long one every n-th sample does.
__device__ __forceinline__ void stage(const Stream& s, u32 row, i64* staged_ns) {
    if (!HAS(RINGS, RING_LONG) || s.stage_shift == 0) {
        const i64* const from = s.stamps_ns + row * s.stamp_row_stride;
        const int stride = (int)s.stamp_slot_stride;  // a ring has less than 2^31 elements
        for (int slot = threadIdx.x; slot < s.slots; slot += blockDim.x)
            bring(staged_ns + slot, from + slot * stride);
        return;
    }
    const Ring ring = open_ring(s, row);
    for (int j = threadIdx.x; j << s.stage_shift < ring.count; j += blockDim.x)
        bring(staged_ns + j, ring.stamps_ns + ring.slot(j << s.stage_shift) * ring.stride);
}

// Where the samples of a row of the batch begin.
__device__ __forceinline__ u64 ring_of(const Stream& s, u32 row) {
    const int element_bytes = s.dtype == DTYPE_FLOAT32 ? 4 : s.dtype == DTYPE_FLOAT64 ? 8 : 2;
    return (u64)s.values + row * s.row_stride * element_bytes;
}

// The tiles of a row of the batch ask for the whole ring together, into L2. A hint only.
__device__ __forceinline__ void ask_ahead(const Stream& s, u32 row, int tile) {
#if __CUDA_ARCH__ >= 900
    constexpr int most = 4096;  // bytes per request
    const int from = tile * s.ahead_bytes + threadIdx.x * most;
    const int end = min((tile + 1) * s.ahead_bytes, s.ahead_end);
    if (threadIdx.x * most < s.ahead_bytes && from < end) {
        const u64 ring = (ring_of(s, row) + 15) & ~15ull;
        const int size = min(end - from, most);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(ring + from), "r"(size));
    }
#endif
}

// ---- Step 2: where a target lies.

template <class W> struct alignas(16) Place {
    int first, second;  // where these samples begin, in elements
    W weight;           // how far from the first to the second
};

struct Bracket {
    int first, second;    // samples counted from the oldest; the same where one is held or picked
    u64 past_ns, gap_ns;  // target minus first, second minus first: right at any distance
    u64 bridge_ns, age_ns;
    bool begun;           // else past_ns means nothing
    int before, after;    // of a cubic: the samples beside, or -1
    u64 before_ns, after_ns;  // how far they lie from first and second
};

// How many samples of low..high-1 are at or before the target; all before low are. Three at a time:
// so many reads of shared memory take hardly longer than one.
template <class StampOf>
__device__ __forceinline__ int count_passed(int low, int high, i64 target_ns, StampOf stamp_ns) {
    while (low < high) {
        const int step = (high - low + 3) >> 2, last = high - 1;
        const i64 near_ns = stamp_ns(low + step - 1);
        const i64 middle_ns = stamp_ns(min(low + 2 * step - 1, last));
        const i64 far_ns = stamp_ns(min(low + 3 * step - 1, last));
        const int passed =
            far_ns <= target_ns ? 3 : middle_ns <= target_ns ? 2 : near_ns <= target_ns ? 1 : 0;
        const int base = low + passed * step;
        low = min(base, high);
        if (passed < 3) high = min(base + step - 1, high);
    }
    return low;
}

// The first of all samples with the stamp of the k-th, counted from the oldest. Equals are rare.
template <class StampOf> __device__ __forceinline__ int first_of_equals(int k, StampOf stamp_ns) {
    const i64 at_ns = stamp_ns(k);
    if (k == 0 || stamp_ns(k - 1) != at_ns) return k;
    int low = 0, high = k - 1;
    while (low < high) {
        const int middle = (low + high) >> 1;
        if (stamp_ns(middle) < at_ns) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The samples beside a bracket that no hole divides from it: a cubic takes its slopes from them.
template <class StampOf>
__device__ __forceinline__ void look_beside(
    Bracket& found, int count, u64 max_gap_ns, StampOf stamp_ns) {
    const i64 first_ns = stamp_ns(found.first), second_ns = stamp_ns(found.second);
    found.before = found.after = -1;
    if (found.first > 0) {
        const int before = first_of_equals(found.first - 1, stamp_ns);
        found.before_ns = (u64)first_ns - (u64)stamp_ns(before);
        if (found.before_ns <= max_gap_ns) found.before = before;
    }
    int after = found.second + 1;
    if (after < count && stamp_ns(after) == second_ns)  // rare, too
        after = count_passed(after, count, second_ns, stamp_ns);
    if (after < count) {
        found.after_ns = (u64)stamp_ns(after) - (u64)second_ns;
        if (found.after_ns <= max_gap_ns) found.after = after;
    }
}

template <class StampOf>
__device__ __forceinline__ void enclose(
    Bracket& found, const Stream& s, int passed, int count, i64 target_ns, StampOf stamp_ns) {
    found.begun = passed > 0;
    found.first = first_of_equals(max(passed - 1, 0), stamp_ns);
    const i64 first_ns = stamp_ns(found.first);
    found.second = passed < count ? passed : found.first;
    found.past_ns = (u64)target_ns - (u64)first_ns;
    found.gap_ns = (u64)stamp_ns(found.second) - (u64)first_ns;
    if (HAS(MODES, MODE_CUBIC) && s.mode == MODE_CUBIC)
        look_beside(found, count, (u64)s.max_gap_ns, stamp_ns);
}

__device__ __forceinline__ Bracket find(
    const Stream& s, const Ring& ring, const i64* staged_ns, i64 target_ns) {
    Bracket found;
    if (!HAS(RINGS, RING_LONG) || s.stage_shift == 0) {
        const auto stamp_ns = [&](int k) { return staged_ns[ring.slot(k)]; };
        const int passed = count_passed(0, ring.count, target_ns, stamp_ns);
        enclose(found, s, passed, ring.count, target_ns, stamp_ns);
    } else {
        const auto stamp_ns = [&](int k) { return ring.stamp_ns(k); };
        const int staged = ((ring.count - 1) >> s.stage_shift) + 1;
        const int above = count_passed(0, staged, target_ns, [&](int j) { return staged_ns[j]; });
        const int low = above ? ((above - 1) << s.stage_shift) + 1 : 0;
        const int high = min(above << s.stage_shift, ring.count);
        const int passed = count_passed(low, high, target_ns, stamp_ns);
        enclose(found, s, passed, ring.count, target_ns, stamp_ns);
    }
    const bool picks = s.mode == MODE_PREVIOUS || s.mode == MODE_NEAREST;
    const u64 rest_ns = found.gap_ns - found.past_ns;
    found.bridge_ns = picks ? found.past_ns : found.past_ns != 0 ? found.gap_ns : 0;
    if (s.mode == MODE_NEAREST && found.gap_ns != 0 && found.past_ns > rest_ns) {
        found.first = found.second;  // the newer one is closer
        found.bridge_ns = rest_ns;
        found.past_ns = 0;
    }
    if (picks) found.gap_ns = 0;
    found.age_ns = found.gap_ns == 0 && found.begun ? found.past_ns : 0;
    if (found.gap_ns == 0 || found.past_ns == 0) found.second = found.first;
    return found;
}

// Where an order means nothing, from the closer sample: exact at both ends and never beyond them.
template <class W>
__device__ __forceinline__ Place<W> place_of(const Bracket& found, const Ring& ring, const Stream& s) {
    const int stride = (int)s.slot_stride;  // a ring has less than 2^31 elements
    Place<W> place = {ring.slot(found.first) * stride, ring.slot(found.second) * stride, (W)0};
    if (found.first == found.second) return place;
    const u64 rest_ns = found.gap_ns - found.past_ns;
    const bool is_swapped = s.mode < MODE_SLERP && rest_ns < found.past_ns;
    if (is_swapped) {
        const int closer = place.second;
        place.second = place.first, place.first = closer;
    }
    place.weight = (W)(is_swapped ? rest_ns : found.past_ns) / (W)found.gap_ns;
    return place;
}

template <class W> struct alignas(16) Beside {  // behind the places, of a cubic
    int before, after;            // where these samples begin, in elements
    W before_ratio, after_ratio;  // their intervals over that of the place; 0: there is no sample
};

__device__ __forceinline__ int words_of_place(const Stream& s) {  // cuda_tiling.py reserves them
    return HAS(MODES, MODE_CUBIC) && s.mode == MODE_CUBIC ? 3 : 1;
}

template <class W>
__device__ __forceinline__ Beside<W> beside_of(
    const Bracket& found, const Ring& ring, const Stream& s) {
    const int stride = (int)s.slot_stride;
    const int held = ring.slot(found.first) * stride;
    Beside<W> beside = {held, held, (W)0, (W)0};
    if (found.first == found.second) return beside;
    if (found.before >= 0) {
        beside.before = ring.slot(found.before) * stride;
        beside.before_ratio = (W)found.before_ns / (W)found.gap_ns;
    }
    if (found.after >= 0) {
        beside.after = ring.slot(found.after) * stride;
        beside.after_ratio = (W)found.after_ns / (W)found.gap_ns;
    }
    return beside;
}

__device__ __forceinline__ bool is_whole(const Stream& s) {
    return HAS(RINGS, RING_WHOLE) && s.whole_bytes;
}

// The samples of a whole ring lie behind places and stamps; behind them its results are collected.
__device__ __forceinline__ uint4* staged_samples(const Stream& s, uint4* shared) {
    return shared + s.tile_targets + ((s.slots + 1) >> 1);
}

__device__ __forceinline__ void stage_samples(const Stream& s, u32 row, uint4* shared) {
    const uint4* const from = (const uint4*)ring_of(s, row);
    uint4* const to = staged_samples(s, shared);
    for (int word = threadIdx.x; word < s.whole_bytes >> 4; word += blockDim.x)
        bring(to + word, from + word);
}

struct Target {
    i64 ns;
    i64 trust;     // where its validity and age go
    bool is_mine;  // one thread per target
};

__device__ __forceinline__ void judge(
    const Call& call, const Stream& s, const Target& target, const Bracket& found) {
    const bool is_trusted =
        found.bridge_ns <= (u64)s.max_gap_ns && found.age_ns <= (u64)s.max_age_ns;
    call.valid[target.trust] = found.begun && is_trusted;
    call.age_s[target.trust] = (float)((double)found.age_ns * 1e-9);
}

// The places of all targets of the tile. Trust is written when nobody waits for it.
template <class W>
__device__ __forceinline__ const Place<W>* locate(
    const Call& call, const Stream& s, const Ring& ring, const Target& target, uint4* shared) {
    const i64* const staged_ns = (const i64*)(shared + s.tile_targets * words_of_place(s));
    Place<W>* const places = (Place<W>*)shared;
    Bracket found;
    if (target.is_mine) {
        found = find(s, ring, staged_ns, target.ns);
        places[threadIdx.x] = place_of<W>(found, ring, s);
        if (HAS(MODES, MODE_CUBIC) && s.mode == MODE_CUBIC)
            ((Beside<W>*)(shared + s.tile_targets))[threadIdx.x] = beside_of<W>(found, ring, s);
    }
    if (is_whole(s)) mine_here();
    __syncthreads();
    let_successor_in();
    if (target.is_mine) judge(call, s, target, found);
    return places;
}

// ---- Step 3: values.

struct Tile {
    u32 row;           // of the batch
    int from, targets; // the first target, and how many
};

__device__ __forceinline__ Out* first_output(const Call& call, const Stream& s, const Tile& tile) {
    return (Out*)call.values + ((i64)tile.row * call.targets + tile.from) * call.width + s.column;
}

// Steps of the values that a thread writes side by side, in 8 bits; otherwise nothing.
template <int N> struct Steps {
#if IS_SCALED
    float per_unit[N];
    __device__ __forceinline__ void load(const Call& call, const Stream& s, int part) {
        const float* const scale = call.scale + (s.column + part * N);
#pragma unroll
        for (int k = 0; k < N; k++) per_unit[k] = 1.0f / scale[k];
    }
#else
    __device__ __forceinline__ void load(const Call&, const Stream&, int) {}
#endif
};

template <class W, int N>
__device__ __forceinline__ Pack<Out, N> narrowed(const W (&values)[N], const Steps<N>& steps) {
    Pack<Out, N> result;
#if IS_SCALED
    float scaled[N];
#pragma unroll
    for (int k = 0; k < N; k++) scaled[k] = (float)values[k] * steps.per_unit[k];
#else
    const W(&scaled)[N] = values;
#endif
    if constexpr (OUT == DTYPE_FLOAT8 && N > 1) {
#pragma unroll
        for (int k = 0; k < N; k += 2)
            ((u16*)result.at)[k / 2] = Narrow<fp8>::of(scaled[k], scaled[k + 1]);
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) result.at[k] = Narrow<Out>::of(scaled[k]);
    }
    return result;
}

// One value of a turn.
__device__ __forceinline__ Out narrowed_one(const Call& call, const Stream& s, double x, int part) {
    Steps<1> steps;
    steps.load(call, s, part);
    const double values[1] = {x};
    return narrowed<double, 1>(values, steps).at[0];
}

template <class W> __device__ __forceinline__ W between(W first, W second, W weight) {
    return weight * (second - first) + first;
}

// Which pack of which target a thread is at. Its divisions are done while the stamps arrive.
struct Cursor {
    int target, part;
    int down, aside;  // a step of the whole block further

    __device__ __forceinline__ explicit Cursor(int across) {
        const u32 width = across > 0 ? across : 1;
        target = threadIdx.x / width, part = threadIdx.x - target * width;
        if (across == 0) target = MOST_THREADS;  // behind every tile: there is nothing to do
        down = blockDim.x / width, aside = blockDim.x - down * width;
    }
    __device__ __forceinline__ void step(int across) {
        target += down, part += aside;
        if (part >= across) part -= across, target++;
    }
};

__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }
__device__ __forceinline__ float limited(float x, float most) { return fminf(fmaxf(x, 0.0f), most); }
__device__ __forceinline__ double limited(double x, double most) { return fmin(fmax(x, 0.0), most); }

// The slope of a cubic at one end of an interval, over the interval's own; what is not finite counts
// as 0. The interval that joins at this end rises by beside, the one at the other end by beyond.
template <class W>
__device__ __forceinline__ W slope(W rise, W beside, W ratio, W beyond, W far_ratio) {
    if (ratio > 0) {
        if (!((beside > 0 && rise > 0) || (beside < 0 && rise < 0))) return 0;
        const W own = (2 + ratio) * ratio * rise;
        return limited(quotient(3 * (1 + ratio) * beside, own + (1 + 2 * ratio) * beside), (W)3);
    }
    if (far_ratio > 0)
        return limited((2 + far_ratio - beyond / (far_ratio * rise)) / (1 + far_ratio), (W)3);
    return 1;
}

// On a monotone cubic, from the closer sample, as mixing.py has it.
template <class W>
__device__ __forceinline__ W curved(
    W before, W first, W second, W after, W weight, W before_ratio, W after_ratio) {
    const W rise = second - first, older = first - before, newer = after - second;
    const W old = slope(rise, older, before_ratio, newer, after_ratio);
    const W recent = slope(rise, newer, after_ratio, older, before_ratio);
    const W bend = (old + recent - 2) * weight + (3 - 2 * old - recent);
    const W way = limited((bend * weight + old) * weight, (W)1);
    return way > (W)0.5 ? between(second, first, 1 - way) : between(first, second, way);
}

template <class Src, int N>
__device__ __forceinline__ void blend_curves(
    const Call& call, const Stream& s, const Tile& tile, Cursor at,
    const Place<typename Wide<Src>::type>* places) {
    typedef typename Wide<Src>::type W;
    const Src* const src = (const Src*)s.values + tile.row * s.row_stride;
    const Beside<W>* const besides = (const Beside<W>*)((const uint4*)places + s.tile_targets);
    Out* const out = first_output(call, s, tile);
    const int stride = N > 1 ? N : (int)s.dim_stride;
    Steps<N> steps;
    for (; at.target < tile.targets; at.step(s.across)) {
        steps.load(call, s, at.part);
        const auto place = places[at.target];
        const auto beside = besides[at.target];
        const int aside = at.part * stride;
        const auto before = read<Src, N>(src + (beside.before + aside));
        const auto first = read<Src, N>(src + (place.first + aside));
        const auto second = read<Src, N>(src + (place.second + aside));
        const auto after = read<Src, N>(src + (beside.after + aside));
        W values[N];
#pragma unroll
        for (int k = 0; k < N; k++)
            values[k] = curved(widen(before.at[k]), widen(first.at[k]), widen(second.at[k]),
                               widen(after.at[k]), place.weight, beside.before_ratio,
                               beside.after_ratio);
        write(out + (at.target * call.width + at.part * N), narrowed<W, N>(values, steps), s.store_bytes);
    }
}

template <class Src, int N>
__device__ __forceinline__ void blend_lines(
    const Call& call, const Stream& s, const Tile& tile, Cursor at,
    const Place<typename Wide<Src>::type>* places) {
    if (HAS(MODES, MODE_CUBIC) && s.mode == MODE_CUBIC)
        return blend_curves<Src, N>(call, s, tile, at, places);
    typedef typename Wide<Src>::type W;
    const Src* const src = (const Src*)s.values + tile.row * s.row_stride;
    Out* const out = first_output(call, s, tile);
    const int stride = N > 1 ? N : (int)s.dim_stride;
    Steps<N> steps;
    if (at.target < tile.targets) steps.load(call, s, at.part);
    while (at.target < tile.targets) {
        const auto place = places[at.target];
        const auto first = read<Src, N>(src + (place.first + at.part * stride));
        const auto second = read<Src, N>(src + (place.second + at.part * stride));
        W values[N];
#pragma unroll
        for (int k = 0; k < N; k++)
            values[k] = between(widen(first.at[k]), widen(second.at[k]), place.weight);
        write(out + (at.target * call.width + at.part * N), narrowed<W, N>(values, steps), s.store_bytes);
        at.step(s.across);
        if (IS_SCALED && at.aside && at.target < tile.targets) steps.load(call, s, at.part);
    }
}

// From shared memory into it: neighbouring threads would read and write global memory far apart.
template <class Src, int N>
__device__ __forceinline__ void blend_mine(
    const Stream& s, const Place<typename Wide<Src>::type>& place, const Src* src, Out* to) {
    constexpr int all = sizeof(Out) * N;
    const Steps<N> steps{};
#pragma unroll 4
    for (int part = 0; part < s.dim; part += N) {
        const auto first = read<Src, N>(src + (place.first + part));
        const auto second = read<Src, N>(src + (place.second + part));
        typename Wide<Src>::type values[N];
#pragma unroll
        for (int k = 0; k < N; k++)
            values[k] = between(widen(first.at[k]), widen(second.at[k]), place.weight);
        write_words<(all < 16 ? all : 16)>(to + part, narrowed(values, steps));
    }
}

template <class W>
__device__ __forceinline__ void write_collected(Out* to, const Out* from, int bytes) {
    for (int word = threadIdx.x; word < bytes / (int)sizeof(W); word += blockDim.x)
        ((W*)to)[word] = ((const W*)from)[word];
}

template <class Src>
__device__ __forceinline__ void blend_whole(
    const Call& call, const Stream& s, const Tile& tile,
    const Place<typename Wide<Src>::type>* places, uint4* shared) {
    const Src* const src = (const Src*)staged_samples(s, shared);
    Out* const collected = (Out*)(staged_samples(s, shared) + (s.whole_bytes >> 4));
    if ((int)threadIdx.x < tile.targets) {
        const auto place = places[threadIdx.x];
        Out* const to = collected + threadIdx.x * s.dim;
        if (sizeof(Src) == 2 && s.pack == 4) blend_mine<Src, sizeof(Src) == 2 ? 4 : 1>(s, place, src, to);
        else if (sizeof(Src) <= 4 && s.pack == 2) blend_mine<Src, sizeof(Src) <= 4 ? 2 : 1>(s, place, src, to);
        else blend_mine<Src, 1>(s, place, src, to);
    }
    __syncthreads();
    Out* const out = first_output(call, s, tile);
    const int bytes = tile.targets * s.dim * (int)sizeof(Out);
    if (s.store_bytes == 16) return write_collected<uint4>(out, collected, bytes);
    if (s.store_bytes == 8) return write_collected<uint2>(out, collected, bytes);
    write_collected<u32>(out, collected, bytes);
}

// In (-pi, pi], by whole turns; what lies in there already is returned exactly.
__device__ __forceinline__ double wrapped(double radians) {
    constexpr double pi = 3.141592653589793, turn = 6.283185307179586;
    return radians - turn * ceil((radians - pi) / turn);
}

// Turns are rare and small: the format is looked up per value, so that their code exists once.
__device__ __forceinline__ double one(const Stream& s, i64 element) {
    if (HAS(SOURCES, DTYPE_BFLOAT16) && s.dtype == DTYPE_BFLOAT16)
        return widen(((const bf16*)s.values)[element]);
    if (HAS(SOURCES, DTYPE_FLOAT16) && s.dtype == DTYPE_FLOAT16)
        return widen(((const fp16*)s.values)[element]);
    if (HAS(SOURCES, DTYPE_FLOAT64) && s.dtype == DTYPE_FLOAT64)
        return ((const double*)s.values)[element];
    return ((const float*)s.values)[element];
}

__device__ __forceinline__ void blend_angles(
    const Call& call, const Stream& s, const Tile& tile, const Place<double>* places) {
    Out* const out = first_output(call, s, tile);
    for (int item = threadIdx.x; item < tile.targets * s.dim; item += blockDim.x) {
        const int target = item / s.dim, part = item - target * s.dim;
        const Place<double> place = places[target];
        const i64 column = tile.row * s.row_stride + part * s.dim_stride;
        const double first = one(s, column + place.first);
        const double second = one(s, column + place.second);
        const double angle = wrapped(first + place.weight * wrapped(second - first));
        out[(i64)target * call.width + part] = narrowed_one(call, s, angle, part);
    }
}

constexpr double LARGEST = 1.7976931348623157e308;

struct Quaternion {
    double at[4];

    __device__ __forceinline__ double dot(const Quaternion& q) const {
        return at[0] * q.at[0] + at[1] * q.at[1] + at[2] * q.at[2] + at[3] * q.at[3];
    }
    __device__ __forceinline__ Quaternion plus(const Quaternion& q, double scale) const {
        return {at[0] + scale * q.at[0], at[1] + scale * q.at[1],
                at[2] + scale * q.at[2], at[3] + scale * q.at[3]};
    }
    __device__ __forceinline__ Quaternion times(double scale) const {
        return {at[0] * scale, at[1] * scale, at[2] * scale, at[3] * scale};
    }
    __device__ __forceinline__ double length() const { return sqrt(dot(*this)); }
    // A length of 0, or one that is not finite, names no rotation: zero.
    __device__ __forceinline__ Quaternion unit() const {
        const double size = length();
        if (size > 0 && size <= LARGEST) return times(1 / size);
        return {0, 0, 0, 0};
    }
    __device__ __forceinline__ bool names_rotation() const {
        return at[0] != 0 || at[1] != 0 || at[2] != 0 || at[3] != 0;  // of a unit
    }
};

__device__ __forceinline__ double sinc(double x) { return x > 1e-8 ? sin(x) / x : 1; }

// Shoemake's slerp as sin(w a) / sin(a) = w sinc(w a) / sinc(a): nothing to divide at a = 0. The
// common 1 / sinc(a) falls to the final normalisation; a = 2 atan2(|q - p|, |q + p|) keeps its digits.
__device__ __forceinline__ Quaternion slerp(
    const Quaternion& first, Quaternion second, double weight) {
    if (first.dot(second) < 0) second = second.times(-1);
    const double angle = 2 * atan2(second.plus(first, -1).length(), second.plus(first, 1).length());
    const double rest = 1 - weight;
    const Quaternion part = first.times(rest * sinc(rest * angle));
    return part.plus(second, weight * sinc(weight * angle)).unit();
}

// The thread of a target blends it, too, so that it may take back the trust it has written.
__device__ __forceinline__ void blend_quaternions(
    const Call& call, const Stream& s, const Tile& tile, const Target& mine,
    const Place<double>* places) {
    Out* const out = first_output(call, s, tile);
    const int target = threadIdx.x;
    if (mine.is_mine) {
        const Place<double> place = places[target];
        Quaternion first, second;
        for (int k = 0; k < 4; k++) {
            const i64 column = tile.row * s.row_stride + k * s.dim_stride;
            first.at[k] = one(s, column + place.first);
            second.at[k] = one(s, column + place.second);
        }
        first = first.unit(), second = second.unit();
        Quaternion turned = {0, 0, 0, 0};
        if (first.names_rotation() && second.names_rotation())
            turned = slerp(first, second, place.weight);
        else
            call.valid[mine.trust] = false;
        for (int k = 0; k < 4; k++)
            out[(i64)target * call.width + k] = narrowed_one(call, s, turned.at[k], k);
    }
}

// Of a ring that holds nothing: zeros, not trusted.
__device__ __forceinline__ void write_nothing(
    const Call& call, const Stream& s, const Tile& tile, const Target& target) {
    Out* const out = first_output(call, s, tile);
    for (int item = threadIdx.x; item < tile.targets * s.dim; item += blockDim.x) {
        const int down = item / s.dim;
        out[(i64)down * call.width + item - down * s.dim] = Narrow<Out>::of(0.0f);
    }
    if (target.is_mine) call.valid[target.trust] = false, call.age_s[target.trust] = 0.0f;
}

// ---- The kernel.

template <class Src>
__device__ __forceinline__ void lines(
    const Call& call, const Stream& s, const Tile& tile, const Ring& ring, const Target& target,
    const Cursor& at, uint4* shared) {
    const auto places = locate<typename Wide<Src>::type>(call, s, ring, target, shared);
    if constexpr (!IS_SCALED)
        if (is_whole(s)) return blend_whole<Src>(call, s, tile, places, shared);
    if constexpr (sizeof(Src) == 2)
        if (s.pack == 8) return blend_lines<Src, 8>(call, s, tile, at, places);
    if constexpr (sizeof(Src) <= 4)
        if (s.pack == 4) return blend_lines<Src, 4>(call, s, tile, at, places);
    if (s.pack == 2) return blend_lines<Src, 2>(call, s, tile, at, places);
    blend_lines<Src, 1>(call, s, tile, at, places);
}

__device__ __forceinline__ void turns(
    const Call& call, const Stream& s, const Tile& tile, const Ring& ring, const Target& target,
    uint4* shared) {
    const auto places = locate<double>(call, s, ring, target, shared);
    if (HAS(MODES, MODE_SLERP) && s.mode == MODE_SLERP)
        blend_quaternions(call, s, tile, target, places);
    if (HAS(MODES, MODE_ANGLE) && s.mode == MODE_ANGLE) blend_angles(call, s, tile, places);
}

// Where a multiprocessor holds 2048 threads, having them all gains more than it costs in registers;
// float64 needs those, and packing float8 a few of them.
#define HOLDS_2048 \
    (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030)
#if HOLDS_2048 && !(MODES >> MODE_SLERP) && !HAS(SOURCES, DTYPE_FLOAT64)
#define BLOCKS_RESIDENT (OUT == DTYPE_FLOAT8 ? 6 : 8)
#else
#define BLOCKS_RESIDENT 4
#endif

// Grid: x is the tile among those of a row of the batch; y and z together are the row.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, BLOCKS_RESIDENT)
resample(const __grid_constant__ Call call) {
    extern __shared__ uint4 shared[];
    const u32 row = blockIdx.z * gridDim.y + blockIdx.y;
    if (row >= call.rows) return;
    int tile_at = blockIdx.x, stream_at = 0;
    if (STREAMS > 1)
        while (stream_at + 1 < call.streams && tile_at >= call.stream[stream_at + 1].first_tile)
            stream_at++;
    const Stream& s = call.stream[stream_at];
    tile_at -= s.first_tile;
    const int from = tile_at * s.tile_targets;
    const Tile tile = {row, from, min(call.targets - from, s.tile_targets)};

    wait_for_forerunner();
    stage(s, row, (i64*)(shared + s.tile_targets * words_of_place(s)));
    if (is_whole(s)) close_group(), stage_samples(s, row, shared), close_group();
    const int at = from + threadIdx.x;
    Target target = {0, call.trust_column + stream_at, (int)threadIdx.x < tile.targets};
    if (target.is_mine)
        target.ns = call.tgt_ns[row * call.tgt_row_stride + at * call.tgt_stride];
    const Ring ring = open_ring(s, row);
    if (s.ahead_bytes) ask_ahead(s, row, tile_at);
    target.trust += ((i64)row * call.targets + at) * call.trust_width;
    const Cursor cursor(s.across);
    if (is_whole(s)) older_here();  // the samples go on coming while targets are searched
    else all_here();

    if (HAS(RINGS, RING_TURNED) && ring.count == 0) {
        if (is_whole(s)) mine_here();
        return write_nothing(call, s, tile, target);
    }
    if (TURNS && (s.mode == MODE_SLERP || s.mode == MODE_ANGLE))
        return turns(call, s, tile, ring, target, shared);
    if constexpr (HAS(SOURCES, DTYPE_FLOAT32))
        if (s.dtype == DTYPE_FLOAT32)
            return lines<float>(call, s, tile, ring, target, cursor, shared);
    if constexpr (HAS(SOURCES, DTYPE_BFLOAT16))
        if (s.dtype == DTYPE_BFLOAT16)
            return lines<bf16>(call, s, tile, ring, target, cursor, shared);
    if constexpr (HAS(SOURCES, DTYPE_FLOAT16))
        if (s.dtype == DTYPE_FLOAT16)
            return lines<fp16>(call, s, tile, ring, target, cursor, shared);
    if constexpr (HAS(SOURCES, DTYPE_FLOAT64))
        if (s.dtype == DTYPE_FLOAT64)
            return lines<double>(call, s, tile, ring, target, cursor, shared);
}
