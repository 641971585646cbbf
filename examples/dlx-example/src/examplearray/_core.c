/* The memory of examplearray: an array's head, and DLPack in both directions. Like any framework,
 * it does not know dlx; only the build uses dlx's header with the ABI's facts. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack_abi.h"

enum { MAX_NDIM = 8, MAJOR = 1 };

typedef struct {
  PyObject_HEAD char* data; /* of the first element */
  int32_t ndim;
  DLDataType dtype;
  char is_readonly, is_negated;
  int64_t shape[MAX_NDIM], strides[MAX_NDIM]; /* in elements */
  Py_buffer buffer;                           /* the memory of a Python object; obj NULL = unused */
  PyObject* base;                             /* the array that owns the memory, or NULL */
  DLManagedTensorVersioned* managed;          /* memory of another framework, or NULL */
  DLManagedTensor* legacy;                    /* the same, in the older struct */
} ArrayObject;

/* Without the GIL, one thread at a time. No return in between. */
#ifdef Py_GIL_DISABLED
#define LOCK(object) Py_BEGIN_CRITICAL_SECTION(object);
#define UNLOCK() Py_END_CRITICAL_SECTION();
#else
#define LOCK(object) {
#define UNLOCK() }
#endif

static PyTypeObject Head;
static PyTypeObject* array_type; /* examplearray.Array: created by imports */

/* Dtypes that can be imported: the framework's list, from set_dtypes. */
static DLDataType known[64];
static int n_known;

static int is_known(DLDataType dtype) {
  for (int i = 0; i < n_known; i++) {
    if (memcmp(&known[i], &dtype, sizeof dtype) == 0) return 1;
  }
  return 0;
}

/* ---- the head of an array ---------------------------------------------------------------------
 */

static void head_dealloc(PyObject* object) {
  ArrayObject* a = (ArrayObject*)object;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  if (a->managed && a->managed->deleter) a->managed->deleter(a->managed);
  if (a->legacy && a->legacy->deleter) a->legacy->deleter(a->legacy);
  PyBuffer_Release(&a->buffer);
  Py_CLEAR(a->base);
  PyErr_Restore(type, value, traceback);
  Py_TYPE(object)->tp_free(object);
}

static int read_numbers(PyObject* sequence, int64_t* out, int32_t* n) {
  PyObject* items = PySequence_Tuple(sequence);
  if (items == NULL) return -1;
  Py_ssize_t count = PyTuple_GET_SIZE(items);
  if (count > MAX_NDIM) {
    PyErr_Format(PyExc_ValueError, "an array has at most %d dimensions, found %zd", MAX_NDIM,
                 count);
    Py_DECREF(items);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(items, i));
  Py_DECREF(items);
  *n = (int32_t)count;
  return PyErr_Occurred() ? -1 : 0;
}

/* Return whether an array of `n` dimensions, first element at `start`, fits `nbytes` bytes. */
static int lies_inside(const ArrayObject* a, int64_t start, int64_t nbytes) {
  int64_t low = 0, high = 0;
  for (int32_t i = 0; i < a->ndim; i++) {
    if (a->shape[i] < 0) return 0;
    if (a->shape[i] == 0) return 1;
    int64_t reach;
    if (__builtin_mul_overflow(a->shape[i] - 1, a->strides[i], &reach)) return 0;
    if (__builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high)) return 0;
  }
  int64_t item = a->dtype.bits / 8, first, last;
  return !__builtin_mul_overflow(low, item, &first) &&
         !__builtin_mul_overflow(high + 1, item, &last) && start + first >= 0 &&
         last <= nbytes - start;
}

PyDoc_STRVAR(head_doc,
             "Head(memory, offset, shape, strides, dtype, readonly=False, negated=False)\n--\n\n"
             "An array over a buffer, or over the memory of another array; offset in bytes from "
             "its first element.");

