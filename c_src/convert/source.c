/* The type Source: reads its members, and chooses the functions for its arrays. */

#include "source.h"

#include <structmember.h>

PyTypeObject* py_source_type;

#define SOURCE(name) ((py_source*)(name))

static int read_question(PyObject* value, void* where, void* self) {
  return py_question_read(value, SOURCE(self)->kind.type, where);
}

static int read_guards(PyObject* value, void* where, void* self) {
  return py_guards_read(value, SOURCE(self)->kind.type, where);
}

static int read_switches(PyObject* value, void* where, void* self) {
  return py_switches_read(value, &PyDict_Type, where);
}

/* A capsule, or False for no table. */
static int read_table(PyObject* value, void* where, void* self) {
  if (value != Py_False) *(const DLPackExchangeAPI**)where = py_exchange_read(value, 0);
  return 0;
}

static int read_guard_function(PyObject* value, void* where, void* self) {
  *(dlx_guard_function*)where =
      (dlx_guard_function)PyCapsule_GetPointer(value, "dlx_guard_function");
  return PyErr_Occurred() ? -1 : 0;
}

static int read_producer(PyObject* value, void* where, void* self) {
  py_producer* p = where;
  if (!PyArg_ParseTuple(value, "O!O!O:Producer", &PyTuple_Type, &p->names, &PyTuple_Type,
                        &p->values, &p->no_numbers))
    return -1;
  if (PyTuple_GET_SIZE(p->names) <= DLX_MAX_KEYWORDS &&
      PyTuple_GET_SIZE(p->names) == PyTuple_GET_SIZE(p->values))
    return 0;
  PyErr_SetString(PyExc_ValueError, "expected a value for each keyword, and at most 4 keywords");
  return -1;
}

static int read_fields(PyObject* value, void* where, void* self) {
  py_fields* f = where;
  py_question* questions[] = {&f->memory, &f->shape, &f->strides, &f->dtype, &f->device};
  PyObject* values[5];
  if (!PyArg_ParseTuple(value, "OOOOOUO!:Fields", &values[0], &values[1], &values[2], &values[3],
                        &values[4], &f->address, &PyDict_Type, &f->dtypes))
    return -1;
  for (int i = 0; i < 5; i++) {
    if (read_question(values[i], questions[i], self) < 0) return -1;
  }
  return 0;
}

/* The number of modules and ABC registrations when no other adapter claimed the type. */
static int read_stamp(PyObject* value, void* where, void* self) {
  py_kind* k = where;
  unsigned long long registrations;
  if (!PyArg_ParseTuple(value, "nK:stamp", &k->n_modules, &registrations)) return -1;
  k->registrations = registrations;
  return 0;
}

#define AT(member) offsetof(py_source, member)

/* source.h describes the members; _source in dlx/_engine/fast_path.py supplies them. */
static const py_member members[] = {
    {"what", py_read_object, AT(what)},
    {"adapter", py_read_object, AT(adapter)},
    {"depends_on", py_read_object, AT(kind.names)},
    {"still", py_read_object, AT(kind.still)},
    {"stamp", read_stamp, AT(kind)},
    {"table", read_table, AT(table)},
    {"managed", py_read_flag, AT(traits.managed)},
    {"is_own_table", py_read_flag, AT(traits.own_table)},
    {"immutable", py_read_flag, AT(traits.immutable)},
    {"is_host_only", py_read_flag, AT(traits.host_only)},
    {"examined", py_read_flag, AT(traits.examined)},
    {"copy", py_read_object, AT(framework.copy)},
    {"ready", py_read_object, AT(framework.ready)},
    {"export", py_read_object, AT(export)},
    {"unblocked", py_read_object, AT(unblocked)},
    {"producer", read_producer, AT(producer)},
    {"fields", read_fields, AT(fields)},
    {"streams", py_read_streams, AT(streams)},
    {"guards", read_guards, AT(gate)},
    {"guard_function", read_guard_function, AT(gate.in_c)},
    {"switches", read_switches, AT(gate.switches)},
    {"detach", read_question, AT(detach)},
    {"owner", read_question, AT(owner.ask)},
    {"start", read_question, AT(owner.start)},
    {"nbytes", read_question, AT(owner.nbytes)},
    {"dtype", read_question, AT(dtype_check.dtype)},
    {"confirmed", py_read_object, AT(dtype_check.expected)},
    {"parts", py_read_object, AT(parts)},
    {"open", py_read_object, AT(open)},
    {NULL, NULL, 0},
};

