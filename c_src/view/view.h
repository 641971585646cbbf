#ifndef DLX_VIEW_H_
#define DLX_VIEW_H_

#include "base/extension.h"

extern PyMethodDef py_view_functions[];

/* Add the type Slots, the base of lazy views, to a module. Errors: -1 with an exception. */
int py_view_init(PyObject* module);

/* Return the name of an element in a view's scope: its address, or the result of `identity` unless
 * that is None, as name_of in dlx/_views/base.py. Errors: NULL with an exception. */
PyObject* py_view_name(PyObject* element, PyObject* identity);

#endif
