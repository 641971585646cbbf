#ifndef DLX_VIEW_H_
#define DLX_VIEW_H_

/* Lazy views. */

#include "base/extension.h"

extern PyMethodDef py_view_functions[];

/* Add the type Slots, the base of lazy views, to a module. Errors: -1 with an exception. */
int py_view_init(PyObject* module);

/* The name of an element in the scope of a view: its address, or the answer of `identity`, if that
 * is not None, as name_of of dlx/_views/base.py has it. Errors: NULL with an exception. */
PyObject* py_view_name(PyObject* element, PyObject* identity);

#endif