static PyObject* head_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static char* names[] = {"memory", "offset",   "shape",   "strides",
                          "dtype",  "readonly", "negated", NULL};
  PyObject *memory, *shape, *strides;
  long long offset;
  int code, bits, readonly = 0, negated = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OLOO(ii)|pp:Head", names, &memory, &offset,
                                   &shape, &strides, &code, &bits, &readonly, &negated))
    return NULL;
  ArrayObject* a = (ArrayObject*)type->tp_alloc(type, 0);
  if (a == NULL) return NULL;
  int32_t n_strides;
  if (read_numbers(shape, a->shape, &a->ndim) < 0 ||
      read_numbers(strides, a->strides, &n_strides) < 0)
    goto failed;
  a->dtype = (DLDataType){(uint8_t)code, (uint8_t)bits, 1};
  if (n_strides != a->ndim) {
    PyErr_Format(PyExc_ValueError, "%d extents, %d strides", a->ndim, n_strides);
    goto failed;
  }
  if (PyObject_TypeCheck(memory, &Head)) {
    ArrayObject* base = (ArrayObject*)memory;
    a->base = Py_NewRef(memory);
    a->data = base->data + offset;
    a->is_readonly = (char)(readonly || base->is_readonly);
  } else {
    if (PyObject_GetBuffer(memory, &a->buffer, readonly ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
      goto failed;
    a->data = (char*)a->buffer.buf + offset;
    a->is_readonly = (char)readonly;
    if (!lies_inside(a, offset, a->buffer.len)) {
      PyErr_SetString(PyExc_ValueError, "the array lies outside of the memory");
      goto failed;
    }
  }
  a->is_negated = (char)negated;
  return (PyObject*)a;
failed:
  Py_DECREF(a);
  return NULL;
}

static PyObject* numbers(const int64_t* values, int32_t n) {
  PyObject* tuple = PyTuple_New(n);
  for (int32_t i = 0; tuple && i < n; i++)
    PyTuple_SET_ITEM(tuple, i, PyLong_FromLongLong(values[i]));
  return tuple;
}

static PyObject* get_shape(PyObject* self, void* unused) {
  return numbers(((ArrayObject*)self)->shape, ((ArrayObject*)self)->ndim);
}

static PyObject* get_strides(PyObject* self, void* unused) {
  return numbers(((ArrayObject*)self)->strides, ((ArrayObject*)self)->ndim);
}

static PyObject* get_address(PyObject* self, void* unused) {
  return PyLong_FromVoidPtr(((ArrayObject*)self)->data);
}

static PyObject* get_spelling(PyObject* self, void* unused) {
  return Py_BuildValue("(ii)", ((ArrayObject*)self)->dtype.code, ((ArrayObject*)self)->dtype.bits);
}

static PyObject* get_readonly(PyObject* self, void* unused) {
  return PyBool_FromLong(((ArrayObject*)self)->is_readonly);
}

static PyObject* get_negated(PyObject* self, void* unused) {
  return PyBool_FromLong(((ArrayObject*)self)->is_negated);
}

static PyGetSetDef head_attributes[] = {
    {"shape", get_shape, NULL, "Extents.", NULL},
    {"strides", get_strides, NULL, "In elements.", NULL},
    {"address", get_address, NULL, "Of the first element.", NULL},
    {"_spelling", get_spelling, NULL, "(code, bits) of an element.", NULL},
    {"readonly", get_readonly, NULL, "Whether writing is forbidden.", NULL},
    {"is_negated", get_negated, NULL, "Whether each value is the negative of what memory holds.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Head = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "examplearray._core.Head",
    .tp_doc = head_doc,
    .tp_basicsize = sizeof(ArrayObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = head_new,
    .tp_dealloc = head_dealloc,
    .tp_getset = head_attributes,
};

/* ---- export ---------------------------------------------------------------------------------- */

static DLTensor tensor_of(ArrayObject* a) {
  return (DLTensor){.data = a->data,
                    .device = {kDLCPU, 0},
                    .ndim = a->ndim,
                    .dtype = a->dtype,
                    .shape = a->shape,
                    .strides = a->strides};
}

/* The exchange API's borrow. It refuses read-only arrays, which a DLTensor cannot represent; the
 * caller must check `is_negated`. */
static int borrow(void* object, DLTensor* out) {
  ArrayObject* a = object;
  if (a->is_readonly || !is_known(a->dtype)) {
    PyErr_SetString(PyExc_BufferError, "a DLTensor cannot represent this array");
    return -1;
  }
  *out = tensor_of(a);
  return 0;
}

/* Called on any thread. While the interpreter shuts down, or afterwards, the object leaks: a thread
 * that requests the GIL of such an interpreter does not return. */
static void let_go(void* owner) {
#if PY_VERSION_HEX >= 0x030D0000
  int is_going = Py_IsFinalizing();
#else
  int is_going = _Py_IsFinalizing();
#endif
  if (is_going || !Py_IsInitialized()) return;
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  Py_DECREF((PyObject*)owner);
  PyErr_Restore(type, value, traceback);
  PyGILState_Release(state);
}

static void delete_managed(DLManagedTensorVersioned* m) {
  void* owner = m->manager_ctx;
  free(m);
  let_go(owner);
}

static void delete_legacy(DLManagedTensor* m) {
  void* owner = m->manager_ctx;
  free(m);
  let_go(owner);
}

static int can_leave(ArrayObject* a) {
  if (a->is_negated || !is_known(a->dtype)) {
    PyErr_SetString(PyExc_BufferError, a->is_negated
                                           ? "a negated array cannot be exported; call .resolve()"
                                           : "DLPack has no code for this dtype");
    return 0;
  }
  return 1;
}

static int give_managed(void* object, DLManagedTensorVersioned** out) {
  ArrayObject* a = object;
  if (!can_leave(a)) return -1;
  DLManagedTensorVersioned* m = calloc(1, sizeof *m);
  if (m == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  m->version = (DLPackVersion){MAJOR, 0};
  m->manager_ctx = Py_NewRef(object); /* the array's shape and strides never change */
  m->deleter = delete_managed;
  m->flags = a->is_readonly ? DLPACK_FLAG_BITMASK_READ_ONLY : 0;
  m->dl_tensor = tensor_of(a);
  *out = m;
  return 0;
}

static void drop_capsule(PyObject* capsule) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    DLManagedTensorVersioned* m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (m->deleter) m->deleter(m);
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    DLManagedTensor* m = PyCapsule_GetPointer(capsule, "dltensor");
    if (m->deleter) m->deleter(m);
  }
  PyErr_Restore(type, value, traceback);
}

PyDoc_STRVAR(capsule_doc,
             "capsule(array, versioned, copied, /)\n--\n\nReturn a capsule of either generation.");

static PyObject* capsule(PyObject* module, PyObject* args) {
  ArrayObject* a;
  int versioned, copied;
  if (!PyArg_ParseTuple(args, "O!pp:capsule", &Head, &a, &versioned, &copied) || !can_leave(a))
    return NULL;
  if (versioned) {
    DLManagedTensorVersioned* m;
    if (give_managed(a, &m) < 0) return NULL;
    if (copied) m->flags |= DLPACK_FLAG_BITMASK_IS_COPIED;
    PyObject* made = PyCapsule_New(m, "dltensor_versioned", drop_capsule);
    if (made == NULL) m->deleter(m);
    return made;
  }
  if (a->is_readonly) {
    PyErr_SetString(PyExc_BufferError,
                    "a legacy capsule cannot say read-only; ask for max_version=(1, 0)");
    return NULL;
  }
  DLManagedTensor* m = calloc(1, sizeof *m);
  if (m == NULL) return PyErr_NoMemory();
  m->manager_ctx = Py_NewRef((PyObject*)a);
  m->deleter = delete_legacy;
  m->dl_tensor = tensor_of(a);
  PyObject* made = PyCapsule_New(m, "dltensor", drop_capsule);
  if (made == NULL) m->deleter(m);
  return made;
}

/* ---- import --------------------------------------------------------------------------------- */

/* Return whether a tensor is valid: extents from 0, and a size in bytes that fits an int64. */
static int is_possible(const DLTensor* t) {
  int64_t size = t->dtype.bits / 8;
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] < 0) return 0;
  }
  for (int32_t i = 0; i < t->ndim; i++) {
    if (t->shape[i] == 0) return 1;
    if (__builtin_mul_overflow(size, t->shape[i], &size)) return 0;
  }
  return t->data != NULL;
}

