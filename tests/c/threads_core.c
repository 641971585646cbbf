/* Uses the pure core's shared state from several threads: for ThreadSanitizer.
 *
 *     DLX_CUDA_DRIVER=RECORDING_DRIVER threads_core ROUNDS
 *
 * Threads pass tensors, their holders and readiness events through boxes, so that any thread may
 * release them. Threads start and end, and the live count must stay correct. Without a driver it
 * calls nothing of CUDA. tests/reliability/test_threads_core.py builds and runs this. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/copy.h"
#include "dlx_cuda.h"

#define HOLDS(condition) ((condition) ? (void)0 : broken(#condition, __LINE__))

_Noreturn static void broken(const char* condition, int line) {
  fprintf(stderr, "threads_core.c:%d: does not hold: %s (%s)\n", line, condition,
          dlx_cuda_message());
  abort();
}

enum { THREADS = 4, BOXES = 16, GENERATIONS = 5, DEVICES = 2, FLOATS = 96 };

/* Relaxed, because they must not order the threads for dlx. */
static atomic_long owners, released;

static void release_owner(void* owner) {
  int* count = owner;
  HOLDS(*count == 1); /* released once */
  *count = 0;
  free(count);
  atomic_fetch_add_explicit(&released, 1, memory_order_relaxed);
}

static void* new_owner(void) {
  int* count = malloc(sizeof *count);
  HOLDS(count != NULL);
  *count = 1;
  atomic_fetch_add_explicit(&owners, 1, memory_order_relaxed);
  return count;
}

typedef struct {
  uint64_t state;
  int number, rounds;
} worker;

static uint32_t below(worker* w, uint32_t limit) { /* xorshift64* */
  w->state ^= w->state >> 12, w->state ^= w->state << 25, w->state ^= w->state >> 27;
  return (uint32_t)(w->state * 0x2545F4914F6CDD1Du >> 32) % limit;
}

/* A box passes a pointer on; the caller gets the previous one. */
typedef _Atomic(void*) box;

static void* pass(worker* w, box* boxes, void* thing) {
  return atomic_exchange(&boxes[below(w, BOXES)], thing);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static box tensors[BOXES], given_up[BOXES], legacy[BOXES];
static char memory[256];

static DLTensor described(worker* w, int64_t* shape) {
  shape[0] = 1 + below(w, 8), shape[1] = 1 + below(w, 8);
  return (DLTensor){
      .data = memory, .device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLUInt, 8, 1}, .shape = shape};
}

static DLManagedTensorVersioned* made(worker* w) {
  int64_t shape[2];
  DLManagedTensorVersioned* tensor;
  DLTensor like = described(w, shape);
  void* owner = new_owner();
  HOLDS(dlx_managed_new(&like, 0, owner, release_owner, &tensor) == DLX_OK);
  return tensor;
}

/* A failing consumer may have released its count, or may do so later, on any thread. */
static void fail(worker* w) {
  DLManagedTensorVersioned *tensor = made(w), *before;
  dlx_managed_hold(tensor);
  before = pass(w, given_up, tensor);
  dlx_managed_abandon(tensor);
  if (before) dlx_managed_release(before);
}

static void use_tensors(worker* w) {
  DLManagedTensorVersioned *tensor = pass(w, tensors, NULL), *other = NULL;
  if (tensor == NULL) tensor = made(w);
  DLManagedTensor* old;
  HOLDS(tensor->dl_tensor.shape[0] > 0 && tensor->dl_tensor.data == memory);
  switch (below(w, 4)) {
    case 0:
      HOLDS(dlx_managed_share(tensor, NULL, 0, &other) == DLX_OK);
      break;
    case 1:
      HOLDS(dlx_managed_share(tensor, &tensor->dl_tensor, DLPACK_FLAG_BITMASK_READ_ONLY, &other) ==
            DLX_OK);
      break;
    case 2:
      HOLDS(dlx_legacy_export(tensor, &old) == DLX_OK);
      old = pass(w, legacy, old);
      tensor = NULL;
      if (old) HOLDS(dlx_legacy_adopt(old, &tensor) == DLX_OK);
      break;
    default:
      fail(w);
  }
  if (tensor) tensor = pass(w, tensors, tensor);
  if (other) other = pass(w, tensors, other);
  if (tensor) dlx_managed_release(tensor);
  if (other) dlx_managed_release(other);
  if (below(w, 16) == 0) HOLDS(dlx_live() >= 0);
}

