/* An exchange table for numpy's arrays: numpy 2.5 has no table. It is part of the adapter, not of
 * dlx; adapters of third parties can supply tables in the same way.
 *
 * This file needs no numpy headers: numpy's C API is a table of functions in a capsule. The indices
 * and the head of an array object are part of numpy's stable ABI. dlx_numpy.py checks both on real
 * arrays first. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "core/allocate.h"
#include "core/dtypes.h"
#include "core/strides.h"
#include "base/extension.h"
#include "base/gil.h"
#include "base/threads.h"

enum { MAX_NDIM = 64, WRITEABLE = 0x0400, BOOL_NUMBER = 0, HALF_NUMBER = 23, NUMBERS = 24 };
enum {
  API_ARRAY_TYPE = 2,
  API_NEW = 93,
  API_SET_BASE = 282
}; /* indices into numpy's function table */

/* numpy's mark of the other byte order; native is '=' or '|'. */
enum { SWAPPED = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? '<' : '>' };

/* The heads of numpy's objects in its stable ABI. */
typedef struct {
  PyObject_HEAD PyTypeObject* scalar;
  char kind, letter, byte_order, unused;
  int number;
} descr_head;

typedef struct {
  PyObject_HEAD char* data;
  int ndim;
  Py_ssize_t* shape;
  Py_ssize_t* byte_strides;
  PyObject* base;
  descr_head* descr;
  int flags;
} array_head;

typedef PyObject* (*new_array)(PyTypeObject*, int, const Py_ssize_t*, int, const Py_ssize_t*, void*,
                               int, int, PyObject*);

/* Created once: callers with a fallback may raise them at every call. */
static PyObject *no_dtype, *no_strides, *no_flag;

static PyTypeObject* array_type;
static new_array make_array;
static int (*set_base)(PyObject*, PyObject*);

/* By numpy's type number; bits 0 = no DLPack dtype. */
static const DLDataType dtypes[NUMBERS] = {
#define NUMBER(code, bits, letters, arrow, number) [number] = {code, bits, 1},
    DLX_DTYPES(NUMBER)[9] = {kDLInt, 64, 1},
    [10] = {kDLUInt, 64, 1}, /* long long */
};

/* Errors: -1 = no numpy type. */
static int find_number(DLDataType dtype) {
  switch ((uint32_t)dtype.lanes << 16 | dtype.code << 8 | dtype.bits) {
#define CASE(code, bits, letters, arrow, number) \
  case 1 << 16 | code << 8 | bits:               \
    return number;
    DLX_DTYPES(CASE)
    default:
      return -1;
  }
}

/* Dtypes of other packages, such as ml_dtypes, by scalar type; strong references. Threads read
 * without a lock: an entry is complete before the count grows. */
enum { MAX_EXTENSIONS = 16 };
static struct {
  PyTypeObject* scalar;
  _Atomic(DLDataType) dtype; /* relaxed: it is whole */
} extensions[MAX_EXTENSIONS];
static atomic_int n_extensions; /* release, acquire: that many entries are complete */

/* Empty arrays are excluded: numpy gives them an arbitrary address. Errors: bits = 0, no exception.
 */
static DLDataType find_extension(const array_head* a) {
  for (int i = 0; i < a->ndim; i++) {
    if (a->shape[i] == 0) return (DLDataType){0};
  }
  for (int i = 0, n = atomic_load_explicit(&n_extensions, memory_order_acquire); i < n; i++) {
    if (extensions[i].scalar == a->descr->scalar)
      return atomic_load_explicit(&extensions[i].dtype, memory_order_relaxed);
  }
  return (DLDataType){0};
}

/* Describe an array; its strides in elements go to `strides`. Owns: nothing. GIL: needed. Errors:
 * -1 with BufferError. */
static int describe(const array_head* a, int64_t* strides, DLTensor* out) {
  const descr_head* d = a->descr;
  unsigned number = (unsigned)d->number;
  out->dtype = number < NUMBERS ? dtypes[number] : find_extension(a);
  if (out->dtype.bits == 0 || d->byte_order == SWAPPED || a->ndim > MAX_NDIM) {
    PyErr_SetObject(PyExc_BufferError, no_dtype);
    return -1;
  }
  if (!dlx_convert_strides(a->ndim, (int64_t*)a->shape, (int64_t*)a->byte_strides,
                           out->dtype.bits / 8, strides)) {
    PyErr_SetObject(PyExc_BufferError, no_strides);
    return -1;
  }
  out->data = a->data;
  out->device = (DLDevice){kDLCPU, 0};
  out->ndim = a->ndim;
  out->shape = (int64_t*)a->shape;
  out->strides = strides;
  out->byte_offset = 0;
  return 0;
}

