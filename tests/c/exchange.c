/* A foreign C program that uses a type's exchange table: it finds the table, calls each slot, and
 * counts the errors that the allocator reports. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <string.h>

#include "dlpack_abi.h"

/* ---- functions that need the GIL (ctypes.PyDLL) ---------------------------------------------- */

PyObject* exchange_find(PyObject* type) {
  PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (capsule == NULL) return NULL;
  void* api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  return api ? PyLong_FromVoidPtr(api) : NULL;
}

/* A slot's return value and exception must agree. */
static int agrees(int rc) {
  if ((rc == 0) == (PyErr_Occurred() == NULL) && (rc == 0 || rc == -1)) return rc == 0;
  PyErr_Clear();
  PyErr_Format(PyExc_AssertionError, "a slot returned %d against its exception", rc);
  return 0;
}

static void* const untouched = &(char){0};

/* Return the address of a managed tensor that the caller owns. */
PyObject* exchange_export(const DLPackExchangeAPI* api, PyObject* obj) {
  DLManagedTensorVersioned* out = untouched;
  int ok = agrees(api->managed_tensor_from_py_object_no_sync(obj, &out));
  return ok ? PyLong_FromVoidPtr(out) : NULL;
}

PyObject* exchange_import(const DLPackExchangeAPI* api, DLManagedTensorVersioned* managed) {
  void* out = untouched;
  return agrees(api->managed_tensor_to_py_object_no_sync(managed, &out)) ? out : NULL;
}

PyObject* exchange_borrow(const DLPackExchangeAPI* api, PyObject* obj, DLTensor* out) {
  if (!agrees(api->dltensor_from_py_object_no_sync(obj, out))) return NULL;
  Py_RETURN_NONE;
}

PyObject* exchange_stream(const DLPackExchangeAPI* api, int device_type, int device_id) {
  void* out = untouched;
  int ok = agrees(api->current_work_stream(device_type, device_id, &out));
  return ok ? PyLong_FromVoidPtr(out) : NULL;
}

/* ---- functions called without the GIL (ctypes.CDLL) ------------------------------------------ */

typedef struct {
  const DLPackExchangeAPI* api;
  DLTensor* prototype;
  DLManagedTensorVersioned* out;
  int rc;
  int had_gil;
  int reports; /* calls of SetError */
  char kind[64];
  char message[256];
} allocation;

static void report(void* context, const char* kind, const char* message) {
  allocation* a = context;
  a->reports++;
  strncpy(a->kind, kind, sizeof a->kind - 1);
  strncpy(a->message, message, sizeof a->message - 1);
}

static void* run(void* context) {
  allocation* a = context;
  a->had_gil = PyGILState_Check();
  a->out = untouched;
  a->rc = a->api->managed_tensor_allocator(a->prototype, &a->out, a, report);
  return NULL;
}

/* Allocate here, or on a thread unknown to Python. */
int exchange_allocate(allocation* a, int thread) {
  pthread_t other;
  if (!thread) return run(a) != NULL;
  int failed = pthread_create(&other, NULL, run, a);
  return failed ? failed : pthread_join(other, NULL);
}
