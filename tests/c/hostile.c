/* Exchange tables with every kind of failure: a consumer that fails before, during or after it
 * takes ownership, and a producer whose borrow slot fails or lies. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <string.h>

#include "dlpack_abi.h"

/* ---- the consumer ---------------------------------------------------------------------------- */

enum {
  TAKES,
  FAILS_BEFORE,   /* before taking ownership */
  FAILS_AFTER,    /* after calling the deleter */
  FAILS_LATER,    /* keeps the tensor; a thread calls the deleter later */
  FAILS_SILENTLY, /* returns -1 without an error */
  SILENT_AFTER,   /* the same, after calling the deleter */
  NULL_RESULT,    /* returns 0 with NULL and without an error */
  NULL_AFTER,     /* the same, after calling the deleter */
  RAISES,         /* returns -1 with the given error class */
};

static int mode;
static long imports, borrows;
static PyObject* error_class;
static DLManagedTensorVersioned* kept;

static void destroy(PyObject* capsule) {
  DLManagedTensorVersioned* m = PyCapsule_GetPointer(capsule, "hostile");
  if (m->deleter) m->deleter(m);
}

static int import(DLManagedTensorVersioned* m, void** out) {
  imports++;
  if (mode == TAKES) return (*out = PyCapsule_New(m, "hostile", destroy)) ? 0 : -1;
  if (mode == FAILS_AFTER || mode == SILENT_AFTER || mode == NULL_AFTER) m->deleter(m);
  if (mode == FAILS_LATER) kept = m;
  if (mode == FAILS_BEFORE || mode == FAILS_AFTER || mode == FAILS_LATER)
    PyErr_SetString(PyExc_ValueError, "hostile");
  if (mode == RAISES) PyErr_SetString(error_class, "hostile");
  if (mode == NULL_RESULT || mode == NULL_AFTER) {
    *out = NULL;
    return 0;
  }
  return -1;
}

static void* delete_kept(void* unused) {
  (void)unused;
  kept->deleter(kept);
  kept = NULL;
  return NULL;
}

/* Call the deleter of the kept tensor, on a thread unknown to Python, or here. */
int hostile_delete_kept(int thread) {
  pthread_t other;
  if (!thread) return delete_kept(NULL) != NULL;
  int failed = pthread_create(&other, NULL, delete_kept, NULL);
  return failed ? failed : pthread_join(other, NULL);
}

/* ---- the producer ---------------------------------------------------------------------------- */

static DLTensor lent;
static int64_t shape[64], strides[64];
static int lend_rc, lend_error;

static int borrow(void* object, DLTensor* out) {
  (void)object;
  borrows++;
  *out = lent;
  if (lend_error) PyErr_SetString(PyExc_RuntimeError, "hostile");
  return lend_rc;
}

/* Set the result of the borrow slot; n_shape or n_strides = -1 means NULL. */
void hostile_lend(void* data, int ndim, int n_shape, const int64_t* given_shape, int n_strides,
                  const int64_t* given_strides, int code, int bits, int lanes, int device,
                  uint64_t byte_offset, int rc, int error) {
  if (n_shape > 0) memcpy(shape, given_shape, sizeof(int64_t) * (size_t)n_shape);
  if (n_strides > 0) memcpy(strides, given_strides, sizeof(int64_t) * (size_t)n_strides);
  lent = (DLTensor){.data = data,
                    .device = {device, 0},
                    .ndim = ndim,
                    .dtype = {(uint8_t)code, (uint8_t)bits, (uint16_t)lanes},
                    .shape = n_shape < 0 ? NULL : shape,
                    .strides = n_strides < 0 ? NULL : strides,
                    .byte_offset = byte_offset};
  lend_rc = rc;
  lend_error = error;
}

/* ---- the tables ------------------------------------------------------------------------------ */

static const DLPackExchangeAPI good = {
    .header = {.version = {1, 3}},
    .managed_tensor_to_py_object_no_sync = import,
    .dltensor_from_py_object_no_sync = borrow,
};
static const DLPackExchangeAPI empty = {.header = {.version = {1, 3}}};
static const DLPackExchangeAPIHeader newest = {
    .version = {3, 0},
    .prev_api = (DLPackExchangeAPIHeader*)&(const DLPackExchangeAPIHeader){
        .version = {2, 0}, .prev_api = (DLPackExchangeAPIHeader*)&good.header}};
static const DLPackExchangeAPIHeader foreign = {.version = {2, 0}};

/* ---- functions that need the GIL (ctypes.PyDLL) ---------------------------------------------- */

PyObject* hostile_table(const char* which) {
  const void* table = !strcmp(which, "empty")     ? (const void*)&empty
                      : !strcmp(which, "newer")   ? (const void*)&newest
                      : !strcmp(which, "foreign") ? (const void*)&foreign
                                                  : (const void*)&good;
  return PyLong_FromVoidPtr((void*)table);
}

PyObject* hostile_capsule(const char* which, int misnamed) {
  PyObject* address = hostile_table(which);
  if (address == NULL) return NULL;
  void* table = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  return PyCapsule_New(table, misnamed ? "another name" : "dlpack_exchange_api", NULL);
}

PyObject* hostile_set(int wanted, PyObject* error) {
  mode = wanted;
  error_class = error; /* builtin classes are never freed */
  imports = borrows = 0;
  Py_RETURN_NONE;
}

PyObject* hostile_counts(void) {
  return Py_BuildValue("(ll)", imports, borrows);
}
