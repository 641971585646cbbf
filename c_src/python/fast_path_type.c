/* The fast path as Python sees it: a callable around the Python function `convert`, in the manner
 * of functools.lru_cache's wrapper. A call for an object and a target on a known route, with simple
 * options only, is answered in C; any other goes to the Python function with the same arguments. */

#include "route.h"

#include <structmember.h>

/* ---- calls and their options ----------------------------------------------------------------- */

static PyObject *to_name, *copy_name, *readonly_name, *detach_name, *device_name, *lazy_name,
    *like_name, *cpu_name, *own_name, *qualname_name, *module_name; /* interned, as the words of a
                                                                       call are */

/* What stands for the host, beside "cpu"; NULL where there is no more. None is ever replaced, so
 * that threads read them without a lock. */
static _Atomic(PyObject*) hosts[8];

/* Errors: 0 = ask Python, unless an exception is set. */
static int names_host(PyObject* value) {
  if (value == cpu_name) return 1;
  for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
    PyObject* host = atomic_load_explicit(&hosts[i], memory_order_acquire);
    if (host == NULL) return 0;
    int same = Py_IS_TYPE(value, Py_TYPE(host)) ? PyObject_RichCompareBool(value, host, Py_EQ) : 0;
    if (same < 0) py_error_forget();
    if (same) return same == 1;
  }
  return 0;
}

/* One option of a call. Errors: 0 where only Python understands it, unless an exception is set. */
static int read_option(unsigned* options, PyObject* name, PyObject* value) {
  if (name == copy_name) {
    *options |= value == Py_True ? DLX_COPIES : value == Py_False ? DLX_SHARES : 0;
    return value == Py_True || value == Py_False || value == Py_None;
  }
  if (name == readonly_name) { /* the Python path checks the value where it matters */
    for (Py_ssize_t i = 0; py_hooks.readonly_words && i < PyTuple_GET_SIZE(py_hooks.readonly_words);
         i++) {
      if (value != PyTuple_GET_ITEM(py_hooks.readonly_words, i)) continue;
      *options |= i == 1 ? DLX_KEEPS_READONLY : i ? DLX_UNMARKS : 0;
      return 1;
    }
    return 0;
  }
  if (name == detach_name) {
    if (value == Py_True) *options |= DLX_EXAMINES | DLX_DETACHES;
    return value == Py_True || value == Py_False;
  }
  if (name == lazy_name) {
    if (value == Py_True) *options |= DLX_VIEWS;
    return value == Py_True || value == Py_False;
  }
  if (name == device_name) { /* arrays of devices are moved by the Python path */
    int is_host = value != Py_None && names_host(value);
    if (is_host) *options |= DLX_EXAMINES | DLX_HOST_ONLY | DLX_NAMES_DEVICE;
    return is_host || value == Py_None;
  }
  return 0;
}

/* The target of a call with options; NULL where only Python understands them. */
static PyObject* read_options(unsigned* options, PyObject* const* args, Py_ssize_t n,
                              PyObject* names) {
  PyObject* to = n == 2 ? args[1] : NULL;
  if (n != 1 && n != 2) return NULL;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    if (name == to_name && n == 1) {
      to = args[1 + i];
    } else if (!read_option(options, name, args[n + i])) {
      return NULL;
    }
  }
  return to;
}

/* A container of another framework that becomes a list or dict: `children` gives that, or a pair of
 * that or None, and what the container answered, or raised, which the Python path does not ask
 * again. */
