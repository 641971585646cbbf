/* FastPathFunction: a callable around the Python function `convert`, like functools.lru_cache's
 * wrapper. Calls for a known pair of type and target with simple options run in C; all others go to
 * the Python function with the same arguments. */

#include "function.h"
#include "convert/pairs.h"

#include <structmember.h>

/* ---- calls ----------------------------------------------------------------------------------- */

/* The hook completes errors of the Python function, and may raise another error instead. */
static PyObject* call_python(py_call* call, PyObject* const* args, size_t nargsf, PyObject* names) {
  PyObject* result = py_call_python(call, args, nargsf, names);
  if (result || py_hooks.refused == NULL || !PyErr_ExceptionMatches(PyExc_Exception)) return result;
  py_pending pending = py_pending_save();
  PyErr_NormalizeException(&pending.type, &pending.value, &pending.traceback);
  if (pending.traceback) PyException_SetTraceback(pending.value, pending.traceback);
  PyObject* done = PyObject_CallFunctionObjArgs(py_hooks.refused, call->function->wrapped,
                                                names ? names : Py_None, pending.value, NULL);
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

static PyObject* call_wrapped(PyObject* self, PyObject* const* args, size_t nargsf,
                              PyObject* names) {
  py_call call = {.function = (FastPathObject*)self};
  return call_python(&call, args, nargsf, names);
}

/* convert(obj, like=...): an example on the host names the framework; results are on the host. */
static PyObject* convert_like(py_call* call, PyObject* obj, PyObject* like) {
  PyObject* to = py_target_like(call, like);
  if (to == NULL) return NULL;
  call->to = to;
  PyObject* result = py_convert(call, obj);
  Py_DECREF(to);
  return result;
}

/* For functions of one array, which take no containers. */
static PyObject* convert_array(py_call* call, PyObject* obj) {
  py_pair pair;
  if (!py_pair_learn(call->function, Py_TYPE(obj), call->to, &pair)) return NULL;
  PyObject* result = py_convert_array(call, &pair, obj);
  py_pair_release(&pair);
  return result;
}

static PyObject* convert_lazily(py_call* call, PyObject* obj) {
  PyObject *function = call->function->view, *args[] = {obj, call->to};
  int is_lazy = call->options == DLX_VIEWS;
  call->options &= ~(unsigned)DLX_VIEWS;
  PyObject* result = py_is_tree(Py_TYPE(obj)) ? NULL : convert_array(call, obj);
  if (result || PyErr_Occurred() || function == NULL || !is_lazy) return result;
  result = PyObject_Vectorcall(function, args, 2, NULL);
  if (result == Py_None) Py_CLEAR(result);
  return result;
}

/* convert(obj, out=...): return `out`, or NULL for the Python path. */
static PyObject* convert_into(PyObject* const* args) {
  PyObject* done = py_hooks.fill ? PyObject_Vectorcall(py_hooks.fill, args, 2, NULL) : NULL;
  if (done == NULL && PyErr_Occurred()) py_error_forget(); /* the Python path raises it again */
  Py_XDECREF(done);
  return done == Py_True ? Py_NewRef(args[1]) : NULL;
}

static PyObject* fast_path_call(PyObject* self, PyObject* const* args, size_t nargsf,
                                PyObject* names) {
  py_call call = {.function = (FastPathObject*)self};
  Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  PyObject *like, *result = NULL;
  if (n == 1 && names && PyTuple_GET_SIZE(names) == 1 && call.function->to == NULL &&
      PyTuple_GET_ITEM(names, 0) == py_name_to) { /* the usual call */
    call.to = args[1];
    py_maps_begin();
    result = py_convert(&call, args[0]);
    if (result == NULL) result = py_move(&call, args[0]);
    py_maps_end();
  } else if (n == 1 && names && PyTuple_GET_SIZE(names) == 1 && call.function->to == NULL &&
             PyTuple_GET_ITEM(names, 0) == py_name_out) {
    result = convert_into(args);
  } else if (py_options_read(&call, args, n, names, &like)) {
    py_maps_begin();
    int may_move = like == NULL && call.options == 0 && call.function->to == NULL;
    result = like                       ? convert_like(&call, args[0], like)
             : call.options & DLX_MOVES ? py_move(&call, args[0])
             : call.options & DLX_VIEWS ? convert_lazily(&call, args[0])
             : call.function->to        ? convert_array(&call, args[0])
                                        : py_convert(&call, args[0]);
    if (result == NULL && may_move) result = py_move(&call, args[0]);
    py_maps_end();
  }
  if (result || PyErr_Occurred()) {
    if (call.responses) py_drop(call.responses);
    return result;
  }
  return call_python(&call, args, nargsf, names);
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
  self->vectorcall = learn == Py_None ? call_wrapped : fast_path_call;
  self->wrapped = Py_NewRef(wrapped);
  self->learn = Py_NewRef(learn);
  self->failed = Py_NewRef(failed);
  self->to = Py_XNewRef(to);
  self->view = Py_XNewRef(view);
#if defined Py_GIL_DISABLED && PY_VERSION_HEX >= 0x030E0000
  /* Otherwise all calling threads contend for one reference count. */
  PyUnstable_Object_EnableDeferredRefcount((PyObject*)self);
#endif
  return (PyObject*)self;
}

PyDoc_STRVAR(fast_path_bind_doc,
             "_bind(*, wrapped, learn, failed, view)\n--\n\n"
             "Set parts that are created after the function.");

/* Owns: keeps a reference to each part. Errors: NULL with TypeError. */
static PyObject* fast_path_bind(PyObject* callable, PyObject* args, PyObject* keywords) {
  static char* names[] = {"wrapped", "learn", "failed", "view", NULL};
  FastPathObject* self = (FastPathObject*)callable;
  PyObject** fields[] = {&self->wrapped, &self->learn, &self->failed, &self->view};
  PyObject* parts[] = {NULL, NULL, NULL, NULL};
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$OOOO:_bind", names, &parts[0], &parts[1],
                                   &parts[2], &parts[3]))
    return NULL;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    if (parts[i]) Py_XSETREF(*fields[i], Py_NewRef(parts[i]));
  }
  if (parts[1]) self->vectorcall = fast_path_call;
  Py_RETURN_NONE;
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