/* Return an array over a tensor that it does not own yet. Errors: NULL with BufferError. */
static ArrayObject* over(const DLTensor* t) {
  if (t->device.device_type != kDLCPU || t->ndim < 0 || t->ndim > MAX_NDIM || !is_known(t->dtype) ||
      !is_possible(t)) {
    PyErr_SetString(PyExc_BufferError, "examplearray cannot hold this tensor");
    return NULL;
  }
  ArrayObject* a = (ArrayObject*)array_type->tp_alloc(array_type, 0);
  if (a == NULL) return NULL;
  a->data = t->data ? (char*)t->data + t->byte_offset : NULL;
  a->ndim = t->ndim;
  a->dtype = t->dtype;
  int64_t step = 1;
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    a->shape[i] = t->shape[i];
    a->strides[i] = t->strides ? t->strides[i] : step;
    step *= t->shape[i] ? t->shape[i] : 1;
  }
  return a;
}

/* The exchange API's import. Owns: takes the managed tensor on success only. */
static int take_managed(DLManagedTensorVersioned* m, void** out) {
  if (m->version.major != MAJOR) {
    PyErr_Format(PyExc_BufferError, "DLPack %u is not DLPack %d", m->version.major, MAJOR);
    return -1;
  }
  ArrayObject* a = over(&m->dl_tensor);
  if (a == NULL) return -1;
  a->is_readonly = (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
  a->managed = m;
  *out = a;
  return 0;
}

PyDoc_STRVAR(consume_doc,
             "consume(capsule, /)\n--\n\nReturn an array that owns what a capsule holds.");

/* Take the struct out of a capsule of this name; only one of several threads gets it. Owns: the
 * caller owns the result, or restores the capsule's name. Errors: NULL without an exception. */
static void* claim(PyObject* capsule, const char* name, const char* used) {
  void* held = NULL;
  LOCK(capsule)
  if (PyCapsule_IsValid(capsule, name)) {
    held = PyCapsule_GetPointer(capsule, name);
    PyCapsule_SetName(capsule, used);
  }
  UNLOCK()
  return held;
}

static PyObject* consume(PyObject* module, PyObject* capsule) {
  const char *versioned = "dltensor_versioned", *legacy = "dltensor";
  DLManagedTensorVersioned* m = claim(capsule, versioned, "used_dltensor_versioned");
  if (m) {
    void* made = NULL;
    if (take_managed(m, &made) < 0) PyCapsule_SetName(capsule, versioned);
    return made;
  }
  DLManagedTensor* old = claim(capsule, legacy, "used_dltensor");
  if (old) {
    ArrayObject* made = over(&old->dl_tensor);
    if (made == NULL) {
      PyCapsule_SetName(capsule, legacy);
    } else {
      made->legacy = old;
    }
    return (PyObject*)made;
  }
  PyErr_SetString(PyExc_ValueError, "not a DLPack capsule, or one that was consumed before");
  return NULL;
}

/* ---- the table ------------------------------------------------------------------------------- */

static int allocate(DLTensor* prototype, DLManagedTensorVersioned** out, void* context,
                    void (*set_error)(void*, const char*, const char*)) {
  set_error(context, "NotImplementedError", "examplearray allocates in Python");
  return -1;
}

static int work_stream(int32_t device_type, int32_t device_id, void** out) {
  *out = NULL; /* the host has no streams */
  return 0;
}

static const DLPackExchangeAPI table = {
    .header = {.version = {MAJOR, 3}},
    .managed_tensor_allocator = allocate,
    .managed_tensor_from_py_object_no_sync = give_managed,
    .managed_tensor_to_py_object_no_sync = take_managed,
    .dltensor_from_py_object_no_sync = borrow,
    .current_work_stream = work_stream,
};

PyDoc_STRVAR(
    settle_doc,
    "settle(array_type, dtypes, /)\n--\n\n"
    "Say which type imports make, and which (code, bits) DLPack carries for it; return the "
    "table in a capsule.");

static PyObject* settle(PyObject* module, PyObject* args) {
  PyObject *type, *dtypes;
  if (!PyArg_ParseTuple(args, "O!O!:settle", &PyType_Type, &type, &PyTuple_Type, &dtypes))
    return NULL;
  int n = 0;
  for (; n < PyTuple_GET_SIZE(dtypes) && n < 64; n++) {
    int code, bits;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(dtypes, n), "ii", &code, &bits)) return NULL;
    known[n] = (DLDataType){(uint8_t)code, (uint8_t)bits, 1};
  }
  n_known = n;
  array_type = (PyTypeObject*)Py_NewRef(type);
  return PyCapsule_New((void*)&table, "dlpack_exchange_api", NULL);
}

static PyMethodDef functions[] = {
    {"capsule", capsule, METH_VARARGS, capsule_doc},
    {"consume", consume, METH_O, consume_doc},
    {"settle", settle, METH_VARARGS, settle_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "examplearray._core",
    .m_doc = "Heads of arrays, and DLPack in both directions.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__core(void) {
  if (PyType_Ready(&Head) < 0) return NULL;
  PyObject* module = PyModule_Create(&definition);
  if (module && PyModule_AddObjectRef(module, "Head", (PyObject*)&Head) < 0) Py_CLEAR(module);
#ifdef Py_GIL_DISABLED
  if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED) < 0) Py_CLEAR(module);
#endif
  return module;
}