static PyObject* call_children(PyObject* callable, py_route* r, PyObject* obj, PyObject* to,
                               unsigned options) {
  py_route_enter(r);
  PyObject* may_copy = options & (DLX_COPIES | DLX_SHARES) ? Py_False : Py_True;
  PyObject* given = PyObject_CallFunctionObjArgs(r->children, obj, may_copy, NULL);
  py_route_leave(r);
  if (given == NULL) {
    py_error_forget();
    return NULL;
  }
  int has_answer = PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == 2;
  PyObject* plain = has_answer ? PyTuple_GET_ITEM(given, 0) : given;
  PyObject* result = PyDict_CheckExact(plain) || PyList_CheckExact(plain)
                         ? py_tree_run(callable, plain, to, options)
                         : NULL; /* by Python */
  if (result == NULL && has_answer && !PyErr_Occurred()) {
    PyObject* answer = PyTuple_GET_ITEM(given, 1);
    int is_raised = PyExceptionInstance_Check(answer);
    py_producer_leave(obj, is_raised ? NULL : answer, is_raised ? answer : NULL);
  }
  PyObject* answers = py_producer_aside();
  py_pending pending = py_pending_save(); /* what is released may run Python */
  Py_DECREF(given);
  py_pending_restore(pending);
  py_producer_back(answers);
  return result;
}

/* The Python function, with the same arguments. What it raises is completed in Python, which may
 * raise another error in its place. */
static PyObject* call_python(PyObject* callable, PyObject* const* args, size_t nargsf,
                             PyObject* names) {
  PyObject* wrapped = ((FastPathObject*)callable)->wrapped;
  PyObject* result = py_producer_python(wrapped, args, nargsf, names);
  if (result || py_hooks.refused == NULL || !PyErr_ExceptionMatches(PyExc_Exception)) return result;
  py_pending pending = py_pending_save();
  PyErr_NormalizeException(&pending.type, &pending.value, &pending.traceback);
  if (pending.traceback) PyException_SetTraceback(pending.value, pending.traceback);
  PyObject* done = PyObject_CallFunctionObjArgs(py_hooks.refused, wrapped, names ? names : Py_None,
                                                pending.value, NULL);
  Py_XSETREF(pending.traceback, PyException_GetTraceback(pending.value));
  if (done) {
    Py_DECREF(done);
    py_pending_restore(pending);
    return NULL;
  }
  Py_XDECREF(pending.type);
  Py_XDECREF(pending.value);
  Py_XDECREF(pending.traceback);
  return NULL;
}

/* convert(obj, like=...): the target of an array on the host, which the result shall be on as well.
 */
static PyObject* call_like(PyObject* callable, PyObject* const* args) {
  PyObject* to = py_fast_path_like(callable, args[1]);
  py_route* r = to ? py_fast_path_route(callable, Py_TYPE(args[0]), to) : NULL;
  PyObject* result = NULL;
  if (r && r->is_fast_path == 2) {
    result = py_producer_run(callable, r, args[0], to, DLX_EXAMINES | DLX_HOST_ONLY);
  } else if (r && r->is_fast_path && !r->is_same) {
    result = py_fast_path_run(callable, r, args[0], to, DLX_EXAMINES | DLX_HOST_ONLY);
  } else if (r && r->is_same) {
    PyObject* own = py_fast_path_like(callable, args[0]);
    if (own == to) result = Py_NewRef(args[0]); /* it is on the host, too */
    Py_XDECREF(own);
  }
  Py_XDECREF(to);
  return result;
}

/* convert(obj, to=..., lazy=True) of no array. */
static PyObject* call_view(PyObject* callable, PyObject* obj, PyObject* to, unsigned options) {
  PyObject *view = ((FastPathObject*)callable)->view, *args[] = {obj, to};
  if (view == NULL || options != DLX_VIEWS) return NULL;
  PyObject* result = PyObject_Vectorcall(view, args, 2, NULL);
  if (result != Py_None) return result;
  Py_DECREF(result);
  return NULL;
}

/* A call on the fast path. Owns: the result is new. GIL: needed; may run Python. Errors: NULL, as
 * py_fast_path_route. */
