/* A CUDA driver for machines without one. Its device addresses are not valid on the host: an access
 * crashes, as with a real device; the contents are stored elsewhere. Copies run immediately, but
 * the driver tracks the order that a real device would guarantee: each stream and host thread has a
 * vector clock that shows whether one access happens before another, or races with it. It records
 * every call, follows contexts, events, memory pools, host functions and graph captures by the
 * rules of cuda.h 13.0 (comments name other sources), and fails on demand.
 *
 * dlx finds it through DLX_CUDA_DRIVER; tests control it with the fake_ functions. */

#define _GNU_SOURCE

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* More than any test creates; only used entries take memory. */
enum {
  ACTORS = 1 << 18,
  DEVICES = 4,
  CONTEXTS = 64, /* the first ones are primary */
  STREAMS = 1 << 17,
  BLOCKS = 1 << 18,
  EVENTS = 1 << 16,
  CAPTURES = 1 << 16,
  POOLS = 1 << 12 /* the first ones are the devices' default pools */
};
enum { ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, CONTEXT_IS_DESTROYED = 709 };
enum { GLOBAL_MODE = 0, LOCAL_MODE = 1, RELAXED = 2 };
enum { NONE = 0, ACTIVE = 1, INVALIDATED = 2 };
enum { HOST = 1, DEVICE = 2, MANAGED = 3 };
enum { NEVER = UINT32_MAX };

typedef struct { /* as many as are known; the others are 0 */
  uint32_t* at;
  int n;
} clocks;

typedef struct {
  int device, alive;
} context;

typedef struct {
  int used, alive, context, device, blocking, actor, capture;
  int running;   /* unfinished host functions */
  uint32_t done; /* its finished operations; NEVER = all of them, immediately */
} stream;

typedef struct {
  int used, alive, context, capture, recorded;
  clocks when;
} event;

typedef struct {
  int used, device, seen_by; /* a bit for each device that may access its memory */
  uint64_t threshold;
  size_t reserved, reserved_high, taken, taken_high;
} pool;

typedef struct {
  int state, mode, origin;
  pthread_t thread;
} capture;

typedef struct {
  char *low, *high;
  int device, kind, alive;
  int context;       /* that owns the memory; -1 = no context */
  int pool;          /* -1 = not from a pool */
  int spare;         /* free, but kept by its pool */
  size_t room;       /* that the pool allocated from the system */
  clocks given_back; /* for the pool */
  long born;         /* distinguishes allocations at one address */
  char* held;        /* contents of device memory; NULL if the host may access `low` */
} block;

typedef struct {
  char *low, *high;
  int actor, write;
  uint32_t time;
} access_;

typedef struct { /* memory that a graph reads or writes when it is replayed */
  int capture;
  char *low, *high;
  long born; /* of its block */
} node;

static node* nodes;
static int n_nodes, room_nodes, last_graph; /* the last valid capture */
static long births;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static clocks now[ACTORS];
static int n_actors, n_devices = 2, initialised, ended, has_pools = 1, has_peers;
static pid_t pid;
static stream streams[STREAMS];
static int legacy[CONTEXTS]; /* index into streams, 0 = not created */
static event events[EVENTS];
static capture captures[CAPTURES];
static int n_captures = 1;
static block blocks[BLOCKS];
static access_* accesses;
static size_t n_accesses, room;
static context contexts[CONTEXTS] = {{0, 0}, {1, 0}, {2, 0}, {3, 0}};
static int retained[DEVICES], n_contexts = DEVICES;
static pool pools[POOLS];
static int n_pools, pool_of[DEVICES]; /* used by cuMemAllocAsync */
static int peers[CONTEXTS];           /* a bit for each device whose memory a context can access */
static int broken;                    /* every call fails with this until the process ends */
static long mapped, returned, sizes[64];      /* copies by the number of bits of their size */
static int n_streams = 1, n_blocks, n_events; /* entries that were ever used; 0 is not a stream */
static long races, misuses, syncs, blocked;
static char report[4096];

static int generation;

static __thread int host_actor, stack[32], depth, thread_mode = GLOBAL_MODE;
static __thread int per_thread[CONTEXTS], my_generation;
static __thread int in_host_function;

static void refresh(void);

/* ---- the log --------------------------------------------------------------------------------- */

static struct {
  const char* name;
  long count, held; /* `held`: with the GIL */
} calls[128];
static char *text, fail_name[64], hold_name[64];
static int holding; /* 1 = the next call of that name must wait, 2 = it waits */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static size_t text_used, text_room;
static int fail_code, fail_after;
static long fail_number; /* counts all later calls, by any name */
static int number_code;
static char number_name[64];
static __thread int inner; /* an entry point called by another one */

static void note(const char* format, ...) {
  char line[256];
  va_list values;
  va_start(values, format);
  int n = vsnprintf(line, sizeof line, format, values);
  va_end(values);
  if (text_used > 1 << 20) return;
  if (text_used + (size_t)n + 1 > text_room) text = realloc(text, text_room = 2 * text_room + 4096);
  memcpy(text + text_used, line, (size_t)n + 1);
  text_used += (size_t)n;
}

static void complain(const char* format, ...) {
  va_list values;
  size_t used = strlen(report);
  va_start(values, format);
  vsnprintf(report + used, sizeof report - used, format, values);
  va_end(values);
}

/* Return 1 if this thread holds the GIL; 0 in a process without Python. */
static int has_gil(void) {
  static int (*check)(void);
  static int looked;
  if (!looked) check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
  looked = 1;
  return check && check();
}

/* Wait for a change without the lock. Returns 0 after the timeout. */
static int wait_a_while(const struct timespec* end) {
  return pthread_cond_timedwait(&changed, &lock, end) == 0;
}

/* Seconds after which a wait counts as endless. */
static int patience(void) {
  const char* wanted = getenv("FAKE_CUDA_PATIENCE");
  return wanted ? atoi(wanted) : 10;
}

