/* The compiled twins of ring append, window cut, settling and action limits; and the module.
 *
 * Python's classes inherit the structs' fields as members, so Python's careful ways work on the
 * same numbers. A call does the usual case and gives what its Python twin gives, bit for bit; for
 * the rest it says "not mine" before it has touched a thing. All calls hold the GIL and none
 * blocks. Nothing that a stranger sends is parsed here. core.pyi has the contracts.
 */
#include "module.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#define API 9 /* __init__.py has the same number; both change with this module's interface */
#define NEVER_NS (-((int64_t)1 << 62))
#define READABLE (PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)

enum { LINEAR, PREVIOUS, NEAREST };

typedef struct {
    PyObject_HEAD
    long long received, used, in_flight;
} Ledger;

typedef struct {
    PyObject_HEAD
    long long floor_ns, best_ns, best_until_ns, rejected, stale_since_ns;
} Clock;

typedef struct {
    PyObject_HEAD
    long long accepted, count, settled, newest_ns, newest_rx_ns;
    char takes; /* samples of float32, and nobody else is told of them */
    int64_t overwritten; /* before a window used them, and not told to the ledger yet */
    int64_t capacity, dim;
    uint64_t gap_ns;
    Py_buffer values, stamps, held, head; /* [N, D] float32 or none; int64 [N], [1], [1] */
} Ring;

static PyTypeObject *ledger_type, *clock_type, *ring_type;

/* ---- a stamp, and what a ring holds, counted from the oldest ------------------------------- */

static int64_t read_stamp(const char *stamps, int64_t index)
{
    int64_t stamp_ns; /* in a message it may be unaligned */
    memcpy(&stamp_ns, stamps + index * 8, 8);
    return stamp_ns;
}

static int is_sound(const Ring *ring)
{
    int64_t oldest = ring->accepted - ring->count;
    return ring->head.buf && ring->count >= 0 && ring->count <= ring->capacity && oldest >= 0 &&
           ring->settled >= oldest && ring->settled <= ring->accepted;
}

static int64_t slot_of(const Ring *ring, int64_t index)
{
    return (ring->accepted - ring->count + index) % ring->capacity;
}

static int64_t stamp_of(const Ring *ring, int64_t index)
{
    return ((const int64_t *)ring->stamps.buf)[slot_of(ring, index)];
}

/* How many samples are at or before a stamp. */
static int64_t count_until(const Ring *ring, int64_t at_ns)
{
    int64_t low = 0, high = ring->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (stamp_of(ring, middle) <= at_ns)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---- append: ring.py and stamp_filter.py ----------------------------------------------------- */

/* True for stamps that strictly increase from the newest on, without a hole to be counted. */
static int are_next(const Ring *ring, const char *stamps, int64_t n)
{
    int64_t before_ns = ring->newest_ns;
    for (int64_t i = 0; i < n; i++) {
        int64_t stamp_ns = read_stamp(stamps, i);
        uint64_t step_ns = (uint64_t)stamp_ns - (uint64_t)before_ns;
        if (stamp_ns <= before_ns || (before_ns != NEVER_NS && step_ns > ring->gap_ns))
            return 0;
        before_ns = stamp_ns;
    }
    return 1;
}

/* StampFilter.accepts, which is called only where it learns or refuses; -1 with an exception. */
static int accepts(Clock *clock, int64_t stamp_ns, int64_t rx_ns)
{
    int64_t lead_ns;
    if (!__builtin_sub_overflow(stamp_ns, rx_ns, &lead_ns) && clock->best_ns > NEVER_NS &&
        lead_ns >= clock->floor_ns && lead_ns <= clock->best_ns &&
        rx_ns < clock->best_until_ns && stamp_ns <= -NEVER_NS) {
        clock->rejected = 0;
        clock->stale_since_ns = NEVER_NS;
        return 1;
    }
    PyObject *answer = PyObject_CallMethod((PyObject *)clock, "accepts", "LL",
                                           (long long)stamp_ns, (long long)rx_ns);
    int is_accepted = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is_accepted;
}

/* Counts samples in flight as dropped; false with an exception. */
static int drop(Ledger *ledger, const char *reason, int64_t samples)
{
    PyObject *done = samples <= 0 ? Py_NewRef(Py_None)
                                  : PyObject_CallMethod((PyObject *)ledger, "drop", "sL", reason,
                                                        (long long)samples);
    Py_XDECREF(done);
    return done != NULL;
}

static int are_finite(const char *values, int64_t n)
{
    int all = 1;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i * 4, 4);
        all &= (bits & 0x7f800000u) != 0x7f800000u;
    }
    return all;
}