static inline PyObject* answer(PyObject* callable, PyObject* const* args, size_t nargsf,
                               PyObject* names) {
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  unsigned options = 0;
  PyObject *own = ((FastPathObject*)callable)->to, *to = NULL, *result = NULL;
  if (own) {
    to = n == 1 && names == NULL ? own : NULL;
  } else if (names == NULL) {
    to = n == 2 ? args[1] : NULL;
  } else if (n == 1 && PyTuple_GET_SIZE(names) == 1 && PyTuple_GET_ITEM(names, 0) == to_name) {
    to = args[1];
  } else {
    to = read_options(&options, args, n, names);
  }
  if (to == NULL && own == NULL && names && n == 1 && PyTuple_GET_SIZE(names) == 1 &&
      PyTuple_GET_ITEM(names, 0) == like_name)
    return call_like(callable, args);
  if (to == NULL) return NULL;
  py_route* r = py_route_find(Py_TYPE(args[0]), to);
  if (options & DLX_VIEWS) {
    if (r == NULL || !r->is_fast_path) {
      result = call_view(callable, args[0], to, options);
      if (result || PyErr_Occurred() || r || py_tree_takes(Py_TYPE(args[0]))) return result;
      r = py_fast_path_route(callable, Py_TYPE(args[0]), to);
      if (r == NULL || !r->is_fast_path) return NULL;
    }
    options &= ~DLX_VIEWS;
  }
  /* As single arrays (_borrow, dlx.from_dlpack) lists have a route: none. */
  if ((r == NULL || !r->is_fast_path) && own == NULL && py_tree_takes(Py_TYPE(args[0]))) {
    result = py_tree_run(callable, args[0], to, options);
  } else {
    if (r == NULL) r = py_fast_path_route(callable, Py_TYPE(args[0]), to);
    if (r && r->is_same) {
      result = py_fast_path_run_same(r, args[0], options);
    } else if (r && r->is_fast_path == 1) {
      result = py_fast_path_run(callable, r, args[0], to, options);
    } else if (r && r->is_fast_path) {
      result = py_producer_run(callable, r, args[0], to, options);
    } else if (r && r->children && own == NULL) {
      result = call_children(callable, r, args[0], to, options);
    }
  }
  return result;
}

static PyObject* fast_path_call(PyObject* callable, PyObject* const* args, size_t nargsf,
                                PyObject* names) {
  py_routes_begin();
  PyObject* result = answer(callable, args, nargsf, names);
  py_routes_end();
  if (result || PyErr_Occurred()) return result;
  return call_python(callable, args, nargsf, names);
}

static int intern_words(void) {
  struct {
    PyObject** where;
    const char* word;
  } words[] = {{&to_name, "to"},
               {&copy_name, "copy"},
               {&readonly_name, "readonly"},
               {&detach_name, "detach"},
               {&like_name, "like"},
               {&device_name, "device"},
               {&lazy_name, "lazy"},
               {&cpu_name, "cpu"},
               {&own_name, "dlx"},
               {&qualname_name, "__qualname__"},
               {&module_name, "__module__"}};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    if ((*words[i].where = PyUnicode_InternFromString(words[i].word)) == NULL) return -1;
  }
  return 0;
}

/* ---- the type -------------------------------------------------------------------------------- */

static PyObject* fast_path_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static char* names[] = {"wrapped", "learn", "failed", "to", "view", NULL};
  PyObject *wrapped, *learn, *failed, *to = NULL, *view = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO|UO:FastPathFunction", names, &wrapped,
                                   &learn, &failed, &to, &view))
    return NULL;
  FastPathObject* self = (FastPathObject*)type->tp_alloc(type, 0);
  if (self == NULL) return NULL;
  self->vectorcall = learn == Py_None ? call_python : fast_path_call;
  self->wrapped = Py_NewRef(wrapped);
  self->learn = Py_NewRef(learn);
  self->failed = Py_NewRef(failed);
  self->to = Py_XNewRef(to);
  self->view = Py_XNewRef(view);
#if defined Py_GIL_DISABLED && PY_VERSION_HEX >= 0x030E0000
  /* Else all threads that call it count references to it on one word. */
  PyUnstable_Object_EnableDeferredRefcount((PyObject*)self);
#endif
  return (PyObject*)self;
}

static int fast_path_traverse(PyObject* object, visitproc visit, void* arg) {
  FastPathObject* self = (FastPathObject*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->wrapped);
  Py_VISIT(self->learn);
  Py_VISIT(self->failed);
  Py_VISIT(self->to);
  Py_VISIT(self->view);
  Py_VISIT(self->dict);
  return 0;
}

