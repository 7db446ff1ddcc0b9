/* The compiled twins of the doorbell and of the wait.
 *
 * As in core.c Python's classes inherit the structs' fields as members, and core.pyi has the
 * contracts. All calls hold the GIL, and none blocks but the wait, which lets go of it meanwhile.
 */
#include "module.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <time.h>

#define NS_PER_S 1000000000

typedef struct {
    PyObject_HEAD
    long long believed, taken; /* commits: what the receiver believes, and what it has taken */
    int fd;
    char is_ordered;
    Py_buffer words; /* int64 [STAMPS + slots], shared with another process, aligned */
} Bell;

typedef struct {
    PyObject_HEAD
    PyObject *fds, *bells; /* lists of ints and of Bells; another thread may change fds */
    long long spin_ns;
    int wake_fd;
    char asleep, wake_due, woken, closed; /* whoever holds the GIL may write them */
} Waiter;

static PyTypeObject *bell_type, *waiter_type;

/* ---- doorbell: doorbell.py ------------------------------------------------------------------
 *
 * Each end stores a word of its own and then looks at the other's, all in one order (seq_cst): the
 * commit finds the sleeper, or the sleeper finds the commit. On x86-64 a Python twin at the other
 * end keeps to that order. Elsewhere it does not: it believes a count only behind its read of the
 * eventfd, and its own count is to be believed only there. So a compiled end says that it fences.
 * To an end that has not said so each commit writes the eventfd, and of such an end nothing is
 * believed but behind the read: as if both were Python's.
 */

enum { COUNT, FRAMES, SENDER_FENCES, SLEEPS = 8, RECEIVER_FENCES, STAMPS = 16 };

static _Atomic int64_t *word(const Bell *bell, int64_t index)
{
    return (_Atomic int64_t *)bell->words.buf + index;
}

static _Atomic int64_t *stamp_word(const Bell *bell, int64_t index)
{
    return word(bell, STAMPS + (uint64_t)index % (uint64_t)(bell->words.shape[0] - STAMPS));
}

static void say(const Bell *bell, int64_t index, int64_t number) /* ordered by what follows */
{
    atomic_store_explicit(word(bell, index), number, memory_order_relaxed);
}

static void clear(Bell *bell)
{
    eventfd_t written;
    if (eventfd_read(bell->fd, &written) == 0)
        bell->believed = atomic_load(word(bell, COUNT));
}

static int is_rung(Bell *bell)
{
    int64_t count = atomic_load(word(bell, COUNT));
    if (bell->is_ordered || atomic_load(word(bell, SENDER_FENCES)))
        bell->believed = count;
    else if (bell->believed == bell->taken)
        clear(bell);
    return bell->believed != bell->taken;
}

static int is_rung_else_sleep(Bell *bell)
{
    say(bell, RECEIVER_FENCES, 1);
    atomic_store(word(bell, SLEEPS), 1);
    return is_rung(bell);
}

/* False with an exception before the bell has its words. */
static int has_words(const Bell *bell)
{
    if (bell->words.buf == NULL)
        PyErr_SetString(PyExc_ValueError, "the doorbell has no memory");
    return bell->words.buf != NULL;
}

/* Wakes the receiver if it is to be; false with an exception. */
static int write_eventfd(const Bell *bell, int is_needed)
{
    if (!is_needed)
        return 1;
    say(bell, SLEEPS, 0);
    if (eventfd_write(bell->fd, 1) == 0)
        return 1;
    PyErr_SetFromErrno(PyExc_OSError);
    return 0;
}