static void store(Ring *ring, const char *stamps, const char *values, int64_t n)
{
    int64_t begin = ring->accepted % ring->capacity, bytes = ring->dim * 4;
    int64_t first = n < ring->capacity - begin ? n : ring->capacity - begin;
    char *to_stamps = ring->stamps.buf, *to_values = ring->values.buf;
    memcpy(to_stamps + begin * 8, stamps, first * 8);
    memcpy(to_values + begin * bytes, values, first * bytes);
    memcpy(to_stamps, stamps + first * 8, (n - first) * 8);
    memcpy(to_values, values + first * bytes, (n - first) * bytes);
}

/* False with an exception. */
static int tell_overwritten(Ring *ring, Ledger *ledger)
{
    int64_t samples = ring->overwritten;
    ring->overwritten = 0;
    return drop(ledger, "overwritten", samples);
}

/* n; 0 with nothing touched: not mine; -1 with an exception. Then tell_overwritten. */
static int64_t append(Ring *ring, const char *stamps, const char *values, int64_t n, int64_t rx_ns,
                      Ledger *ledger, Clock *clock)
{
    if (!ring->takes || !ring->values.buf || !is_sound(ring) || n < 1 || n > ring->capacity ||
        !are_next(ring, stamps, n) || !are_finite(values, n * ring->dim))
        return 0;
    int64_t newest_ns = read_stamp(stamps, n - 1);
    int is_accepted = accepts(clock, newest_ns, rx_ns);
    if (is_accepted != 1)
        return is_accepted;
    store(ring, stamps, values, n);
    ring->accepted += n;
    ring->count = ring->count + n < ring->capacity ? ring->count + n : ring->capacity;
    *(int64_t *)ring->held.buf = ring->count;
    *(int64_t *)ring->head.buf = slot_of(ring, 0);
    ring->newest_ns = newest_ns;
    ring->newest_rx_ns = rx_ns;
    ledger->received += n;
    ledger->in_flight += n;
    int64_t oldest = ring->accepted - ring->count;
    if (ring->settled < oldest) {
        ring->overwritten += oldest - ring->settled;
        ring->settled = oldest;
    }
    return n;
}

static PyObject *ring_try_append(PyObject *self, PyObject *args)
{
    Ring *ring = (Ring *)self;
    PyObject *from_stamps, *from_values, *ledger, *clock;
    Py_buffer stamps = {0}, values = {0};
    long long rx_ns, taken = 0;
    if (!PyArg_ParseTuple(args, "OOLO!O!", &from_stamps, &from_values, &rx_ns, ledger_type, &ledger,
                          clock_type, &clock))
        return NULL;
    if (PyObject_GetBuffer(from_stamps, &stamps, READABLE) < 0 ||
        PyObject_GetBuffer(from_values, &values, READABLE) < 0)
        PyErr_Clear(); /* with holes in memory: not mine */
    else if (values.len == stamps.len / 8 * ring->dim * 4 &&
             (is_of(&stamps, 1, 'l') || (is_of(&stamps, 1, 'B') && stamps.len % 8 == 0)) &&
             (is_of(&values, 1, 'B') ||
              (is_of(&values, 2, 'f') && values.shape[1] == ring->dim)))
        taken = append(ring, stamps.buf, values.buf, stamps.len / 8, rx_ns, (Ledger *)ledger,
                       (Clock *)clock);
    PyBuffer_Release(&stamps);
    PyBuffer_Release(&values);
    int is_told = taken >= 0 && tell_overwritten(ring, (Ledger *)ledger);
    return is_told ? PyLong_FromLongLong(taken) : NULL;
}

/* ---- receive: Samples of robot_messages.py behind their first bytes, which are known ---------- */

enum { PACKETS = 16, PACKET_BYTES = 1 << 15, FDS = 253, BIN_8 = 0xc4, BIN_16 = 0xc5 };