static int fast_path_clear(PyObject* object) {
  FastPathObject* self = (FastPathObject*)object;
  Py_CLEAR(self->wrapped);
  Py_CLEAR(self->learn);
  Py_CLEAR(self->failed);
  Py_CLEAR(self->to);
  Py_CLEAR(self->view);
  Py_CLEAR(self->dict);
  return 0;
}

static void fast_path_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (((FastPathObject*)object)->weakrefs) PyObject_ClearWeakRefs(object);
  fast_path_clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

static PyObject* fast_path_get(PyObject* self, PyObject* obj, PyObject* type) {
  if (obj == NULL || obj == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, obj);
}

/* As a function's: help() and notebooks show it. Owns: a new reference. GIL: needed. Errors: NULL
 * with an exception set. */
static PyObject* fast_path_repr(PyObject* self) {
  PyObject *dict = PyObject_GenericGetDict(self, NULL), *name = NULL, *module = NULL, *text = NULL;
  if (dict == NULL) return NULL;
  if ((name = py_dict_get(dict, qualname_name)) && (module = py_dict_get(dict, module_name)))
    text = PyUnicode_FromFormat("<function %S.%S>", module, name); /* which runs their Python */
  else if (!PyErr_Occurred())
    text = PyUnicode_FromFormat("<function at %p>", self);
  Py_XDECREF(name);
  Py_XDECREF(module);
  Py_DECREF(dict);
  return text;
}

static PyObject* fast_path_reduce(PyObject* self, PyObject* unused) {
  return PyObject_GetAttr(self, qualname_name); /* pickled by name, as functions are */
}

static PyObject* fast_path_copy(PyObject* self, PyObject* unused) {
  return Py_NewRef(self);
}

PyDoc_STRVAR(
    fast_path_borrow_doc,
    "_borrow(obj, to, /)\n--\n\n"
    "Examine, export and check an array by its route: a dlx.Tensor for _load; `obj` itself "
    "where that is the\nresult; None where Python must be asked.");

static PyObject* fast_path_borrow(PyObject* callable, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2 && nargs != 3) {
    PyErr_SetString(PyExc_TypeError, "_borrow takes an array and a target");
    return NULL;
  }
  /* The Python path makes the copies. */
  unsigned options = DLX_SHARES | DLX_HOST_ONLY;
  if (nargs == 3 && args[2] == Py_True) options |= DLX_COPIES;
  uint32_t resolvable;
  DLManagedTensorVersioned* made = NULL;
  py_routes_begin();
  py_route* r = py_fast_path_route(callable, Py_TYPE(args[0]), args[1]);
  PyObject* same = NULL;
  if (r && r->is_fast_path && r->is_same) {
    same = py_fast_path_same(r, args[0], 0);
  } else if (r && r->is_fast_path) {
    py_route_enter(r);
    made = py_fast_path_borrow(r, args[0], options, &resolvable);
    py_route_leave(r);
  }
  py_routes_end();
  if (same) return same;
  if (made) return py_tensor_wrap(made);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(
    fast_path_load_doc,
    "_load(tensor, obj, to, /)\n--\n\n"
    "Hand over the tensor that _borrow returned and consume it. NotImplemented where the route "
    "no longer exists; then it is not consumed.");

static PyObject* fast_path_load(PyObject* callable, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !Py_IS_TYPE(args[0], &py_tensor_type)) {
    PyErr_SetString(PyExc_TypeError, "_load takes what _borrow returned, the array and the target");
    return NULL;
  }
  if (py_tensor_managed(args[0]) == NULL) return NULL;
  PyObject* result = NULL;
  py_routes_begin();
  py_route* r = py_route_find(Py_TYPE(args[1]), args[2]);
  if (r == NULL || !r->is_fast_path || r->is_same) {
    result = Py_NewRef(Py_NotImplemented);
  } else {
    DLManagedTensorVersioned* made = ((TensorObject*)args[0])->managed;
    ((TensorObject*)args[0])->managed = NULL;
    py_route_enter(r);
    result = py_fast_path_hand_over(callable, r, made, args[1], args[2], NULL, 0);
    py_route_leave(r);
  }
  py_routes_end();
  return result;
}