static struct timespec after_seconds(int seconds) {
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += seconds;
  return end;
}

/* Calls that do not depend on a device's state: a sticky error does not affect them. */
static int is_plain(const char* name) {
  static const char* const plain[] = {"cuInit",
                                      "cuDevice",
                                      "cuCtxPush",
                                      "cuCtxPop",
                                      "cuCtxGetCurrent",
                                      "cuCtxSetCurrent",
                                      "cuThreadExchangeStreamCaptureMode"};
  for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
    if (strncmp(name, plain[i], strlen(plain[i])) == 0) return 1;
  return 0;
}

/* "This leaves the process in an inconsistent state and any further CUDA work will return the same
 * error." */
static int is_sticky(int code) {
  return code == ILLEGAL_ADDRESS || code == LAUNCH_FAILED;
}

/* Record a call. Returns the code that it must fail with, or 0. */
static int enter(const char* name) {
  refresh();
  if (ended) {
    fprintf(stderr, "fake_cuda: %s after the driver was gone\n", name);
    return 4;
  }
  if (pid && pid != getpid()) {
    fprintf(stderr, "fake_cuda: %s in a forked child\n", name);
    return 3;
  }
  int i = 0;
  while (calls[i].name && strcmp(calls[i].name, name) != 0) i++;
  calls[i].name = name;
  calls[i].count++;
  calls[i].held += has_gil();
  if (in_host_function) {
    misuses++;
    complain("%s was called by a host function; ", name);
    return 800;
  }
  if (!initialised && strcmp(name, "cuInit") != 0) return 3;
  if (holding == 1 && strcmp(name, hold_name) == 0) {
    struct timespec end = after_seconds(patience());
    holding = 2;
    pthread_cond_broadcast(&changed);
    while (holding && wait_a_while(&end)) continue;
    if (holding) {
      misuses++;
      complain("%s was not let go: other threads wait for its caller; ", name);
    }
    holding = 0;
  }
  if (fail_code && strcmp(name, fail_name) == 0 && fail_after-- <= 0) {
    int code = fail_code;
    fail_code = 0;
    if (is_sticky(code)) broken = code;
    return code;
  }
  if (fail_number > 0 && !inner && --fail_number == 0) {
    snprintf(number_name, sizeof number_name, "%s", name);
    if (is_sticky(number_code)) broken = number_code;
    return number_code;
  }
  return broken && !is_plain(name) ? broken : 0;
}

#define ENTER(name)              \
  pthread_mutex_lock(&lock);     \
  int code = enter(name);        \
  if (code) {                    \
    pthread_mutex_unlock(&lock); \
    return code;                 \
  }

#define LEAVE(value)             \
  do {                           \
    int left = (value);          \
    pthread_mutex_unlock(&lock); \
    return left;                 \
  } while (0)

/* ---- clocks ---------------------------------------------------------------------------------- */

/* Report a full table. */
static void full(const char* what) {
  fprintf(stderr, "fake_cuda: no room for more %s\n", what);
  abort();
}

static int new_actor(void) {
  if (n_actors == 0) n_actors = 1; /* 0 means no actor */
  if (n_actors == ACTORS) full("streams and threads");
  return n_actors++;
}

/* Discard a thread's state from before fake_reset. */
static void refresh(void) {
  if (my_generation == generation) return;
  my_generation = generation;
  host_actor = depth = 0;
  thread_mode = GLOBAL_MODE;
  memset(per_thread, 0, sizeof per_thread);
}

static int host(void) {
  refresh();
  if (host_actor == 0) host_actor = new_actor();
  return host_actor;
}

static uint32_t get(const clocks* c, int actor) {
  return actor < c->n ? c->at[actor] : 0;
}

static void grow(clocks* c, int n) {
  if (n <= c->n) return;
  int room = n + n / 2 + 8;
  c->at = realloc(c->at, (size_t)room * sizeof *c->at);
  if (c->at == NULL) full("clocks");
  memset(c->at + c->n, 0, (size_t)(room - c->n) * sizeof *c->at);
  c->n = room;
}

static void tick(clocks* c, int actor) {
  grow(c, actor + 1);
  c->at[actor]++;
}

static void clear(clocks* c) {
  free(c->at);
  *c = (clocks){NULL, 0};
}

static void join(clocks* into, const clocks* from) {
  grow(into, from->n < n_actors ? from->n : n_actors);
  for (int i = 0; i < from->n && i < n_actors; i++)
    if (from->at[i] > into->at[i]) into->at[i] = from->at[i];
}

/* Return 1 if `to` knows everything in `what`. */
static int is_known(const clocks* what, const clocks* to) {
  for (int i = 0; i < what->n; i++)
    if (what->at[i] > get(to, i)) return 0;
  return 1;
}

static int new_stream(int where, int blocking) {
  if (n_streams == STREAMS) full("streams");
  streams[n_streams] =
      (stream){1, 1, where, contexts[where].device, blocking, new_actor(), 0, 0, NEVER};
  return n_streams++;
}

/* This thread's current context, -1 = none; its device. */
static int here(void) {
  return depth ? stack[depth - 1] : -1;
}

static int current(void) {
  return depth ? contexts[here()].device : -1;
}

/* 201 without a context, 709 "the context current to the calling thread has been destroyed". */
static int context_error(void) {
  if (depth == 0) return 201;
  return contexts[here()].alive ? 0 : CONTEXT_IS_DESTROYED;
}

static int context_of(const void* handle) {
  const context* found = handle;
  return found >= contexts && found < contexts + n_contexts ? (int)(found - contexts) : -1;
}

