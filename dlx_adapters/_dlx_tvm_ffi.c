/* An exchange table for tvm_ffi.Tensor: tvm-ffi 0.1.15 has no table for it. Also look-ups in
 * tvm-ffi's containers.
 *
 * This file needs no tvm-ffi headers: `__chandle__` is the address of an object, and exports and
 * look-ups are functions of tvm-ffi's public C interface, which dlx_tvm_ffi.py finds in the loaded
 * library. An export owns a count, so it stays valid if the handle is moved away; a borrowed tensor
 * does not. Imports use a slot of the table that tvm-ffi publishes for another type. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "dlpack_abi.h"
#include "base/extension.h"
#include "base/threads.h"

static int (*to_managed)(void* handle, DLManagedTensorVersioned** out); /* of tvm-ffi */
static PyObject* handle_of;           /* tvm_ffi.Tensor.__chandle__; never freed */
static _Atomic(Py_ssize_t) handle_at; /* offset of the handle in a tensor; 0 = call handle_of;
                                         relaxed: a number */

/* From the C interface: TVMFFIObject, TVMFFIAny, a part of TVMFFITypeIndex. */
typedef struct {
  uint64_t counts;
  int32_t type_index;
  uint32_t padding;
  void* deleter;
} tvm_object;

enum { TVM_INT = 1, TVM_RAW_STRING = 8, TVM_OBJECT = 64, TVM_TENSOR = 70 };

/* Errors: NULL with BufferError, or the exception of the call. */
static tvm_object* get_object(PyObject* tensor) {
  void* found = NULL;
  Py_ssize_t at = atomic_load_explicit(&handle_at, memory_order_relaxed);
  if (at) {
    memcpy(&found, (char*)tensor + at, sizeof found);
  } else {
    PyObject* number = PyObject_CallOneArg(handle_of, tensor);
    found = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    if (PyErr_Occurred()) return NULL;
  }
  if (found == NULL) PyErr_SetString(PyExc_BufferError, "tvm_ffi cannot export its tensor");
  return found;
}

/* Owns: the caller owns *out, which keeps the memory alive. GIL: needed. Errors: -1 with an
 * exception. */
static int export_tensor(void* tensor, DLManagedTensorVersioned** out) {
  tvm_object* found = get_object(tensor);
  if (found == NULL || to_managed(found, out) == 0) return found ? 0 : -1;
  PyErr_SetString(PyExc_BufferError, "tvm_ffi cannot export its tensor");
  return -1;
}

/* The tensor follows the head of its object. Owns: nothing. GIL: needed. Errors: -1 with an
 * exception. */
static int borrow_tensor(void* tensor, DLTensor* out) {
  const tvm_object* found = get_object(tensor);
  if (found == NULL) return -1;
  if (found->type_index != TVM_TENSOR) {
    PyErr_SetString(PyExc_BufferError, "it does not hold a tensor of tvm_ffi");
    return -1;
  }
  memcpy(out, found + 1, sizeof *out);
  return 0;
}

static DLPackExchangeAPI table = {
    .header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
    .managed_tensor_from_py_object_no_sync = export_tensor,
};

PyDoc_STRVAR(
    exchange_api_doc,
    "exchange_api(chandle, address, maker, borrows, /)\n--\n\n"
    "Return a capsule with the table. `chandle`: tvm_ffi.Tensor.__chandle__; `address`: of "
    "TVMFFITensorToDLPackVersioned;\n`maker`: a capsule with a table that imports, or None; "
    "`borrows`: whether tensors may be read in place.");

static PyObject* exchange_api(PyObject* module, PyObject* args) {
  static const char name[] = "dlpack_exchange_api";
  PyObject *chandle, *address, *maker;
  int borrows;
  if (!PyArg_ParseTuple(args, "OO!Op:exchange_api", &chandle, &PyLong_Type, &address, &maker,
                        &borrows))
    return NULL;
  void* function = PyLong_AsVoidPtr(address);
  if (function == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the address of the function is 0");
    return NULL;
  }
  const DLPackExchangeAPI* makes = maker == Py_None ? NULL : PyCapsule_GetPointer(maker, name);
  if (PyErr_Occurred()) return NULL;
  int is_ours = makes && makes->header.version.major == DLX_DLPACK_MAJOR;
  PY_LOCKED(module)
  DLPackExchangeAPI filled = table;
  filled.managed_tensor_to_py_object_no_sync =
      is_ours ? makes->managed_tensor_to_py_object_no_sync : NULL;
  filled.dltensor_from_py_object_no_sync = borrows ? borrow_tensor : NULL;
  filled.current_work_stream = is_ours ? makes->current_work_stream : NULL;
  if (handle_of != chandle || memcmp(&filled, &table, sizeof table) != 0 ||
      memcmp(&to_managed, &function, sizeof function) != 0) { /* once: other threads read it */
    table = filled;
    memcpy(&to_managed, &function, sizeof function);
    Py_XSETREF(handle_of, Py_NewRef(chandle));
  }
  PY_UNLOCKED();
  return PyCapsule_New(&table, name, NULL);
}

