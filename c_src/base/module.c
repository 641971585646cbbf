/* The bridge from cffi to CPython: dlx_bind adds one builtin to a module; that adds all others. */

#include "call/function.h"
#include "convert/pairs.h"
#include "convert/streams.h"
#include "gil.h"
#include "view/view.h"

int dlx_bind(uintptr_t module);
PyMODINIT_FUNC dlx_cffi_module(void);

static PyMethodDef* const builtins[] = {
    py_hooks_functions,    py_capsule_functions,   py_buffer_functions, py_tensor_functions,
    py_row_functions,      py_packed_functions,    py_cuda_functions,   py_arrow_functions,
    py_exchange_functions, py_view_functions,      py_pair_functions,   py_call_functions,
    py_stream_functions,   py_arguments_functions,
};

#undef PyInit__ffi
PyMODINIT_FUNC PyInit__ffi(void) {
  return py_allow_no_gil(dlx_cffi_module());
}

PyDoc_STRVAR(bind_doc,
             "bind(module, /)\n--\n\n"
             "Add all builtins and types to a module. Raise ImportError in a second interpreter.");

static PyObject* bind(PyObject* self, PyObject* module) {
  static int64_t first = -1; /* interpreter ids are never reused */
  int64_t here = PyInterpreterState_GetID(PyInterpreterState_Get());
  if (here < 0) return NULL;
  if (first >= 0 && first != here) {
    PyErr_Format(
        PyExc_ImportError,
        "dlx works in one interpreter per process: it is already in use in interpreter %lld, "
        "and this is interpreter %lld. Use it from there, or use processes "
        "(multiprocessing) instead of interpreters.",
        (long long)first, (long long)here);
    return NULL;
  }
  first = here;
  if (py_gil_open() < 0 || py_names_init() < 0 || py_pair_init() < 0 ||
      py_source_init(module) < 0 || py_target_init(module) < 0 || py_tensor_init(module) < 0 ||
      py_function_init(module) < 0 || py_view_init(module) < 0)
    return NULL;
  for (size_t i = 0; i < sizeof builtins / sizeof *builtins; i++) {
    if (PyModule_AddFunctions(module, builtins[i]) < 0) return NULL;
  }
  Py_RETURN_NONE;
}

/* GIL: taken (cffi released it), maybe in the wrong interpreter, so bind does the rest. Errors: -1;
 * prints the exception, which cffi would lose. */
int dlx_bind(uintptr_t module) {
  static PyMethodDef functions[] = {{"bind", bind, METH_O, bind_doc}, {NULL, NULL, 0, NULL}};
  PyGILState_STATE state = PyGILState_Ensure();
  int failed = PyModule_AddFunctions((PyObject*)module, functions) < 0;
  if (failed) PyErr_Print();
  PyGILState_Release(state);
  return failed ? -1 : 0;
}