/* Return the stream of a handle, 0 = unknown. Default streams belong to a context. */
static int resolve(uint64_t handle, int where) {
  refresh();
  if (handle <= 1) {
    if (!streams[legacy[where]].alive) legacy[where] = new_stream(where, 1);
    return legacy[where];
  }
  if (handle == 2) {
    if (!streams[per_thread[where]].alive) per_thread[where] = new_stream(where, 1);
    return per_thread[where];
  }
  uint64_t first = (uint64_t)(uintptr_t)streams, i = (handle - first) / sizeof *streams;
  if (handle > first && i < (uint64_t)n_streams && handle == (uint64_t)(uintptr_t)&streams[i]) {
    if (streams[i].alive) return (int)i;
    misuses++;
    complain("a destroyed stream was used; ");
    return 0;
  }
  misuses++;
  complain("no stream has the handle %lu; ", (unsigned long)handle);
  return 0;
}

/* Add what a stream waits for by the rules of the legacy stream. */
static void join_others(int s, clocks* into) {
  int where = streams[s].context;
  if (s == legacy[where]) {
    for (int i = 1; i < n_streams; i++)
      if (streams[i].used && streams[i].context == where && streams[i].blocking && i != s)
        join(into, &now[streams[i].actor]);
  } else if (streams[s].blocking && legacy[where]) {
    join(into, &now[streams[legacy[where]].actor]);
  }
}

/* Add an operation to a stream: after everything that the host knows, and those rules. */
static clocks* step(int s) {
  clocks* mine = &now[streams[s].actor];
  join(mine, &now[host()]);
  join_others(s, mine);
  tick(mine, streams[s].actor);
  return mine;
}

static int is_complete(const clocks* when) {
  for (int i = 1; i < n_streams; i++)
    if (streams[i].used && get(when, streams[i].actor) > streams[i].done) return 0;
  return 1;
}

/* As in the log: s3 is a stream; host threads have no number. */
static const char* name_of(int actor, char* room) {
  int i = 1;
  while (i < n_streams && !(streams[i].used && streams[i].actor == actor)) i++;
  snprintf(room, 16, i < n_streams ? "s%d" : "the host", i);
  return room;
}

static int touch(int actor, char* low, size_t n, int write) {
  char *high = low + n, names[2][16];
  int found = 0;
  for (size_t i = 0; i < n_accesses && !found; i++) {
    access_* old = &accesses[i];
    if (old->low < high && low < old->high && (old->write || write) && old->actor != actor &&
        old->time > get(&now[actor], old->actor)) {
      found = 1;
      races++;
      complain("%s at %p by %s races with a %s by %s; ", write ? "write" : "read", (void*)low,
               name_of(actor, names[0]), old->write ? "write" : "read",
               name_of(old->actor, names[1]));
    }
  }
  if (n_accesses == room) accesses = realloc(accesses, (room = 2 * room + 64) * sizeof *accesses);
  accesses[n_accesses++] = (access_){low, high, actor, write, get(&now[actor], actor)};
  return found;
}

static block* find_block(const void* address) {
  for (int i = 0; i < n_blocks; i++)
    if (blocks[i].low && blocks[i].low <= (char*)address && (char*)address < blocks[i].high)
      return &blocks[i];
  return NULL;
}

static int capture_state(int s);

/* Remember memory that a graph uses. Host memory without a block may be gone at a replay. */
static void note_node(int s, const block* b, void* address, size_t n) {
  if (capture_state(s) != ACTIVE) return;
  if (n_nodes == room_nodes)
    nodes = realloc(nodes, (size_t)(room_nodes = 2 * room_nodes + 64) * sizeof *nodes);
  if (nodes == NULL) full("nodes");
  nodes[n_nodes++] =
      (node){streams[s].capture, address, (char*)address + n, b && b->alive ? b->born : -1};
}

static void use_memory(int s, void* address, size_t n, int write) {
  block* b = find_block(address);
  note_node(s, b, address, n);
  if (b && (!b->alive || (char*)address + n > b->high)) {
    misuses++;
    complain("memory was used after it was freed, or beyond its end; ");
  }
  touch(streams[s].actor, address, n, write);
}

/* Return 1 if a device's kernels may access memory: its own, a pool's that allows it
 * (cuMemPoolSetAccess), or that of a device that its context has access to (cuCtxEnablePeerAccess,
 * which does not apply to pools). */
static int is_visible(const block* b, int where) {
  int device = contexts[where].device;
  if (b == NULL || b->kind != DEVICE || b->device == device) return 1;
  return (b->pool >= 0 ? pools[b->pool].seen_by >> device : peers[where] >> b->device) & 1;
}

static void look_by_kernel(int s, void* address) {
  if (!is_visible(find_block(address), streams[s].context)) {
    misuses++;
    complain("a kernel on device %d touched memory that it cannot see; ", streams[s].device);
    broken = ILLEGAL_ADDRESS;
  }
}

static uint64_t new_block(int device, size_t n, int kind) {
  if (n_blocks == BLOCKS) full("blocks");
  mapped++;
  char *memory = aligned_alloc(256, (n + 511) / 256 * 256), *low = memory;
  if (memory == NULL) return 0;
  memset(memory, 0xA5, n);
  if (kind == DEVICE) {
    low = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (low == MAP_FAILED) abort();
  }
  blocks[n_blocks++] =
      (block){low, low + n, device, kind,      1,        -1,
              -1,  0,       n,      {NULL, 0}, ++births, kind == DEVICE ? memory : NULL};
  return (uint64_t)(uintptr_t)low;
}

/* Return the contents of an address. */
static char* bytes_of(const void* address) {
  block* b = find_block(address);
  return b && b->held ? b->held + ((char*)address - b->low) : (char*)address;
}

static void drop_blocks(void) {
  for (int i = 0; i < n_blocks; i++) {
    if (blocks[i].held) munmap(blocks[i].low, blocks[i].room);
    free(blocks[i].held ? blocks[i].held : blocks[i].low);
    clear(&blocks[i].given_back);
  }
  memset(blocks, 0, (size_t)n_blocks * sizeof *blocks);
  n_blocks = 0;
}

/* ---- captures -------------------------------------------------------------------------------- */