/* ---- containers ------------------------------------------------------------------------------ */

typedef struct {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t number;
    const char* text;
    void* object;
  } value;
} tvm_any;

static int (*call)(void* function, tvm_any* args, int32_t n, tvm_any* result);
static int (*hold)(void* object);
static int (*release)(void* object);
static void (*take_error)(void** error);
static PyObject* chandle_name; /* interned */

PyDoc_STRVAR(bind_doc,
             "bind(call, hold, release, take_error, /)\n--\n\n"
             "Set the addresses of TVMFFIFunctionCall, TVMFFIObjectIncRef, TVMFFIObjectDecRef and "
             "TVMFFIErrorMoveFromRaised.\nReturn the address of a TVMFFISafeCallType that returns "
             "its argument, an object.");

/* Owns: the caller owns *result. GIL: any. */
static int return_argument(void* self, const tvm_any* args, int32_t n, tvm_any* result) {
  (void)self, (void)n;
  *result = args[0];
  return hold(args[0].value.object);
}

static PyObject* bind(PyObject* module, PyObject* args) {
  unsigned long long addresses[4];
  if (!PyArg_ParseTuple(args, "KKKK:bind", &addresses[0], &addresses[1], &addresses[2],
                        &addresses[3]))
    return NULL;
  PY_LOCKED(module)
  if ((uintptr_t)call != addresses[0]) { /* once: other threads read it */
    call = (int (*)(void*, tvm_any*, int32_t, tvm_any*))(uintptr_t)addresses[0];
    hold = (int (*)(void*))(uintptr_t)addresses[1];
    release = (int (*)(void*))(uintptr_t)addresses[2];
    take_error = (void (*)(void**))(uintptr_t)addresses[3];
  }
  PY_UNLOCKED();
  return PyLong_FromUnsignedLongLong((uintptr_t)return_argument);
}

PyDoc_STRVAR(handle_doc,
             "handle(obj, /)\n--\n\n"
             "Return the handle of an object of tvm_ffi as a number, or None for other objects.");

/* Owns: new. GIL: needed. Errors: NULL with an exception. */
static PyObject* handle(PyObject* module, PyObject* obj) {
  PyObject* number = PyObject_CallMethodNoArgs(obj, chandle_name);
  if (number || !PyErr_ExceptionMatches(PyExc_AttributeError)) return number;
  PyErr_Clear();
  Py_RETURN_NONE;
}

/* Errors: NULL; an exception may be set. */
static void* read_handle(PyObject* obj) {
  PyObject* number = handle(NULL, obj);
  void* found = number && PyLong_CheckExact(number) ? PyLong_AsVoidPtr(number) : NULL;
  Py_XDECREF(number);
  return found;
}

/* Find the object at a key of a container, to compare its address. Owns: borrowed from the
 * container. GIL: needed, no Python runs. Errors: NULL without an exception: no item, or not an
 * object. */
static void* find_child(void* get, void* container, PyObject* key) {
  tvm_any result = {0}, args[2] = {{.type_index = ((tvm_object*)container)->type_index}};
  args[0].value.object = container;
  if (PyLong_CheckExact(key)) {
    args[1] = (tvm_any){.type_index = TVM_INT, .value.number = PyLong_AsLongLong(key)};
  } else {
    Py_ssize_t length;
    const char* text = PyUnicode_CheckExact(key) ? PyUnicode_AsUTF8AndSize(key, &length) : NULL;
    if (text == NULL || (size_t)length != strlen(text)) return py_error_forget(), NULL;
    args[1] = (tvm_any){.type_index = TVM_RAW_STRING, .value.text = text};
  }
  if (PyErr_Occurred()) return py_error_forget(), NULL; /* too large a number */
  if (call(get, args, 2, &result) != 0) {
    void* error = NULL;
    py_error_forget();
    take_error(&error);
    if (error) release(error);
    return NULL;
  }
  if (result.type_index < TVM_OBJECT || result.value.object == NULL) return NULL;
  release(result.value.object); /* the container still holds it */
  return result.value.object;
}

/* `self` is (container, its handle, getter, its handle); the handles must not change. Owns: new.
 * GIL: needed. Errors: NULL with an exception. */
static PyObject* has_child(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_check_args("has_child", nargs, 2, 2)) return NULL;
  void* container = PyLong_AsVoidPtr(PyTuple_GET_ITEM(self, 1));
  void *get = PyLong_AsVoidPtr(PyTuple_GET_ITEM(self, 3)), *child = read_handle(args[1]);
  int is_same = container && get && child && find_child(get, container, args[0]) == child;
  return PyErr_Occurred() ? NULL : PyBool_FromLong(is_same);
}