PyDoc_STRVAR(fast_path_overlap_doc,
             "_overlap(a, b, /)\n--\n\n"
             "Say whether two arrays of host memory, whose elements leave no gaps, have a byte in "
             "common; None where\nPython must be asked.");

/* The bytes of one array, from `low` to below `high`; without gaps where `is_run`. */
typedef struct {
  int64_t low, high;
  int is_run;
} place;

/* Errors: 0 = ask Python. */
static int place_of(const DLTensor* t, uint64_t flags, place* out) {
  if (t->device.device_type != kDLCPU || t->dtype.bits * t->dtype.lanes % 8) return 0;
  dlx_extent(t, flags, &out->low, &out->high);
  out->low += (int64_t)(uintptr_t)t->data;
  out->high += (int64_t)(uintptr_t)t->data;
  out->is_run = (dlx_layout(t) & ~(uint32_t)DLX_LAYOUT_PERMUTED) == 0;
  return 1;
}

/* Of what can be exported only. GIL: needed; may run Python. Errors: 0, as py_fast_path_borrow. */
static int place_of_export(py_route* r, PyObject* obj, place* out) {
  uint32_t resolvable;
  unsigned options = DLX_COPIES | DLX_SHARES | DLX_DETACHES | DLX_HOST_ONLY;
  DLManagedTensorVersioned* made = py_fast_path_borrow(r, obj, options, &resolvable);
  int is_known = made && place_of(&made->dl_tensor, made->flags, out);
  if (made) dlx_managed_release(made);
  return is_known;
}

/* Errors: 0 = ask Python, unless an exception is set. */
static int place_by_route(py_route* r, PyObject* obj, place* out) {
  if (r->is_same) {
    DLManagedTensorVersioned* m =
        r->type == &py_tensor_type ? py_tensor_inside((TensorObject*)obj) : NULL;
    return m && place_of(&m->dl_tensor, m->flags, out);
  }
  int is_known = r->exports == &py_buffer_table && py_fast_path_is_open(r, obj)
                     ? py_buffer_bytes(obj, &out->low, &out->high)
                     : 0;
  if (is_known == 0) return !PyErr_Occurred() && place_of_export(r, obj, out);
  out->is_run = 1;
  return is_known > 0;
}

static PyObject* fast_path_overlap(PyObject* callable, PyObject* const* args, Py_ssize_t nargs) {
  place at[2];
  if (nargs != 2) {
    PyErr_SetString(PyExc_TypeError, "_overlap takes two arrays");
    return NULL;
  }
  int n = 0;
  py_routes_begin();
  for (; n < 2; n++) {
    py_route* r = py_fast_path_route(callable, Py_TYPE(args[n]), own_name);
    if (r == NULL || !r->is_fast_path) break;
    py_route_enter(r);
    int is_known = place_by_route(r, args[n], &at[n]);
    py_route_leave(r);
    if (!is_known) break;
  }
  py_routes_end();
  if (PyErr_Occurred()) return NULL;
  if (n < 2) Py_RETURN_NONE;
  int is_empty = at[0].low == at[0].high || at[1].low == at[1].high;
  int apart = is_empty || at[0].low >= at[1].high || at[1].low >= at[0].high;
  if (!apart && !(at[0].is_run && at[1].is_run)) Py_RETURN_NONE;
  return PyBool_FromLong(!apart);
}

PyDoc_STRVAR(fast_path_exchange_api_doc,
             "_exchange_api(to, python_path, /)\n--\n\n"
             "Return the exchange table for any array in a capsule; python_path(obj) makes a "
             "dlx.Tensor where there is no\nroute.");

static PyObject* fast_path_exchange_api(PyObject* callable, PyObject* const* args,
                                        Py_ssize_t nargs) {
  if (nargs == 2) return py_exchange_any(callable, args[0], args[1]);
  PyErr_SetString(PyExc_TypeError, "_exchange_api takes a target and a function");
  return NULL;
}

