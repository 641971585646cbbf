/* torch's guards for dlx's fast callable, asked in C, and its exchange table with slots of ours:
 * one that borrows, and one that makes constants of what enters a graph. Through Python's bindings
 * guards cost more than the rest of a conversion (is_neg() alone releases the GIL and takes it
 * again), and torch's own slot more than what it reads.
 *
 * torch's headers are not needed: the functions called here are declared in them, exported by its
 * libraries and found by name at run time. A tensor is handed to them by address, as C++ hands over
 * a reference; the only thing that is read here is where a Python tensor keeps it, which
 * dlx_torch.py compares with what torch says (`_cdata`), as every answer, before this is used. A
 * torch that lacks any of them is asked through Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <string.h>

#include "dlx.h"
#include "base/extension.h"
#include "base/threads.h"

/* The head of a Python tensor: an at::Tensor, which is one pointer to its TensorImpl. */
typedef struct {
  PyObject_HEAD void* tensor;
} tensor_head;

/* What is called: functions of at::native, of a const Tensor&; a method of c10::TensorImpl, whose
 * pointer comes first; and torch's stable C interface, whose storage_size is in bytes and whose
 * storage_offset is in elements. */
#define TORCH_CALLS(CALL, STABLE)                                                          \
  CALL(is_neg, (const void*), "libtorch_cpu.so", "_ZN2at6native6is_negERKNS_6TensorE")     \
  CALL(is_conj, (const void*), "libtorch_cpu.so", "_ZN2at6native7is_conjERKNS_6TensorE")   \
  CALL(is_zerotensor, (const void*), "libtorch_cpu.so",                                    \
       "_ZN2at6native14_is_zerotensorERKNS_6TensorE")                                      \
  CALL(requires_grad, (const void*), "libc10.so", "_ZNK3c1010TensorImpl13requires_gradEv") \
  STABLE(storage_size, (void*, int64_t*))                                                  \
  STABLE(storage_offset, (void*, int64_t*))                                                \
  STABLE(device_type, (void*, int32_t*))                                                   \
  STABLE(dtype, (void*, int32_t*))                                                         \
  STABLE(dim, (void*, int64_t*))                                                           \
  STABLE(sizes, (void*, int64_t**))                                                        \
  STABLE(strides, (void*, int64_t**))                                                      \
  STABLE(data_ptr, (void*, void**))

#define CALL_MEMBER(name, parameters, library, symbol) _Bool(*name) parameters;
#define STABLE_MEMBER(name, parameters) int32_t(*name) parameters;
static struct {
  TORCH_CALLS(CALL_MEMBER, STABLE_MEMBER)
  void** plain_class; /* the virtual table of c10::TensorImpl */
} torch;