/* Return text like a function's repr, for help() and notebooks. Owns: a new reference. Errors: NULL
 * with an exception. */
static PyObject* fast_path_repr(PyObject* self) {
  PyObject *dict = PyObject_GenericGetDict(self, NULL), *name = NULL, *module = NULL, *text = NULL;
  if (dict == NULL) return NULL;
  if ((name = py_dict_get(dict, py_name_qualname)) && (module = py_dict_get(dict, py_name_module)))
    text = PyUnicode_FromFormat("<function %S.%S>", module, name); /* runs Python */
  else if (!PyErr_Occurred())
    text = PyUnicode_FromFormat("<function at %p>", self);
  Py_XDECREF(name);
  Py_XDECREF(module);
  Py_DECREF(dict);
  return text;
}

static PyObject* fast_path_reduce(PyObject* self, PyObject* unused) {
  return PyObject_GetAttr(self, py_name_qualname); /* pickled by name, like functions */
}

static PyObject* fast_path_copy(PyObject* self, PyObject* unused) {
  return Py_NewRef(self);
}

PyDoc_STRVAR(
    fast_path_borrow_doc,
    "_borrow(obj, to, brief=False, unmarks=False, copies=False, /)\n--\n\n"
    "Examine, export and check an array by its pair. `unmarks` is readonly=\"share\"; with\n"
    "`copies`, copy host memory if the target needs that. Return a dlx.Tensor for _load,\n"
    "`obj` if that is the result, or None if Python must convert.");

