/* Memory pools and host functions of the recording driver: part of fake_cuda.c, before its entry
 * points. */

#ifndef FAKE_POOLS_H_
#define FAKE_POOLS_H_

#define MOST ((size_t)1 << 40) /* bytes of one allocation */

static void make_pools(void) {
  for (n_pools = 0; n_pools < DEVICES; n_pools++) {
    pools[n_pools] = (pool){.used = 1, .device = n_pools, .seen_by = 1 << n_pools};
    pool_of[n_pools] = n_pools;
  }
}

static void take(pool* from, size_t n) {
  from->taken += n;
  if (from->taken > from->taken_high) from->taken_high = from->taken;
}

/* Find a spare block: the stream knows of its release (REUSE_FOLLOW_EVENT_DEPENDENCIES), or that is
 * finished (REUSE_ALLOW_OPPORTUNISTIC). During a capture, memory belongs to the graph. */
static block* find_spare(int number, size_t n, int s) {
  if (capture_state(s) == ACTIVE) return NULL;
  for (int i = 0; i < n_blocks; i++) {
    block* b = &blocks[i];
    if (b->pool == number && b->spare && b->room >= n && b->room / 2 <= n &&
        (is_known(&b->given_back, &now[streams[s].actor]) || is_complete(&b->given_back)))
      return b;
  }
  return NULL;
}

/* Returns 0, 1 for no bytes, 2 for too many. */
static int take_from_pool(int number, size_t n, int s, uint64_t* address) {
  if (n == 0) return 1;
  if (n > MOST) return 2;
  step(s);
  block* b = find_spare(number, n, s);
  if (b) {
    join(&now[streams[s].actor], &b->given_back);
    b->spare = 0;
    b->alive = 1;
    b->born = ++births;
    b->high = b->low + n;
    memset(b->held, 0xA5, n);
  } else {
    if (new_block(pools[number].device, n, DEVICE) == 0) return 2;
    b = &blocks[n_blocks - 1];
    b->pool = number;
    pools[number].reserved += n;
    if (pools[number].reserved > pools[number].reserved_high)
      pools[number].reserved_high = pools[number].reserved;
  }
  take(&pools[number], b->room);
  *address = (uint64_t)(uintptr_t)b->low;
  use_memory(s, b->low, n, 1);
  return 0;
}

/* Return a block to its pool, with the clocks of that time. */
static void give_to_pool(block* b, const clocks* when) {
  b->spare = 1;
  b->high = b->low + b->room;
  clear(&b->given_back);
  join(&b->given_back, when);
  pools[b->pool].taken -= b->room;
}

static void trim(int number, size_t keep) {
  for (int i = 0; i < n_blocks && pools[number].reserved > keep; i++) {
    block* b = &blocks[i];
    if (b->pool != number || !b->spare || !is_complete(&b->given_back)) continue;
    b->spare = 0;
    pools[number].reserved -= b->room;
    returned++;
  }
}

/* "When more than the release threshold bytes of memory are held by the memory pool, the allocator
 * will try to release memory back to the OS on the next call to stream, event or context
 * synchronize." */
static void trim_all(void) {
  for (int i = 0; i < n_pools; i++)
    if (pools[i].used && pools[i].reserved > pools[i].threshold) trim(i, pools[i].threshold);
}

/* ---- host functions -------------------------------------------------------------------------- */

typedef struct {
  int stream, run;
  void (*call)(void*);
  void* data;
  clocks when;
} host_function;

/* Runs on a thread of the driver: after the stream's work, without the driver's lock. "The host
 * function must not make any CUDA API calls." */
static void* run_function(void* made) {
  host_function* self = made;
  pthread_mutex_lock(&lock);
  if (self->run != generation) full("host functions of before a reset");
  while (!is_complete(&self->when)) pthread_cond_wait(&changed, &lock);
  join(&now[host()], &self->when);
  pthread_mutex_unlock(&lock);
  in_host_function = 1;
  self->call(self->data);
  pthread_mutex_lock(&lock);
  tick(&now[host()], host());
  join(&now[streams[self->stream].actor], &now[host()]);
  streams[self->stream].running--;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  clear(&self->when);
  free(self);
  return NULL;
}

/* Waiting for a stream includes its host functions. Returns 1 if they do not end: they wait for
 * something that the caller holds, such as the GIL. */
static int wait_for_functions(int s) {
  struct timespec end = after_seconds(patience());
  while (streams[s].running && is_complete(&now[streams[s].actor]))
    if (!wait_a_while(&end)) {
      misuses++;
      complain("a host function of s%d waits for who waits for the stream; ", s);
      return 1;
    }
  return 0;
}

#endif