static int capture_state(int s) {
  return streams[s].capture ? captures[streams[s].capture].state : NONE;
}

static void invalidate(int s) {
  if (streams[s].capture) captures[streams[s].capture].state = INVALIDATED;
}

/* The legacy stream, while a stream that it would wait for captures. */
static int is_implicit(int s, int breaks) {
  int where = streams[s].context, found = 0;
  if (s != legacy[where]) return 0;
  for (int i = 1; i < n_streams; i++)
    if (streams[i].used && streams[i].context == where && streams[i].blocking && i != s &&
        capture_state(i) == ACTIVE) {
      found = 1;
      if (breaks) invalidate(i);
    }
  return found;
}

/* Calls that a capture forbids on its thread, or in the strictest mode on all threads. */
static int is_unsafe(void) {
  int found = 0;
  if (thread_mode == RELAXED) return 0;
  for (int i = 1; i < n_captures; i++) {
    capture* c = &captures[i];
    int mine = pthread_equal(c->thread, pthread_self());
    if (c->state == ACTIVE &&
        ((mine && c->mode != RELAXED) || (c->mode == GLOBAL_MODE && thread_mode == GLOBAL_MODE))) {
      c->state = INVALIDATED;
      found = 1;
    }
  }
  return found;
}

#include "fake_pools.h"

/* ---- the driver's entry points --------------------------------------------------------------- */

static void at_end(void) {
  ended = 1;
}

int cuInit(unsigned flags) {
  (void)flags;
  ENTER("cuInit");
  note("cuInit\n");
  const char* wanted = getenv("FAKE_CUDA_DEVICES");
  if (wanted) n_devices = atoi(wanted);
  if (n_devices > DEVICES) full("devices");
  if (getenv("FAKE_CUDA_PEERS")) has_peers = atoi(getenv("FAKE_CUDA_PEERS"));
  const char* fails = getenv("FAKE_CUDA_INIT");
  if (fails) LEAVE(atoi(fails));
  if (n_devices == 0) LEAVE(100);
  if (!initialised) {
    atexit(at_end);
    make_pools(); /* so that later threads find them complete */
  }
  initialised = 1;
  pid = getpid();
  LEAVE(0);
}

static const struct {
  int code;
  const char *name, *text;
} errors[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

int cuGetErrorName(int code, const char** name) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) {
      *name = errors[i].name;
      return 0;
    }
  return 1;
}

int cuGetErrorString(int code, const char** string) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) {
      *string = errors[i].text;
      return 0;
    }
  return 1;
}

int cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = n_devices;
  LEAVE(0);
}

int cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet");
  *device = ordinal;
  LEAVE(ordinal < n_devices ? 0 : 101);
}

int cuDeviceGetName(char* name, int length, int device) {
  ENTER("cuDeviceGetName");
  snprintf(name, (size_t)length, "Fake device %d", device);
  LEAVE(0);
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  ENTER("cuDeviceGetAttribute");
  *value = attribute == 115 && has_pools;
  LEAVE(0);
}

/* Creating a context allocates on the device, which a capture forbids. */
int cuDevicePrimaryCtxRetain(void** made, int device) {
  ENTER("cuDevicePrimaryCtxRetain");
  note("cuDevicePrimaryCtxRetain %d\n", device);
  if (device < 0 || device >= n_devices) LEAVE(101);
  if (!contexts[device].alive && is_unsafe()) LEAVE(900);
  retained[device]++;
  contexts[device].alive = 1;
  *made = &contexts[device];
  LEAVE(0);
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  ENTER("cuDevicePrimaryCtxGetState");
  *flags = 0;
  *active = contexts[device].alive;
  LEAVE(0);
}

int cuCtxPushCurrent_v2(void* context) {
  ENTER("cuCtxPushCurrent");
  int where = context_of(context);
  if (where < 0 || (where >= DEVICES && !contexts[where].alive)) LEAVE(201);
  if (depth == (int)(sizeof stack / sizeof *stack)) full("contexts of a thread");
  stack[depth++] = where;
  LEAVE(0);
}

int cuCtxGetCurrent(void** context) {
  ENTER("cuCtxGetCurrent");
  *context = depth ? &contexts[here()] : NULL;
  LEAVE(0);
}

int cuCtxGetDevice(int* device) {
  ENTER("cuCtxGetDevice");
  *device = current();
  LEAVE(depth ? 0 : 201);
}

/* Replaces the top of this thread's stack; NULL pops it. */
int cuCtxSetCurrent(void* context) {
  ENTER("cuCtxSetCurrent");
  int where = context_of(context);
  if (context && (where < 0 || (where >= DEVICES && !contexts[where].alive))) LEAVE(201);
  if (depth && context == NULL) depth--;
  if (context && depth == 0) depth = 1;
  if (context) stack[depth - 1] = where;
  LEAVE(0);
}

int cuCtxPopCurrent_v2(void** context) {
  ENTER("cuCtxPopCurrent");
  if (depth == 0) {
    misuses++;
    complain("a context was popped that was not pushed; ");
    LEAVE(201);
  }
  *context = &contexts[stack[--depth]];
  LEAVE(0);
}

/* It needs no context (seen on an H100, driver 580). */
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  ENTER("cuPointerGetAttribute");
  block* b = find_block((void*)(uintptr_t)address);
  if (b == NULL) LEAVE(1);
  int answer = attribute == 2   ? (b->kind == HOST ? 1 : 2)
               : attribute == 8 ? b->kind == MANAGED
                                : b->device;
  if (attribute == 8) {
    *(unsigned*)value = (unsigned)answer;
  } else {
    *(int*)value = answer;
  }
  LEAVE(0);
}

int cuStreamCreate(void** made, unsigned flags) {
  ENTER("cuStreamCreate");
  if ((code = context_error())) LEAVE(code);
  int s = new_stream(here(), !(flags & 1));
  *made = &streams[s];
  note("cuStreamCreate -> s%d\n", s);
  LEAVE(0);
}