#define CALL_WANTED(name, parameters, library, symbol) {library, symbol, (void**)&torch.name},
#define STABLE_WANTED(name, parameters) \
  {"libtorch_cpu.so", "aoti_torch_get_" #name, (void**)&torch.name},
static const struct {
  const char *library, *name;
  void** function;
} wanted[] = {TORCH_CALLS(CALL_WANTED, STABLE_WANTED){"libc10.so", "_ZTVN3c1010TensorImplE",
                                                      (void**)&torch.plain_class}};

/* Whether a tensor is of the plain class, whose first word is the address of its virtual table's
 * first function: sparse, nested and functorch's tensors are of others. */
static int is_plain(void* const* handle) {
  return *(void***)*handle == torch.plain_class + 2;
}

/* Whether a tensor lies inside its storage's bytes; strides are never negative in torch. `borrowed`
 * has been validated, so nothing overflows, and without an address it has no elements. */
static int inside(void** handle, const DLTensor* borrowed) {
  int64_t bytes, offset, item = borrowed->dtype.bits * borrowed->dtype.lanes / 8, last = 0;
  if (borrowed->data == NULL) return is_plain(handle) && !torch.is_zerotensor(handle);
  if (torch.storage_size(handle, &bytes) != 0 || torch.storage_offset(handle, &offset) != 0)
    return 0;
  for (int32_t i = 0; i < borrowed->ndim; i++) {
    if (borrowed->shape[i] == 0) return 1;
    last += (borrowed->shape[i] - 1) * borrowed->strides[i];
  }
  /* A part of a zero tensor: torch adds the offset to an address that is not there. */
  if ((int64_t)(uintptr_t)borrowed->data == offset * item) return 0;
  return offset <= INT64_MAX / 32 && last <= INT64_MAX / 64 && (offset + last + 1) * item <= bytes;
}

/* A dlx_guard_function. GIL: held. Errors: none. */
static int clear(void* array, const DLTensor* borrowed) {
  void** slot = &((tensor_head*)array)->tensor;
  if (*slot == NULL) return 0;
  if (borrowed) return inside(slot, borrowed);
  return !torch.requires_grad(*slot) && !torch.is_neg(slot) && !torch.is_conj(slot);
}

/* Find a function of a loaded library; NULL where there is none. */
static void* found_in(const char* library, const char* name) {
  void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  void* found = loaded ? dlsym(loaded, name) : NULL;
  if (loaded) dlclose(loaded); /* torch stays loaded by itself */
  return found;
}

PyDoc_STRVAR(
    guard_function_doc,
    "guard_function()\n--\n\n"
    "Return the function in a capsule, or None where the loaded torch lacks what it calls.");

static PyObject* guard_function(PyObject* module, PyObject* unused) {
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    void* found = found_in(wanted[i].library, wanted[i].name);
    PY_LOCKED(module)
    if (*wanted[i].function != found) *wanted[i].function = found; /* once: threads read it */
    PY_UNLOCKED();
    if (found == NULL) Py_RETURN_NONE;
  }
  return PyCapsule_New((void*)clear, "dlx_guard_function", NULL);
}

/* ---- borrowing ------------------------------------------------------------------------------- */

static const DLPackExchangeAPI* own; /* torch's; NULL = `table` is not made yet */
static DLPackExchangeAPI table;      /* the same but for the slot that borrows */
static DLDataType dtypes[64];        /* by torch's number; without bits = left to torch */

/* What torch's slot says of a tensor, read from the tensor. Only of the plain class. GIL: held.
 * Errors: 0 = torch's slot is to be asked. */
static int read_plain(void* array, DLTensor* out) {
  void** slot = &((tensor_head*)array)->tensor;
  int32_t number = -1, device = -1;
  int64_t ndim = -1;
  if (*slot == NULL || !is_plain(slot)) return 0;
  if (torch.device_type(slot, &device) != 0 || device != 0 /* the host */) return 0;
  if (torch.dtype(slot, &number) != 0 || number < 0 || number >= 64 || dtypes[number].bits == 0)
    return 0;
  if (torch.dim(slot, &ndim) != 0 || torch.sizes(slot, &out->shape) != 0 ||
      torch.strides(slot, &out->strides) != 0 || torch.data_ptr(slot, &out->data) != 0)
    return 0;
  out->device = (DLDevice){kDLCPU, 0};
  out->ndim = (int32_t)ndim;
  out->dtype = dtypes[number];
  out->byte_offset = 0;
  return 1;
}

/* Owns, GIL, Errors: as torch's slot. */
static int borrow(void* array, DLTensor* out) {
  return read_plain(array, out) ? 0 : own->dltensor_from_py_object_no_sync(array, out);
}

/* Whether both slots say the same of a sample, whose dtype is learnt; torch's may refuse that. */
static int learns(const DLPackExchangeAPI* theirs, PyObject* sample) {
  DLTensor said = {.ndim = -1}, found = said;
  int32_t number = -1;
  if (theirs->dltensor_from_py_object_no_sync(sample, &said) != 0 || PyErr_Occurred())
    return PyErr_Clear(), 1;
  if (torch.dtype(&((tensor_head*)sample)->tensor, &number) != 0 || number < 0 || number >= 64)
    return 0;
  dtypes[number] = said.dtype;
  size_t bytes = (size_t)said.ndim * sizeof(int64_t);
  if (said.ndim && (said.shape == NULL || said.strides == NULL)) return 0;
  return read_plain(sample, &found) && found.data == said.data && found.ndim == said.ndim &&
         found.byte_offset == said.byte_offset && said.device.device_type == kDLCPU &&
         said.device.device_id == 0 && memcmp(found.shape, said.shape, bytes) == 0 &&
         memcmp(found.strides, said.strides, bytes) == 0;
}

