/* Contexts, pools and host functions of the recording driver: entry points; part of fake_cuda.c. */

#ifndef FAKE_CONTEXTS_H_
#define FAKE_CONTEXTS_H_

/* ---- contexts -------------------------------------------------------------------------------- */

/* "These resources also include memory allocations by cuMemAlloc()"; memory of pools survives. */
static void end_context(int where) {
  contexts[where].alive = 0;
  peers[where] = 0;
  for (int i = 1; i < n_streams; i++)
    if (streams[i].used && streams[i].context == where) streams[i].alive = 0;
  for (int i = 0; i < n_events; i++)
    if (events[i].used && events[i].context == where) events[i].alive = 0;
  for (int i = 0; i < n_blocks; i++)
    if (blocks[i].context == where) blocks[i].alive = 0;
}

int cuCtxCreate_v2(void** made, unsigned flags, int device) {
  (void)flags;
  ENTER("cuCtxCreate");
  if (device < 0 || device >= n_devices) LEAVE(101);
  if (is_unsafe()) LEAVE(900);
  if (n_contexts == CONTEXTS) full("contexts");
  contexts[n_contexts] = (context){device, 1};
  stack[depth++] = n_contexts;
  *made = &contexts[n_contexts++];
  LEAVE(0);
}

/* "If ctx is current to the calling thread then ctx will also be popped from the current thread's
 * context stack." */
int cuCtxDestroy_v2(void* context) {
  ENTER("cuCtxDestroy");
  int where = context_of(context);
  if (where < DEVICES || !contexts[where].alive) LEAVE(201);
  end_context(where);
  if (here() == where) depth--;
  LEAVE(0);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER("cuDevicePrimaryCtxRelease");
  if (retained[device] == 0) LEAVE(201);
  if (--retained[device] == 0) end_context(device);
  LEAVE(0);
}

/* "Destroy all allocations and reset all state on the primary context." */
int cuDevicePrimaryCtxReset_v2(int device) {
  ENTER("cuDevicePrimaryCtxReset");
  end_context(device);
  LEAVE(0);
}

int cuDeviceCanAccessPeer(int* yes, int device, int peer) {
  ENTER("cuDeviceCanAccessPeer");
  *yes = has_peers && device != peer;
  LEAVE(0);
}

int cuCtxEnablePeerAccess(const context* peer, unsigned flags) {
  ENTER("cuCtxEnablePeerAccess");
  if ((code = context_error())) LEAVE(code);
  if (!has_peers || flags) LEAVE(flags ? 1 : 217);
  if (peers[here()] >> peer->device & 1) LEAVE(704);
  peers[here()] |= 1 << peer->device;
  LEAVE(0);
}

/* ---- pools ----------------------------------------------------------------------------------- */

typedef struct {
  int type, id; /* 1 = a device */
} place;

typedef struct {
  int kind, handles;
  place where;
  void* security;
  size_t most;
  unsigned short usage;
  unsigned char reserved[54];
} pool_facts;

typedef struct {
  place where;
  int flags; /* 0, or 3 = read and write */
} access_facts;

/* Return the number of a pool; -1 = not a pool. */
static int number_of(const pool* found) {
  return found >= pools && found < pools + n_pools && found->used ? (int)(found - pools) : -1;
}

/* Open a block with the number of a pool. */
#define POOL_ENTER(name, handle)  \
  ENTER(name);                    \
  int number = number_of(handle); \
  if (number < 0) {               \
    misuses++;                    \
    complain("no such pool; ");   \
    LEAVE(1);                     \
  }                               \
  pool* self = &pools[number]

int cuMemAllocAsync(uint64_t* address, size_t n, uint64_t handle) {
  STREAM_ENTER("cuMemAllocAsync", handle);
  note("cuMemAllocAsync s%d\n", s);
  LEAVE(take_from_pool(pool_of[streams[s].device], n, s, address));
}

int cuMemAllocFromPoolAsync(uint64_t* address, size_t n, pool* from, uint64_t handle) {
  STREAM_ENTER("cuMemAllocFromPoolAsync", handle);
  note("cuMemAllocFromPoolAsync s%d\n", s);
  int number = number_of(from);
  if (number < 0) LEAVE(1);
  LEAVE(take_from_pool(number, n, s, address));
}

int cuMemPoolCreate(pool** made, const pool_facts* facts) {
  ENTER("cuMemPoolCreate");
  if (!has_pools) LEAVE(801);
  if (facts->kind != 1 || facts->where.type != 1) LEAVE(1);
  if (facts->where.id < 0 || facts->where.id >= n_devices) LEAVE(1);
  if (is_unsafe()) LEAVE(900);
  if (n_pools == POOLS) full("pools");
  pools[n_pools] = (pool){.used = 1, .device = facts->where.id, .seen_by = 1 << facts->where.id};
  *made = &pools[n_pools++];
  LEAVE(0);
}

