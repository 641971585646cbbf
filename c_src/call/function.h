#ifndef DLX_FUNCTION_H_
#define DLX_FUNCTION_H_

/* Python callables with a fast path. For the defaults of Owns, GIL and Errors see convert/call.h.
 */

#include "convert/call.h"

int py_function_init(PyObject* module);

/* ---- call/arguments.c ------------------------------------------------------------------------ */

extern PyMethodDef py_arguments_functions[];

/* ---- call/options.c -------------------------------------------------------------------------- */

/* Read the target and the options of a call; *like = the example in place of a target, or NULL.
 * Owns: borrowed from the arguments. Errors: 0 = the Python path reads them, unless an exception is
 * set. */
int py_options_read(py_call* call, PyObject* const* args, Py_ssize_t n, PyObject* names,
                    PyObject** like);

int py_options_init(PyObject* module);

/* ---- call/overlap.c -------------------------------------------------------------------------- */

/* The method `_overlap`. Errors: NULL with an exception. */
PyObject* py_function_overlap(PyObject* self, PyObject* const* args, Py_ssize_t nargs);

#endif