PyDoc_STRVAR(
    exchange_table_doc,
    "exchange_table(own, samples, /)\n--\n\n"
    "Return torch's own exchange table with a slot that borrows in less time.\n\n"
    "It is made once, where that slot says of a list of tensors what torch's does; until then, and "
    "for another\n"
    "table than then, this gives `own`.");

static PyObject* exchange_table(PyObject* module, PyObject* args) {
  PyObject *capsule, *samples;
  int is_made;
  if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyList_Type, &samples)) return NULL;
  const DLPackExchangeAPI* theirs = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (theirs == NULL) return NULL;
  theirs = py_exchange_known(&theirs->header);
  if (theirs == NULL) return Py_NewRef(capsule);
  PY_LOCKED(module)
  Py_ssize_t i = 0, n = PyList_GET_SIZE(samples);
  if (own == NULL && n && torch.plain_class && theirs->dltensor_from_py_object_no_sync) {
    memset(dtypes, 0, sizeof dtypes);
    while (i < n && learns(theirs, PyList_GET_ITEM(samples, i))) i++;
    table = *theirs;
    table.dltensor_from_py_object_no_sync = borrow;
    if (i == n) own = theirs;
  }
  is_made = own == theirs;
  PY_UNLOCKED();
  return is_made ? PyCapsule_New(&table, "dlpack_exchange_api", NULL) : Py_NewRef(capsule);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static _Bool (*any_modes_set)(_Bool);      /* c10::impl::TorchDispatchModeTLS; of this thread */
static _Bool (*is_key_included)(uint16_t); /* c10::impl, of a DispatchKey; of this thread */
static uint16_t functorch;                 /* the key that each transform of torch.func includes */
static PyObject *lift, *ask;               /* functions of `bind`; strong */
static _Thread_local const uint64_t* included; /* torch's own word; NULL = not found yet */
static int (*import_own)(DLManagedTensorVersioned*, void**); /* torch's slot */
static DLPackExchangeAPI lifting[2]; /* torch's table, and `table`; each is made once */

/* Whether torch traces, or transforms, what this thread makes. GIL: held; may run Python.
 * Errors: -1 with an exception. */
static int traces(void) {
  if (any_modes_set && is_key_included) {
    static const uint64_t unknown = 1;
    if (included == NULL) { /* each mode and transform sets a bit of it: c10/core/impl */
      void* word = found_in("libc10.so", "_ZN3c104impl26raw_local_dispatch_key_setE");
      included = word ? word : &unknown;
    }
    return *included && (any_modes_set(0) || is_key_included(functorch));
  }
  if (ask == NULL) return 1;
  PyObject* answer = PyObject_CallNoArgs(ask);
  int is_true = answer ? PyObject_IsTrue(answer) : -1;
  Py_XDECREF(answer);
  return is_true;
}

/* torch's slot, and what torch.from_numpy does afterwards: a graph gets a constant. Owns, GIL,
 * Errors: as torch's slot. */
static int import(DLManagedTensorVersioned* made, void** out) {
  int failed = import_own(made, out), lifts;
  if (failed || *out == NULL || (lifts = traces()) == 0) return failed;
  PyObject* tensor = *out;
  *out = lifts > 0 ? PyObject_CallOneArg(lift, tensor) : NULL;
  Py_DECREF(tensor);
  return *out ? 0 : -1;
}

PyDoc_STRVAR(
    bind_doc,
    "bind(lift, ask, key, /)\n--\n\n"
    "Give `lift(tensor)`, which makes a tensor a constant of the graph; `ask()`, which says "
    "whether\nthere is one, if torch's libraries lack the functions called here; and the number "
    "of the dispatch key\nof torch.func, 0 if torch does not name it.");