PyDoc_STRVAR(find_handles_doc,
             "find_handles(tensors, /)\n--\n\n"
             "Find the only offset at which each of a list of tensors of one type stores its "
             "`__chandle__`, to read\nhandles there from now on. Return whether there is one.");

/* The offset is in bytes. GIL: needed. Errors: 0 = no unique offset, or an exception is set. */
static Py_ssize_t find_handle_offset(PyObject* tensors) {
  PyTypeObject* type = Py_TYPE(PyList_GET_ITEM(tensors, 0));
  Py_ssize_t found = 0, offset = 0;
  for (Py_ssize_t at = sizeof(PyObject); at + (Py_ssize_t)sizeof(void*) <= type->tp_basicsize;
       at += sizeof(void*)) {
    Py_ssize_t i = 0;
    for (; i < PyList_GET_SIZE(tensors); i++) {
      PyObject* tensor = PyList_GET_ITEM(tensors, i);
      if (!Py_IS_TYPE(tensor, type)) return 0;
      void *expected = read_handle(tensor), *stored;
      if (PyErr_Occurred()) return 0;
      memcpy(&stored, (char*)tensor + at, sizeof stored);
      if (stored != expected) break;
    }
    if (i == PyList_GET_SIZE(tensors)) {
      found++;
      offset = at;
    }
  }
  return found == 1 ? offset : 0;
}

/* Owns: new. GIL: needed. Errors: NULL with an exception. */
static PyObject* find_handles(PyObject* module, PyObject* tensors) {
  if (!PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) == 0)
    return PyErr_Format(PyExc_TypeError, "find_handles takes a list of tensors");
  Py_ssize_t offset = find_handle_offset(tensors);
  atomic_store_explicit(&handle_at, offset, memory_order_relaxed);
  return PyErr_Occurred() ? NULL : PyBool_FromLong(offset != 0);
}

PyDoc_STRVAR(
    read_facts_doc,
    "read_facts(tensor, /)\n--\n\n"
    "Return (address, shape, strides, dtype, device) as the table borrows them, to compare "
    "them with tvm_ffi's.");

/* Owns: new. GIL: needed. Errors: NULL with an exception. */
static PyObject* read_facts(PyObject* module, PyObject* tensor) {
  DLTensor t;
  if (borrow_tensor(tensor, &t) < 0) return NULL;
  return Py_BuildValue("(NNN(iii)(ii))", PyLong_FromVoidPtr((char*)t.data + t.byte_offset),
                       py_new_tuple(t.shape, t.ndim),
                       py_new_tuple(t.strides, t.strides ? t.ndim : 0), t.dtype.code, t.dtype.bits,
                       t.dtype.lanes, t.device.device_type, t.device.device_id);
}

PyDoc_STRVAR(has_child_doc,
             "has_child(key, child, /)\n--\n\n"
             "Return whether the container has exactly this child at the key.");

static PyMethodDef has_child_method = PY_FASTCALL(has_child);

PyDoc_STRVAR(
    create_child_check_doc,
    "create_child_check(container, getter, /)\n--\n\n"
    "Return a function(key, child) that returns whether the container still has that child. The "
    "container must keep its\nhandle. `getter`: tvm_ffi's function(container, key).");

static PyObject* create_child_check(PyObject* module, PyObject* args) {
  PyObject *container, *getter;
  if (!PyArg_ParseTuple(args, "OO:create_child_check", &container, &getter)) return NULL;
  if (call == NULL || read_handle(container) == NULL || read_handle(getter) == NULL) {
    if (!PyErr_Occurred())
      PyErr_SetString(PyExc_ValueError, "expected an open container and a getter of tvm_ffi");
    return NULL;
  }
  PyObject* self =
      Py_BuildValue("ONON", container, handle(NULL, container), getter, handle(NULL, getter));
  PyObject* made = self ? PyCFunction_New(&has_child_method, self) : NULL;
  Py_XDECREF(self);
  return made;
}

static PyMethodDef functions[] = {
    PY_VARARGS(exchange_api), PY_VARARGS(bind),   PY_ONE(handle), PY_VARARGS(create_child_check),
    PY_ONE(find_handles),     PY_ONE(read_facts), PY_END,
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_dlx_tvm_ffi",
    .m_doc = "An exchange table for tvm_ffi.Tensor, and look-ups in its containers.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__dlx_tvm_ffi(void) {
  chandle_name = PyUnicode_InternFromString("__chandle__");
  return chandle_name ? py_allow_no_gil(PyModule_Create(&definition)) : NULL;
}
