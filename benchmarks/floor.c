/* The C floor of a conversion: calls to both exchange tables, one small managed tensor, and the
 * adapter's guards. It has no table of routes, no validation, no check of the consumer's limits and
 * no errors. The difference between `dlx.convert` and the floor is the cost of dlx.
 *
 * floor.py compiles this file and passes the adapter's data. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#endif

#include "core/arrow.h"
#include "dlx.h"

enum { MOST = 12 };

typedef struct {
  getter get;
  void* closure;
  PyCFunction call;
  uint32_t codes; /* bit n = called if the dtype code is n */
  int of_owner;
  PyObject* resolve; /* name of a method that clears the condition for good, or NULL */
} guard;

typedef struct {
  const DLPackExchangeAPI *give, *take; /* take NULL = wrap in a Holder */
  PyCFunction owner;                    /* NULL = the array itself */
  int n_guards, n_switches;
  guard guards[MOST];
  dlx_guard_function guard_function; /* the adapter's own guards in C, or NULL */
  PyObject *dicts[MOST], *names[MOST], *values[MOST];
} route;

typedef struct {
  DLManagedTensorVersioned managed;
  PyObject* owner;
  int64_t numbers[]; /* shape, then strides */
} borrowed;

typedef struct {
  PyObject_HEAD DLManagedTensorVersioned* managed;
} holder;

static PyTypeObject *holder_type, *blank_type;

/* Consumers may call this without the GIL. The floor does not handle releases while the interpreter
 * shuts down (c_src/base/gil.c): a benchmark drops its results before. */
static void release(DLManagedTensorVersioned* managed) {
  PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(((borrowed*)managed)->owner);
  PyGILState_Release(state);
  free(managed);
}

static void holder_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  DLManagedTensorVersioned* m = ((holder*)self)->managed;
  m->deleter(m);
  type->tp_free(self);
  Py_DECREF(type);
}

static int clear(const route* r, int of_owner, int code, PyObject* obj, PyObject* asked) {
  for (int i = 0; i < r->n_guards; i++) {
    const guard* g = &r->guards[i];
    if (g->of_owner != of_owner || !(g->codes >> code & 1)) continue;
    PyObject* answer = g->get ? g->get(asked, g->closure) : g->call(asked, NULL);
    Py_XDECREF(answer);
    if (answer == Py_False) continue;
    PyObject* resolved = answer && g->resolve ? PyObject_CallMethodNoArgs(obj, g->resolve) : NULL;
    if (resolved == NULL) return 0;
    Py_DECREF(resolved);
  }
  return 1;
}

static PyObject* run(PyObject* self, PyObject* obj) {
  const route* r = (const route*)PyBytes_AS_STRING(self);
  DLTensor t;
  for (int i = 0; i < r->n_switches; i++) {
    if (PyDict_GetItemWithError(r->dicts[i], r->names[i]) != r->values[i]) goto refused;
  }
  if (r->guard_function && !r->guard_function(obj, NULL)) goto refused;
  if (r->give->dltensor_from_py_object_no_sync(obj, &t) != 0) return NULL;
  size_t rank = (size_t)t.ndim;
  borrowed* made = malloc(sizeof *made + 2 * rank * sizeof(int64_t));
  if (made == NULL) return PyErr_NoMemory();
  made->managed = (DLManagedTensorVersioned){
      .version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}, .deleter = release, .dl_tensor = t};
  made->managed.dl_tensor.shape = memcpy(made->numbers, t.shape, rank * sizeof(int64_t));
  made->managed.dl_tensor.strides = memcpy(made->numbers + rank, t.strides, rank * sizeof(int64_t));
  made->owner = NULL;
  int is_clear = r->guard_function == NULL || r->guard_function(obj, &made->managed.dl_tensor);
  is_clear = is_clear && clear(r, 0, t.dtype.code, obj, obj);
  if (is_clear) {
    made->owner = r->owner ? r->owner(obj, NULL) : Py_NewRef(obj);
    is_clear = made->owner != NULL && clear(r, 1, t.dtype.code, obj, made->owner);
  }
  if (!is_clear) {
    Py_XDECREF(made->owner);
    free(made);
    goto refused;
  }
  if (r->take) {
    void* result = NULL;
    return r->take->managed_tensor_to_py_object_no_sync(&made->managed, &result) == 0 ? result
                                                                                      : NULL;
  }
  holder* wrapped = (holder*)holder_type->tp_alloc(holder_type, 0);
  if (wrapped == NULL) return NULL;
  wrapped->managed = &made->managed;
  return (PyObject*)wrapped;

refused:
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a guard is up");
  return NULL;
}

static PyMethodDef run_def = {"floor", run, METH_O, NULL};