static PyObject* bind(PyObject* module, PyObject* args) {
  PyObject *lifts, *asks;
  unsigned short key;
  if (!PyArg_ParseTuple(args, "OOH:bind", &lifts, &asks, &key)) return NULL;
  PY_LOCKED(module)
  if (any_modes_set == NULL) { /* once: threads read it; again if torch was not there */
    if (key) {
      void* modes = found_in("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb");
      void* keys =
          found_in("libc10.so", "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE");
      functorch = key;
      memcpy(&is_key_included, &keys, sizeof keys);
      memcpy(&any_modes_set, &modes, sizeof modes);
    }
    Py_XSETREF(ask, Py_NewRef(asks));
    Py_XSETREF(lift, Py_NewRef(lifts));
  }
  PY_UNLOCKED();
  Py_RETURN_NONE;
}

PyDoc_STRVAR(is_tracing_doc,
             "is_tracing()\n--\n\n"
             "Return whether torch traces, or transforms, what this thread makes.");

static PyObject* is_tracing(PyObject* module, PyObject* unused) {
  int is_true = traces();
  return is_true < 0 ? NULL : PyBool_FromLong(is_true);
}

PyDoc_STRVAR(lifting_table_doc,
             "lifting_table(table, /)\n--\n\n"
             "Return torch's own exchange table, or what `exchange_table` gave, with a slot that "
             "lifts what it\nmakes while torch traces. After `bind`.");

static PyObject* lifting_table(PyObject* module, PyObject* capsule) {
  const DLPackExchangeAPI* given = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (given == NULL) return NULL;
  given = py_exchange_known(&given->header);
  if (given == NULL || given->managed_tensor_to_py_object_no_sync == NULL)
    return Py_NewRef(capsule);
  DLPackExchangeAPI* made = &lifting[given == &table];
  PY_LOCKED(module)
  if (made->managed_tensor_to_py_object_no_sync == NULL) {
    import_own = given->managed_tensor_to_py_object_no_sync;
    *made = *given;
    made->managed_tensor_to_py_object_no_sync = import;
  }
  PY_UNLOCKED();
  return PyCapsule_New(made, "dlpack_exchange_api", NULL);
}

PyDoc_STRVAR(handle_doc,
             "handle(tensor, /)\n--\n\n"
             "Return what is read as the address of the tensor's implementation: torch's _cdata.");

static PyObject* handle(PyObject* module, PyObject* tensor) {
  if (Py_TYPE(tensor)->tp_basicsize < (Py_ssize_t)sizeof(tensor_head)) return PyLong_FromLong(0);
  return PyLong_FromVoidPtr(((tensor_head*)tensor)->tensor);
}

PyDoc_STRVAR(
    answers_doc,
    "answers(tensor, /)\n--\n\n"
    "Return (requires_grad, is_neg, is_conj, bytes of the storage, storage_offset) of a tensor "
    "whose handle is right\n"
    "and that has a storage.");

static PyObject* answers(PyObject* module, PyObject* tensor) {
  void** slot = &((tensor_head*)tensor)->tensor;
  int64_t bytes = -1, offset = -1;
  torch.storage_size(slot, &bytes);
  torch.storage_offset(slot, &offset);
  return Py_BuildValue("(NNNLL)", PyBool_FromLong(torch.requires_grad(*slot)),
                       PyBool_FromLong(torch.is_neg(slot)), PyBool_FromLong(torch.is_conj(slot)),
                       (long long)bytes, (long long)offset);
}

static PyMethodDef functions[] = {
    PY_NOARGS(guard_function), PY_VARARGS(exchange_table),
    PY_VARARGS(bind),          PY_NOARGS(is_tracing),
    PY_ONE(lifting_table),     PY_ONE(handle),
    PY_ONE(answers),           PY_END,
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_dlx_torch",
    .m_doc = "torch's guards, asked in C.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__dlx_torch(void) {
  return py_without_gil(PyModule_Create(&definition));
}