/* numpy stores byte strides: the strides in elements stay in this thread's memory until its next
 * call. A DLTensor has no read-only flag, so read-only arrays are rejected. Owns: nothing. GIL:
 * needed. Errors: -1 with BufferError. */
static int borrow(void* object, DLTensor* out) {
  static PY_THREAD_LOCAL int64_t strides[MAX_NDIM];
  const array_head* a = object;
  if (!(a->flags & WRITEABLE)) {
    PyErr_SetObject(PyExc_BufferError, no_flag);
    return -1;
  }
  return describe(a, strides, out);
}

static void release_base(PyObject* capsule) {
  DLManagedTensorVersioned* m = PyCapsule_GetPointer(capsule, NULL);
  py_pending pending = py_pending_save();
  if (m && m->deleter) m->deleter(m);
  py_pending_restore(pending);
}

/* The array's base is a capsule that owes the deleter. Owns: takes the managed tensor on success
 * only. GIL: needed. Errors: -1 with an exception. */
static int import_tensor(DLManagedTensorVersioned* m, void** out) {
  const DLTensor* t = &m->dl_tensor;
  Py_ssize_t byte_strides[MAX_NDIM];
  int number = find_number(t->dtype);
  if (m->version.major != DLX_DLPACK_MAJOR || t->device.device_type != kDLCPU || number < 0 ||
      t->ndim > MAX_NDIM || t->strides == NULL) {
    PyErr_SetString(PyExc_BufferError, "numpy cannot hold this tensor");
    return -1;
  }
  for (int32_t i = 0; i < t->ndim; i++) {
    Py_ssize_t item = t->dtype.bits / 8;
    /* Only strides that are never used overflow: of extents below 2 or of arrays without elements.
     */
    if (__builtin_mul_overflow(t->strides[i], item, &byte_strides[i])) byte_strides[i] = item;
  }
  static char nothing[16]; /* numpy would allocate memory for NULL */
  char* data = (char*)t->data + t->byte_offset;
  if (t->data == NULL) {
    data = nothing;
    memset(byte_strides, 0, sizeof byte_strides);
  }
  int flags = (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY) ? 0 : WRITEABLE;
  PyObject* array = make_array(array_type, t->ndim, (const Py_ssize_t*)t->shape, number,
                               byte_strides, data, 0, flags, NULL);
  if (array == NULL) return -1;
  PyObject* base = PyCapsule_New(m, NULL, NULL);
  if (base == NULL || set_base(array, base) < 0) { /* takes the reference, even on failure */
    Py_DECREF(array);
    return -1;
  }
  PyCapsule_SetDestructor(base, release_base); /* only now: nothing can fail any more */
  *out = array;
  return 0;
}

static int refuse_allocation(DLTensor* prototype, DLManagedTensorVersioned** out, void* context,
                             void (*set_error)(void*, const char*, const char*)) {
  *out = NULL;
  if (set_error) set_error(context, "NotImplementedError", "only numpy allocates numpy arrays");
  return -1;
}

/* Owns: releases the array. GIL: taken; the array is leaked if the interpreter has ended. */
static void release_array(DLManagedTensorVersioned* m) {
  int holds_gil = py_holds_gil();
  PyGILState_STATE state = PyGILState_LOCKED;
  if (holds_gil ? Py_IsInitialized() : py_gil_take(&state)) {
    py_drop(m->manager_ctx);
    if (!holds_gil) PyGILState_Release(state);
  }
  free(m);
}

/* Export an array, even a read-only one. Shape and strides follow the struct. Owns: the caller owns
 * the result, which holds the array. GIL: needed. Errors: -1 with BufferError or MemoryError. */
static int export_array(void* object, DLManagedTensorVersioned** out) {
  const array_head* a = object;
  int64_t strides[MAX_NDIM];
  DLTensor t;
  if (describe(a, strides, &t) < 0) return -1;
  size_t dims = (size_t)a->ndim * sizeof(int64_t);
  DLManagedTensorVersioned* m = dlx_allocate(sizeof *m + 2 * dims);
  if (m == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  t.shape = (int64_t*)(m + 1);
  t.strides = t.shape + a->ndim;
  if (dims) {
    memcpy(t.shape, a->shape, dims);
    memcpy(t.strides, strides, dims);
  }
  uint64_t flags = a->flags & WRITEABLE ? 0 : DLPACK_FLAG_BITMASK_READ_ONLY;
  *m = (DLManagedTensorVersioned){.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR},
                                  .manager_ctx = Py_NewRef(object),
                                  .deleter = release_array,
                                  .flags = flags,
                                  .dl_tensor = t};
  *out = m;
  return 0;
}