/* Length of the MessagePack binary at *at, which then points to its bytes; -1: not mine. */
static int64_t open_binary(const unsigned char **at, const unsigned char *end)
{
    const unsigned char *from = *at;
    int64_t length = -1;
    if (end - from >= 2 && *from == BIN_8) {
        length = from[1];
        from += 2;
    } else if (end - from >= 3 && *from == BIN_16) {
        length = from[1] << 8 | from[2];
        from += 3;
    }
    *at = from;
    return length <= end - from ? length : -1;
}

typedef struct {
    const char *prefix;
    Py_ssize_t length;
    Ring *ring;
    Ledger *ledger;
    Clock *clock;
} StreamLine;

/* False with an exception. */
static int get_line(PyObject *lines, Py_ssize_t index, StreamLine *line)
{
    return PyArg_ParseTuple(PyTuple_GetItem(lines, index), "y#O!O!O!", &line->prefix, &line->length,
                            ring_type, &line->ring, ledger_type, &line->ledger, clock_type,
                            &line->clock);
}

/* As append, for a packet of one of these lines. */
static int64_t take(PyObject *lines, const unsigned char *packet, int64_t size, int64_t rx_ns)
{
    StreamLine line;
    for (Py_ssize_t i = 0; i < PyTuple_Size(lines); i++) {
        if (!get_line(lines, i, &line))
            return -1;
        if (size <= line.length || memcmp(packet, line.prefix, line.length))
            continue;
        const unsigned char *stamps = packet + line.length, *end = packet + size;
        int64_t bytes = open_binary(&stamps, end), row = line.ring->dim * 4;
        const unsigned char *values = stamps + (bytes > 0 ? bytes : 0);
        if (bytes <= 0 || bytes % 8 || open_binary(&values, end) != bytes / 8 * row ||
            end - values != bytes / 8 * row)
            return 0;
        return append(line.ring, (const char *)stamps, (const char *)values, bytes / 8, rx_ns,
                      line.ledger, line.clock);
    }
    return 0;
}

/* How many descriptors a packet brought, and where they are. */
static Py_ssize_t fds_of(const struct mmsghdr *found, const int **fds)
{
    const struct cmsghdr *control = CMSG_FIRSTHDR(&found->msg_hdr);
    if (!control || control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS)
        return 0;
    *fds = (const int *)CMSG_DATA(control);
    return (control->cmsg_len - CMSG_LEN(0)) / sizeof **fds;
}

/* (bytes, descriptors, flags) of a packet that was read. */
static PyObject *read_packet(const struct mmsghdr *found)
{
    const int *fds;
    Py_ssize_t n = fds_of(found, &fds);
    PyObject *all = PyTuple_New(n);
    for (Py_ssize_t i = 0; all && i < n; i++)
        PyTuple_SetItem(all, i, PyLong_FromLong(fds[i]));
    return all ? Py_BuildValue("y#Ni", found->msg_hdr.msg_iov->iov_base,
                               (Py_ssize_t)found->msg_len, all,
                               found->msg_hdr.msg_flags & ~MSG_CMSG_CLOEXEC)
               : NULL;
}

/* What was read goes with an exception; `others` was empty before. */
static int lose(const struct mmsghdr *found, int n)
{
    const int *fds;
    for (int i = 0; i < n; i++)
        for (Py_ssize_t k = fds_of(&found[i], &fds); k > 0; k--)
            close(fds[k - 1]);
    return -1;
}