/* Open a block with the stream of a handle. */
#define STREAM_ENTER(name, handle)             \
  ENTER(name);                                 \
  if ((code = context_error())) LEAVE(code);   \
  int s = resolve((uint64_t)(handle), here()); \
  if (s == 0) LEAVE(400)

int cuStreamSynchronize(uint64_t handle) {
  STREAM_ENTER("cuStreamSynchronize", handle);
  note("cuStreamSynchronize s%d\n", s);
  if (is_unsafe() || capture_state(s) == ACTIVE) {
    invalidate(s);
    LEAVE(900);
  }
  if (is_implicit(s, 1)) LEAVE(906);
  if (wait_for_functions(s)) LEAVE(0);
  syncs++;
  if (!is_complete(&now[streams[s].actor])) blocked++;
  step(s);
  join(&now[host()], &now[streams[s].actor]);
  trim_all();
  LEAVE(0);
}

/* "Invoking ... is illegal while a stream of the context captures": as for a stream. */
int cuCtxSynchronize(void) {
  ENTER("cuCtxSynchronize");
  if ((code = context_error())) LEAVE(code);
  if (is_unsafe()) LEAVE(900);
  for (int i = 1; i < n_streams; i++)
    if (streams[i].used && streams[i].context == here() && capture_state(i) == ACTIVE) {
      invalidate(i);
      LEAVE(900);
    }
  syncs++;
  for (int i = 1; i < n_streams; i++)
    if (streams[i].used && streams[i].context == here()) {
      if (wait_for_functions(i)) LEAVE(0);
      join(&now[host()], &now[streams[i].actor]);
    }
  trim_all();
  LEAVE(0);
}

/* Its work still finishes. */
int cuStreamDestroy_v2(uint64_t handle) {
  STREAM_ENTER("cuStreamDestroy", handle);
  if (handle <= 2) LEAVE(400);
  streams[s].alive = 0;
  LEAVE(0);
}

int cuStreamGetCtx(uint64_t handle, void** found) {
  STREAM_ENTER("cuStreamGetCtx", handle);
  *found = &contexts[streams[s].context];
  LEAVE(0);
}

int cuStreamQuery(uint64_t handle) {
  STREAM_ENTER("cuStreamQuery", handle);
  if (is_unsafe() || capture_state(s) == ACTIVE) {
    invalidate(s);
    LEAVE(900);
  }
  if (is_implicit(s, 1)) LEAVE(906);
  /* A query ignores other streams, even on the legacy stream: it only orders new work. */
  if (!is_complete(&now[streams[s].actor])) LEAVE(600);
  join(&now[host()], &now[streams[s].actor]);
  LEAVE(0);
}

int cuStreamWaitEvent(uint64_t handle, event* e, unsigned flags) {
  (void)flags;
  STREAM_ENTER("cuStreamWaitEvent", handle);
  note("cuStreamWaitEvent s%d e%d\n", s, (int)(e - events));
  if (!e->alive) {
    misuses++;
    LEAVE(400);
  }
  if (is_implicit(s, 1)) LEAVE(906);
  int own = streams[s].capture;
  if (e->capture && own == 0) { /* the stream joins the capture */
    streams[s].capture = e->capture;
  } else if (e->capture && e->capture != own) {
    invalidate(s);
    captures[e->capture].state = INVALIDATED;
    LEAVE(902);
  } else if (!e->capture && own) {
    invalidate(s);
    LEAVE(905);
  }
  join(step(s), &e->when);
  LEAVE(0);
}

int cuStreamIsCapturing(uint64_t handle, int* status) {
  STREAM_ENTER("cuStreamIsCapturing", handle);
  if (is_implicit(s, 0)) LEAVE(906);
  *status = capture_state(s);
  LEAVE(0);
}

int cuStreamGetCaptureInfo_v2(uint64_t handle, int* status, uint64_t* id, void* graph, void* edges,
                              void* n_edges) {
  (void)graph, (void)edges, (void)n_edges;
  STREAM_ENTER("cuStreamGetCaptureInfo", handle);
  *status = capture_state(s);
  *id = (uint64_t)streams[s].capture;
  LEAVE(0);
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  int before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  LEAVE(0);
}

int cuEventCreate(event** made, unsigned flags) {
  ENTER("cuEventCreate");
  if ((code = context_error())) LEAVE(code);
  if (flags != 2) misuses++; /* an event with timing would be slow */
  int i = 0;
  while (i < n_events && events[i].used) i++;
  if (i == EVENTS) full("events");
  if (i == n_events) n_events++;
  events[i].used = events[i].alive = 1;
  events[i].context = here();
  *made = &events[i];
  note("cuEventCreate -> e%d\n", i);
  LEAVE(0);
}

int cuEventRecord(event* e, uint64_t handle) {
  STREAM_ENTER("cuEventRecord", handle);
  note("cuEventRecord e%d s%d\n", (int)(e - events), s);
  if (!e->alive || e->context != streams[s].context) {
    misuses++;
    complain("an event was recorded on a stream of another context; ");
    LEAVE(400);
  }
  if (is_implicit(s, 1)) LEAVE(906);
  e->capture = capture_state(s) == ACTIVE ? streams[s].capture : 0;
  clear(&e->when);
  join(&e->when, step(s));
  e->recorded = 1;
  LEAVE(0);
}

/* cuda.h lists CUDA_ERROR_INVALID_CONTEXT for these; it is unclear which drivers return it. */
#define CONTEXT_NEEDED                                 \
  if (depth == 0) {                                    \
    misuses++;                                         \
    complain("an event was used without a context; "); \
    LEAVE(201);                                        \
  }                                                    \
  if ((code = context_error())) LEAVE(code);

/* The event or its context was destroyed. */
static int is_dead(const event* e) {
  if (e->alive) return 0;
  misuses++;
  complain("a destroyed event was used; ");
  return 1;
}