/* "If any pointers obtained from this pool haven't been freed [...] the function will return
 * immediately and the resources associated with the pool will be released automatically once there
 * are no more outstanding allocations." */
int cuMemPoolDestroy(pool* handle) {
  POOL_ENTER("cuMemPoolDestroy", handle);
  if (number < DEVICES) LEAVE(1);
  trim(number, 0);
  self->used = 0;
  for (int i = 0; i < DEVICES; i++)
    if (pool_of[i] == number) pool_of[i] = i;
  LEAVE(0);
}

int cuMemPoolTrimTo(pool* handle, size_t keep) {
  POOL_ENTER("cuMemPoolTrimTo", handle);
  (void)self;
  trim(number, keep);
  LEAVE(0);
}

enum { THRESHOLD = 4, RESERVED, RESERVED_HIGH, TAKEN, TAKEN_HIGH };

int cuMemPoolSetAttribute(pool* handle, int which, void* value) {
  POOL_ENTER("cuMemPoolSetAttribute", handle);
  if (which == THRESHOLD) self->threshold = *(uint64_t*)value;
  if (which == RESERVED_HIGH) self->reserved_high = self->reserved;
  if (which == TAKEN_HIGH) self->taken_high = self->taken;
  LEAVE(which < 1 || which == RESERVED || which == TAKEN || which > TAKEN_HIGH);
}

int cuMemPoolGetAttribute(pool* handle, int which, void* value) {
  POOL_ENTER("cuMemPoolGetAttribute", handle);
  if (which < 1 || which > TAKEN_HIGH) LEAVE(1);
  const uint64_t found[] = {self->threshold, self->reserved, self->reserved_high, self->taken,
                            self->taken_high};
  if (which < THRESHOLD) {
    *(int*)value = 1;
  } else {
    *(uint64_t*)value = found[which - THRESHOLD];
  }
  LEAVE(0);
}

/* "Allocations are accessible from the device where they are located; this cannot be revoked"
 * (CUDA programming guide, stream-ordered memory allocator). */
int cuMemPoolSetAccess(pool* handle, const access_facts* facts, size_t n) {
  POOL_ENTER("cuMemPoolSetAccess", handle);
  for (size_t i = 0; i < n; i++) {
    int device = facts[i].where.id, own = device == self->device;
    if (facts[i].where.type != 1 || device < 0 || device >= n_devices) LEAVE(1);
    if (own ? facts[i].flags != 3 : !has_peers && facts[i].flags) LEAVE(1);
    self->seen_by &= ~(1 << device);
    if (facts[i].flags == 3) self->seen_by |= 1 << device;
  }
  LEAVE(0);
}

int cuMemPoolGetAccess(int* flags, pool* handle, const place* where) {
  POOL_ENTER("cuMemPoolGetAccess", handle);
  *flags = self->seen_by >> where->id & 1 ? 3 : 0;
  LEAVE(0);
}

int cuDeviceGetDefaultMemPool(pool** found, int device) {
  ENTER("cuDeviceGetDefaultMemPool");
  if (device < 0 || device >= n_devices) LEAVE(101);
  *found = &pools[device];
  LEAVE(has_pools ? 0 : 801);
}

int cuDeviceGetMemPool(pool** found, int device) {
  ENTER("cuDeviceGetMemPool");
  if (device < 0 || device >= n_devices) LEAVE(101);
  *found = &pools[pool_of[device]];
  LEAVE(has_pools ? 0 : 801);
}

int cuDeviceSetMemPool(int device, pool* handle) {
  POOL_ENTER("cuDeviceSetMemPool", handle);
  if (self->device != device) LEAVE(1);
  pool_of[device] = number;
  LEAVE(0);
}

/* ---- host functions -------------------------------------------------------------------------- */

int cuLaunchHostFunc(uint64_t handle, void (*call)(void*), void* data) {
  STREAM_ENTER("cuLaunchHostFunc", handle);
  note("cuLaunchHostFunc s%d\n", s);
  if (is_implicit(s, 1)) LEAVE(906);
  clocks* mine = step(s);
  if (capture_state(s) == ACTIVE) LEAVE(0); /* the graph will call it */
  host_function* made = calloc(1, sizeof *made);
  pthread_t thread;
  if (made == NULL) LEAVE(2);
  *made = (host_function){.stream = s, .run = generation, .call = call, .data = data};
  join(&made->when, mine);
  if (pthread_create(&thread, NULL, run_function, made) != 0) full("threads");
  pthread_detach(thread);
  streams[s].running++;
  LEAVE(0);
}

#endif