static int get_work_stream(int32_t device_type, int32_t device_id, void** out) {
  *out = NULL;
  return 0;
}

static const DLPackExchangeAPI table = {
    .header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
    .managed_tensor_allocator = refuse_allocation,
    .managed_tensor_from_py_object_no_sync = export_array,
    .managed_tensor_to_py_object_no_sync = import_tensor,
    .dltensor_from_py_object_no_sync = borrow,
    .current_work_stream = get_work_stream,
};

PyDoc_STRVAR(exchange_api_doc,
             "exchange_api(functions, /)\n--\n\n"
             "Return a capsule with the table. `functions`: numpy's capsule of C functions.");

static PyObject* exchange_api(PyObject* module, PyObject* functions) {
  void** numpy = PyCapsule_GetPointer(functions, NULL);
  if (numpy == NULL) return NULL;
  PY_LOCKED(module)
  if (make_array != (new_array)numpy[API_NEW]) { /* once: other threads read it */
    array_type = (PyTypeObject*)numpy[API_ARRAY_TYPE];
    make_array = (new_array)numpy[API_NEW];
    set_base = (int (*)(PyObject*, PyObject*))numpy[API_SET_BASE];
  }
  PY_UNLOCKED();
  return PyCapsule_New((void*)&table, "dlpack_exchange_api", NULL);
}

PyDoc_STRVAR(extend_doc,
             "extend(scalar, code, bits, /)\n--\n\n"
             "Let the table export arrays of another package's dtype of whole bytes, by its scalar "
             "type. If `bits` is 0,\nthe table stops exporting them.");

/* Owns: holds the type. GIL: needed. Errors: NULL with an exception. */
static PyObject* extend(PyObject* module, PyObject* args) {
  PyTypeObject* scalar;
  unsigned char code, bits;
  if (!PyArg_ParseTuple(args, "O!bb:extend", &PyType_Type, &scalar, &code, &bits)) return NULL;
  PY_LOCKED(module)
  int i = 0, n = atomic_load_explicit(&n_extensions, memory_order_relaxed); /* under the lock */
  while (i < n && extensions[i].scalar != scalar) i++;
  if (i < MAX_EXTENSIONS && (bits & (bits - 1)) == 0) { /* else it is exported by another path */
    atomic_store_explicit(&extensions[i].dtype, ((DLDataType){code, bits, 1}),
                          memory_order_relaxed);
    if (i == n) {
      extensions[n].scalar = (PyTypeObject*)Py_NewRef(scalar);
      atomic_store_explicit(&n_extensions, n + 1, memory_order_release);
    }
  }
  PY_UNLOCKED();
  Py_RETURN_NONE;
}

PyDoc_STRVAR(
    read_facts_doc,
    "read_facts(array, /)\n--\n\n"
    "Return (address, shape, strides, dtype) as the table reads them, to compare them with "
    "numpy's.");

static PyObject* read_facts(PyObject* module, PyObject* array) {
  DLTensor t;
  if (!PyObject_TypeCheck(array, array_type)) {
    PyErr_SetString(PyExc_TypeError, "expected a numpy array");
    return NULL;
  }
  int64_t elements[MAX_NDIM];
  if (describe((array_head*)array, elements, &t) < 0) return NULL;
  return Py_BuildValue("(NNN(iii))", PyLong_FromVoidPtr(t.data), py_new_tuple(t.shape, t.ndim),
                       py_new_tuple(t.strides, t.ndim), t.dtype.code, t.dtype.bits, t.dtype.lanes);
}

static PyMethodDef functions[] = {
    PY_ONE(exchange_api),
    PY_ONE(read_facts),
    PY_VARARGS(extend),
    PY_END,
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_dlx_numpy",
    .m_doc = "An exchange table for numpy's arrays.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__dlx_numpy(void) {
  no_dtype = PyUnicode_InternFromString("DLPack has no dtype for this array");
  no_strides =
      PyUnicode_InternFromString("the array's strides are not multiples of the element size");
  no_flag = PyUnicode_InternFromString("a DLTensor cannot be marked as read-only");
  if (no_dtype == NULL || no_strides == NULL || no_flag == NULL || py_gil_open() < 0) return NULL;
  return py_allow_no_gil(PyModule_Create(&definition));
}