/* Reads up to PACKETS and takes the first ones that are samples; -1 with an exception. */
static int receive_some(int fd, PyObject *lines, int64_t rx_ns, long long *samples, int *taken,
                        PyObject *others)
{
    static unsigned char packets[PACKETS][PACKET_BYTES];
    static char controls[PACKETS][CMSG_SPACE(FDS * sizeof(int))] __attribute__((aligned(8)));
    struct iovec into[PACKETS];
    struct mmsghdr found[PACKETS];
    for (int i = 0; i < PACKETS; i++) {
        into[i] = (struct iovec){packets[i], PACKET_BYTES};
        found[i] = (struct mmsghdr){.msg_hdr = {.msg_iov = &into[i], .msg_iovlen = 1,
                                                .msg_control = controls[i],
                                                .msg_controllen = CMSG_LEN(FDS * sizeof(int))}};
    }
    int n = recvmmsg(fd, found, PACKETS, MSG_DONTWAIT | MSG_CMSG_CLOEXEC, NULL), begin = *taken;
    for (int i = 0, is_over = 0; i < n; i++) {
        const struct msghdr *message = &found[i].msg_hdr;
        if (is_over && !message->msg_controllen)
            continue; /* the end, again and again; Python closes what came with others */
        is_over |= found[i].msg_len == 0;
        int is_plain = !message->msg_controllen && !(message->msg_flags & (MSG_TRUNC | MSG_CTRUNC));
        int64_t here = 0;
        if (is_plain && *taken - begin == i)
            here = take(lines, packets[i], found[i].msg_len, rx_ns);
        PyObject *other = here ? NULL : read_packet(&found[i]);
        int is_lost = here < 0 || (!here && (!other || PyList_Append(others, other) < 0));
        Py_XDECREF(other);
        if (is_lost)
            return lose(found, n);
        *samples += here;
        *taken += here > 0;
    }
    return n;
}

/* Takes a socket's packets of samples; what comes from the first other one on it only reads. */
static PyObject *receive(PyObject *Py_UNUSED(module), PyObject *args)
{
    static int is_busy; /* whoever has the GIL has the memory, but a call of Python's may lose it */
    PyObject *lines, *others = NULL;
    int fd, most, n = PACKETS, taken = 0;
    long long rx_ns, samples = 0;
    if (!PyArg_ParseTuple(args, "iO!Li", &fd, &PyTuple_Type, &lines, &rx_ns, &most) ||
        (others = PyList_New(0)) == NULL)
        return NULL;
    if (!is_busy) {
        is_busy = 1;
        while (n == PACKETS && taken < most && PyList_Size(others) == 0)
            n = receive_some(fd, lines, rx_ns, &samples, &taken, others);
        is_busy = 0;
    }
    StreamLine line;
    for (Py_ssize_t i = 0; !PyErr_Occurred() && i < PyTuple_Size(lines); i++)
        if (get_line(lines, i, &line))
            tell_overwritten(line.ring, line.ledger);
    if (!PyErr_Occurred())
        return Py_BuildValue("LiN", samples, taken, others);
    Py_DECREF(others);
    return NULL;
}

/* ---- cut: bracket.py, blend.py, mixing.py and trust.py of ppstream_kernels ------------------- */

typedef struct {
    int mode;
    unsigned long long gap_ns, age_ns;
    Py_buffer values, valid, age_s; /* strided: [T, D] float32, [T] bool, [T] float32 */
} Line;

static void mix(float *to, const float *first, const float *second, double weight, int64_t dim)
{
    for (int64_t i = 0; i < dim; i++) {
        double mixed = (double)second[i] - (double)first[i];
        mixed = mixed * weight;
        mixed = mixed + (double)first[i];
        to[i] = (float)mixed;
    }
}

/* Writes one target; true when it is valid. */
static int cut_target(const Ring *ring, const Line *line, int64_t t, int64_t tgt_ns)
{
    int64_t passed = count_until(ring, tgt_ns);
    float *to = (float *)((char *)line->values.buf + t * line->values.strides[0]);
    float *age_s = (float *)((char *)line->age_s.buf + t * line->age_s.strides[0]);
    char *valid = (char *)line->valid.buf + t * line->valid.strides[0];
    if (ring->count == 0) {
        memset(to, 0, ring->dim * sizeof *to);
        *age_s = 0;
        return *valid = 0;
    }
    int64_t before = passed > 0 ? passed - 1 : 0;
    int64_t after = passed < ring->count ? passed : ring->count - 1;
    const float *first = (float *)ring->values.buf + slot_of(ring, before) * ring->dim;
    const float *second = (float *)ring->values.buf + slot_of(ring, after) * ring->dim;
    uint64_t first_ns = stamp_of(ring, before);
    uint64_t past_ns = (uint64_t)tgt_ns - first_ns;
    uint64_t gap_ns = (uint64_t)stamp_of(ring, after) - first_ns;
    uint64_t bridge_ns = past_ns ? gap_ns : 0, held_ns = bridge_ns ? 0 : past_ns;
    if (line->mode == LINEAR) {
        mix(to, first, second, (double)past_ns / (double)(gap_ns ? gap_ns : 1), ring->dim);
    } else {
        int is_newer = line->mode == NEAREST && gap_ns && past_ns > gap_ns - past_ns;
        memcpy(to, is_newer ? second : first, ring->dim * sizeof *to);
        bridge_ns = is_newer ? gap_ns - past_ns : past_ns;
        held_ns = is_newer ? 0 : past_ns;
    }
    held_ns = passed ? held_ns : 0;
    *age_s = (float)((double)held_ns * 1e-9);
    return *valid = passed && held_ns <= line->age_ns && bridge_ns <= line->gap_ns;
}