static PyObject *bell_rouse(PyObject *self, PyObject *Py_UNUSED(none))
{
    Bell *bell = (Bell *)self;
    if (!has_words(bell) || !write_eventfd(bell, atomic_load(word(bell, SLEEPS)) != 0))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *bell_ring(PyObject *self, PyObject *args)
{
    Bell *bell = (Bell *)self;
    long long index, at_ns, frames;
    if (!PyArg_ParseTuple(args, "LLL", &index, &at_ns, &frames) || !has_words(bell))
        return NULL;
    atomic_store_explicit(stamp_word(bell, index), at_ns, memory_order_relaxed);
    say(bell, FRAMES, frames);
    say(bell, SENDER_FENCES, 1);
    atomic_store(word(bell, COUNT), index + 1);
    if (!write_eventfd(bell, atomic_load(word(bell, SLEEPS)) ||
                                 !(bell->is_ordered || atomic_load(word(bell, RECEIVER_FENCES)))))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *bell_pop(PyObject *self, PyObject *Py_UNUSED(none))
{
    Bell *bell = (Bell *)self;
    if (!has_words(bell))
        return NULL;
    long long index = bell->taken++;
    return Py_BuildValue("LL", index, (long long)atomic_load(stamp_word(bell, index)));
}

static PyObject *bell_sleep(PyObject *self, PyObject *Py_UNUSED(none))
{
    return has_words((Bell *)self) ? PyBool_FromLong(!is_rung_else_sleep((Bell *)self)) : NULL;
}

static PyObject *bell_wake(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (!has_words((Bell *)self))
        return NULL;
    say((Bell *)self, SLEEPS, 0);
    Py_RETURN_NONE;
}

static PyObject *bell_is_rung(PyObject *self, void *Py_UNUSED(closure))
{
    return has_words((Bell *)self) ? PyBool_FromLong(is_rung((Bell *)self)) : NULL;
}

static PyObject *bell_frames(PyObject *self, void *Py_UNUSED(closure))
{
    Bell *bell = (Bell *)self;
    return has_words(bell) ? PyLong_FromLongLong(atomic_load(word(bell, FRAMES))) : NULL;
}

static PyObject *bell_words(PyObject *self, void *Py_UNUSED(closure))
{
    return has_words((Bell *)self) ? Py_NewRef(((Bell *)self)->words.obj) : NULL;
}

static int bell_set_words(PyObject *self, PyObject *words, void *Py_UNUSED(closure))
{
    Py_buffer *view = &((Bell *)self)->words;
    PyBuffer_Release(view);
    view->buf = NULL;
    Py_ssize_t length = words ? PyObject_Size(words) : 0;
    if (length > STAMPS && get(words, view, 'l', length, 0) && view->strides[0] == 8 &&
        (uintptr_t)view->buf % 8 == 0)
        return 0;
    PyBuffer_Release(view);
    view->buf = NULL;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "needs aligned words and a stamp for each slot");
    return -1;
}

/* ---- wait: waiter.py ------------------------------------------------------------------------ */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

static Bell *bell_at(const Waiter *waiter, Py_ssize_t index)
{
    PyObject *bell = PyList_GetItem(waiter->bells, index);
    return PyObject_TypeCheck(bell, bell_type) && ((Bell *)bell)->words.buf ? (Bell *)bell : NULL;
}

static int name(PyObject *named, int fd)
{
    PyObject *number = PyLong_FromLong(fd);
    int error = number ? PyList_Append(named, number) : -1;
    Py_XDECREF(number);
    return error;
}

/* Has all bells write from now on, and names those that have rung. */
static int arm(const Waiter *waiter, PyObject *named)
{
    for (Py_ssize_t i = 0; i < PyList_Size(waiter->bells); i++) {
        Bell *bell = bell_at(waiter, i);
        if (bell == NULL)
            PyErr_SetString(PyExc_TypeError, "a compiled waiter takes compiled doorbells");
        if (bell == NULL || (is_rung_else_sleep(bell) && name(named, bell->fd) < 0))
            return -1;
    }
    return 0;
}

/* Looks again and again, and in between lets others have the CPU; then sleeps, if time is left. */
static int spin_and_poll(struct pollfd *fds, Py_ssize_t n, int64_t until_ns, int64_t spin_ns)
{
    int64_t now = now_ns(), spin_until_ns = now + spin_ns;
    for (int found; now < spin_until_ns && now < until_ns; now = now_ns()) {
        if ((found = poll(fds, n, 0)) != 0)
            return found;
        sched_yield();
    }
    int64_t left_ns = until_ns > now ? until_ns - now : 0;
    struct timespec left = {left_ns / NS_PER_S, left_ns % NS_PER_S};
    return ppoll(fds, n, &left, NULL);
}

/* A signal's handlers run at once, or behind a spin; the rest of the time is waited for then. */
static int poll_until(struct pollfd *fds, Py_ssize_t n, int64_t until_ns, int64_t spin_ns)
{
    while (PyErr_CheckSignals() == 0) {
        /* a mere look does not block, and to get the GIL back may take longer */
        PyThreadState *state = until_ns > now_ns() ? PyEval_SaveThread() : NULL;
        int found = spin_and_poll(fds, n, until_ns, spin_ns), error = errno;
        if (state)
            PyEval_RestoreThread(state);
        if (found >= 0)
            return 0;
        if (error != EINTR) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
    }
    return -1;
}

/* Names a readable descriptor; reads the eventfds of bells and of wake. */
static int collect(Waiter *waiter, const struct pollfd *found, PyObject *named)
{
    eventfd_t written;
    if (found->revents & POLLNVAL) {
        PyObject *told = PyUnicode_FromFormat("descriptor %d was closed while registered",
                                              found->fd);
        PyObject *error = Py_BuildValue("iN", EBADF, told);
        PyErr_SetObject(PyExc_OSError, error);
        Py_XDECREF(error);
        return -1;
    }
    if (found->fd == waiter->wake_fd) {
        waiter->wake_due = 1;
        eventfd_read(found->fd, &written);
    }
    for (Py_ssize_t i = 0; i < PyList_Size(waiter->bells); i++)
        if (bell_at(waiter, i) && bell_at(waiter, i)->fd == found->fd)
            clear(bell_at(waiter, i));
    return name(named, found->fd);
}

static int look(Waiter *waiter, int64_t until_ns, PyObject *named)
{
    Py_ssize_t n = PyList_Size(waiter->fds);
    struct pollfd *fds = PyMem_Calloc(n, sizeof *fds); /* a copy: the list may change meanwhile */
    if (fds == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; fds && i < n; i++)
        fds[i] = (struct pollfd){PyLong_AsLong(PyList_GetItem(waiter->fds, i)), POLLIN, 0};
    int error = PyErr_Occurred() ? -1 : poll_until(fds, n, until_ns, waiter->spin_ns);
    for (Py_ssize_t i = 0; error == 0 && i < n; i++)
        if (fds[i].revents)
            error = collect(waiter, &fds[i], named);
    PyMem_Free(fds);
    return error;
}

static PyObject *waiter_wait(PyObject *self, PyObject *timeout)
{
    Waiter *waiter = (Waiter *)self;
    int64_t until_ns, limit_ns = timeout == Py_None ? INT64_MAX : PyLong_AsLongLong(timeout);
    if (__builtin_add_overflow(now_ns(), limit_ns > 0 ? limit_ns : 0, &until_ns))
        until_ns = INT64_MAX; /* in 292 years */
    if (waiter->fds == NULL || !PyList_Check(waiter->fds) || waiter->bells == NULL ||
        !PyList_Check(waiter->bells))
        PyErr_SetString(PyExc_TypeError, "a waiter has lists of descriptors and of bells");
    PyObject *named = PyErr_Occurred() ? NULL : PyList_New(0);
    if (named == NULL)
        return NULL;
    waiter->asleep = 1; /* before the looks: whoever comes later writes a descriptor */
    int error = arm(waiter, named);
    if (error == 0 && PyList_Size(named) == 0 && !waiter->wake_due)
        error = look(waiter, until_ns, named);
    waiter->asleep = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(waiter->bells); i++)
        if (bell_at(waiter, i))
            say(bell_at(waiter, i), SLEEPS, 0);
    if (error == 0) { /* else the wake is for the next wait */
        waiter->woken = waiter->wake_due;
        waiter->wake_due = 0;
    }
    if (error == 0 && !waiter->woken)
        return named;
    Py_DECREF(named);
    return error ? NULL : PyTuple_New(0);
}

