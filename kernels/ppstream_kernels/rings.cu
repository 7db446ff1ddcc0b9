// Rings on the GPU: takes over what is new, begins a window, and makes frames what a policy reads.
// It includes nothing, so that NVRTC needs no headers. The structs are repeated in cuda_rings.py.
//
// Writer and reader are not ordered: a window takes the newest samples at the moment it runs, however
// long it stood queued. The writer stores the samples, then the table that says what may be used, and
// last the number of that table; the reader takes the number once and keeps to its table. What the
// table names is not overwritten before as much again has arrived, and the table not before TABLES
// more have.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;

constexpr int TABLES = 16;
constexpr int ROW_WORDS = 6, RING_WORDS = 3;  // of a table, for each row and for each ring
constexpr int RECORD_WORDS = 2;               // before the table in a record
constexpr int COMMITMENT_WORDS = 5;           // before the actions of a row's commitment
constexpr int ROW_FIELDS = 4;                 // session, session_epoch, window_end_ns, expires_ns
constexpr i64 NEWEST = -0x7fffffffffffffffll - 1;
constexpr i64 NEVER = -(1ll << 62);

__device__ __forceinline__ i64 acquire(const i64* from) {
    i64 value;
#if __CUDA_ARCH__ >= 700
    asm volatile("ld.acquire.gpu.global.s64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
#else
    value = *(const volatile i64*)from;
    __threadfence();
#endif
    return value;
}

// ---- What is new: from a block, into the rings.

struct Lane {      // one stream's rings, all rows
    u32* values;   // [B, slots, words]
    i64* stamps_ns;  // [B, slots]
    i64 slots;
    i64 words;     // of 4 bytes, of a sample; 0: its values are copied by other means
};

struct Piece { i64 lane, row, number, samples, at; };  // at: where its stamps begin, in bytes

struct Scatter {
    const i64* block;  // the host's or a copy: sequence, pieces, table, Piece[pieces], samples
    const Lane* lanes;
    i64* tables;       // [TABLES, table_words]
    i64* current;      // the newest table
    u32* arrived;      // blocks of threads that are done
    i64 table_words;
};

__device__ __forceinline__ void take_over(const Scatter& call, const Piece& piece) {
    const Lane lane = call.lanes[piece.lane];
    const i64* const stamps_ns = (const i64*)((const u8*)call.block + piece.at);
    const u32* const values = (const u32*)(stamps_ns + piece.samples);
    const int first = (int)(piece.number % lane.slots), slots = (int)lane.slots;
    const i64 row = piece.row * lane.slots;
    for (int k = threadIdx.x; k < piece.samples; k += blockDim.x) {
        const int slot = first + k < slots ? first + k : first + k - slots;
        lane.stamps_ns[row + slot] = stamps_ns[k];
    }
    const i64 words = piece.samples * lane.words;
    const i64 until_wrap = min(words, (slots - first) * lane.words);
    u32* const to = lane.values + (row + first) * lane.words;
    for (i64 k = threadIdx.x; k < until_wrap; k += blockDim.x) to[k] = values[k];
    u32* const start = lane.values + row * lane.words - until_wrap;
    for (i64 k = until_wrap + threadIdx.x; k < words; k += blockDim.x) start[k] = values[k];
}

extern "C" __global__ void scatter(const Scatter call) {
    const i64 sequence = call.block[0], pieces = call.block[1];
    const i64* const table = call.block + 2;
    const Piece* const piece = (const Piece*)(table + call.table_words);
    for (i64 k = blockIdx.x; k < pieces; k += gridDim.x) take_over(call, piece[k]);
    __threadfence();
    __syncthreads();
    __shared__ bool is_last;
    if (threadIdx.x == 0) is_last = atomicAdd(call.arrived, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    i64* const to = call.tables + sequence % TABLES * call.table_words;
    for (int k = threadIdx.x; k < call.table_words; k += blockDim.x) to[k] = table[k];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *call.arrived = 0;
        __threadfence();
        *(volatile i64*)call.current = sequence;
    }
}

// ---- The beginning of a window: what it uses, where it ends, and what the host will read of it.

struct Begin {
    const i64* tables;
    const i64* current;
    const i64* slots;   // [S]
    i64* targets_ns;    // [B, T]
    i64* counts;        // [S, B]
    i64* heads;         // [S, B]
    i64* ends_ns;       // [B], NEVER where absent
    bool* present;      // [B]
    i64* rows;          // [B, ROW_FIELDS]
    i64* instructions;  // [B] or null
    i64* conditionings; // [B] or null
    i64* records;       // [DEPTH, RECORD_WORDS + told_words], the host's: number, sequence, table
    i64* begun;         // windows so far
    i64* chosen;        // the number of the table that the newest window goes by
    const i64* limits;  // [DEPTH], the host's: of each window, rows that may be present; or null: all
    i64 table_words, told_words, depth, dt_ns, lease_ns;  // told_words: of a table, for the host
    int batch, streams, steps, reference;
};

constexpr int MOST_ROWS = 1024;

// One block: what it goes by is one table, whatever is written meanwhile.
extern "C" __global__ void begin(const Begin call) {
    __shared__ i64 sequence, number, limit;
    __shared__ i64 ends_ns[MOST_ROWS];
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");  // resample.cu may come in, and waits there
#endif
    if (threadIdx.x == 0) {
        number = *call.begun;
        sequence = acquire(call.current);
        const volatile i64* const limits = call.limits;
        limit = limits ? limits[number % call.depth] : call.batch;
    }
    __syncthreads();
    const i64* const table = call.tables + sequence % TABLES * call.table_words;
    const i64* const rings = table + ROW_WORDS * call.batch;
    i64* const record = call.records + number % call.depth * (RECORD_WORDS + call.told_words);
    for (int b = threadIdx.x; b < call.batch; b += blockDim.x) {
        const i64* const row = table + ROW_WORDS * b;
        const i64* const reference = rings + RING_WORDS * (call.reference * call.batch + b);
        const i64 session = row[0], epoch = row[1], given_ns = row[2];
        const i64 count = reference[1], newest_ns = reference[2];
        const bool is_present = session != 0 && count != 0 && b < limit;
        const i64 end_ns = !is_present ? NEVER : given_ns == NEWEST ? newest_ns : given_ns;
        ends_ns[b] = end_ns;
        call.ends_ns[b] = end_ns;
        call.present[b] = is_present;
        i64* const fields = call.rows + ROW_FIELDS * b;
        fields[0] = session;
        fields[1] = epoch;
        fields[2] = is_present ? end_ns : 0;
        fields[3] = is_present ? end_ns + call.lease_ns : 0;
        if (call.instructions) call.instructions[b] = row[4];
        if (call.conditionings) call.conditionings[b] = row[5];
    }
    for (int k = threadIdx.x; k < call.told_words; k += blockDim.x)
        record[RECORD_WORDS + k] = table[k];
    __syncthreads();
    for (int k = threadIdx.x; k < call.streams * call.batch; k += blockDim.x) {
        const int s = k / call.batch, b = k - s * call.batch;
        const i64 sent = rings[RING_WORDS * k], count = rings[RING_WORDS * k + 1];
        call.counts[k] = ends_ns[b] == NEVER ? 0 : count;
        call.heads[k] = (sent - count) % call.slots[s];
    }
    for (int k = threadIdx.x; k < call.batch * call.steps; k += blockDim.x) {
        const int b = k / call.steps, i = k - b * call.steps;
        const i64 end_ns = ends_ns[b];
        call.targets_ns[k] = end_ns == NEVER ? NEVER : end_ns - (call.steps - 1 - i) * call.dt_ns;
    }
    if (threadIdx.x == 0) {
        record[0] = number;
        record[1] = sequence;
        *call.begun = number + 1;
        *call.chosen = sequence;
    }
}

// ---- What a robot executes meanwhile, at the steps of the chunk to be made (executed_prefix.py).

struct Prefix {
    const i64* tables;
    const i64* chosen;
    const i64* ends_ns;    // [B], NEVER where absent
    const bool* discrete;  // [dim]
    float* out;            // [B, steps, dim]
    i64* delay_steps;      // [B]
    i64 table_words, dt_ns;
    int at, words;         // of a table: where the rows' commitments begin, and how long each is
    int steps, dim;
};

// A block is a row. Its commitment: points, start_ns, dt_ns, expires_ns, delay_ns, actions [points, dim]
extern "C" __global__ void prefix(const Prefix call) {
    const int b = blockIdx.x;
    const i64* const table = call.tables + *call.chosen % TABLES * call.table_words;
    const i64* const said = table + call.at + (i64)b * call.words;
    const float* const actions = (const float*)(said + COMMITMENT_WORDS);
    const i64 points = said[0], end_ns = call.ends_ns[b];
    const bool is_known = points > 0 && end_ns != NEVER && end_ns + call.dt_ns <= said[3];
    if (threadIdx.x == 0) {
        const i64 rest_ns = said[4] - call.dt_ns;
        const i64 over = rest_ns <= 0 ? 0 : (rest_ns + call.dt_ns - 1) / call.dt_ns;
        call.delay_steps[b] = is_known ? min(over, (i64)call.steps) : 0;
    }
    for (int k = threadIdx.x; k < call.steps * call.dim; k += blockDim.x) {
        const int step = k / call.dim, d = k - step * call.dim;
        double value = 0;
        if (is_known) {
            const i64 past_ns = end_ns + (step + 1) * call.dt_ns - said[1];
            const double place = fmin(fmax((double)past_ns / (double)said[2], 0.0), points - 1.0);
            const i64 left = (i64)place, right = min(left + 1, points - 1);
            const float before = actions[left * call.dim + d];
            const float rise = actions[right * call.dim + d] - before;
            value = call.discrete[d] ? before : before + (place - left) * rise;
        }
        call.out[(i64)b * call.steps * call.dim + k] = (float)value;
    }
}

// ---- The newest frames of a camera: resized, normalised, channels first.

struct Frames {
    const u8* frames;      // [B, slots, H, W, 3]
    const i64* stamps_ns;  // [B, slots]
    const i64* counts;     // [B]
    const i64* heads;      // [B]
    const i64* ends_ns;    // [B], NEVER where absent
    void* out;             // [B, n, 3, height, width] float32 or bfloat16
    bool* valid;           // [B, n]
    float* age_s;          // [B, n]
    i64 max_age_ns;
    float scale[3], shift[3];
    int slots, from_height, from_width, height, width, is_half;
};

__device__ __forceinline__ u16 to_bf16(float x) {
    const u32 bits = __float_as_uint(x);  // finite: to nearest, ties to even
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

struct Tap {  // between two pixels of an axis
    int low, high;
    float weight;
};

__device__ __forceinline__ Tap tap(int at, int size, int from_size) {
    if (size == from_size) return {at, at, 0.0f};
    const float where = fmaxf((at + 0.5f) * ((float)from_size / size) - 0.5f, 0.0f);
    const int low = min((int)where, from_size - 1);
    return {low, min(low + 1, from_size - 1), where - low};
}

// One block: some pixels of one frame. gridDim.y counts the frames of a row, gridDim.z the rows.
extern "C" __global__ void frames(const Frames call) {
    const int wanted = gridDim.y, back = wanted - 1 - blockIdx.y, b = blockIdx.z;
    const i64 end_ns = call.ends_ns[b];
    const int count = end_ns == NEVER ? 0 : (int)call.counts[b], head = (int)call.heads[b];
    const i64* const stamps_ns = call.stamps_ns + (i64)b * call.slots;
    const auto slot_of = [&](int k) { return head + k < call.slots ? head + k : head + k - call.slots; };
    int newest = count - 1;  // few are newer than the end: a search from there
    while (newest >= 0 && stamps_ns[slot_of(newest)] > end_ns) newest--;
    const int k = newest - back;
    const i64 frame = (i64)b * wanted + blockIdx.y;
    const int slot = k >= 0 ? slot_of(k) : 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const i64 age_ns = k >= 0 ? end_ns - stamps_ns[slot] : 0;
        call.valid[frame] = k >= 0 && age_ns <= call.max_age_ns;
        call.age_s[frame] = (float)((double)age_ns * 1e-9);
    }
    const int pixels = call.height * call.width;
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel >= pixels) return;
    const int y = pixel / call.width, x = pixel - y * call.width;
    const Tap down = tap(y, call.height, call.from_height), along = tap(x, call.width, call.from_width);
    const u8* const image =
        call.frames + ((i64)b * call.slots + slot) * call.from_height * call.from_width * 3;
    const auto at = [&](int row, int column, int c) {
        return (float)__ldg(image + ((i64)row * call.from_width + column) * 3 + c);
    };
#pragma unroll
    for (int c = 0; c < 3; c++) {
        float value = 0.0f;
        if (k >= 0) {
            value = at(down.low, along.low, c);
            if (down.weight != 0.0f || along.weight != 0.0f) {
                const float upper =
                    value + along.weight * (at(down.low, along.high, c) - value);
                const float left = at(down.high, along.low, c);
                const float lower = left + along.weight * (at(down.high, along.high, c) - left);
                value = upper + down.weight * (lower - upper);
            }
            value = value * call.scale[c] + call.shift[c];
        }
        const i64 to = (frame * 3 + c) * pixels + pixel;
        if (call.is_half) ((u16*)call.out)[to] = to_bf16(value);
        else ((float*)call.out)[to] = value;
    }
}