int cuEventQuery(event* e) {
  ENTER("cuEventQuery");
  CONTEXT_NEEDED
  if (is_dead(e)) LEAVE(400);
  if (e->capture) {
    captures[e->capture].state = INVALIDATED;
    LEAVE(907);
  }
  if (is_unsafe()) LEAVE(900);
  if (!is_complete(&e->when)) LEAVE(600);
  join(&now[host()], &e->when);
  LEAVE(0);
}

int cuEventSynchronize(event* e) {
  ENTER("cuEventSynchronize");
  CONTEXT_NEEDED
  note("cuEventSynchronize e%d\n", (int)(e - events));
  if (is_dead(e)) LEAVE(400);
  if (e->capture) {
    captures[e->capture].state = INVALIDATED;
    LEAVE(907);
  }
  if (is_unsafe()) LEAVE(900);
  syncs++;
  if (!is_complete(&e->when)) blocked++;
  join(&now[host()], &e->when);
  trim_all();
  LEAVE(0);
}

int cuEventDestroy_v2(event* e) {
  ENTER("cuEventDestroy");
  CONTEXT_NEEDED
  if (!e->alive) misuses++;
  clear(&e->when);
  memset(e, 0, sizeof *e);
  LEAVE(0);
}

/* "cuMemAlloc: memory of the context", which ends with it. */
int cuMemAlloc_v2(uint64_t* address, size_t n) {
  ENTER("cuMemAlloc");
  if ((code = context_error())) LEAVE(code);
  if (is_unsafe()) LEAVE(900);
  if (n == 0) LEAVE(1);
  if (n > MOST) LEAVE(2);
  *address = new_block(current(), n, DEVICE);
  if (*address == 0) LEAVE(2);
  blocks[n_blocks - 1].context = here();
  LEAVE(0);
}

static int free_block(uint64_t address, int s) {
  block* b = find_block((void*)(uintptr_t)address);
  if (b == NULL || !b->alive || (uint64_t)(uintptr_t)b->low != address) {
    misuses++;
    complain("the freed address is not a block; ");
    return 1;
  }
  if (s) use_memory(s, b->low, (size_t)(b->high - b->low), 1);
  b->alive = 0;
  if (b->pool >= 0) give_to_pool(b, s ? &now[streams[s].actor] : &now[host()]);
  return 0;
}

int cuMemFree_v2(uint64_t address) {
  ENTER("cuMemFree");
  if ((code = context_error())) LEAVE(code);
  if (is_unsafe()) LEAVE(900);
  LEAVE(free_block(address, 0));
}

int cuMemFreeAsync(uint64_t address, uint64_t handle) {
  STREAM_ENTER("cuMemFreeAsync", handle);
  note("cuMemFreeAsync s%d\n", s);
  step(s);
  LEAVE(free_block(address, s));
}

/* A copy of pageable memory may wait for the device, so it counts as unsafe. */
static int is_paged(uint64_t to, uint64_t from) {
  return find_block((void*)(uintptr_t)to) == NULL || find_block((void*)(uintptr_t)from) == NULL;
}

/* A plain copy between devices works for memory of cuMemAlloc, and for memory that the current
 * context can access; "when p2p is not enabled, only cudaMemcpyPeerAsync correctly handles memory
 * not allocated via cudaMalloc" (torch's c10/cuda/CUDACachingAllocator.cpp). Returns 1 for other
 * memory. */
static int is_hidden(uint64_t to, uint64_t from) {
  const block *target = find_block((void*)(uintptr_t)to),
              *source = find_block((void*)(uintptr_t)from);
  int hidden = (target && target->pool >= 0 && !is_visible(target, here())) ||
               (source && source->pool >= 0 && !is_visible(source, here()));
  if (hidden) {
    misuses++;
    complain("a plain copy between devices of memory of a pool that this device cannot see; ");
  }
  return hidden;
}

/* Count copies by the number of bits of their size. */
static void count_copy(size_t n) {
  int bits = 0;
  while (n >> bits) bits++;
  sizes[bits]++;
}

/* "A copy (in the implicit NULL stream) between the memories of two different devices does not
 * start until all commands previously issued to either device have completed and runs to completion
 * before any commands issued after the copy to either device can start" (CUDA programming guide,
 * peer-to-peer memory copy). In both directions, for the other device's stream that represents all
 * its streams. */
static void join_devices(int s, uint64_t to, uint64_t from) {
  const block* sides[] = {find_block((void*)(uintptr_t)to), find_block((void*)(uintptr_t)from)};
  if (s != legacy[streams[s].context] || !sides[0] || !sides[1] ||
      sides[0]->device == sides[1]->device)
    return;
  for (int i = 0; i < 2; i++) {
    int other = resolve(1, sides[i]->device);
    if (other == s) continue;
    join(&now[streams[s].actor], step(other));
    join(&now[streams[other].actor], &now[streams[s].actor]);
  }
}

static void copy(int s, char* to, const char* from, size_t n) {
  if (to < from + n && from < to + n && n) {
    misuses++;
    complain("a copy whose sides overlap; ");
  }
  use_memory(s, (char*)from, n, 0);
  use_memory(s, to, n, 1);
  memmove(bytes_of(to), bytes_of(from), n);
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t n, uint64_t handle) {
  STREAM_ENTER("cuMemcpyAsync", handle);
  note("cuMemcpyAsync s%d %zu\n", s, n);
  count_copy(n);
  if (is_paged(to, from) && is_unsafe()) LEAVE(900);
  if (is_implicit(s, 1)) LEAVE(906);
  if (is_hidden(to, from)) LEAVE(1);
  step(s);
  join_devices(s, to, from);
  copy(s, (char*)(uintptr_t)to, (char*)(uintptr_t)from, n);
  LEAVE(0);
}