/* The borrow slot is preferred, unless the adapter wants the managed one. Arrays that cannot be
 * borrowed use the second function, if no guards follow. */
static void choose_functions(py_source* s) {
  int borrows = s->table && s->table->dltensor_from_py_object_no_sync;
  int manages = s->table && s->table->managed_tensor_from_py_object_no_sync;
  py_take* exports = s->fields.address ? py_take_attributes
                     : manages         ? py_take_managed
                     : s->export       ? py_take_exported
                                       : NULL;
  if (s->kind.type == &py_tensor_type) {
    s->take = py_take_tensor;
  } else if (s->producer.names) {
    s->take = py_take_capsule;
  } else if (borrows && !s->traits.managed && !s->traits.own_table) {
    int asks =
        s->owner.ask.name || s->gate.n > s->gate.n_early || s->gate.in_c || s->dtype_check.expected;
    s->take = py_take_borrowed;
    s->take_second = asks ? NULL : exports;
  } else {
    s->take = exports;
  }
  if (borrows && !s->traits.immutable && !s->traits.own_table)
    s->borrow = s->table->dltensor_from_py_object_no_sync;
  if (s->traits.immutable) s->flags = DLPACK_FLAG_BITMASK_READ_ONLY;
  s->framework.stay = s->traits.examined ? py_stay_examined : py_stay_unchanged;
  if (s->streams.is_by_table && s->table) s->streams.table = s->table->current_work_stream;
}

static PyObject* source_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  PyTypeObject* kind;
  if (!PyArg_ParseTuple(args, "O!:Source", &PyType_Type, &kind)) return NULL;
  py_source* s = (py_source*)type->tp_alloc(type, 0);
  if (s == NULL) return NULL;
  s->kind.type = kind;
  s->kind.n_modules = -1;
  s->values = py_members_read(members, keywords, s);
  if (s->values == NULL || py_kind_note(&s->kind, kind) < 0) goto failed;
  int is_listed = keywords && PyDict_GetItemString(keywords, "table");
  if (s->table == NULL && !is_listed && kind != &py_tensor_type) s->table = py_exchange_find(kind);
  if (PyErr_Occurred()) goto failed;
  choose_functions(s);
  return (PyObject*)s;

failed:
  Py_DECREF(s);
  return NULL;
}

static int source_traverse(PyObject* self, visitproc visit, void* arg) {
  py_source* s = SOURCE(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(s->values);
  Py_VISIT(atomic_load_explicit(&s->like, memory_order_relaxed));
  Py_VISIT(atomic_load_explicit(&s->producer.number, memory_order_relaxed));
  return py_kind_visit(&s->kind, visit, arg);
}

/* The collector clears only unused sources: the maps hold the others. */
static int source_clear(PyObject* self) {
  py_source* s = SOURCE(self);
  py_gate_free(&s->gate);
  py_kind_clear(&s->kind);
  Py_XDECREF(atomic_exchange_explicit(&s->like, NULL, memory_order_acq_rel));
  Py_XDECREF(atomic_exchange_explicit(&s->producer.number, NULL, memory_order_acq_rel));
  Py_CLEAR(s->values);
  return 0;
}

static PyMemberDef source_members[] = {
    {"what", T_OBJECT, AT(what), READONLY, NULL},
    {"adapter", T_OBJECT, AT(adapter), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(source_doc,
             "Source(type, /, **members)\n--\n\n"
             "How the fast path exports arrays of an exact type; see c_src/convert/source.h.");

static PyType_Slot source_slots[] = {
    {Py_tp_new, source_new},
    {Py_tp_dealloc, py_members_dealloc},
    {Py_tp_traverse, source_traverse},
    {Py_tp_clear, source_clear},
    {Py_tp_members, source_members},
    {Py_tp_doc, (void*)source_doc},
    {0, NULL},
};

static PyType_Spec source_spec = {
    .name = "dlx._ffi.Source",
    .basicsize = sizeof(py_source),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = source_slots,
};

int py_source_init(PyObject* module) {
  py_source_type = (PyTypeObject*)PyType_FromSpec(&source_spec);
  if (py_source_type == NULL) return -1;
  return PyModule_AddObjectRef(module, "Source", (PyObject*)py_source_type);
}