/* The C function behind a method without arguments. Errors: NULL with TypeError. */
static PyCFunction function_of(PyObject* descriptor) {
  if (Py_IS_TYPE(descriptor, &PyMethodDescr_Type)) {
    const PyMethodDef* def = ((PyMethodDescrObject*)descriptor)->d_method;
    if (def->ml_flags == METH_NOARGS) return def->ml_meth;
  }
  PyErr_Format(PyExc_TypeError, "%R has no C function to call directly", descriptor);
  return NULL;
}

/* create_floor(give, take, guards, guard_function, switches, owner): a function, never freed. */
static PyObject* create_floor(PyObject* module, PyObject* args) {
  PyObject *give, *take, *guards, *guard_function, *switches, *owner;
  route r = {0};
  if (!PyArg_ParseTuple(args, "OOO!OO!O", &give, &take, &PyTuple_Type, &guards, &guard_function,
                        &PyTuple_Type, &switches, &owner))
    return NULL;
  if (PyTuple_GET_SIZE(guards) > MOST || PyTuple_GET_SIZE(switches) > MOST) {
    PyErr_SetString(PyExc_ValueError, "too many guards");
    return NULL;
  }
  r.give = PyCapsule_GetPointer(give, "dlpack_exchange_api");
  if (r.give == NULL) return NULL;
  if (take != Py_None && (r.take = PyCapsule_GetPointer(take, "dlpack_exchange_api")) == NULL)
    return NULL;
  if (guard_function != Py_None) {
    r.guard_function =
        (dlx_guard_function)PyCapsule_GetPointer(guard_function, "dlx_guard_function");
    if (r.guard_function == NULL) return NULL;
  }
  if (owner != Py_None && (r.owner = function_of(owner)) == NULL) return NULL;
  for (; r.n_guards < PyTuple_GET_SIZE(guards); r.n_guards++) {
    PyObject *descriptor, *resolve;
    guard* g = &r.guards[r.n_guards];
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(guards, r.n_guards), "OIpO", &descriptor, &g->codes,
                          &g->of_owner, &resolve))
      return NULL;
    g->resolve = resolve == Py_None ? NULL : Py_NewRef(resolve);
    if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
      g->get = ((PyGetSetDescrObject*)descriptor)->d_getset->get;
      g->closure = ((PyGetSetDescrObject*)descriptor)->d_getset->closure;
    } else if ((g->call = function_of(descriptor)) == NULL) {
      return NULL;
    }
  }
  for (int i = 0; i < PyTuple_GET_SIZE(switches); i++, r.n_switches++) {
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(switches, i), "O!OO", &PyDict_Type, &r.dicts[i],
                          &r.names[i], &r.values[i]))
      return NULL;
    Py_INCREF(r.dicts[i]);
    Py_INCREF(r.names[i]);
    Py_INCREF(r.values[i]);
  }
  PyObject* kept = PyBytes_FromStringAndSize((const char*)&r, sizeof r);
  if (kept == NULL) return NULL;
  PyObject* function = PyCFunction_New(&run_def, kept);
  Py_DECREF(kept);
  return function;
}

/* read_arrow(obj, method): call __arrow_c_array__ or __arrow_c_stream__ of an object, and the
 * library's functions that every reader calls: the type, each batch, the end, all releases. */
