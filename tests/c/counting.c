/* A foreign DLPack producer and consumer for the tests: managed tensors of both generations with
 * deleters that count, capsules around them, and deleters called from a thread unknown to
 * Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack_abi.h"

static long deleted; /* deleter calls */

long counting_deleted(void) {
  return deleted;
}

typedef struct {
  DLManagedTensorVersioned versioned;
  DLManagedTensor legacy;
  int64_t numbers[16];
  char memory[4096];
} block;

static void delete_versioned(DLManagedTensorVersioned* self) {
  __atomic_fetch_add(&deleted, 1, __ATOMIC_SEQ_CST);
  memset(((block*)self->manager_ctx)->numbers, 0x5a,
         sizeof(int64_t) * 16); /* later reads return garbage */
  free(self->manager_ctx);
}

static void delete_legacy(DLManagedTensor* self) {
  __atomic_fetch_add(&deleted, 1, __ATOMIC_SEQ_CST);
  memset(((block*)self->manager_ctx)->numbers, 0x5a, sizeof(int64_t) * 16);
  free(self->manager_ctx);
}

/* Create up to 8 dimensions over 4096 zeroed bytes at `memory`. shape and strides may be NULL. */
static block* make(int ndim, const int64_t* shape, const int64_t* strides, int code, int bits,
                   int lanes, int device_type, int device_id, uint64_t byte_offset, int null_data) {
  block* b = calloc(1, sizeof *b);
  DLTensor t = {0};
  t.data = null_data ? NULL : b->memory;
  t.device = (DLDevice){device_type, device_id};
  t.ndim = ndim;
  t.dtype = (DLDataType){(uint8_t)code, (uint8_t)bits, (uint16_t)lanes};
  t.byte_offset = byte_offset;
  if (shape && ndim > 0 && ndim <= 8)
    t.shape = memcpy(b->numbers, shape, sizeof(int64_t) * (size_t)ndim);
  if (strides && ndim > 0 && ndim <= 8)
    t.strides = memcpy(b->numbers + 8, strides, sizeof(int64_t) * (size_t)ndim);
  b->versioned = (DLManagedTensorVersioned){.version = {1, 0}, .manager_ctx = b, .dl_tensor = t};
  b->versioned.deleter = delete_versioned;
  b->legacy = (DLManagedTensor){.dl_tensor = t, .manager_ctx = b, .deleter = delete_legacy};
  return b;
}

DLManagedTensorVersioned* counting_versioned(int ndim, const int64_t* shape, const int64_t* strides,
                                             int code, int bits, int lanes, int device_type,
                                             int device_id, uint64_t byte_offset, int null_data,
                                             uint64_t flags, int major, int minor,
                                             int null_deleter) {
  block* b =
      make(ndim, shape, strides, code, bits, lanes, device_type, device_id, byte_offset, null_data);
  b->versioned.flags = flags;
  b->versioned.version = (DLPackVersion){(uint32_t)major, (uint32_t)minor};
  if (null_deleter) b->versioned.deleter = NULL;
  return &b->versioned;
}

DLManagedTensor* counting_legacy(int ndim, const int64_t* shape, const int64_t* strides, int code,
                                 int bits, int lanes, int device_type, int device_id,
                                 uint64_t byte_offset, int null_data, int null_deleter) {
  block* b =
      make(ndim, shape, strides, code, bits, lanes, device_type, device_id, byte_offset, null_data);
  if (null_deleter) b->legacy.deleter = NULL;
  return &b->legacy;
}

static void destroy_versioned(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) return;
  DLManagedTensorVersioned* m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
  if (m->deleter) m->deleter(m);
}

static void destroy_legacy(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  DLManagedTensor* m = PyCapsule_GetPointer(capsule, "dltensor");
  if (m->deleter) m->deleter(m);
}

