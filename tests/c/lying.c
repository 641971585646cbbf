/* An exchange table, and a buffer, that report success without a result or with a wrong one. Unset
 * results are whatever the caller's stack contains. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack_abi.h"

/* Behaviour of a slot; numbers as in lying_tables.py. */
enum {
  RIGHT,
  UNWRITTEN,      /* returns 0 without writing */
  WRITES_NULL,    /* returns 0 with NULL or zeros */
  SILENT,         /* returns -1 without an exception */
  SILENT_WRITTEN, /* the same with a result */
  RAISES,         /* returns -1 with an exception */
  RAISES_RIGHT,   /* returns 0 with a result and an exception */
  ONE,            /* returns 1 with a result */
  NO_SHAPE,       /* from here on: a result with a wrong field */
  NO_STRIDES,
  NO_DATA,
  NO_DATA_OR_SHAPE,
  NDIM_BELOW,
  NDIM_ABOVE,
  NO_BITS,
  NO_LANES,
  ODD_CODE,
  ODD_DEVICE,
  NO_DELETER,
  NO_CONTEXT,
  ODD_VERSION,
  OLD_VERSION,
  ODD_FLAGS,
  RIGHT_ONCE, /* correct once, then like UNWRITTEN: the stack still contains the first result */
  LIES
};

enum { EXPORT, IMPORT, BORROW, STREAM, SLOTS };

static int lies[SLOTS], is_cuda, calls;
static long owed; /* tensors whose deleter must still be called */
static double memory[6] = {0, 1, 2, 3, 4, 5};
static int64_t shape[2] = {2, 3}, strides[2] = {3, 1};

static DLTensor tensor(int lie) {
  DLTensor t = {.data = memory,
                .device = {is_cuda ? kDLCUDA : kDLCPU, 0},
                .ndim = 2,
                .dtype = {kDLFloat, 64, 1},
                .shape = shape,
                .strides = strides};
  if (lie == NO_SHAPE || lie == NO_DATA_OR_SHAPE) t.shape = NULL;
  if (lie == NO_STRIDES) t.strides = NULL;
  if (lie == NO_DATA || lie == NO_DATA_OR_SHAPE) t.data = NULL;
  if (lie == NDIM_BELOW) t.ndim = -1;
  if (lie == NDIM_ABOVE) t.ndim = INT32_MAX;
  if (lie == NO_BITS) t.dtype.bits = 0;
  if (lie == NO_LANES) t.dtype.lanes = 0;
  if (lie == ODD_CODE) t.dtype.code = 200;
  if (lie == ODD_DEVICE) t.device = (DLDevice){-7, INT32_MIN};
  return t;
}

static void delete(DLManagedTensorVersioned* self) {
  owed--;
  free(self);
}

/* Return 1 if a slot must write a result; sets *status and the exception. */
static int writes(int lie, int* status) {
  if (lie == RIGHT_ONCE) return *status = 0, calls++ == 0;
  *status = lie == SILENT || lie == SILENT_WRITTEN || lie == RAISES ? -1 : lie == ONE;
  if (lie == RAISES || lie == RAISES_RIGHT) PyErr_SetString(PyExc_ValueError, "lying");
  return lie != UNWRITTEN && lie != WRITES_NULL && lie != SILENT && lie != RAISES;
}

static int export(void* object, DLManagedTensorVersioned** out) {
  int lie = lies[EXPORT], status;
  (void)object;
  if (!writes(lie, &status)) {
    if (lie == WRITES_NULL) *out = NULL;
    return status;
  }
  DLManagedTensorVersioned* m = malloc(sizeof *m);
  uint32_t major = lie == ODD_VERSION ? 77 : lie == OLD_VERSION ? 0 : 1;
  *m = (DLManagedTensorVersioned){.version = {major, 99},
                                  .manager_ctx = lie == NO_CONTEXT ? NULL : m,
                                  .deleter = lie == NO_DELETER ? NULL : delete,
                                  .flags = lie == ODD_FLAGS ? ~(uint64_t)0 : 0,
                                  .dl_tensor = tensor(lie)};
  *out = m;
  owed += status == 0 && lie != RAISES_RIGHT &&
          lie != NO_DELETER; /* otherwise it must not be released */
  return status;
}

static void destroy(PyObject* capsule) {
  DLManagedTensorVersioned* m = PyCapsule_GetPointer(capsule, "lying");
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  if (m->deleter) m->deleter(m);
  PyErr_Restore(type, value, traceback);
}

static int import(DLManagedTensorVersioned* m, void** out) {
  int lie = lies[IMPORT], status;
  if (!writes(lie, &status)) {
    if (lie == WRITES_NULL) *out = NULL;
    return status;
  }
  PyObject *type, *value, *traceback; /* capsules cannot be created while an exception is set */
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* result = PyCapsule_New(m, "lying", status ? NULL : destroy);
  PyErr_Restore(type, value, traceback);
  if (status) Py_CLEAR(result); /* a failing consumer takes nothing */
  *out = result;
  return status;
}

static int borrow(void* object, DLTensor* out) {
  int lie = lies[BORROW], status;
  (void)object;
  if (writes(lie, &status))
    *out = tensor(lie);
  else if (lie == WRITES_NULL)
    memset(out, 0, sizeof *out);
  return status;
}

static int stream(int32_t device_type, int32_t device_id, void** out) {
  int lie = lies[STREAM], status;
  (void)device_type, (void)device_id;
  if (writes(lie, &status) || lie == WRITES_NULL) *out = NULL;
  return status;
}

static DLPackExchangeAPI tables[1 << SLOTS]; /* by their set of slots */

/* ---- functions that need the GIL (ctypes.PyDLL) ---------------------------------------------- */

PyObject* lying_table(int slots) {
  tables[slots] = (DLPackExchangeAPI){
      .header = {.version = {1, 3}},
      .managed_tensor_from_py_object_no_sync = slots >> EXPORT & 1 ? export : NULL,
      .managed_tensor_to_py_object_no_sync = slots >> IMPORT & 1 ? import : NULL,
      .dltensor_from_py_object_no_sync = slots >> BORROW & 1 ? borrow : NULL,
      .current_work_stream = slots >> STREAM & 1 ? stream : NULL,
  };
  return PyCapsule_New(&tables[slots], "dlpack_exchange_api", NULL);
}

/* Choose a slot's behaviour, and the device that it reports. */
PyObject* lying_set(int slot, int lie, int on_cuda) {
  if (slot < 0 || slot >= SLOTS || lie < 0 || lie >= LIES)
    return PyErr_Format(PyExc_ValueError, "no such slot or lie");
  memset(lies, 0, sizeof lies);
  lies[slot] = lie;
  is_cuda = on_cuda;
  calls = 0;
  Py_RETURN_NONE;
}

PyObject* lying_owed(void) {
  return PyLong_FromLong(owed);
}

/* Overwrite the stack below the caller, so that unset results contain garbage. */
__attribute__((noinline)) PyObject* lying_soil(void) {
  volatile unsigned char rubbish[8192];
  for (size_t i = 0; i < sizeof rubbish; i++) rubbish[i] = 0x5a;
  return PyLong_FromLong(rubbish[100]);
}