int cuMemcpyPeerAsync(uint64_t to, const context* to_context, uint64_t from,
                      const context* from_context, size_t n, uint64_t handle) {
  STREAM_ENTER("cuMemcpyPeerAsync", handle);
  note("cuMemcpyPeerAsync s%d %zu\n", s, n);
  count_copy(n);
  block *target = find_block((void*)(uintptr_t)to), *source = find_block((void*)(uintptr_t)from);
  if (!target || !source || target->device != to_context->device ||
      source->device != from_context->device) {
    misuses++;
    complain("a copy between devices with addresses of others; ");
    LEAVE(1);
  }
  if (!to_context->alive || !from_context->alive) LEAVE(CONTEXT_IS_DESTROYED);
  step(s);
  join_devices(s, to, from);
  copy(s, (char*)(uintptr_t)to, (char*)(uintptr_t)from, n);
  LEAVE(0);
}

typedef struct {
  size_t from_x, from_y;
  int from_type;
  char* from_host;
  uint64_t from_device;
  void* from_array;
  size_t from_pitch, to_x, to_y;
  int to_type;
  char* to_host;
  uint64_t to_device;
  void* to_array;
  size_t to_pitch, width, height;
} box;

int cuMemcpy2DAsync_v2(const box* b, uint64_t handle) {
  STREAM_ENTER("cuMemcpy2DAsync", handle);
  note("cuMemcpy2DAsync s%d %zux%zu\n", s, b->height, b->width);
  count_copy(b->width * b->height);
  if (b->from_pitch < b->width || b->to_pitch < b->width || b->from_pitch > INT32_MAX ||
      b->to_pitch > INT32_MAX)
    LEAVE(1);
  if ((b->from_type == 1 || b->to_type == 1) && is_unsafe()) LEAVE(900);
  if (is_hidden(b->to_type == 1 ? 0 : b->to_device, b->from_type == 1 ? 0 : b->from_device))
    LEAVE(1);
  step(s);
  for (size_t i = 0; i < b->height; i++)
    copy(s, (b->to_type == 1 ? b->to_host : (char*)(uintptr_t)b->to_device) + i * b->to_pitch,
         (b->from_type == 1 ? b->from_host : (char*)(uintptr_t)b->from_device) + i * b->from_pitch,
         b->width);
  LEAVE(0);
}

/* ---- functions for tests --------------------------------------------------------------------- */

#define TEST(type, expression) \
  pthread_mutex_lock(&lock);   \
  type answer = (expression);  \
  pthread_mutex_unlock(&lock); \
  return answer

long fake_calls(const char* name) {
  long sum = 0;
  for (int i = 0; i < 128 && calls[i].name; i++)
    if (*name == 0 || strcmp(calls[i].name, name) == 0) sum += calls[i].count;
  return sum;
}

/* Calls by a thread that held the GIL. */
long fake_held(const char* name) {
  long sum = 0;
  for (int i = 0; i < 128 && calls[i].name; i++)
    if (*name == 0 || strcmp(calls[i].name, name) == 0) sum += calls[i].held;
  return sum;
}

/* Copies of fewer bytes than a power of two; 0 = all copies. */
long fake_copies(size_t below) {
  long sum = 0;
  for (int bits = 0; bits < 64; bits++)
    if (below == 0 || (size_t)1 << bits <= below) sum += sizes[bits];
  return sum;
}

/* How often a pool took memory from the system, and returned it. */
long fake_mapped(void) {
  return mapped;
}

long fake_returned(void) {
  return returned;
}

const char* fake_log(void) {
  return text ? text : "";
}

void fake_forget(void) {
  memset(calls, 0, sizeof calls);
  memset(sizes, 0, sizeof sizes);
  mapped = returned = 0;
  text_used = 0;
  if (text) *text = 0;
}

/* Start again with this many devices. No earlier object may be in use. */
void fake_reset(int devices) {
  generation++;
  n_devices = devices;
  initialised = 0;
  has_pools = 1;
  has_peers = 0;
  n_captures = 1;
  n_nodes = last_graph = 0;
  fail_code = broken = holding = 0;
  fail_number = *number_name = 0;
  n_accesses = 0;
  *report = 0;
  races = misuses = syncs = blocked = 0;
  for (int i = 0; i < n_actors; i++) clear(&now[i]);
  for (int i = 0; i < n_events; i++) {
    clear(&events[i].when);
    memset(&events[i], 0, sizeof events[i]);
  }
  memset(streams, 0, (size_t)n_streams * sizeof *streams);
  memset(legacy, 0, sizeof legacy);
  memset(retained, 0, sizeof retained);
  memset(peers, 0, sizeof peers);
  memset(pools, 0, sizeof pools);
  n_contexts = DEVICES;
  for (int i = 0; i < DEVICES; i++) contexts[i].alive = 0;
  n_actors = n_events = 0;
  n_streams = 1;
  drop_blocks();
  fake_forget();
}

/* Finish all work, and make it known to all: between tests that share the driver. */
void fake_settle(void) {
  pthread_mutex_lock(&lock);
  n_accesses = 0;
  pthread_mutex_unlock(&lock);
}

void fake_set_pools(int yes) {
  has_pools = yes;
}

void fake_set_peers(int yes) {
  has_peers = yes;
}

/* Clear a sticky error, as a new process would. */
void fake_mend(void) {
  broken = fail_code = 0;
  fail_number = 0;
}

/* Make the next call of a name wait in the driver. */
void fake_hold(const char* name) {
  pthread_mutex_lock(&lock);
  snprintf(hold_name, sizeof hold_name, "%s", name);
  holding = 1;
  pthread_mutex_unlock(&lock);
}

/* Returns 1 when it waits, 0 after so many seconds. */
int fake_is_held(int seconds) {
  struct timespec end = after_seconds(seconds);
  pthread_mutex_lock(&lock);
  while (holding != 2 && wait_a_while(&end)) continue;
  int answer = holding == 2;
  pthread_mutex_unlock(&lock);
  return answer;
}