static PyObject *ring_cut(PyObject *self, PyObject *args)
{
    Ring *ring = (Ring *)self;
    Line line = {0};
    PyObject *end, *values, *valid, *age_s;
    long long steps, dt_ns;
    int all_valid = 1;
    if (!PyArg_ParseTuple(args, "LLiKKOOOO", &steps, &dt_ns, &line.mode, &line.gap_ns, &line.age_ns,
                          &values, &valid, &age_s, &end))
        return NULL;
    uint64_t end_ns = end == Py_None ? NEVER_NS : PyLong_AsLongLong(end);
    uint64_t step_ns = end == Py_None ? 0 : dt_ns; /* unsigned, since numpy wraps around, too */
    if (!is_sound(ring) || !ring->values.buf)
        PyErr_SetString(PyExc_ValueError, "the ring has no values, or its numbers disagree");
    if (!PyErr_Occurred() && get(values, &line.values, 'f', steps, ring->dim) &&
        get(valid, &line.valid, '?', steps, 0) && get(age_s, &line.age_s, 'f', steps, 0))
        for (int64_t t = 0; t < steps; t++)
            all_valid &= cut_target(ring, &line, t, end_ns - (steps - 1 - t) * step_ns);
    PyBuffer_Release(&line.values);
    PyBuffer_Release(&line.valid);
    PyBuffer_Release(&line.age_s);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(all_valid);
}

/* ---- settle: ring.py ----------------------------------------------------------------------- */

static PyObject *ring_account(PyObject *self, PyObject *args)
{
    Ring *ring = (Ring *)self;
    PyObject *ledger;
    long long first_ns, end_ns;
    if (!PyArg_ParseTuple(args, "LLO!", &first_ns, &end_ns, ledger_type, &ledger))
        return NULL;
    if (!is_sound(ring))
        return PyErr_Format(PyExc_ValueError, "the ring's numbers disagree");
    int64_t oldest = ring->accepted - ring->count;
    int64_t reached = count_until(ring, end_ns), from = ring->settled - oldest;
    if (reached == 0)
        Py_RETURN_NONE;
    if (reached > from) {
        int64_t used_from = from;
        if (stamp_of(ring, from) < first_ns)
            used_from = count_until(ring, first_ns) - 1;
        ((Ledger *)ledger)->in_flight -= reached - used_from;
        ((Ledger *)ledger)->used += reached - used_from;
        ring->settled = oldest + reached;
        if (!drop((Ledger *)ledger, "passed_over", used_from - from))
            return NULL;
    }
    return PyLong_FromLongLong(stamp_of(ring, reached - 1));
}

/* ---- limits: action_limits.py ---------------------------------------------------------------- */

static PyObject *are_inside(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *from[3];
    Py_buffer views[3] = {0};
    int is_mine = 1, inside = 1;
    if (!PyArg_ParseTuple(args, "OOO", &from[0], &from[1], &from[2]))
        return NULL;
    for (int i = 0; is_mine && i < 3; i++)
        is_mine = PyObject_GetBuffer(from[i], &views[i], READABLE) == 0 &&
                  is_of(&views[i], 2, 'f') && views[i].len == views[0].len;
    PyErr_Clear(); /* with holes in memory: not mine */
    const float *actions = views[0].buf, *low = views[1].buf, *high = views[2].buf;
    for (int64_t i = 0; is_mine && i < views[0].len / 4; i++)
        inside &= (actions[i] >= low[i]) & (actions[i] <= high[i]); /* a NaN is not */
    for (int i = 0; i < 3; i++)
        PyBuffer_Release(&views[i]);
    return PyBool_FromLong(is_mine && inside);
}