static PyObject *waiter_wake(PyObject *self, PyObject *Py_UNUSED(none))
{
    Waiter *waiter = (Waiter *)self;
    waiter->wake_due = 1;
    if (waiter->asleep && !waiter->closed && eventfd_write(waiter->wake_fd, 1) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* ---- types ---------------------------------------------------------------------------------- */

static void bell_dealloc(PyObject *self)
{
    PyBuffer_Release(&((Bell *)self)->words);
    release(self);
}

static void waiter_dealloc(PyObject *self)
{
    Py_XDECREF(((Waiter *)self)->fds);
    Py_XDECREF(((Waiter *)self)->bells);
    release(self);
}

static PyMemberDef bell_members[] = {
    FIELD(Bell, "_count", believed), FIELD(Bell, "_taken", taken),
    MEMBER(Bell, "_fd", fd, T_INT), MEMBER(Bell, "_is_ordered", is_ordered, T_BOOL), END};
static PyGetSetDef bell_properties[] = {{"_words", bell_words, bell_set_words, NULL, NULL},
                                        {"is_rung", bell_is_rung, NULL, NULL, NULL},
                                        {"frames", bell_frames, NULL, NULL, NULL},
                                        END};
static PyMethodDef bell_methods[] = {
    {"ring", bell_ring, METH_VARARGS, NULL}, {"rouse", bell_rouse, METH_NOARGS, NULL},
    {"pop", bell_pop, METH_NOARGS, NULL},
    {"sleep", bell_sleep, METH_NOARGS, NULL}, {"wake", bell_wake, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL}};
static PyMemberDef waiter_members[] = {
    MEMBER(Waiter, "_fds", fds, T_OBJECT), MEMBER(Waiter, "_bells", bells, T_OBJECT),
    FIELD(Waiter, "spin_ns", spin_ns), MEMBER(Waiter, "_wake_fd", wake_fd, T_INT),
    MEMBER(Waiter, "_asleep", asleep, T_BOOL), MEMBER(Waiter, "_wake_due", wake_due, T_BOOL),
    MEMBER(Waiter, "woken", woken, T_BOOL), MEMBER(Waiter, "_closed", closed, T_BOOL), END};
static PyMethodDef waiter_methods[] = {{"wait", waiter_wait, METH_O, NULL},
                                       {"wake", waiter_wake, METH_NOARGS, NULL},
                                       {NULL, NULL, 0, NULL}};
static PyType_Slot bell_slots[] = {{Py_tp_members, bell_members},
                                   {Py_tp_getset, bell_properties},
                                   {Py_tp_methods, bell_methods},
                                   {Py_tp_dealloc, bell_dealloc},
                                   {0, NULL}};
static PyType_Slot waiter_slots[] = {{Py_tp_members, waiter_members},
                                     {Py_tp_methods, waiter_methods},
                                     {Py_tp_dealloc, waiter_dealloc},
                                     {0, NULL}};


int ppstream_add_wait(PyObject *module)
{
    bell_type = add_type(module, "ppstream.native.core.Bell", sizeof(Bell), bell_slots);
    waiter_type = add_type(module, "ppstream.native.core.Waiter", sizeof(Waiter), waiter_slots);
    return bell_type && waiter_type;
}
