/* Makes one allocation of Python's allocators fail, for the tests. Allocations whose callers cannot
 * handle a failure succeed: those with two consecutive callers that match a given
 * pair. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <execinfo.h>
#include <stdlib.h>
#include <string.h>

enum { DOMAINS = 3, DEPTH = 12 };
static PyMemAllocatorEx own[DOMAINS];
static const char* const* spared; /* names of a function or library and its caller; NULL ends */
static PyCFunction extend;
static long until;  /* allocations before the failure; 0 = finished */
static int outcome; /* 1 = failed, 2 = spared, 3 = failed in an extension of dlx */

/* Decide about this allocation by its callers. list.extend has no symbol: it keeps its argument. */
static int decide(void) {
  void* callers[DEPTH];
  int n = backtrace(callers, DEPTH), spares = 0, ours = 0, evaluates = 0;
  for (int i = 0; i < n; i++) spares |= (uintptr_t)callers[i] - (uintptr_t)extend < 1024;
  char** names = backtrace_symbols(callers, n);
  for (int i = 0; names && i + 1 < n; i++) {
    if (strstr(names[i], "/dlx/_ffi.") || strstr(names[i], "/_dlx_")) {
      ours = !evaluates; /* the evaluator allocates its own frames */
      break;             /* outer callers do not matter */
    }
    evaluates |= strstr(names[i], "_PyEval_EvalFrameDefault") != NULL;
    for (const char* const* pair = spared; *pair; pair += 2)
      spares |= strstr(names[i], pair[0]) && strstr(names[i + 1], pair[1]) &&
                !strstr(names[i + 1], "/dlx/_ffi.");
  }
  free(names);
  return spares ? 2 : ours ? 3 : 1;
}

static int fails(void) {
  if (until == 0 || --until > 0) return 0;
  outcome = decide();
  return outcome != 2;
}

static void* allocate(void* context, size_t size) {
  PyMemAllocatorEx* to = context;
  return fails() ? NULL : to->malloc(to->ctx, size);
}

static void* allocate_zeroed(void* context, size_t n, size_t size) {
  PyMemAllocatorEx* to = context;
  return fails() ? NULL : to->calloc(to->ctx, n, size);
}

static void* reallocate(void* context, void* memory, size_t size) {
  PyMemAllocatorEx* to = context;
  return fails() ? NULL : to->realloc(to->ctx, memory, size);
}

static void release(void* context, void* memory) {
  PyMemAllocatorEx* to = context;
  to->free(to->ctx, memory);
}

/* Make the allocation with this number fail, once; 1 is the next one. */
void failing_start(long number, const char* const* pairs) {
  void* warm[1];
  backtrace(warm, 1); /* the first call loads a library */
  PyObject* method = PyObject_GetAttrString((PyObject*)&PyList_Type, "extend");
  extend = ((PyMethodDescrObject*)method)->d_method->ml_meth;
  Py_DECREF(method); /* the type keeps it */
  spared = pairs;
  outcome = 0;
  for (int i = 0; i < DOMAINS; i++) {
    PyMem_GetAllocator((PyMemAllocatorDomain)i, &own[i]);
    PyMemAllocatorEx mine = {&own[i], allocate, allocate_zeroed, reallocate, release};
    PyMem_SetAllocator((PyMemAllocatorDomain)i, &mine);
  }
  until = number;
}

/* Return the outcome; 0 = not reached. */
int failing_stop(void) {
  until = 0;
  for (int i = 0; i < DOMAINS; i++) PyMem_SetAllocator((PyMemAllocatorDomain)i, &own[i]);
  return outcome;
}
