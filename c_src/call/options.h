#ifndef DLX_OPTIONS_H_
#define DLX_OPTIONS_H_

/* The arguments of a call of a function with a fast path. */

#include "convert/call.h"

/* Read the target and the options of a call. `*like` is an example that the call gives in place of
 * a target, or NULL. Owns: borrowed from the arguments. GIL: needed; may run Python. Errors: 0 =
 * only Python understands them, unless an exception is set. */
int py_options_read(py_call* call, PyObject* const* args, Py_ssize_t n, PyObject* names,
                    PyObject** like);

/* Make the words of calls. GIL: needed. Errors: -1 with an exception. */
int py_options_init(PyObject* module);

#endif