static PyObject* read_arrow(PyObject* module, PyObject* args) {
  PyObject *obj, *method;
  if (!PyArg_ParseTuple(args, "OU", &obj, &method)) return NULL;
  PyObject* capsule = PyObject_CallMethodNoArgs(obj, method);
  if (capsule == NULL) return NULL;
  if (PyCapsule_CheckExact(capsule)) {
    struct ArrowArrayStream* stream = PyCapsule_GetPointer(capsule, "arrow_array_stream");
    struct ArrowSchema schema;
    struct ArrowArray array;
    int failed = stream == NULL || stream->get_schema(stream, &schema) != 0;
    if (!failed) {
      while (!(failed = stream->get_next(stream, &array) != 0) && array.release)
        array.release(&array);
      schema.release(&schema);
    }
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the stream failed");
  }
  Py_DECREF(capsule); /* its destructor releases the contents unless they were moved */
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

/* An empty object with the sizes of dlx.Tensor for malloc and CPython's collector. */
typedef struct {
  PyObject_HEAD void* block;
  void* unused[3];
} blank;

enum { BLOCK = 120 /* bytes that dlx allocates for a tensor of one dimension */ };

static void blank_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  free(((blank*)self)->block);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

static int blank_traverse(PyObject* self, visitproc visit, void* arg) {
  return 0;
}

/* list_objects(n): a list of n such objects. */
static PyObject* list_objects(PyObject* module, PyObject* number) {
  Py_ssize_t n = PyLong_AsSsize_t(number);
  PyObject* list = n < 0 ? NULL : PyList_New(n);
  for (Py_ssize_t i = 0; list && i < n; i++) {
    blank* each = PyObject_GC_New(blank, blank_type);
    if (each) {
      each->block = calloc(1, BLOCK);
      PyList_SET_ITEM(list, i, (PyObject*)each);
    } else {
      Py_CLEAR(list);
    }
  }
  return list;
}

typedef struct {
  const DLPackExchangeAPI* take;
  Py_ssize_t n;
  DLManagedTensorVersioned* made;
} ready;

static void forget(DLManagedTensorVersioned* managed) {}

/* Return a list of the results of the target's import slot for each tensor. */
static PyObject* import_all(PyObject* self, PyObject* unused) {
  const ready* r = (const ready*)PyBytes_AS_STRING(self);
  PyObject* list = PyList_New(r->n);
  for (Py_ssize_t i = 0; list && i < r->n; i++) {
    void* result = NULL;
    if (r->take->managed_tensor_to_py_object_no_sync(&r->made[i], &result) == 0)
      PyList_SET_ITEM(list, i, result);
    else
      Py_CLEAR(list);
  }
  return list;
}

static PyMethodDef import_def = {"import_all", import_all, METH_NOARGS, NULL};

/* importer(give, take, arrays): a function that passes tensors over the memory of all arrays of
 * a list, prepared beforehand, to a target's import slot. It is never freed. */
static PyObject* importer(PyObject* module, PyObject* args) {
  PyObject *give, *take, *arrays;
  if (!PyArg_ParseTuple(args, "OOO!", &give, &take, &PyList_Type, &arrays)) return NULL;
  const DLPackExchangeAPI* from = PyCapsule_GetPointer(give, "dlpack_exchange_api");
  ready r = {PyCapsule_GetPointer(take, "dlpack_exchange_api"), PyList_GET_SIZE(arrays), NULL};
  if (from == NULL || r.take == NULL) return NULL;
  r.made = calloc((size_t)r.n + 1, sizeof *r.made);
  if (r.made == NULL) return PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < r.n; i++) {
    DLTensor* t = &r.made[i].dl_tensor;
    r.made[i].version = (DLPackVersion){DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR};
    r.made[i].deleter = forget;
    if (from->dltensor_from_py_object_no_sync(PyList_GET_ITEM(arrays, i), t) != 0) return NULL;
    if (t->strides == NULL && t->ndim) return PyErr_Format(PyExc_ValueError, "no strides");
    size_t row = (size_t)t->ndim * sizeof(int64_t);
    int64_t* numbers = malloc(2 * row + 1);
    if (numbers == NULL) return PyErr_NoMemory();
    t->shape = memcpy(numbers, t->shape, row);
    t->strides = memcpy(numbers + t->ndim, t->strides, row);
  }
  Py_INCREF(arrays);
  PyObject* kept = PyBytes_FromStringAndSize((const char*)&r, sizeof r);
  PyObject* function = kept ? PyCFunction_New(&import_def, kept) : NULL;
  Py_XDECREF(kept);
  return function;
}

/* mark(label): under valgrind, begin to count, or dump the counts since the last mark. */
static PyObject* mark(PyObject* module, PyObject* label) {
#ifdef CALLGRIND_DUMP_STATS_AT
  const char* text = PyUnicode_AsUTF8(label);
  if (text == NULL) return NULL;
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_DUMP_STATS_AT(text);
#endif
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"create_floor", create_floor, METH_VARARGS, NULL},
    {"importer", importer, METH_VARARGS, NULL},
    {"mark", mark, METH_O, NULL},
    {"list_objects", list_objects, METH_O, NULL},
    {"read_arrow", read_arrow, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "floor", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_floor(void) {
  static PyType_Slot slots[] = {{Py_tp_dealloc, holder_dealloc}, {0, NULL}};
  static PyType_Spec spec = {"floor.Holder", sizeof(holder), 0, Py_TPFLAGS_DEFAULT, slots};
  static PyType_Slot blank_slots[] = {
      {Py_tp_dealloc, blank_dealloc}, {Py_tp_traverse, blank_traverse}, {0, NULL}};
  static PyType_Spec blank_spec = {"floor.Blank", sizeof(blank), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, blank_slots};
  holder_type = (PyTypeObject*)PyType_FromSpec(&spec);
  blank_type = (PyTypeObject*)PyType_FromSpec(&blank_spec);
  PyObject* module = holder_type && blank_type ? PyModule_Create(&definition) : NULL;
#ifdef Py_GIL_DISABLED
  if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
  return module;
}
