/* Keywords from dlx/_engine/fast_path.py, read into the members of sources and targets. One tuple
 * owns the values, for the collector; members borrow from it. */

#include "source.h"

PyObject* py_members_read(const py_member* members, PyObject* keywords, void* self) {
  Py_ssize_t at = 0, n = 0;
  PyObject *name, *value, *values = PyTuple_New(keywords ? PyDict_GET_SIZE(keywords) : 0);
  while (values && keywords && PyDict_Next(keywords, &at, &name, &value)) {
    PyTuple_SET_ITEM(values, n++, Py_NewRef(value));
    const py_member* m = members;
    while (m->name && PyUnicode_CompareWithASCIIString(name, m->name) != 0) m++;
    if (m->name == NULL) {
      PyErr_Format(PyExc_TypeError, "unknown member %R", name);
      Py_CLEAR(values);
    } else if (value != Py_None && m->read(value, (char*)self + m->offset, self) < 0) {
      Py_CLEAR(values);
    }
  }
  return values;
}

int py_read_object(PyObject* value, void* where, void* self) {
  *(PyObject**)where = value;
  return 0;
}

int py_read_flag(PyObject* value, void* where, void* self) {
  *(int*)where = PyObject_IsTrue(value);
  return *(int*)where < 0 ? -1 : 0;
}

/* True = by the table; or (function, attribute). */
int py_read_streams(PyObject* value, void* where, void* self) {
  py_stream_source* s = where;
  if (value == Py_True) return s->is_by_table = 1, 0;
  return PyArg_ParseTuple(value, "OU:stream", &s->function, &s->attribute) ? 0 : -1;
}

void py_members_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  py_pending pending = py_pending_save(); /* an exception may be pending */
  PyObject_GC_UnTrack(self);
  type->tp_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
  py_pending_restore(pending);
}