void fake_let_go(void) {
  pthread_mutex_lock(&lock);
  holding = 0;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

const char* fake_report(void) {
  return report;
}

void fake_clear_report(void) {
  *report = 0;
  races = misuses = syncs = blocked = 0;
}

long fake_races(void) {
  return races;
}

long fake_misuses(void) {
  return misuses;
}

long fake_syncs(void) {
  return syncs;
}

long fake_blocked(void) {
  return blocked;
}

int fake_depth(void) {
  return depth;
}

int fake_mode(void) {
  return thread_mode;
}

int fake_current(void) {
  return current();
}

void fake_fail(const char* name, int code, int after) {
  snprintf(fail_name, sizeof fail_name, "%s", name);
  fail_code = code;
  fail_after = after;
}

/* Make the call with this number fail, 1 = the next one, by any name. */
void fake_fail_number(long number, int code) {
  *number_name = 0;
  fail_number = number;
  number_code = code;
}

/* The name of that call, "" = not yet. */
const char* fake_failed_call(void) {
  return number_name;
}

long fake_events(void) {
  long n = 0;
  for (int i = 0; i < n_events; i++) n += events[i].used;
  return n;
}

long fake_blocks(void) {
  long n = 0;
  for (int i = 0; i < n_blocks; i++) n += blocks[i].low && blocks[i].alive;
  return n;
}

uint64_t fake_stream(int device, int blocking) {
  TEST(uint64_t, (uint64_t)(uintptr_t)&streams[new_stream(device, blocking)]);
}

/* As in the log: 3 for s3. */
int fake_number(int device, uint64_t handle) {
  TEST(int, resolve(handle, device));
}

void fake_stream_destroy(uint64_t handle) {
  ((stream*)(uintptr_t)handle)->alive = 0;
}

/* Kind: 1 pinned, 2 device, 3 managed. */
uint64_t fake_alloc(int device, size_t n, int kind) {
  TEST(uint64_t, new_block(device, n, kind));
}

/* Read or write device memory like a kernel. */
void fake_peek(uint64_t address, size_t n, void* out) {
  memcpy(out, bytes_of((void*)(uintptr_t)address), n);
}

void fake_poke(uint64_t address, size_t n, const void* bytes) {
  memcpy(bytes_of((void*)(uintptr_t)address), bytes, n);
}

void fake_free(uint64_t address) {
  find_block((void*)(uintptr_t)address)->alive = 0;
}

int fake_is_alive(uint64_t address) {
  block* b = find_block((void*)(uintptr_t)address);
  return b && b->alive;
}

enum { WRITES = 1, COPIES = 2 };

/* A kernel that reads or writes memory, or a copy, which can access all devices; 1 = it races. */
int fake_kernel(int device, uint64_t handle, uint64_t address, size_t n, int how) {
  pthread_mutex_lock(&lock);
  int s = resolve(handle, device);
  long before = races;
  step(s);
  if (!(how & COPIES)) look_by_kernel(s, (void*)(uintptr_t)address);
  use_memory(s, (void*)(uintptr_t)address, n, how & WRITES);
  int raced = races != before;
  pthread_mutex_unlock(&lock);
  return raced;
}

/* The same by this host thread. */
int fake_host_access(uint64_t address, size_t n, int write) {
  pthread_mutex_lock(&lock);
  tick(&now[host()], host());
  int raced = touch(host(), (char*)(uintptr_t)address, n, write);
  pthread_mutex_unlock(&lock);
  return raced;
}

/* Later work on the stream does not finish until it is resumed. */
void fake_stall(int device, uint64_t handle) {
  pthread_mutex_lock(&lock);
  int s = resolve(handle, device);
  streams[s].done = get(&now[streams[s].actor], streams[s].actor);
  pthread_mutex_unlock(&lock);
}

void fake_resume(int device, uint64_t handle) {
  pthread_mutex_lock(&lock);
  streams[resolve(handle, device)].done = NEVER;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

void fake_capture(int device, uint64_t handle, int mode) {
  pthread_mutex_lock(&lock);
  int s = resolve(handle, device);
  if (n_captures == CAPTURES) full("captures");
  captures[n_captures] = (capture){ACTIVE, mode, s, pthread_self()};
  streams[s].capture = n_captures++;
  pthread_mutex_unlock(&lock);
}

/* Returns 0, 901 = the capture was invalidated, 904 = other streams have joined it. */
int fake_capture_end(int device, uint64_t handle) {
  pthread_mutex_lock(&lock);
  int s = resolve(handle, device), c = streams[s].capture, answer = 0;
  if (captures[c].state == INVALIDATED) answer = 901;
  for (int i = 1; i < n_streams; i++)
    if (streams[i].used && streams[i].capture == c) {
      if (i != s && answer == 0) answer = 904;
      streams[i].capture = 0;
    }
  captures[c].state = NONE;
  last_graph = answer ? 0 : c;
  pthread_mutex_unlock(&lock);
  return answer;
}

/* The number of the last graph, 0 if its capture was broken. */
int fake_last_graph(void) {
  return last_graph;
}

/* The number of copies and kernels in a graph. */
int fake_nodes(int graph) {
  int found = 0;
  for (int i = 0; i < n_nodes; i++) found += nodes[i].capture == graph;
  return found;
}

/* Replay a graph: every address in its nodes must belong to the allocation of the capture. Returns
 * the number of nodes whose memory is gone. */
int fake_replay(int graph) {
  int dead = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < n_nodes; i++) {
    const block* b = nodes[i].capture == graph ? find_block(nodes[i].low) : NULL;
    if (nodes[i].capture != graph || (b && b->alive && b->born == nodes[i].born)) continue;
    dead++;
    misuses++;
    complain("a graph was replayed whose memory at %p is gone; ", (void*)nodes[i].low);
  }
  pthread_mutex_unlock(&lock);
  return dead;
}

#include "fake_contexts.h"