/* Two concurrent copies of shared memory, each with several threads if there are cores. */
static void copy_large(const DLManagedTensorVersioned* from) {
  DLManagedTensorVersioned* to;
  HOLDS(dlx_managed_empty(&from->dl_tensor, 0, 0, &to) == DLX_OK);
  HOLDS(dlx_copy(&from->dl_tensor, &to->dl_tensor, 0) == DLX_OK);
  const float *first = from->dl_tensor.data, *last = to->dl_tensor.data;
  int64_t n = dlx_size(&from->dl_tensor);
  HOLDS(last[0] == first[0] && last[n - 1] == first[n - 1] && last[1] != first[1]);
  dlx_managed_release(to);
}

/* ---- CUDA ------------------------------------------------------------------------------------ */

static box arrays[BOXES], ready[BOXES], uses[BOXES];

static DLManagedTensorVersioned* on_device(int32_t device) {
  int64_t shape[] = {FLOATS};
  DLTensor like = {.ndim = 1, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  DLManagedTensorVersioned* fresh;
  like.data = memory; /* any address passes the check */
  HOLDS(dlx_cuda_empty(&like, 0, 0, device, 0, &fresh) == DLX_OK);
  return fresh;
}

static uint64_t stream_of(int32_t device) {
  uint64_t stream;
  HOLDS(dlx_cuda_work_stream(device, &stream) == DLX_OK && stream > DLX_STREAM_PER_THREAD);
  return stream;
}

/* Each thread has its own error message. */
static void misspeak(const worker* w) {
  char wanted[20];
  int32_t none = 1000 + w->number;
  snprintf(wanted, sizeof wanted, "cuda:%d,", none);
  HOLDS(dlx_cuda_push(none) == DLX_E_DRIVER && strstr(dlx_cuda_message(), wanted) != NULL);
}

/* Copy to the host and back, or to the other device, in order. */
static void move(worker* w, const DLManagedTensorVersioned* tensor) {
  const DLTensor* t = &tensor->dl_tensor;
  int32_t here = t->device.device_id, there = below(w, DEVICES);
  float numbers[FLOATS];
  DLTensor host = *t;
  if (below(w, 2)) {
    host.data = numbers, host.device = (DLDevice){kDLCPU, 0};
    for (int i = 0; i < FLOATS; i++) numbers[i] = (float)w->number;
    HOLDS(dlx_cuda_transfer(&host, t, 0, stream_of(here), 1) == DLX_OK);
    HOLDS(dlx_cuda_transfer(t, &host, 0, stream_of(here), 1) == DLX_OK);
    return;
  }
  DLManagedTensorVersioned* other = on_device(there);
  HOLDS(dlx_cuda_order(there, stream_of(there), here, stream_of(here)) == DLX_OK);
  HOLDS(dlx_cuda_transfer(t, &other->dl_tensor, 0, stream_of(here), 0) == DLX_OK);
  HOLDS(dlx_cuda_order(here, stream_of(here), there, stream_of(there)) == DLX_OK);
  other = pass(w, arrays, other);
  if (other) dlx_managed_release(other);
}

static void wait_for_events(worker* w, int32_t device) {
  dlx_ready *made_now, *before;
  void* keep = below(w, 2) ? new_owner() : NULL;
  uint64_t stream = keep ? stream_of(device) : DLX_STREAM_LEGACY;
  HOLDS(dlx_ready_new(device, stream, keep, release_owner, &made_now) == DLX_OK);
  before = pass(w, ready, dlx_ready_hold(made_now));
  HOLDS(dlx_ready_synchronize(made_now) == DLX_OK);
  dlx_ready_drop(made_now);
  if (before == NULL) return;
  HOLDS(dlx_ready_wait(before, device, stream_of(device)) == DLX_OK);
  dlx_ready_drop(before);
}

static void use_cuda(worker* w) {
  int32_t device = below(w, DEVICES);
  void* use;
  DLManagedTensorVersioned* tensor;
  switch (below(w, 6)) {
    case 0:
      misspeak(w);
      break;
    case 1:
      wait_for_events(w, device);
      break;
    case 2:
      HOLDS(dlx_use_new(device, below(w, 2) ? stream_of(device) : DLX_STREAM_PER_THREAD,
                        new_owner(), release_owner, NULL, NULL, &use) == DLX_OK);
      use = pass(w, uses, use);
      if (use) dlx_use_release(use);
      break;
    case 3:
      HOLDS(dlx_cuda_release_pending() >= 0);
      break;
    default:
      tensor = pass(w, arrays, NULL);
      if (tensor == NULL) tensor = on_device(device);
      move(w, tensor);
      tensor = pass(w, arrays, tensor);
      if (tensor) dlx_managed_release(tensor);
  }
}

/* ---- running --------------------------------------------------------------------------------- */

static const DLManagedTensorVersioned* transposed; /* shared by all threads */
static int has_cuda;

static void* tensors_only(void* argument) {
  worker* w = argument;
  for (int i = 0; i < w->rounds; i++) use_tensors(w);
  return NULL;
}

static void* everything(void* argument) {
  worker* w = argument;
  int32_t count;
  if (has_cuda) HOLDS(dlx_cuda_count(&count) == DLX_OK && count == DEVICES);
  copy_large(transposed);
  for (int i = 0; i < w->rounds; i++) {
    use_tensors(w);
    if (has_cuda && i % 4 == 0) use_cuda(w);
  }
  return NULL;
}

static void run(void* (*what)(void*), int generation, int rounds) {
  pthread_t threads[THREADS];
  worker workers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    workers[i] = (worker){(uint64_t)(generation * THREADS + i + 1), i, rounds};
    HOLDS(pthread_create(&threads[i], NULL, what, &workers[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) HOLDS(pthread_join(threads[i], NULL) == 0);
}

static DLManagedTensorVersioned* large(void) {
  enum { SIDE = 1450 }; /* 8 MiB: several threads */
  int64_t shape[] = {SIDE, SIDE}, strides[] = {1, SIDE};
  DLManagedTensorVersioned *memory_of, *view;
  DLTensor like = {.device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  like.data = memory;
  HOLDS(dlx_managed_empty(&like, 0, 0, &memory_of) == DLX_OK);
  float* values = memory_of->dl_tensor.data;
  for (int i = 0; i < SIDE * SIDE; i++) values[i] = (float)i;
  like.data = values;
  like.strides = strides;
  HOLDS(dlx_managed_share(memory_of, &like, 0, &view) == DLX_OK);
  dlx_managed_release(memory_of);
  return view;
}

static void* left_in(box* place) {
  return atomic_exchange(place, NULL);
}

int main(int argc, char** argv) {
  HOLDS(argc == 2);
  int rounds = atoi(argv[1]);
  void* thing;
  long (*misuses)(void) = NULL;
  const char* path = getenv("DLX_CUDA_DRIVER");
  if (path && *path) {
    void* driver = dlopen(path, RTLD_NOW);
    HOLDS(driver != NULL);
    void* symbol = dlsym(driver, "fake_misuses");
    memcpy(&misuses, &symbol, sizeof misuses);
    has_cuda = 1;
  }
  DLManagedTensorVersioned* source = large();
  transposed = source;
  run(everything, 0, rounds);
  for (int i = 1; i < GENERATIONS; i++) run(tensors_only, i, rounds);
  for (int i = 0; i < BOXES; i++) {
    if ((thing = left_in(&tensors[i]))) dlx_managed_release(thing);
    if ((thing = left_in(&given_up[i]))) dlx_managed_release(thing);
    if ((thing = left_in(&legacy[i]))) dlx_legacy_release(thing);
    if ((thing = left_in(&arrays[i]))) dlx_managed_release(thing);
    if ((thing = left_in(&ready[i]))) dlx_ready_drop(thing);
    if ((thing = left_in(&uses[i]))) dlx_use_release(thing);
  }
  dlx_managed_release(source);
  if (has_cuda) HOLDS(dlx_cuda_release_pending() == 0 && misuses() == 0);
  HOLDS(dlx_live() == 0 && atomic_load(&owners) == atomic_load(&released));
  printf("%ld owners released\n", atomic_load(&released));
  return 0;
}
