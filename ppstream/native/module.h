/* Memory and types, as both sources of the module have them. */
#ifndef PPSTREAM_MODULE_H
#define PPSTREAM_MODULE_H

#define _GNU_SOURCE /* ppoll */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define WRITABLE (PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE)
#define MEMBER(Type, name, field, kind) {name, kind, offsetof(Type, field), 0, NULL}
#define FIELD(Type, name, field) MEMBER(Type, name, field, T_LONGLONG)
#define END {NULL, 0, 0, 0, NULL}

/* Adds the types of wait.c to the module; false with an exception. */
int ppstream_add_wait(PyObject *module);

/* True for elements of a code, 'l' int64, 'f' float32, '?' bool, 'B' byte; '=' is numpy's "unaligned". */
static inline int is_of(const Py_buffer *view, int ndim, char code)
{
    const char *format = view->format + (*view->format == '=');
    char found = *format == 'q' ? 'l' : *format;
    Py_ssize_t size = code == 'l' ? 8 : code == 'f' ? 4 : 1;
    return view->ndim == ndim && found == code && format[1] == 0 && view->itemsize == size;
}

/* Fills view with memory [length] or [length, width] to write to, whose rows have no holes. */
static inline int get(PyObject *from, Py_buffer *view, char code, Py_ssize_t length,
                      Py_ssize_t width)
{
    int ndim = width > 0 ? 2 : 1;
    if (PyObject_GetBuffer(from, view, WRITABLE) < 0)
        return 0;
    if (is_of(view, ndim, code) && *view->format != '=' && view->shape[0] == length &&
        (ndim == 1 || (view->shape[1] == width && view->strides[1] == view->itemsize)))
        return 1;
    PyErr_Format(PyExc_ValueError, "needs [%zd, %zd] of '%c'", length, width, code);
    PyBuffer_Release(view);
    view->buf = NULL;
    return 0;
}

/* Frees an object of a type of this module, at the end of its tp_dealloc. */
static inline void release(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static inline PyTypeObject *add_type(PyObject *module, const char *name, int size,
                                     PyType_Slot *slots)
{
    PyType_Spec spec = {name, size, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(&spec);
    return type && PyModule_AddType(module, type) == 0 ? type : NULL;
}

#endif