/* The next five functions need the GIL (ctypes.PyDLL). */
PyObject* counting_capsule(DLManagedTensorVersioned* m) {
  return PyCapsule_New(m, "dltensor_versioned", destroy_versioned);
}

PyObject* counting_legacy_capsule(DLManagedTensor* m) {
  return PyCapsule_New(m, "dltensor", destroy_legacy);
}

/* Consume a capsule like a foreign consumer: take the pointer, rename the capsule. */
DLManagedTensorVersioned* counting_consume(PyObject* capsule) {
  DLManagedTensorVersioned* m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
  if (m) PyCapsule_SetName(capsule, "used_dltensor_versioned");
  return m;
}

DLManagedTensor* counting_consume_legacy(PyObject* capsule) {
  DLManagedTensor* m = PyCapsule_GetPointer(capsule, "dltensor");
  if (m) PyCapsule_SetName(capsule, "used_dltensor");
  return m;
}

const char* counting_name(PyObject* capsule) {
  return PyCapsule_GetName(capsule);
}

static void* run_versioned(void* m) {
  ((DLManagedTensorVersioned*)m)->deleter(m);
  return NULL;
}

static void* run_legacy(void* m) {
  ((DLManagedTensor*)m)->deleter(m);
  return NULL;
}

/* Call a deleter from a new thread without the GIL and wait for it (ctypes.CDLL releases the
 * GIL). */
int counting_delete_on_thread(void* managed, int legacy) {
  pthread_t thread;
  int failed = pthread_create(&thread, NULL, legacy ? run_legacy : run_versioned, managed);
  return failed ? failed : pthread_join(thread, NULL);
}

void counting_delete(void* managed, int legacy) {
  legacy ? run_legacy(managed) : run_versioned(managed);
}

/* Call a deleter like paddle: only if manager_ctx is not NULL. Returns whether it did. */
int counting_delete_by_context(void* managed, int legacy) {
  if (legacy ? ((DLManagedTensor*)managed)->manager_ctx == NULL
             : ((DLManagedTensorVersioned*)managed)->manager_ctx == NULL)
    return 0;
  counting_delete(managed, legacy);
  return 1;
}

typedef struct {
  DLManagedTensorVersioned** managed;
  int n;
  pthread_barrier_t* start;
} batch;

static void* run_batch(void* argument) {
  batch* b = argument;
  pthread_barrier_wait(b->start);
  for (int i = 0; i < b->n; i++) run_versioned(b->managed[i]);
  return NULL;
}

/* Call n deleters from four threads, a quarter each. */
int counting_delete_together(DLManagedTensorVersioned** managed, int n) {
  pthread_t thread[4];
  batch b[4];
  pthread_barrier_t start;
  pthread_barrier_init(&start, NULL, 4);
  for (int i = 0; i < 4; i++) {
    b[i] = (batch){managed + n / 4 * i, n / 4, &start};
    if (pthread_create(&thread[i], NULL, run_batch, &b[i])) return -1;
  }
  for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
  return 0;
}

/* Clear a list while an exception is set, like a consumer that sets its error before it releases.
 * Needs the GIL; always returns NULL with an exception. */
PyObject* counting_clear_with_error(PyObject* list) {
  PyErr_SetString(PyExc_KeyError, "pending");
  PyList_SetSlice(list, 0, PyList_GET_SIZE(list), NULL);
  return NULL;
}

static DLManagedTensorVersioned* late[2];

static void delete_late(void) {
  if (late[0]) counting_delete(late[0], 0);
  if (late[1]) counting_delete_on_thread(late[1], 0);
  printf("at exit: interpreter %d, deleted %ld\n", Py_IsInitialized(), deleted);
}

/* Call two deleters from C atexit, after the interpreter is gone: one there, one on a new thread.
 * Then print the number of deleter calls. */
void counting_delete_at_exit(DLManagedTensorVersioned* here, DLManagedTensorVersioned* elsewhere) {
  late[0] = here;
  late[1] = elsewhere;
  atexit(delete_late);
}