static PyObject* fast_path_borrow(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_check_args("_borrow", nargs, 2, 5)) return NULL;
  unsigned options = DLX_HOST_ONLY | (nargs > 4 && args[4] == Py_True ? 0 : DLX_SHARES);
  if (nargs > 2 && args[2] == Py_True) options |= DLX_COPIES;
  if (nargs > 3 && args[3] == Py_True) options |= DLX_UNMARKS;
  py_offer offer = {.made = NULL};
  PyObject* same = NULL;
  py_maps_begin();
  py_pair pair;
  if (py_pair_learn((FastPathObject*)self, Py_TYPE(args[0]), args[1], &pair)) {
    if (pair.what == PY_STAYS)
      same = pair.source->framework.stay(pair.source, pair.target, args[0], 0);
    else if (pair.what == PY_CONVERTS && py_target_holds(pair.target, options))
      pair.source->take(pair.source, pair.target, args[0], options, &offer);
    if (offer.made && offer.state == PY_NEEDS_COPY) /* with `unmarks` or `copies` */
      offer.made = py_target_copy(pair.target, offer.made, options, offer.incompatible);
    py_pair_release(&pair);
  }
  py_maps_end();
  if (same) return same;
  if (offer.made) return py_tensor_wrap(offer.made);
  if (PyErr_Occurred()) return NULL;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(
    fast_path_load_doc,
    "_load(tensor, obj, to, /)\n--\n\n"
    "Hand over the tensor that _borrow returned and consume it; errors are about `obj`. Return\n"
    "NotImplemented, and keep the tensor, if the target is no longer known.");

static PyObject* fast_path_load(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !Py_IS_TYPE(args[0], &py_tensor_type)) {
    PyErr_SetString(PyExc_TypeError, "_load takes a dlx.Tensor, the array and the target");
    return NULL;
  }
  if (py_tensor_managed(args[0]) == NULL) return NULL;
  PyObject* result = NULL;
  py_maps_begin();
  py_target* target = py_target_find(args[2]);
  if (target && target->hand_over) {
    py_call call = {.function = (FastPathObject*)self, .to = args[2]};
    DLManagedTensorVersioned* made = ((TensorObject*)args[0])->managed;
    ((TensorObject*)args[0])->managed = NULL;
    result = target->hand_over(&call, target, made, args[1]);
  }
  if (target) py_map_release(target);
  py_maps_end();
  return result || PyErr_Occurred() ? result : Py_NewRef(Py_NotImplemented);
}

PyDoc_STRVAR(
    fast_path_stack_doc,
    "_stack(arrays, to, out=None, axis=0, /)\n--\n\n"
    "Stack a tuple of arrays of one CUDA device, into an array of the target; None if Python "
    "must.");