static PyMethodDef fast_path_methods[] = {
    {"_overlap", (PyCFunction)(void (*)(void))fast_path_overlap, METH_FASTCALL,
     fast_path_overlap_doc},
    {"_borrow", (PyCFunction)(void (*)(void))fast_path_borrow, METH_FASTCALL, fast_path_borrow_doc},
    {"_load", (PyCFunction)(void (*)(void))fast_path_load, METH_FASTCALL, fast_path_load_doc},
    {"_exchange_api", (PyCFunction)(void (*)(void))fast_path_exchange_api, METH_FASTCALL,
     fast_path_exchange_api_doc},
    {"__reduce__", fast_path_reduce, METH_NOARGS, NULL},
    {"__copy__", fast_path_copy, METH_NOARGS, NULL},
    {"__deepcopy__", fast_path_copy, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef fast_path_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPathObject, vectorcall), 1, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(FastPathObject, dict), 1, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(FastPathObject, weakrefs), 1, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef fast_path_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(fast_path_doc,
             "FastPathFunction(wrapped, learn, failed, to=None, view=None)\n--\n\n"
             "A function with a fast path in C; see dlx.convert. `to`: the target of a function of "
             "one array. `view`:\nview(obj, to) gives a lazy view, or None. Where `learn` is None "
             "calls go to Python.");

static PyType_Slot fast_path_slots[] = {
    {Py_tp_new, fast_path_new},           {Py_tp_dealloc, fast_path_dealloc},
    {Py_tp_traverse, fast_path_traverse}, {Py_tp_clear, fast_path_clear},
    {Py_tp_call, PyVectorcall_Call},      {Py_tp_repr, fast_path_repr},
    {Py_tp_descr_get, fast_path_get},     {Py_tp_methods, fast_path_methods},
    {Py_tp_getset, fast_path_attributes}, {Py_tp_members, fast_path_members},
    {Py_tp_doc, (void*)fast_path_doc},    {0, NULL},
};

static PyType_Spec fast_path_spec = {
    .name = "dlx.function", /* as users are shown it */
    .basicsize = sizeof(FastPathObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = fast_path_slots,
};

PyDoc_STRVAR(
    set_traced_doc,
    "set_traced(function, /)\n--\n\n"
    "Register what compilers that trace Python code read in place of a call: `__call__` of "
    "the type. Calls go on in C.");

/* Owns: keeps a reference to `function`. GIL: needed. Errors: NULL with an exception.
 * Into the type's dict, not by setattr: that would let Python answer every call. */
static PyObject* set_traced(PyObject* module, PyObject* function) {
  PyObject* type = PyObject_GetAttrString(module, "FastPathFunction");
  if (type == NULL) return NULL;
  int failed = PyDict_SetItemString(((PyTypeObject*)type)->tp_dict, "__call__", function);
  PyType_Modified((PyTypeObject*)type);
  Py_DECREF(type);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(add_host_doc,
             "add_host(device, /)\n--\n\n"
             "Register an object of an immutable type that stands for the host where a call says "
             "`device`.");

/* Owns: keeps a reference. GIL: needed; may run Python. Errors: NULL with an exception. */
static PyObject* add_host(PyObject* module, PyObject* device) {
  size_t i = 0;
  PyObject* none = NULL;
  if (names_host(device)) Py_RETURN_NONE;
  if (PyErr_Occurred()) return NULL;
  Py_INCREF(device);
  while (i < sizeof hosts / sizeof *hosts &&
         !atomic_compare_exchange_strong(&hosts[i], &none, device)) {
    none = NULL;
    i++;
  }
  if (i == sizeof hosts / sizeof *hosts) Py_DECREF(device); /* there are enough: Python is asked */
  Py_RETURN_NONE;
}

static PyMethodDef fast_path_functions[] = {
    PY_ONE(add_host),
    PY_ONE(set_traced),
    PY_END,
};

int py_fast_path_init(PyObject* module) {
  if (intern_words() < 0 || PyModule_AddFunctions(module, fast_path_functions) < 0) return -1;
  PyObject* type = PyType_FromSpec(&fast_path_spec);
  if (type == NULL) return -1;
  int failed = PyModule_AddObjectRef(module, "FastPathFunction", type);
  Py_DECREF(type);
  return failed;
}