/* ---- types and module ---------------------------------------------------------------------- */

static PyObject *ring_bind(PyObject *self, PyObject *args)
{
    Ring *ring = (Ring *)self;
    PyObject *values, *stamps, *held, *head;
    long long capacity, dim;
    unsigned long long gap_ns;
    if (!PyArg_ParseTuple(args, "LLOOOOK", &capacity, &dim, &values, &stamps, &held, &head,
                          &gap_ns))
        return NULL;
    if (ring->capacity || capacity < 1 || dim < 1)
        return PyErr_Format(PyExc_ValueError, "a ring with slots is bound once");
    ring->capacity = capacity;
    ring->dim = dim;
    ring->gap_ns = gap_ns;
    if ((values != Py_None && !get(values, &ring->values, 'f', capacity, dim)) ||
        !get(stamps, &ring->stamps, 'l', capacity, 0) || !get(held, &ring->held, 'l', 1, 0))
        return NULL;
    if (!PyBuffer_IsContiguous(&ring->values, 'C') || !PyBuffer_IsContiguous(&ring->stamps, 'C'))
        return PyErr_Format(PyExc_ValueError, "needs a ring's memory without holes");
    if (!get(head, &ring->head, 'l', 1, 0)) /* the last one: is_sound asks for it */
        return NULL;
    Py_RETURN_NONE;
}

static void ring_dealloc(PyObject *self)
{
    Ring *ring = (Ring *)self;
    PyBuffer_Release(&ring->values);
    PyBuffer_Release(&ring->stamps);
    PyBuffer_Release(&ring->held);
    PyBuffer_Release(&ring->head);
    release(self);
}

static PyMemberDef ledger_members[] = {
    FIELD(Ledger, "received", received), FIELD(Ledger, "used", used),
    FIELD(Ledger, "in_flight", in_flight), END};
static PyMemberDef clock_members[] = {
    FIELD(Clock, "_floor_ns", floor_ns), FIELD(Clock, "_best_ns", best_ns),
    FIELD(Clock, "_best_until_ns", best_until_ns), FIELD(Clock, "_rejected", rejected),
    FIELD(Clock, "_stale_since_ns", stale_since_ns), END};
static PyMemberDef ring_members[] = {
    FIELD(Ring, "accepted", accepted), FIELD(Ring, "count", count), FIELD(Ring, "settled", settled),
    FIELD(Ring, "newest_ns", newest_ns), FIELD(Ring, "newest_rx_ns", newest_rx_ns),
    MEMBER(Ring, "_takes", takes, T_BOOL), END};
static PyMethodDef ring_methods[] = {{"bind", ring_bind, METH_VARARGS, NULL},
                                     {"try_append", ring_try_append, METH_VARARGS, NULL},
                                     {"cut", ring_cut, METH_VARARGS, NULL},
                                     {"account", ring_account, METH_VARARGS, NULL},
                                     {NULL, NULL, 0, NULL}};
static PyMethodDef functions[] = {{"are_inside", are_inside, METH_VARARGS, NULL},
                                  {"receive", receive, METH_VARARGS, NULL},
                                  {NULL, NULL, 0, NULL}};
static PyType_Slot ledger_slots[] = {{Py_tp_members, ledger_members}, {0, NULL}};
static PyType_Slot clock_slots[] = {{Py_tp_members, clock_members}, {0, NULL}};
static PyType_Slot ring_slots[] = {{Py_tp_members, ring_members},
                                   {Py_tp_methods, ring_methods},
                                   {Py_tp_dealloc, ring_dealloc},
                                   {0, NULL}};

PyMODINIT_FUNC PyInit_core(void)
{
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "core", .m_size = -1,
                                     .m_methods = functions};
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddIntConstant(module, "API", API) < 0)
        return NULL;
    ledger_type = add_type(module, "ppstream.native.core.Ledger", sizeof(Ledger), ledger_slots);
    clock_type = add_type(module, "ppstream.native.core.Clock", sizeof(Clock), clock_slots);
    ring_type = add_type(module, "ppstream.native.core.Ring", sizeof(Ring), ring_slots);
    return ledger_type && clock_type && ring_type && ppstream_add_wait(module) ? module : NULL;
}