static PyObject* fast_path_stack(PyObject* self, PyObject* args) {
  PyObject *objs, *to, *out = Py_None;
  int axis = 0;
  if (!PyArg_ParseTuple(args, "O!O|Oi:_stack", &PyTuple_Type, &objs, &to, &out, &axis)) return NULL;
  py_call call = {.function = (FastPathObject*)self, .to = to};
  py_maps_begin();
  PyObject* result = py_stack(&call, objs, out == Py_None ? NULL : out, axis);
  py_maps_end();
  return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

PyDoc_STRVAR(
    fast_path_open_frame_doc,
    "_open_frame(frame, to, dtype=None, /)\n--\n\n"
    "Return (copy, opened): a copy of a frame's matrix, cast to a dtype, or None; the result "
    "of\n`Container.live`. Return None if Python must open it.");

static PyObject* fast_path_open_frame(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_check_args("_open_frame", nargs, 2, 3)) return NULL;
  DLDataType dtype;
  int casts = nargs == 3 && args[2] != Py_None;
  if (casts && py_read_dtype(args[2], &dtype) < 0) return NULL;
  py_call call = {.function = (FastPathObject*)self, .to = args[1]};
  py_maps_begin();
  PyObject* result = py_open_frame(&call, args[0], casts ? &dtype : NULL);
  py_maps_end();
  return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

PyDoc_STRVAR(fast_path_overlap_doc,
             "_overlap(a, b, /)\n--\n\n"
             "Return whether two arrays in host memory share a byte. Return None if Python must "
             "decide,\nfor example if two arrays with gaps overlap.");

PyDoc_STRVAR(fast_path_exchange_api_doc,
             "_exchange_api(to, python_path, /)\n--\n\n"
             "Return a capsule with the exchange table for any array. python_path(obj) returns a\n"
             "dlx.Tensor if there is no pair.");

static PyObject* fast_path_exchange_api(PyObject* callable, PyObject* const* args,
                                        Py_ssize_t nargs) {
  if (nargs == 2) return py_exchange_any(callable, args[0], args[1]);
  PyErr_SetString(PyExc_TypeError, "_exchange_api takes a target and a function");
  return NULL;
}

static PyMethodDef fast_path_methods[] = {
    {"_overlap", (PyCFunction)(void (*)(void))py_function_overlap, METH_FASTCALL,
     fast_path_overlap_doc},
    {"_bind", (PyCFunction)(void (*)(void))fast_path_bind, METH_VARARGS | METH_KEYWORDS,
     fast_path_bind_doc},
    {"_borrow", (PyCFunction)(void (*)(void))fast_path_borrow, METH_FASTCALL, fast_path_borrow_doc},
    {"_stack", fast_path_stack, METH_VARARGS, fast_path_stack_doc},
    {"_open_frame", (PyCFunction)(void (*)(void))fast_path_open_frame, METH_FASTCALL,
     fast_path_open_frame_doc},
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

/* FastPathFunction(wrapped, learn, failed, to=None, view=None): a function with a fast path in C;
 * see dlx.convert. `to` is the fixed target of a function that takes one array. view(obj, to)
 * returns a lazy view, or None. If `learn` is None, all calls go to Python. This is no docstring,
 * since IPython would show it with each function. */
static PyType_Slot fast_path_slots[] = {
    {Py_tp_new, fast_path_new},
    {Py_tp_dealloc, fast_path_dealloc},
    {Py_tp_traverse, fast_path_traverse},
    {Py_tp_clear, fast_path_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_repr, fast_path_repr},
    {Py_tp_descr_get, fast_path_get},
    {Py_tp_methods, fast_path_methods},
    {Py_tp_getset, fast_path_attributes},
    {Py_tp_members, fast_path_members},
    {0, NULL},
};

static PyType_Spec fast_path_spec = {
    .name = "dlx.function", /* in messages to users */
    .basicsize = sizeof(FastPathObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = fast_path_slots,
};

PyDoc_STRVAR(
    set_traced_doc,
    "set_traced(function, /)\n--\n\n"
    "Set the `__call__` of the type, which compilers that trace Python code read. Calls still "
    "run in C.");

/* setattr would redirect every call to Python, so this writes to the type's dict. Owns: keeps a
 * reference to `function`. Errors: NULL with an exception. */
static PyObject* set_traced(PyObject* module, PyObject* function) {
  PyObject* type = PyObject_GetAttrString(module, "FastPathFunction");
  if (type == NULL) return NULL;
  int failed = PyDict_SetItemString(((PyTypeObject*)type)->tp_dict, "__call__", function);
  PyType_Modified((PyTypeObject*)type);
  Py_DECREF(type);
  if (failed) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef function_functions[] = {
    PY_ONE(set_traced),
    PY_END,
};

int py_function_init(PyObject* module) {
  if (py_options_init(module) < 0 || PyModule_AddFunctions(module, function_functions) < 0)
    return -1;
  PyObject* type = PyType_FromSpec(&fast_path_spec);
  if (type == NULL) return -1;
  int failed = PyModule_AddObjectRef(module, "FastPathFunction", type);
  Py_DECREF(type);
  return failed;
}
